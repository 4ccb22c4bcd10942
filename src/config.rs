//! The configuration file: TOML, every key optional, unknown keys refused with their line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nri_lease_state::name::PluginIndex;
use serde::{Deserialize, Deserializer};

/// Everything that can be configured, with its defaults.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    pub runtime: Runtime,
    pub leases: Leases,
    pub enforcement: Enforcement,
    pub exempt: Exempt,
    /// Who may register which names. None: uid 0, any name.
    pub registrar: Vec<Registrar>,
    pub log: Log,
}

/// The runtimes to connect to and how we appear there.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    /// NRI sockets of the runtimes on this node.
    pub nri_sockets: Vec<PathBuf>,
    /// What the default validator has to require.
    pub plugin_name: String,
    /// 99: after every other plugin, so that each has answered, timed out or died.
    pub plugin_index: PluginIndex,
}

impl Default for Runtime {
    fn default() -> Self {
        Self {
            nri_sockets: vec!["/var/run/nri/nri.sock".into()],
            plugin_name: "nri-lease".to_owned(),
            plugin_index: PluginIndex::try_from("99").expect("99 is two digits"),
        }
    }
}

/// Limits of leases. Durations are humantime ("60s", "5m").
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Leases {
    #[serde(deserialize_with = "duration")]
    pub default_ttl: Duration,
    #[serde(deserialize_with = "duration")]
    pub min_ttl: Duration,
    #[serde(deserialize_with = "duration")]
    pub max_ttl: Duration,
    pub max_leases: usize,
    pub max_holders: usize,
    pub max_pins: usize,
    pub max_scope_rules: usize,
    /// How long a lease lives at least after a reboot, from the first synchronisation with a
    /// runtime, because plugins cannot renew while the node boots.
    #[serde(deserialize_with = "duration")]
    pub reboot_grace: Duration,
}

impl Default for Leases {
    fn default() -> Self {
        let limits = nri_lease_state::rules::Limits::default();
        Self {
            default_ttl: limits.default_ttl,
            min_ttl: limits.min_ttl,
            max_ttl: limits.max_ttl,
            max_leases: limits.max_leases,
            max_holders: limits.max_holders_per_lease,
            max_pins: limits.max_pins,
            max_scope_rules: limits.max_rules_per_scope,
            reboot_grace: limits.reboot_grace,
        }
    }
}

/// "enforce" refuses, "audit" only reports what it would refuse.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    #[default]
    Enforce,
    Audit,
}

impl Mode {
    /// As in the configuration file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Audit => "audit",
        }
    }
}

/// Whether sandboxes are refused.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum SandboxEnforcement {
    /// Where the runtime is known to clean up after a refused sandbox.
    #[default]
    Auto,
    Always,
    /// Never; the sandbox starts, is marked unvetted, and its containers wait.
    Never,
}

/// Whether containers may start in a sandbox that a required plugin has missed, once it is back.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum UnvettedSandboxes {
    #[default]
    Allow,
    Reject,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Enforcement {
    pub mode: Mode,
    pub sandbox: SandboxEnforcement,
    pub unvetted_sandboxes: UnvettedSandboxes,
    /// Enforce `required-plugins.noderesource.dev` annotations.
    pub required_plugins_annotation: bool,
}

impl Default for Enforcement {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            sandbox: SandboxEnforcement::default(),
            unvetted_sandboxes: UnvettedSandboxes::default(),
            required_plugins_annotation: true,
        }
    }
}

/// What always passes, so that a node never locks itself out.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Exempt {
    pub static_pods: bool,
    /// Globs.
    pub namespaces: Vec<String>,
    /// A Kubernetes label selector; empty exempts nothing.
    pub pod_labels: String,
    /// Globs.
    pub runtime_handlers: Vec<String>,
    pub toleration_annotation: String,
    /// Where the annotation is honoured.
    pub toleration_namespaces: Vec<String>,
}

impl Default for Exempt {
    fn default() -> Self {
        Self {
            static_pods: true,
            namespaces: Vec::new(),
            pod_labels: String::new(),
            runtime_handlers: Vec::new(),
            toleration_annotation: "tolerate-missing-plugins.noderesource.dev".to_owned(),
            toleration_namespaces: vec!["kube-system".to_owned()],
        }
    }
}

/// One permission to register.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registrar {
    /// Glob on plugin names.
    pub plugin: String,
    /// Any of these uids.
    pub uids: Vec<u32>,
    /// Kubernetes namespaces the caller's pod may be in; none: any, and the host.
    #[serde(default)]
    pub namespaces: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    pub format: LogFormat,
    /// A tracing filter: "info", "debug", "nri_lease::nri=trace,info".
    pub level: String,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::default(),
            level: "info".to_owned(),
        }
    }
}

/// Bytes of `sun_path` without its closing zero.
const MAX_SOCKET_PATH: usize = 107;

impl Runtime {
    /// Without those that are another name of one before them (`/var/run` is a link to `/run`): a
    /// runtime that is served twice would not know which of the two sessions a plugin belongs to.
    pub fn distinct_sockets(&self) -> Vec<PathBuf> {
        let mut real = Vec::new();
        let mut distinct = Vec::new();
        for socket in &self.nri_sockets {
            let name = real_path(socket);
            if real.contains(&name) {
                tracing::warn!(socket = %socket.display(), "is another name of a socket before it; left out");
            } else {
                real.push(name);
                distinct.push(socket.clone());
            }
        }
        distinct
    }
}

/// The path with links resolved, as far as it exists.
fn real_path(path: &Path) -> PathBuf {
    for ancestor in path.ancestors() {
        if let Ok(real) = ancestor.canonicalize() {
            let rest = path.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return match rest.as_os_str().is_empty() {
                true => real,
                false => real.join(rest),
            };
        }
    }
    path.to_owned()
}

/// Why a configuration was refused; the text names the file, the key and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path}: {message}")]
    Parse { path: PathBuf, message: String },
    #[error("{path}: {key}: {problem}")]
    Value {
        path: PathBuf,
        key: String,
        problem: String,
    },
}

impl Config {
    /// Reads `path`; a missing file is the default configuration unless it was asked for by name.
    pub fn load(path: &Path, must_exist: bool) -> Result<Self, ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !must_exist => {
                String::new()
            }
            Err(source) => {
                return Err(ConfigError::Read {
                    path: path.to_owned(),
                    source,
                });
            }
        };
        Self::parse(&text, path)
    }

    /// Parses `text`; `path` is for messages only.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| ConfigError::Parse {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
        config
            .check()
            .map_err(|(key, problem)| ConfigError::Value {
                path: path.to_owned(),
                key: key.to_owned(),
                problem,
            })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.runtime.nri_sockets.is_empty() {
            return Err((
                "runtime.nri_sockets",
                "name at least one NRI socket".to_owned(),
            ));
        }
        for socket in &self.runtime.nri_sockets {
            let problem = if !socket.is_absolute() {
                "is not an absolute path"
            } else if socket.as_os_str().len() > MAX_SOCKET_PATH {
                "is longer than the 107 bytes that a socket's path may have"
            } else {
                continue;
            };
            let socket = socket.display();
            return Err(("runtime.nri_sockets", format!("{socket:?} {problem}")));
        }
        nri_lease_state::name::PluginName::try_from(self.runtime.plugin_name.as_str())
            .map_err(|error| ("runtime.plugin_name", error.to_string()))?;
        let leases = &self.leases;
        if leases.min_ttl.is_zero() {
            return Err(("leases.min_ttl", "must be more than 0".to_owned()));
        }
        if leases.min_ttl > leases.max_ttl {
            return Err((
                "leases.min_ttl",
                "must not be more than leases.max_ttl".to_owned(),
            ));
        }
        if !(leases.min_ttl..=leases.max_ttl).contains(&leases.default_ttl) {
            return Err((
                "leases.default_ttl",
                "must be between leases.min_ttl and leases.max_ttl".to_owned(),
            ));
        }
        for registrar in &self.registrar {
            globset::Glob::new(&registrar.plugin).map_err(|error| {
                let problem = format!(
                    "{:?} is no glob on plugin names: {}",
                    registrar.plugin,
                    error.kind()
                );
                ("registrar.plugin", problem)
            })?;
        }
        let mut counts = BTreeMap::new();
        counts.insert("leases.max_leases", leases.max_leases);
        counts.insert("leases.max_holders", leases.max_holders);
        for (key, count) in counts {
            if count == 0 {
                return Err((key, "must be at least 1".to_owned()));
            }
        }
        Ok(())
    }
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| {
        serde::de::Error::custom(format!(
            "{text:?} is no duration ({error}); write for example \"90s\" or \"5m\""
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("config.toml"))
    }

    #[test]
    fn a_runtime_with_two_names_is_served_once() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("run")).unwrap();
        std::os::unix::fs::symlink("run", dir.path().join("var-run")).unwrap();
        // Neither the socket nor its directory exists yet.
        let sockets = ["run/nri/nri.sock", "var-run/nri/nri.sock", "run/other.sock"];
        let runtime = Runtime {
            nri_sockets: sockets.iter().map(|s| dir.path().join(s)).collect(),
            ..Runtime::default()
        };
        let distinct = runtime.distinct_sockets();
        assert_eq!(
            distinct,
            [&sockets[0], &sockets[2]].map(|s| dir.path().join(s))
        );
    }

    #[test]
    fn an_empty_file_is_the_default() {
        let config = parse("").unwrap();
        assert_eq!(config.leases.default_ttl, Duration::from_secs(60));
        assert_eq!(config.runtime.plugin_name, "nri-lease");
        assert!(config.exempt.static_pods);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let error = parse("[leases]\ndefault_tll = \"5s\"\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("default_tll"), "{error}");
        assert!(error.contains("line 2"), "{error}");
    }

    #[test]
    fn a_bad_value_is_named_with_the_remedy() {
        let error = parse("[leases]\ndefault_ttl = \"soon\"\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("\"90s\""), "{error}");
        let error = parse("[leases]\ndefault_ttl = \"2s\"\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("leases.default_ttl"), "{error}");
        let error = parse("[runtime]\nnri_sockets = []\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("runtime.nri_sockets"), "{error}");
    }
}

//! What is stored: one versioned JSON object per lease, pin, ban, pause and sandbox.
//!
//! Nothing about how or where it is stored. A record of a newer minor version is read and what is
//! unknown in it left out; one of a newer major version is an error that says so. A field that
//! changes what is enforced when an older daemon leaves it out (a new field of a scope) therefore
//! needs a new major version.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::name::{PluginIndex, PluginName, PodUid};
use crate::process::HolderFacts;
use crate::scope::Scope;
pub use crate::store::Tree;
use crate::time::{Deadline, Ttl, WallTime};

/// Version of the records that this code writes.
pub const VERSION: Version = Version { major: 1, minor: 0 };

/// Largest record that is decoded, in bytes. A lease with every limit exhausted stays below it.
pub const MAX_RECORD_BYTES: usize = 4 << 20;

/// `MAJOR.MINOR` of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl TryFrom<String> for Version {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let parse = || {
            let (major, minor) = text.split_once('.')?;
            Some(Self {
                major: major.parse().ok()?,
                minor: minor.parse().ok()?,
            })
        };
        parse().ok_or_else(|| format!("version {text:?} is not MAJOR.MINOR"))
    }
}

impl From<Version> for String {
    fn from(version: Version) -> String {
        version.to_string()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a lease does with a request that it covers while its plugin is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The request is rejected.
    #[default]
    Enforce,
    /// The request passes; it is logged, counted and listed.
    Audit,
}

/// What a registration asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    #[serde(rename = "ttl_ns")]
    pub ttl: Ttl,
    pub scope: Arc<Scope>,
    pub mode: Mode,
    /// None: the registration did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<PluginIndex>,
    /// NRI's event mask; None: the registration did not say; 0: all events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<i32>,
}

/// A process that registered the lease and lives, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub facts: HolderFacts,
    /// When it registered first.
    #[serde(rename = "registered_at_wall_ns")]
    pub registered_at: WallTime,
    /// With what it registered last; those of the holder whose process started last count for
    /// the lease, but the index belongs to each.
    pub settings: Settings,
}

/// The holder whose process ended last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoneHolder {
    pub pid: u32,
    #[serde(rename = "gone_at_wall_ns")]
    pub gone_at: WallTime,
}

/// A pod that hosted a holder: kept beyond the holder, so that its successor is recognised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProviderPod {
    pub namespace: String,
    pub name: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// The extra life after a reboot (rule 6), at most once between two renewals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grace {
    /// Renewed since the last reboot, or never rebooted.
    #[default]
    Unused,
    /// The node has booted and no runtime is synchronised yet: the lease counts, and its grace
    /// begins with the first Synchronize.
    Pending,
    /// Granted; the deadline includes it.
    Used,
}

/// "Plugin P is required on this node until T."
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    pub plugin: PluginName,
    /// Counts up on every change but renewals; starts at 1.
    pub generation: u64,
    /// Those that count: of the holder whose process started last.
    pub settings: Settings,
    pub deadline: Deadline,
    #[serde(rename = "registered_at_wall_ns")]
    pub registered_at: WallTime,
    #[serde(rename = "renewed_at_wall_ns")]
    pub renewed_at: WallTime,
    #[serde(default)]
    pub holders: Vec<Holder>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_holder: Option<GoneHolder>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub providers: Vec<ProviderPod>,
    #[serde(default)]
    pub grace: Grace,
}

/// "This pod requires this plugin", whatever the scope of its lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinRecord {
    pub plugin: PluginName,
    pub pod_uid: PodUid,
    #[serde(rename = "ttl_ns")]
    pub ttl: Ttl,
    pub deadline: Deadline,
    #[serde(rename = "pinned_at_wall_ns")]
    pub pinned_at: WallTime,
    /// NRI socket of the runtime that had the pod. A pin is made before its pod exists, so only a
    /// pod that was seen once can be missed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_on: Option<String>,
}

/// Registrations of a name are refused until a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BanRecord {
    pub plugin: PluginName,
    #[serde(rename = "duration_ns")]
    pub duration: Ttl,
    pub deadline: Deadline,
    pub reason: String,
    pub set_by_uid: u32,
    #[serde(rename = "set_at_wall_ns")]
    pub set_at: WallTime,
}

/// Enforcement is suspended until a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseRecord {
    #[serde(rename = "duration_ns")]
    pub duration: Ttl,
    pub deadline: Deadline,
    pub reason: String,
    pub set_by_uid: u32,
    #[serde(rename = "paused_at_wall_ns")]
    pub paused_at: WallTime,
}

/// A sandbox that the daemon knows, and the plugins that may have missed its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxRecord {
    /// The runtime's id.
    pub sandbox_id: String,
    /// NRI socket of the runtime.
    pub runtime: String,
    pub pod_namespace: String,
    pub pod_name: String,
    /// None: the runtime gave none, or not a valid one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<PodUid>,
    #[serde(rename = "appeared_at_wall_ns")]
    pub appeared_at: WallTime,
    /// Why each may have missed it. Empty: the sandbox is vetted.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unvetted: BTreeMap<PluginName, String>,
}

/// What the daemon remembers about itself.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MetaRecord {
    /// NRI sockets of the runtimes that it was synchronised with once: what is found on another
    /// one at first contact is grandfathered.
    #[serde(default)]
    pub contacted_runtimes: BTreeSet<String>,
}

impl fmt::Display for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Key of the pause in [`Tree::Control`].
pub const PAUSE_KEY: &str = "pause";
/// Key of the [`MetaRecord`] in [`Tree::Meta`].
pub const META_KEY: &str = "daemon";

/// Where one record is kept. Keys: plugin; `POD_UID/PLUGIN`; plugin; `pause`; sandbox id; `daemon`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordKey {
    pub tree: Tree,
    pub key: String,
}

impl RecordKey {
    pub fn lease(plugin: &PluginName) -> Self {
        Self::new(Tree::Leases, plugin.to_string())
    }

    pub fn pin(pod_uid: &PodUid, plugin: &PluginName) -> Self {
        // Neither has a slash.
        Self::new(Tree::Pins, format!("{pod_uid}/{plugin}"))
    }

    pub fn ban(plugin: &PluginName) -> Self {
        Self::new(Tree::Bans, plugin.to_string())
    }

    pub fn pause() -> Self {
        Self::new(Tree::Control, PAUSE_KEY.to_owned())
    }

    pub fn sandbox(sandbox_id: &str) -> Self {
        Self::new(Tree::Sandboxes, sandbox_id.to_owned())
    }

    pub fn meta() -> Self {
        Self::new(Tree::Meta, META_KEY.to_owned())
    }

    fn new(tree: Tree, key: String) -> Self {
        Self { tree, key }
    }
}

impl fmt::Display for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tree, self.key)
    }
}

/// Any record; cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    Lease(Arc<LeaseRecord>),
    Pin(Arc<PinRecord>),
    Ban(Arc<BanRecord>),
    Pause(Arc<PauseRecord>),
    Sandbox(Arc<SandboxRecord>),
    Meta(Arc<MetaRecord>),
}

/// Why stored bytes are not a record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("it has {0} bytes, at most {MAX_RECORD_BYTES} are read")]
    TooLarge(usize),
    #[error("it is not a record: {0}")]
    Malformed(#[from] serde_json::Error),
    #[error(
        "it was written by a newer release (record version {found}, this one reads {VERSION}): start that release again, or remove the record"
    )]
    NewerVersion { found: Version },
    #[error("it is kept under the key {expected:?} but says it belongs to {found:?}")]
    WrongKey { expected: String, found: String },
}

#[derive(Deserialize)]
struct VersionOnly {
    version: Version,
}

#[derive(Serialize)]
struct Versioned<'a, T> {
    version: Version,
    #[serde(flatten)]
    record: &'a T,
}

fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(&Versioned {
        version: VERSION,
        record,
    })
    .expect("records are structs of numbers, strings and string-keyed maps, which JSON can hold")
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<Arc<T>, RecordError> {
    let VersionOnly { version } = serde_json::from_slice(bytes)?;
    if version.major > VERSION.major {
        return Err(RecordError::NewerVersion { found: version });
    }
    Ok(Arc::new(serde_json::from_slice(bytes)?))
}

impl Record {
    /// Where it is kept.
    pub fn key(&self) -> RecordKey {
        match self {
            Record::Lease(record) => RecordKey::lease(&record.plugin),
            Record::Pin(record) => RecordKey::pin(&record.pod_uid, &record.plugin),
            Record::Ban(record) => RecordKey::ban(&record.plugin),
            Record::Pause(_) => RecordKey::pause(),
            Record::Sandbox(record) => RecordKey::sandbox(&record.sandbox_id),
            Record::Meta(_) => RecordKey::meta(),
        }
    }

    /// The stored form: a JSON object with its version.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Record::Lease(record) => encode(record.as_ref()),
            Record::Pin(record) => encode(record.as_ref()),
            Record::Ban(record) => encode(record.as_ref()),
            Record::Pause(record) => encode(record.as_ref()),
            Record::Sandbox(record) => encode(record.as_ref()),
            Record::Meta(record) => encode(record.as_ref()),
        }
    }

    /// # Errors
    /// Not JSON, not a record, of a newer major version, or kept under another record's key.
    pub fn decode(key: &RecordKey, bytes: &[u8]) -> Result<Self, RecordError> {
        if bytes.len() > MAX_RECORD_BYTES {
            return Err(RecordError::TooLarge(bytes.len()));
        }
        let record = match key.tree {
            Tree::Leases => Record::Lease(decode(bytes)?),
            Tree::Pins => Record::Pin(decode(bytes)?),
            Tree::Bans => Record::Ban(decode(bytes)?),
            Tree::Control => Record::Pause(decode(bytes)?),
            Tree::Sandboxes => Record::Sandbox(decode(bytes)?),
            Tree::Meta => Record::Meta(decode(bytes)?),
        };
        let found = record.key();
        if found != *key {
            return Err(RecordError::WrongKey {
                expected: key.key.clone(),
                found: found.key,
            });
        }
        Ok(record)
    }
}

//! What a single argument may look like. Parsed once, here; the daemon checks its own limits.

use std::time::Duration;

use clap::ValueEnum;
use nri_lease_proto::lease::types;

/// `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Reject what the lease covers while the plugin is missing.
    Enforce,
    /// Let it pass, but log, count and list it.
    Audit,
}

impl From<Mode> for types::Mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Enforce => types::Mode::MODE_ENFORCE,
            Mode::Audit => types::Mode::MODE_AUDIT,
        }
    }
}

/// A duration above zero, as humantime reads it. Zero is refused because the protocol takes it as
/// "lift the ban" and "resume", which have commands of their own.
pub fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write it like 90s, 5m or 1h"))?;
    match duration.is_zero() {
        true => Err("must be longer than zero".to_string()),
        false => Ok(duration),
    }
}

/// An NRI base name without the index: `[a-zA-Z0-9_.+-]+`, at most 128 bytes.
pub fn plugin(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "_.+-".contains(c);
    match text {
        "" => Err("a plugin name must not be empty".to_string()),
        _ if text.len() > 128 => Err("a plugin name has at most 128 bytes".to_string()),
        _ if !text.chars().all(allowed) => {
            Err("a plugin name has only letters, digits and _ . + -".to_string())
        }
        _ => Ok(text.to_string()),
    }
}

/// Kubernetes' uid of a pod: at most 128 bytes without spaces or control characters.
pub fn pod_uid(text: &str) -> Result<String, String> {
    match text {
        "" => Err("a pod uid must not be empty".to_string()),
        _ if text.len() > 128 => Err("a pod uid has at most 128 bytes".to_string()),
        _ if !text.chars().all(|c| c.is_ascii_graphic() && c != '/') => Err(
            "a pod uid has no spaces or slashes; see kubectl get pod NAME -o \
             jsonpath={.metadata.uid}"
                .to_string(),
        ),
        _ => Ok(text.to_string()),
    }
}

/// An NRI index: two digits.
pub fn index(text: &str) -> Result<String, String> {
    match text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => Ok(text.to_string()),
        false => Err("an NRI index is two digits, such as 10".to_string()),
    }
}

/// A process id.
pub fn pid(text: &str) -> Result<i32, String> {
    match text.parse::<i32>() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => Err("a pid is a number above 0".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zero_duration_is_refused() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert!(duration("0s").is_err());
        assert!(duration("soon").is_err());
    }

    #[test]
    fn plugin_names_are_those_of_nri() {
        assert!(plugin("dra.net").is_ok());
        assert!(plugin("a_b+c-9").is_ok());
        for wrong in ["", "a b", "a/b", "é", "a\u{1b}"] {
            assert!(plugin(wrong).is_err(), "{wrong:?}");
        }
        assert!(plugin(&"a".repeat(129)).is_err());
    }

    #[test]
    fn an_index_has_two_digits() {
        assert!(index("07").is_ok());
        assert!(index("7").is_err() && index("007").is_err() && index("+7").is_err());
    }
}

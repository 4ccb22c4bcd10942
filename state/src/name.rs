//! Names that come from outside: of plugins, of pods, of an NRI index.
//!
//! Parsed once, at the edge; a value of these types is valid. Cloning is cheap.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Longest plugin name and longest pod uid, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// Why a text is not a name. The message names the field and says what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("{field} is empty: give {wanted}")]
    Empty {
        field: &'static str,
        wanted: &'static str,
    },
    #[error("{field} has {bytes} bytes, at most {MAX_NAME_BYTES} are allowed: give {wanted}")]
    TooLong {
        field: &'static str,
        bytes: usize,
        wanted: &'static str,
    },
    #[error("{field} has a character that is not allowed ({found:?}): give {wanted}")]
    Character {
        field: &'static str,
        found: char,
        wanted: &'static str,
    },
    #[error(
        "index {found:?} is not two digits: give the index of the plugin at the runtime, like \"10\""
    )]
    Index { found: String },
}

const PLUGIN_WANTED: &str =
    "the NRI base name without the index, 1 to 128 of [a-zA-Z0-9_.+-], like \"dra.net\"";
const POD_UID_WANTED: &str = "the pod's metadata.uid, 1 to 128 of [a-zA-Z0-9._-]";

fn check(
    text: &str,
    field: &'static str,
    wanted: &'static str,
    extra: &str,
) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty { field, wanted });
    }
    if text.len() > MAX_NAME_BYTES {
        return Err(NameError::TooLong {
            field,
            bytes: text.len(),
            wanted,
        });
    }
    match text
        .chars()
        .find(|c| !c.is_ascii_alphanumeric() && !extra.contains(*c))
    {
        Some(found) => Err(NameError::Character {
            field,
            found,
            wanted,
        }),
        None => Ok(()),
    }
}

macro_rules! name_type {
    ($type:ident, $field:literal, $wanted:ident, $extra:literal) => {
        impl $type {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<&str> for $type {
            type Error = NameError;

            fn try_from(text: &str) -> Result<Self, NameError> {
                check(text, $field, $wanted, $extra)?;
                Ok(Self(Arc::from(text)))
            }
        }

        impl TryFrom<String> for $type {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                Self::try_from(text.as_str())
            }
        }

        impl std::str::FromStr for $type {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::try_from(text)
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> String {
                name.0.as_ref().to_owned()
            }
        }

        // Lets maps that are keyed by the type be asked with a `&str`, without an allocation.
        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $type {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

/// NRI base name of a plugin, without its index: `[a-zA-Z0-9_.+-]+`, at most 128 bytes (the
/// characters are those of NRI's `CheckPluginName`).
///
/// ```
/// use nri_lease_state::PluginName;
/// assert!(PluginName::try_from("dra.net").is_ok());
/// assert!(PluginName::try_from("dra/net").is_err());
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PluginName(Arc<str>);

/// Kubernetes' uid of a pod: 1 to 128 bytes of `[a-zA-Z0-9._-]` (a uid is an UUID normally; static
/// pods have a hash).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PodUid(Arc<str>);

name_type!(PluginName, "plugin", PLUGIN_WANTED, "_.+-");
name_type!(PodUid, "pod_uid", POD_UID_WANTED, "._-");

/// NRI index of a plugin: two digits. Plugins are called in its order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PluginIndex(u8);

impl PluginIndex {
    /// 0 to 99.
    pub fn number(self) -> u8 {
        self.0
    }
}

impl TryFrom<&str> for PluginIndex {
    type Error = NameError;

    fn try_from(text: &str) -> Result<Self, NameError> {
        match text.as_bytes() {
            [tens @ b'0'..=b'9', ones @ b'0'..=b'9'] => {
                Ok(Self((tens - b'0') * 10 + (ones - b'0')))
            }
            _ => Err(NameError::Index {
                found: text.chars().take(16).collect(),
            }),
        }
    }
}

impl TryFrom<String> for PluginIndex {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        Self::try_from(text.as_str())
    }
}

impl From<PluginIndex> for String {
    fn from(index: PluginIndex) -> String {
        index.to_string()
    }
}

impl fmt::Display for PluginIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}", self.0)
    }
}

impl fmt::Debug for PluginIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_names_are_those_nri_accepts() {
        for good in ["dra.net", "a", "A_b-c+1.2", &"x".repeat(128)] {
            assert_eq!(PluginName::try_from(good).unwrap().as_str(), good);
        }
        for bad in ["", "a b", "a/b", "ä", "a\n", &"x".repeat(129)] {
            let error = PluginName::try_from(bad).unwrap_err().to_string();
            assert!(error.starts_with("plugin "), "{error}");
            assert!(error.contains("[a-zA-Z0-9_.+-]"), "{error}");
        }
    }

    #[test]
    fn pod_uids_refuse_what_could_not_be_one() {
        assert!(PodUid::try_from("0b5f1d6e-2a54-4f0e-9b7e-1f5f6c0d2a11").is_ok());
        for bad in ["", "a/b", "../x", "a b", &"u".repeat(129)] {
            assert!(PodUid::try_from(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_index_is_two_digits() {
        assert_eq!(PluginIndex::try_from("07").unwrap().number(), 7);
        assert_eq!(PluginIndex::try_from("07").unwrap().to_string(), "07");
        for bad in ["", "7", "007", "a1", "-1", "１２"] {
            assert!(PluginIndex::try_from(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn stored_names_are_checked_again() {
        assert!(serde_json::from_str::<PluginName>("\"a/b\"").is_err());
        let name: PluginName = serde_json::from_str("\"dra.net\"").unwrap();
        assert_eq!(serde_json::to_string(&name).unwrap(), "\"dra.net\"");
    }
}

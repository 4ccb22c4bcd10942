//! The copy of everything in memory. It is the truth: the database is rebuilt from it after a
//! failure and `leases.json` is written from it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Tree;
use super::digest::Digest;

/// Which value is meant.
pub(super) type Key = (Tree, Arc<str>);
/// JSON text; shared, so that a snapshot of all values costs no copy.
pub(super) type Value = Arc<[u8]>;
/// What becomes of each key; `None` removes it.
pub(super) type Changes = BTreeMap<Key, Option<Value>>;

/// All values, and the number of the last barrier they reflect. The number is kept in the database
/// and in the mirror: a database that is behind the mirror has lost something.
#[derive(Clone, Debug, Default)]
pub(super) struct Contents {
    pub records: BTreeMap<Key, Value>,
    pub sequence: u64,
    digest: Digest,
}

impl Contents {
    /// What all values add up to once `changes` are applied.
    pub fn digest_after(&self, changes: &Changes) -> Digest {
        let mut digest = self.digest;
        for (key, value) in changes {
            if let Some(old) = self.records.get(key) {
                digest.remove(key, old);
            }
            if let Some(new) = value {
                digest.add(key, new);
            }
        }
        digest
    }

    pub fn apply(&mut self, changes: Changes) {
        self.digest = self.digest_after(&changes);
        for (key, value) in changes {
            match value {
                Some(value) => self.records.insert(key, value),
                None => self.records.remove(&key),
            };
        }
    }

    /// Contents with these values.
    pub fn new(sequence: u64, records: impl IntoIterator<Item = (Key, Value)>) -> Contents {
        let mut contents = Contents {
            sequence,
            ..Contents::default()
        };
        let all = records.into_iter().map(|(key, value)| (key, Some(value)));
        contents.apply(all.collect());
        contents
    }

    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Everything, as the changes that write it into an empty database.
    pub fn as_changes(&self) -> Changes {
        self.records
            .iter()
            .map(|(key, value)| (key.clone(), Some(Arc::clone(value))))
            .collect()
    }

    /// Only what the mirror holds: what is worth reading in a year.
    pub fn mirrored(&self) -> Contents {
        let records = self
            .records
            .iter()
            .filter(|((tree, _), _)| tree.is_mirrored())
            .map(|(key, value)| (key.clone(), Arc::clone(value)));
        Contents::new(self.sequence, records)
    }
}

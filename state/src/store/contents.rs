//! The copy of everything in memory. It is the truth: the database is rebuilt from it after a
//! failure and `leases.json` is written from it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Tree;

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
}

impl Contents {
    pub fn apply(&mut self, changes: Changes) {
        for (key, value) in changes {
            match value {
                Some(value) => self.records.insert(key, value),
                None => self.records.remove(&key),
            };
        }
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
            .map(|(key, value)| (key.clone(), Arc::clone(value)))
            .collect();
        Contents {
            records,
            sequence: self.sequence,
        }
    }
}

//! One number for all values. sled checks every page it reads, but a page whose newest part is
//! unreadable is read as it was before (found by damaging files): the sum finds that.

use super::contents::Key;

/// The sum of the hashes of all values with their keys, so that one change costs one addition.
/// Against accidents, not against forgery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Digest(pub u64);

impl Digest {
    pub fn add(&mut self, key: &Key, value: &[u8]) {
        self.0 = self.0.wrapping_add(hash(key, value));
    }

    pub fn remove(&mut self, key: &Key, value: &[u8]) {
        self.0 = self.0.wrapping_sub(hash(key, value));
    }
}

/// FNV-1a, which is the same for ever, with the finish of MurmurHash3 so that sums do not cancel.
fn hash((tree, key): &Key, value: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut eat = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for part in [tree.name().as_bytes(), key.as_bytes(), value] {
        eat(&(part.len() as u64).to_le_bytes());
        eat(part);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

//! Asks the kernel about one unix socket (NETLINK_SOCK_DIAG, exact query).
use serde::{Deserialize, Serialize};

/// A socket file as unix_diag encodes it: the kernel's own dev_t and the low 32 bits of the
/// inode. Only to be compared with another answer of unix_diag, never with stat(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VfsId {
    pub dev: u32,
    pub ino: u32,
}

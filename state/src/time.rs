//! Time as it is passed in: two clocks and the boot they belong to.
//!
//! Deadlines count on CLOCK_BOOTTIME, which runs through suspend and ignores steps of the wall
//! clock, but starts again at every boot. The wall clock only bridges reboots and is shown to
//! people. All arithmetic saturates: a wild clock makes no panic.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

fn saturating_ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds of CLOCK_BOOTTIME, since this boot.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Boottime(pub u64);

impl Boottime {
    /// This much later, at most the end of time.
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(saturating_ns(duration)))
    }

    /// How long after `earlier` this is; zero when it is not after it.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Nanoseconds of CLOCK_REALTIME since 1970-01-01 UTC.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct WallTime(pub i64);

impl WallTime {
    /// This much later, at most the end of time.
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add_unsigned(saturating_ns(duration)))
    }

    /// This much earlier.
    pub fn minus(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub_unsigned(saturating_ns(duration)))
    }

    /// How long after `earlier` this is; zero when it is not after it.
    pub fn since(self, earlier: Self) -> Duration {
        if self.0 <= earlier.0 {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.0.abs_diff(earlier.0))
    }
}

/// `/proc/sys/kernel/random/boot_id`: which boot a [`Boottime`] belongs to.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct BootId(Arc<str>);

impl BootId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for BootId {
    fn from(text: &str) -> Self {
        Self(Arc::from(text.trim()))
    }
}

impl From<String> for BootId {
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<BootId> for String {
    fn from(id: BootId) -> String {
        id.0.as_ref().to_owned()
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// How long a lease or a pin lives after a renewal: more than zero, at most [`Ttl::MAX`]. The
/// node's own bounds are in [`crate::rules::Limits`] and are checked by the rules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Ttl(Duration);

/// Not a TTL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TtlError {
    #[error("ttl is 0: give a positive duration, or leave it out for the default")]
    Zero,
    #[error("ttl of {0:?} is longer than 365 days")]
    TooLong(Duration),
}

impl Ttl {
    /// 365 days.
    pub const MAX: Duration = Duration::from_secs(365 * 24 * 3600);

    /// # Errors
    /// Zero, or more than [`Ttl::MAX`].
    pub fn new(duration: Duration) -> Result<Self, TtlError> {
        if duration.is_zero() {
            Err(TtlError::Zero)
        } else if duration > Self::MAX {
            Err(TtlError::TooLong(duration))
        } else {
            Ok(Self(duration))
        }
    }

    /// For configured and default values: what is out of range becomes the nearest bound.
    pub fn clamped(duration: Duration) -> Self {
        Self(duration.clamp(Duration::from_nanos(1), Self::MAX))
    }

    pub fn get(self) -> Duration {
        self.0
    }
}

impl TryFrom<Duration> for Ttl {
    type Error = TtlError;

    fn try_from(duration: Duration) -> Result<Self, TtlError> {
        Self::new(duration)
    }
}

/// Stored as nanoseconds.
impl TryFrom<u64> for Ttl {
    type Error = TtlError;

    fn try_from(ns: u64) -> Result<Self, TtlError> {
        Self::new(Duration::from_nanos(ns))
    }
}

impl From<Ttl> for u64 {
    fn from(ttl: Ttl) -> u64 {
        saturating_ns(ttl.0)
    }
}

impl fmt::Debug for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// One reading of both clocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Now {
    pub boottime: Boottime,
    pub wall: WallTime,
    pub boot_id: BootId,
}

impl Now {
    /// When the wall clock will show that `deadline` is reached, if nobody steps it.
    pub fn wall_at(&self, deadline: Boottime) -> WallTime {
        if deadline >= self.boottime {
            self.wall.plus(deadline.since(self.boottime))
        } else {
            self.wall.minus(self.boottime.since(deadline))
        }
    }

    /// Time left until `deadline`; zero when it has passed.
    pub fn until(&self, deadline: Boottime) -> Duration {
        deadline.since(self.boottime)
    }
}

/// A moment in the future, as it is stored: on the clock it counts on, and on the wall clock for
/// the day another boot reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    pub boot_id: BootId,
    #[serde(rename = "boottime_ns")]
    pub boottime: Boottime,
    /// Estimate of when it was set.
    #[serde(rename = "wall_ns")]
    pub wall: WallTime,
}

impl Deadline {
    /// `after` from now on.
    pub fn after(now: &Now, after: Duration) -> Self {
        Self {
            boot_id: now.boot_id.clone(),
            boottime: now.boottime.plus(after),
            wall: now.wall.plus(after),
        }
    }

    /// The time has come: at the deadline itself it no longer counts.
    pub fn passed(&self, at: Boottime) -> bool {
        at >= self.boottime
    }

    /// The same deadline in the boot of `now`: unchanged in the boot it was set in, else what the
    /// wall clock says is left, between nothing and `at_most` (rule 6).
    pub fn carried_to(&self, now: &Now, at_most: Duration) -> Self {
        if self.boot_id == now.boot_id {
            return self.clone();
        }
        Self::after(now, self.wall.since(now.wall).min(at_most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(boot: &str, boottime: u64, wall: i64) -> Now {
        Now {
            boottime: Boottime(boottime),
            wall: WallTime(wall),
            boot_id: BootId::from(boot),
        }
    }

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(
            Boottime(u64::MAX - 1).plus(Duration::MAX),
            Boottime(u64::MAX)
        );
        assert_eq!(
            WallTime(i64::MAX - 1).plus(Duration::MAX),
            WallTime(i64::MAX)
        );
        assert_eq!(
            WallTime(i64::MIN + 1).minus(Duration::MAX),
            WallTime(i64::MIN)
        );
        assert_eq!(
            WallTime(i64::MAX).since(WallTime(i64::MIN)),
            Duration::from_nanos(u64::MAX)
        );
        assert_eq!(Boottime(1).since(Boottime(5)), Duration::ZERO);
    }

    #[test]
    fn a_deadline_stands_in_its_boot_whatever_the_wall_clock_does() {
        let set = Deadline::after(&now("a", 100, 1_000), Duration::from_nanos(50));
        let later = now("a", 120, -9_000);
        assert_eq!(set.carried_to(&later, Duration::ZERO), set);
        assert!(!set.passed(Boottime(149)));
        assert!(set.passed(Boottime(150)));
    }

    #[test]
    fn another_boot_takes_what_is_left_from_the_wall_clock_within_bounds() {
        let set = Deadline::after(&now("a", 100, 1_000), Duration::from_nanos(50));
        let at_most = Duration::from_nanos(60);
        let left = |wall| {
            let now = now("b", 7, wall);
            now.until(set.carried_to(&now, at_most).boottime).as_nanos()
        };
        assert_eq!(left(1_020), 30);
        assert_eq!(left(2_000), 0);
        assert_eq!(left(0), 60);
    }

    #[test]
    fn a_ttl_is_positive_and_bounded() {
        assert_eq!(Ttl::new(Duration::ZERO), Err(TtlError::Zero));
        assert!(Ttl::new(Ttl::MAX + Duration::from_nanos(1)).is_err());
        assert!(Ttl::new(Ttl::MAX).is_ok());
    }
}

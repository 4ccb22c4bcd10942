//! The limits of rule 9, as configured.

use std::time::Duration;

use crate::scope::MAX_RULES;

/// Every limit and default that the rules know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    pub default_ttl: Duration,
    pub min_ttl: Duration,
    pub max_ttl: Duration,
    /// For a pin that names none; bounded by `max_ttl`.
    pub default_pin_ttl: Duration,
    pub max_leases: usize,
    pub max_holders_per_lease: usize,
    pub max_pins: usize,
    pub max_bans: usize,
    pub max_rules_per_scope: usize,
    pub max_sandboxes: usize,
    /// Runtimes whose first contact is remembered.
    pub max_runtimes: usize,
    /// Provider pods that one lease remembers; the oldest is forgotten.
    pub max_providers_per_lease: usize,
    /// A lease lives at least this long after the first Synchronize of a boot.
    pub reboot_grace: Duration,
    pub min_ban: Duration,
    pub max_ban: Duration,
    pub min_pause: Duration,
    pub max_pause: Duration,
    /// Of a ban or a pause, in bytes.
    pub max_reason_bytes: usize,
    /// Bounds what one tick writes when many leases and pins end at once.
    pub max_expired_per_tick: usize,
}

impl Default for Limits {
    fn default() -> Self {
        const HOUR: u64 = 3600;
        Self {
            default_ttl: Duration::from_secs(60),
            min_ttl: Duration::from_secs(5),
            max_ttl: Duration::from_secs(24 * HOUR),
            default_pin_ttl: Duration::from_secs(HOUR),
            max_leases: 256,
            max_holders_per_lease: 16,
            max_pins: 4096,
            max_bans: 1024,
            max_rules_per_scope: MAX_RULES,
            max_sandboxes: 8192,
            max_runtimes: 16,
            max_providers_per_lease: 16,
            reboot_grace: Duration::from_secs(300),
            min_ban: Duration::from_secs(1),
            max_ban: Duration::from_secs(365 * 24 * HOUR),
            min_pause: Duration::from_secs(1),
            max_pause: Duration::from_secs(24 * HOUR),
            max_reason_bytes: 256,
            max_expired_per_tick: 512,
        }
    }
}

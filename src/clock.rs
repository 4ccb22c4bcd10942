//! The only place that reads clocks. The rules in `nri-lease-state` get time passed in.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::time::{ClockId as Clock, clock_gettime};
use nri_lease_state::time::{BootId, Boottime, Now, WallTime};
use tokio::io::unix::AsyncFd;

use crate::pollable::{Pollable, watched};

/// Reads CLOCK_BOOTTIME and CLOCK_REALTIME for the boot it was created in.
#[derive(Clone, Debug)]
pub struct SystemClock {
    boot_id: BootId,
}

impl SystemClock {
    /// Reads the kernel's boot id, which stays the same until the next boot.
    pub fn new() -> io::Result<Self> {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        Ok(Self {
            boot_id: BootId::from(boot_id),
        })
    }

    /// Both clocks, now.
    pub fn now(&self) -> Now {
        Now {
            boottime: boottime(),
            wall: wall_time(),
            boot_id: self.boot_id.clone(),
        }
    }
}

/// CLOCK_BOOTTIME: runs through suspend, does not know of wall-clock steps.
pub fn boottime() -> Boottime {
    let time = clock_gettime(Clock::CLOCK_BOOTTIME).unwrap_or(TimeSpec::new(0, 0));
    Boottime(time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

fn wall_time() -> WallTime {
    let time = clock_gettime(Clock::CLOCK_REALTIME).unwrap_or(TimeSpec::new(0, 0));
    WallTime(time.tv_sec() * 1_000_000_000 + time.tv_nsec())
}

/// A timer on CLOCK_BOOTTIME. tokio's own timers stop while the machine is suspended, so that a
/// deadline that passed in suspend would be noticed late.
pub struct BootTimer {
    timer: AsyncFd<Pollable<TimerFd>>,
}

impl BootTimer {
    /// A timer that is not set.
    pub fn new() -> io::Result<Self> {
        let timer = TimerFd::new(
            ClockId::CLOCK_BOOTTIME,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        )?;
        Ok(Self {
            timer: watched(timer)?,
        })
    }

    /// Fires at `deadline` (at once when it has passed), or never.
    pub fn set(&self, deadline: Option<Boottime>) -> io::Result<()> {
        let timer = &self.timer.get_ref().0;
        match deadline {
            None => timer.unset()?,
            Some(deadline) => {
                // 0 would disarm it.
                let at = Duration::from_nanos(deadline.0.max(1));
                timer.set(
                    Expiration::OneShot(TimeSpec::from_duration(at)),
                    TimerSetTimeFlags::TFD_TIMER_ABSTIME,
                )?;
            }
        }
        Ok(())
    }

    /// Waits until it fires.
    pub async fn fired(&self) -> io::Result<()> {
        loop {
            let mut guard = self.timer.readable().await?;
            let mut count = [0u8; 8];
            match guard.try_io(|timer| {
                nix::unistd::read(timer.get_ref().0.as_fd(), &mut count).map_err(Into::into)
            }) {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

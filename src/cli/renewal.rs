//! Keeps a registered lease alive: renews every TTL/3 with jitter, reconnects when the connection
//! is lost, and registers again when the daemon no longer knows the lease.
//!
//! Unary Renew rather than the KeepAlive stream: each call has its own time limit, so a daemon that
//! hangs is noticed within one interval.

use std::time::Duration;

use nri_lease_proto::lease::registry::{RegisterRequest, RegisterResponse, RenewRequest};
use nri_lease_proto::lease::registry_ttrpc::RegistryClient;
use nri_lease_proto::protobuf::MessageField;
use nri_lease_proto::protobuf::well_known_types::duration::Duration as ProtoDuration;

use super::client::Daemon;
use super::complain;
use super::error::CliError;

/// When the daemon does not say how often to renew: a third of the default TTL of 60 s.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(20);
/// A call gets at least this long, however often the daemon wants renewals.
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(1);
/// First pause before another attempt; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause before another attempt. The shortest TTL is 5 s.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// One Register call.
pub async fn register(
    daemon: &Daemon,
    registry: &RegistryClient,
    request: &RegisterRequest,
) -> Result<RegisterResponse, CliError> {
    let attempt = format!("register {}", request.plugin);
    let answer = registry.register(daemon.limit(), request);
    daemon.call(&attempt, answer).await
}

/// A lease that is being kept alive.
pub struct Renewal {
    daemon: Daemon,
    request: RegisterRequest,
    interval: Duration,
}

impl Renewal {
    /// For a lease that was just registered with `request` and answered with `answer`.
    pub fn new(daemon: &Daemon, request: &RegisterRequest, answer: &RegisterResponse) -> Self {
        let interval = interval(&answer.renew_every).unwrap_or(DEFAULT_INTERVAL);
        Renewal {
            daemon: Daemon {
                // A call that hangs must not use up the TTL.
                timeout: daemon.timeout.min(interval.max(SHORTEST_TIMEOUT)),
                ..daemon.clone()
            },
            request: request.clone(),
            interval,
        }
    }

    /// Renews until the daemon refuses for good: the registration is not permitted any more, or
    /// not valid. Returns that refusal.
    pub async fn keep(mut self, mut registry: RegistryClient) -> CliError {
        loop {
            tokio::time::sleep(jittered(self.interval)).await;
            if let Err(problem) = self.renew(&registry).await {
                registry = match self.recover(problem).await {
                    Ok(registry) => registry,
                    Err(refusal) => return refusal,
                };
            }
        }
    }

    async fn renew(&mut self, registry: &RegistryClient) -> Result<(), CliError> {
        let request = RenewRequest {
            plugin: self.request.plugin.clone(),
            subject: self.request.subject.clone(),
            ..Default::default()
        };
        let attempt = format!("renew the lease of {}", request.plugin);
        let answer = registry.renew(self.daemon.limit(), &request);
        let answer = self.daemon.call(&attempt, answer).await?;
        if let Some(interval) = interval(&answer.renew_every) {
            self.interval = interval;
        }
        Ok(())
    }

    /// Connects and registers again until it works, with growing pauses. Each new problem is
    /// said once.
    async fn recover(&mut self, problem: CliError) -> Result<RegistryClient, CliError> {
        let mut said = problem.to_string();
        complain(&format!("{said}\n  Registering again."));
        let mut pause = FIRST_PAUSE;
        loop {
            match self.again().await {
                Ok(registry) => {
                    complain(&format!("{} is registered again", self.request.plugin));
                    return Ok(registry);
                }
                Err(Trouble::Final(refusal)) => return Err(refusal),
                Err(Trouble::Passing(problem)) => {
                    let problem = problem.to_string();
                    if problem != said {
                        complain(&format!("{problem}\n  Trying again."));
                        said = problem;
                    }
                }
            }
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn again(&mut self) -> Result<RegistryClient, Trouble> {
        // Even a socket that may not be opened is passing: a starting daemon creates it first and
        // sets its mode next.
        let registry = self.daemon.registry().await.map_err(Trouble::Passing)?;
        let problem = match register(&self.daemon, &registry, &self.request).await {
            Ok(answer) => {
                self.interval = interval(&answer.renew_every).unwrap_or(self.interval);
                return Ok(registry);
            }
            Err(problem @ (CliError::NotPermitted(_) | CliError::Usage(_))) => {
                return Err(Trouble::Final(problem));
            }
            Err(problem) => problem,
        };
        // A daemon that cannot write, or that bans the name while its lease lives, still renews.
        match self.renew(&registry).await {
            Ok(()) => Ok(registry),
            Err(_) => Err(Trouble::Passing(problem)),
        }
    }
}

/// Why registering again did not work.
enum Trouble {
    /// Worth another attempt.
    Passing(CliError),
    /// Another attempt would get the same answer.
    Final(CliError),
}

/// ±10%, so that plugins that started together do not renew together.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(0.9 + fastrand::f64() * 0.2)
}

/// An interval that the daemon asks for; `None` when it does not, or asks for nonsense.
fn interval(asked: &MessageField<ProtoDuration>) -> Option<Duration> {
    let asked = asked.as_ref()?;
    let seconds = u64::try_from(asked.seconds).ok()?;
    let interval = Duration::new(seconds, u32::try_from(asked.nanos).ok()?.min(999_999_999));
    Some(interval).filter(|interval| !interval.is_zero() && seconds <= 86_400)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_is_ten_percent() {
        for _ in 0..1000 {
            let jittered = jittered(Duration::from_secs(20));
            assert!((Duration::from_secs(18)..=Duration::from_secs(22)).contains(&jittered));
        }
    }

    #[test]
    fn nonsense_intervals_are_not_followed() {
        let asked = |seconds, nanos| {
            interval(&MessageField::some(ProtoDuration {
                seconds,
                nanos,
                ..Default::default()
            }))
        };
        assert_eq!(asked(20, 0), Some(Duration::from_secs(20)));
        assert_eq!(asked(0, 0), None);
        assert_eq!(asked(-1, 0), None);
        assert_eq!(asked(i64::MAX, 0), None);
        assert_eq!(interval(&MessageField::none()), None);
    }
}

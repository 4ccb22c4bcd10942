//! The promise that a commit leaves behind: awaitable, and waitable without a runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::error::CommitError;

/// Resolves to `Ok` once the writes are durable. Dropping it does not take the writes back.
#[derive(Debug)]
#[must_use = "nothing is durable before the ticket says so"]
pub struct Ticket(Arc<Shared>);

/// The other end of a [`Ticket`]. Dropped without an answer, it answers [`CommitError::Closed`].
#[derive(Debug)]
pub(super) struct Promise(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    slot: Mutex<Slot>,
    answered: Condvar,
}

#[derive(Debug, Default)]
struct Slot {
    answer: Option<Result<(), CommitError>>,
    waker: Option<Waker>,
}

impl Shared {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        // A slot is only ever assigned to, so a panic elsewhere cannot leave it half written.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, answer: Result<(), CommitError>) {
        let waker = {
            let mut slot = self.slot();
            if slot.answer.is_some() {
                return;
            }
            slot.answer = Some(answer);
            slot.waker.take()
        };
        self.answered.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Ticket {
    pub(super) fn pair() -> (Promise, Ticket) {
        let shared = Arc::new(Shared::default());
        (Promise(Arc::clone(&shared)), Ticket(shared))
    }

    /// A ticket that has failed already.
    pub(super) fn failed(error: CommitError) -> Ticket {
        let (promise, ticket) = Ticket::pair();
        promise.answer(Err(error));
        ticket
    }

    /// Waits on this thread. Not for async code: await the ticket there.
    ///
    /// # Errors
    /// As [`super::Store::commit`] says.
    pub fn wait(self) -> Result<(), CommitError> {
        let mut slot = self.0.slot();
        loop {
            if let Some(answer) = &slot.answer {
                return answer.clone();
            }
            slot = self
                .0
                .answered
                .wait(slot)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits on this thread for at most `limit`; `None` when there is no answer yet.
    pub fn wait_for(&self, limit: Duration) -> Option<Result<(), CommitError>> {
        let deadline = Instant::now() + limit;
        let mut slot = self.0.slot();
        loop {
            if let Some(answer) = &slot.answer {
                return Some(answer.clone());
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            let (next, _) = self
                .0
                .answered
                .wait_timeout(slot, left)
                .unwrap_or_else(PoisonError::into_inner);
            slot = next;
        }
    }
}

impl Future for Ticket {
    type Output = Result<(), CommitError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slot = self.0.slot();
        match &slot.answer {
            Some(answer) => Poll::Ready(answer.clone()),
            None => {
                slot.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Promise {
    pub(super) fn answer(&self, answer: Result<(), CommitError>) {
        self.0.answer(answer);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.0.answer(Err(CommitError::Closed));
    }
}

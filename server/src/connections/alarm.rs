//! Wakes requests at the end of their time. The timers of tokio have a resolution of one
//! millisecond, which is the whole time that an answer may be late. A condition variable is as
//! accurate as the system's clock, so one thread waits on it for all requests. Holds one entry for
//! each waiting request with a deadline.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// A time at which a request is woken; the number tells requests of the same time apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: Instant,
    number: u64,
}

/// Wakes requests.
#[derive(Debug, Default)]
pub struct Alarm {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    requests: BTreeMap<Due, Waker>,
    numbers: u64,
    is_over: bool,
}

impl Alarm {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes requests until [`Alarm::end`]. One thread must run this; otherwise no request is
    /// woken.
    pub fn run(&self) {
        let mut waiting = self.waiting();
        while !waiting.is_over {
            let Some(due) = waiting.requests.keys().next().copied() else {
                waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = due.at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let waker = waiting.requests.remove(&due);
                // A waker is code of the executor and must not run under the lock.
                drop(waiting);
                waker.into_iter().for_each(Waker::wake);
                waiting = self.waiting();
                continue;
            }
            let slept = self.changed.wait_timeout(waiting, left);
            waiting = slept.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends [`Alarm::run`].
    pub fn end(&self) {
        self.waiting().is_over = true;
        self.changed.notify_all();
    }

    /// Returns a future that is ready at `at`.
    pub fn sleep_until(&self, at: Instant) -> Sleep<'_> {
        Sleep { alarm: self, at, due: None }
    }
}

/// A wait until a time; dropping it removes the request from the alarm.
#[derive(Debug)]
pub struct Sleep<'a> {
    alarm: &'a Alarm,
    at: Instant,
    due: Option<Due>,
}

impl Future for Sleep<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.at {
            return Poll::Ready(());
        }
        let mut waiting = self.alarm.waiting();
        let due = self.due.unwrap_or_else(|| {
            waiting.numbers += 1;
            Due { at: self.at, number: waiting.numbers }
        });
        // At each poll, because the future may have a new waker.
        waiting.requests.insert(due, context.waker().clone());
        let is_first = waiting.requests.first_key_value().is_some_and(|(first, _)| *first == due);
        drop(waiting);

        let is_new = self.due.replace(due).is_none();
        // The thread sleeps until the first time of all. Only an earlier one must wake it.
        if is_first && is_new {
            self.alarm.changed.notify_one();
        }
        Poll::Pending
    }
}

impl Drop for Sleep<'_> {
    fn drop(&mut self) {
        if let Some(due) = self.due {
            self.alarm.waiting().requests.remove(&due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::pin::pin;
    use std::time::Duration;
    use tokio::runtime::Builder;

    #[test]
    fn requests_are_woken_at_their_times_and_leave_nothing_behind() {
        let (alarm, start) = (Alarm::default(), Instant::now());
        let block_on = |ms: u64, is_given_up: bool| {
            let at = start + Duration::from_millis(ms);
            let mut sleep = pin!(alarm.sleep_until(at));
            Builder::new_current_thread().build().unwrap().block_on(poll_fn(|context| {
                let slept = sleep.as_mut().poll(context);
                assert!(slept.is_pending() || Instant::now() >= at);
                if is_given_up { Poll::Ready(()) } else { slept }
            }));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| alarm.run());
            scope.spawn(|| block_on(3_600_000, true));
            // The later time is registered first.
            let later = scope.spawn(|| block_on(40, false));
            block_on(20, false);
            block_on(60, false);
            block_on(0, false);
            later.join().unwrap();
            alarm.end();
        });
        assert!(alarm.waiting().requests.is_empty());
    }
}

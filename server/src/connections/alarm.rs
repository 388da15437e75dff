//! Wakes a request at the end of its time. The timers of tokio have a resolution of one
//! millisecond, which is the whole time that an answer may be late. Those of the kernel are as
//! accurate as the system's clock. A request has one only while it waits with a deadline.

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use std::io;
use std::time::{Duration, Instant};
use tokio::net::unix::pipe::Receiver;

/// Waits until `at`.
pub async fn sleep_until(at: Instant) {
    match timer(at) {
        Ok(timer) => drop(timer.readable().await),
        // Without a free file descriptor the request may be woken a millisecond late.
        Err(_) => tokio::time::sleep_until(at.into()).await,
    }
}

fn timer(at: Instant) -> io::Result<Receiver> {
    let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
    let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
    // Zero would be no timer.
    let left = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
    let it_value = left.try_into().map_err(io::Error::other)?;
    let once = Itimerspec { it_interval: Default::default(), it_value };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &once)?;
    // Like a pipe, the timer can be read when its time has come. `AsyncFd` would need unsafe code.
    Receiver::from_owned_fd_unchecked(timer)
}

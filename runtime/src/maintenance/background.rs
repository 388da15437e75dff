//! A background thread beside the threads that serve requests. Measures how long the thread works,
//! and moves it between the idle and the ordinary scheduling class as its [`Share`] decides.
//! Changes the calling thread only, and never pauses it.

use crate::clock::{Clock, SystemClock};
use crate::maintenance::share::{BusyBounds, Class, Share, ThreadTime, Urgency};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id, thread_schedule_policy,
};

/// The kernel's statistics of the thread: time on a CPU, time that it waited for a CPU, time
/// slices.
const ACCOUNT: &str = "/proc/thread-self/schedstat";
/// Room for the three numbers of the statistics.
const ACCOUNT_BYTES: usize = 64;
/// Nice value 0 in the unit of `thread_priority`.
const NICE_0: u8 = 47;

/// A clock of the time for which a thread worked or waited for a device. Time in which other
/// threads had its CPU does not count. The thread must make its own clock.
pub struct BusyClock {
    wall: SystemClock,
    /// `None` where the system has no statistics: all time then counts.
    account: Option<File>,
    /// What the thread had waited before the clock began: no part of this clock's time.
    waited_before: Duration,
}

impl BusyClock {
    /// Returns the clock of the calling thread.
    fn of_this_thread() -> Self {
        let account = File::open(ACCOUNT)
            .inspect_err(|e| {
                log::warn!("{ACCOUNT}: {e}; time without a CPU counts as background work");
            })
            .ok();
        let mut clock =
            Self { wall: SystemClock::default(), account, waited_before: Duration::ZERO };
        clock.waited_before = clock.time().waited;
        clock
    }

    fn time(&self) -> ThreadTime {
        let waited = self.waited().unwrap_or_default().saturating_sub(self.waited_before);
        ThreadTime { waited, now: self.wall.now() }
    }

    /// Returns the time for which the thread was ready and did not run.
    fn waited(&self) -> Option<Duration> {
        let mut text = [0; ACCOUNT_BYTES];
        // A read from the start returns new numbers, so the file stays open. The clock is read
        // after each piece of work.
        let read = self.account.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..read)?).ok()?;
        text.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
    }
}

impl Clock for BusyClock {
    fn now(&self) -> Duration {
        let ThreadTime { now, waited } = self.time();
        now.saturating_sub(waited)
    }
}

/// The background thread that calls this, and its share of the time.
pub struct Background {
    clock: BusyClock,
    share: RefCell<Share>,
    /// Whether the thread stays out of the idle class, whatever its share decides.
    is_held: Cell<bool>,
}

impl Background {
    /// Makes the calling thread a background thread within `bounds`, in the idle class. If the
    /// system does not let threads leave that class, the thread stays in the ordinary class.
    pub fn enter(bounds: BusyBounds) -> Self {
        let can_leave_idle = can_leave_idle();
        if !can_leave_idle {
            log::warn!(
                "background work takes {} % of a CPU at all times: the system does not let a \
                 thread leave the idle class; the unit needs LimitNICE=+0",
                bounds.percent_min
            );
        }

        let clock = BusyClock::of_this_thread();
        let share = Share::new(bounds, can_leave_idle, clock.time());
        change_class(share.class());
        Self { clock, share: RefCell::new(share), is_held: Cell::new(false) }
    }

    /// Keeps the thread in the ordinary class while `is_held`; its pauses stay due. On a busy
    /// machine the idle class may get no time for seconds, and a wait is no work that would end it.
    pub fn hold_ordinary(&self, is_held: bool) {
        if self.is_held.replace(is_held) != is_held {
            change_class(self.class());
        }
    }

    fn class(&self) -> Class {
        if self.is_held.get() { Class::Ordinary } else { self.share.borrow().class() }
    }

    /// Returns the clock of the thread's work.
    pub fn clock(&self) -> &BusyClock {
        &self.clock
    }

    /// Forgets the time since the last call, in which the thread had no work.
    pub fn resume(&self) {
        self.share.borrow_mut().resume(self.clock.time());
    }

    /// Counts the work since the last call, which had this `urgency`. Returns the pause that is due
    /// before the next piece of work; zero for none.
    #[must_use]
    pub fn worked(&self, urgency: Urgency) -> Duration {
        let before = self.class();
        let mut share = self.share.borrow_mut();
        share.set_urgency(urgency);
        let pause = share.worked(self.clock.time()).pause;
        drop(share);
        let class = self.class();
        if class != before {
            log::debug!("background work continues in the {class:?} class");
            change_class(class);
        }
        pause
    }

    /// Counts the time since the last call as a pause.
    pub fn paused(&self) {
        self.share.borrow_mut().paused(self.clock.time());
    }

    /// Lets requests run. The caller calls this between small pieces of work. Calls `sleep` for
    /// each pause.
    pub fn yield_now(&self, urgency: Urgency, sleep: impl Fn(Duration)) {
        let pause = self.worked(urgency);
        if !pause.is_zero() {
            sleep(pause);
            self.paused();
        }
    }
}

/// Does `work` outside the idle class; afterwards the calling thread returns to that class. A
/// thread that holds a lock must not wait until all other threads of the machine are idle.
pub fn outside_idle_class<T>(work: impl FnOnce() -> T) -> T {
    let idle = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    let is_idle = thread_schedule_policy().is_ok_and(|policy| policy == idle);
    if is_idle {
        change_class(Class::Ordinary);
    }
    let done = work();
    if is_idle {
        change_class(Class::Idle);
    }
    done
}

/// Returns whether the system lets a thread of this process leave the idle class. Tries it on a new
/// thread, which may have to stay in that class.
fn can_leave_idle() -> bool {
    let ask = || change_class(Class::Idle) && change_class(Class::Ordinary);
    std::thread::Builder::new()
        .name("class".to_owned())
        .spawn(ask)
        .is_ok_and(|asked| asked.join().unwrap_or(false))
}

/// Moves the calling thread to `class` and returns whether it succeeded. A request preempts a
/// thread of the idle class immediately. A thread of the ordinary class does not preempt a request.
/// The kernel derives the thread's I/O priority from its class.
fn change_class(class: Class) -> bool {
    let (policy, priority) = match class {
        Class::Idle => (NormalThreadSchedulePolicy::Idle, Ok(ThreadPriority::Min)),
        Class::Ordinary => {
            let priority = NICE_0.try_into().map(ThreadPriority::Crossplatform);
            (NormalThreadSchedulePolicy::Batch, priority)
        }
    };
    let policy = ThreadSchedulePolicy::Normal(policy);
    let changed = priority
        .map(|priority| set_thread_priority_and_policy(thread_native_id(), priority, policy));

    // A process with a nice value of its own may keep that value.
    let is_there = thread_schedule_policy().is_ok_and(|now| now == policy);
    if !is_there {
        log::debug!("the {class:?} class is refused: {changed:?}");
    }
    is_there
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    use rustix::time::{ClockId, clock_gettime};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    const BOUNDS: BusyBounds = BusyBounds { percent_min: 5, percent_max: 20 };
    /// CPU time that the background thread of a test works.
    const WORK: Duration = Duration::from_millis(150);

    /// Returns the CPU time of the calling thread.
    fn cpu_time() -> Duration {
        clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
    }

    fn spin(time: Duration) {
        let start = cpu_time();
        while cpu_time() - start < time {
            std::hint::spin_loop();
        }
    }

    /// Keeps the calling thread on the last CPU that the process may use.
    fn pin() {
        let allowed = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rev().find(|&cpu| allowed.is_set(cpu)).unwrap();
        let mut one = CpuSet::new();
        one.set(last);
        sched_setaffinity(None, &one).unwrap();
    }

    /// Works for `WORK` on a CPU in small pieces, within `BOUNDS`. Calls `sample` before and after.
    /// Returns the CPU time and the time of the work and of its pauses.
    fn work(mut sample: impl FnMut()) -> (Duration, Duration) {
        pin();
        let background = Background::enter(BOUNDS);
        background.resume();
        sample();
        let (wall, start) = (SystemClock::default(), cpu_time());
        while cpu_time() - start < WORK {
            spin(Duration::from_micros(50));
            background.yield_now(Urgency::Awaited, std::thread::sleep);
        }
        let done = (cpu_time() - start, wall.now());
        sample();
        done
    }

    /// Both threads share one CPU, so that other load takes from both. In the idle class alone the
    /// share is 0.3 %.
    #[test]
    fn a_thread_that_never_pauses_leaves_the_least_share() {
        let (spun, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let mut samples = Vec::new();
        let (worked, _) = std::thread::scope(|scope| {
            scope.spawn(|| {
                pin();
                while !stop.load(Ordering::Relaxed) {
                    spin(Duration::from_millis(1));
                    spun.store(cpu_time().as_nanos() as u64, Ordering::Relaxed);
                }
            });
            let beside = scope.spawn(|| work(|| samples.push(spun.load(Ordering::Relaxed))));
            let worked = beside.join();
            stop.store(true, Ordering::Relaxed);
            worked.unwrap()
        });

        let beside = Duration::from_nanos(samples[1] - samples[0]);
        let share = 100.0 * worked.as_secs_f64() / (worked + beside).as_secs_f64();
        println!("{share:.2} % of the CPU beside a thread that never pauses");
        assert!(share >= 4.5, "{share} %: {worked:?} beside {beside:?}");
    }

    /// Other load can only lower the share.
    #[test]
    fn a_thread_alone_on_its_cpu_stays_below_the_most_share() {
        let (worked, took) = std::thread::spawn(|| work(|| ())).join().unwrap();
        let share = 100.0 * worked.as_secs_f64() / took.as_secs_f64();
        println!("{share:.2} % of the time");
        assert!(share <= 20.5, "{share} %: {worked:?} in {took:?}");
    }

    #[test]
    fn time_that_another_thread_takes_is_not_busy() {
        let (clock, wall) = (BusyClock::of_this_thread(), SystemClock::default());
        let start = clock.now();
        spin(Duration::from_millis(20));
        let busy = clock.now() - start;
        assert!(busy <= wall.now() && busy >= Duration::from_millis(15), "{busy:?}");
    }
}

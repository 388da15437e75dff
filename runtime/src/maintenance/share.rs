//! The share of the time that a background thread works, between a least and a most. After each
//! piece of work it decides the scheduling class of the next piece, and the pause before that
//! piece. Never reads a clock, never sleeps and never changes a class: the caller does.
//!
//! The thread works in the idle class while that class gets enough time. In the ordinary class the
//! thread works at the least share only, because there it delays requests.

use std::time::Duration;

/// Work between two pauses, at least. A request that arrives during the work may have to wait for
/// this time.
const WORK_MIN: Duration = Duration::from_micros(200);
/// Time without any work after which the thread leaves the idle class. Also the time for which a
/// thread may work at the least share in advance.
const PATIENCE: Duration = Duration::from_millis(50);
/// Time in the ordinary class before the thread tries the idle class again.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Maximum time that counts as work for one piece in the idle class. A longer piece waited for a
/// device whose scheduler prefers the reads of other threads.
const PIECE_COUNTED: Duration = Duration::from_millis(5);
/// Maximum time without work that the thread may later make up for, at the least share.
const DEBT_KEPT: Duration = Duration::from_secs(10);

/// The least and the most of the time that a background thread works, per cent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusyBounds {
    /// 1 to `percent_max`.
    pub percent_min: u64,
    /// `percent_min` to 100.
    pub percent_max: u64,
}

/// Whether somebody waits for a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// Somebody waits for it.
    Awaited,
    /// Nobody does.
    Unawaited,
}

impl BusyBounds {
    /// The bounds of work for which nobody waits.
    const UNAWAITED: Self = Self { percent_min: 5, percent_max: 25 };

    /// Returns the bounds with each share at most that of `other`.
    fn min(self, other: Self) -> Self {
        Self {
            percent_min: self.percent_min.min(other.percent_min),
            percent_max: self.percent_max.min(other.percent_max),
        }
    }
}

/// The scheduling class of a background thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The thread runs only while no other thread wants its CPU.
    Idle,
    /// The thread and the other threads on its CPU each get a part of the CPU's time.
    Ordinary,
}

/// A moment, and how long a thread had waited for a CPU until then. In the rest of the time the
/// thread worked or waited for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTime {
    /// The moment, since an arbitrary start.
    pub now: Duration,
    /// Time for which the thread was ready while another thread had its CPU.
    pub waited: Duration,
}

/// The pause after a piece of work, and the class of the next piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// The class of the next piece.
    pub class: Class,
    /// The pause before the next piece; zero for none.
    pub pause: Duration,
}

/// Keeps the share of one background thread.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// The bounds of work for which somebody waits.
    awaited: BusyBounds,
    /// The bounds of the current work.
    bounds: BusyBounds,
    class: Class,
    /// Whether the thread may leave the idle class. A thread that may not never enters it.
    can_leave_idle: bool,
    /// The end of the last piece or pause.
    counted: ThreadTime,
    /// Time at which the thread entered the ordinary class.
    ordinary_since: Duration,
    /// Work that the least share still owes to the thread, ns; negative after more work.
    debt: i64,
    /// Work since the last pause.
    unpaused: Duration,
    /// Pause that keeps that work within the most share. Time without the CPU counts as pause.
    owed_pause: Duration,
}

impl Share {
    /// Returns the share of a thread that starts its work at `start`. A thread that cannot leave
    /// the idle class works in the ordinary class from the start.
    pub fn new(bounds: BusyBounds, can_leave_idle: bool, start: ThreadTime) -> Self {
        let percent_max = bounds.percent_max.clamp(1, 100);
        let percent_min = bounds.percent_min.clamp(1, percent_max);
        let bounds = BusyBounds { percent_min, percent_max };
        Self {
            awaited: bounds,
            bounds,
            class: if can_leave_idle { Class::Idle } else { Class::Ordinary },
            can_leave_idle,
            counted: start,
            ordinary_since: start.now,
            debt: 0,
            unpaused: Duration::ZERO,
            owed_pause: Duration::ZERO,
        }
    }

    /// Returns the class that the thread should be in.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Sets the urgency of the next pieces of work. If nobody waits for them, the thread works for
    /// 5 to 25 % of the time, or less if its bounds are lower, and returns to the idle class.
    pub fn set_urgency(&mut self, urgency: Urgency) {
        let bounds = match urgency {
            Urgency::Awaited => self.awaited,
            Urgency::Unawaited => self.awaited.min(BusyBounds::UNAWAITED),
        };
        // The debt belongs to the share under which it was counted.
        if bounds != self.bounds {
            (self.bounds, self.debt) = (bounds, 0);
            if urgency == Urgency::Unawaited && self.can_leave_idle {
                self.class = Class::Idle;
            }
        }
    }

    /// Forgets the time until `at`, in which the thread had no work.
    pub fn resume(&mut self, at: ThreadTime) {
        self.counted = at;
        // The time without work was a pause as well.
        (self.unpaused, self.owed_pause) = (Duration::ZERO, Duration::ZERO);
    }

    /// Counts a pause that ended at `at`.
    pub fn paused(&mut self, at: ThreadTime) {
        let elapsed = at.now.saturating_sub(self.counted.now);
        self.counted = at;
        self.owed_pause = self.owed_pause.saturating_sub(elapsed);
        self.owe(elapsed, Duration::ZERO);
    }

    /// Counts a piece of work that ended at `at`. Returns the pause and the class of the next
    /// piece.
    pub fn worked(&mut self, at: ThreadTime) -> Rest {
        let elapsed = at.now.saturating_sub(self.counted.now);
        let waited = at.waited.saturating_sub(self.counted.waited);
        let is_idle = self.class == Class::Idle;
        let busy = elapsed.saturating_sub(waited);
        let busy = if is_idle { busy.min(PIECE_COUNTED) } else { busy };
        self.counted = at;

        let percent_max = u128::from(self.bounds.percent_max);
        let pause = scaled(busy, 100 - percent_max, percent_max);
        self.unpaused = self.unpaused.saturating_add(busy);
        self.owed_pause = self.owed_pause.saturating_add(pause).saturating_sub(waited);
        self.owe(elapsed, busy);

        self.choose_class(at.now);
        Rest { class: self.class, pause: self.pause() }
    }

    /// Adds to the debt: the least share of `elapsed`, less the work done.
    fn owe(&mut self, elapsed: Duration, worked: Duration) {
        let [gained, kept] = [PATIENCE, DEBT_KEPT].map(|time| nanos(self.least(time)));
        let owed = nanos(self.least(elapsed)).saturating_sub(nanos(worked));
        self.debt = self.debt.saturating_add(owed).clamp(-gained, kept);
    }

    /// Returns the least share of `time`.
    fn least(&self, time: Duration) -> Duration {
        scaled(time, self.bounds.percent_min.into(), 100)
    }

    fn choose_class(&mut self, now: Duration) {
        match self.class {
            Class::Idle if self.debt >= nanos(self.least(PATIENCE)) => {
                (self.class, self.ordinary_since) = (Class::Ordinary, now);
            }
            Class::Ordinary if self.can_leave_idle => {
                let tried = now.saturating_sub(self.ordinary_since);
                // A few pieces pay the debt. Without the waiting time the thread would go back at
                // once, and starve again.
                if self.debt <= 0 && tried >= RETRY_AFTER {
                    self.class = Class::Idle;
                }
            }
            _ => {}
        }
    }

    /// Returns the pause that is due now.
    fn pause(&mut self) -> Duration {
        if self.unpaused < WORK_MIN {
            return Duration::ZERO;
        }
        self.unpaused = Duration::ZERO;

        // In the ordinary class the thread pauses until the least share owes it work again.
        let gained = u64::try_from(self.debt.saturating_neg()).unwrap_or(0);
        let until_owed = match self.class {
            Class::Idle => Duration::ZERO,
            Class::Ordinary => {
                scaled(Duration::from_nanos(gained), 100, self.bounds.percent_min.into())
            }
        };
        self.owed_pause.max(until_owed)
    }
}

/// Returns `time` times `numerator / denominator`.
fn scaled(time: Duration, numerator: u128, denominator: u128) -> Duration {
    let nanos = time.as_nanos() * numerator / denominator;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: BusyBounds = BusyBounds { percent_min: 5, percent_max: 20 };
    const SECOND: Duration = Duration::from_secs(1);

    /// Per mille of a CPU that a thread gets while it is ready, by its class.
    #[derive(Clone, Copy, Debug)]
    struct Cpu {
        idle: u32,
        ordinary: u32,
    }

    /// A CPU without other work, and CPUs with one and with three threads that never pause.
    const FREE: Cpu = Cpu { idle: 1000, ordinary: 1000 };
    const TAKEN: Cpu = Cpu { idle: 3, ordinary: 500 };
    const CROWDED: Cpu = Cpu { idle: 1, ordinary: 250 };

    /// A thread with work at all times.
    struct Thread {
        share: Share,
        at: ThreadTime,
        worked: Duration,
        in_ordinary: Duration,
    }

    impl Thread {
        fn new(bounds: BusyBounds, can_leave_idle: bool) -> Self {
            let at = ThreadTime::default();
            let share = Share::new(bounds, can_leave_idle, at);
            Self { share, at, worked: Duration::ZERO, in_ordinary: Duration::ZERO }
        }

        /// Works in pieces of `piece` for `time`. Returns the share of the time, per cent.
        fn run(&mut self, cpu: Cpu, piece: Duration, time: Duration) -> f64 {
            let (start, before) = (self.at.now, self.worked);
            while self.at.now < start + time {
                let is_idle = self.share.class() == Class::Idle;
                let took = piece * 1000 / if is_idle { cpu.idle } else { cpu.ordinary };
                self.at.now += took;
                self.at.waited += took - piece;
                self.worked += piece;
                self.in_ordinary += if is_idle { Duration::ZERO } else { took };

                let Rest { class, pause } = self.share.worked(self.at);
                assert_eq!(class, self.share.class());
                if !pause.is_zero() {
                    self.at.now += pause;
                    self.share.paused(self.at);
                }
            }
            100.0 * (self.worked - before).as_secs_f64() / (self.at.now - start).as_secs_f64()
        }
    }

    #[test]
    fn work_stays_between_its_bounds_whatever_other_threads_take() {
        for cpu in [FREE, Cpu { idle: 150, ordinary: 600 }, TAKEN, CROWDED] {
            for piece_us in [1, 40, 200, 900, 3_000] {
                let (mut thread, piece) =
                    (Thread::new(BOUNDS, true), Duration::from_micros(piece_us));
                let share = thread.run(cpu, piece, 60 * SECOND);
                assert!((4.9..20.01).contains(&share), "{cpu:?}, {piece_us} us: {share} %");
            }
        }
    }

    #[test]
    fn a_free_cpu_gives_the_most_in_the_idle_class() {
        let mut thread = Thread::new(BOUNDS, true);
        let share = thread.run(FREE, WORK_MIN, 10 * SECOND);
        assert!((19.9..20.01).contains(&share), "{share} %");
        assert_eq!(thread.in_ordinary, Duration::ZERO);
    }

    #[test]
    fn a_taken_cpu_gives_the_least_and_is_left_when_it_is_free() {
        let mut thread = Thread::new(BOUNDS, true);
        let piece = WORK_MIN / 2;
        let share = thread.run(TAKEN, piece, 60 * SECOND);
        assert!((4.9..5.5).contains(&share), "{share} %");
        thread.run(FREE, piece, 3 * SECOND);
        let share = thread.run(FREE, piece, 10 * SECOND);
        assert!((19.9..20.01).contains(&share), "{share} %");
        assert_eq!(thread.share.class(), Class::Idle);
    }

    #[test]
    fn unawaited_work_returns_to_the_idle_class_with_shares_of_its_own() {
        let mut thread = Thread::new(BusyBounds { percent_min: 40, percent_max: 60 }, true);
        thread.run(TAKEN, WORK_MIN, SECOND / 2);
        assert_eq!(thread.share.class(), Class::Ordinary);
        thread.share.set_urgency(Urgency::Unawaited);
        assert_eq!(thread.share.class(), Class::Idle);
        for (cpu, expected) in [(FREE, 24.9..25.1), (TAKEN, 4.9..5.5)] {
            let share = thread.run(cpu, WORK_MIN, 30 * SECOND);
            assert!(expected.contains(&share), "{cpu:?}: {share} %");
        }
        thread.share.set_urgency(Urgency::Awaited);
        let share = thread.run(FREE, WORK_MIN, 30 * SECOND);
        assert!((58.0..60.1).contains(&share), "{share} %");

        const LOW: BusyBounds = BusyBounds { percent_min: 1, percent_max: 10 };
        let mut share = Share::new(LOW, true, ThreadTime::default());
        share.set_urgency(Urgency::Unawaited);
        assert_eq!(
            share.bounds, share.awaited,
            "the bounds are lower than those of work for which nobody waits"
        );
    }

    #[test]
    fn a_thread_that_cannot_leave_the_idle_class_never_enters_it() {
        for cpu in [FREE, TAKEN, CROWDED] {
            let mut thread = Thread::new(BOUNDS, false);
            for _ in 0..10 {
                let share = thread.run(cpu, WORK_MIN, 10 * SECOND);
                assert_eq!(thread.share.class(), Class::Ordinary);
                assert!((4.9..5.1).contains(&share), "{cpu:?}: {share} %");
            }
        }
    }

    #[test]
    fn time_without_the_cpu_is_no_work_and_demands_no_pause() {
        let mut share = Share::new(BOUNDS, true, ThreadTime::default());
        let [now, waited] = [10, 9].map(Duration::from_millis);
        let Rest { class, pause } = share.worked(ThreadTime { now, waited });
        assert_eq!((class, pause), (Class::Idle, Duration::ZERO), "4 ms are due, 9 ms were lost");
        // The thread waited for a device in most of the next 10 ms, so 5 of them count.
        let later = ThreadTime { now: now * 2, waited };
        assert_eq!(share.worked(later).pause, Duration::from_millis(20));
    }

    #[test]
    fn time_without_work_is_not_owed() {
        let mut thread = Thread::new(BOUNDS, true);
        for _ in 0..100 {
            thread.at.now += 60 * SECOND;
            thread.share.resume(thread.at);
            thread.run(FREE, WORK_MIN, SECOND / 100);
        }
        assert_eq!(thread.in_ordinary, Duration::ZERO);
    }

    /// An I/O scheduler may let a read of the idle class wait for seconds.
    #[test]
    fn a_thread_whose_reads_starve_leaves_the_idle_class() {
        let mut share = Share::new(BOUNDS, true, ThreadTime::default());
        let at = ThreadTime { now: 10 * SECOND, waited: Duration::ZERO };
        assert_eq!(share.worked(at).class, Class::Ordinary);
    }
}

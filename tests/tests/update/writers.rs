//! Records that several threads or processes change: no change of one is lost to another, wherever
//! the other comes between two calls of the disk.

use hatchback::io::disk::Disk;
use hatchback::update::Updater;
use hatchback::update::install_status::Repair;
use hatchback::update::link::{Fetcher, LinkLimits};
use hatchback::update::trust::Trust;
use hatchback_tests::fleet::{Car, Fleet, T0, Ticks};
use hatchback_tests::sim_disk::SimDisk;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// Another writer, and the calls of the disk before its turn.
struct Other {
    calls: u32,
    write: Box<dyn FnOnce()>,
}

thread_local! {
    static OTHER: Cell<Option<Other>> = const { Cell::new(None) };
}

fn on_call() {
    match OTHER.take() {
        Some(Other { calls: 0, write }) => write(),
        other => OTHER.set(other.map(|other| Other { calls: other.calls - 1, ..other })),
    }
}

/// Returns a handle of `disk` with `write` as another writer after `calls` calls.
fn beside(disk: &SimDisk, calls: u32, write: impl FnOnce() + 'static) -> Arc<dyn Disk> {
    OTHER.set(Some(Other { calls, write: Box::new(write) }));
    disk.process(on_call).shared()
}

#[test]
fn a_scrub_that_found_nothing_does_not_withdraw_a_repair_that_another_thread_requires() {
    let fleet = Fleet::new();
    for calls in 0.. {
        let car = Car::at_first_release(&fleet);
        car.sync.require_repair(Repair::NewerSnapshot).unwrap();
        let (other, required) = (car.sync.clone(), Rc::new(Cell::new(false)));
        let is_required = Rc::clone(&required);
        let disk = beside(&car.disk, calls, move || {
            is_required.set(other.require_repair(Repair::AnySnapshot).is_ok());
        });
        // The lock may be the other's.
        let _ = Updater { disk, ..car.sync.clone() }.record_whole();
        if OTHER.take().is_some() {
            assert!(calls > 2, "{calls} calls");
            return;
        }
        let repair = car.sync.install_status().unwrap().repair;
        let expected = if required.get() { Repair::AnySnapshot } else { Repair::None };
        assert_eq!(repair, expected, "after {calls} calls");
    }
}

#[test]
fn a_process_that_provisions_does_not_lower_the_floor_of_one_that_fetched() {
    let fleet = Fleet::new();
    let root = std::fs::read(fleet.keys().join("1.root.json")).unwrap();
    for calls in 0.. {
        let car = Car::new(&fleet);
        let sync = Updater { directory: "/new".into(), ..car.sync.clone() };
        let floor = |sync: &Updater| Trust::open(&sync.disk, &sync.directory).unwrap().floor();
        let (other, mut link, first) = (sync.clone(), fleet.link(), root.clone());
        let raised = Rc::new(Cell::new(0));
        let to = Rc::clone(&raised);
        let disk = beside(&car.disk, calls, move || {
            // The lock may be that of the first, whose floor then stays.
            let _ = Trust::init(other.disk.as_ref(), &other.directory, &first);
            let clock = Ticks::still();
            let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
            if other.fetch(&mut fetcher, T0 + 1, |_, _| {}).is_ok() {
                to.set(floor(&other).timestamp);
            }
        });
        let _ = Trust::init(disk.as_ref(), &sync.directory, &root);
        if OTHER.take().is_some() {
            assert!(calls > 10, "{calls} calls");
            return;
        }
        assert!(floor(&sync).timestamp >= raised.get(), "after {calls} calls");
    }
}

//! The moments of an update in which the damage strikes: a car for each moment, to be copied for
//! each case.

use crate::damage::car::{DAY_S, ROUND_S, TestCar};
use crate::damage::cases::{Moment, Outcome};
use hatchback::car::maintenance_steps::MaintenanceSteps;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::{MaintenanceRules, UpdateState};
use hatchback_tests::fleet::{Fleet, T0, VERSIONS};
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::keys::rotate;
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::path::Path;
use std::time::Duration;
use tough::schema::RoleType;

/// Lifetime of all metadata, s.
pub const LASTING_S: u64 = 60 * DAY_S;

/// A car and its fleet at some moment of an update, to be copied for each case.
pub struct Scene {
    pub moment: Moment,
    pub folder: tempfile::TempDir,
    /// The files of `folder/car`, as `flash/...` and `sync/...`.
    pub files: Vec<String>,
    /// The repository as it is, and with the next release in each form.
    pub fleet: Fleet,
    pub both: Fleet,
    pub snapshot: Fleet,
    pub newest: usize,
    pub rules: MaintenanceRules,
    pub now: u64,
}

/// Returns the paths of all files below `folder`, sorted; links and pipes are files.
pub fn files_in(folder: &Path) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(at) = folders.pop() {
        for entry in std::fs::read_dir(&at).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            } else {
                let path = entry.path();
                let path = path.strip_prefix(folder).unwrap();
                found.push(path.to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    found
}

pub fn release(fleet: &Fleet, now: u64, bundles: &[&Path]) {
    let bundles = bundles.iter().map(|path| path.to_path_buf()).collect();
    change(fleet, now, Change { bundles, ..Change::default() });
}

pub fn change(fleet: &Fleet, now: u64, change: Change) {
    let change = Change { expires_s: LASTING_S, ..change };
    let store = Objects::directory(&fleet.repository()).unwrap();
    publish(&store, &fleet.keys(), &change, now).unwrap();
}

impl Scene {
    /// Returns a car that is brought to `moment`.
    pub fn new(moment: Moment) -> Self {
        let (folder, fleet) = (tempfile::tempdir().unwrap(), Fleet::new());
        release(&fleet, T0 + 1, &[]);
        let mut car = TestCar::new(&folder.path().join("car"), &fleet);
        if moment == Moment::Merged {
            car.rules = MaintenanceRules { deltas_max: 0, changed_percent_max: 0, ..car.rules };
        }
        car.start();
        let reach = |fleet: &Fleet, car: &mut TestCar, newest| {
            assert_eq!(car.go_to(&fleet.repository(), newest), Ok(Outcome::Healed), "{moment:?}");
        };
        reach(&fleet, &mut car, 1);
        release(&fleet, car.now, &[&VERSIONS.deltas[1]]);
        reach(&fleet, &mut car, 2);
        let live = Self::bring(moment, &mut car, &fleet);
        car.stop();

        let [both, snapshot] = [fleet.fork(), fleet.fork()];
        let newest = if live == 2 { 3 } else { 4 };
        let newest =
            if matches!(moment, Moment::Staged | Moment::Interrupted) { 4 } else { newest };
        let [delta, whole] = [&VERSIONS.deltas[newest - 1], &VERSIONS.snapshots[newest - 1]];
        release(&both, car.now, &[delta, whole]);
        release(&snapshot, car.now, &[whole]);
        let (files, rules, now) = (files_in(&folder.path().join("car")), car.rules, car.now);
        Self { moment, folder, files, fleet, both, snapshot, newest, rules, now }
    }

    /// Brings a car at generation 2 to `moment`. Returns the live generation.
    pub fn bring(moment: Moment, car: &mut TestCar, fleet: &Fleet) -> usize {
        let state = |car: &TestCar| car.updater().status().unwrap().state;
        let third: &[&Path] = &[&VERSIONS.deltas[2]];
        match moment {
            Moment::Rest => {}
            Moment::Staged => {
                release(fleet, car.now, third);
                while state(car) != UpdateState::Staged {
                    car.advance(ROUND_S);
                    car.sync(&mut fleet.link());
                }
            }
            Moment::Probation => {
                release(fleet, car.now, third);
                while state(car) != UpdateState::Probation {
                    car.advance(ROUND_S);
                    car.sync(&mut fleet.link());
                    car.work();
                }
                return 3;
            }
            Moment::Rotated => {
                rotate(&fleet.keys(), RoleType::Targets, T0 + LASTING_S).unwrap();
                let re_sign = ["1", "2"].map(str::to_owned).to_vec();
                change(fleet, car.now, Change { re_sign, ..Change::default() });
                (0..30).for_each(|_| assert_eq!(car.round(&fleet.repository()), Ok(true)));
                assert!(files_in(&car.folder).iter().any(|file| file.ends_with("root.2")));
            }
            Moment::Merged => {
                (0..60).for_each(|_| assert_eq!(car.round(&fleet.repository()), Ok(true)));
            }
            Moment::Interrupted => Self::interrupt(car, fleet),
        }
        2
    }

    /// Leaves the files that a power cut leaves during a fetch, a merge and the writes of records.
    pub fn interrupt(car: &mut TestCar, fleet: &Fleet) {
        release(fleet, car.now, &[&VERSIONS.deltas[2]]);
        let half = std::fs::metadata(&VERSIONS.deltas[2]).unwrap().len() / 2;
        car.advance(120);
        car.sync(&mut Wire::new(
            fleet.link(),
            Faults { breaks_after: Some(half + 4_000), ..Faults::default() },
        ));
        car.stop();
        let rules = MaintenanceRules { deltas_max: 0, changed_percent_max: 0, ..car.rules };
        let flash = Flash::open(&disk::system(), &car.folder.join("flash")).unwrap();
        let since_1970 = Duration::from_secs(car.now);
        let mut steps = MaintenanceSteps::new(flash, None, rules, None, since_1970);
        let is_part = |file: &String| file.starts_with("flash/g") && file.ends_with(".part");
        for _ in 0..20 {
            if !files_in(&car.folder).iter().any(is_part) {
                steps.step(car.clock.as_ref(), since_1970);
            }
        }
        drop(steps);
        // A record that is being replaced has a part file for a moment.
        for file in files_in(&car.folder) {
            let is_record = ["flash/", "sync/"].iter().any(|start| {
                file.strip_prefix(start).is_some_and(|name| !name.contains(['/', '.']))
            });
            let bytes = std::fs::read(car.folder.join(&file)).unwrap();
            if is_record && !bytes.is_empty() {
                std::fs::write(car.folder.join(format!("{file}.part")), &bytes[..bytes.len() / 2])
                    .unwrap();
            }
        }
    }
}

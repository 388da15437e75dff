//! The network of a staged release, which is read before the release is installed.

use hatchback::bundle::BundleReader;
use hatchback::limits::TRIALS_MAX;
use hatchback::update::Updater;
use hatchback::update::release::Release;
use hatchback::update::status::UpdateState;
use hatchback_tests::fleet::{Car, Fleet, T0, VERSIONS};

/// TensorRT builds the plan of such a network, so only signed bytes may reach it.
#[test]
fn the_network_of_a_staged_release_is_read_before_the_install_if_it_is_signed() {
    let fleet = Fleet::new();
    let mut car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    assert!(car.sync.release_in_hand(None).unwrap().is_none());
    car.policy.consent = true;
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    assert_eq!(car.live(), 1);

    let release = car.sync.release_in_hand(None).unwrap().unwrap();
    assert!(car.sync.release_in_hand(Some(release.manifest)).unwrap().is_none());
    let network = car.sync.staged_network(&release, None, 1, u64::MAX).unwrap();
    let mut bundle = BundleReader::open(&VERSIONS.deltas[1]).unwrap();
    let dense = bundle.manifest().dense;
    assert_eq!(network.manifest, release.manifest);
    assert_eq!(network.onnx, bundle.blob(dense).unwrap());

    let unsigned = Release { manifest: [7; 32], ..release.clone() };
    let said = car.sync.staged_network(&unsigned, None, 1, u64::MAX).err().unwrap().to_string();
    assert!(said.contains("not listed"), "{said}");
    let hex = hatchback::bundle::manifest::hex(&release.manifest);
    let path = car.sync.directory.join("staged").join(format!("{hex}.hatch"));
    car.disk.put(&path, std::fs::read(&VERSIONS.snapshots[0]).unwrap());
    let said = car.sync.staged_network(&release, None, 1, u64::MAX).err().unwrap().to_string();
    assert!(said.contains("not the signed one"), "{said}");
}

/// A network that crashes the process which reads it must not do so at each start.
#[test]
fn crashes_while_a_staged_network_is_read_count_as_those_of_an_install() {
    let fleet = Fleet::new();
    let mut car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.policy.consent = true;
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    let release = car.sync.release_in_hand(None).unwrap().unwrap();
    let boot = car.host().boot;
    let disk = car.disk.process(|| ());
    let sync = Updater { disk: disk.shared(), ..car.sync.clone() };
    let read = || sync.staged_network(&release, None, boot, u64::MAX);
    let (installs, calls) = (|| car.sync.install_status().unwrap().installs, disk.calls());
    read().unwrap();
    assert_eq!(installs(), 0);

    // About the middle of all calls is after the count, and before it is taken back.
    let middle = (disk.calls() - calls) / 2;
    for crashes in 1..=TRIALS_MAX {
        let disk = car.disk.process(|| ());
        disk.kill_after(middle);
        let sync = Updater { disk: disk.shared(), ..car.sync.clone() };
        sync.staged_network(&release, None, boot, u64::MAX).err().unwrap();
        assert!(disk.is_killed());
        assert_eq!(installs(), crashes);
        if crashes == 1 {
            // Later boots that read it whole add nothing.
            for boot in 100..140 {
                car.sync.staged_network(&release, None, boot, u64::MAX).unwrap();
            }
            assert_eq!((installs(), car.sync.install_status().unwrap().install_cuts), (1, 0));
        }
    }
    let said = read().err().unwrap().to_string();
    assert!(said.contains("the process ended 5 times"), "{said}");

    // The attempt ends, and the release is not to blame.
    car.sync.consent(T0 + 12).unwrap();
    car.apply(T0 + 12);
    let status = car.sync.status().unwrap();
    assert_eq!((status.state, car.live()), (UpdateState::Failed, 1));
    assert!(status.refused.is_empty(), "{status:?}");
}

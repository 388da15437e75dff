//! Signed releases with wrong content, one test a fault, and cars that are far behind. A car
//! refuses wrong content once and never fetches it again. A car that is far behind receives about
//! as many bytes as its changed rows take.

use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::sha256;
use hatchback::flash::live::LiveRecord;
use hatchback::io::disk::Disk;
use hatchback::io::page::PageBytes;
use hatchback::io::paired_record::PairedRecord;
use hatchback::limits::{CHUNK_BYTES, DELTAS_MAX, TARGETS_BYTES_MAX};
use hatchback::update::error::UpdateError;
use hatchback::update::release::manifest_path;
use hatchback::update::status::UpdateState;
use hatchback_tests::fleet::{Car, FRESH_S, Fleet, T0, VERSIONS};
use hatchback_tests::rewrite::{Parts, count, kind, renumber, reseal};
use hatchback_tests::versions::Versions;
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::keys::{block_on, release_keys};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use hatchback_tools::repository::timestamp;
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::path::Path;
use tough::editor::RepositoryEditor;
use tough::schema::{Hashes, Target};

/// Publishes generation 2 as `change` makes it, with valid hashes and signatures. Checks that the
/// car refuses it with `why`, stays on generation 1, never fetches it again, and installs
/// generation 3.
#[track_caller]
fn refused(kind: &str, change: impl FnOnce(&mut Parts), why: &str) {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let from = if kind == "delta" { &VERSIONS.deltas[1] } else { &VERSIONS.snapshots[1] };
    let mut parts = Parts::read(from);
    change(&mut parts);
    let bad = fleet.folder.path().join("bad.hatch");
    std::fs::write(&bad, parts.bytes()).unwrap();
    fleet.publish(T0 + 10, &bad);
    let error = car.run(&mut fleet.link(), T0 + 11).unwrap_err();
    assert!(
        matches!(&error, UpdateError::ReleaseFailed { reason: found, .. } if found.contains(why)),
        "{error}"
    );
    assert_eq!((car.live(), car.sync.status().unwrap().state), (1, UpdateState::Failed));
    nothing_left_of_2(&car);
    let mut wire = Wire::new(fleet.link(), Faults::default());
    let status = car.run(&mut wire, T0 + 12).unwrap();
    assert!(wire.asked.iter().all(|path| path.starts_with("metadata/")), "{:?}", wire.asked);
    assert_eq!((status.newest, car.live()), (Some(2), 1));
    fleet.publish(T0 + 13, &VERSIONS.snapshots[2]);
    car.run(&mut fleet.link(), T0 + 14).unwrap();
    assert_eq!(car.live(), 3);
}

fn nothing_left_of_2(car: &Car) {
    let paths = car.disk.paths();
    let left: Vec<_> =
        paths.iter().filter(|p| p.starts_with(car.sync.flash.join("g000000000002"))).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// The device fails while a release is installed, and the publisher revokes the release: its space
/// on flash becomes free.
#[test]
fn a_release_revoked_while_it_is_written_leaves_no_files() {
    let fleet = Fleet::new();
    for car in [Car::new(&fleet), Car::at_first_release(&fleet)] {
        let fleet = fleet.fork();
        fleet.publish(T0 + 10, &VERSIONS.snapshots[1]);
        car.poll(&mut fleet.link(), T0 + 11).unwrap();
        assert!(car.sync.advance(&car.host(), T0 + 12).unwrap());
        car.disk.fail_after(25);
        assert!(car.sync.advance(&car.host(), T0 + 12).unwrap());
        assert_eq!(car.sync.status().unwrap().state, UpdateState::Failed);
        assert!(car.sync.status().unwrap().refused.is_empty());
        fleet.revoke(T0 + 13, 2);
        car.poll(&mut fleet.link(), T0 + 14).unwrap();
        car.apply(T0 + 15);
        assert_eq!(car.live(), 1);
        nothing_left_of_2(&car);
    }
}

#[test]
fn a_zip_bomb() {
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 19).unwrap();
    let pack = |parts: &mut Parts| {
        let dense = parts.manifest.dense as usize;
        parts.manifest.blobs[dense].chunks[0].raw = CHUNK_BYTES as u32;
        parts.stored[dense] = vec![bomb];
    };
    refused("snapshot", pack, "does not decompress");
}

#[test]
fn duplicate_and_unsorted_keys() {
    let twice = |pages: &mut Vec<PageBytes>| {
        pages[0].copy_within(16..24, 24);
        reseal(&mut pages[0]);
    };
    refused("snapshot", |p| p.edit_segment(1, twice), "keys do not ascend");
    let swapped = |pages: &mut Vec<PageBytes>| {
        (0..8).for_each(|i| pages[0].swap(16 + i, 24 + i));
        reseal(&mut pages[0]);
    };
    refused("delta", |p| p.edit_segment(1, swapped), "keys do not ascend");
    let pages_swapped = |pages: &mut Vec<PageBytes>| {
        pages.swap(0, 1);
        let data = pages.iter().filter(|p| hatchback_tests::rewrite::kind(p) == 2).count() as u32;
        let fences = pages.iter().filter(|p| hatchback_tests::rewrite::kind(p) == 3).count() as u32;
        renumber(pages, data, fences);
    };
    refused("snapshot", |p| p.edit_segment(1, pages_swapped), "ascend");
}

#[test]
fn a_delta_for_another_schema() {
    refused("delta", |p| p.manifest.schema.tables[0].name = "x".to_owned(), "name differs");
    refused("delta", |p| p.manifest.schema.tables[1].name = "x".to_owned(), "name differs");
}

#[test]
fn a_network_that_is_none() {
    let network = |p: &mut Parts| p.set_content(p.manifest.dense, b"no network");
    refused("delta", network, "dense network");
}

/// Signs the manifest of `bundle` under the target name `name`, with the fleet's keys.
fn sign_as(fleet: &Fleet, now: u64, bundle: &Path, name: &str) {
    let bundle = BundleReader::open(bundle).unwrap();
    let content = bundle.manifest_bytes();
    let hash = sha256(content);
    let hashes = Hashes { sha256: hash.to_vec().into(), _extra: HashMap::new() };
    let (custom, _extra) = (HashMap::new(), HashMap::new());
    let target = Target { length: content.len() as u64, hashes, custom, _extra };
    std::fs::write(fleet.file(&manifest_path(name, &hash)), content).unwrap();
    sign_target(fleet, now, name, target);
}

/// Signs `target` under the name `name`, with the fleet's keys.
fn sign_target(fleet: &Fleet, now: u64, name: &str, target: Target) {
    let (version, expires) = (NonZeroU64::new(2).unwrap(), timestamp(now + FRESH_S).unwrap());
    let signed = std::fs::read(fleet.file("metadata/1.targets.json")).unwrap();
    let work = async {
        let mut editor = RepositoryEditor::new(fleet.keys().join("1.root.json")).await.unwrap();
        editor.targets(serde_json::from_slice(&signed).unwrap()).unwrap();
        editor.timestamp_version(version).timestamp_expires(expires);
        editor.snapshot_version(version).snapshot_expires(expires);
        editor.targets_version(version).unwrap().targets_expires(expires).unwrap();
        editor.add_target(name, target).unwrap();
        let signed = editor.sign(&release_keys(&fleet.keys()).unwrap()).await.unwrap();
        signed.write(fleet.file("metadata")).await.unwrap();
    };
    block_on(work).unwrap();
}

/// Cars would take targets metadata that they do not read for endless data, at each poll.
#[test]
fn metadata_longer_than_cars_read_is_not_published() {
    let fleet = Fleet::new();
    let hashes = Hashes { sha256: vec![7; 32].into(), _extra: HashMap::new() };
    let padding = "x".repeat(TARGETS_BYTES_MAX as usize).into();
    let custom = HashMap::from([("padding".to_owned(), padding)]);
    let target = Target { length: 1, hashes, custom, _extra: HashMap::new() };
    sign_target(&fleet, T0 + 10, "padding", target);

    let before = std::fs::read(fleet.file("metadata/timestamp.json")).unwrap();
    let refused = fleet.try_change(T0 + 12, Change::default()).unwrap_err();
    assert!(refused.contains("3.targets.json has"), "{refused}");
    assert_eq!(std::fs::read(fleet.file("metadata/timestamp.json")).unwrap(), before);
    let revoke = vec!["padding".to_owned()];
    fleet.try_change(T0 + 13, Change { revoke, ..Change::default() }).unwrap();
    Car::new(&fleet).run(&mut fleet.link(), T0 + 14).unwrap();
}

#[test]
fn a_signed_name_that_says_another_parent_or_sequence() {
    for (name, wrong) in [
        ("versions/000000000003-from-000000000001", "parent"),
        ("versions/000000000003-snapshot", "parent"),
        ("versions/000000000002-from-000000000001", "generation"),
    ] {
        let fleet = Fleet::new();
        let car = Car::at_first_release(&fleet);
        sign_as(&fleet, T0 + 10, &VERSIONS.deltas[2], name);
        let mut wire = Wire::new(fleet.link(), Faults::default());
        let error = car.run(&mut wire, T0 + 11).unwrap_err();
        assert!(
            matches!(&error, UpdateError::ReleaseField { field, .. } if *field == wrong),
            "{name}: {error:?}"
        );
        assert_eq!((car.live(), car.sync.status().unwrap().state), (1, UpdateState::Failed));
        assert!(!wire.asked.iter().any(|path| path.starts_with("chunks/")), "{:?}", wire.asked);
        let (revoke, bundles) = (vec![name.to_owned()], vec![VERSIONS.snapshots[3].clone()]);
        let change = Change { revoke, bundles, expires_s: FRESH_S, ..Change::default() };
        publish(&Objects::directory(&fleet.repository()).unwrap(), &fleet.keys(), &change, T0 + 12)
            .unwrap();
        car.run(&mut fleet.link(), T0 + 13).unwrap();
        assert_eq!(car.live(), 4, "{name}");
    }
}

#[test]
fn row_counts_that_lie() {
    refused("snapshot", |p| p.manifest.schema.tables[0].rows += 1, "rows: 606 instead of 607");
    refused("snapshot", |p| p.manifest.schema.tables[1].rows = 100, "rows: 572 instead of 100");
}

/// A merge of an index table fills every row below its last key, so a key beyond its rows would
/// fill the disk.
#[test]
fn keys_beyond_an_index_table() {
    let last = |key: u64| {
        move |p: &mut Parts| {
            p.edit_segment(0, |pages| {
                let (row, steps) =
                    (pages.iter().rposition(|page| kind(page) == 2).unwrap(), pages.len() - 2);
                let at = 16 + 8 * (count(&pages[row]) - 1);
                pages[row][at..at + 8].copy_from_slice(&key.to_le_bytes());
                reseal(&mut pages[row]);

                // The key list must agree: its steps are widened to 64 bits.
                let order = |page: &PageBytes, i: usize| {
                    u64::from_le_bytes(page[16 + 8 * i..][..8].try_into().unwrap())
                };
                let orders: Vec<u64> = pages[..=row]
                    .iter()
                    .flat_map(|page| (0..count(page)).map(|i| order(page, i)).collect::<Vec<_>>())
                    .collect();
                let list = &mut pages[steps];
                assert_eq!((kind(list), count(list)), (5, orders.len()), "one page lists all");
                list[24] = 64;
                for (i, pair) in orders.windows(2).enumerate() {
                    list[32 + 8 * i..][..8].copy_from_slice(&(pair[1] - pair[0]).to_le_bytes());
                }
                reseal(list);
            });
        }
    };
    refused("delta", last(u64::from(u32::MAX)), "keys: 4294967295 is not in 0..");
    // If the manifest declares that many rows, the bundle must contain them.
    let grown = |p: &mut Parts| {
        last(u64::from(u32::MAX))(p);
        p.manifest.schema.tables[0].rows = 1 << 32;
    };
    refused("delta", grown, "new rows instead of");
}

/// Gives every table of the car the greatest number of deltas. Returns the live record before.
fn fill(car: &Car) -> Vec<u8> {
    let flash = car.flash();
    let mut record = flash.record().clone();
    record.live.tables.iter_mut().for_each(|t| t.deltas = vec![t.deltas[0]; DELTAS_MAX]);
    write_live(car, &record.encode(99));
    flash.record().encode(100)
}

fn write_live(car: &Car, record: &[u8]) {
    for name in LiveRecord::NAMES {
        car.disk.create(&car.sync.flash.join(name)).unwrap().write_all(record).unwrap();
    }
}

/// A base with a bad page cannot be merged, and in the end it takes no further delta. The car then
/// fetches no delta and does not mark the staged one. A snapshot, or a later merge, lets the car
/// continue.
#[test]
fn a_chain_of_deltas_that_is_full() {
    for merged in [false, true] {
        let fleet = Fleet::new();
        let car = Car::at_first_release(&fleet);
        fleet.delta(T0 + 10, 2);
        car.run(&mut fleet.link(), T0 + 11).unwrap();
        fleet.delta(T0 + 12, 3);
        car.poll(&mut fleet.link(), T0 + 13).unwrap();
        assert_eq!(car.sync.status().unwrap().state, UpdateState::Staged);

        let (before, written) = (fill(&car), car.disk.written());
        car.apply(T0 + 14);
        let status = car.sync.status().unwrap();
        assert!(status.error.as_ref().unwrap().contains("takes no further delta"), "{status:?}");
        assert_eq!((car.live(), status.state), (2, UpdateState::Failed));
        let (written, delta) =
            (car.disk.written() - written, BundleReader::open(&VERSIONS.deltas[2]).unwrap());
        let bytes: u64 = delta.manifest().blobs.iter().map(|b| b.raw_bytes()).sum();
        assert!(written < bytes / 2, "{written} bytes written of a delta of {bytes}");

        let mut wire = Wire::new(fleet.link(), Faults::default());
        let error = car.run(&mut wire, T0 + 15).unwrap_err();
        assert!(matches!(error, UpdateError::NoPath { newest: 3, .. }), "{error:?}");
        assert!(error.to_string().contains("sequence 2 (a merge of its deltas is due)"), "{error}");
        assert!(wire.asked.iter().all(|path| path.starts_with("metadata/")), "{:?}", wire.asked);
        let newest = if merged {
            write_live(&car, &before);
            3
        } else {
            fleet.publish(T0 + 16, &VERSIONS.snapshots[3]);
            4
        };
        car.run(&mut fleet.link(), T0 + 17).unwrap();
        assert_eq!(car.live(), newest);
    }
}

#[test]
fn a_delta_of_another_lineage_is_not_ours() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let mut parts = Parts::read(&VERSIONS.deltas[1]);
    parts.manifest.generation.lineage = "another".to_owned();
    let other = fleet.folder.path().join("other.hatch");
    std::fs::write(&other, parts.bytes()).unwrap();
    fleet.publish(T0 + 10, &other);
    let status = car.run(&mut fleet.link(), T0 + 11).unwrap();
    let release = status.release.map(|release| release.generation.to_string());
    assert_eq!((status.newest, release.as_deref(), car.live()), (Some(1), Some("versions@1"), 1));
}

/// A page of the base is bad when a delta is installed: the delta becomes live, and only the rows
/// of that page are reported as damaged.
#[test]
fn a_delta_over_a_damaged_base() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let base = car.sync.flash.join("g000000000001").join("t0001-0000.seg");
    car.disk.flip(&base, 100 * 8);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    let flash = car.flash();
    assert_eq!(flash.manifest().generation.sequence, 2);
    let (mut damaged, mut rows) = (0, 0);
    let expected = &VERSIONS.rows[1][1];
    let same = |order: u64, row: &[u8]| {
        rows += 1;
        assert_eq!(expected.get(&order).map(Vec::as_slice), Some(row));
    };
    flash.table(1).unwrap().scan(same, |_| damaged += 1).unwrap();
    assert!(damaged == 1 && rows < expected.len(), "{damaged} pages, {rows} rows");
}

/// A car that is 20 generations behind receives one merged delta, in fewer than 1.1 times the bytes
/// of the changed rows.
#[test]
fn a_car_far_behind_takes_one_merged_delta() {
    let versions = Versions::changing(&[60; 20], 20_000, 77);
    let merged = versions.merged(1, 21);
    let fleet = Fleet::of(&versions.snapshots[0]);
    let car = Car::at_first_release(&fleet);
    (2..=21).for_each(|n| fleet.publish(T0 + n as u64, &versions.deltas[n - 1]));
    fleet.publish(T0 + 30, &merged);
    let mut wire = Wire::new(fleet.link(), Faults::default());
    let status = car.run(&mut wire, T0 + 31).unwrap();

    assert_eq!(status.live.as_deref(), Some("versions@21"));
    let flash = car.flash();
    let mut changed = 0;

    for (number, rows) in versions.rows[20].iter().enumerate() {
        let found = hatchback_tests::flash_check::rows_of(&flash, number);
        assert!(found == *rows, "table {number}");
        let old = &versions.rows[0][number];
        let width = rows.values().next().unwrap().len();
        changed += rows.iter().filter(|(k, v)| old.get(k) != Some(v)).count() * (8 + width);
        changed += old.keys().filter(|k| !rows.contains_key(k)).count() * 8;
    }

    let manifests = wire.asked.iter().filter(|p| p.starts_with("targets/")).count();
    let chunks = BundleReader::open(&merged).unwrap();
    let stored: u64 = chunks
        .manifest()
        .tables
        .iter()
        .map(|t| chunks.manifest().blobs[t.segment as usize].stored_bytes())
        .sum();
    println!(
        "{changed} bytes of changed keys and rows, {stored} stored, {} received in all",
        wire.bytes
    );

    assert_eq!(manifests, 1, "{:?}", wire.asked);
    assert!((stored as f64) < 1.1 * changed as f64, "{stored} for {changed}");
}

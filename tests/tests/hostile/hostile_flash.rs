//! Damaged flash: live records torn or flipped, files missing. The runtime never takes such a
//! directory for an empty one, never serves it and never overwrites it. With the files restored,
//! the scores are the same again.

use hatchback::bundle::manifest::sha256;
use hatchback::flash::Flash;
use hatchback::flash::live::LiveRecord;
use hatchback::io::paired_record::PairedRecord;
use hatchback::model::budget::Budget;
use hatchback_tests::models::open_model;
use hatchback_tests::rewrite::{pages_of, reseal};
use hatchback_tests::versions::Versions;
use hatchback_tests::victim::Victim;
use hatchback_tools::serve::install;

fn write_copies(victim: &Victim, record: &[u8]) {
    for name in LiveRecord::NAMES {
        std::fs::write(victim.flash.join(name), record).unwrap();
    }
}

/// A torn live record is never taken for an empty directory by a reader. One whole copy is enough.
#[test]
fn a_torn_live_record() {
    let victim = Victim::default();
    let system = hatchback::io::disk::system();
    let [first, second] = LiveRecord::NAMES.map(|name| victim.flash.join(name));
    let torn = |record: &[u8]| {
        std::fs::write(&first, record).unwrap();
        Flash::open(&system, &victim.flash).unwrap();
        std::fs::write(&second, record).unwrap();
        let texts = [
            Flash::open(&system, &victim.flash).err().unwrap().to_string(),
            open_model(&victim.flash, Budget::default()).err().unwrap().to_string(),
        ];
        let file = second.display().to_string();
        texts.iter().for_each(|text| assert!(text.starts_with(&file), "{text}"));
        assert!(Flash::has_live_record(system.as_ref(), &victim.flash));
        std::fs::write(&second, &victim.live).unwrap();
    };

    (0..victim.live.len()).for_each(|length| torn(&victim.live[..length]));
    for bit in 0..victim.live.len() * 8 {
        let mut record = victim.live.clone();
        record[bit / 8] ^= 1 << (bit % 8);
        torn(&record);
    }

    torn(&[&victim.live[..], &[0]].concat());
    torn(&[0; 4096]);
}

/// A snapshot replaces a live record that is lost in both copies, and a delta does not.
#[test]
fn only_a_snapshot_follows_a_lost_live_record() {
    let (versions, folder) = (Versions::new(2, 100, 3), tempfile::tempdir().unwrap());
    let flash = folder.path().join("flash");
    install(&versions.snapshots[0], &flash).unwrap();
    for name in LiveRecord::NAMES {
        std::fs::write(flash.join(name), b"garbage").unwrap();
    }
    let error = format!("{:#}", install(&versions.deltas[1], &flash).err().unwrap());
    assert!(error.contains("only a snapshot can follow"), "{error}");
    assert!(Flash::open(&hatchback::io::disk::system(), &flash).is_err());
    let flash = install(&versions.snapshots[1], &flash).unwrap();
    assert_eq!(flash.manifest().generation.sequence, 2);
}

/// A segment of a wrong length is damage. The same snapshot replaces it, and an older one does not.
#[test]
fn damage_lets_no_older_release_in() {
    let (versions, folder) = (Versions::new(2, 100, 3), tempfile::tempdir().unwrap());
    let flash = folder.path().join("flash");
    install(&versions.snapshots[1], &flash).unwrap();
    for (bytes, folder) in [(0, "g000000000002"), (5000, "g000000000002-1")] {
        let segment = flash.join(folder).join("t0000-0000.seg");
        std::fs::File::options().write(true).open(&segment).unwrap().set_len(bytes).unwrap();
        let error = format!("{:#}", install(&versions.snapshots[0], &flash).err().unwrap());
        assert!(error.contains("needs a higher sequence"), "{error}");
        install(&versions.snapshots[1], &flash).unwrap();
        open_model(&flash, Budget::default()).unwrap();
    }
}

#[test]
fn a_live_record_that_references_missing_files() {
    let victim = Victim::default();
    let refused = |change: &dyn Fn(&mut LiveRecord), text: &str| {
        let (writes, mut record) = LiveRecord::decode(&victim.live).unwrap();
        change(&mut record);
        write_copies(&victim, &record.encode(writes));
        let error = open_model(&victim.flash, Budget::default()).err().unwrap().to_string();
        assert!(error.contains(text), "{error}");
    };
    refused(&|r| r.live.generation.sequence = 9, "g000000000009/manifest: No such file");
    refused(
        &|r| r.live.manifest[0] ^= 1,
        "g000000000005/manifest: manifest: does not match its hash",
    );
    for name in LiveRecord::NAMES {
        std::fs::remove_file(victim.flash.join(name)).unwrap();
    }
    let error =
        Flash::open(&hatchback::io::disk::system(), &victim.flash).err().unwrap().to_string();
    assert!(error.contains("flash: live: no generation is live here"), "{error}");
    write_copies(&victim, &victim.live);
}

#[test]
fn a_manifest_missing_or_damaged_on_flash() {
    let victim = Victim::default();
    let path = victim.flash.join("g000000000005").join("manifest");
    let whole = std::fs::read(&path).unwrap();
    let error = || open_model(&victim.flash, Budget::default()).err().unwrap().to_string();

    for bit in [0, 9, 8 * 100, 8 * whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, damaged).unwrap();
        assert!(error().contains("g000000000005/manifest: manifest: does not match its hash"));
    }

    // A manifest with the hash of the live record and an unknown format.
    let mut later = whole.clone();
    later[0] = 4;
    std::fs::write(&path, &later).unwrap();
    let (writes, mut record) = LiveRecord::decode(&victim.live).unwrap();
    record.live.manifest = sha256(&later);
    write_copies(&victim, &record.encode(writes));

    assert!(error().contains("g000000000005/manifest: format: 4 is not 1"));
    write_copies(&victim, &victim.live);
    std::fs::remove_file(&path).unwrap();
    assert!(error().contains("g000000000005/manifest: No such file"));

    std::fs::write(&path, &whole).unwrap();
}

#[test]
fn files_missing_on_flash() {
    let victim = Victim::default();
    for name in ["t0000-0000.seg", "t0001-0000.seg", "dense.onnx"] {
        let path = victim.flash.join("g000000000005").join(name);
        let whole = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = open_model(&victim.flash, Budget::default()).err().unwrap().to_string();
        assert!(error.contains(&format!("g000000000005/{name}: No such file")), "{error}");
        std::fs::write(&path, &whole).unwrap();
    }
}

/// No byte of a trailer may differ from what the manifest and its counts make, whatever its
/// checksum.
#[test]
fn a_trailer_with_other_bytes() {
    let victim = Victim::default();
    let path = victim.flash.join("g000000000005/t0000-0000.seg");
    let whole = std::fs::read(&path).unwrap();
    for byte in [1000, 2000, 4095] {
        let mut pages = pages_of(&whole);
        let trailer = pages.last_mut().unwrap();
        trailer[byte] ^= 1;
        reseal(trailer);
        std::fs::write(&path, pages.concat()).unwrap();
        let opened = open_model(&victim.flash, Budget::default());
        let error = opened.err().unwrap().to_string();
        assert!(error.contains("t0000-0000.seg: trailer"), "byte {byte}: {error}");
    }
    std::fs::write(&path, whole).unwrap();
}

/// A network with a flipped weight would run and score wrongly, so it must not open.
#[test]
fn a_flipped_bit_beside_the_segments() {
    let victim = Victim::default();
    let folder = victim.flash.join("g000000000005");
    let open = || open_model(&victim.flash, Budget::default());
    let path = folder.join("dense.onnx");
    let whole = std::fs::read(&path).unwrap();
    for bit in [0, 4 * whole.len(), 8 * whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, damaged).unwrap();
        let error = open().err().unwrap().to_string();
        assert!(
            error.contains("g000000000005/dense.onnx: content: does not match its hash"),
            "{error}"
        );
    }
    std::fs::write(&path, whole).unwrap();

    // A hot list only says which rows to read first.
    std::fs::write(folder.join("t0002.hot"), b"garbage").unwrap();
    open().unwrap();
    std::fs::remove_file(folder.join("t0002.hot")).unwrap();
    open().unwrap();
}

/// No call of the disk follows a link at the end of a path: another user of a folder could lead a
/// write, or a read, to any file.
#[test]
fn a_link_is_never_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    std::fs::write(&file, [7; 8192]).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let disk = hatchback::io::disk::system();
    assert!(disk.read(&file, 8192).is_ok() && disk.open(&file).is_ok());
    assert!(disk.open_pages(&file).is_ok());

    assert!(disk.read(&link, 8192).is_err(), "read");
    assert!(disk.open(&link).is_err(), "open");
    assert!(disk.open_pages(&link).is_err(), "open_pages");
    assert!(disk.append(&link, 8).is_err(), "append");
    // A file or a lock takes the place of the link.
    let mut output = disk.create(&link).unwrap();
    output.write_all(b"new").and_then(|()| output.flush()).unwrap();
    assert_eq!(std::fs::read(&link).unwrap(), b"new");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert!(disk.lock(&link, std::time::Duration::ZERO).unwrap().is_some());
    assert!(std::fs::symlink_metadata(&link).unwrap().is_file(), "lock");
    assert_eq!(std::fs::read(&file).unwrap(), [7; 8192]);
}

//! Damaged flash: live records torn or flipped, files missing. The runtime never takes such a
//! directory for an empty one, never serves it and never overwrites it. With the files restored,
//! the scores are the same again.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::bundle::manifest::sha256;
use hatchback::flash::Flash;
use hatchback::flash::live::LiveRecord;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback_tests::victim::Victim;

/// A torn live record is never taken for an empty directory and never overwritten.
#[test]
fn a_torn_live_record() {
    let victim = Victim::default();
    let path = victim.flash.join("live");
    let good = victim.next.clone().bytes();
    std::fs::write(victim.bundle(), &good).unwrap();
    let refused = |record: &[u8]| {
        std::fs::write(&path, record).unwrap();
        let texts = [
            Flash::open(&hatchback::io::disk::system(), &victim.flash).err().unwrap().to_string(),
            Model::open(&hatchback::io::disk::system(), &victim.flash, Budget::default())
                .err()
                .unwrap()
                .to_string(),
            victim.install(&good).err().unwrap().to_string(),
        ];
        let file = path.display().to_string();
        texts.iter().for_each(|text| assert!(text.starts_with(&file), "{text}"));
        assert_eq!(std::fs::read(&path).unwrap(), record, "overwritten");
    };

    (0..victim.live.len()).for_each(|length| refused(&victim.live[..length]));
    for bit in 0..victim.live.len() * 8 {
        let mut record = victim.live.clone();
        record[bit / 8] ^= 1 << (bit % 8);
        refused(&record);
    }

    refused(&[&victim.live[..], &[0]].concat());
    refused(&[0; 4096]);
    std::fs::write(&path, &victim.live).unwrap();
}

#[test]
fn a_live_record_that_references_missing_files() {
    let victim = Victim::default();
    let path = victim.flash.join("live");
    let refused = |change: &dyn Fn(&mut LiveRecord), text: &str| {
        let mut record = LiveRecord::decode(&victim.live).unwrap();
        change(&mut record);
        std::fs::write(&path, record.encode()).unwrap();
        let error = Model::open(&hatchback::io::disk::system(), &victim.flash, Budget::default())
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(text), "{error}");
    };
    refused(&|r| r.live.generation.sequence = 9, "g000000000009/manifest: No such file");
    refused(
        &|r| r.live.manifest[0] ^= 1,
        "g000000000005/manifest: manifest: does not match its hash",
    );
    std::fs::remove_file(&path).unwrap();
    let error =
        Flash::open(&hatchback::io::disk::system(), &victim.flash).err().unwrap().to_string();
    assert!(error.contains("flash: live: no generation is live here"), "{error}");
    std::fs::write(&path, &victim.live).unwrap();
}

#[test]
fn a_manifest_missing_or_damaged_on_flash() {
    let victim = Victim::default();
    let path = victim.flash.join("g000000000005").join("manifest");
    let whole = std::fs::read(&path).unwrap();
    let error = || {
        Model::open(&hatchback::io::disk::system(), &victim.flash, Budget::default())
            .err()
            .unwrap()
            .to_string()
    };

    for bit in [0, 9, 8 * 100, 8 * whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, damaged).unwrap();
        assert!(error().contains("g000000000005/manifest: manifest: does not match its hash"));
    }

    // A manifest with the hash of the live record and an unknown format.
    let mut later = whole.clone();
    later[0] = 2;
    std::fs::write(&path, &later).unwrap();
    let mut record = LiveRecord::decode(&victim.live).unwrap();
    record.live.manifest = sha256(&later);
    std::fs::write(victim.flash.join("live"), record.encode()).unwrap();

    assert!(error().contains("g000000000005/manifest: format: 2 is not 1"));
    std::fs::write(victim.flash.join("live"), &victim.live).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(error().contains("g000000000005/manifest: No such file"));

    std::fs::write(&path, &whole).unwrap();
}

#[test]
fn files_missing_on_flash() {
    let victim = Victim::default();
    for name in ["t0000-0000.seg", "t0001-0000.seg", "t0002.hot", "dense.onnx"] {
        let path = victim.flash.join("g000000000005").join(name);
        let whole = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = Model::open(&hatchback::io::disk::system(), &victim.flash, Budget::default())
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(&format!("g000000000005/{name}: No such file")), "{error}");
        std::fs::write(&path, &whole).unwrap();
    }
}

/// A network with a flipped weight would run and score wrongly, so it must not open.
#[test]
fn a_flipped_bit_beside_the_segments() {
    let victim = Victim::default();
    let folder = victim.flash.join("g000000000005");
    for name in ["dense.onnx", "t0002.hot"] {
        let path = folder.join(name);
        let whole = std::fs::read(&path).unwrap();
        for bit in [0, 4 * whole.len(), 8 * whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, damaged).unwrap();
            let opened =
                Model::open(&hatchback::io::disk::system(), &victim.flash, Budget::default());
            let error = opened.err().unwrap().to_string();
            assert!(
                error.contains(&format!("g000000000005/{name}: content: does not match its hash")),
                "{error}"
            );
        }
        std::fs::write(&path, whole).unwrap();
    }
    Model::open(&hatchback::io::disk::system(), &victim.flash, Budget::default()).unwrap();
}

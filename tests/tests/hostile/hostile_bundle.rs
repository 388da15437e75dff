//! Bundles from an attacker, one test for each attack. The install refuses each with an error that
//! names the file and the field. The live generation stays live and scores the same.

use hatchback::bundle::manifest::{Chunk, Deferral, Layer, Manifest, Restored};
use hatchback::bundle::{BundleError, BundleReader};
use hatchback::flash::Flash;
use hatchback::limits::{CHUNK_BYTES, MANIFEST_BYTES_MAX};
use hatchback::model::budget::Budget;
use hatchback_tests::models::{ModelPlan, open_model};
use hatchback_tests::random::Random;
use hatchback_tests::rewrite::{Parts, TRAILER_BYTES};
use hatchback_tests::victim::{HASHED, HOT, INDEXED, Victim, plan};

#[test]
fn truncated_at_every_length() {
    let victim = Victim::default();
    let bundle = victim.next.clone().bytes();
    std::fs::write(victim.bundle(), &bundle).unwrap();
    let file = std::fs::File::options().write(true).open(victim.bundle()).unwrap();
    for length in (0..bundle.len() as u64).rev() {
        file.set_len(length).unwrap();
        match BundleReader::open(&victim.bundle()) {
            Err(BundleError::Field(e)) => {
                assert!(["length", "trailer"].contains(&e.field.as_str()))
            }
            other => panic!("{length} of {} bytes: {:?}", bundle.len(), other.err()),
        }
    }
    victim.refuses(&bundle[..bundle.len() - 1], &["attack.bundle", "trailer: is missing"]);
    victim.refuses(&[], &["attack.bundle", "length: 0 bytes"]);
    victim.refuses(&[&bundle[..], &[0]].concat(), &["trailer: is missing"]);
    // The trailer belongs to a file that is one byte longer.
    let without_a_byte = [&bundle[..16], &bundle[17..]].concat();
    victim.refuses(&without_a_byte, &["trailer.manifest_at"]);
}

#[test]
fn every_flipped_bit() {
    let victim = Victim::default();
    let mut bundle = victim.next.clone().bytes();
    let mut random = Random::new(1);
    let (header, trailer) = (0..16 * 8, (bundle.len() - TRAILER_BYTES) * 8..bundle.len() * 8);
    let anywhere = (0..250).map(|_| random.below(bundle.len() as u64 * 8) as usize);
    let bits: Vec<usize> = header.chain(trailer).chain(anywhere).collect();
    for bit in bits {
        bundle[bit / 8] ^= 1 << (bit % 8);
        victim.refuses(&bundle, &["attack.bundle"]);
        bundle[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn wrong_format_numbers() {
    let victim = Victim::default();
    victim.refuses(&victim.attacked(|p| p.header[8] = 2), &["attack.bundle", "format: 2 is not 1"]);
    victim.refuses(&victim.attacked(|p| p.header[15] = 1), &["format: 72057594037927937 is not 1"]);
    victim.refuses(&victim.attacked(|p| p.header[0] = b'h'), &["magic"]);
    let mut manifest = victim.next.manifest.encode().unwrap();
    manifest[0] = 4;
    victim.refuses(
        &victim.next.bytes_with(&manifest),
        &["attack.bundle: manifest: format: 4 is not 1"],
    );
    manifest[0] = 1;
    victim.refuses(
        &victim.next.bytes_with(&manifest[..manifest.len() - 1]),
        &["manifest: does not decode"],
    );
    let mut whole = victim.next.manifest.clone();
    let deferral = Deferral { window: 1, step: 1, rows: 1, since: None, distance_max: 0.5 };
    whole.deferral = Some(deferral);
    victim.refuses(
        &victim.next.bytes_with(&whole.encode().unwrap()),
        &["manifest: deferral: belongs to a delta"],
    );
    victim.refuses(&victim.next.bytes_with(&[2, 0, 0]), &["manifest: format: 3 bytes are too few"]);
    victim.refuses(&victim.next.bytes_with(&[]), &["manifest: format: 0 bytes are too few"]);
}

#[test]
fn manifest_lengths_that_are_false() {
    let victim = Victim::default();
    let bundle = victim.next.clone().bytes();
    let with = |at: u64, length: u64| {
        let mut bundle = bundle.clone();
        let trailer = bundle.len() - TRAILER_BYTES;
        bundle[trailer..trailer + 8].copy_from_slice(&at.to_le_bytes());
        bundle[trailer + 8..trailer + 16].copy_from_slice(&length.to_le_bytes());
        bundle
    };
    let end = (bundle.len() - TRAILER_BYTES) as u64;
    let over = MANIFEST_BYTES_MAX as u64 + 1;
    for length in [over, u64::MAX, u64::MAX - end] {
        victim
            .refuses(&with(end.wrapping_sub(length), length), &["trailer.manifest_bytes", "over"]);
    }
    for (at, length) in
        [(end, 1), (0, end), (15, end - 15), (u64::MAX, 0), (u64::MAX, 1), (end - 9, 8)]
    {
        victim.refuses(&with(at, length), &["trailer.manifest_at"]);
    }
    victim.refuses(&with(16, end - 16), &["manifest: does not match its hash"]);
}

#[test]
fn a_manifest_with_trailing_bytes() {
    let victim = Victim::default();
    let mut manifest = victim.next.manifest.encode().unwrap();
    manifest.push(0);
    victim.refuses(
        &victim.next.bytes_with(&manifest),
        &["manifest: length: 1 bytes follow the manifest"],
    );
    manifest.truncate(manifest.len() - 2);
    victim.refuses(&victim.next.bytes_with(&manifest), &["manifest: does not decode"]);
}

#[test]
fn a_restored_release_whose_origin_is_false() {
    type Change = fn(&mut Vec<Vec<Layer>>);
    let cases: [(Change, &str); 9] = [
        (|t| drop(t.pop()), "manifest: restored: 2 entries for 3 tables"),
        (|t| t[1].clear(), "manifest: restored.tables[1]: has no base"),
        (|t| t[1][0].segment += 1, "restored.tables[1]: does not begin with the table's segment"),
        (|t| t[1][0].rows -= 1, "restored.tables[1]: does not begin with the table's segment, or"),
        (|t| t[1] = vec![t[1][0]; 2], "restored.tables[1]: sequence 1 is out of order"),
        (|t| t[1] = vec![t[1][0]; 66], "restored.tables[1]: 65 deltas, over 64"),
        (|t| t[1] = vec![t[1][0], Layer { sequence: 2, segment: 99, ..t[1][0] }], "[1]: 99 of"),
        // The pages name the release that the bundle is of.
        (|_| (), "t0000-0000.seg: page 0: belongs to segment"),
        // A second segment is a delta, and a base is none.
        (
            |t| {
                t.iter_mut().for_each(|layers| layers[0].sequence = 6);
                t[0] = vec![t[0][0], Layer { sequence: 7, ..t[0][0] }];
            },
            "t0000-0001.seg: page 0: belongs to segment",
        ),
    ];
    let victim = Victim::default();
    let own = |m: &Manifest| (0..m.tables.len()).map(|t| m.layers(t)).collect::<Vec<_>>();
    for (change, text) in cases {
        let change = |m: &mut Manifest| {
            m.generation.sequence = 9;
            let mut tables = own(m);
            tables.iter_mut().for_each(|layers| layers[0].sequence = 1);
            change(&mut tables);
            m.restored = Some(Restored { sequence: 8, tables });
        };
        victim.refuses_manifest(change, &[text]);
    }
    let late = |m: &mut Manifest| m.restored = Some(Restored { sequence: 9, tables: own(m) });
    victim.refuses_manifest(late, &["manifest: restored: belongs to a snapshot and names an"]);
}

#[test]
fn a_chunk_that_does_not_match_its_hash() {
    let victim = Victim::default();
    for blob in 0..victim.next.stored.len() {
        let mut parts = victim.next.clone();
        parts.rehash();
        let Some(chunk) = parts.stored[blob].first_mut() else { continue };
        chunk[0] ^= 1;
        let bundle = parts.bytes_with(&parts.manifest.encode().unwrap());
        victim.refuses(&bundle, &["attack.bundle", &format!("blobs[{blob}].chunks[0]"), "hash"]);
    }
}

#[test]
fn a_blob_that_does_not_match_its_hash() {
    let victim = Victim::default();
    let mut parts = victim.next.clone();
    parts.rehash();
    let probe = parts.manifest.probe.unwrap();
    parts.manifest.blobs[probe as usize].sha256 = [7; 32];
    let bundle = parts.bytes_with(&parts.manifest.encode().unwrap());
    victim.refuses(&bundle, &["attack.bundle", &format!("blobs[{probe}].sha256"), "hash"]);
}

#[test]
fn chunks_that_overlap_the_manifest_or_leave_a_hole() {
    let victim = Victim::default();
    let last = victim.next.stored.len() - 1;
    let mut parts = victim.next.clone();
    parts.stored[last].push(vec![7; 100]);
    victim.refuses(
        &parts.clone().bytes_with(&parts.manifest.encode().unwrap()),
        &["blobs: chunks end at"],
    );
    parts.stored[last].clear();
    victim.refuses(&parts.bytes_with(&parts.manifest.encode().unwrap()), &["blobs: chunks end at"]);
}

/// A chunk that expands to more or fewer bytes than its manifest entry says, or that is not zstd.
#[test]
fn a_zip_bomb() {
    let victim = Victim::default();
    let dense = victim.next.manifest.dense as usize;
    let compressed = |bytes: usize| zstd::bulk::compress(&vec![0; bytes], 19).unwrap();
    let chunk = |stored: Vec<u8>, raw: usize| {
        victim.attacked(|p| {
            p.manifest.blobs[dense].chunks[0].raw = raw as u32;
            p.stored[dense] = vec![stored];
        })
    };
    let field = format!("blobs[{dense}].chunks[0]");
    let bomb = compressed(256 << 20);
    victim.refuses(&chunk(bomb.clone(), CHUNK_BYTES), &[&field, "does not decompress"]);
    let many_frames = compressed(CHUNK_BYTES).repeat(64);
    victim.refuses(&chunk(many_frames, CHUNK_BYTES), &[&field, "does not decompress"]);
    let short = format!("decompresses to {} bytes instead of {CHUNK_BYTES}", CHUNK_BYTES - 1);
    victim.refuses(&chunk(compressed(CHUNK_BYTES - 1), CHUNK_BYTES), &[&field, &short]);
    victim.refuses(&chunk(vec![0x28; 99], CHUNK_BYTES), &[&field, "does not decompress"]);
    // The size that the manifest declares is itself too large.
    victim.refuses(&chunk(bomb.clone(), CHUNK_BYTES + 1), &[&field, ".raw"]);
    victim.refuses(&chunk(bomb.clone(), u32::MAX as usize), &[&field, ".raw"]);
    victim.refuses(&chunk(bomb, 100), &[&field, ".stored"]);
    victim.refuses(&chunk(vec![], 100), &[&field, ".stored: 0 bytes"]);
    victim.refuses(&chunk(vec![], 0), &[&field, ".raw: 0 bytes"]);
}

#[test]
fn a_chunk_swapped_for_another_valid_chunk() {
    let victim = Victim::default();
    let blob = |table: usize| victim.next.manifest.tables[table].segment as usize;
    let swap = |a: usize, b: usize| {
        victim.attacked(|p| {
            p.manifest.blobs.swap(a, b);
            p.stored.swap(a, b);
        })
    };
    victim.refuses(&swap(blob(HASHED), blob(HOT)), &["t0000-0000.seg: page 0: belongs to segment"]);
    victim.refuses(
        &swap(blob(HASHED), blob(INDEXED)),
        &["t0000-0000.seg: page 0: belongs to segment"],
    );
    let dense = victim.next.manifest.dense as usize;
    victim.refuses(&swap(blob(HASHED), dense), &["t0000-0000.seg: length"]);
    victim.refuses(&swap(dense, blob(HOT)), &["t0002-0000.seg"]);
    // Only the bytes are swapped; each hash is that of the original chunk.
    let mut parts = victim.next.clone();
    parts.stored.swap(blob(HASHED), blob(HOT));
    let lengths = parts.bytes_with(&parts.manifest.encode().unwrap());
    victim.refuses(&lengths, &["blobs[0].chunks[0]: content does not match its hash"]);
}

#[test]
fn blob_numbers_out_of_range() {
    let victim = Victim::default();
    let n = victim.next.manifest.blobs.len() as u32;
    for index in [n, u32::MAX] {
        let of = format!("{index} of {n} blobs");
        let refused = |change: &dyn Fn(&mut Manifest), field: &str| {
            victim.refuses_manifest(change, &[&format!("manifest: {field}: {of}")]);
        };
        refused(&|m| m.tables[1].segment = index, "tables[1].segment");
        refused(&|m| m.tables[2].hot = Some(index), "tables[2].hot");
        refused(&|m| m.dense = index, "dense");
        refused(&|m| m.probe = Some(index), "probe");
    }
    victim
        .refuses_manifest(|m| m.tables.truncate(2), &["manifest: tables: 2 entries for 3 tables"]);
}

#[test]
fn a_lineage_with_path_tricks() {
    let victim = Victim::default();
    let long = "x".repeat(121);
    for lineage in
        ["../x", "/etc/passwd", "a/b", "a\\b", "", "a\0b", "a\nb", "ü", "%2e%2e", "a b", &long]
    {
        let escaped = format!("manifest: lineage: `{}`", lineage.escape_debug());
        victim.refuses_manifest(|m| m.generation.lineage = lineage.to_owned(), &[&escaped]);
    }
}

#[test]
fn a_delta_of_another_parent() {
    let victim = Victim::default();
    let text = "attack.bundle: is a delta from sequence 4, victim@5 is live";
    victim.refuses_manifest(|m| m.parent = Some(4), &[text]);
}

#[test]
fn a_snapshot_that_calls_itself_a_delta() {
    let victim = Victim::default();
    let text = "t0000-0000.seg: fences: this segment has none";
    victim.refuses_manifest(|m| m.parent = Some(5), &[text]);
}

#[test]
fn a_delta_that_is_too_long_to_be_opened() {
    let victim = Victim::default();
    let attack = |p: &mut Parts| {
        p.manifest.parent = Some(5);
        let (blob, chunks) = (p.manifest.tables[HASHED].segment as usize, 65_537);
        let chunk = Chunk { stored: 1, raw: CHUNK_BYTES as u32, sha256: [0; 32] };
        p.manifest.blobs[blob].chunks = vec![chunk; chunks];
        p.stored[blob] = vec![vec![0]; chunks];
    };
    victim.refuses(&victim.attacked(attack), &["attack.bundle: pages: a delta of 16777472 pages"]);
}

#[test]
fn a_delta_whose_tables_are_not_the_live_ones() {
    let victim = Victim::default();
    let refused = |change: &dyn Fn(&mut hatchback::schema::Table), field: &str| {
        let text = format!("attack.bundle: table `t0`: {field} differs from the live generation's");
        let attack = |m: &mut hatchback::bundle::manifest::Manifest| {
            m.parent = Some(5);
            change(&mut m.schema.tables[0]);
        };
        victim.refuses_manifest(attack, &[&text]);
    };
    refused(&|t| t.keys = hatchback::schema::KeySpace::Index, "keys");
    refused(&|t| t.codec = hatchback::Codec::U4, "codec");
    refused(&|t| t.unit_exp += 1, "unit_exp");
}

#[test]
fn another_lineage() {
    let victim = Victim::default();
    let other = std::fs::read(plan("other", 6).pack().bundle).unwrap();
    victim.refuses(&other, &["flash: holds victim@5, the bundle is other@6"]);
}

#[test]
fn a_sequence_that_is_not_newer() {
    let victim = Victim::default();
    for sequence in [0, 4, 5] {
        let plan = ModelPlan { seed: 99, ..plan("victim", sequence) };
        let old = std::fs::read(plan.pack().bundle).unwrap();
        let text = format!(
            "victim@5 is live with other content; victim@{sequence} needs a higher sequence"
        );
        victim.refuses(&old, &["flash: ", &text]);
    }
    // The live generation itself is accepted.
    let same = std::fs::read(plan("victim", 5).pack().bundle).unwrap();
    assert_eq!(victim.install(&same).unwrap().manifest().generation.sequence, 5);
}

/// Random edits anywhere in the manifest with valid hashes: the install refuses the bundle, or the
/// model opens or returns an error.
#[test]
fn random_manifests_never_panic() {
    let victim = Victim::default();
    let mut random = Random::new(7);
    let encoded = victim.next.manifest.encode().unwrap();
    for _ in 0..400 {
        let mut manifest = encoded.clone();
        for _ in 0..=random.below(3) {
            let at = 4 + random.below(manifest.len() as u64 - 4) as usize;
            manifest[at] = random.bits() as u8;
        }
        let scratch = tempfile::tempdir().unwrap();
        std::fs::write(victim.bundle(), victim.next.bytes_with(&manifest)).unwrap();
        let Ok(mut bundle) = BundleReader::open(&victim.bundle()) else { continue };
        if Flash::install(&hatchback::io::disk::system(), scratch.path(), &mut bundle, |_| {})
            .is_ok()
        {
            let _ = open_model(scratch.path(), Budget::default());
        }
    }
}

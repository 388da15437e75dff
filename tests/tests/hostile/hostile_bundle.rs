//! Bundles from an attacker, one test for each attack. The install refuses each with an error that
//! names the file and the field. The live generation stays live and scores the same.

use hatchback::Pooling;
use hatchback::bundle::manifest::{Chunk, Deferral, Layer, Manifest, Restored};
use hatchback::bundle::{BundleError, BundleReader};
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::io::page::PageBytes;
use hatchback::limits::{CHUNK_BYTES, FEATURES_MAX, HOTNESS_MAX, LOOKUPS_MAX, MANIFEST_BYTES_MAX};
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::schema::lookup::Lookup;
use hatchback::schema::{DenseFeature, Feature, InputSource, KeySpace};
use hatchback_tests::models::ModelPlan;
use hatchback_tests::random::Random;
use hatchback_tests::rewrite::{Parts, TRAILER_BYTES, count, kind, pages_of, renumber, reseal};
use hatchback_tests::versions::Versions;
use hatchback_tests::victim::{HASHED, HOT, INDEXED, Victim, plan};
use std::path::Path;

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
fn duplicate_keys() {
    let victim = Victim::default();
    let twice = |pages: &mut Vec<PageBytes>| {
        pages[1].copy_within(16 + 8 * 4..16 + 8 * 5, 16 + 8 * 5);
        reseal(&mut pages[1]);
    };
    victim.refuses_segment(
        HASHED,
        twice,
        &["t0000-0000.seg: page 1: keys do not ascend at entry 5"],
    );
    let a_page_twice = |pages: &mut Vec<PageBytes>| {
        pages[2] = pages[1];
        renumber(pages, 10, 1);
    };
    victim.refuses_segment(
        HASHED,
        a_page_twice,
        &["t0000-0000.seg: page 2: keys do not ascend at entry 0"],
    );
}

#[test]
fn unsorted_keys() {
    let victim = Victim::default();
    let swap_keys = |pages: &mut Vec<PageBytes>| {
        (0..8).for_each(|i| pages[0].swap(16 + i, 24 + i));
        reseal(&mut pages[0]);
    };
    victim.refuses_segment(
        HASHED,
        swap_keys,
        &["t0000-0000.seg: page 0: keys do not ascend at entry 1"],
    );
    let swap_pages = |pages: &mut Vec<PageBytes>| {
        pages.swap(1, 2);
        renumber(pages, 10, 1);
    };
    victim.refuses_segment(
        HASHED,
        swap_pages,
        &["t0000-0000.seg: page 2: keys do not ascend at entry 0"],
    );
}

/// Keys on two pages whose hashes share a fence prefix: a fence can find only one of the pages.
#[test]
fn a_hash_prefix_on_two_pages() {
    let victim = Victim::default();
    let split = |pages: &mut Vec<PageBytes>| {
        let last = 16 + 8 * (count(&pages[0]) - 1);
        let mut prefix = [0; 4];
        prefix.copy_from_slice(&pages[0][last + 4..last + 8]);
        pages[1][16..20].fill(0xff);
        pages[1][20..24].copy_from_slice(&prefix);
        reseal(&mut pages[1]);
    };
    victim.refuses_segment(HASHED, split, &["t0000-0000.seg: fences: hash prefix"]);
}

#[test]
fn rows_that_are_not_numbers() {
    let victim = Victim::default();
    // u8: the scale follows 20 codes, the bias follows the scale.
    for (at, column) in [(20, 20), (22, 21)] {
        for bits in [0x7e00u16, 0x7c00, 0xfc00] {
            let edit = |pages: &mut Vec<PageBytes>| {
                let row = 16 + 8 * count(&pages[3]) + 24 * 7;
                pages[3][row + at..row + at + 2].copy_from_slice(&bits.to_le_bytes());
                reseal(&mut pages[3]);
            };
            let text = format!("t0000-0000.seg: page 3: row 7: column {column} holds");
            victim.refuses_segment(HASHED, edit, &[&text, "not finite"]);
        }
    }

    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let edit = |pages: &mut Vec<PageBytes>| {
            pages[2][16 + 32 * 9 + 12..][..4].copy_from_slice(&value.to_le_bytes());
            reseal(&mut pages[2]);
        };
        let text = format!("t0001-0000.seg: page 2: row 9: column 3 holds {value}");
        victim.refuses_segment(INDEXED, edit, &[&text]);
    }

    let half = |pages: &mut Vec<PageBytes>| {
        let row = 16 + 8 * count(&pages[0]);
        pages[0][row + 11] = 0x7c;
        pages[0][row + 10] = 1;
        reseal(&mut pages[0]);
    };

    victim.refuses_segment(HOT, half, &["t0002-0000.seg: page 0: row 0: column 5 holds NaN"]);
    victim.refuses_manifest(
        |m| m.schema.tables[0].default_row[3] = f32::NAN,
        &["table[0].default_row"],
    );
}

fn fence_page(pages: &[PageBytes]) -> usize {
    pages.iter().position(|p| kind(p) == 3).unwrap()
}

#[test]
fn fences_that_are_false() {
    let victim = Victim::default();
    for fence in [0, 5, 9] {
        let edit = |pages: &mut Vec<PageBytes>| {
            let page = fence_page(pages);
            pages[page][16 + 4 * fence] ^= 1;
            reseal(&mut pages[page]);
        };
        victim.refuses_segment(
            HASHED,
            edit,
            &[&format!("t0000-0000.seg: fences: entry {fence} is not")],
        );
    }

    let recount = |to: u8| {
        move |pages: &mut Vec<PageBytes>| {
            let page = fence_page(pages);
            pages[page][12] = to;
            reseal(&mut pages[page]);
        }
    };

    victim.refuses_segment(HASHED, recount(9), &["t0000-0000.seg: index: 9 entries for 10"]);
    victim.refuses_segment(HASHED, recount(11), &["t0000-0000.seg: fences: entry 10 is not"]);
    let none = |pages: &mut Vec<PageBytes>| {
        pages.remove(fence_page(pages));
        renumber(pages, 10, 0);
    };
    victim.refuses_segment(HASHED, none, &["t0000-0000.seg: index: 0 entries for 10"]);

    // An index table has no fences.
    let unexpected = |pages: &mut Vec<PageBytes>| {
        let mut page = pages[0];
        page[14] = 3;
        pages.insert(pages.len() - 1, page);
        renumber(pages, 4, 1);
    };

    victim.refuses_segment(INDEXED, unexpected, &["t0001-0000.seg: fences: this segment has none"]);
}

/// Every fence and every count is right, but a fence page is between the data pages.
#[test]
fn fences_between_the_rows() {
    let victim = Victim::default();
    let edit = |pages: &mut Vec<PageBytes>| {
        let at = fence_page(pages);
        let (mut first, rest) = (pages[at], &mut pages[at]);
        rest.copy_within(20.., 16);
        rest[12] = 9;
        first[12] = 1;
        pages.insert(1, first);
        renumber(pages, 10, 2);
    };
    victim.refuses_segment(
        HASHED,
        edit,
        &["t0000-0000.seg: pages: rows follow the index on page 2"],
    );
}

/// A base has neither a list of its keys nor deleted keys.
#[test]
fn index_pages_of_a_delta_in_a_base() {
    let victim = Victim::default();
    for (kind, text) in [
        (5, "t0001-0000.seg: keys: do not belong in this place"),
        (6, "t0001-0000.seg: deletes: only a delta deletes keys"),
    ] {
        let unexpected = |pages: &mut Vec<PageBytes>| {
            let mut page = pages[0];
            page[12..16].copy_from_slice(&[1, 0, kind, 0]);
            page[24] = 8;
            pages.insert(pages.len() - 1, page);
            renumber(pages, 4, 1);
        };
        victim.refuses_segment(INDEXED, unexpected, &[text]);
    }
}

#[test]
fn a_delta_whose_list_of_keys_is_false() {
    let (versions, folder) = (Versions::new(2, 900, 23), tempfile::tempdir().unwrap());
    let install = |bundle: &Path| {
        let mut bundle = BundleReader::open(bundle).unwrap();
        Flash::install(&disk::system(), &folder.path().join("flash"), &mut bundle, |_| ())
    };
    install(&versions.deltas[0]).unwrap();

    let attack = folder.path().join("attack");
    for table in 0..2 {
        let mut parts = Parts::read(&versions.deltas[1]);
        parts.edit_segment(table, |pages| {
            let list = pages.iter_mut().find(|page| kind(page) == 5).unwrap();
            list[16] ^= 1;
            reseal(list);
        });
        std::fs::write(&attack, parts.bytes()).unwrap();
        let error = install(&attack).err().unwrap().to_string();
        assert!(error.contains(&format!("t000{table}-0000.seg: keys: entry 0 is not")), "{error}");
    }
    assert_eq!(install(&versions.deltas[1]).unwrap().manifest().generation.sequence, 2);
}

#[test]
fn a_page_from_another_segment() {
    let victim = Victim::default();
    let foreign = pages_of(&victim.next.content(victim.next.manifest.tables[HOT].segment))[0];
    victim.refuses_segment(
        HASHED,
        |p| p[0] = foreign,
        &["t0000-0000.seg: page 0: belongs to segment"],
    );
    // A page of the same table and the same number, from the live generation.
    let live = std::fs::read(victim.flash.join("g000000000005").join("t0000-0000.seg")).unwrap();
    victim.refuses_segment(
        HASHED,
        |p| p[4] = pages_of(&live)[4],
        &["t0000-0000.seg: page 4: belongs to segment"],
    );
    victim.refuses_segment(HASHED, |p| p[4] = p[5], &["t0000-0000.seg: page 4: says it is page 5"]);
    // The whole segment of the live generation.
    victim.refuses(
        &victim.attacked(|p| p.set_content(p.manifest.tables[HASHED].segment, &live)),
        &["t0000-0000.seg: page 0: belongs to segment"],
    );
}

#[test]
fn row_counts_that_are_false() {
    let victim = Victim::default();
    for (table, rows) in [
        (HASHED, 0),
        (HASHED, 1199),
        (HASHED, 1201),
        (INDEXED, 499),
        (INDEXED, 501),
        (HOT, u64::MAX),
    ] {
        let text =
            format!("t{table:04}-0000.seg: rows: {} instead of {rows}", [1200, 500, 300][table]);
        victim.refuses_manifest(|m| m.schema.tables[table].rows = rows, &[&text]);
    }

    let claim = |entries: u16| {
        move |pages: &mut Vec<PageBytes>| {
            pages[1][12..14].copy_from_slice(&entries.to_le_bytes());
            reseal(&mut pages[1]);
        }
    };

    for entries in [0, 128, 4096, u16::MAX] {
        let text = format!("t0000-0000.seg: page 1: claims {entries} entries");
        victim.refuses_segment(HASHED, claim(entries), &[&text]);
    }

    victim.refuses_segment(HASHED, claim(3), &["t0000-0000.seg"]);
    victim.refuses_segment(
        INDEXED,
        claim(100),
        &["t0001-0000.seg: rows: page 2 follows a page that is not full"],
    );

    // A page is missing and the trailer is changed to fit.
    let without_a_page = |pages: &mut Vec<PageBytes>| {
        pages.remove(1);
        renumber(pages, 3, 0);
    };

    victim.refuses_segment(INDEXED, without_a_page, &["t0001-0000.seg"]);
}

#[test]
fn trailers_that_are_false() {
    let victim = Victim::default();
    // Every field, and the zeros after the last one.
    for at in (16..68).chain([100, 4095]) {
        let edit = |pages: &mut Vec<PageBytes>| {
            let trailer = pages.last_mut().unwrap();
            trailer[at] ^= 1;
            reseal(trailer);
        };
        victim.refuses_segment(HASHED, edit, &["t0000-0000.seg: trailer"]);
    }

    let append = |pages: &mut Vec<PageBytes>| pages.push([0; 4096]);
    victim.refuses_segment(HASHED, append, &["t0000-0000.seg: length: pages follow the trailer"]);
    let cut = |pages: &mut Vec<PageBytes>| pages.truncate(pages.len() - 1);
    victim.refuses_segment(
        HASHED,
        cut,
        &["t0000-0000.seg: length: the segment ends before its trailer"],
    );

    victim.refuses_segment(HASHED, |pages| pages.clear(), &["t0000-0000.seg: length"]);
    let blob = victim.next.manifest.tables[HASHED].segment;
    let mut odd = victim.next.content(blob);
    odd.push(0);
    victim.refuses(
        &victim.attacked(|p| p.set_content(blob, &odd)),
        &["t0000-0000.seg: length: 1 bytes follow the last whole page"],
    );
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
fn lookups_that_contradict_the_schema() {
    let victim = Victim::default();
    let refused = |change: &dyn Fn(&mut Manifest), text: &str| {
        victim.refuses_manifest(change, &["attack.bundle: manifest: schema: ", text]);
    };
    refused(&|m| m.schema.lookups[1].table = 3, "lookup[1].table: 3 of 3 tables");
    refused(&|m| m.schema.lookups[1].table = u16::MAX, "lookup[1].table: 65535 of 3 tables");
    refused(&|m| m.schema.lookups[2].feature = 3, "lookup[2].feature: 3 of 3 features");
    refused(&|m| m.schema.lookups[2].feature = u16::MAX, "lookup[2].feature: 65535 of 3 features");
    refused(&|m| m.schema.lookups.truncate(2), "feature[2].table: is empty");
    let retire = |m: &mut Manifest| m.schema.features[2].retired = true;
    refused(&retire, "feature[2].retired: is set, and the feature has a table");
    let both = |m: &mut Manifest| (retire(m), m.schema.features[2].shared = true).1;
    refused(&both, "feature[2].shared: is set, and the feature is retired");
    refused(
        &|m| {
            let all = (0..3).flat_map(|feature| (0..3).map(move |table| (feature, table)));
            let lookup = |(feature, table)| Lookup { feature, table, pooling: Pooling::Sum };
            m.schema.lookups = all.cycle().take(LOOKUPS_MAX + 1).map(lookup).collect();
        },
        "lookup: has more than 4096 entries",
    );
    let again = |m: &mut Manifest| m.schema.lookups.push(m.schema.lookups[0]);
    refused(&again, "feature[0].table: `t0` occurs twice");
    let other = |m: &mut Manifest| {
        let table = (m.schema.lookups[0].table + 1) % 3;
        m.schema.lookups.push(Lookup { table, ..m.schema.lookups[0] });
    };
    refused(&other, "feature[0]: `f0@t1` feeds no input with its vectors");
    refused(
        &|m| (m.schema.features[0].weighted, m.schema.lookups[0].pooling) = (true, Pooling::Max),
        "feature[0].weights: weights with Max pooling",
    );
    let at = |m: &mut Manifest| m.schema.features[1].name = "f0@t0".to_owned();
    refused(&at, "feature[1].name: makes `f0@t0` ambiguous");
}

#[test]
fn schemas_that_contradict_themselves() {
    let victim = Victim::default();
    let refused = |change: &dyn Fn(&mut Manifest), text: &str| {
        victim.refuses_manifest(change, &["attack.bundle: manifest: schema: ", text]);
    };
    refused(&|m| m.schema.features[2].hotness_max = 0, "feature[2].hotness_max: 0 is not in");
    refused(
        &|m| m.schema.features[2].hotness_max = HOTNESS_MAX as u32 + 1,
        "feature[2].hotness_max: 4097",
    );
    refused(&|m| m.schema.features[2].hotness_max = u32::MAX, "feature[2].hotness_max");
    refused(&|m| m.schema.tables[0].dim = 0, "table[0].dim: 0 is not in");
    refused(&|m| m.schema.tables[0].dim = u32::MAX, "table[0].dim");
    refused(
        &|m| m.schema.tables[1].dim = 1017,
        "table[1].dim: 1017 takes 4068 bytes a row, over 4064",
    );
    refused(&|m| m.schema.tables[0].dim = 19, "table[0].default_row: is not 19 finite values");
    refused(&|m| m.schema.tables[0].default_row[1] = f32::NAN, "table[0].default_row: is not");
    refused(&|m| m.schema.tables[0].unit_exp = 65, "table[0].unit_exp: 65 does not fit u8");
    refused(&|m| m.schema.tables[0].unit_exp = i8::MIN, "table[0].unit_exp: -128 does not fit u8");
    refused(&|m| m.schema.tables[1].unit_exp = 1, "table[1].unit_exp: 1 does not fit f32");
    refused(&|m| m.schema.tables[1].name = "t0".to_owned(), "table[1].name: `t0` occurs twice");
    refused(&|m| m.schema.features[1].name = String::new(), "feature[1].name");
    refused(&|m| m.schema.features[1].name = "a\nb".to_owned(), "feature[1].name: `a\\nb`");
    refused(&|m| m.schema.dense_features[1].name = "x".repeat(121), "dense_features[1].name");
    refused(
        &|m| drop(m.schema.network.inputs.remove(0)),
        "network.input: 0 inputs take the 2 dense features",
    );
    refused(&|m| drop(m.schema.network.inputs.pop()), "feature[0]: `f0` feeds no input");

    let feed = |lookups: Vec<u16>| {
        move |m: &mut Manifest| {
            m.schema.network.inputs[1].source = InputSource::Vectors(lookups.clone())
        }
    };

    refused(&feed(vec![0, 1, 2, 9]), "network.input[1].features: no lookup 9");
    refused(&feed(vec![0, 1, 1]), "feature[2]: `f2` feeds no input");
    refused(&feed(vec![]), "network.input[1].features: is empty");

    // Every feature is within its limits, but a sample would take gigabytes.
    let wide = |m: &mut Manifest| {
        let more = |i| Feature::plain(&format!("wide{i}"), HOTNESS_MAX as u32);
        m.schema.features.extend((3..FEATURES_MAX).map(more));
        let all = 0..FEATURES_MAX as u16;
        let lookup = |feature| Lookup { feature, table: 0, pooling: Pooling::None };
        m.schema.lookups.extend(all.clone().skip(3).map(lookup));
        m.schema.network.inputs[1].source = InputSource::Vectors(all.collect());
    };

    refused(&wide, "network.input[1]: is wider than");
}

/// A consistent manifest that does not match the rows of its bundle.
#[test]
fn a_schema_that_does_not_fit_the_rows() {
    let victim = Victim::default();
    let refused = |table: usize, change: &dyn Fn(&mut hatchback::schema::Table)| {
        let file = format!("t{table:04}-0000.seg: ");
        victim.refuses_manifest(|m| change(&mut m.schema.tables[table]), &[&file]);
    };
    refused(INDEXED, &|t| t.keys = KeySpace::Sparse);
    refused(HASHED, &|t| t.keys = KeySpace::Index);
    refused(HASHED, &|t| t.codec = hatchback::Codec::U4);
    refused(HASHED, &|t| t.unit_exp = 1);
    refused(HOT, &|t| t.codec = hatchback::Codec::F32);
    refused(INDEXED, &|t| (t.dim, t.default_row) = (7, vec![0.0; 7]));
    refused(INDEXED, &|t| (t.dim, t.default_row) = (1000, vec![0.0; 1000]));
    victim.refuses_manifest(
        |m| m.generation.sequence = 7,
        &["t0000-0000.seg: page 0: belongs to segment"],
    );
}

#[test]
fn a_network_that_does_not_fit_the_schema() {
    let victim = Victim::default();
    let refused = |change: &dyn Fn(&mut Parts), text: &str| {
        victim.refuses(&victim.attacked(change), &["attack.bundle: ", text]);
    };
    let dense = victim.next.manifest.dense;
    refused(&|p| p.set_content(dense, b"no network"), "dense network");
    refused(&|p| p.set_content(dense, b""), "dense network");
    refused(
        &|p| p.manifest.schema.network.outputs[0].name = "logit".to_owned(),
        "no output named `logit`",
    );
    refused(
        &|p| p.manifest.schema.network.inputs[0].name = "x".to_owned(),
        "dense network: input `dense`",
    );
    let more = DenseFeature::plain("more");
    refused(&|p| p.manifest.schema.dense_features.push(more.clone()), "the schema feeds 3");
}

#[test]
fn a_probe_set_that_does_not_decode() {
    let victim = Victim::default();
    let probe = victim.next.manifest.probe.unwrap();
    for (set, text) in [
        (&[9, 0, 0, 0, 0][..], "format 9 is not 1"),
        (&[1, 0, 0], "3 bytes are too few"),
        (&[1, 0, 0, 0], "does not decode"),
        (&[1, 0, 0, 0, 0, 0], "1 bytes follow the set"),
        (&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x7f], "does not decode"),
    ] {
        victim.refuses(
            &victim.attacked(|p| p.set_content(probe, set)),
            &["attack.bundle: probe set: ", text],
        );
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
            let _ = Model::open(&hatchback::io::disk::system(), scratch.path(), Budget::default());
        }
    }
}

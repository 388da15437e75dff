//! Segments of a bundle that lie: their keys, fences, pages and trailers.

use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::io::page::PageBytes;
use hatchback_tests::rewrite::{Parts, count, kind, pages_of, renumber, reseal};
use hatchback_tests::versions::Versions;
use hatchback_tests::victim::{HASHED, HOT, INDEXED, Victim};
use std::path::Path;

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

//! The cache transfer of swaps: after each delta every row is the new generation's, bit for bit,
//! and rows that were cached are not read again. Callers submit requests throughout.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::bundle::BundleReader;
use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::budget::Budget;
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::Serving;
use hatchback::schema::Schema;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::unmix;
use hatchback_tests::versions::{Rows, Versions};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const GENERATIONS: usize = 12;

/// Returns the values of the row of `order`, or zeros if there is none.
fn values(rows: &Rows, order: u64, dim: usize) -> Vec<f32> {
    let decode =
        |row: &Vec<u8>| row.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    rows.get(&order).map_or(vec![0.0; dim], decode)
}

/// Scores the rows of these orders and checks that every value is that of the generation that
/// answers. Returns its sequence.
fn score(serving: &Serving, schema: &Schema, versions: &Versions, orders: &[(u64, u64)]) -> usize {
    let mut batch = Batch::new(schema, orders.len());
    for (index, hashed) in orders {
        let sample =
            Sample { sparse: vec![vec![*index], vec![unmix(*hashed)]], ..Sample::default() };
        batch.push(schema, &sample).unwrap();
    }
    let ticket = loop {
        match serving.submit("m", &batch, None) {
            Ok(ticket) => break ticket,
            Err(RequestError::Busy(_)) => std::thread::yield_now(),
            Err(e) => panic!("{e}"),
        }
    };
    let sequence = ticket.generation().sequence as usize;
    let rows = &versions.rows[sequence - 1];
    let answer = ticket.wait().unwrap();
    for ((index, hashed), found) in orders.iter().zip(answer.scores().values.chunks(10)) {
        let expected = [values(&rows[0], *index, 4), values(&rows[1], *hashed, 6)].concat();
        assert_eq!(found, expected, "generation {sequence}: keys {index} and {hashed:x}");
    }
    sequence
}

fn install(directory: &Path, bundle: &Path) -> Flash {
    Flash::install(&disk::system(), directory, &mut BundleReader::open(bundle).unwrap(), |_| {})
        .unwrap()
}

#[test]
fn a_swap_keeps_the_caches_warm_and_no_old_row() {
    let versions = Versions::new(GENERATIONS, 2000, 31);
    let folder = tempfile::tempdir().unwrap();
    let flash = install(folder.path(), &versions.snapshots[0]);
    let budget =
        Budget { cache_bytes_max: 1 << 20, workers: 2, batch_max: 64, ..Budget::default() };
    let serving = Serving::new(1 << 30, 64, Arc::new(SystemClock::default()));
    serving.load("m", &flash, budget).unwrap();
    let schema = serving.schema("m").unwrap();

    // Every key that any generation has. Some keys are added by a delta, some are deleted.
    let orders = |table: usize| {
        let all = versions.rows.iter().flat_map(|rows| rows[table].keys().copied());
        all.collect::<std::collections::BTreeSet<u64>>().into_iter().collect::<Vec<u64>>()
    };

    let (index, hashed) = (orders(0), orders(1));
    let pairs: Vec<(u64, u64)> = (0..index.len().max(hashed.len()))
        .map(|i| (index[i % index.len()], hashed[i % hashed.len()]))
        .collect();
    let everything = || {
        for some in pairs.chunks(64) {
            score(&serving, &schema, &versions, some);
        }
    };

    everything();
    let (stop, served) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for caller in 0..2usize {
            let (serving, schema, versions, pairs, stop, served) =
                (&serving, &schema, &versions, &pairs, &stop, &served);
            scope.spawn(move || {
                for some in pairs.chunks(7 + caller).cycle() {
                    score(serving, schema, versions, some);
                    served.fetch_add(1, Ordering::Relaxed);
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }

        for generation in 2..=GENERATIONS {
            let flash = install(folder.path(), &versions.deltas[generation - 1]);
            let transferred = serving.swap("m", &flash, budget, &|| {}).unwrap().transferred;
            let changed: usize = (0..2).map(|t| flash.table(t).unwrap().changed()).sum();
            assert!(
                transferred.copied > 2000 && transferred.read > 0 && transferred.read <= changed,
                "{transferred:?}"
            );
        }

        stop.store(true, Ordering::Relaxed);
    });
    assert!(served.load(Ordering::Relaxed) > 0);

    // The last generation, after all callers have stopped: its caches miss only the rows of the
    // last delta.
    let last = install(folder.path(), &versions.deltas[GENERATIONS - 1]);
    serving.swap("m", &last, budget, &|| {}).unwrap();
    let sequence = score(&serving, &schema, &versions, &pairs[..1]);

    assert_eq!(sequence, GENERATIONS);
    everything();
    let counters = serving.stats("m").unwrap().counters;
    let missed = counters.missed_lookups as f64 / counters.cached_lookups as f64;
    let gone = pairs.iter().filter(|(i, h)| {
        let rows = &versions.rows[GENERATIONS - 1];
        !rows[0].contains_key(i) || !rows[1].contains_key(h)
    });
    let gone = gone.count() as f64 / pairs.len() as f64;

    assert!(
        missed <= gone + 0.02,
        "{missed} of the lookups missed, {gone} of the keys are gone: {counters:?}"
    );
}

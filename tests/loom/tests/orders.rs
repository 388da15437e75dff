//! What must hold in every order of the cache's atomic steps. `./test` runs these tests with `--cfg
//! loom`.
#![cfg(loom)]

use hatchback_loom::cache::Cache;
use hatchback_loom::cache::address::{KeySpaces, RowKey};
use hatchback_loom::{no_writes_since, read_bag, read_whole_bag, writes_ended};
use loom::sync::{Arc, RwLock};
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use loom::thread;

/// Runs `of` in every order with at most three preemptions of a thread. All orders of two writes
/// beside a bag are too many.
fn model(of: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(of);
}

/// Returns a cache of one set with two ways. A row has two words.
fn cache() -> Arc<Cache> {
    let spaces = KeySpaces::new(vec![Some(100)]);
    Arc::new(Cache::new(8, Cache::bytes_min(8, &spaces), &spaces).unwrap())
}

fn row(key: u64) -> RowKey {
    RowKey { table: 0, key }
}

fn bytes(value: u8) -> [u8; 8] {
    [value; 8]
}

fn put(cache: &Cache, key: u64, value: u8) {
    cache.insert(row(key), &bytes(value), cache.epoch(row(key)));
}

/// Returns the value of a cached row, and checks that the row is complete.
fn get(cache: &Cache, key: u64) -> Option<u8> {
    let mut out = [0; 8];
    cache.query(row(key), &mut out).then(|| {
        assert!(out.iter().all(|b| *b == out[0]), "torn: {out:?}");
        out[0]
    })
}

#[test]
fn an_updated_row_is_old_or_new() {
    model(|| {
        let cache = cache();
        put(&cache, 1, 1);
        let writer = Arc::clone(&cache);
        let writer = thread::spawn(move || assert!(writer.update(row(1), &bytes(2))));
        // A row in a set that a writer changes for too long counts as missing.
        assert!(matches!(get(&cache, 1), None | Some(1) | Some(2)));
        writer.join().unwrap();
        assert_eq!(get(&cache, 1), Some(2));
    });
}

#[test]
fn an_evicted_row_is_never_read_as_another() {
    model(|| {
        let cache = cache();
        put(&cache, 1, 1);
        put(&cache, 2, 2);
        let writer = Arc::clone(&cache);
        let writer = thread::spawn(move || put(&writer, 3, 3));
        assert!(matches!(get(&cache, 1), None | Some(1)));
        assert!(matches!(get(&cache, 3), None | Some(3)));
        writer.join().unwrap();
        assert_eq!(get(&cache, 3), Some(3));
    });
}

#[test]
fn writers_of_one_set_take_turns() {
    model(|| {
        let cache = cache();
        let other = Arc::clone(&cache);
        let other = thread::spawn(move || put(&other, 1, 1));
        put(&cache, 2, 2);
        other.join().unwrap();
        assert_eq!((get(&cache, 1), get(&cache, 2)), (Some(1), Some(2)));
    });
}

/// One thread reads a row from the store. Another changes the row in the store and in the cache.
/// Then the first thread inserts what it read.
#[test]
fn a_late_insert_never_brings_an_old_row_back() {
    model(|| {
        let (cache, store) = (cache(), Arc::new(AtomicU32::new(1)));
        let (late, source) = (Arc::clone(&cache), Arc::clone(&store));
        let late = thread::spawn(move || {
            let epoch = late.epoch(row(1));
            let value = source.load(Ordering::Acquire) as u8;
            late.insert(row(1), &bytes(value), epoch);
        });
        store.store(2, Ordering::Release);
        cache.update(row(1), &bytes(2));
        late.join().unwrap();
        assert_ne!(get(&cache, 1), Some(1));
    });
}

/// Rows that are validated together: each is complete, belongs to its key, and was cached while the
/// other was read.
#[test]
fn a_bag_is_of_whole_rows_or_none() {
    model(|| {
        let cache = cache();
        put(&cache, 1, 1);
        put(&cache, 2, 2);
        let writer = Arc::clone(&cache);
        let writer = thread::spawn(move || {
            writer.update(row(1), &bytes(4));
            writer.update(row(2), &bytes(5));
        });
        let found = read_bag(&cache, [row(1), row(2)]);
        assert!(found.is_none_or(|f| {
            [[1, 2], [4, 2], [4, 5]].map(|[a, b]| [bytes(a), bytes(b)]).contains(&f)
        }));
        writer.join().unwrap();
        assert_eq!(read_bag(&cache, [row(1), row(2)]), Some([bytes(4), bytes(5)]));
    });
}

/// The write counter knows of every write whose effects a thread has read, whatever its set.
#[test]
fn a_write_whose_effect_was_read_is_counted() {
    model(|| {
        let (cache, flag) = (cache(), Arc::new(AtomicU32::new(0)));
        let before = writes_ended(&cache);
        let (writers, set_flag) = (Arc::clone(&cache), Arc::clone(&flag));
        let writer = thread::spawn(move || {
            put(&writers, 1, 1);
            set_flag.store(1, Ordering::Release);
        });
        put(&cache, 2, 2);
        if flag.load(Ordering::Acquire) == 1 {
            let now = writes_ended(&cache);
            assert!(!no_writes_since(&cache, before) && no_writes_since(&cache, now));
        }
        writer.join().unwrap();
        assert_eq!(writes_ended(&cache), before + 2);
    });
}

/// A writer evicts a row of the bag during the read.
#[test]
fn a_bag_never_has_another_row() {
    model(|| {
        let cache = cache();
        put(&cache, 1, 1);
        put(&cache, 2, 2);
        let writer = Arc::clone(&cache);
        let writer = thread::spawn(move || put(&writer, 3, 3));
        let found = read_bag(&cache, [row(1), row(2)]);
        assert!(found.is_none_or(|found| found == [bytes(1), bytes(2)]));
        writer.join().unwrap();
        assert_eq!(read_bag(&cache, [row(3)]), Some([bytes(3)]));
    });
}

/// A whole cache, whose bits and rows no set's sequence number covers: a change of a row beside the
/// read of its bag.
#[test]
fn a_bag_of_a_whole_cache_is_of_whole_rows_or_none() {
    model(|| {
        let cache = Cache::whole(8, usize::MAX, &KeySpaces::new(vec![Some(2)])).unwrap();
        let cache = Arc::new(cache);
        put(&cache, 0, 1);
        put(&cache, 1, 2);
        let writer = Arc::clone(&cache);
        let writer = thread::spawn(move || {
            assert!(writer.invalidate(row(0)));
            put(&writer, 0, 4);
        });
        let found = read_whole_bag(&cache, [row(0), row(1)]);
        let whole = [1, 4].map(|value| [bytes(value), bytes(2)]);
        assert!(found.is_none_or(|found| whole.contains(&found)));
        writer.join().unwrap();
        assert_eq!(read_whole_bag(&cache, [row(0), row(1)]), Some([bytes(4), bytes(2)]));
    });
}

/// The order of a transition (`LiveModel` of the runtime): versions 0 and 1 are of the old model,
/// 2 is of the new one. A worker holds a claim to a version during its batch.
struct Transition {
    cache: Arc<Cache>,
    is_barred: AtomicBool,
    version: RwLock<usize>,
    users: [AtomicU32; 3],
}

impl Transition {
    /// A batch that misses row 1: reads it from the files of its generation and inserts it.
    fn batch(&self) {
        let version = {
            let version = self.version.read().unwrap();
            self.users[*version].fetch_add(1, Ordering::Relaxed);
            *version
        };
        let (epoch, value) = (self.cache.epoch(row(1)), if version < 2 { 1 } else { 2 });
        if !self.is_barred.load(Ordering::Acquire) {
            self.cache.insert(row(1), &bytes(value), epoch);
        }
        self.users[version].fetch_sub(1, Ordering::Release);
    }

    /// Starts the next version and waits until no worker uses the one before.
    fn start_version(&self) {
        let before = {
            let mut version = self.version.write().unwrap();
            *version += 1;
            *version - 1
        };
        while self.users[before].load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        fence(Ordering::Acquire);
    }

    fn run(&self) {
        self.is_barred.store(true, Ordering::Release);
        self.start_version();
        self.cache.invalidate(row(1));
        self.start_version();
        self.is_barred.store(false, Ordering::Release);
    }
}

#[test]
fn a_transition_leaves_no_row_of_the_old_generation() {
    model(|| {
        let transition = Arc::new(Transition {
            cache: cache(),
            is_barred: AtomicBool::new(false),
            version: RwLock::new(0),
            users: [AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)],
        });
        let worker = Arc::clone(&transition);
        let worker = thread::spawn(move || worker.batch());
        transition.run();
        assert!(matches!(get(&transition.cache, 1), None | Some(2)));
        worker.join().unwrap();
        assert!(matches!(get(&transition.cache, 1), None | Some(2)));
    });
}

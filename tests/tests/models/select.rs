//! `select` against a trainer whose rows change, appear and vanish at random: with budgets, refused
//! deltas and kills. When the stream ends and the backlog is empty, the fleet holds the trainer's
//! rows within the codec's error. Failures name the seed.

use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::schema::KeySpace;
use hatchback_tests::models::{FeaturePlan, ModelPlan, Packed, TablePlan, install};
use hatchback_tests::random::Random;
use hatchback_tools::pack::spec::CodecChoice;
use hatchback_tools::report::Json;
use hatchback_tools::select::candidates::key_of;
use hatchback_tools::select::{SelectArgs, Selection, select};
use hatchback_tools::window::writer::{TableChanges, WindowContent, write_window};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A trainer, the fleet's car and the folders between them.
struct Loop {
    folder: tempfile::TempDir,
    packed: Packed,
    /// The trainer's rows by key, for each table.
    rows: Vec<BTreeMap<u64, Vec<f32>>>,
    /// Those of the first release.
    first: Vec<BTreeMap<u64, Vec<f32>>>,
    /// What changed since the last window.
    changed: Vec<BTreeSet<u64>>,
    windows: u64,
    /// Deltas that were published and may be unknown to `select`.
    published: Vec<PathBuf>,
    car: Flash,
    random: Random,
    run_time: Duration,
}

fn plan(seed: u64) -> ModelPlan {
    let mut random = Random::new(seed);
    let codecs = [CodecChoice::U8, CodecChoice::F16, CodecChoice::F32, CodecChoice::U4];
    let mut table = |keys, rows, counts| {
        let dim = 1 + random.below(24) as usize;
        let codec = *random.pick(&codecs);
        TablePlan { counts, ..TablePlan::cached(keys, rows, dim, codec) }
    };
    let tables = vec![
        table(KeySpace::Sparse, 700, true),
        table(KeySpace::Index, 400, true),
        table(KeySpace::Sparse, 90, false),
        table(KeySpace::Index, 30, false),
    ];
    let features = (0..tables.len()).map(FeaturePlan::one_hot).collect();
    ModelPlan { name: "stream".to_owned(), sequence: 1, seed, dense: 1, tables, features }
}

impl Loop {
    fn new(seed: u64) -> Self {
        let (folder, packed) = (tempfile::tempdir().unwrap(), plan(seed).pack());
        let car = install(&folder.path().join("car"), &packed.bundle);
        let rows: Vec<BTreeMap<u64, Vec<f32>>> = packed
            .rows
            .iter()
            .map(|table| table.each().map(|(key, row)| (key, row.to_vec())).collect())
            .collect();
        let (changed, first) = (vec![BTreeSet::new(); rows.len()], rows.clone());
        std::fs::create_dir(folder.path().join("windows")).unwrap();
        let (published, random) = (Vec::new(), Random::of(seed, 7));
        let run_time = Duration::from_millis(20);
        Self { folder, packed, rows, first, changed, windows: 0, published, car, random, run_time }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Trains: changes, adds and deletes rows of every table.
    fn step(&mut self) {
        for table in 0..self.rows.len() {
            for _ in 0..self.random.below(60) {
                self.change(table);
            }
        }
    }

    fn change(&mut self, table: usize) {
        let is_index = self.packed.schema.tables[table].keys == KeySpace::Index;
        let random = &mut self.random;
        let known: Vec<u64> = self.rows[table].keys().copied().collect();
        let next = known.last().map_or(0, |last| last.saturating_add(1));
        let key = match random.below(10) {
            0 if is_index => next,
            0 => random.bits(),
            1 => {
                if known.len() > 5 {
                    let key = *random.pick(&known);
                    // The last row of an index table stays, so that the table does not shrink.
                    if !(is_index && Some(&key) == known.last()) {
                        self.rows[table].remove(&key);
                        self.changed[table].insert(key);
                    }
                }
                return;
            }
            _ => *random.pick(&known),
        };

        // A row that returns to its value of the first release is one that the fleet may hold.
        if random.one_in(4)
            && let Some(row) = self.first[table].get(&key)
        {
            self.rows[table].insert(key, row.clone());
            self.changed[table].insert(key);
            return;
        }
        // A new row is near another one: the codec's unit was chosen for such rows.
        let like = *random.pick(&known);
        let from = if self.rows[table].contains_key(&key) { key } else { like };
        let by = *random.pick(&[0.0, 1e-4, 0.02, 0.3]);
        let row: Vec<f32> =
            self.rows[table][&from].iter().map(|v| v * (1.0 + by * random.signed())).collect();
        self.rows[table].insert(key, row);
        self.changed[table].insert(key);
    }

    /// Closes a window with the changed rows. Some are left out until the next window.
    fn close_window(&mut self, is_last: bool) {
        let mut tables = Vec::new();
        for (number, table) in self.packed.schema.tables.iter().enumerate() {
            let keys: Vec<u64> = std::mem::take(&mut self.changed[number]).into_iter().collect();
            let mut changes = TableChanges {
                name: table.name.clone(),
                dim: table.dim as usize,
                ..TableChanges::default()
            };
            for key in keys {
                if !is_last && self.random.one_in(20) {
                    self.changed[number].insert(key);
                } else if self.rows[number].contains_key(&key) {
                    changes.keys.push(key);
                } else {
                    changes.deleted.push(key);
                }
            }
            let traffic = |random: &mut Random| random.below(9) as f32;
            if self.random.one_in(2) {
                let traffic = changes.keys.iter().map(|_| traffic(&mut self.random)).collect();
                changes.traffic = Some(traffic);
            }
            tables.push(changes);
        }

        self.windows += 1;
        let content = WindowContent {
            lineage: "stream".to_owned(),
            window: self.windows,
            step: 100 * self.windows,
            // Windows come from machines whose clocks differ.
            closed_ms: 1_000 * self.windows + self.random.below(1_900),
            ..WindowContent::default()
        };
        let folder = self.path("windows").join(format!("{:012}", self.windows));
        write_window(&folder, &content, &tables, &mut |table, row, values| {
            values.extend_from_slice(&self.rows[table][&tables[table].keys[row]]);
            Ok(())
        })
        .unwrap();
    }

    fn args(&self, budget_mib: Option<f64>) -> SelectArgs {
        SelectArgs {
            windows: self.path("windows"),
            state: self.path("state"),
            out: self.path("next.hatch"),
            base: Some(self.packed.bundle.clone()),
            published: self.published.clone(),
            budget_mib,
            floor: 0.01,
            ageing_percent: 5,
            refresh_every: 3,
            json: Json::default(),
        }
    }

    /// Runs `select` in another process and kills it at a random moment.
    fn killed(&mut self, args: &SelectArgs) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_select_worker"));
        let path = |path: &Path| path.display().to_string();
        command.args(["--windows", &path(&args.windows), "--state", &path(&args.state)]);
        command.args(["--out", &path(&args.out), "--base", &path(&self.packed.bundle)]);
        command.args(["--budget-mib", "0.01", "--floor", "0.01", "--refresh-every", "3"]);
        for bundle in &args.published {
            command.args(["--published", &path(bundle)]);
        }
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let most = self.run_time.as_micros() as u64 * 3 / 2;
        std::thread::sleep(Duration::from_micros(self.random.below(most)));
        let ended = child.try_wait().unwrap();
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(ended.is_none_or(|status| status.success()), "{errors}");
    }

    fn select(&mut self, budget_mib: Option<f64>) -> Selection {
        let start = Instant::now();
        let done = select(&self.args(budget_mib)).unwrap();
        self.run_time = start.elapsed();
        let sent = done.updated + done.inserted + done.deleted;
        assert_eq!(done.candidates, sent + done.deferred, "each change is sent or waits");
        if let (Some(budget), Some(_)) = (done.budget_bytes, &done.generation) {
            let bytes = std::fs::metadata(self.path("next.hatch")).unwrap().len();
            assert!(bytes == done.bytes && bytes <= budget, "{bytes} bytes of {budget}");
            let bundle = BundleReader::open(&self.path("next.hatch")).unwrap();
            let left = bundle.manifest().deferral.unwrap();
            assert_eq!((left.rows, left.since), (done.deferred, done.deferred_since));
            assert_eq!((left.window, left.step), (done.window, 100 * done.window));
        }
        done
    }

    /// Publishes the delta: the car installs it. The next `select` gets it as `--published`.
    fn publish(&mut self) {
        let bundle = self.path(&format!("{}.hatch", self.published.len()));
        std::fs::rename(self.path("next.hatch"), &bundle).unwrap();
        self.car = install(&self.path("car"), &bundle);
        self.published.push(bundle);
    }

    /// Asserts that the car holds the trainer's rows within the codec's error.
    fn check_fleet(&self) {
        for (number, table) in self.car.manifest().schema.tables.iter().enumerate() {
            let format = table.format().unwrap();
            let mut held = BTreeMap::new();
            let take = |order: u64, row: &[u8]| {
                let mut values = vec![0.0; table.dim as usize];
                format.decode(row, &mut values);
                held.insert(key_of(table.keys, order), values);
            };
            self.car.table(number).unwrap().scan(take, |e| panic!("{e}")).unwrap();
            let keys = |rows: &BTreeMap<u64, Vec<f32>>| rows.keys().copied().collect::<Vec<_>>();
            assert_eq!(keys(&held), keys(&self.rows[number]), "keys of {}", table.name);

            let mut encoded = vec![0; format.row_bytes()];
            let mut decoded = vec![0.0; table.dim as usize];
            for (key, row) in &self.rows[number] {
                format.encode(row, &mut encoded).unwrap();
                format.decode(&encoded, &mut decoded);
                let (found, codec) = (distance(row, &held[key]), distance(row, &decoded));
                assert!(found <= codec * 1.000_1, "{} key {key}: {found} > {codec}", table.name);
            }
        }
    }
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |(a, b): (&f32, &f32)| f64::from(a - b) * f64::from(a - b);
    a.iter().zip(b).map(square).sum::<f64>().sqrt()
}

/// Runs a stream of a seed to its end.
fn stream(seed: u64, rounds: u64) {
    println!("seed {seed}");
    let mut trainer = Loop::new(seed);
    for _ in 0..rounds {
        for _ in 0..trainer.random.below(3) {
            trainer.step();
            trainer.close_window(false);
        }
        let budget = Some(0.006 + trainer.random.below(16) as f64 / 1024.0);
        while trainer.random.one_in(2) {
            let args = trainer.args(budget);
            trainer.killed(&args);
        }
        let done = trainer.select(budget);
        let late = trainer.path("late.hatch");
        // One delta in four is refused before it is signed, and one is published only after the
        // next selection, in place of that one's.
        match trainer.random.below(4) {
            _ if late.exists() => {
                std::fs::rename(&late, trainer.path("next.hatch")).unwrap();
                trainer.publish();
            }
            _ if done.generation.is_none() => {}
            0 => {}
            1 => std::fs::rename(trainer.path("next.hatch"), &late).unwrap(),
            _ => trainer.publish(),
        }
    }

    trainer.close_window(true);
    let _ = std::fs::remove_file(trainer.path("late.hatch"));
    let mut drained = 0;
    while trainer.select(Some(0.02)).generation.is_some() {
        trainer.publish();
        drained += 1;
        assert!(drained < 500, "the backlog does not drain");
    }
    assert_eq!(trainer.select(None).candidates, 0);
    trainer.check_fleet();
}

fn streams() -> u64 {
    std::env::var("HATCHBACK_STREAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(4)
}

#[test]
fn no_row_is_lost_over_random_streams_with_kills_and_refused_deltas() {
    (0..streams()).for_each(|seed| stream(seed, 14));
}

#[test]
fn the_farthest_and_most_used_rows_go_first_and_old_changes_do_not_starve() {
    let mut trainer = Loop::new(99);
    let keys: Vec<u64> = trainer.rows[0].keys().copied().take(300).collect();
    for (at, key) in keys.iter().enumerate() {
        let by = if at < 20 { 2.0 } else { 1.01 };
        trainer.rows[0].get_mut(key).unwrap().iter_mut().for_each(|v| *v = *v * by + by * 1e-4);
        trainer.changed[0].insert(*key);
    }
    trainer.close_window(true);
    let first = trainer.select(Some(0.009));
    assert!(first.deferred > 0 && first.updated > 0, "{first:?}");
    assert_eq!(first.deferred_since, Some(1));
    trainer.publish();

    // New changes outrank the old ones in every round, and the old ones are still sent in time.
    let mut rounds = 0;
    loop {
        for key in &keys[..20] {
            let row = trainer.rows[0].get_mut(key).unwrap();
            row.iter_mut().for_each(|v| *v = -*v);
            trainer.changed[0].insert(*key);
        }
        trainer.close_window(true);
        let done = trainer.select(Some(0.009));
        trainer.publish();
        rounds += 1;
        if done.deferred_since.is_none_or(|since| since > 1) {
            break;
        }
        assert!(rounds < 300, "a change of window 1 still waits: {done:?}");
    }
}

#[test]
fn a_state_folder_refuses_what_would_lose_rows() {
    let mut trainer = Loop::new(5);
    trainer.step();
    trainer.close_window(true);
    let refused = |args: &SelectArgs| format!("{:#}", select(args).unwrap_err());

    let args = SelectArgs { base: None, ..trainer.args(None) };
    assert!(refused(&args).contains("pass the fleet's snapshot with --base"));
    trainer.select(None);
    let snapshot = ModelPlan { sequence: 9, ..plan(5) }.pack();
    let published = vec![snapshot.bundle.clone()];
    assert!(
        refused(&SelectArgs { published, ..trainer.args(None) })
            .contains("is a snapshot, which may lack rows")
    );

    let tiny = refused(&trainer.args(Some(0.000_1)));
    assert!(tiny.contains("the budget of 104 bytes is below"), "{tiny}");

    let window = trainer.path("windows").join(format!("{:012}", 1));
    std::fs::remove_dir_all(&window).unwrap();
    let content = WindowContent { lineage: "stream".into(), window: 1, ..Default::default() };
    let content = WindowContent { closed_ms: 10_000, ..content };
    write_window(&window, &content, &[], &mut |_, _, _| Ok(())).unwrap();
    assert!(refused(&trainer.args(None)).contains("the trainer numbers its windows anew"));
    std::fs::remove_dir_all(&window).unwrap();

    let window = trainer.path("windows").join(format!("{:012}", 3));
    let content = WindowContent { lineage: "stream".into(), window: 3, ..Default::default() };
    write_window(&window, &content, &[], &mut |_, _, _| Ok(())).unwrap();
    assert!(refused(&trainer.args(None)).contains("window 2 is missing, but window 3 is closed"));

    let window = trainer.path("windows").join(format!("{:012}", 2));
    let wrong = TableChanges { name: "zz".into(), dim: 1, keys: vec![1], ..Default::default() };
    let content = WindowContent { window: 2, ..content };
    write_window(&window, &content, &[wrong], &mut |_, _, values| {
        values.push(0.5);
        Ok(())
    })
    .unwrap();
    assert!(refused(&trainer.args(None)).contains("no table of this name"));

    std::fs::remove_file(window.join("window.json")).unwrap();
    let twice =
        TableChanges { name: "t2".into(), dim: 1, deleted: vec![7, 7], ..Default::default() };
    write_window(&window, &content, &[twice], &mut |_, _, _| Ok(())).unwrap();
    assert!(refused(&trainer.args(None)).contains("t2.keys is 7, twice"));
}

#[test]
fn a_refresh_brings_the_rows_that_windows_look_up_most() {
    let trainer = Loop::new(9);
    let old = trainer.car.hot_keys(0).unwrap();
    assert!(old.len() > 20, "the base has a hot list");
    let busy: Vec<u64> = old.iter().rev().take(old.len() / 2).copied().collect();
    let table = &trainer.packed.schema.tables[0];
    let changes = TableChanges {
        name: table.name.clone(),
        dim: table.dim as usize,
        traffic: Some((0..busy.len()).map(|rank| 1e3 - rank as f32).collect()),
        keys: busy.clone(),
        ..TableChanges::default()
    };
    let content = WindowContent { lineage: "stream".into(), window: 1, ..Default::default() };
    let folder = trainer.path("windows").join(format!("{:012}", 1));
    write_window(&folder, &content, &[changes], &mut |_, row, values| {
        values.extend(trainer.rows[0][&busy[row]].iter().map(|value| value * 0.5));
        Ok(())
    })
    .unwrap();

    let refresh =
        |refresh_every, budget_mib| SelectArgs { refresh_every, budget_mib, ..trainer.args(None) };
    assert_eq!(select(&refresh(0, None)).unwrap().hot_lists, 0, "no refresh");
    let tight = select(&refresh(1, Some(0.02))).unwrap();
    assert_eq!(tight.hot_lists, u64::from(8 * old.len() as u64 <= (0.02 * 1048576.0) as u64 / 4));
    let done = select(&refresh(1, None)).unwrap();
    assert_eq!(done.hot_lists, 1, "the list of one table changed: {done:?}");

    let car = install(trainer.car.directory(), &trainer.path("next.hatch"));
    let new = car.hot_keys(0).unwrap();
    assert_eq!((new.len(), &new[..busy.len()]), (old.len(), &busy[..]));
    assert_eq!(car.hot_keys(1).unwrap(), trainer.car.hot_keys(1).unwrap());
}

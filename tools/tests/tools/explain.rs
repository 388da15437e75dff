//! `explain` and `row`: contributions sum to the score, and each row names its release.

use crate::cli::{Desk, coupon, hatchback, printed, refused, report_of};
use hatchback::bundle::BundleReader;
use hatchback::io::disk;
use hatchback::update::release::chunk_path;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

const FAMILIES: [&str; 9] =
    ["dlrm", "dcnv2", "deepfm", "wide_deep", "mmoe", "din", "dien", "bst", "hstu"];

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Returns every key of an explanation.
fn keys(explanation: &Value) -> Vec<&Value> {
    let features = explanation["features"].as_array().unwrap().iter();
    let lookups = features.filter_map(|feature| feature["lookups"].as_array()).flatten();
    lookups.flat_map(|lookup| lookup["keys"].as_array().unwrap()).collect()
}

#[test]
fn contributions_sum_to_the_score_and_every_row_names_its_release_in_each_family() {
    let desk = Desk::new();
    for family in FAMILIES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/families");
        let file = |name: &str| folder.join(family).join(name).display().to_string();
        let bundle = desk.path(&format!("{family}.hatch"));
        printed(&["pack", &file("model.toml"), "--out", &bundle]);
        let samples = std::fs::read_to_string(file("probe.jsonl")).unwrap();
        let mut fresh = 0;
        for line in samples.lines().take(6) {
            let answer = hatchback(&["run", &bundle], line).stdout;
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            let explained = report_of(&["explain", &bundle, line]);
            let mut sum = numbers(&explained["base"]);
            let score = numbers(&explained["score"]);
            for feature in explained["features"].as_array().unwrap() {
                let added = numbers(&feature["contribution"]);
                sum.iter_mut().zip(added).for_each(|(sum, added)| *sum += added);
                assert_eq!(numbers(&feature["score_without"]).len(), score.len(), "{feature}");
            }
            for (sum, score) in sum.iter().zip(&score) {
                assert!((sum - score).abs() <= 1e-5, "{family}: {sum} instead of {score}");
            }
            let run = match &answer["score"] {
                Value::Array(_) => numbers(&answer["score"]),
                named => ["ctr", "cvr"].map(|output| named[output].as_f64().unwrap()).to_vec(),
            };
            let same = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-7;
            assert!(score.iter().zip(&run).all(same), "{family}: {score:?}, {run:?}");

            let all = keys(&explained);
            let count = |status: &str| all.iter().filter(|key| key["status"] == status).count();
            assert_eq!(explained["status"], answer["status"], "{family}");
            for status in ["fresh", "absent", "damaged"] {
                assert_eq!(answer["status"][status], count(status), "{family}: {status}");
            }
            assert!(all.iter().all(|key| (key["status"] == "fresh") == (key["release"] == 1)));
            fresh += count("fresh");
        }
        assert!(fresh > 0, "{family}");
    }
}

/// Packs sequence 2 of the coupon model, in which `change` edits the f32 values of a table.
fn second(desk: &Desk, parent: &str, table: &str, change: impl Fn(&mut [u8])) -> String {
    let model = desk.model(2);
    let file = |name: &str| Path::new(&model).with_file_name(name);
    let mut bytes = std::fs::read(file("tables.safetensors")).unwrap();
    let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..head]).unwrap();
    let ends = numbers(&header[table]["data_offsets"]);
    change(&mut bytes[head + ends[0] as usize..head + ends[1] as usize]);
    std::fs::write(file("tables.safetensors"), bytes).unwrap();
    let bundle = desk.path("2.hatch");
    // The recorded scores are those of the unchanged rows.
    let proof = ["--codec", "f32", "--probe-difference-max", "1"];
    printed(&[&["pack", &model, "--parent", parent, "--out", &bundle], &proof[..]].concat());
    bundle
}

/// A row that a delta changed, one of the snapshot, and an absent key. A daemon would hold the lock
/// meanwhile; nothing in its directory changes.
#[test]
fn a_row_names_the_delta_that_wrote_it_beside_a_daemon_that_holds_the_lock() {
    let desk = Desk::new();
    let first = desk.pack(&["--codec", "f32"]);
    let delta = second(&desk, &first, "weather", |values| {
        values[2 * 64..2 * 64 + 4].copy_from_slice(&1.5f32.to_le_bytes());
    });
    let flash = desk.path("car");
    printed(&["install", &first, &delta, "--flash", &flash]);

    let lock = Path::new(&flash).join("lock");
    let held = disk::system().lock(&lock, Duration::ZERO).unwrap().unwrap();
    let files = || {
        let mut all = Vec::new();
        for folder in [flash.clone(), format!("{flash}/g000000000002")] {
            let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
            all.extend(entries.map(|e| (e.path(), e.metadata().unwrap().modified().unwrap())));
        }
        all.sort();
        all
    };
    let before = files();

    let row = report_of(&["row", &flash, "weather", "2"]);
    assert_eq!((&row["status"], &row["release"]), (&"fresh".into(), &2.into()));
    assert_eq!(row["values"][0], 1.5);
    let history: Vec<&Value> = row["history"].as_array().unwrap().iter().collect();
    assert_eq!(history.len(), 2);
    assert_eq!((&history[0]["release"], &history[0]["file"]), (&1.into(), &"snapshot".into()));
    assert_eq!(history[1]["file"], "delta");
    assert_eq!((&row["codec"], &row["codec_error_max"]), (&"f32".into(), &0.0.into()));
    assert_eq!(report_of(&["row", &flash, "weather", "1"])["release"], 1);

    let text = printed(&["row", &flash, "weather", "999"]);
    assert!(text.contains("weather 999: absent") && text.contains("default row"), "{text}");
    let negative = report_of(&["row", &flash, "weather", "-1"]);
    assert_eq!(negative["key"], u64::MAX);
    let said = refused(&["row", &flash, "wheather", "1"]);
    assert!(said.contains("the model has the tables destination,"), "{said}");

    let sample = std::fs::read_to_string(coupon("heldout.jsonl")).unwrap();
    let sample = sample.lines().next().unwrap();
    let explained = report_of(&["explain", &flash, sample, "--against", &first]);
    let deltas = keys(&explained).into_iter().filter(|key| key["release"] == 2);
    assert_eq!(deltas.map(|key| key["key"].as_u64().unwrap()).collect::<Vec<_>>(), [2]);
    let against = &explained["against"];
    assert_eq!(against["generation"], "coupon-dlrm@1");
    assert!(against["score"] != explained["score"]);
    let changed = against["features"].as_array().unwrap().iter();
    let changed: Vec<&Value> =
        changed.filter(|feature| feature["rows"] != Value::Array(Vec::new())).collect();
    let [weather] = changed[..] else { panic!("{against}") };
    assert_eq!(
        (&weather["feature"], &weather["rows"][0]["table"]),
        (&"weather".into(), &"weather".into())
    );
    assert_eq!(weather["rows"][0]["origins"], serde_json::json!(["delta 2", "snapshot 1"]));
    assert!(weather["rows"][0]["distance"].as_f64().unwrap() > 0.1);

    let text = printed(&["explain", &flash, sample, "--against", &first]);
    for part in ["coupon-dlrm@2: score", "delta 2", "2: delta 2 / snapshot 1"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let said = refused(&["explain", &flash, "{\"sparse\":{\"wether\":[1]}}"]);
    assert!(said.contains("no feature `wether`") || said.contains("dense"), "{said}");
    assert_eq!(files(), before);
    drop(held);
}

/// Removes every chunk of a repository but those of the segments of `table` in `bundles`. Returns
/// the paths of what is left.
fn keep_only(repository: &str, table: &str, bundles: [&String; 2]) -> Vec<PathBuf> {
    let mut wanted = BTreeSet::new();
    for bundle in bundles {
        let bundle = BundleReader::open(Path::new(bundle)).unwrap();
        let manifest = bundle.manifest();
        let number = manifest.schema.tables.iter().position(|t| t.name == table).unwrap();
        let segment = &manifest.blobs[manifest.tables[number].segment as usize];
        wanted.extend(segment.chunks.iter().map(|chunk| chunk_path(&chunk.sha256)));
    }
    let folders = std::fs::read_dir(Path::new(repository).join("chunks")).unwrap();
    let chunks = folders.flat_map(|entry| {
        std::fs::read_dir(entry.unwrap().path()).unwrap().map(|chunk| chunk.unwrap().path())
    });
    let is_wanted = |path: &Path| wanted.iter().any(|wanted| path.ends_with(wanted));
    let (kept, others): (Vec<_>, Vec<_>) = chunks.partition(|path| is_wanted(path));
    assert!(others.len() > 2);
    others.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    kept
}

/// A snapshot, a delta, a delta that does not carry the key, and the snapshot restored. Only the
/// chunks of the table are there.
#[test]
fn a_repository_tells_the_history_of_a_row_without_the_chunks_of_other_tables() {
    let desk = Desk::new();
    let first = desk.pack(&["--codec", "f32"]);
    let delta = second(&desk, &first, "weather", |values| {
        values[2 * 64..2 * 64 + 4].copy_from_slice(&1.5f32.to_le_bytes());
    });
    let [keys, repository, flash] = ["keys", "repository", "car"].map(|name| desk.path(name));
    printed(&["keys", "new", &keys, "--plain"]);
    let to = ["publish", "--keys", &keys, "--to", &repository];
    for change in [&[&first[..]][..], &[&delta[..]], &["--restore", "1"]] {
        printed(&[&to[..], change].concat());
    }
    printed(&["install", &first, &delta, "--flash", &flash]);
    let packed = report_of(&["row", &flash, "weather", "2"])["history"].clone();

    let kept = keep_only(&repository, "weather", [&first, &delta]);
    assert_eq!(kept.len(), 2);

    let row = |key: &str| {
        report_of(&["row", "coupon-dlrm", "weather", key, "--from", &repository])["releases"]
            .clone()
    };
    let column = |rows: &Value, field: &str| -> Vec<Value> {
        rows.as_array().unwrap().iter().map(|row| row[field].clone()).collect()
    };
    let rows = row("2");
    assert_eq!(
        column(&rows, "origin"),
        ["snapshot 1", "delta 2", "snapshot 1", "unchanged"].map(Value::from)
    );
    let names = ["1-snapshot", "2-from-000000000001", "3-snapshot", "3-from-000000000001"];
    for (release, name) in column(&rows, "release").iter().zip(names) {
        assert!(release.as_str().unwrap().ends_with(name), "{release} is not {name}");
    }
    for (at, version) in [(0, 0), (1, 1), (2, 0)] {
        for field in ["values", "norm", "codec_error_max", "status"] {
            assert_eq!(rows[at]["row"][field], packed[version][field], "{at}: {field}");
        }
    }
    let distance = rows[1]["distance"].as_f64().unwrap();
    let [a, b] = [0, 1].map(|at| numbers(&packed[at]["values"]));
    let squares: f64 = a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum();
    assert!((distance - squares.sqrt()).abs() < 1e-5, "{distance}");
    assert_eq!(
        column(&row("1"), "origin"),
        ["snapshot 1", "unchanged", "snapshot 1", "unchanged"].map(Value::from)
    );
    assert_eq!(column(&row("999"), "origin")[0], "absent");

    let text = printed(&["row", "coupon-dlrm", "weather", "2", "--from", &repository]);
    assert!(text.contains("delta 2") && text.contains("unchanged"), "{text}");
    let other = ["row", "coupon", "weather", "2", "--from", &repository];
    assert!(refused(&other).contains("MODEL coupon: the repository has the models coupon-dlrm"));
    let other = ["row", "coupon-dlrm", "wheather", "2", "--from", &repository];
    assert!(refused(&other).contains("the model has the tables destination,"));
    let other = ["row", "coupon-dlrm", "driver", "2", "--from", &repository];
    assert!(refused(&other).contains("is missing or damaged; publish the bundle"));
    std::fs::write(&kept[0], "<html>").unwrap();
    let said = refused(&["row", "coupon-dlrm", "weather", "2", "--from", &repository]);
    assert!(said.contains("table weather") && said.contains("chunks/"), "{said}");
}

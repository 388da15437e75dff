//! What a trainer's model needs, through the commands: outputs with names, raw values, and rare
//! rows that stay at the desk.

use crate::cli::{answered, copy_files, hatchback, refused, report_of, root};
use serde_json::{Value, json};
use std::path::Path;

/// Copies a folder of files, of which `change` edits the model.toml.
fn copied(from: &Path, change: impl Fn(String) -> String) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    copy_files(from, folder.path());
    let spec = folder.path().join("model.toml");
    std::fs::write(&spec, change(std::fs::read_to_string(&spec).unwrap())).unwrap();
    let spec = spec.display().to_string();
    (folder, spec)
}

#[test]
fn outputs_are_named_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("mmoe.hatch").display().to_string();
    let spec = root().join("tests/data/families/mmoe/model.toml").display().to_string();
    answered(&["pack", &spec, "--out", &bundle, "--codec", "f32"], "");

    let report = report_of(&["inspect", &bundle]);
    let names =
        json!([{"name": "ctr", "activation": "sigmoid"}, {"name": "cvr", "activation": "sigmoid"}]);
    assert_eq!(report["outputs"], names);
    assert!(answered(&["inspect", &bundle], "").contains("network output"));

    let probe =
        std::fs::read_to_string(root().join("tests/data/families/mmoe/probe.jsonl")).unwrap();
    let answers = answered(&["run", &bundle], &probe);
    for (line, answer) in probe.lines().zip(answers.lines()) {
        let [line, answer]: [Value; 2] = [line, answer].map(|l| serde_json::from_str(l).unwrap());
        for output in ["ctr", "cvr"] {
            let [ours, theirs] = [&answer, &line].map(|v| v["score"][output].as_f64().unwrap());
            assert!((ours - theirs).abs() < 1e-5, "{output}: {ours} instead of {theirs}");
        }
    }

    let found = report_of(&["eval", &bundle]);
    assert_eq!((&found["output"], &found["samples"]), (&json!("ctr"), &json!(32)));
    let [cvr] = &found["further_outputs"].as_array().unwrap()[..] else { panic!("{found}") };
    assert_eq!(cvr["output"], "cvr");
    for quality in [&found, cvr] {
        assert!(quality["score_difference_max"].as_f64().unwrap() < 1e-5);
        let [ours, theirs] = ["auc", "reference_auc"].map(|key| quality[key].as_f64().unwrap());
        assert!((ours - theirs).abs() < 1e-9 && ours > 0.0, "{quality}");
    }
    let table = answered(&["eval", &bundle], "");
    assert!(table.contains("AUC of ctr") && table.contains("logloss of cvr"), "{table}");

    let line = r#"{"dense":[0,0,0],"label":1}"#;
    let output = hatchback(&["run", &bundle], line);
    let answer = String::from_utf8(output.stdout).unwrap();
    assert!(answer.contains("label: one value for the outputs `ctr`, `cvr`"), "{answer}");
}

/// The words of a feature give the scores of their numbers, in the probe set and in requests.
#[test]
fn raw_values_score_as_keys_from_pack_to_run() {
    let from = root().join("tools/demo/coupon");
    let feature = "name = \"weather\"\ntable = \"weather\"\n";
    let key = "key = { function = \"vocabulary\", path = \"weather.txt\" }\n";
    let (folder, spec) = copied(&from, |text| {
        assert_eq!(text.matches(feature).count(), 1);
        text.replace(feature, &format!("{feature}{key}"))
    });
    let words = ["Sunny", "Rainy", "Snowy \"deep\" ü"];
    std::fs::write(folder.path().join("weather.txt"), words.join("\n")).unwrap();
    let raw = |line: &str| {
        let mut sample: Value = serde_json::from_str(line).unwrap();
        if let Some(bag) = sample["sparse"].get_mut("weather") {
            let word = |key: &Value| words[key.as_u64().unwrap() as usize].into();
            *bag = bag.as_array().unwrap().iter().map(word).collect::<Vec<Value>>().into();
        }
        sample.to_string() + "\n"
    };
    let probe = std::fs::read_to_string(from.join("probe.jsonl")).unwrap();
    let raw_probe: String = probe.lines().map(raw).collect();
    std::fs::write(folder.path().join("probe.jsonl"), &raw_probe).unwrap();

    let pack = |spec: &str, name: &str| {
        let bundle = folder.path().join(name).display().to_string();
        answered(&["pack", spec, "--out", &bundle, "--codec", "f32"], "");
        bundle
    };
    let with_words = pack(&spec, "words.hatch");
    let with_keys = pack(&from.join("model.toml").display().to_string(), "keys.hatch");
    assert_eq!(answered(&["run", &with_words], &raw_probe), answered(&["run", &with_keys], &probe));
    assert!(answered(&["inspect", &with_words], "").contains("vocabulary of 3 words"));

    for (value, problem) in [
        ("1.5", "sparse.weather[0]: 1.5 is not a text or an integer"),
        ("[1]", "expected a text, a number or null"),
    ] {
        let line = raw_probe.lines().next().unwrap();
        let start = line.find("\"weather\":[").unwrap() + "\"weather\":[".len();
        let end = start + line[start..].find(']').unwrap();
        let line = format!("{}{value}{}", &line[..start], &line[end..]);
        let answer = String::from_utf8(hatchback(&["run", &with_words], &line).stdout).unwrap();
        assert!(answer.contains(problem), "{answer}");
    }
}

#[test]
fn rare_rows_stay_at_the_desk() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("dlrm.hatch").display().to_string();
    let family = |name: &str| {
        root().join(format!("tests/data/families/{name}/model.toml")).display().to_string()
    };
    let pack = |spec: &str, least: &'static str| {
        let out = ["--out", &bundle, "--probe-difference-max", "1", "--min-count", least];
        [&["pack", spec], &out[..]].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    fn words(args: &[String]) -> Vec<&str> {
        args.iter().map(String::as_str).collect()
    }

    let said = answered(&words(&pack(&family("dlrm"), "500")), "");
    let (left_out, _) = said.split_once(" rows were used less than 500 times").unwrap();
    let left_out: u64 = left_out.rsplit('\n').next().unwrap().parse().unwrap();
    let report = report_of(&["inspect", &bundle]);
    let rows = |name: &str| {
        let tables = report["tables"].as_array().unwrap();
        tables.iter().find(|t| t["name"] == name).unwrap()["rows"].as_u64().unwrap()
    };
    assert!(left_out > 0);
    assert_eq!((rows("song"), rows("city")), (120 - left_out, 40), "an index table stays whole");

    let error = refused(&words(&pack(&family("dlrm"), "100000")));
    assert!(
        error.contains("table `song`") && error.contains("no row was used so often"),
        "{error}"
    );
    let error = refused(&words(&pack(&family("mmoe"), "2")));
    assert!(error.contains("no sparse table has `counts`"), "{error}");
}

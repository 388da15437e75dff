//! `hatchback pack` refuses early and proves its bundle: on the coupon model with one file changed.

use crate::cli::coupon;
use hatchback::Weights;
use hatchback_kernels::dense::graph::onnx::{ModelProto, StringStringEntryProto};
use hatchback_kernels::dense::{Forms, forms};
use prost::Message;
use std::path::Path;
use std::process::{Command, Output};

/// A copy of the coupon model.
struct Desk {
    folder: tempfile::TempDir,
}

impl Desk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for file in ["model.toml", "dense.onnx", "tables.safetensors", "probe.jsonl"] {
            std::fs::copy(coupon(file), folder.path().join(file)).unwrap();
        }
        Self { folder }
    }

    /// Changes the bytes of a file.
    fn change(&self, file: &str, change: impl Fn(Vec<u8>) -> Vec<u8>) {
        let path = self.folder.path().join(file);
        let changed = change(std::fs::read(&path).unwrap());
        std::fs::write(path, changed).unwrap();
    }

    fn replace(&self, file: &str, from: &str, to: &str) {
        self.change(file, |bytes| {
            let text = String::from_utf8(bytes).unwrap();
            assert!(text.contains(from), "{file} has no {from}");
            text.replace(from, to).into_bytes()
        });
    }

    fn pack(&self, extra: &[&str]) -> Output {
        let path = |file: &str| self.folder.path().join(file);
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchback"));
        command.arg("pack").arg(path("model.toml")).arg("--out").arg(path("coupon.hatch"));
        command.args(extra).output().unwrap()
    }

    /// Packs; returns the error. Nothing may stay beside the model.
    fn refused(&self, extra: &[&str]) -> String {
        let output = self.pack(extra);
        assert!(!output.status.success(), "not refused");
        let files = std::fs::read_dir(self.folder.path()).unwrap().count();
        assert!(files <= 5, "{files} files");
        assert!(!self.folder.path().join("coupon.hatch").exists());
        String::from_utf8(output.stderr).unwrap()
    }

    fn printed(&self, extra: &[&str]) -> String {
        let output = self.pack(extra);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

#[test]
fn what_needs_no_rows_is_refused_before_a_row_is_read() {
    let desk = Desk::new();
    // The last row of the last table is wrong, which reading it would tell.
    desk.change("tables.safetensors", |mut bytes| {
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&f32::NAN.to_le_bytes());
        bytes
    });
    let error = desk.refused(&[]);
    assert!(error.contains("NaN"), "{error}");

    for (file, from, to, why) in [
        ("model.toml", "output = \"logit\"", "output = \"score\"", "no output named `score`"),
        ("model.toml", "name = \"emb\"", "name = \"embedding\"", "input `emb` is not fed"),
        ("model.toml", "name = \"coupon-dlrm\"", "name = \"coupon dlrm\"", "name: `coupon dlrm`"),
        ("model.toml", "name = \"coupon-dlrm\"", "name = \"..\"", "or begins with a dot"),
        ("probe.jsonl", "\"weather\":", "\"whether\":", "whether"),
        ("probe.jsonl", "[55.0,", "[Infinity,", ":1: dense[0]: `temperature` is Infinity"),
    ] {
        desk.replace(file, from, to);
        let error = desk.refused(&[]);
        assert!(error.contains(why) && !error.contains("NaN"), "{error}");
        desk.replace(file, to, from);
    }
}

/// A FIFO without a writer would keep `pack` waiting, and a device has no end.
#[test]
fn an_input_that_is_no_regular_file_is_refused_at_once() {
    for file in ["model.toml", "dense.onnx", "tables.safetensors", "probe.jsonl", "dense.data"] {
        for device in [false, true] {
            let desk = Desk::new();
            let path = desk.folder.path().join(file);
            if file == "dense.data" {
                desk.change("dense.onnx", |onnx| {
                    let mut model = ModelProto::decode(onnx.as_slice()).unwrap();
                    let tensor = &mut model.graph.as_mut().unwrap().initializer[0];
                    (tensor.raw_data, tensor.data_location) = (None, Some(1));
                    tensor.float_data.clear();
                    let (key, value) = (Some("location".to_owned()), Some(file.to_owned()));
                    tensor.external_data = vec![StringStringEntryProto { key, value }];
                    model.encode_to_vec()
                });
            } else {
                std::fs::remove_file(&path).unwrap();
            }
            if device {
                std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
            } else {
                let made = Command::new("mkfifo").arg(&path).status().unwrap();
                assert!(made.success());
            }
            let error = desk.refused(&[]);
            assert!(error.contains(file) && error.contains("not a regular file"), "{error}");
        }
    }
}

#[test]
fn a_network_without_bounds_is_refused_before_a_row_is_read() {
    let desk = Desk::new();
    desk.change("tables.safetensors", |mut bytes| {
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&f32::NAN.to_le_bytes());
        bytes
    });
    desk.change("dense.onnx", |onnx| {
        let mut model = ModelProto::decode(onnx.as_slice()).unwrap();
        let graph = model.graph.as_mut().unwrap();
        let mut endless = graph.node[0].clone();
        endless.op_type = Some("Loop".to_owned());
        (endless.name, endless.output) = (Some("endless".to_owned()), vec!["never".to_owned()]);
        graph.node.push(endless);
        model.encode_to_vec()
    });
    let error = desk.refused(&[]);
    let named = error.contains("does not run Loop, node `endless`");
    assert!(named && error.contains("dense.onnx") && !error.contains("NaN"), "{error}");
}

#[test]
fn a_bundle_whose_probe_scores_differ_is_not_kept() {
    let desk = Desk::new();
    let printed = desk.printed(&[]);
    assert!(printed.contains("dense network: the CPU, by Hatchback's kernels"), "{printed}");
    assert!(printed.contains("probe scores differ from the recorded ones by at most"), "{printed}");

    std::fs::remove_file(desk.folder.path().join("coupon.hatch")).unwrap();
    let halved = |line: &str| {
        let (before, _) = line.rsplit_once("\"score\":").unwrap();
        format!("{before}\"score\":0.5}}\n")
    };
    desk.change("probe.jsonl", |bytes| {
        let text = String::from_utf8(bytes).unwrap();
        text.lines().map(halved).collect::<String>().into_bytes()
    });
    let error = desk.refused(&[]);
    assert!(error.contains("coupon.hatch: not kept") && error.contains("over 0.02"), "{error}");
    desk.printed(&["--probe-difference-max", "1"]);
}

/// Returns the form of each weight matrix in a bundle.
fn forms_of(bundle: &Path) -> Forms {
    let mut reader = hatchback::BundleReader::open(bundle).unwrap();
    let dense = reader.manifest().dense;
    forms(&reader.blob(dense).unwrap()).unwrap()
}

/// The snapshot's weights are chosen on the probe set, and a delta takes its parent's forms. With
/// tables of f32, or without a probe set, the network is packed as it is.
#[test]
fn a_delta_stores_its_network_as_its_parent_does() {
    let desk = Desk::new();
    let path = |file: &str| desk.folder.path().join(file);
    let text = |file: &str| path(file).display().to_string();
    desk.printed(&[]);
    let chosen = forms_of(&path("coupon.hatch"));
    assert!(chosen.values().any(|form| *form != Weights::F32), "{chosen:?}");
    let own = std::fs::read(path("dense.onnx")).unwrap();
    let all: Vec<String> = forms(&own).unwrap().into_keys().collect();
    assert!(all.iter().eq(chosen.keys()), "{chosen:?}");

    std::fs::rename(path("coupon.hatch"), path("parent.hatch")).unwrap();
    desk.replace("model.toml", "sequence = 1", "sequence = 2");
    desk.printed(&["--parent", &text("parent.hatch")]);
    assert_eq!(forms_of(&path("coupon.hatch")), chosen);

    desk.printed(&["--codec", "f32"]);
    let wide = forms_of(&path("coupon.hatch"));
    assert!(wide.values().all(|form| *form == Weights::F32), "{wide:?}");
    desk.change("model.toml", |bytes| {
        let text = String::from_utf8(bytes).unwrap();
        text.split_once("[probe]").unwrap().0.to_owned().into_bytes()
    });
    desk.printed(&[]);
    assert_eq!(forms_of(&path("coupon.hatch")), wide);
}

/// Multiplies all weights of an ONNX file.
fn scaled(onnx: Vec<u8>, factor: f32) -> Vec<u8> {
    let mut model = ModelProto::decode(onnx.as_slice()).unwrap();
    for tensor in &mut model.graph.as_mut().unwrap().initializer {
        let Some(raw) = tensor.raw_data.take() else { continue };
        let values = raw.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b) * factor);
        tensor.raw_data = Some(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>().into());
    }
    model.encode_to_vec()
}

/// A delta whose new weights do not bear its parent's forms gets forms of its own.
#[test]
fn a_delta_keeps_its_scores_where_its_parents_forms_would_not() {
    let desk = Desk::new();
    let path = |file: &str| desk.folder.path().join(file);
    desk.printed(&[]);
    let plain = forms_of(&path("coupon.hatch"));
    // Small weights move no score, so all of them can be int8.
    desk.change("dense.onnx", |onnx| scaled(onnx, 0.02));
    desk.printed(&["--probe-difference-max", "1"]);
    let parent = forms_of(&path("coupon.hatch"));
    assert!(parent.values().any(|form| *form == Weights::Int8), "{parent:?}");
    std::fs::rename(path("coupon.hatch"), path("parent.hatch")).unwrap();

    desk.change("dense.onnx", |onnx| scaled(onnx, 50.0));
    desk.replace("model.toml", "sequence = 1", "sequence = 2");
    desk.printed(&["--parent", &path("parent.hatch").display().to_string()]);
    let forms = forms_of(&path("coupon.hatch"));
    let narrowest = |forms: &Forms| forms.values().filter(|f| **f == Weights::Int8).count();
    assert!(forms != parent && narrowest(&forms) <= narrowest(&plain), "{forms:?}, {plain:?}");
}

/// A probe sample needs its rows, whatever its tables do about missing ones.
#[test]
fn a_probe_set_is_scored_with_rows_that_requests_would_not_wait_for() {
    let desk = Desk::new();
    let path = |file: &str| desk.folder.path().join(file);
    desk.printed(&[]);
    let plain = forms_of(&path("coupon.hatch"));
    desk.replace("model.toml", "\nsource = ", "\nmiss = \"default\"\nsource = ");
    let printed = desk.printed(&["--placement", "cached"]);
    assert!(printed.contains("64 probe scores differ"), "{printed}");
    assert_eq!(forms_of(&path("coupon.hatch")), plain);
}

/// Before opset 13 an int8 matrix has no scale for each output, but f16 remains.
#[test]
fn a_network_of_an_older_opset_gets_f16() {
    let desk = Desk::new();
    desk.change("dense.onnx", |onnx| {
        let mut model = ModelProto::decode(onnx.as_slice()).unwrap();
        model.opset_import.iter_mut().for_each(|opset| opset.version = Some(12));
        model.encode_to_vec()
    });
    desk.printed(&[]);
    let forms = forms_of(&desk.folder.path().join("coupon.hatch"));
    assert!(forms.values().any(|form| *form == Weights::F16), "{forms:?}");
    assert!(forms.values().all(|form| *form != Weights::Int8), "{forms:?}");
}

#[test]
fn weights_beside_the_onnx_file_are_packed() {
    let desk = Desk::new();
    let data = desk.folder.path().join("dense.onnx.data");
    desk.change("dense.onnx", |bytes| {
        let (mut model, mut all) = (ModelProto::decode(bytes.as_slice()).unwrap(), Vec::new());
        for tensor in &mut model.graph.as_mut().unwrap().initializer {
            let Some(raw) = tensor.raw_data.take() else { continue };
            let entry = |key: &str, value: String| StringStringEntryProto {
                key: Some(key.to_owned()),
                value: Some(value),
            };
            tensor.external_data = vec![
                entry("location", "dense.onnx.data".to_owned()),
                entry("offset", all.len().to_string()),
                entry("length", raw.len().to_string()),
            ];
            tensor.data_location = Some(1);
            all.extend_from_slice(&raw);
        }
        assert!(!all.is_empty());
        std::fs::write(&data, all).unwrap();
        model.encode_to_vec()
    });
    desk.printed(&[]);
    std::fs::remove_file(desk.folder.path().join("coupon.hatch")).unwrap();
    std::fs::remove_file(&data).unwrap();
    let error = desk.refused(&[]);
    assert!(error.contains("dense.onnx.data"), "{error}");
}

/// Packs each table of the coupon model in a folder that has no source of another table, and merges
/// them in a folder without sources.
fn tables_by_name(desk: &Desk) {
    let path = |file: &str| desk.folder.path().join(file);
    let text = std::fs::read_to_string(path("model.toml")).unwrap();
    let (head, rest) = text.split_once("[[table]]").unwrap();
    let own = |number: usize| format!("source{number}.safetensors");
    let mut parts = rest.split("[[table]]");
    let mut split = head.to_owned();
    for number in 0.. {
        let Some(part) = parts.next() else { break };
        split += "[[table]]";
        split += &part.replace("tables.safetensors", &own(number));
    }
    std::fs::write(path("split.toml"), &split).unwrap();
    let run = |words: &[&str], out: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchback"));
        command.arg("pack").arg(path("split.toml")).arg("--out").arg(path(out)).args(words);
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };

    let model: toml::Table = toml::from_str(&split).unwrap();
    let tables = model["table"].as_array().unwrap();
    for (number, table) in tables.iter().enumerate() {
        std::fs::copy(path("tables.safetensors"), path(&own(number))).unwrap();
        let (success, said) = run(&["--table", table["name"].as_str().unwrap()], "named");
        assert!(success, "{said}");
        std::fs::remove_file(path(&own(number))).unwrap();
    }
    let named = path("named").display().to_string();
    let (success, said) = run(&["--merge", &named], "named.hatch");
    assert!(success, "{said}");
    let (success, said) = run(&["--table", "nobody"], "named");
    assert!(!success && said.contains("has no table `nobody`"), "{said}");

    std::fs::write(path("split.toml"), &text).unwrap();
    assert!(run(&[], "whole.hatch").0);
    let bytes = |file: &str| std::fs::read(path(file)).unwrap();
    assert!(bytes("named.hatch") == bytes("whole.hatch"));
}

/// Checks the errors in the reports of one `pack` and of a merge of shares.
fn check_codec_errors(codec: &str, one: &str, merged: &str) {
    let [one, merged] = [one, merged].map(|text| {
        let report: serde_json::Value = serde_json::from_str(text).unwrap();
        report["tables"].as_array().unwrap().clone()
    });
    assert_eq!(one, merged, "the errors are in the shares");
    for table in merged {
        let [most, rms] = ["error_max", "error_rms"].map(|error| table[error].as_f64().unwrap());
        assert!(if codec == "f32" { most == 0.0 } else { 0.0 < rms && rms < most }, "{table}");
    }
}

#[test]
fn shares_merge_into_the_bundle_of_one_pack() {
    let desk = Desk::new();
    let path = |file: &str| desk.folder.path().join(file).display().to_string();
    let run = |words: &[&str], out: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchback"));
        command.arg("pack").arg(path("model.toml")).args(["--out", &path(out)]);
        let output = command.args(words).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    };
    let done = |words: &[&str], out: &str| {
        let (success, said) = run(words, out);
        assert!(success, "{words:?}: {said}");
        said
    };
    let model = std::fs::read_to_string(path("model.toml")).unwrap();
    let model: toml::Table = toml::from_str(&model).unwrap();
    let names: Vec<&str> =
        model["table"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    let shares: Vec<Vec<&str>> =
        names.chunks(6).map(|share| share.iter().flat_map(|n| ["--table", n]).collect()).collect();
    assert_eq!(shares.len(), 3);
    for codec in ["u8", "f32"] {
        done(&["--codec", codec], "one.hatch");
        let threads = ["1", "3"].map(|n| {
            done(&["--codec", codec, "--threads", n], "threads.hatch");
            std::fs::read(path("threads.hatch")).unwrap()
        });
        assert!(threads.iter().all(|bytes| *bytes == std::fs::read(path("one.hatch")).unwrap()));
        for (number, share) in shares.iter().enumerate() {
            let folder = if number == 1 { "b" } else { "a" };
            let words: Vec<&str> = ["--codec", codec].iter().chain(share).copied().collect();
            let said = done(&words, folder);
            assert!(said.contains(&format!("{} tables", share.len() / 2)), "{said}");
        }
        let (a, b) = (path("a"), path("b"));
        let said = done(&["--codec", codec, "--merge", &a, "--merge", &b], "merged.hatch");
        assert!(said.contains("probe scores differ"), "{said}");
        let json = ["--codec", codec, "--json", "-"];
        let merging = [&json[..], &["--merge", &a, "--merge", &b]].concat();
        check_codec_errors(codec, &done(&json, "x.hatch"), &done(&merging, "x.hatch"));
        let bytes = |file: &str| std::fs::read(path(file)).unwrap();
        assert!(bytes("one.hatch") == bytes("merged.hatch"), "{codec}: other bytes");

        let (success, said) = run(&["--codec", codec, "--merge", &a], "refused.hatch");
        assert!(!success && said.contains("is in none of the shares"), "{said}");
        let (success, said) = run(&["--codec", "f16", "--merge", &a, "--merge", &b], "x.hatch");
        assert!(!success && said.contains("of another model.toml, or of other --codec"), "{said}");
    }

    tables_by_name(&desk);

    // A worker that is killed leaves no head, and the next one packs that table again.
    let any = |ending: &str| {
        let files = std::fs::read_dir(path("a")).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|file| file.to_string_lossy().ends_with(ending)).min().unwrap()
    };
    std::fs::remove_file(any(".head")).unwrap();
    let words = ["--codec", "f32", "--merge", &path("a"), "--merge", &path("b")];
    assert!(!run(&words, "x.hatch").0);
    for share in [&shares[0], &shares[2]] {
        let words: Vec<&str> = ["--codec", "f32"].iter().chain(share).copied().collect();
        done(&words, "a");
    }
    done(&words, "again.hatch");

    let damaged = any(".blobs");
    let mut bytes = std::fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let (success, said) = run(&words, "x.hatch");
    assert!(!success && said.contains("content does not match its hash"), "{said}");
}

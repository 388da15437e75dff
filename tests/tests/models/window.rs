//! Windows: the golden window that the trainer's package wrote, byte for byte, and windows that a
//! reader must refuse. `tools/trainer/tests/test_window.py` checks the same golden bytes.

use hatchback_tests::models::repository;
use hatchback_tests::random::Random;
use hatchback_tools::window::folder::windows_after;
use hatchback_tools::window::reader::RowBuffer;
use hatchback_tools::window::writer::{TableChanges, WindowContent, write_window};
use hatchback_tools::window::{Window, WindowError};
use std::path::{Path, PathBuf};

const FILES: [&str; 4] = ["rows.safetensors", "dense.onnx", "probe.jsonl", "window.json"];

fn golden() -> PathBuf {
    repository("tests/data/window/000000000002")
}

/// Copies the golden window into a folder.
fn copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in FILES {
        std::fs::copy(golden().join(name), folder.path().join(name)).unwrap();
    }
    folder
}

/// Reads every column of a window.
fn changes(window: &Window) -> Vec<TableChanges> {
    let read = |table: &hatchback_tools::window::WindowTable| {
        let columns = &table.columns;
        TableChanges {
            name: table.name.clone(),
            dim: columns.dim,
            keys: window.words(columns.keys).unwrap(),
            traffic: columns.traffic.map(|column| window.floats(column).unwrap()),
            since: columns.since.map(|column| window.words(column).unwrap()),
            deleted: window.words(columns.deleted).unwrap(),
            deleted_since: columns.deleted_since.map(|column| window.words(column).unwrap()),
            hot: window.words(columns.hot).unwrap(),
            hot_traffic: Vec::new(),
        }
    };
    window.tables.iter().map(read).collect()
}

#[test]
fn python_and_rust_agree_on_every_byte() {
    let window = Window::open(&golden()).unwrap();
    window.verify().unwrap();
    let tables = changes(&window);
    let user = tables.iter().find(|table| table.name == "user").unwrap();
    assert_eq!(user.keys, [7, u64::MAX, 1 << 40]);
    assert_eq!(user.deleted, [11, u64::MAX - 1]);
    assert_eq!(user.traffic, Some(vec![3.0, 1.0, 0.5]));

    let content = WindowContent {
        lineage: window.head.lineage.clone(),
        window: window.head.window,
        step: window.head.step,
        closed_ms: window.head.closed_ms,
        dense: window.dense().unwrap(),
        probe: window.probe().unwrap(),
        backlog: None,
        kafka: None,
    };
    let (folder, mut buffer) = (tempfile::tempdir().unwrap(), RowBuffer::default());
    write_window(folder.path(), &content, &tables, &mut |table, row, values| {
        let columns = window.table(&tables[table].name).unwrap();
        window.read_row(columns, row as u64, &mut buffer)?;
        values.extend_from_slice(&buffer.values);
        Ok(())
    })
    .unwrap();

    for name in FILES {
        let (ours, theirs) = (folder.path().join(name), golden().join(name));
        assert_eq!(std::fs::read(ours).unwrap(), std::fs::read(theirs).unwrap(), "{name}");
    }
}

fn refusal(folder: &Path) -> String {
    let opened = Window::open(folder).and_then(|window| window.verify());
    opened.unwrap_err().to_string()
}

#[test]
fn a_missing_short_or_changed_file_is_named() {
    for name in FILES {
        let folder = copy();
        std::fs::remove_file(folder.path().join(name)).unwrap();
        assert!(refusal(folder.path()).contains(name), "{name}");
    }
    for name in &FILES[..3] {
        let folder = copy();
        let path = folder.path().join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert!(refusal(folder.path()).contains("SHA-256 is"), "{name}");
        bytes.pop();
        std::fs::write(&path, &bytes).unwrap();
        let said = refusal(folder.path());
        assert!(said.contains(name) && said.contains("size is"), "{said}");
    }
}

#[test]
fn a_head_with_a_wrong_field_is_refused_by_name() {
    let text = std::fs::read_to_string(golden().join("window.json")).unwrap();
    let start = text.find("{\"name\":\"rows").unwrap();
    let rows = &text[start..text.find("{\"name\":\"dense").unwrap()];
    for (field, from, to) in [
        ("format is 2", "\"format\":1", "\"format\":2"),
        ("lineage is a/b", "\"golden\"", "\"a/b\""),
        ("unknown field `zz`", "\"step\"", "\"zz\":1,\"step\""),
        ("files[1].name is ../x", "dense.onnx", "../x"),
        ("files[2].name is dense.onnx, listed twice", "probe.jsonl", "dense.onnx"),
        ("files[0].sha256", "\"sha256\":\"d", "\"sha256\":\"D"),
        ("files is without rows", rows, ""),
        ("expected an object", &text, "[1,\"m\",1,1,1,[]]"),
    ] {
        let folder = copy();
        std::fs::write(folder.path().join("window.json"), text.replacen(from, to, 1)).unwrap();
        let said = refusal(folder.path());
        assert!(said.contains(field) && said.contains("window.json"), "{field}: {said}");
    }
}

/// The error of a window whose rows have this header, followed by `data` bytes.
fn rows_refusal(header: &str, data: usize) -> String {
    let folder = copy();
    let path = folder.path().join("rows.safetensors");
    let head = (header.len() as u64).to_le_bytes();
    let bytes = [&head, header.as_bytes(), &vec![0; data]].concat();
    std::fs::write(&path, &bytes).unwrap();
    let head = folder.path().join("window.json");
    let text = std::fs::read_to_string(&head).unwrap();
    std::fs::write(&head, text.replacen("\"bytes\":676", &format!("\"bytes\":{}", bytes.len()), 1))
        .unwrap();
    let Err(error) = Window::open(folder.path()) else { return String::new() };
    assert!(matches!(error, WindowError::Field { .. } | WindowError::Io { .. }));
    error.to_string()
}

#[test]
fn tensors_that_are_no_window_are_refused_by_name() {
    let one = |name: &str, dtype: &str, shape: &str, end: usize| {
        let text = format!(
            r#"{{"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#
        );
        rows_refusal(&text, end)
    };
    assert!(one("rows", "F32", "[1,2]", 8).contains("tensor is rows, not TABLE.COLUMN"));
    assert!(one("t.weight", "F32", "[1,2]", 8).contains("column is t.weight"));
    assert!(one("t.rows", "F32", "[1,2]", 8).contains("t.keys is 0, for 1 rows"));
    assert!(one("t.keys", "U64", "[2]", 16).contains("t.keys is 2, for 0 rows"));
    assert!(one("t.keys", "F32", "[2]", 8).contains("not U64 or I64"));
    assert!(one("t.rows", "F64", "[1,1]", 8).contains("not F32"));
    assert!(one("t.rows", "F32", "[2]", 8).contains("not [rows, dim]"));
    assert!(one("t.keys", "U64", "[0]", 0).contains("leave an empty column out"));
    assert!(one("t.deleted_since", "U64", "[1]", 8).contains("t.deleted_since is 1"));
    assert!(one("t.deleted", "U64", "[1]", 8).is_empty());
    assert!(rows_refusal("{}", 1).contains("size is 11, not 10"));
    assert!(rows_refusal("nonsense", 0).contains("bytes of JSON"));
}

#[test]
fn changed_bytes_of_a_window_never_panic() {
    let mut random = Random::new(41);
    for _ in 0..400 {
        let folder = copy();
        let name = random.pick(&["rows.safetensors", "window.json"]);
        let path = folder.path().join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        for _ in 0..1 + random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] = random.bits() as u8;
        }
        std::fs::write(&path, bytes).unwrap();
        if let Ok(window) = Window::open(folder.path()) {
            let _ = window.verify();
        }
    }
}

#[test]
fn only_closed_windows_count_and_a_gap_between_them_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let close = |number: u64| {
        let window = folder.path().join(format!("{number:012}"));
        std::fs::create_dir_all(&window).unwrap();
        std::fs::write(window.join("window.json"), "{}").unwrap();
    };
    let numbers = |last| {
        let windows = windows_after(folder.path(), last)?;
        Ok::<_, WindowError>(windows.iter().map(|window| window.number).collect::<Vec<_>>())
    };
    assert!(numbers(None).unwrap().is_empty());
    close(7);
    close(8);
    std::fs::create_dir(folder.path().join("000000000009")).unwrap();
    std::fs::write(folder.path().join("notes.txt"), "").unwrap();
    assert_eq!((numbers(None).unwrap(), numbers(Some(7)).unwrap()), (vec![7, 8], vec![8]));
    assert!(numbers(Some(8)).unwrap().is_empty());
    close(10);
    let gap = numbers(Some(8)).unwrap_err().to_string();
    assert!(gap.ends_with("window 9 is missing, but window 10 is closed"), "{gap}");
}

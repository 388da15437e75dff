//! safetensors: `u64 LE n | n bytes of JSON {name: {dtype, shape, data_offsets}} | tensors without
//! gaps`. Reads only the header; `Metadata` of the `safetensors` crate proves that the tensors
//! neither overlap nor leave holes.

use std::path::Path;

use ::safetensors::tensor::{Dtype as Stored, Metadata, TensorInfo};

use super::array::{Array, Layout, Shape, rows_and_width};
use super::dtype::Dtype;
use super::error::ImportError;
use super::head::{Head, file_size};

/// Bytes of the length before the header.
const PREFIX: u64 = 8;

pub(super) fn open(
    path: &Path,
    tensor: &str,
    keys: Option<&str>,
    counts: Option<&str>,
) -> Result<Layout, ImportError> {
    let file = Safetensors::read(path)?;
    Ok(Layout {
        values: file.array(tensor, 2)?,
        keys: keys.map(|name| file.array(name, 1)).transpose()?,
        counts: counts.map(|name| file.array(name, 1)).transpose()?,
    })
}

struct Safetensors<'a> {
    path: &'a Path,
    data: u64,
    tensors: Metadata,
}

impl<'a> Safetensors<'a> {
    fn read(path: &'a Path) -> Result<Self, ImportError> {
        let length = u64::from_le_bytes(Head::read(path, PREFIX)?.field(0)?);
        let data = length.saturating_add(PREFIX);
        let head = Head::read(path, data)?;
        let json = head.bytes.get(PREFIX as usize..).unwrap_or_default();
        let bad = |error| {
            ImportError::field(
                path,
                "header",
                format!("{length} bytes of JSON"),
                format!("{error}"),
            )
        };
        let tensors: Metadata =
            serde_json::from_slice(json).map_err(|error: serde_json::Error| bad(error))?;
        check_size(path, data, &tensors)?;
        Ok(Self { path, data, tensors })
    }

    fn array(&self, tensor: &str, rank: usize) -> Result<Array, ImportError> {
        let info = self.tensors.info(tensor).ok_or_else(|| self.missing(tensor))?;
        let shape: Vec<u64> = info.shape.iter().map(|&n| n as u64).collect();
        let Shape { rows, width } = rows_and_width(rank, &shape)
            .filter(|shape| shape.width > 0)
            .ok_or_else(|| self.bad("shape", tensor, format!("{shape:?}"), shape_wanted(rank)))?;
        let dtype =
            dtype(info).ok_or_else(|| self.bad("dtype", tensor, info.dtype.to_string(), DTYPES))?;
        let name = format!("{} (tensor {tensor:?})", self.path.display());
        let start = self.data + info.data_offsets.0 as u64;
        Ok(Array { file: self.path.into(), name, start, rows, width, dtype })
    }

    fn bad(&self, field: &str, tensor: &str, value: String, why: &str) -> ImportError {
        ImportError::field(self.path, format!("{field} of tensor {tensor:?}"), value, why)
    }

    fn missing(&self, tensor: &str) -> ImportError {
        let held = self.tensors.offset_keys().join(", ");
        ImportError::field(
            self.path,
            "tensor",
            format!("{tensor:?}"),
            format!("but the file holds {held}"),
        )
    }
}

fn check_size(path: &Path, data: u64, tensors: &Metadata) -> Result<(), ImportError> {
    let (size, tensors) = (file_size(path)?, tensors.data_len() as u64);
    match data.checked_add(tensors) == Some(size) {
        true => Ok(()),
        false => Err(ImportError::size(
            path,
            size,
            format!("is not {data} of header + {tensors} of tensors"),
        )),
    }
}

const DTYPES: &str = "not F16, BF16, F32, F64 (values) or I32, I64, U32, U64 (keys)";

fn shape_wanted(rank: usize) -> &'static str {
    if rank == 1 {
        "not [rows] with at least one row"
    } else {
        "not [rows, dim] with at least one of each"
    }
}

fn dtype(info: &TensorInfo) -> Option<Dtype> {
    match info.dtype {
        Stored::I32 => Some(Dtype::I32),
        Stored::I64 => Some(Dtype::I64),
        Stored::U32 => Some(Dtype::U32),
        Stored::U64 => Some(Dtype::U64),
        Stored::F16 => Some(Dtype::F16),
        Stored::BF16 => Some(Dtype::Bf16),
        Stored::F32 => Some(Dtype::F32),
        Stored::F64 => Some(Dtype::F64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::error::ImportError;
    use super::super::golden::{Golden, count, position, wide_key};
    use super::super::source::Source;

    const MODEL: &str = "safetensors/model.safetensors";

    fn source(tensor: &str, keys: Option<&str>, counts: Option<&str>) -> Source {
        let [keys, counts] = [keys, counts].map(|name| name.map(str::to_owned));
        Source::Safetensors { path: MODEL.into(), tensor: tensor.into(), keys, counts }
    }

    fn sparse() -> Source {
        source("sparse.rows", Some("sparse.keys"), Some("sparse.counts"))
    }

    /// A file with this header text in place of the golden one, followed by `data` bytes.
    fn with_header(text: &str, data: usize) -> Golden {
        let golden = Golden::copy(&[MODEL]);
        let head = (text.len() as u64).to_le_bytes();
        golden.write(MODEL, &[&head, text.as_bytes(), &vec![0; data]].concat());
        golden
    }

    fn refusal(text: &str, data: usize) -> String {
        with_header(text, data).refusal(&source("t", None, None), 2)
    }

    #[test]
    fn golden_tables_are_read() {
        let golden = Golden::copy(&[MODEL]);
        golden.check(&source("plain", None, None), 2, 12, 4, position);
        golden.check(&source("half", None, None), 1, 20, 8, position);
        golden.check(&source("brain", None, None), 0, 20, 4, position);
        golden.check(&source("double", None, None), 5, 6, 3, position);
        golden.check(&sparse(), 3, 9, 6, wide_key);
        let counts = sparse().open(golden.path(), 6).unwrap().counts().unwrap().unwrap();
        assert!(counts.into_iter().eq((0..9).map(count)));
    }

    #[test]
    fn every_truncation_and_every_excess_is_refused() {
        Golden::copy(&[MODEL]).check_sizes_are_exact(MODEL, &sparse(), 6);
    }

    #[test]
    fn absurd_header_lengths_are_refused() {
        let golden = Golden::copy(&[MODEL]);
        for length in [0, 1, 7, 99_999_999, 100_000_001, u64::MAX - 8, u64::MAX - 7, u64::MAX] {
            golden.patch(MODEL, 0, &length.to_le_bytes());
            assert!(!golden.refusal(&sparse(), 6).is_empty());
        }
    }

    #[test]
    fn overlapping_missing_and_overhanging_tensors_are_refused() {
        let two = |a: &str, b: &str| {
            format!(
                r#"{{"t":{{"dtype":"F32","shape":[2,2],"data_offsets":{a}}},
                "u":{{"dtype":"F32","shape":[2,2],"data_offsets":{b}}}}}"#
            )
        };
        assert!(with_header(&two("[0,16]", "[16,32]"), 32).opens(&source("t", None, None), 2));
        for (a, b) in [
            ("[0,16]", "[8,24]"),
            ("[0,16]", "[0,16]"),
            ("[0,16]", "[17,33]"),
            ("[4,20]", "[20,36]"),
            ("[16,0]", "[16,32]"),
            ("[0,16]", "[16,1000]"),
            ("[0,16]", "[16,18446744073709551615]"),
            ("[0,-16]", "[16,32]"),
        ] {
            assert!(refusal(&two(a, b), 32).contains("header is"), "{a} {b}");
        }
        assert!(refusal(&two("[0,16]", "[16,32]"), 31).contains("is not"));
        assert!(refusal(&two("[0,16]", "[16,32]"), 33).contains("of tensors"));
    }

    #[test]
    fn shapes_and_dtypes_that_are_no_table_are_refused() {
        let one = |dtype: &str, shape: &str, end: usize| {
            refusal(
                &format!(
                    r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#
                ),
                end,
            )
        };
        assert!(one("F32", "[4]", 16).contains("shape of tensor \"t\" is [4]"));
        assert!(one("F32", "[1,2,2]", 16).contains("[1, 2, 2], not [rows, dim]"));
        // A table without rows is one, whatever its width.
        assert!(one("F32", "[0,4]", 0).contains("dim is 4, but the table declares dim 2"));
        assert!(one("F32", "[2,0]", 0).contains("[2, 0]"));
        assert!(one("F8_E4M3", "[2,2]", 4).contains("dtype of tensor \"t\" is F8_E4M3"));
        assert!(one("I64", "[2,2]", 32).contains("dtype of values is i64"));
        assert!(one("F32", "[4611686018427387904,4]", 0).contains("header is"));
        assert!(one("F32", "[2,4]", 32).contains("dim is 4, but the table declares dim 2"));
    }

    #[test]
    fn headers_that_are_no_safetensors_json_are_refused() {
        let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        for text in
            ["", "{", "[]", "null", "\u{0}", "{\"t\":{}}", r#"{"__metadata__":{"a":1}}"#, &nested]
        {
            assert!(refusal(text, 0).contains("bytes of JSON"), "{}", &text[..text.len().min(40)]);
        }
        assert!(refusal("{}", 0).contains("tensor is \"t\", but the file holds"));
    }

    #[test]
    fn keys_and_counts_must_be_there_and_fit() {
        let golden = Golden::copy(&[MODEL]);
        let missing = golden.refusal(&source("plain", Some("nokeys"), None), 4);
        assert!(missing.contains("tensor is \"nokeys\", but the file holds plain, half"));
        let nine_for_twelve =
            source("plain", Some("sparse.keys"), None).open(golden.path(), 4).unwrap_err();
        assert!(matches!(nine_for_twelve, ImportError::Rows { found: 9, rows: 12, .. }));
        assert!(golden.refusal(&source("plain", Some("half"), None), 4).contains("not [rows]"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn mutated_bytes_never_panic(
            edits in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        ) {
            Golden::copy(&[MODEL]).survives(MODEL, &edits, &sparse(), 6);
        }
    }
}

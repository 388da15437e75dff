//! .npy: `93 "NUMPY" | version | u16 or u32 LE length | Python dict {descr, fortran_order, shape} |
//! data`. Reads only the header, and accepts only C order and little-endian numbers. Refuses object
//! arrays, which are pickles.

use std::path::Path;

use npyz::{NpyHeader, Order};

use super::array::{Array, Layout, rows_and_width};
use super::dtype::Dtype;
use super::error::ImportError;
use super::head::{Head, file_size};
use crate::limits::NPY_HEADER_BYTES_MAX;

/// Bytes of the magic, the version and the longer of the two lengths.
const PREFIX: u64 = 12;

pub(super) fn open(
    path: &Path,
    keys: Option<&Path>,
    counts: Option<&Path>,
) -> Result<Layout, ImportError> {
    Ok(Layout {
        values: array(path, 2)?,
        keys: keys.map(|path| array(path, 1)).transpose()?,
        counts: counts.map(|path| array(path, 1)).transpose()?,
    })
}

fn array(path: &Path, rank: usize) -> Result<Array, ImportError> {
    let (text, start) = text_range(path)?;
    let head = Head::read(path, start)?;
    let header = parse(path, &head, text)?;

    if header.order() == Order::Fortran {
        return Err(ImportError::field(
            path,
            "fortran_order",
            "True",
            "not False: rows must be contiguous",
        ));
    }
    let descr = header.dtype().descr();
    let dtype = dtype(&descr).ok_or_else(|| ImportError::field(path, "descr", descr, DESCRS))?;

    let shape = header.shape();
    let axes =
        || ImportError::field(path, "shape", format!("{shape:?}"), format!("not of {rank} axes"));
    Array::of_shape(path, start, rows_and_width(rank, shape).ok_or_else(axes)?, dtype)
}

/// Returns the offsets at which the header's text starts and ends.
fn text_range(path: &Path) -> Result<(u64, u64), ImportError> {
    let head = Head::read(path, file_size(path)?.min(PREFIX))?;
    if !head.bytes.starts_with(b"\x93NUMPY") {
        if head.bytes.starts_with(b"PK") {
            let why = "not the .npy of one array: write each array with `numpy.save`";
            return Err(ImportError::field(path, "format", "zip, as .npz has it", why));
        }
        let magic = format!("{:02x?}", head.field::<6>(0)?);
        return Err(ImportError::field(path, "magic", magic, "not 93 \"NUMPY\""));
    }

    let (text, length) = match head.field(6)? {
        [1, 0] => (10, u64::from(u16::from_le_bytes(head.field(8)?))),
        [2 | 3, 0] => (12, u64::from(u32::from_le_bytes(head.field(8)?))),
        [major, minor] => {
            return Err(ImportError::field(
                path,
                "version",
                format!("{major}.{minor}"),
                "not 1.0, 2.0, 3.0",
            ));
        }
    };

    match length <= NPY_HEADER_BYTES_MAX {
        true => Ok((text, text + length)),
        false => Err(ImportError::field(
            path,
            "header length",
            length,
            format!("more than {NPY_HEADER_BYTES_MAX}"),
        )),
    }
}

fn parse(path: &Path, head: &Head, text: u64) -> Result<NpyHeader, ImportError> {
    let dict = head.bytes.get(text as usize..).unwrap_or_default();
    let bad = |why: String| {
        ImportError::field(path, "header", String::from_utf8_lossy(dict).trim_end(), why)
    };
    if !is_plain(dict) {
        return Err(bad("not the header of a plain array".into()));
    }
    NpyHeader::from_reader(head.bytes.as_slice()).map_err(|error| bad(error.to_string()))
}

/// Returns whether `npyz` can parse the text safely: `npyz` recurses at each bracket and multiplies
/// the axes unchecked. A plain array has one dict, one tuple and no escapes. The product of axes of
/// at most 19 digits together fits a u64.
fn is_plain(dict: &[u8]) -> bool {
    let count = |wanted: fn(&u8) -> bool| dict.iter().filter(|byte| wanted(byte)).count();
    count(|byte| b"([{".contains(byte)) <= 2
        && count(u8::is_ascii_digit) <= 19
        && count(|byte| b"\\xX".contains(byte)) == 0
}

const DESCRS: &str = "not '<f2', '<f4', '<f8' (values) or '<i4', '<i8', '<u4', '<u8' (keys)";

fn dtype(descr: &str) -> Option<Dtype> {
    match descr {
        "'<f2'" => Some(Dtype::F16),
        "'<f4'" => Some(Dtype::F32),
        "'<f8'" => Some(Dtype::F64),
        "'<i4'" => Some(Dtype::I32),
        "'<i8'" => Some(Dtype::I64),
        "'<u4'" => Some(Dtype::U32),
        "'<u8'" => Some(Dtype::U64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::golden::{Golden, count, position, wide_key};
    use super::super::source::Source;

    const FILES: [&str; 5] =
        ["npy/a.npy", "npy/v2.npy", "npy/half.npy", "npy/keys.npy", "npy/counts.npy"];

    fn bare(path: &str) -> Source {
        Source::Npy { path: path.into(), keys: None, counts: None }
    }

    fn keyed() -> Source {
        Source::Npy {
            path: FILES[0].into(),
            keys: Some(FILES[3].into()),
            counts: Some(FILES[4].into()),
        }
    }

    /// Why a version 1 file with this header text and 200 bytes of data is refused.
    fn refusal(text: &str) -> String {
        let golden = Golden::copy(&FILES);
        let head =
            [b"\x93NUMPY\x01\x00".as_slice(), &(text.len() as u16).to_le_bytes(), text.as_bytes()]
                .concat();
        golden.write(FILES[0], &[head.as_slice(), &[0; 200]].concat());
        golden.refusal(&bare(FILES[0]), 5)
    }

    fn dict(descr: &str, fortran: &str, shape: &str) -> String {
        refusal(&format!("{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"))
    }

    #[test]
    fn golden_arrays_are_read() {
        let golden = Golden::copy(&FILES);
        golden.check(&bare(FILES[0]), 4, 10, 5, position);
        golden.check(&bare(FILES[1]), 4, 10, 5, position);
        golden.check(&bare(FILES[2]), 1, 10, 5, position);
        golden.check(&keyed(), 4, 10, 5, wide_key);
        let counts = keyed().open(golden.path(), 5).unwrap().counts().unwrap().unwrap();
        assert!(counts.into_iter().eq((0..10).map(count)));
    }

    #[test]
    fn every_truncation_and_every_excess_is_refused() {
        let golden = Golden::copy(&FILES);
        golden.check_sizes_are_exact(FILES[0], &keyed(), 5);
        golden.check_sizes_are_exact(FILES[3], &keyed(), 5);
        golden.check_sizes_are_exact(FILES[4], &keyed(), 5);
        golden.check_sizes_are_exact(FILES[1], &bare(FILES[1]), 5);
    }

    #[test]
    fn magic_version_and_length_must_be_right() {
        let golden = Golden::copy(&FILES);
        let refused = |at: usize, byte: u8| {
            golden.restore(FILES[1]);
            golden.patch(FILES[1], at, &[byte]);
            golden.refusal(&bare(FILES[1]), 5)
        };
        for at in 0..6 {
            assert!(refused(at, b'?').contains("magic is"));
        }
        golden.write(FILES[1], b"PK\x03\x04xxxx");
        assert!(golden.refusal(&bare(FILES[1]), 5).contains("write each array with `numpy.save`"));
        golden.write(FILES[1], b"");
        assert!(golden.refusal(&bare(FILES[1]), 5).contains("size 0 means that the file is empty"));
        assert!(refused(6, 4).contains("version is 4.0"));
        assert!(refused(7, 1).contains("version is 2.1"));
        for byte in [0, 1, 0x73, 0x75, 0xff] {
            assert!(!refused(8, byte).is_empty());
        }
        assert!(refused(11, 0x7f).contains("header length is 2130706"));
    }

    #[test]
    fn fortran_order_and_foreign_numbers_are_refused() {
        assert!(dict("'<f4'", "True", "(10, 5)").contains("fortran_order is True"));
        for descr in ["'>f4'", "'<f16'", "'<i2'", "'|b1'", "'|O'", "'<V2'", "'<c8'", "'<U4'"] {
            assert!(dict(descr, "False", "(10, 5)").contains("descr is"), "{descr}");
        }
        assert!(dict("'<i8'", "False", "(5, 5)").contains("dtype of values is i64"));
        for descr in ["'<M8[ns]'", "[('x', '<f4', (5,))]"] {
            assert!(
                dict(descr, "False", "(10, 5)").contains("not the header of a plain array"),
                "{descr}"
            );
        }
    }

    #[test]
    fn shapes_that_are_no_table_are_refused() {
        for shape in ["()", "(50,)", "(1, 10, 5)"] {
            assert!(dict("'<f4'", "False", shape).contains("not of 2 axes"), "{shape}");
        }
        assert!(dict("'<f4'", "False", "(10, 0)").contains("an empty table"));
        // No rows are allowed, but then the file has none.
        assert!(dict("'<f4'", "False", "(0, 5)").contains("0 rows x 5 f32 of 4 bytes"));
        assert!(dict("'<f4'", "False", "(11, 5)").contains("11 rows x 5 f32 of 4 bytes"));
        assert!(
            dict("'<f4'", "False", "(5, 10)").contains("dim is 10, but the table declares dim 5")
        );
        for shape in ["(-10, 5)", "(10.0, 5)", "None", "'(10, 5)'"] {
            assert!(dict("'<f4'", "False", shape).contains("header is"), "{shape}");
        }
    }

    #[test]
    fn a_shape_whose_product_overflows_is_refused() {
        for shape in
            ["(18446744073709551615, 2)", "(9999999999, 9999999999)", "(0xffffffffffffffff, 0xff)"]
        {
            assert!(
                dict("'<f4'", "False", shape).contains("not the header of a plain array"),
                "{shape}"
            );
        }
        assert!(dict("'<f4'", "False", "(999999999, 999999999)").contains("size 2"));
        assert!(dict("'<f4'", "False", "(0, 999999999, 99999999)").contains("axes"));
    }

    #[test]
    fn headers_that_are_no_dict_are_refused() {
        let nested = "(".repeat(9_000);
        for text in ["", "{", "[]", "{}", "{'descr': '<f4'}", "\u{0}", "'\\ud800'", &nested] {
            assert!(refusal(text).contains("header is"), "{}", &text[..text.len().min(40)]);
        }
        assert!(dict("1", "False", "(10, 5)").contains("must be string or list"));
        assert!(dict("'<f4'", "0", "(10, 5)").contains("not a bool"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn mutated_bytes_never_panic(
            file in 0..4usize,
            edits in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        ) {
            let file = [0, 0, 3, 4][file];
            Golden::copy(&FILES).survives(FILES[file], &edits, &keyed(), 5);
        }

        #[test]
        fn any_text_of_the_alphabet_of_headers_never_panics(
            text in "[{}()\\[\\]',: <>f48iuOVTrueFals0-9+_.jbxX-]{0,60}",
        ) {
            refusal(&text);
            dict("'<f4'", "False", &text);
        }
    }
}

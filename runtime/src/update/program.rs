//! What a version of the program can do, and what a release needs of it. A car compares both before
//! it fetches more than metadata. Never reads a bundle's rows.

use crate::bundle::manifest::{Layer, MANIFEST_FORMAT, Manifest};
use crate::bundle::{BUNDLE_FORMAT, BundleReader};
use crate::flash::segment::SEGMENT_FORMAT;
use crate::limits::{
    DELTA_PAGES_MAX, DENSE_BYTES_MAX, DENSE_FEATURES_MAX, DIM_MAX, FEATURES_MAX, HOT_KEYS_MAX,
    HOTNESS_MAX, INPUT_FEATURES_MAX, INPUT_WIDTH_MAX, LOOKUPS_MAX, MANIFEST_BYTES_MAX, NEEDS_MAX,
    OUTPUTS_MAX, PAGE_BYTES, PROBE_BYTES_MAX, TABLES_MAX,
};
use crate::schema::InputSource;
use crate::schema::probe_set::PROBE_FORMAT;
use crate::schema::raw_value::Shortened;
use hatchback_kernels::dense::{operators, operators_of};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

/// A version of the program. It is a value, so that one simulation has cars of several versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its number.
    pub version: String,
    /// The formats that it reads, and the operators that it knows: `segment-1`, `operator-Gemm`.
    pub known: BTreeSet<String>,
    /// The largest value of each size that it accepts.
    pub sizes: BTreeMap<String, u64>,
}

/// Returns the formats of a bundle.
fn formats() -> [String; 4] {
    [
        format!("bundle-{BUNDLE_FORMAT}"),
        format!("manifest-{MANIFEST_FORMAT}"),
        format!("segment-{SEGMENT_FORMAT}"),
        format!("probe-{PROBE_FORMAT}"),
    ]
}

impl Program {
    /// Returns this version.
    pub fn this() -> Arc<Self> {
        static THIS: LazyLock<Arc<Program>> = LazyLock::new(|| {
            let known = operators().map(|name| format!("operator-{name}"));
            let known = known.chain(formats());
            let sizes = [
                ("tables", TABLES_MAX as u64),
                ("features", FEATURES_MAX as u64),
                ("lookups", LOOKUPS_MAX as u64),
                ("dense-features", DENSE_FEATURES_MAX as u64),
                ("dim", DIM_MAX as u64),
                ("hotness", HOTNESS_MAX as u64),
                ("input-width", INPUT_WIDTH_MAX as u64),
                ("input-features", INPUT_FEATURES_MAX as u64),
                ("outputs", OUTPUTS_MAX as u64),
                ("manifest-bytes", MANIFEST_BYTES_MAX as u64),
                ("dense-bytes", DENSE_BYTES_MAX),
                ("probe-bytes", PROBE_BYTES_MAX),
                ("hot-keys", HOT_KEYS_MAX as u64),
                ("delta-pages", u64::from(DELTA_PAGES_MAX)),
            ];
            Arc::new(Program {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                known: known.collect(),
                sizes: sizes.map(|(size, most)| (size.to_owned(), most)).into(),
            })
        });
        Arc::clone(&THIS)
    }

    /// Returns the first of the signed `needs` that this version does not meet, as users see it. It
    /// does not meet a need of a kind that it does not know, nor a list that is no list or has over
    /// `NEEDS_MAX` entries.
    pub fn lacks(&self, needs: &Value) -> Option<String> {
        let Some(needs) = needs.as_array().filter(|needs| needs.len() <= NEEDS_MAX) else {
            return Some(format!("a list of over {NEEDS_MAX} needs"));
        };
        let unmet = needs.iter().find(|need| !need.as_str().is_some_and(|need| self.meets(need)));
        let shown = |need: &Value| Shortened(need.as_str().unwrap_or("text")).to_string();
        unmet.map(|need| shown(need).replacen('-', " ", 1))
    }

    fn meets(&self, need: &str) -> bool {
        let is_within = |(size, value): (&str, &str)| {
            let most = self.sizes.get(size);
            most.zip(value.parse::<u64>().ok()).is_some_and(|(most, value)| value <= *most)
        };
        self.known.contains(need) || need.rsplit_once('-').is_some_and(is_within)
    }
}

/// Returns what a program needs to read `bundle`, sorted: formats, operators and sizes. A network
/// that cannot be read needs no operator: an install refuses it by name.
pub fn needs_of(bundle: &mut BundleReader) -> BTreeSet<String> {
    let (manifest, bytes) = (bundle.manifest().clone(), bundle.manifest_bytes().len());
    let network = bundle.blob(manifest.dense).ok();
    let operators = network.and_then(|onnx| operators_of(onnx).ok()).unwrap_or_default();
    let operators = operators.into_iter().map(|name| format!("operator-{name}"));
    operators.chain(needs_of_manifest(&manifest, bytes)).collect()
}

/// Returns the needs of a bundle with this manifest of `bytes` encoded bytes: all but operators.
pub fn needs_of_manifest(manifest: &Manifest, bytes: usize) -> BTreeSet<String> {
    let sizes = sizes_of(manifest, bytes).into_iter().filter(|(_, value)| *value > 0);
    let sizes = sizes.map(|(size, value)| format!("{size}-{value}"));
    formats().into_iter().chain(sizes).collect()
}

fn sizes_of(manifest: &Manifest, manifest_bytes: usize) -> [(&'static str, u64); 14] {
    let schema = &manifest.schema;
    let largest = |sizes: &mut dyn Iterator<Item = u64>| sizes.max().unwrap_or(0);
    let bytes = |blob: u32| manifest.blobs[blob as usize].raw_bytes();
    let inputs = &schema.network.inputs;
    let listed = inputs.iter().map(|input| match &input.source {
        InputSource::Dense => 0,
        InputSource::Vectors(list) | InputSource::Lengths(list) | InputSource::Masks(list) => {
            list.len()
        }
    });
    let pages = |layer: Layer| bytes(layer.segment) / PAGE_BYTES as u64;
    let deltas = (0..manifest.tables.len()).flat_map(|number| {
        manifest.layers(number).into_iter().skip(usize::from(!manifest.is_delta(number)))
    });
    [
        ("tables", schema.tables.len() as u64),
        ("features", schema.features.len() as u64),
        ("lookups", schema.lookups.len() as u64),
        ("dense-features", schema.dense_features.len() as u64),
        ("dim", largest(&mut schema.tables.iter().map(|t| u64::from(t.dim)))),
        ("hotness", largest(&mut schema.features.iter().map(|f| u64::from(f.hotness_max)))),
        ("input-width", largest(&mut inputs.iter().map(|i| schema.input_width(i) as u64))),
        ("input-features", listed.sum::<usize>() as u64),
        ("outputs", schema.network.outputs.len() as u64),
        ("manifest-bytes", manifest_bytes as u64),
        ("dense-bytes", bytes(manifest.dense)),
        ("probe-bytes", manifest.probe.map_or(0, bytes)),
        ("hot-keys", largest(&mut manifest.tables.iter().map(|t| t.hot.map_or(0, bytes) / 8))),
        ("delta-pages", largest(&mut deltas.map(pages))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::SHORTENED_BYTES_MAX;

    #[test]
    fn a_need_is_met_by_its_name_or_within_its_size() {
        let this = Program::this();
        let lacks = |needs: Value| this.lacks(&needs);
        assert_eq!(lacks(Value::from(vec!["segment-1", "operator-Gemm", "dim-4096"])), None);
        assert_eq!(lacks(Value::from(Vec::<String>::new())), None);
        for (need, shown) in [
            ("operator-Warp", "operator Warp"),
            ("dim-4097", "dim 4097"),
            ("dim--1", "dim -1"),
            ("dim-18446744073709551616", "dim 18446744073709551616"),
            ("segment-2", "segment 2"),
            ("a-kind-of-the-future-1", "a kind-of-the-future-1"),
            ("", ""),
        ] {
            assert_eq!(lacks(Value::from(vec![need])).as_deref(), Some(shown));
        }
    }

    #[test]
    fn a_silly_list_is_not_met_and_its_message_is_short() {
        let this = Program::this();
        let silly = [
            Value::from(vec!["segment-1"; NEEDS_MAX + 1]),
            Value::from("segment-1"),
            Value::from(vec![Value::Null]),
            Value::from(vec!["\n€".repeat(1 << 20)]),
        ];
        for needs in silly {
            let shown = this.lacks(&needs).unwrap_or_default();
            assert!((1..=SHORTENED_BYTES_MAX + 3).contains(&shown.len()), "{} bytes", shown.len());
            assert!(!shown.contains('\n'));
        }
    }
}

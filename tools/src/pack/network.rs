//! Reads the dense network: the ONNX file, and the weights in files beside it. The bundle has one
//! file for the network, so these weights are moved into it. Never reads a file outside the folder
//! of the ONNX file.

use crate::report::input;
use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use hatchback::limits::DENSE_BYTES_MAX;
use hatchback_kernels::dense::DenseError;
use hatchback_kernels::dense::graph::onnx::{GraphProto, ModelProto, TensorProto, parse};
use prost::Message;
use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;
use std::path::{Component, Path};

/// `TensorProto.DataLocation`: the values are in another file.
const EXTERNAL: i32 = 1;

/// The versions of ONNX's file format that this program knows.
const IR_VERSIONS: RangeInclusive<i64> = 3..=14;

/// Returns the ONNX file at `path` with all its weights.
///
/// # Errors
/// A file cannot be read, a tensor is not in the file that it names, or all of it is too large. The
/// file has an unknown version, or only runs batches of one size.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let shown = || path.display().to_string();
    let onnx = input::read(path, DENSE_BYTES_MAX).with_context(shown)?;
    let mut model = parse(onnx.clone().into()).with_context(shown)?;
    check(&model).with_context(shown)?;
    let Some(graph) = model.graph.as_mut().filter(|graph| has_external(graph)) else {
        return Ok(onnx);
    };

    let mut folder =
        Folder { path: path.parent().unwrap_or(Path::new(".")), files: HashMap::new() };
    for tensor in tensors(graph).filter(|t| t.data_location.unwrap_or(0) == EXTERNAL) {
        let name = tensor.name().to_owned();
        let at = || format!("{}: tensor `{name}`", path.display());
        tensor.raw_data = Some(folder.read(tensor).with_context(at)?.into());
        tensor.data_location = None;
        tensor.external_data.clear();
    }

    let whole = model.encode_to_vec();
    let bytes = whole.len() as u64;
    ensure!(
        bytes <= DENSE_BYTES_MAX,
        "{}: {bytes} bytes with its weights, over {DENSE_BYTES_MAX}",
        path.display()
    );
    Ok(whole)
}

fn check(model: &ModelProto) -> Result<()> {
    let ir = model.ir_version.unwrap_or(*IR_VERSIONS.end());
    let (first, last) = IR_VERSIONS.into_inner();
    ensure!(
        (first..=last).contains(&ir),
        "IR version {ir} of ONNX is not known, {first} to {last} are"
    );
    // The exporter may have written this size into the network's constants.
    match fixed_batch(model, 2) {
        Some((name, size)) => bail!("input `{name}` has a fixed batch of {size}; {DYNAMIC}"),
        None => Ok(()),
    }
}

const DYNAMIC: &str = "export with a dynamic first axis: `dynamic_shapes`, or `dynamic_axes` of \
                       PyTorch's older exporter";

/// Returns the first input whose batch has a fixed size of at least `least`, and that size.
fn fixed_batch(model: &ModelProto, least: i64) -> Option<(&str, i64)> {
    let graph = model.graph.as_ref()?;
    // Older files list their initializers among the inputs.
    let stored: HashSet<&str> = graph.initializer.iter().map(TensorProto::name).collect();
    let mut inputs = graph.input.iter().filter(|input| !stored.contains(input.name()));
    let large = |size: &i64| *size >= least;
    inputs.find_map(|input| Some((input.name(), input.fixed_batch().filter(large)?)))
}

/// Returns `error`, the reason for which `onnx` does not load. A batch of one sample is a size that
/// each sample has alone; a network that does not load may have it in its constants.
pub fn with_batch(onnx: &[u8], error: DenseError) -> Error {
    let model = parse(onnx.to_vec().into()).unwrap_or_default();
    match fixed_batch(&model, 1) {
        // Only such an error can be of a size.
        Some((name, size)) if matches!(error, DenseError::Load(_)) => {
            anyhow!("{error}; input `{name}` has a fixed batch of {size}, {DYNAMIC}")
        }
        _ => error.into(),
    }
}

fn has_external(graph: &GraphProto) -> bool {
    let nodes = graph.node.iter().flat_map(|n| &n.attribute).filter_map(|a| a.t.as_ref());
    graph.initializer.iter().chain(nodes).any(|t| t.data_location.unwrap_or(0) == EXTERNAL)
}

/// Returns the tensors of a graph: its initializers and those in its nodes.
fn tensors(graph: &mut GraphProto) -> impl Iterator<Item = &mut TensorProto> {
    let nodes = graph.node.iter_mut().flat_map(|n| &mut n.attribute).filter_map(|a| a.t.as_mut());
    graph.initializer.iter_mut().chain(nodes)
}

/// The folder of an ONNX file, with the files of weights that were read.
struct Folder<'a> {
    path: &'a Path,
    files: HashMap<String, Vec<u8>>,
}

impl Folder<'_> {
    /// Returns the bytes of `tensor` in the file that it names.
    fn read(&mut self, tensor: &TensorProto) -> Result<Vec<u8>> {
        let value = |key: &str| {
            let entry = tensor.external_data.iter().find(|e| e.key() == key);
            entry.map(|e| e.value().to_owned())
        };
        let number = |key: &str| -> Result<Option<usize>> {
            let Some(text) = value(key) else { return Ok(None) };
            Ok(Some(text.parse().with_context(|| format!("external data: {key} `{text}`"))?))
        };
        let Some(location) = value("location") else {
            bail!("external data without a location");
        };

        let place = Path::new(&location);
        ensure!(
            place.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir)),
            "external data in `{location}`, which is outside the folder of the ONNX file"
        );
        if !self.files.contains_key(&location) {
            let path = self.path.join(place);
            let shown = || path.display().to_string();
            let file = input::read(&path, DENSE_BYTES_MAX).with_context(shown)?;
            self.files.insert(location.clone(), file);
        }
        let file = &self.files[&location];

        let offset = number("offset")?.unwrap_or(0);
        let rest = file.get(offset..).unwrap_or_default();
        let length = number("length")?.unwrap_or(rest.len());
        let Some(data) = rest.get(..length) else {
            bail!(
                "external data: {length} bytes at {offset} of `{location}`, which has {}",
                file.len()
            );
        };
        Ok(data.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::onnx::{Graph, Type};
    use hatchback_kernels::dense::graph::onnx::StringStringEntryProto;

    /// Writes a network with weights in `w.data`, and changes the tensor's entries.
    fn network(entries: &[(&str, &str)]) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let mut graph = Graph::default();
        graph.input("x", Type::Float, &[2]);
        graph.external("w", &[2, 1], "w.data");
        graph.node("MatMul", &["x", "w"], "out", &[]);
        graph.output("out", &[1]);
        let mut model = ModelProto::decode(graph.file().as_slice()).unwrap();
        let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
            key: Some((*key).to_owned()),
            value: Some((*value).to_owned()),
        };
        model.graph.as_mut().unwrap().initializer[0].external_data =
            entries.iter().map(entry).collect();
        let path = folder.path().join("dense.onnx");
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let weights: Vec<u8> = [9.0f32, 1.5, 2.5].iter().flat_map(|w| w.to_le_bytes()).collect();
        std::fs::write(folder.path().join("w.data"), weights).unwrap();
        (folder, path)
    }

    #[test]
    fn weights_in_another_file_are_put_into_the_network() {
        let (_folder, path) = network(&[("location", "w.data"), ("offset", "4"), ("length", "8")]);
        let whole = ModelProto::decode(read(&path).unwrap().as_slice()).unwrap();
        let tensor = &whole.graph.unwrap().initializer[0];
        let expected: Vec<u8> = [1.5f32, 2.5].iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(tensor.raw_data.as_deref(), Some(expected.as_slice()));
        assert!(tensor.data_location.is_none() && tensor.external_data.is_empty());
    }

    #[test]
    fn a_fixed_batch_and_an_unknown_version_are_refused() {
        let (_folder, path) = network(&[("location", "w.data"), ("offset", "4"), ("length", "8")]);
        let whole = ModelProto::decode(read(&path).unwrap().as_slice()).unwrap();
        let changed = |change: &dyn Fn(&mut ModelProto)| {
            let mut model = whole.clone();
            change(&mut model);
            std::fs::write(&path, model.encode_to_vec()).unwrap();
            read(&path).map_err(|error| format!("{error:#}"))
        };
        let fixed = |size: i64| {
            move |model: &mut ModelProto| {
                let input = &mut model.graph.as_mut().unwrap().input[0];
                let of = input.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap();
                let first = &mut of.shape.as_mut().unwrap().dim[0];
                (first.dim_value, first.dim_param) = (Some(size), None);
            }
        };
        let refused = changed(&fixed(2)).unwrap_err();
        assert!(refused.contains("input `x` has a fixed batch of 2; export with"), "{refused}");
        let refused = changed(&|model| model.ir_version = Some(99)).unwrap_err();
        assert!(refused.contains("IR version 99 of ONNX is not known, 3 to 14 are"), "{refused}");

        let one = changed(&fixed(1)).unwrap();
        let hint = with_batch(&one, DenseError::Load("no".to_owned())).to_string();
        assert!(hint.contains("no; input `x` has a fixed batch of 1, export with"), "{hint}");
    }

    #[test]
    fn weights_that_are_not_there_are_refused_by_name() {
        let refused = |entries: &[(&str, &str)], what: &str| {
            let (_folder, path) = network(entries);
            let error = format!("{:#}", read(&path).unwrap_err());
            assert!(error.contains("tensor `w`") && error.contains(what), "{error}");
        };
        refused(&[("location", "../w.data")], "outside the folder");
        refused(&[("location", "/etc/passwd")], "outside the folder");
        refused(&[("location", "absent.data")], "absent.data");
        refused(&[("location", "w.data"), ("offset", "8"), ("length", "8")], "which has 12");
        refused(&[("location", "w.data"), ("offset", "-1")], "offset `-1`");
        refused(&[], "without a location");
    }
}

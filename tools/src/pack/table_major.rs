//! Converts networks for Triton's HPS ensembles, whose inputs are flat lists: the vectors of all
//! samples for the first table, then those for the second, and so on. A bundle's network has inputs
//! with one row a sample. If the network starts by sorting the list by sample, those nodes are
//! removed. Otherwise nodes are added that make the flat list from the rows. Never changes a
//! weight.

use crate::import::onnx_writer::ints;
use anyhow::{Context, Result, bail, ensure};
use hatchback::schema::{InputSource, NetworkInput, Schema};
use hatchback_kernels::dense::graph::onnx::{
    Dimension, FLOAT, GraphProto, INT64, ModelProto, NodeProto, TensorProto, TensorShapeProto,
    TensorTypeProto, TypeProto, ValueInfoProto,
};
use prost::Message;

/// A flat input: `parts` vectors of `width` values a sample.
struct FlatInput<'a> {
    name: &'a str,
    parts: i64,
    width: i64,
}

/// Returns the network `onnx` with inputs `[batch, values]` instead of flat lists.
///
/// # Errors
/// The network cannot be decoded, it lacks an input, or tables of one input have several widths.
pub fn to_batch_major(onnx: &[u8], schema: &Schema) -> Result<Vec<u8>> {
    let mut model = ModelProto::decode(onnx).context("is not an ONNX file")?;
    let graph = model.graph.as_mut().context("has no graph")?;
    ensure!(
        graph.node.iter().flat_map(|node| &node.attribute).all(|a| a.g.is_none()),
        "the network has control flow, which may read a flat input"
    );
    for input in &schema.network.inputs {
        let flat = flat_input(input, schema)?;
        declare(graph, &flat)?;
        if !drops_sorting(graph, &flat) {
            flatten(graph, &flat);
        }
    }
    Ok(model.encode_to_vec())
}

fn flat_input<'a>(input: &'a NetworkInput, schema: &Schema) -> Result<FlatInput<'a>> {
    let name = input.name.as_str();
    let InputSource::Vectors(lookups) = &input.source else {
        // Dense features, lengths and masks are flat, but already sample by sample.
        return Ok(FlatInput { name, parts: 1, width: schema.input_width(input) as i64 });
    };
    let widths: Vec<usize> = lookups.iter().map(|l| schema.vector_width(usize::from(*l))).collect();
    let width = widths.first().copied().unwrap_or(0);
    if widths.iter().any(|other| *other != width) {
        bail!("input `{name}`: table_major with vectors of several widths: {widths:?}");
    }
    Ok(FlatInput { name, parts: widths.len() as i64, width: width as i64 })
}

/// Declares the input as `[batch, values]`.
fn declare(graph: &mut GraphProto, input: &FlatInput<'_>) -> Result<()> {
    let found = graph.input.iter_mut().find(|info| info.name.as_deref() == Some(input.name));
    let found = found.with_context(|| format!("the network has no input `{}`", input.name))?;
    let batch = Dimension { dim_param: Some("batch".to_owned()), ..Dimension::default() };
    let values = Dimension { dim_value: Some(input.parts * input.width), dim_param: None };
    let shape = Some(TensorShapeProto { dim: vec![batch, values] });
    let tensor_type = Some(TensorTypeProto { elem_type: Some(FLOAT), shape });
    *found = ValueInfoProto { name: found.name.take(), r#type: Some(TypeProto { tensor_type }) };
    Ok(())
}

/// Removes the nodes that sort the flat list by sample, if only they read the input. Returns false,
/// and changes nothing, if other nodes read it.
fn drops_sorting(graph: &mut GraphProto, input: &FlatInput<'_>) -> bool {
    let [reader] = readers(graph, input.name)[..] else { return false };
    let reshape = &graph.node[reader];
    let shape = reshape.input.get(1).and_then(|name| integers(graph, name));
    let (true, Some(shape)) = (reshape.op_type() == "Reshape", shape) else { return false };
    if input.parts == 1 && shape == [-1, input.width] {
        return true; // does nothing to rows
    }

    let sorted = [input.parts, -1, input.width];
    let Some(list) = reshape.output.first() else { return false };
    let [next] = readers(graph, list)[..] else { return false };
    let transpose = &graph.node[next];
    let is_sorting = transpose.op_type() == "Transpose"
        && transpose.attribute.iter().any(|a| a.name() == "perm" && a.ints == [1, 0, 2]);
    if shape != sorted || !is_sorting {
        return false;
    }

    let by_sample = format!("{}.by_sample", input.name);
    graph.initializer.push(constant(&by_sample, &[-1, input.parts, input.width]));
    graph.node[next] = NodeProto {
        output: graph.node[next].output.clone(),
        ..node("Reshape", &[input.name, &by_sample], &by_sample)
    };
    graph.node.remove(reader);
    true
}

/// Adds nodes that make the flat list from the rows, and connects all readers of the input to it.
fn flatten(graph: &mut GraphProto, input: &FlatInput<'_>) {
    let part = |what: &str| format!("{}.{what}", input.name);
    let (split, tables, all, flat) = (part("split"), part("tables"), part("all"), part("flat"));
    for place in readers(graph, input.name) {
        for name in graph.node[place].input.iter_mut().filter(|name| *name == input.name) {
            name.clone_from(&flat);
        }
    }

    let sample = part("sample");
    graph.initializer.push(constant(&sample, &[-1, input.parts, input.width]));
    graph.initializer.push(constant(&all, &[-1]));
    let mut transpose = node("Transpose", &[&split], &tables);
    transpose.attribute = vec![ints("perm", &[1, 0, 2])];
    let first = [
        node("Reshape", &[input.name, &sample], &split),
        transpose,
        node("Reshape", &[&tables, &all], &flat),
    ];
    graph.node.splice(0..0, first);
}

/// Returns the places of the nodes that read `name`.
fn readers(graph: &GraphProto, name: &str) -> Vec<usize> {
    let reads = |node: &NodeProto| node.input.iter().any(|input| input == name);
    (0..graph.node.len()).filter(|place| reads(&graph.node[*place])).collect()
}

/// Returns the integers of the constant `name`.
fn integers(graph: &GraphProto, name: &str) -> Option<Vec<i64>> {
    let stored = graph.initializer.iter().find(|tensor| tensor.name() == name);
    let made = || {
        let node = graph.node.iter().find(|node| node.output.iter().any(|out| out == name))?;
        let value = node.attribute.iter().find(|a| a.name() == "value")?;
        value.t.as_ref().filter(|_| node.op_type() == "Constant")
    };
    let tensor = stored.or_else(made).filter(|tensor| tensor.data_type() == INT64)?;
    match &tensor.raw_data {
        Some(raw) => {
            let (each, rest) = raw.as_chunks();
            rest.is_empty().then(|| each.iter().map(|b| i64::from_le_bytes(*b)).collect())
        }
        None => Some(tensor.int64_data.clone()),
    }
}

fn constant(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        dims: vec![values.len() as i64],
        data_type: Some(INT64),
        name: Some(name.to_owned()),
        int64_data: values.to_vec(),
        ..TensorProto::default()
    }
}

fn node(operator: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.to_owned()],
        name: Some(output.to_owned()),
        op_type: Some(operator.to_owned()),
        ..NodeProto::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::onnx_writer::{Graph, Type, int};
    use crate::pack::spec::ModelSpec;
    use hatchback::Codec;
    use hatchback::schema::{KeySpace, MissPolicy, Placement, Table};
    use std::path::Path;

    const TABLES: usize = 2;
    const DIM: usize = 3;
    const NUMBERS: usize = 2;

    fn schema(dims: [u32; TABLES]) -> Schema {
        let toml = r#"
            format = 1
            name = "m"
            sequence = 1
            dense_features = ["x", "y"]
            network.output = "out"
            network.activation = "none"
            network.input = [
                { name = "args_0", dense = true }, { name = "args_1", features = ["a", "b"] },
            ]
            feature = [
                { name = "a", table = "a", pooling = "sum", hotness_max = 1 },
                { name = "b", table = "b", pooling = "sum", hotness_max = 1 },
            ]
            table = [
                { name = "a", dim = 3, keys = "index", source = EMPTY },
                { name = "b", dim = 3, keys = "index", source = EMPTY },
            ]"#
        .replace("EMPTY", r#"{ format = "deployed", path = "" }"#);
        let spec = ModelSpec::parse(&toml, Path::new("model.toml")).unwrap();
        let table = |(name, dim): (&str, u32)| Table {
            name: name.to_owned(),
            dim,
            keys: KeySpace::Index,
            rows: 9,
            codec: Codec::F32,
            unit_exp: 0,
            placement: Placement::Auto,
            miss: MissPolicy::Wait,
            default_row: vec![0.0; dim as usize],
        };
        let tables = ["a", "b"].into_iter().zip(dims).map(table).collect();
        spec.schema(tables, &spec.key_functions(Path::new("")).unwrap()).unwrap()
    }

    /// A network of flat inputs. `between` reads an input before it is sorted by sample.
    fn network(between: Option<&str>) -> Vec<u8> {
        let mut graph = Graph::default();
        graph.input("args_0", Type::Float, &[]);
        graph.input("args_1", Type::Float, &[]);
        graph.integers("numbers", &[2], &[-1, NUMBERS as i64]);
        graph.integers("tables", &[3], &[TABLES as i64, -1, DIM as i64]);
        graph.integers("row", &[2], &[-1, (TABLES * DIM) as i64]);
        let read = |graph: &mut Graph, name: &str| match between {
            Some(operator) => graph.node(operator, &[name], &format!("{name}.read"), &[]),
            None => name.to_owned(),
        };
        let (numbers, vectors) = (read(&mut graph, "args_0"), read(&mut graph, "args_1"));
        graph.node("Reshape", &[&numbers, "numbers"], "dense", &[]);
        graph.node("Reshape", &[&vectors, "tables"], "by_table", &[]);
        graph.node("Transpose", &["by_table"], "by_sample", &[ints("perm", &[1, 0, 2])]);
        graph.node("Reshape", &["by_sample", "row"], "rows", &[]);
        graph.node("Concat", &["dense", "rows"], "all", &[int("axis", 1)]);
        let weights: Vec<f32> = (0..NUMBERS + TABLES * DIM).map(|i| i as f32 - 2.5).collect();
        graph.floats("w", &[weights.len(), 1], &weights);
        graph.node("MatMul", &["all", "w"], "out", &[]);
        graph.output("out", &[1]);
        graph.file()
    }

    #[test]
    fn flat_networks_score_rows() {
        let schema = schema([3, 3]);
        for between in [None, Some("Neg")] {
            let onnx = to_batch_major(&network(between), &schema).unwrap();
            let engine = schema.load_dense(onnx).unwrap();
            for batch in [1, 3] {
                let value = |i: usize| (i as f32 * 0.7).sin();
                let numbers: Vec<f32> = (0..batch * NUMBERS).map(value).collect();
                let rows: Vec<f32> = (0..batch * TABLES * DIM).map(|i| value(i + 50)).collect();
                let mut scores = vec![0.0; batch];
                let mut scratch = engine.scratch(batch);
                engine
                    .run(batch, &[numbers.clone(), rows.clone()], &mut scores, &mut scratch)
                    .unwrap();

                let sign = if between.is_some() { -1.0 } else { 1.0 };
                for (sample, score) in scores.iter().enumerate() {
                    let all = numbers[sample * NUMBERS..][..NUMBERS]
                        .iter()
                        .chain(&rows[sample * TABLES * DIM..][..TABLES * DIM]);
                    let sum = all.enumerate().map(|(i, x)| x * (i as f32 - 2.5)).sum::<f32>();
                    assert!((score - sign * sum).abs() < 1e-5, "{between:?}: {score} {sum}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_flat_is_refused_by_name() {
        let refused = |onnx: &[u8], schema: &Schema| {
            format!("{:#}", to_batch_major(onnx, schema).unwrap_err())
        };
        let widths = refused(&network(None), &schema([3, 4]));
        assert!(
            widths.contains("`args_1`: table_major with vectors of several widths"),
            "{widths}"
        );
        let mut graph = Graph::default();
        graph.input("other", Type::Float, &[]);
        let missing = refused(&graph.file(), &schema([3, 3]));
        assert!(missing.contains("no input `args_0`"), "{missing}");
        assert!(refused(&[1, 2, 3], &schema([3, 3])).contains("is not an ONNX file"));

        // A `Reshape` without a result sorts nothing.
        let mut model = ModelProto::decode(&*network(None)).unwrap();
        model.graph.as_mut().unwrap().node[1].output.clear();
        assert!(to_batch_major(&model.encode_to_vec(), &schema([3, 3])).is_ok());
    }
}

//! Converts a dense network of HugeCTR to ONNX. HugeCTR saves the graph as JSON, and the weights of
//! all layers one after the other as f32, in the order of the graph. Each embedding becomes an
//! input. The loss is left out, and its input becomes an output. Never reads a row.

use crate::import::onnx_writer::{Graph, Type, int, ints};
use crate::report::input;
use anyhow::{Context, Result, bail, ensure};
use hatchback::limits::{DENSE_BYTES_MAX, INPUT_WIDTH_MAX};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// `hugectr = { graph = "...", dense = "..." }` of `[network]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HugectrNetwork {
    /// The graph, as `Model.graph_to_json` writes it.
    pub graph: PathBuf,
    /// The weights, `<prefix>_dense_<iteration>.model`.
    pub dense: PathBuf,
}

#[derive(Deserialize)]
struct GraphFile {
    layers: Vec<Layer>,
}

/// A layer of the graph.
#[derive(Deserialize)]
struct Layer {
    r#type: String,
    #[serde(default)]
    bottom: Names,
    #[serde(default)]
    top: Names,
    #[serde(flatten)]
    rest: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Names {
    One(String),
    Many(Vec<String>),
}

impl Default for Names {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl Names {
    fn all(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Many(names) => names,
        }
    }
}

impl Layer {
    fn bottom(&self, i: usize) -> Result<&str> {
        let name = self.bottom.all().get(i);
        name.map(String::as_str).with_context(|| format!("bottom: no entry {i}"))
    }

    fn top(&self, i: usize) -> Result<&str> {
        let name = self.top.all().get(i);
        name.map(String::as_str).with_context(|| format!("top: no entry {i}"))
    }

    /// Returns the size at `path`, such as `/fc_param/num_output`.
    fn size(&self, path: &str) -> Result<usize> {
        let value = self.rest.pointer(path).with_context(|| format!("{path} is missing"))?;
        size_of(value).with_context(|| format!("{path} = {value}"))
    }

    fn sizes(&self, path: &str) -> Result<Vec<usize>> {
        let list = self.rest.pointer(path).and_then(Value::as_array);
        let list = list.with_context(|| format!("{path} is not a list"))?;
        list.iter().map(|v| size_of(v).with_context(|| format!("{path}: {v}"))).collect()
    }
}

fn size_of(value: &Value) -> Result<usize> {
    let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
    size.filter(|n| *n <= INPUT_WIDTH_MAX).context("is not a size")
}

impl HugectrNetwork {
    /// Returns the network as an ONNX file. `base` is the folder of model.toml.
    ///
    /// # Errors
    /// A file cannot be read, a layer is not supported or contradicts another one, or the weights
    /// are not those of the graph.
    pub fn read(&self, base: &Path) -> Result<Vec<u8>> {
        let (graph, dense) = (base.join(&self.graph), base.join(&self.dense));
        let text = read_file(&graph)?;
        let GraphFile { layers } =
            serde_json::from_slice(&text).with_context(|| graph.display().to_string())?;
        let bytes = read_file(&dense)?;
        let name = dense.display();
        ensure!(bytes.len().is_multiple_of(4), "{name}: {} bytes are no f32", bytes.len());
        let weights = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();

        let mut converter = Converter { weights, ..Converter::default() };
        for (number, layer) in layers.iter().enumerate() {
            let at = || format!("{}: layers[{number}], a {}", graph.display(), layer.r#type);
            converter.layer(layer).with_context(at)?;
        }
        let (read, all) = (converter.read, converter.weights.len());
        ensure!(read == all, "{name}: {all} weights, the layers have {read}");
        Ok(converter.graph.file())
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    input::read(path, DENSE_BYTES_MAX).with_context(|| path.display().to_string())
}

/// A conversion in progress.
#[derive(Default)]
struct Converter {
    graph: Graph,
    /// The shape of one sample of each tensor.
    shapes: HashMap<String, Vec<usize>>,
    /// The slots of each sparse input.
    slots: HashMap<String, usize>,
    weights: Vec<f32>,
    /// Number of weights read so far.
    read: usize,
    constants: usize,
}

impl Converter {
    fn layer(&mut self, layer: &Layer) -> Result<()> {
        match layer.r#type.as_str() {
            "Data" => self.data(layer),
            kind if kind.ends_with("SparseEmbeddingHash")
                || kind.ends_with("SparseEmbeddingOneHot") =>
            {
                self.embedding(layer)
            }
            "InnerProduct" => self.product(layer, false),
            "FusedInnerProduct" => self.product(layer, true),
            "MLP" => self.mlp(layer),
            "MultiCross" => self.cross(layer),
            "WeightMultiply" => self.weight_multiply(layer),
            "Interaction" => self.interaction(layer),
            "FmOrder2" => self.fm(layer),
            "Reshape" => self.reshape(layer),
            "Concat" => self.concat(layer),
            "Slice" => self.slice(layer),
            "ReduceSum" => self.reduce_sum(layer),
            "ReLU" => self.map(layer, "Relu"),
            "Sigmoid" => self.map(layer, "Sigmoid"),
            "Dropout" => self.map(layer, "Identity"),
            "Add" => self.fold(layer, "Add"),
            "ElementwiseMultiply" | "DotProduct" => self.fold(layer, "Mul"),
            "Sub" => self.fold(layer, "Sub"),
            "BinaryCrossEntropyLoss" | "MultiCrossEntropyLoss" | "CrossEntropyLoss" => {
                let shape = self.shape(layer.bottom(0)?)?;
                self.graph.output(layer.bottom(0)?, &shape);
                Ok(())
            }
            _ => bail!("this layer is not supported; convert the model with hugectr2onnx"),
        }
    }

    fn shape(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.shapes.get(name).with_context(|| format!("no layer makes `{name}`"))?.clone())
    }

    /// Returns the width of a tensor `[batch, width]`.
    fn width(&self, name: &str) -> Result<usize> {
        match self.shape(name)?.as_slice() {
            [width] => Ok(*width),
            shape => bail!("`{name}` is {shape:?}, not one list of values"),
        }
    }

    /// Reads the next weights, `[shape]`, as a constant. Returns its name.
    fn weight(&mut self, shape: &[usize]) -> Result<String> {
        let count = shape.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
        let left = self.weights.len() - self.read;
        let Some(count) = count.filter(|count| *count <= left) else {
            bail!("needs {shape:?} weights, {left} are left in the file");
        };
        let name = format!("weights.{}", self.read);
        self.graph.floats(&name, shape, &self.weights[self.read..self.read + count]);
        self.read += count;
        Ok(name)
    }

    fn integers(&mut self, values: &[usize]) -> String {
        let values: Vec<i64> = values.iter().map(|v| *v as i64).collect();
        let name = format!("sizes.{}", self.constants);
        self.constants += 1;
        self.graph.integers(&name, &[values.len()], &values);
        name
    }

    /// Adds a node whose result `[batch, shape]` is `name`.
    fn node(&mut self, operator: &str, inputs: &[&str], name: &str, shape: &[usize]) {
        self.graph.node(operator, inputs, name, &[]);
        self.shapes.insert(name.to_owned(), shape.to_vec());
    }

    /// Adds the reshape of `from` to `[batch, shape]`.
    fn view(&mut self, from: &str, name: &str, shape: &[usize]) {
        let name_of_sizes = format!("sizes.{}", self.constants);
        self.constants += 1;
        let sizes: Vec<i64> =
            std::iter::once(-1).chain(shape.iter().map(|size| *size as i64)).collect();
        self.graph.integers(&name_of_sizes, &[sizes.len()], &sizes);
        self.node("Reshape", &[from, &name_of_sizes], name, shape);
    }

    fn data(&mut self, layer: &Layer) -> Result<()> {
        let width = layer.size("/dense/dense_dim")?;
        if let (Some(top), 1..) = (layer.rest.pointer("/dense/top").and_then(Value::as_str), width)
        {
            self.graph.input(top, Type::Float, &[width]);
            self.shapes.insert(top.to_owned(), vec![width]);
        }
        let sparse = layer.rest.get("sparse").and_then(Value::as_array);
        for (i, _) in sparse.into_iter().flatten().enumerate() {
            let top = layer.rest.pointer(&format!("/sparse/{i}/top")).and_then(Value::as_str);
            let top = top.with_context(|| format!("/sparse/{i}/top is missing"))?;
            self.slots.insert(top.to_owned(), layer.size(&format!("/sparse/{i}/slot_num"))?);
        }
        Ok(())
    }

    /// Declares an embedding as an input: the vectors of its slots, side by side.
    fn embedding(&mut self, layer: &Layer) -> Result<()> {
        let (bottom, top) = (layer.bottom(0)?, layer.top(0)?);
        let slots = self.slots.get(bottom);
        let slots = *slots.with_context(|| format!("no sparse input `{bottom}`"))?;
        let dim = layer.size("/sparse_embedding_hparam/embedding_vec_size")?;
        self.graph.input(top, Type::Float, &[slots, dim]);
        self.shapes.insert(top.to_owned(), vec![slots, dim]);
        Ok(())
    }

    /// Adds `relu(x w + b)`, or without the Relu. Returns the name of the result.
    fn linear(&mut self, x: &str, outputs: usize, relu: bool, name: &str) -> Result<()> {
        let mut shape = self.shape(x)?;
        let inputs = shape.pop().context("a product of nothing")?;
        let (w, b) = (self.weight(&[inputs, outputs])?, self.weight(&[outputs])?);
        shape.push(outputs);
        let (product, sum) = (format!("{name}.product"), format!("{name}.sum"));
        self.node("MatMul", &[x, &w], &product, &shape);
        self.node("Add", &[&product, &b], if relu { &sum } else { name }, &shape);
        if relu {
            self.node("Relu", &[&sum], name, &shape);
        }
        Ok(())
    }

    fn product(&mut self, layer: &Layer, relu: bool) -> Result<()> {
        let outputs = layer.size("/fc_param/num_output")?;
        self.linear(layer.bottom(0)?, outputs, relu, layer.top(0)?)
    }

    fn mlp(&mut self, layer: &Layer) -> Result<()> {
        let outputs = layer.sizes("/mlp_param/num_outputs")?;
        let parameter = |name: &str| layer.rest.pointer(&format!("/mlp_param/{name}"));
        let biases = parameter("biases").and_then(Value::as_array);
        let without = parameter("use_bias") == Some(&Value::Bool(false));
        if without || biases.is_some_and(|all| all.contains(&Value::Bool(false))) {
            bail!("an MLP without a bias is not supported");
        }

        let mut x = layer.bottom(0)?.to_owned();
        for (i, &width) in outputs.iter().enumerate() {
            let own = parameter("activations").and_then(|all| all.get(i));
            let relu = match own.or(parameter("activation")).and_then(Value::as_str) {
                Some("Relu") => true,
                Some("None") | None => false,
                Some(other) => bail!("the activation `{other}` is not supported"),
            };
            let last = i + 1 == outputs.len();
            let name =
                if last { layer.top(0)?.to_owned() } else { format!("{}.{i}", layer.top(0)?) };
            self.linear(&x, width, relu, &name)?;
            x = name;
        }
        Ok(())
    }

    /// Adds `x' = x0 (x w) + b + x` for each layer.
    fn cross(&mut self, layer: &Layer) -> Result<()> {
        let (first, top) = (layer.bottom(0)?, layer.top(0)?);
        let (width, layers) = (self.width(first)?, layer.size("/mc_param/num_layers")?);
        ensure!(
            layer.rest.pointer("/mc_param/projection_dim").is_none_or(|n| n == 0),
            "the low-rank crosses of DCNv2 are not supported; convert the model with hugectr2onnx"
        );
        let mut x = first.to_owned();
        for i in 0..layers {
            let (w, b) = (self.weight(&[width, 1])?, self.weight(&[width])?);
            let names = ["scalar", "scaled", "biased"].map(|what| format!("{top}.{i}.{what}"));
            self.node("MatMul", &[&x, &w], &names[0], &[1]);
            self.node("Mul", &[first, &names[0]], &names[1], &[width]);
            self.node("Add", &[&names[1], &b], &names[2], &[width]);
            let next = if i + 1 == layers { top.to_owned() } else { format!("{top}.{i}") };
            self.node("Add", &[&names[2], &x], &next, &[width]);
            x = next;
        }
        Ok(())
    }

    /// Adds the product of each value with a vector of its own.
    fn weight_multiply(&mut self, layer: &Layer) -> Result<()> {
        let (x, top) = (layer.bottom(0)?, layer.top(0)?);
        let (width, dims) = (self.width(x)?, layer.sizes("/weight_dims")?);
        let [slots, dim] = dims[..] else { bail!("weight_dims: {dims:?} are not two sizes") };
        ensure!(slots == width, "weight_dims: {slots} vectors for {width} values");
        let w = self.weight(&[slots, dim])?;
        let (column, products) = (format!("{top}.column"), format!("{top}.products"));
        self.view(x, &column, &[slots, 1]);
        self.node("Mul", &[&column, &w], &products, &[slots, dim]);
        self.view(&products, top, &[slots * dim]);
        Ok(())
    }

    /// Adds the interaction: the bottom's vector, the products of every two vectors of bottom and
    /// embedding, and one zero.
    fn interaction(&mut self, layer: &Layer) -> Result<()> {
        let (bottom, rows, top) = (layer.bottom(0)?, layer.bottom(1)?, layer.top(0)?);
        let (width, shape) = (self.width(bottom)?, self.shape(rows)?);
        let [slots, dim] = shape[..] else { bail!("`{rows}` is {shape:?}, not vectors") };
        ensure!(width == dim, "`{bottom}` has {width} values, the vectors of `{rows}` {dim}");
        let n = slots + 1;
        let names = ["row", "rows", "turned", "products", "flat", "pairs", "zero"]
            .map(|what| format!("{top}.{what}"));
        let [row, all, turned, products, flat, pairs, zero] = &names;

        self.view(bottom, row, &[1, dim]);
        self.graph.node("Concat", &[row, rows], all, &[int("axis", 1)]);
        self.graph.node("Transpose", &[all], turned, &[ints("perm", &[0, 2, 1])]);
        self.node("MatMul", &[all, turned], products, &[n, n]);
        self.view(products, flat, &[n * n]);
        let below: Vec<usize> = (0..n).flat_map(|i| (0..i).map(move |j| i * n + j)).collect();
        let picks = self.integers(&below);
        self.graph.node("Gather", &[flat, &picks], pairs, &[int("axis", 1)]);
        // The zero is a value minus itself, which gives it the batch axis.
        let one = self.integers(&[0]);
        let first = format!("{top}.first");
        self.graph.node("Gather", &[flat, &one], &first, &[int("axis", 1)]);
        self.graph.node("Sub", &[&first, &first], zero, &[]);
        self.graph.node("Concat", &[bottom, pairs, zero], top, &[int("axis", 1)]);
        self.shapes.insert(top.to_owned(), vec![dim + below.len() + 1]);
        Ok(())
    }

    /// Adds half of the difference: the squared sum of the vectors less the sum of their squares.
    fn fm(&mut self, layer: &Layer) -> Result<()> {
        let (x, top, dim) = (layer.bottom(0)?, layer.top(0)?, layer.size("/out_dim")?);
        let width: usize = self.shape(x)?.iter().product();
        ensure!(dim > 0 && width.is_multiple_of(dim), "out_dim: {width} values in parts of {dim}");
        let names = ["rows", "sum", "square", "squares", "of_squares", "both"]
            .map(|what| format!("{top}.{what}"));
        let [rows, sum, square, squares, of_squares, both] = &names;
        self.view(x, rows, &[width / dim, dim]);
        let axis = self.integers(&[1]);
        self.graph.node("ReduceSum", &[rows, &axis], sum, &[int("keepdims", 0)]);
        self.node("Mul", &[sum, sum], square, &[dim]);
        self.node("Mul", &[rows, rows], squares, &[width / dim, dim]);
        self.graph.node("ReduceSum", &[squares, &axis], of_squares, &[int("keepdims", 0)]);
        self.node("Sub", &[square, of_squares], both, &[dim]);
        let half = format!("{top}.half");
        self.graph.floats(&half, &[1], &[0.5]);
        self.node("Mul", &[both, &half], top, &[dim]);
        Ok(())
    }

    fn reshape(&mut self, layer: &Layer) -> Result<()> {
        let (x, top) = (layer.bottom(0)?, layer.top(0)?);
        let values: usize = self.shape(x)?.iter().product();
        if layer.rest.get("selected").is_some_and(|selected| !selected.is_null()) {
            bail!("a selection of slots is not supported; convert the model with hugectr2onnx");
        }
        let shape = match layer.rest.get("time_step") {
            Some(steps) if !steps.is_null() && steps != 0 => {
                vec![layer.size("/time_step")?, layer.size("/leading_dim")?]
            }
            _ => vec![layer.size("/leading_dim")?],
        };
        let wanted: usize = shape.iter().product();
        ensure!(wanted == values, "`{x}` has {values} values a sample, not {wanted}");
        self.view(x, top, &shape);
        Ok(())
    }

    /// Returns the axis of the layer, which does not count the batch.
    fn axis(&self, layer: &Layer, rank: usize) -> Result<usize> {
        let axis = layer.rest.get("axis").map_or(Ok(1), |_| layer.size("/axis"))?;
        ensure!((1..=rank).contains(&axis), "axis {axis} of {rank} after the batch");
        Ok(axis - 1)
    }

    fn concat(&mut self, layer: &Layer) -> Result<()> {
        let names = layer.bottom.all();
        let mut shape = self.shape(layer.bottom(0)?)?;
        let (axis, mut width) = (self.axis(layer, shape.len())?, 0);
        for name in names {
            let part = self.shape(name)?;
            let fits = part.len() == shape.len()
                && (0..shape.len()).all(|i| i == axis || part[i] == shape[i]);
            ensure!(fits, "`{name}` is {part:?}, `{}` {shape:?}", names[0]);
            width += part[axis];
        }
        shape[axis] = width;
        let (top, names) = (layer.top(0)?, names.iter().map(String::as_str).collect::<Vec<_>>());
        self.graph.node("Concat", &names, top, &[int("axis", axis as i64 + 1)]);
        self.shapes.insert(top.to_owned(), shape);
        Ok(())
    }

    /// Cuts ranges out of the last axis.
    fn slice(&mut self, layer: &Layer) -> Result<()> {
        let x = layer.bottom(0)?;
        let shape = self.shape(x)?;
        let last = *shape.last().context("a slice of nothing")?;
        for (i, top) in layer.top.all().iter().enumerate() {
            let range = layer.sizes(&format!("/ranges/{i}"))?;
            let [from, to] = range[..] else { bail!("ranges[{i}] is {range:?}") };
            ensure!(from < to && to <= last, "ranges[{i}]: {from} to {to} of {last}");
            let bounds = [from, to, shape.len()].map(|bound| self.integers(&[bound]));
            let mut part = shape.clone();
            if let Some(width) = part.last_mut() {
                *width = to - from;
            }
            self.node("Slice", &[x, &bounds[0], &bounds[1], &bounds[2]], top, &part);
        }
        Ok(())
    }

    fn reduce_sum(&mut self, layer: &Layer) -> Result<()> {
        let (x, top) = (layer.bottom(0)?, layer.top(0)?);
        let mut shape = self.shape(x)?;
        let axis = self.axis(layer, shape.len())?;
        shape[axis] = 1;
        let axes = self.integers(&[axis + 1]);
        self.graph.node("ReduceSum", &[x, &axes], top, &[int("keepdims", 1)]);
        self.shapes.insert(top.to_owned(), shape);
        Ok(())
    }

    fn map(&mut self, layer: &Layer, operator: &str) -> Result<()> {
        let shape = self.shape(layer.bottom(0)?)?;
        self.node(operator, &[layer.bottom(0)?], layer.top(0)?, &shape);
        Ok(())
    }

    /// Combines all operands, which have one shape, from the first to the last.
    fn fold(&mut self, layer: &Layer, operator: &str) -> Result<()> {
        let (names, top) = (layer.bottom.all(), layer.top(0)?);
        let shape = self.shape(layer.bottom(0)?)?;
        let mut before = layer.bottom(0)?.to_owned();
        for (i, name) in names.iter().enumerate().skip(1) {
            let other = self.shape(name)?;
            ensure!(other == shape, "`{name}` is {other:?}, `{}` {shape:?}", names[0]);
            let next = if i + 1 == names.len() { top.to_owned() } else { format!("{top}.{i}") };
            self.node(operator, &[&before, name], &next, &shape);
            before = next;
        }
        ensure!(names.len() > 1, "one operand");
        Ok(())
    }
}

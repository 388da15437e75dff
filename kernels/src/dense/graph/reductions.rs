//! Translates sums and other functions of several values, and what is made of them: softmax,
//! normalisations and attention. All sums are in the order of their values.

use crate::dense::graph::folding::zip_sizes;
use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Fold, Op, Stop, folded, malformed, unsupported};
use crate::dense::graph::products::{in_operator, swapped};
use crate::dense::graph::shape_operators::{axis_of, squeezed};
use crate::dense::graph::tensor::{Kind, Size, Tensor, Values};
use std::rc::Rc;

/// A function of the values along axes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Mean,
    Fold(Fold),
}

impl Builder<'_> {
    /// Translates `ReduceSum` and its relatives.
    pub fn reduce(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let axes = self.integers(node, 1, "axes")?.filter(|a| !a.is_empty());
        let keep = node.int("keepdims", 1) != 0;
        let mut axes = match axes {
            Some(axes) => axes
                .iter()
                .map(|&a| axis_of(node, a, x.shape.len()))
                .collect::<Result<Vec<_>, _>>()?,
            None if node.int("noop_with_empty_axes", 0) != 0 => {
                return Err(unsupported(node, "over no axes"));
            }
            None => (0..x.shape.len()).collect(),
        };
        axes.sort_unstable();
        axes.dedup();

        let result = self.reduce_as(node.op_type(), &x, &axes);
        let result = result.map_err(|stop| in_operator(node, stop))?;
        Ok(if keep { result } else { squeezed(result, &axes) })
    }

    fn reduce_as(&mut self, operator: &str, x: &Tensor, axes: &[usize]) -> Result<Tensor, Stop> {
        let absent = || Err(Stop::Unsupported(String::new()));
        let x = &match operator {
            "ReduceL1" => self.float_map(x, Map::Abs)?,
            "ReduceL2" | "ReduceSumSquare" => self.float_map(x, Map::Pow(2.0))?,
            "ReduceLogSumExp" => return self.log_sum_exp(x, axes),
            _ => x.clone(),
        };
        let reduction = match operator {
            "ReduceMean" => Reduction::Mean,
            "ReduceMax" => Reduction::Fold(Fold::Max),
            "ReduceMin" => Reduction::Fold(Fold::Min),
            "ReduceProd" => Reduction::Fold(Fold::Product),
            "ReduceSum" | "ReduceL1" | "ReduceL2" | "ReduceSumSquare" | "ReduceLogSum" => {
                Reduction::Sum
            }
            _ => return absent(),
        };
        let result = self.reduce_axes(x, axes, reduction)?;
        match operator {
            "ReduceL2" => self.map(&result, Map::Sqrt),
            "ReduceLogSum" => self.float_map(&result, Map::Ln),
            _ => Ok(result),
        }
    }

    fn float_map(&mut self, x: &Tensor, map: Map) -> Result<Tensor, Stop> {
        if x.kind == Kind::Float { self.map(x, map) } else { Err(of_type(x)) }
    }

    /// Returns `ln(sum(e^x))`, computed without overflow.
    fn log_sum_exp(&mut self, x: &Tensor, axes: &[usize]) -> Result<Tensor, Stop> {
        if x.kind != Kind::Float {
            return Err(of_type(x));
        }
        let most = self.reduce_axes(x, axes, Reduction::Fold(Fold::Max))?;
        // The difference of two equal infinities is no number.
        let most = self.map(&most, Map::Clip { low: f32::MIN, high: f32::MAX })?;
        let below = self.zip(Zip::Sub, [x, &most])?;
        let logarithm = self.log_of_sum(&below, axes)?;
        self.zip(Zip::Add, [&logarithm, &most])
    }

    /// Returns `ln(sum(e^x))` of `below`, whose values are at most 0.
    fn log_of_sum(&mut self, below: &Tensor, axes: &[usize]) -> Result<Tensor, Stop> {
        let exponentials = self.map(below, Map::Exp)?;
        let sum = self.reduce_axes(&exponentials, axes, Reduction::Sum)?;
        self.map(&sum, Map::Ln)
    }

    /// Returns the sum over `axes`, which are dropped.
    pub fn sum_over(&mut self, x: &Tensor, axes: &[usize]) -> Result<Tensor, Stop> {
        let sum = self.reduce_axes(x, axes, Reduction::Sum)?;
        Ok(squeezed(sum, axes))
    }

    /// Reduces `x` over `axes`, which ascend. The result keeps them with one value each.
    pub fn reduce_axes(
        &mut self,
        x: &Tensor,
        axes: &[usize],
        reduction: Reduction,
    ) -> Result<Tensor, Stop> {
        if axes.iter().any(|&a| x.is_batch(a)) {
            return Err(Stop::Unsupported("over the batch".to_owned()));
        }
        let mut shape = x.shape.clone();
        axes.iter().for_each(|&a| shape[a] = 1);
        let n: usize = axes.iter().map(|&a| x.shape[a]).product();
        if n == 0 {
            return Err(malformed("a reduction of no values"));
        }
        let (Some(&first), Some(&last)) = (axes.first(), axes.last()) else {
            return Ok(x.clone());
        };
        if x.known_values().is_some() {
            return self.fold_known(x, axes, reduction);
        }
        let is_number = x.kind == Kind::Float || x.kind.is_int();
        if !is_number || (x.kind.is_int() && reduction == Reduction::Mean) {
            return Err(of_type(x));
        }
        let x = &if reduction == Reduction::Sum { self.summable(x, n)? } else { x.clone() };

        let together = last - first + 1 == axes.len();
        let (from, inner) = if together {
            (x.clone(), x.shape[last + 1..].iter().product())
        } else {
            let rest = (0..x.shape.len()).filter(|a| !axes.contains(a));
            let perm: Vec<usize> = rest.chain(axes.iter().copied()).collect();
            (self.transpose(x, &perm)?, 1)
        };
        let outer = from.width() / (n * inner);
        let op = match reduction {
            Reduction::Sum => Op::Sum { outer, n, inner, divisor: 1.0 },
            Reduction::Mean => Op::Sum { outer, n, inner, divisor: n as f32 },
            Reduction::Fold(fold) => Op::Fold { fold, n, inner },
        };
        let id = self.computed(&from)?;
        let result = Tensor { kind: x.kind, ..self.node(vec![id], op, shape, x.batch)? };
        let is_product = reduction == Reduction::Fold(Fold::Product);
        if is_product && x.kind.is_int() { self.exact(&result) } else { Ok(result) }
    }

    /// Reduces a known tensor, value by value in order.
    fn fold_known(
        &mut self,
        x: &Tensor,
        axes: &[usize],
        reduction: Reduction,
    ) -> Result<Tensor, Stop> {
        let zip = match reduction {
            Reduction::Sum | Reduction::Mean => Zip::Add,
            Reduction::Fold(Fold::Max) => Zip::Max,
            Reduction::Fold(Fold::Min) => Zip::Min,
            Reduction::Fold(Fold::Product) => Zip::Mul,
        };
        let mut result = x.clone();
        for &axis in axes {
            let Some(values) = result.known_values().map(Rc::clone) else { return Err(of_type(x)) };
            self.keep(x.kind, values.len())?;
            let (n, inner) = (result.shape[axis], result.shape[axis + 1..].iter().product());
            let values = match &*values {
                Values::Floats(v) => {
                    fold_axis(v, n, inner, |a, b| Some(zip.apply(a, b))).map(Values::Floats)
                }
                Values::Ints(v) => {
                    let both = |a, b| Some(zip_sizes(zip, [a, b])?.wrapped(x.kind));
                    fold_axis(v, n, inner, both).map(Values::Ints)
                }
            };
            let by_batch = || Stop::Unsupported("by the batch".to_owned());
            let mut shape = result.shape;
            shape[axis] = 1;
            result = folded(x.kind, shape, result.batch, values.ok_or_else(by_batch)?);
        }
        if reduction != Reduction::Mean {
            return Ok(result);
        }
        let n: usize = axes.iter().map(|&a| x.shape[a]).product();
        let n = scalar(n as f32);
        if x.kind == Kind::Float { self.zip(Zip::Div, [&result, &n]) } else { Err(of_type(x)) }
    }

    /// Translates `Softmax` and `LogSoftmax`. Before opset 13 all axes from `axis` on are one.
    pub fn softmax_operator(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let rank = x.shape.len();
        let axis = axis_of(node, node.int("axis", if self.opset < 13 { 1 } else { -1 }), rank)?;
        let axes: Vec<usize> = if self.opset < 13 { (axis..rank).collect() } else { vec![axis] };
        if axes.iter().any(|&a| x.is_batch(a)) || x.kind != Kind::Float {
            return Err(unsupported(node, "over the batch"));
        }
        if node.op_type() == "LogSoftmax" {
            // The maximum first: beside a large logit, the logarithm would be lost in its rounding.
            let most = self.reduce_axes(&x, &axes, Reduction::Fold(Fold::Max))?;
            let below = self.zip(Zip::Sub, [&x, &most])?;
            let logarithm = self.log_of_sum(&below, &axes)?;
            return self.zip(Zip::Sub, [&below, &logarithm]);
        }
        self.softmax(&x, &axes)
    }

    /// Returns `e^x` divided by its sum over `axes`, which follow each other.
    fn softmax(&mut self, x: &Tensor, axes: &[usize]) -> Result<Tensor, Stop> {
        if x.known_values().is_some() {
            let most = self.reduce_axes(x, axes, Reduction::Fold(Fold::Max))?;
            let below = self.zip(Zip::Sub, [x, &most])?;
            let exponentials = self.map(&below, Map::Exp)?;
            let sum = self.reduce_axes(&exponentials, axes, Reduction::Sum)?;
            return self.zip(Zip::Div, [&exponentials, &sum]);
        }
        let n = axes.iter().map(|&a| x.shape[a]).product();
        let inner = axes.last().map_or(1, |&last| x.shape[last + 1..].iter().product());
        let id = self.computed(x)?;
        self.node(vec![id], Op::Softmax { n, inner }, x.shape.clone(), x.batch)
    }

    /// Translates `BatchNormalization` with stored statistics: a factor and a term a channel.
    pub fn batch_norm(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        if node.int("training_mode", 0) != 0 || x.shape.len() < 2 || x.is_batch(1) {
            return Err(unsupported(node, "in training"));
        }
        let mut parts = Vec::new();
        for i in 1..5 {
            let part = self.input(node, i)?;
            let values = part.known_values().and_then(|v| v.floats());
            let values = values.filter(|v| v.len() == x.shape[1] && part.kind == Kind::Float);
            parts.push(values.ok_or_else(|| unsupported(node, "by computed statistics"))?);
        }

        let epsilon = f64::from(node.float("epsilon", 1e-5));
        let channels = 0..x.shape[1];
        let factor = |c: usize| f64::from(parts[0][c]) / (f64::from(parts[3][c]) + epsilon).sqrt();
        let term = |c: usize| f64::from(parts[1][c]) - f64::from(parts[2][c]) * factor(c);
        let mut shape = vec![1; x.shape.len() - 1];
        shape[0] = x.shape[1];
        let of =
            |values: Vec<f32>| Tensor::known(Kind::Float, shape.clone(), Values::Floats(values));
        let factors = of(channels.clone().map(|c| factor(c) as f32).collect());
        let terms = of(channels.map(|c| term(c) as f32).collect());
        let scaled = self.zip(Zip::Mul, [&x, &factors])?;
        self.zip(Zip::Add, [&scaled, &terms])
    }

    /// Translates `LayerNormalization` and `RMSNormalization`, which does not subtract the mean.
    pub fn layer_norm(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, scale) = (self.input(node, 0)?, self.input(node, 1)?);
        let rank = x.shape.len();
        let axes: Vec<usize> = (axis_of(node, node.int("axis", -1), rank)?..rank).collect();
        if x.kind != Kind::Float || scale.kind != Kind::Float {
            return Err(unsupported(node, &format!("of type {:?}", x.kind)));
        }
        let named = |stop| in_operator(node, stop);
        let is_centred = node.op_type() == "LayerNormalization";
        let normal = self.normal(node, &x, &axes, is_centred)?;
        let mut result = self.zip(Zip::Mul, [&normal, &scale]).map_err(named)?;
        if let Some(bias) = self.maybe(node, 2)? {
            result = self.zip(Zip::Add, [&result, &bias]).map_err(named)?;
        }
        Ok(result)
    }

    /// Returns `x`, less its mean over `axes` if `is_centred`, divided by its deviation over them.
    fn normal(
        &mut self,
        node: &NodeProto,
        x: &Tensor,
        axes: &[usize],
        is_centred: bool,
    ) -> Result<Tensor, Stop> {
        let named = |stop| in_operator(node, stop);
        let difference = if is_centred {
            let mean = self.reduce_axes(x, axes, Reduction::Mean).map_err(named)?;
            self.zip(Zip::Sub, [x, &mean])?
        } else {
            x.clone()
        };
        let squares = self.map(&difference, Map::Pow(2.0))?;
        let variance = self.reduce_axes(&squares, axes, Reduction::Mean).map_err(named)?;
        let epsilon = scalar(node.float("epsilon", 1e-5));
        let variance = self.zip(Zip::Add, [&variance, &epsilon])?;
        let deviation = self.map(&variance, Map::Sqrt)?;
        self.zip(Zip::Div, [&difference, &deviation])
    }

    /// Translates `InstanceNormalization` and `GroupNormalization` with a factor a channel.
    pub fn group_norm(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, scale, bias) = (self.input(node, 0)?, self.input(node, 1)?, self.input(node, 2)?);
        let channels = x.shape.get(1).copied().unwrap_or(0);
        let is_plain = [&x, &scale, &bias].iter().all(|t| t.kind == Kind::Float);
        let by_channel = scale.shape == [channels] && bias.shape == [channels];
        let groups = match node.op_type() {
            "InstanceNormalization" => channels,
            _ => usize::try_from(node.int("num_groups", 0)).unwrap_or(0),
        };
        let fits = groups > 0 && channels > 0 && channels.is_multiple_of(groups);
        // Before opset 21 a GroupNormalization has a factor a group.
        let is_old = node.op_type() == "GroupNormalization" && self.opset < 21;
        if !is_plain || !by_channel || !fits || is_old || x.shape.len() < 3 || x.is_batch(1) {
            return Err(unsupported(node, "of such operands"));
        }

        // The channels of a group become an axis of their own.
        let mut target: Vec<_> = x.sizes().into_iter().map(Some).collect();
        let sizes = [groups, channels / groups].map(|n| Some(Size::fixed(n as i64)));
        target.splice(1..2, sizes);
        let form = || unsupported(node, "of the batch");
        let grouped = self.view(&x, &target).ok_or_else(form)?;
        let axes: Vec<usize> = (2..grouped.shape.len()).collect();
        let normal = self.normal(node, &grouped, &axes, true)?;
        let sizes: Vec<_> = x.sizes().into_iter().map(Some).collect();
        let normal = self.view(&normal, &sizes).ok_or_else(form)?;
        let shape = [vec![channels], vec![1; x.shape.len() - 2]].concat();
        let scale = Tensor { shape: shape.clone(), ..scale };
        let scaled = self.zip(Zip::Mul, [&normal, &scale])?;
        self.zip(Zip::Add, [&scaled, &Tensor { shape, ..bias }])
    }

    /// Translates `Attention` of opset 23 on `[batch, heads, length, width]`, without a cache.
    pub fn attention(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (q, k, v) = (self.input(node, 0)?, self.input(node, 1)?, self.input(node, 2)?);
        let all = [&q, &k, &v];
        let has_cache = (4..node.input.len()).any(|i| !node.input[i].is_empty());
        let is_plain = all.iter().all(|t| t.shape.len() == 4 && t.kind == Kind::Float);
        let modes = ["is_causal", "qk_matmul_output_mode"];
        let windows = ["left_window_size", "right_window_size"];
        if !is_plain
            || has_cache
            || windows.iter().any(|side| node.int(side, -1) != -1)
            || modes.iter().any(|mode| node.int(mode, 0) != 0)
            || node.float("softcap", 0.0) != 0.0
            || q.shape[1] != k.shape[1]
        {
            return Err(unsupported(node, "of this form"));
        }

        let named = |stop| in_operator(node, stop);
        let scale = node.float("scale", 1.0 / (q.shape[3] as f32).sqrt());
        let keys = self.transpose(&k, &swapped(4))?;
        let products = self.matmul(&q, &keys).map_err(named)?;
        let mut scores = self.zip(Zip::Mul, [&products, &scalar(scale)])?;
        if let Some(mask) = self.maybe(node, 3)? {
            // From opset 24 on a shorter mask hides the last keys. More axes would move the batch.
            let is_short = self.opset >= 24 && mask.shape.last() != k.shape.get(2);
            if is_short || mask.shape.len() > 4 {
                return Err(unsupported(node, "with a mask of other keys"));
            }
            scores = match mask.kind {
                Kind::Bool => self.choose([mask, scores, scalar(f32::NEG_INFINITY)]),
                _ => self.zip(Zip::Add, [&scores, &mask]),
            }
            .map_err(named)?;
        }
        let weights = self.softmax(&scores, &[3])?;
        self.matmul(&weights, &v).map_err(named)
    }
}

/// Returns `f` of the `n` values along an axis, in their order. Each position has `inner` values.
fn fold_axis<T: Copy>(
    all: &[T],
    n: usize,
    inner: usize,
    f: impl Fn(T, T) -> Option<T>,
) -> Option<Vec<T>> {
    let column = |row: &[T], j: usize| (1..n).try_fold(row[j], |sum, i| f(sum, row[i * inner + j]));
    let rows = all.chunks_exact((n * inner).max(1));
    rows.flat_map(|row| (0..inner).map(|j| column(row, j))).collect()
}

fn scalar(value: f32) -> Tensor {
    Tensor::known(Kind::Float, Vec::new(), Values::Floats(vec![value]))
}

fn of_type(x: &Tensor) -> Stop {
    Stop::Unsupported(format!("of type {:?}", x.kind))
}

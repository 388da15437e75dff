//! Translates each ONNX operator to nodes. The subset is that of DLRM, DCNv2, DeepFM, Wide & Deep
//! and similar models. A form of an operator outside the subset is `Unsupported`, and its meaning
//! is never guessed. The batch is axis 0 of every value, and no operator may move it.

use crate::dense::onnx::NodeProto;
use crate::dense::onnx_graph::{
    Builder, Constant, Id, Known, Map, Op, Operand, Size, Stop, Zip, constant, malformed,
};
use std::rc::Rc;

/// `TensorProto.DataType` of floats and of 64-bit integers.
const CASTS: [i64; 2] = [1, 7];

impl Builder {
    /// Adds the nodes that compute `node`. Returns one result for each output.
    pub fn operator(&mut self, node: &NodeProto) -> Result<Vec<Known>, Stop> {
        let one = match node.op_type() {
            "Constant" => match node.tensor("value") {
                Some(tensor) => constant(tensor),
                None => Err(unsupported(node, "without a tensor")),
            },
            "Identity" | "Dropout" => self.input(node, 0),
            "Cast" if CASTS.contains(&node.int("to", 0)) => self.input(node, 0),
            "Gemm" => self.gemm(node),
            "MatMul" => self.matmul(node),
            "Relu" => self.map(node, Map::Relu),
            "Sigmoid" => self.map(node, Map::Sigmoid),
            "Tanh" => self.map(node, Map::Tanh),
            "Add" => self.zip(node, Zip::Add),
            "Sub" => self.zip(node, Zip::Sub),
            "Mul" => self.zip(node, Zip::Mul),
            "Div" => self.zip(node, Zip::Div),
            "Pow" => self.square(node),
            "ReduceSum" | "ReduceMean" => self.reduce(node),
            "Concat" => self.concat(node),
            "Flatten" | "Reshape" | "Unsqueeze" | "Squeeze" => self.view(node),
            "Transpose" => self.transpose(node),
            "Gather" => self.gather(node),
            "Slice" => self.slice(node),
            "Split" => return self.split(node),
            "Shape" => match self.input(node, 0)? {
                Known::Value(_, shape) => {
                    let fixed = shape.iter().map(|&s| Size::Fixed(s as i64));
                    let sizes = std::iter::once(Size::Batch).chain(fixed).collect();
                    Ok(Known::Sizes { sizes, scalar: false })
                }
                _ => Err(unsupported(node, "of a constant")),
            },
            _ => Err(Stop::Unsupported(node.op_type().to_owned())),
        }?;

        if let Known::Sizes { sizes, .. } = &one {
            self.spend(sizes.len())?;
        }
        Ok(vec![one])
    }

    /// Returns input `i`, which must be computed for each sample.
    fn value_of(&self, node: &NodeProto, i: usize) -> Result<(Id, Vec<usize>), Stop> {
        match self.input(node, i)? {
            Known::Value(id, shape) => Ok((id, shape)),
            _ => Err(unsupported(node, "of a constant")),
        }
    }

    /// Returns the integers of input `i` or, in older files, of attribute `name`.
    fn integers(&self, node: &NodeProto, i: usize, name: &str) -> Result<Option<Vec<i64>>, Stop> {
        if let Some(ints) = node.ints(name) {
            return Ok(Some(ints.to_vec()));
        }

        match self.maybe(node, i)? {
            None => Ok(None),
            Some(Known::Sizes { sizes, .. }) => sizes
                .iter()
                .map(|s| {
                    if let Size::Fixed(n) = s {
                        Ok(*n)
                    } else {
                        Err(unsupported(node, "by the batch"))
                    }
                })
                .collect::<Result<_, _>>()
                .map(Some),
            Some(_) => Err(unsupported(node, "by computed integers")),
        }
    }

    fn gemm(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        let (x, shape) = self.value_of(node, 0)?;
        let Known::Constant(w) = self.input(node, 1)? else {
            return Err(unsupported(node, "by computed weights"));
        };
        let (alpha, beta) = (node.float("alpha", 1.0), node.float("beta", 1.0));
        let transposed = node.int("transB", 0) != 0;
        if node.int("transA", 0) != 0 || shape.len() != 1 || w.shape.len() != 2 {
            return Err(unsupported(node, "of this shape"));
        }

        let (k, n) = if transposed { (w.shape[1], w.shape[0]) } else { (w.shape[0], w.shape[1]) };
        if k != shape[0] || n == 0 || !alpha.is_finite() || !beta.is_finite() {
            return Err(malformed(&format!("Gemm of width {} by weights {:?}", shape[0], w.shape)));
        }

        let bias = match self.maybe(node, 2)? {
            None => vec![0.0],
            Some(Known::Constant(c)) if c.values.len() == 1 || c.values.len() == n => {
                c.values.clone()
            }
            Some(_) => return Err(unsupported(node, "with such a bias")),
        };
        let at =
            |i: usize, j: usize| alpha * w.values[if transposed { j * k + i } else { i * n + j }];
        self.matrix(x, shape, n, &at, |j| beta * bias[j % bias.len()])
    }

    fn matmul(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        let (x, shape) = self.value_of(node, 0)?;

        match self.input(node, 1)? {
            Known::Constant(w) => {
                if w.shape.len() != 2 || shape.is_empty() {
                    return Err(unsupported(node, "of this shape"));
                }
                let (k, n) = (w.shape[0], w.shape[1]);
                if shape.last() != Some(&k) || n == 0 {
                    return Err(malformed(&format!("MatMul of {shape:?} by {:?}", w.shape)));
                }
                self.matrix(x, shape, n, &|i, j| w.values[i * n + j], |_| 0.0)
            }
            Known::Value(y, other) => {
                let rank = shape.len();
                if rank < 2 || other.len() != rank || shape[..rank - 2] != other[..rank - 2] {
                    return Err(unsupported(node, "of these shapes"));
                }
                let (m, k, n) = (shape[rank - 2], shape[rank - 1], other[rank - 1]);
                if other[rank - 2] != k {
                    return Err(malformed(&format!("MatMul of {shape:?} by {other:?}")));
                }

                let count = shape[..rank - 2].iter().product();
                let (y, transposed) =
                    self.transposed.get(&y).map_or((y, false), |&from| (from, true));
                let mut out = shape;
                out[rank - 1] = n;
                self.node(vec![x, y], Op::Products { count, m, k, n, transposed }, out)
            }
            Known::Sizes { .. } => Err(unsupported(node, "of integers")),
        }
    }

    fn map(&mut self, node: &NodeProto, map: Map) -> Result<Known, Stop> {
        let (x, shape) = self.value_of(node, 0)?;
        self.node(vec![x], Op::Map(map), shape)
    }

    /// Translates `Pow` with exponent 2 to `x * x`.
    fn square(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        match self.input(node, 1)? {
            Known::Constant(c) if c.values == [2.0] => {
                let (x, shape) = self.value_of(node, 0)?;
                let (left, right) = (
                    Operand::Value { input: 0, picks: None },
                    Operand::Value { input: 0, picks: None },
                );
                self.node(vec![x], Op::Zip { zip: Zip::Mul, left, right }, shape)
            }
            _ => Err(unsupported(node, "other than squares")),
        }
    }

    fn zip(&mut self, node: &NodeProto, zip: Zip) -> Result<Known, Stop> {
        let (left, right) = (self.input(node, 0)?, self.input(node, 1)?);
        let out = match (&left, &right) {
            // ONNX aligns shapes at the last axis, so only equal ranks align the batch with the
            // batch.
            (Known::Value(_, a), Known::Value(_, b)) if a.len() == b.len() => broadcast(a, b),
            (Known::Value(_, a), Known::Constant(c)) | (Known::Constant(c), Known::Value(_, a)) => {
                constant_shape(c, a.len()).and_then(|c| broadcast(a, &c))
            }
            _ => None,
        };
        let Some(out) = out else { return Err(unsupported(node, "of these shapes")) };

        let mut inputs = Vec::new();
        let left = self.operand(&left, &out, &mut inputs)?;
        let right = self.operand(&right, &out, &mut inputs)?;
        self.node(inputs, Op::Zip { zip, left, right }, out)
    }

    fn operand(
        &mut self,
        known: &Known,
        out: &[usize],
        inputs: &mut Vec<Id>,
    ) -> Result<Operand, Stop> {
        match known {
            Known::Value(id, shape) => {
                inputs.push(*id);
                let picks =
                    if shape == out { None } else { Some(self.broadcast_picks(shape, out)?) };
                Ok(Operand::Value { input: inputs.len() - 1, picks })
            }
            Known::Constant(c) => {
                let shape = constant_shape(c, out.len()).unwrap_or_default();
                let picks = self.broadcast_picks(&shape, out)?;
                Ok(Operand::Constant(picks.into_iter().map(|i| c.values[i as usize]).collect()))
            }
            Known::Sizes { .. } => Err(malformed("floats and integers mixed")),
        }
    }

    /// Returns for each position in `out` its position in `shape`, which broadcasts to `out`.
    fn broadcast_picks(&mut self, shape: &[usize], out: &[usize]) -> Result<Vec<u32>, Stop> {
        let strides: Vec<usize> = (0..shape.len())
            .map(|a| if shape[a] == 1 { 0 } else { shape[a + 1..].iter().product() })
            .collect();
        self.picks(out, |at| at.iter().zip(&strides).map(|(i, s)| i * s).sum())
    }

    /// Returns `from` of the indices of every position in `out`.
    fn picks(&mut self, out: &[usize], from: impl Fn(&[usize]) -> usize) -> Result<Vec<u32>, Stop> {
        let width = out.iter().try_fold(1usize, |p, s| p.checked_mul(*s)).unwrap_or(usize::MAX);
        self.spend(width.max(1))?;

        let mut at = vec![0; out.len()];
        let mut picks = Vec::with_capacity(width);
        for _ in 0..width {
            picks.push(from(&at) as u32);
            for axis in (0..out.len()).rev() {
                at[axis] += 1;
                if at[axis] < out[axis] {
                    break;
                }
                at[axis] = 0;
            }
        }
        Ok(picks)
    }

    fn reduce(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        let (x, shape) = self.value_of(node, 0)?;
        let axes = self.integers(node, 1, "axes")?.filter(|a| !a.is_empty());
        let Some(axes) = axes else { return Err(unsupported(node, "over all axes")) };
        let mut axes = axes
            .iter()
            .map(|&a| feature_axis(node, a, shape.len()))
            .collect::<Result<Vec<_>, _>>()?;
        axes.sort_unstable();
        if axes.windows(2).any(|w| w[0] + 1 != w[1]) {
            return Err(unsupported(node, "over such axes"));
        }

        let (first, end) = (axes[0], axes[0] + axes.len());
        let (outer, inner) = (shape[..first].iter().product(), shape[end..].iter().product());
        let n: usize = shape[first..end].iter().product();
        let mut out = shape;
        let kept = if node.int("keepdims", 1) != 0 { vec![1; end - first] } else { Vec::new() };
        out.splice(first..end, kept);
        let divisor = if node.op_type() == "ReduceMean" { n as f32 } else { 1.0 };
        self.node(vec![x], Op::Sum { outer, n, inner, divisor }, out)
    }

    fn concat(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        let all =
            (0..node.input.len()).map(|i| self.input(node, i)).collect::<Result<Vec<_>, _>>()?;
        if let Some(sizes) = all.iter().map(|k| k.sizes()).collect::<Option<Vec<_>>>() {
            // Counted before the list exists: a few nodes can double a list to any length.
            self.spend(sizes.iter().map(|s| s.len()).sum())?;
            return Ok(Known::Sizes { sizes: sizes.concat().into(), scalar: false });
        }
        let Some(Known::Value(_, first)) = all.first() else {
            return Err(unsupported(node, "of constants"));
        };

        let axis = feature_axis(node, node.int("axis", 1), first.len())?;
        let mut out = first.clone();
        out[axis] = 0;
        let (mut inputs, mut parts) = (Vec::new(), Vec::new());
        for known in &all {
            let Known::Value(id, shape) = known else {
                return Err(unsupported(node, "of constants"));
            };
            let is_equal = |a: usize| a == axis || shape[a] == out[a];
            if shape.len() != out.len() || !(0..out.len()).all(is_equal) {
                return Err(malformed(&format!("Concat of {shape:?} beside {first:?}")));
            }
            out[axis] += shape[axis];
            inputs.push(*id);
            parts.push(shape[axis..].iter().product());
        }

        let outer = out[..axis].iter().product();
        self.node(inputs, Op::Concat { outer, parts }, out)
    }

    /// Translates an operator that changes the shape of a value but not the order of its values.
    fn view(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        let known = self.input(node, 0)?;
        if let (Known::Sizes { sizes, .. }, "Unsqueeze" | "Squeeze") = (&known, node.op_type()) {
            let scalar = node.op_type() == "Squeeze";
            if scalar && sizes.len() != 1 {
                return Err(malformed(&format!("Squeeze of {} integers", sizes.len())));
            }
            return Ok(Known::Sizes { sizes: Rc::clone(sizes), scalar });
        }

        let Known::Value(id, shape) = known else { return Err(unsupported(node, "of a constant")) };
        let width: usize = shape.iter().product();
        let out = match node.op_type() {
            "Flatten" if node.int("axis", 1) == 1 => vec![width],
            "Reshape" => self.reshape(node, &shape)?,
            "Unsqueeze" => {
                let axes = self.integers(node, 1, "axes")?.unwrap_or_default();
                let rank = shape.len() + axes.len();
                let mut axes =
                    axes.iter()
                        .map(|&a| feature_axis(node, a, rank))
                        .collect::<Result<Vec<_>, _>>()?;
                axes.sort_unstable();
                let mut out = shape;
                axes.iter().for_each(|&a| out.insert(a.min(out.len()), 1));
                out
            }
            "Squeeze" => {
                let axes = self.integers(node, 1, "axes")?.unwrap_or_default();
                let axes = axes
                    .iter()
                    .map(|&a| feature_axis(node, a, shape.len()))
                    .collect::<Result<Vec<_>, _>>()?;
                if axes.is_empty() || axes.iter().any(|&a| shape[a] != 1) {
                    return Err(unsupported(node, "of such axes"));
                }
                let kept = (0..shape.len()).filter(|a| !axes.contains(a));
                kept.map(|a| shape[a]).collect()
            }
            _ => return Err(unsupported(node, "of such an axis")),
        };
        Ok(Known::Value(id, out))
    }

    fn reshape(&self, node: &NodeProto, shape: &[usize]) -> Result<Vec<usize>, Stop> {
        let Known::Sizes { sizes, .. } = self.input(node, 1)? else {
            return Err(unsupported(node, "to a computed shape"));
        };
        let width: usize = shape.iter().product();
        let (Some(first), false) = (sizes.first(), node.int("allowzero", 0) != 0) else {
            return Err(unsupported(node, "to such a shape"));
        };

        let copied = |(i, size): (usize, &Size)| match size {
            Size::Fixed(0) => shape.get(i).map(|&s| s as i64),
            Size::Fixed(n) => Some(*n),
            Size::Batch => None,
        };
        let rest: Option<Vec<i64>> = sizes[1..].iter().enumerate().map(copied).collect();
        let Some(rest) = rest else { return Err(unsupported(node, "to such a shape")) };

        let open = rest.iter().filter(|&&s| s == -1).count();
        let known = rest.iter().filter(|&&s| s != -1).try_fold(1usize, |product, &s| {
            product.checked_mul(usize::try_from(s).ok().filter(|&s| s > 0)?)
        });
        let fits = match (first, open) {
            (Size::Batch | Size::Fixed(0), 1) => known.is_some_and(|n| width.is_multiple_of(n)),
            // A leading `-1` is the batch if the other sizes are those of one sample.
            (Size::Batch | Size::Fixed(0 | -1), 0) => known == Some(width),
            _ => return Err(unsupported(node, "of the batch")),
        };
        match known {
            Some(known) if fits => {
                let size = |&s: &i64| if s == -1 { width / known } else { s as usize };
                Ok(rest.iter().map(size).collect())
            }
            _ => Err(unsupported(node, "of the batch")),
        }
    }

    fn transpose(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        let known = self.input(node, 0)?;
        if let Known::Constant(c) = &known {
            return match (c.shape.as_slice(), node.ints("perm").unwrap_or(&[1, 0])) {
                (&[rows, columns], [1, 0]) => {
                    self.pack(c.values.len())?;
                    let values =
                        (0..rows * columns).map(|i| c.values[i % rows * columns + i / rows]);
                    let transposed =
                        Constant { shape: vec![columns, rows], values: values.collect() };
                    Ok(Known::Constant(Rc::new(transposed)))
                }
                _ => Err(unsupported(node, "of such a constant")),
            };
        }

        let (x, shape) = self.value_of(node, 0)?;
        let rank = shape.len();
        let perm = node.ints("perm").unwrap_or_default();
        let mut sorted = perm.to_vec();
        sorted.sort_unstable();
        if sorted != (0..=rank as i64).collect::<Vec<_>>() || perm[0] != 0 {
            return Err(unsupported(node, "of the batch"));
        }

        let from: Vec<usize> = perm[1..].iter().map(|&p| p as usize - 1).collect();
        let out: Vec<usize> = from.iter().map(|&a| shape[a]).collect();
        let strides: Vec<usize> = from.iter().map(|&a| shape[a + 1..].iter().product()).collect();
        let picks = self.picks(&out, |at| at.iter().zip(&strides).map(|(i, s)| i * s).sum())?;
        let result = self.node(vec![x], Op::Pick(picks), out)?;

        let swaps_last =
            rank >= 2 && (0..rank - 2).all(|a| from[a] == a) && from[rank - 2] == rank - 1;
        if let (Known::Value(id, _), true) = (&result, swaps_last) {
            self.transposed.insert(*id, x);
        }
        Ok(result)
    }

    fn gather(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        let Known::Sizes { sizes: indices, scalar } = self.input(node, 1)? else {
            return Err(unsupported(node, "by computed indices"));
        };
        let position = |index: &Size, len: usize| match index {
            Size::Fixed(i) if *i < 0 => usize::try_from(i + len as i64).ok(),
            Size::Fixed(i) => usize::try_from(*i).ok().filter(|i| *i < len),
            Size::Batch => None,
        };

        let known = self.input(node, 0)?;
        if let Some(sizes) = known.sizes() {
            let picked =
                indices.iter().map(|i| position(i, sizes.len()).map(|i| sizes[i])).collect();
            let Some(sizes) = picked else {
                return Err(malformed("Gather: an index is out of range"));
            };
            return Ok(Known::Sizes { sizes, scalar });
        }

        let (x, shape) = self.value_of(node, 0)?;
        let axis = feature_axis(node, node.int("axis", 0), shape.len())?;
        let positions = indices.iter().map(|i| position(i, shape[axis]));
        let Some(positions) = positions.collect::<Option<Vec<usize>>>() else {
            return Err(malformed("Gather: an index is out of range"));
        };
        self.pick_along(x, &shape, axis, &positions, scalar)
    }

    /// Adds a node that picks `positions` of one axis. With `drop_axis` the result lacks the axis.
    fn pick_along(
        &mut self,
        x: Id,
        shape: &[usize],
        axis: usize,
        positions: &[usize],
        drop_axis: bool,
    ) -> Result<Known, Stop> {
        let mut out = shape.to_vec();
        out[axis] = positions.len();
        let from = |at: &[usize]| {
            let along = |a: usize| if a == axis { positions[at[a]] } else { at[a] };
            (0..shape.len()).fold(0, |sum, a| sum * shape[a] + along(a))
        };

        let picks = self.picks(&out, from)?;
        if drop_axis {
            out.remove(axis);
        }
        self.node(vec![x], Op::Pick(picks), out)
    }

    fn slice(&mut self, node: &NodeProto) -> Result<Known, Stop> {
        let (x, shape) = self.value_of(node, 0)?;
        let starts = self.integers(node, 1, "starts")?.unwrap_or_default();
        let ends = self.integers(node, 2, "ends")?.unwrap_or_default();
        let axes = self.integers(node, 3, "axes")?.unwrap_or_default();
        let steps = self.integers(node, 4, "steps")?.unwrap_or_else(|| vec![1]);
        let (&[start], &[end], &[axis], &[1]) =
            (starts.as_slice(), ends.as_slice(), axes.as_slice(), steps.as_slice())
        else {
            return Err(unsupported(node, "of several axes or with steps"));
        };

        let axis = feature_axis(node, axis, shape.len())?;
        let len = shape[axis] as i64;
        let clip = |i: i64| if i < 0 { i.saturating_add(len).max(0) } else { i.min(len) } as usize;
        let positions: Vec<usize> = (clip(start)..clip(end)).collect();
        self.pick_along(x, &shape, axis, &positions, false)
    }

    fn split(&mut self, node: &NodeProto) -> Result<Vec<Known>, Stop> {
        let (x, shape) = self.value_of(node, 0)?;
        let axis = feature_axis(node, node.int("axis", 0), shape.len())?;
        let parts = self.integers(node, 1, "split")?;
        let parts = parts.unwrap_or_else(|| {
            vec![(shape[axis] / node.output.len().max(1)) as i64; node.output.len()]
        });

        let whole = parts.iter().try_fold(0i64, |sum, &p| sum.checked_add(p).filter(|_| p > 0));
        if whole != Some(shape[axis] as i64) || parts.len() != node.output.len() {
            return Err(malformed(&format!("Split of {} into {parts:?}", shape[axis])));
        }

        let mut first = 0;
        let part = |&p: &i64| {
            let positions: Vec<usize> = (first..first + p as usize).collect();
            first += p as usize;
            self.pick_along(x, &shape, axis, &positions, false)
        };
        parts.iter().map(part).collect()
    }
}

impl Known {
    fn sizes(&self) -> Option<&[Size]> {
        if let Self::Sizes { sizes, .. } = self { Some(sizes) } else { None }
    }
}

fn unsupported(node: &NodeProto, form: &str) -> Stop {
    Stop::Unsupported(format!("{} {form}", node.op_type()))
}

/// Returns the axis after the batch that an ONNX axis refers to, for a value with `rank` of them.
fn feature_axis(node: &NodeProto, axis: i64, rank: usize) -> Result<usize, Stop> {
    let axis = if axis < 0 { axis.saturating_add(rank as i64 + 1) } else { axis };
    match usize::try_from(axis) {
        Ok(0) => Err(unsupported(node, "of the batch")),
        Ok(axis) if axis <= rank => Ok(axis - 1),
        _ => Err(malformed(&format!("{} of axis {axis} of {}", node.op_type(), rank + 1))),
    }
}

/// Returns a constant's shape with `rank` axes; `None` if the constant differs from sample to
/// sample.
fn constant_shape(c: &Constant, rank: usize) -> Option<Vec<usize>> {
    let mut shape = c.shape.clone();
    if shape.len() == rank + 1 && shape[0] == 1 {
        shape.remove(0);
    }
    let missing = rank.checked_sub(shape.len())?;
    shape.splice(0..0, std::iter::repeat_n(1, missing));
    Some(shape)
}

/// Returns the shape to which `a` and `b` broadcast, if they agree.
fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let one = |(&a, &b): (&usize, &usize)| match (a, b) {
        (a, b) if a == b => Some(a),
        (1, n) | (n, 1) => Some(n),
        _ => None,
    };
    (a.len() == b.len()).then(|| a.iter().zip(b).map(one).collect()).flatten()
}

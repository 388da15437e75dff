//! The rule of each operator that rten may run: the shapes of its results, and the integers in them
//! from which other shapes follow. A rule gives the shapes that rten gives, or larger ones. It
//! leaves the check of shapes that do not fit each other to rten. This file runs nothing.

use crate::dense::graph::bounds::{Bound, Bounds, Dim, KNOWN_MAX, elements, in_range};
use crate::dense::graph::folding::zip_sizes;
use crate::dense::graph::functions::Zip;
use crate::dense::graph::onnx::{BOOL, INT32, INT64, NodeProto};
use crate::dense::graph::operators::zip_of;
use crate::dense::graph::selections::slice_range;
use crate::dense::graph::shape_operators::axis_of;
use crate::dense::graph::stop::{Stop, malformed, unsupported};
use crate::dense::graph::tensor::{Layout, Size, strides};

/// Operators whose result has the shape of the first operand.
#[rustfmt::skip]
const SAME: &[&str] = &[
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization", "CastLike",
    "Ceil", "Clip", "Cos", "Cosh", "CumSum", "DequantizeLinear", "Dropout", "Elu", "Erf", "Exp",
    "EyeLike", "Floor", "Gelu", "HardSigmoid", "HardSwish", "InstanceNormalization", "IsInf",
    "IsNaN", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "Neg",
    "QuantizeLinear", "RMSNormalization", "Reciprocal", "Relu", "ReverseSequence", "Round",
    "Scatter", "ScatterElements", "ScatterND", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax",
    "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "Trilu",
];
/// Operators whose operands broadcast, beside those of `zip_of`.
const BROADCAST: &[&str] =
    &["And", "Greater", "GreaterOrEqual", "Mean", "Mod", "Or", "Sum", "Where", "Xor"];

impl Bounds {
    /// Returns the bounds of all results of `node`.
    pub fn results(&mut self, node: &NodeProto) -> Result<Vec<Bound>, Stop> {
        let op = node.op_type();
        let one = match op {
            "Constant" => Ok(constant(node)),
            "Identity" => self.input(node, 0),
            "Cast" | "Not" => self.cast(node),
            _ if SAME.contains(&op) => Ok(Bound::of(self.input(node, 0)?.dims)),
            _ if zip_of(op).is_some() || BROADCAST.contains(&op) => self.broadcast(node),
            _ if op.starts_with("Reduce") || op.starts_with("Arg") => self.reduced(node),
            "Gemm" => self.gemm_bound(node),
            "MatMul" | "MatMulInteger" => self.matmul_bound(node),
            "Einsum" => self.einsum_bound(node),
            "Conv" | "MaxPool" | "AveragePool" => self.windows(node),
            "GlobalAveragePool" | "GlobalMaxPool" => {
                let x = self.input(node, 0)?;
                let all = x.dims.iter().enumerate();
                Ok(Bound::of(all.map(|(a, &d)| if a < 2 { d } else { Dim::fixed(1) }).collect()))
            }
            "GRU" | "LSTM" => return self.recurrent(node),
            "Attention" => self.attention_bound(node),
            "DynamicQuantizeLinear" => {
                let x = Bound::of(self.input(node, 0)?.dims);
                return Ok(vec![x, Bound::default(), Bound::default()]);
            }
            "TopK" => return self.top_k(node),
            "Split" => return self.split_bound(node),
            _ => self.moved(node),
        };
        Ok(vec![one?])
    }

    /// Returns the bound of an operator that moves values or makes them from sizes.
    fn moved(&mut self, node: &NodeProto) -> Result<Bound, Stop> {
        match node.op_type() {
            "Shape" => self.shape_bound(node),
            "Size" => {
                let dims = self.input(node, 0)?.dims;
                let is_exact = dims.iter().all(|dim| dim.exact);
                Ok(Bound::known(Vec::new(), vec![elements(&dims).filter(|_| is_exact)]))
            }
            "Reshape" => self.reshape_bound(node),
            "Flatten" => {
                let dims = self.input(node, 0)?.dims;
                let axis = node.int("axis", 1);
                let axis = if axis < 0 { axis + dims.len() as i64 } else { axis };
                let axis = usize::try_from(axis).unwrap_or(0).min(dims.len());
                let sides = [product(node, &dims[..axis])?, product(node, &dims[axis..])?];
                Ok(Bound::of(sides.to_vec()))
            }
            "Squeeze" => self.squeeze_bound(node),
            "Unsqueeze" => self.unsqueeze_bound(node),
            "Transpose" => self.transposed_bound(node),
            "Expand" => {
                let (x, target) = (self.input(node, 0)?, self.required(node, 1, "shape")?);
                let target: Vec<Dim> = target.into_iter().map(Dim::of).collect();
                Ok(Bound { dims: merge(&x.dims, &target), ..Bound::default() })
            }
            "Tile" => {
                let (x, repeats) = (self.input(node, 0)?, self.required(node, 1, "repeats")?);
                let dims = x.dims.iter().zip(&repeats);
                let dims = dims.map(|(d, n)| product(node, &[*d, Dim::of(*n)]));
                Ok(Bound::of(dims.collect::<Result<_, _>>()?))
            }
            "Concat" => self.concat_bound(node),
            "Pad" => self.pad_bound(node),
            "Slice" => self.slice_bound(node),
            "Gather" => self.gather_bound(node),
            "GatherElements" => Ok(Bound::of(self.input(node, 1)?.dims)),
            "GatherND" => self.gather_nd_bound(node),
            "ConstantOfShape" => self.constant_of_shape_bound(node),
            "Range" => self.range_bound(node),
            "OneHot" => self.one_hot_bound(node),
            "NonZero" => {
                let dims = self.input(node, 0)?.dims;
                let all = product(node, &dims)?;
                Ok(Bound::of(vec![Dim::fixed(dims.len().max(1)), all.at_most()]))
            }
            _ => Err(unsupported(node, "")),
        }
    }

    fn unsqueeze_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let (x, axes) = (self.input(node, 0)?, self.integers(node, 1, "axes")?);
        let axes = axes.unwrap_or_default();
        let axes = axes_of(node, &axes, x.dims.len() + axes.len())?;
        let mut dims = x.dims;
        axes.iter().for_each(|&axis| dims.insert(axis.min(dims.len()), Dim::fixed(1)));
        Ok(Bound::with(dims, x.values))
    }

    fn gather_nd_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let (x, indices) = (self.input(node, 0)?.dims, self.input(node, 1)?.dims);
        let depth = indices.last().and_then(|dim| dim.constant()).unwrap_or(-1);
        let first = depth.saturating_add(node.int("batch_dims", 0));
        let rest = usize::try_from(first).ok().filter(|_| depth >= 0);
        let rest = rest.and_then(|first| x.get(first..));
        let rest = rest.ok_or_else(|| unsupported(node, "by indices of such a shape"))?;
        Ok(Bound::of([&indices[..indices.len() - 1], rest].concat()))
    }

    fn constant_of_shape_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let target = self.required(node, 0, "shape")?;
        let value = node.tensor("value").and_then(|tensor| Bound::stored(tensor).values);
        let dims: Vec<Dim> = target.into_iter().map(Dim::of).collect();
        let values = match (value.as_deref(), count(&dims)) {
            (Some([value]), Some(count)) => Some(vec![*value; count]),
            _ => None,
        };
        Ok(Bound::with(dims, values))
    }

    fn one_hot_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let (indices, depth) = (self.input(node, 0)?, self.required(node, 1, "depth")?);
        let [depth] = depth[..] else { return Err(unsupported(node, "of such a depth")) };
        let mut dims = indices.dims;
        let axis = axis_of(node, node.int("axis", -1), dims.len() + 1)?;
        dims.insert(axis, Dim::of(depth));
        Ok(Bound::of(dims))
    }

    /// Returns the integers of input `i`, which the operator must have.
    fn required(&self, node: &NodeProto, i: usize, name: &str) -> Result<Vec<Size>, Stop> {
        let missing = || malformed(&format!("{} without its {name}", node.op_type()));
        self.sizes(node, i, name)?.ok_or_else(missing)
    }

    /// Returns the bound of `Cast` and `Not`, which keep the integers that are known.
    fn cast(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let x = self.input(node, 0)?;
        let to = node.int("to", 0);
        let truth = |value: Option<Size>| value?.is_zero();
        let values = match x.values {
            Some(values) if [INT32, INT64].iter().any(|&int| to == i64::from(int)) => values,
            Some(values) if node.op_type() == "Not" || to == i64::from(BOOL) => {
                let is_not = i64::from(node.op_type() == "Not");
                let bit = |v| truth(v).map(|zero| Size::fixed(i64::from(zero) ^ 1 ^ is_not));
                values.into_iter().map(bit).collect()
            }
            _ => return Ok(Bound::of(x.dims)),
        };
        Ok(Bound::known(x.dims, values))
    }

    fn broadcast(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let mut dims = self.input(node, 0)?.dims;
        let mut lists = Vec::new();
        for i in 0..node.input.len() {
            let next = self.input(node, i)?;
            dims = merge(&dims, &next.dims);
            // No operator that is followed has more operands than `Where`.
            lists.push(next.values.filter(|_| i < 3));
        }
        let lists: Option<Vec<_>> = lists.into_iter().collect();
        let (Some(lists), Some(count)) = (lists, count(&dims)) else { return Ok(Bound::of(dims)) };
        // Of the operands that repeat, only those of one value are followed.
        let value = |list: &Vec<Option<Size>>, i: usize| match list.len() {
            1 => list[0],
            n if n == count => list[i],
            _ => None,
        };
        let all = (0..count).map(|i| {
            let operands: Vec<_> = lists.iter().map(|list| value(list, i)).collect();
            fold(node.op_type(), &operands)
        });
        Ok(Bound::known(dims, all.collect()))
    }

    fn reduced(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let x = self.input(node, 0)?;
        let mut dims = x.dims;
        let axes = match node.op_type().starts_with("Arg") {
            true => Some(vec![node.int("axis", 0)]),
            false => self.integers(node, 1, "axes")?.filter(|axes| !axes.is_empty()),
        };
        let axes = match axes {
            Some(axes) => axes_of(node, &axes, dims.len())?,
            None if node.int("noop_with_empty_axes", 0) != 0 => Vec::new(),
            None => (0..dims.len()).collect(),
        };
        for &axis in axes.iter().rev() {
            if node.int("keepdims", 1) != 0 {
                dims[axis] = Dim::fixed(1);
            } else {
                dims.remove(axis);
            }
        }
        let zip = match node.op_type() {
            "ReduceSum" => Zip::Add,
            "ReduceProd" => Zip::Mul,
            _ => return Ok(Bound::of(dims)),
        };
        let values = x.values.filter(|_| axes == [0]);
        let total = values.and_then(|values| {
            values.into_iter().reduce(|a, b| zip_sizes(zip, [a?, b?])).unwrap_or_default()
        });
        Ok(if axes == [0] { Bound::known(dims, vec![total]) } else { Bound::of(dims) })
    }

    fn transposed_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let x = self.input(node, 0)?;
        let rank = x.dims.len();
        let reversed: Vec<i64> = (0..rank as i64).rev().collect();
        let perm = node.ints("perm").unwrap_or(&reversed).iter();
        let perm = perm.map(|&a| axis_of(node, a, rank)).collect::<Result<Vec<_>, _>>()?;
        let dims: Vec<Dim> = perm.iter().map(|&a| x.dims[a]).collect();
        let values = x.values.filter(|_| count(&dims).is_some()).map(|all| {
            let size = |dim: &Dim| usize::try_from(dim.most.fixed).unwrap_or(0);
            let own = strides(&x.dims.iter().map(size).collect::<Vec<_>>());
            let shape = dims.iter().map(size).collect();
            let strides = perm.iter().map(|&a| own[a]).collect();
            let picks = Layout { shape, batch: None, strides, first: 0 }.picks();
            picks.into_iter().map(|i| all.get(i as usize).copied().flatten()).collect()
        });
        Ok(Bound::with(dims, values))
    }

    fn top_k(&self, node: &NodeProto) -> Result<Vec<Bound>, Stop> {
        let mut dims = self.input(node, 0)?.dims;
        let axis = axis_of(node, node.int("axis", -1), dims.len())?;
        let k = self.sizes(node, 1, "k").ok().flatten();
        dims[axis] = match k.as_deref() {
            Some([k]) => Dim::of(*k),
            _ => dims[axis].at_most(),
        };
        Ok(vec![Bound::of(dims); 2])
    }

    fn split_bound(&self, node: &NodeProto) -> Result<Vec<Bound>, Stop> {
        let x = self.input(node, 0)?;
        let axis = axis_of(node, node.int("axis", 0), x.dims.len())?;
        let parts = self.sizes(node, 1, "split").ok().flatten();
        let n = node.output.len();
        let equal = x.dims[axis].constant().filter(|size| n > 0 && size % n as i64 == 0);
        let mut first = Some(0);
        let results = (0..n).map(|i| {
            let part = match &parts {
                Some(parts) => parts.get(i).map(|size| Dim::of(*size)),
                None => equal.map(|size| Dim::fixed(size as usize / n)),
            };
            let part = part.unwrap_or_else(|| x.dims[axis].at_most());
            let mut dims = x.dims.clone();
            dims[axis] = part;
            let start = first.filter(|_| dims.len() == 1);
            first = first.zip(count(&[part])).map(|(at, count)| at + count);
            let values = x.values.as_ref().zip(start.zip(first));
            let values = values.and_then(|(all, (from, to))| all.get(from..to));
            Bound::with(dims, values.map(<[_]>::to_vec))
        });
        Ok(results.collect())
    }

    fn shape_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let dims = self.input(node, 0)?.dims;
        let rank = dims.len() as i64;
        let clip =
            |at: i64| if at < 0 { at.saturating_add(rank) } else { at }.clamp(0, rank) as usize;
        let (start, end) = (clip(node.int("start", 0)), clip(node.int("end", rank)));
        let part = dims.get(start..end).unwrap_or_default();
        Ok(Bound::list(part.iter().map(|d| Some(d.most).filter(|_| d.exact)).collect()))
    }

    fn reshape_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let (x, target) = (self.input(node, 0)?, self.required(node, 1, "shape")?);
        let zero_is_zero = self.opset >= 14 && node.int("allowzero", 0) != 0;
        let mut dims = Vec::new();
        let mut open = None;
        for (axis, size) in target.into_iter().enumerate() {
            dims.push(match size.constant() {
                Some(-1) if open.is_none() => {
                    open = Some(axis);
                    Dim::fixed(1)
                }
                Some(0) if !zero_is_zero => {
                    let own = x.dims.get(axis).copied();
                    own.ok_or_else(|| malformed("Reshape copies the size of a missing axis"))?
                }
                Some(n) if n < 0 => return Err(malformed("Reshape to a negative size")),
                _ => Dim::of(size),
            });
        }
        if let Some(axis) = open {
            dims[axis] = quotient(product(node, &x.dims)?, product(node, &dims)?);
        }
        Ok(Bound::with(dims, x.values))
    }

    fn squeeze_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let x = self.input(node, 0)?;
        let axes = match self.integers(node, 1, "axes")? {
            Some(axes) => axes_of(node, &axes, x.dims.len())?,
            None => {
                let axes: Vec<usize> = (0..x.dims.len()).filter(|&a| x.dims[a].is(1)).collect();
                // An axis that has one value for some batch only would move the others.
                let may_be_one = x.dims.iter().any(|dim| dim.constant().is_none());
                if may_be_one && axes.len() + 1 < x.dims.len() {
                    return Err(unsupported(node, "of axes that the batch chooses"));
                }
                axes
            }
        };
        let kept = (0..x.dims.len()).filter(|axis| !axes.contains(axis)).map(|axis| x.dims[axis]);
        Ok(Bound::with(kept.collect(), x.values))
    }

    fn concat_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let first = self.input(node, 0)?;
        let mut dims = first.dims;
        let axis = axis_of(node, node.int("axis", 1), dims.len())?;
        let mut values = first.values;
        for i in 1..node.input.len() {
            let next = self.input(node, i)?;
            if next.dims.len() != dims.len() {
                return Err(malformed("Concat of tensors with different axes"));
            }
            for (a, dim) in next.dims.into_iter().enumerate() {
                if a == axis {
                    let sum = zip_sizes(Zip::Add, [dims[a].most, dim.most]);
                    let most = sum.ok_or_else(|| unsupported(node, "of such sizes"))?;
                    dims[a] = Dim { most, exact: dims[a].exact && dim.exact };
                } else {
                    dims[a] = dims[a].broadcast(dim);
                }
            }
            let both = values.zip(next.values).map(|(a, b)| [a, b].concat());
            values = both.filter(|both| both.len() <= KNOWN_MAX);
        }
        Ok(Bound::with(dims, values.filter(|_| axis == 0)))
    }

    fn pad_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let mut dims = self.input(node, 0)?.dims;
        let missing = || malformed("Pad without pads");
        let pads = self.integers(node, 1, "pads")?.ok_or_else(missing)?;
        let axes = match self.integers(node, 3, "axes")? {
            Some(axes) => axes_of(node, &axes, dims.len())?,
            None => (0..dims.len()).collect(),
        };
        if pads.len() != 2 * axes.len() {
            return Err(malformed("Pad by numbers that are not two for each axis"));
        }
        for (i, &axis) in axes.iter().enumerate() {
            let sum = pads[i].saturating_add(pads[axes.len() + i]);
            let size = zip_sizes(Zip::Add, [dims[axis].most, Size::fixed(sum)]);
            let size = Dim::of(size.ok_or_else(|| unsupported(node, "by such pads"))?);
            dims[axis] = Dim { exact: size.exact && dims[axis].exact, ..size };
        }
        Ok(Bound::of(dims))
    }

    fn slice_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let x = self.input(node, 0)?;
        let rank = x.dims.len();
        let list = |i, name| self.sizes(node, i, name).ok().flatten();
        let (starts, ends) = (list(1, "starts"), list(2, "ends"));
        let axes = self.integers(node, 3, "axes")?;
        let first = starts.as_ref().map_or(rank, Vec::len).min(rank) as i64;
        let axes = axes.unwrap_or_else(|| (0..first).collect());
        let steps = self.integers(node, 4, "steps")?.unwrap_or_else(|| vec![1; axes.len()]);

        let (mut dims, mut values) = (x.dims, x.values);
        for (i, &axis) in axes.iter().enumerate() {
            let axis = axis_of(node, axis, rank)?;
            let at = |list: &Option<Vec<Size>>| list.as_ref().and_then(|all| all.get(i)).copied();
            let (start, end, step) = (at(&starts), at(&ends), steps.get(i).copied().unwrap_or(0));
            let dim = dims[axis];
            let is_whole = start == Some(Size::fixed(0))
                && step == 1
                && end.is_some_and(|e| e == dim.most || e.constant() >= Some(i64::from(i32::MAX)));
            let bounds = start.and_then(Size::constant).zip(end.and_then(Size::constant));
            dims[axis] = match (bounds, dim.constant()) {
                _ if is_whole => dim,
                (Some((start, end)), Some(n)) => {
                    let missing = || malformed("Slice by step 0");
                    let n = usize::try_from(n).unwrap_or(0);
                    let (first, steps) = slice_range([start, end, step], n).ok_or_else(missing)?;
                    let inner = count(&dims[axis + 1..]);
                    values = values.zip(inner).map(|(all, inner)| {
                        let at = |i: usize| (first + i as i64 * step) as usize;
                        along(&all, n, inner, &(0..steps).map(at).collect::<Vec<_>>())
                    });
                    Dim::fixed(steps)
                }
                _ => dim.at_most(),
            };
        }
        Ok(Bound::with(dims, values))
    }

    fn gather_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
        let axis = axis_of(node, node.int("axis", 0), x.dims.len())?;
        let mut dims = x.dims;
        let values = x.values.filter(|_| dims.len() == 1);
        dims.splice(axis..=axis, indices.dims);
        let values = values.zip(indices.values).map(|(all, indices)| {
            let value = |i: Option<Size>| {
                let i = i?.constant()?;
                let i = if i < 0 { i.checked_add(all.len() as i64)? } else { i };
                *all.get(usize::try_from(i).ok()?)?
            };
            indices.into_iter().map(value).collect()
        });
        Ok(Bound::with(dims, values))
    }

    fn range_bound(&self, node: &NodeProto) -> Result<Bound, Stop> {
        let unknown = || unsupported(node, "with bounds that do not follow from shapes");
        let mut bounds = Vec::new();
        for i in 0..3 {
            let values = self.input(node, i)?.values.filter(|values| values.len() == 1);
            bounds.push(values.and_then(|values| values[0]).ok_or_else(unknown)?);
        }
        let [start, limit, step] = [bounds[0], bounds[1], bounds[2]];
        let step = step.constant().filter(|step| *step != 0).ok_or_else(unknown)?;
        // rten counts in i32 and stops beyond the limit. A count that wraps around never stops.
        let past = zip_sizes(Zip::Add, [limit, Size::fixed(step)]);
        past.filter(in_range).ok_or_else(unknown)?;
        let (from, to) = if step > 0 { (start, limit) } else { (limit, start) };
        let span = Dim::of(zip_sizes(Zip::Sub, [to, from]).ok_or_else(unknown)?);
        let dim = quotient(span, Dim { most: Size::fixed(step.saturating_abs()), exact: true });
        let values = start.constant().zip(count(&[dim])).map(|(first, count)| {
            let value = |i: i64| Some(Size::fixed(first.saturating_add(step.saturating_mul(i))));
            (0..count as i64).map(value).collect()
        });
        Ok(Bound::with(vec![dim], values))
    }
}

/// Returns the value of `op` for known operands; `None` if it is not known.
fn fold(op: &str, operands: &[Option<Size>]) -> Option<Size> {
    match (op, operands) {
        ("Where", &[condition, yes, no]) => {
            if condition?.constant()? != 0 {
                yes
            } else {
                no
            }
        }
        ("Greater", &[a, b]) => zip_sizes(Zip::Less, [b?, a?]),
        ("GreaterOrEqual", &[a, b]) => zip_sizes(Zip::LessEqual, [b?, a?]),
        ("And", &[a, b]) => zip_sizes(Zip::Min, [a?, b?]),
        ("Or", &[a, b]) => zip_sizes(Zip::Max, [a?, b?]),
        ("Mod", &[a, b]) => {
            let (a, b) = (a?.constant()?, b?.constant()?);
            (a >= 0 && b > 0).then(|| Size::fixed(a % b))
        }
        ("Pow" | "PRelu", _) => None,
        (_, &[a, b]) => zip_sizes(zip_of(op)?, [a?, b?]),
        _ => None,
    }
}

fn constant(node: &NodeProto) -> Bound {
    let scalar = |value| Bound::known(Vec::new(), vec![value]);
    if let Some(tensor) = node.tensor("value") {
        Bound::stored(tensor)
    } else if let Some(value) = node.maybe_int("value_int") {
        scalar(Some(Size::fixed(value)))
    } else if let Some(values) = node.ints("value_ints").filter(|v| v.len() <= KNOWN_MAX) {
        Bound::list(values.iter().map(|&n| Some(Size::fixed(n))).collect())
    } else if let Some(values) = node.ints("value_ints") {
        Bound::of(vec![Dim::fixed(values.len())])
    } else {
        let list = node.floats("value_floats").map(<[f32]>::len);
        list.map_or_else(|| scalar(None), |n| Bound::of(vec![Dim::fixed(n)]))
    }
}

/// Returns the number of values in a tensor if the pass follows so many.
fn count(dims: &[Dim]) -> Option<usize> {
    let sizes = dims.iter().map(|dim| dim.constant()).collect::<Option<Vec<_>>>()?;
    let count = sizes.iter().try_fold(1i64, |n, size| n.checked_mul(*size))?;
    usize::try_from(count).ok().filter(|n| *n <= KNOWN_MAX)
}

/// Returns the values at `positions` of an axis of `n`, with `inner` values at each position.
fn along<T: Copy>(all: &[T], n: usize, inner: usize, positions: &[usize]) -> Vec<T> {
    let rows = all.chunks_exact((n * inner).max(1));
    rows.flat_map(|row| positions.iter().flat_map(|&at| row[at * inner..][..inner].iter()))
        .copied()
        .collect()
}

/// Returns the axes that ONNX axes refer to, in ascending order.
fn axes_of(node: &NodeProto, axes: &[i64], rank: usize) -> Result<Vec<usize>, Stop> {
    let mut all = axes.iter().map(|&a| axis_of(node, a, rank)).collect::<Result<Vec<_>, _>>()?;
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// Returns the axes to which two tensors broadcast.
pub(super) fn merge(a: &[Dim], b: &[Dim]) -> Vec<Dim> {
    let rank = a.len().max(b.len());
    let at = |dims: &[Dim], axis: usize| {
        let axis = (axis + dims.len()).checked_sub(rank);
        axis.map_or(Dim::fixed(1), |axis| dims[axis])
    };
    (0..rank).map(|axis| at(a, axis).broadcast(at(b, axis))).collect()
}

/// Returns several axes as one.
fn product(node: &NodeProto, dims: &[Dim]) -> Result<Dim, Stop> {
    let most = elements(dims).ok_or_else(|| unsupported(node, "of samples with each other"))?;
    Ok(Dim { most, exact: dims.iter().all(|dim| dim.exact) })
}

/// Returns an axis of `all` values, `part` at a time, rounded up.
fn quotient(all: Dim, part: Dim) -> Dim {
    let exact = all.exact && part.exact;
    let up = |a: i64, b: i64| (a.max(0) / b.max(1)) + i64::from(a.max(0) % b.max(1) != 0);
    let (a, b) = (all.most, part.most);
    match (a.fixed, b.fixed) {
        // The batch cancels out.
        (0, 0) if b.batches > 0 && part.exact => Dim {
            most: Size::fixed(up(a.batches, b.batches)),
            exact: exact && a.batches % b.batches == 0,
        },
        _ => {
            // A part is the smallest with one sample, and where it may be smaller, one value.
            let part = if part.exact { b.fixed.saturating_add(b.batches).max(1) } else { 1 };
            let whole = b.batches == 0 && a.fixed % part == 0 && a.batches % part == 0;
            let [fixed, batches] = [a.fixed, a.batches].map(|n| match whole {
                true => n / part,
                false => up(n, part),
            });
            Dim { most: Size { fixed, batches }, exact: exact && whole }
        }
    }
}

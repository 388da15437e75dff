//! Translates the operators that select values: `Gather` and its relatives, at positions that are
//! known or computed, `Slice` and `Split`. None of them selects among the samples of a batch.

use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{
    Builder, Op, Operand, Stop, VALUES_MAX, malformed, unsupported,
};
use crate::dense::graph::shape_operators::axis_of;
use crate::dense::graph::tensor::{Batch, Data, Kind, Size, Tensor, Values, product, strides};

/// Positions in the values of a tensor.
pub(crate) enum Positions {
    Known(Vec<usize>),
    /// Of each sample.
    Computed(Tensor),
}

impl Builder<'_> {
    /// Returns `x` with `positions` of one axis.
    pub fn take(&mut self, x: &Tensor, axis: usize, positions: &[usize]) -> Result<Tensor, Stop> {
        // Beside an empty axis they make no values, but a list of them took its time.
        self.pack(positions.len())?;
        let mut shape = x.shape.clone();
        shape[axis] = positions.len();
        let own = strides(&x.shape);
        let pick = |at: &[usize]| {
            let along = |a: usize| if a == axis { positions[at[a]] } else { at[a] };
            (0..at.len()).map(|a| along(a) * own[a]).sum()
        };
        self.pick_each(x, &shape, x.batch, &pick)
    }

    /// Returns the values of `x` at the positions that `pick` gives for each index of `shape`.
    fn pick_each(
        &mut self,
        x: &Tensor,
        shape: &[usize],
        batch: Option<Batch>,
        pick: &dyn Fn(&[usize]) -> usize,
    ) -> Result<Tensor, Stop> {
        self.count(x, product(shape).unwrap_or(usize::MAX))?;
        let picks = each_index(shape, |at| pick(at) as u32);
        self.pick_all(x, shape, batch, picks)
    }

    /// Returns the known positions that integers have along an axis of `n` values.
    pub fn known_positions(
        &mut self,
        node: &NodeProto,
        sizes: &[Size],
        n: usize,
    ) -> Result<Vec<usize>, Stop> {
        self.pack(sizes.len())?;
        let position = |s: &Size| match s.constant() {
            Some(i) => {
                let from_start = if i < 0 { i.saturating_add(n as i64) } else { i };
                let found = usize::try_from(from_start).ok().filter(|i| *i < n);
                let op = node.op_type();
                let problem =
                    || format!("{op}: index {i} is out of range, the axis has {n} values");
                found.ok_or_else(|| malformed(&problem()))
            }
            None => Err(unsupported(node, "by the batch")),
        };
        sizes.iter().map(position).collect()
    }

    /// Returns the positions of `indices` on an axis of `n` values, each `stride` values after the
    /// one before. A run checks computed ones.
    fn positions(
        &mut self,
        node: &NodeProto,
        indices: &Tensor,
        [n, stride]: [usize; 2],
    ) -> Result<Positions, Stop> {
        if !indices.kind.is_int() {
            return Err(malformed(&format!("{} by indices that are no integers", node.op_type())));
        }
        if let Some(Values::Ints(sizes)) = indices.known_values().map(|v| &**v) {
            let known = self.known_positions(node, sizes, n)?;
            return Ok(Positions::Known(known.iter().map(|p| p * stride).collect()));
        }
        if n.saturating_mul(stride) > VALUES_MAX {
            return Err(unsupported(node, "by computed indices of so many values"));
        }
        let checked = self.check(indices, [-(n as f32), n as f32 - 1.0])?;
        let wrapped = self.map(&checked, Map::Wrap(n as f32))?;
        self.strided(&wrapped, stride)
    }

    /// Returns computed positions that are `stride` values apart.
    pub fn strided(&mut self, positions: &Tensor, stride: usize) -> Result<Positions, Stop> {
        let stride = Tensor::known(Kind::Float, Vec::new(), Values::Floats(vec![stride as f32]));
        Ok(Positions::Computed(self.zip(Zip::Mul, [positions, &stride])?))
    }

    /// Returns a value of `x` for each index of `shape`: `pick` gives the number before a position,
    /// and which of the `positions` is added to it.
    pub fn lookup(
        &mut self,
        x: &Tensor,
        shape: &[usize],
        batch: Option<Batch>,
        positions: &Positions,
        pick: &dyn Fn(&[usize]) -> [usize; 2],
    ) -> Result<Tensor, Stop> {
        let positions = match positions {
            Positions::Computed(positions) => positions,
            Positions::Known(positions) => {
                let pick = |at: &[usize]| {
                    let [base, i] = pick(at);
                    base + positions[i]
                };
                return self.pick_each(x, shape, batch, &pick);
            }
        };
        self.spend(product(shape).unwrap_or(usize::MAX).saturating_mul(2))?;
        let picks = each_index(shape, |at| pick(at).map(|i| i as u32));
        let mut inputs = Vec::new();
        let data = match &x.data {
            Data::Computed(id) => {
                inputs.push(*id);
                Operand::Value { input: 0, picks: None }
            }
            Data::Known(values) => {
                self.pack(values.len())?;
                let inexact = || Stop::Unsupported("Gather of such integers".to_owned());
                Operand::Constant(values.floats().ok_or_else(inexact)?)
            }
        };
        inputs.push(self.computed(positions)?);
        let op = Op::Lookup { data, picks };
        Ok(Tensor { kind: x.kind, ..self.node(inputs, op, shape.to_vec(), batch)? })
    }

    /// Translates `Gather`. By indices of each sample it selects values that all samples share.
    pub fn gather(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
        let axis = axis_of(node, node.int("axis", 0), x.shape.len())?;
        if x.is_batch(axis) || (x.batch.is_some() && indices.batch.is_some()) {
            return Err(unsupported(node, "of the batch"));
        }
        let (own, theirs) = (strides(&x.shape), strides(&indices.shape));
        let positions = self.positions(node, &indices, [x.shape[axis], own[axis]])?;

        // The axis gives way to the axes of the indices.
        let mut shape = x.shape.clone();
        shape.splice(axis..=axis, indices.shape.iter().copied());
        let rank = indices.shape.len();
        let shift =
            |b: Batch| Batch { axis: if b.axis > axis { b.axis + rank - 1 } else { b.axis }, ..b };
        let of_indices = indices.batch.map(|b| Batch { axis: b.axis + axis, ..b });
        let batch = x.batch.map(shift).or(of_indices);
        let pick = |at: &[usize]| {
            let after = at[axis + rank..].iter().zip(&own[axis + 1..]);
            [
                dot(&at[..axis], &own) + after.map(|(i, s)| i * s).sum::<usize>(),
                dot(&at[axis..axis + rank], &theirs),
            ]
        };
        self.lookup(&x, &shape, batch, &positions, &pick)
    }

    /// Translates `GatherND`. Its indices may have the number of the sample on the batch's axis.
    pub fn gather_nd(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
        let shared = usize::try_from(node.int("batch_dims", 0)).unwrap_or(usize::MAX);
        let Some((&depth, rows)) = indices.shape.split_last() else {
            return Err(malformed("GatherND by a scalar"));
        };
        let axes = shared.saturating_add(depth);
        let is_equal = |a: usize| x.shape[a] == rows[a] && x.is_batch(a) == indices.is_batch(a);
        let fits = depth > 0 && shared <= rows.len() && axes <= x.shape.len();
        if !fits || !(0..shared).all(is_equal) || indices.is_batch(rows.len()) {
            return Err(unsupported(node, "of the batch"));
        }
        let batch = match (x.batch, indices.batch) {
            (Some(b), None) if b.axis >= axes => {
                Some(Batch { axis: b.axis + rows.len() - axes, ..b })
            }
            (Some(b), Some(_)) if b.axis < shared && x.batch == indices.batch => Some(b),
            // The column of the batch must have the number of the sample.
            (Some(b), Some(own)) if (shared..axes).contains(&b.axis) => Some(own),
            (None, own) => own,
            _ => return Err(unsupported(node, "of the batch")),
        };

        let own = strides(&x.shape);
        let positions = self.row_positions(node, &x, &indices, shared..axes)?;
        let shape: Vec<usize> = rows.iter().chain(&x.shape[axes..]).copied().collect();
        let row_strides = strides(rows);
        let pick = |at: &[usize]| {
            let rest = at[rows.len()..].iter().zip(&own[axes..]).map(|(i, s)| i * s);
            [dot(&at[..shared], &own) + rest.sum::<usize>(), dot(&at[..rows.len()], &row_strides)]
        };
        self.lookup(&x, &shape, batch, &positions, &pick)
    }

    /// Returns the position to which each row of `indices` leads on `axes` of `x`.
    pub fn row_positions(
        &mut self,
        node: &NodeProto,
        x: &Tensor,
        indices: &Tensor,
        axes: std::ops::Range<usize>,
    ) -> Result<Positions, Stop> {
        let (own, last) = (strides(&x.shape), indices.shape.len() - 1);
        let mut sum: Option<Positions> = None;
        for (column, axis) in axes.enumerate() {
            let one = self.take(indices, last, &[column])?;
            let next = if x.is_batch(axis) {
                let is_own = match one.known_values().map(|v| &**v) {
                    Some(Values::Ints(sizes)) => sizes.iter().all(|s| *s == Size::SAMPLE),
                    _ => false,
                };
                if !is_own || x.shape[axis] != 1 {
                    return Err(unsupported(node, "of the batch"));
                }
                Positions::Known(vec![0; one.width()])
            } else {
                self.positions(node, &one, [x.shape[axis], own[axis]])?
            };
            sum = Some(match (sum, next) {
                (None, next) => next,
                (Some(Positions::Known(a)), Positions::Known(b)) => {
                    Positions::Known(a.iter().zip(&b).map(|(a, b)| a + b).collect())
                }
                (Some(Positions::Computed(a)), Positions::Computed(b)) => {
                    Positions::Computed(self.zip(Zip::Add, [&a, &b])?)
                }
                _ => return Err(unsupported(node, "of the batch")),
            });
        }
        sum.ok_or_else(|| malformed(&format!("{} by no indices", node.op_type())))
    }

    /// Translates `GatherElements`.
    pub fn gather_elements(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
        let axis = axis_of(node, node.int("axis", 0), x.shape.len())?;
        if !are_beside(&x, &indices, axis) {
            return Err(unsupported(node, "of the batch"));
        }
        let (own, theirs) = (strides(&x.shape), strides(&indices.shape));
        let positions = self.positions(node, &indices, [x.shape[axis], own[axis]])?;
        let pick = |at: &[usize]| [dot(at, &own) - at[axis] * own[axis], dot(at, &theirs)];
        self.lookup(&x, &indices.shape, x.batch, &positions, &pick)
    }

    /// Translates `Slice` with known bounds.
    pub fn slice(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let mut x = self.input(node, 0)?;
        let rank = x.shape.len();
        let starts = self.integers(node, 1, "starts")?.unwrap_or_default();
        let Some(ends) = self.ends(node)? else { return Err(malformed("Slice without ends")) };
        let axes = self.integers(node, 3, "axes")?;
        let axes = axes.unwrap_or_else(|| (0..starts.len() as i64).collect());
        let steps = self.integers(node, 4, "steps")?.unwrap_or_else(|| vec![1; starts.len()]);
        if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
            return Err(malformed("Slice with lists of different lengths"));
        }

        for (i, &axis) in axes.iter().enumerate() {
            let axis = axis_of(node, axis, rank)?;
            if x.is_batch(axis) {
                let all = Size { fixed: 0, batches: x.shape[axis] as i64 };
                let is_end = ends[i] == all || ends[i].constant() >= Some(i64::from(i32::MAX));
                if starts[i] != 0 || steps[i] != 1 || !is_end {
                    return Err(unsupported(node, "of the batch"));
                }
                continue;
            }
            let end = ends[i].constant().ok_or_else(|| unsupported(node, "by the batch"))?;
            let Some((first, count)) = slice_range([starts[i], end, steps[i]], x.shape[axis])
            else {
                return Err(malformed("Slice by step 0"));
            };
            let position = |k: usize| (first + k as i64 * steps[i]) as usize;
            x = self.take(&x, axis, &(0..count).map(position).collect::<Vec<_>>())?;
        }
        Ok(x)
    }

    fn ends(&mut self, node: &NodeProto) -> Result<Option<Vec<Size>>, Stop> {
        if let Some(ends) = node.ints("ends") {
            return Ok(Some(ends.iter().map(|&e| Size::fixed(e)).collect()));
        }
        self.sizes(node, 2)
    }

    /// Translates `Split`.
    pub fn split(&mut self, node: &NodeProto) -> Result<Vec<Tensor>, Stop> {
        let x = self.input(node, 0)?;
        let axis = axis_of(node, node.int("axis", 0), x.shape.len())?;
        if x.is_batch(axis) {
            return Err(unsupported(node, "of the batch"));
        }
        let (n, outputs) = (x.shape[axis], node.output.len().max(1));
        let parts = match self.integers(node, 1, "split")? {
            Some(parts) => parts,
            None => {
                let most = n.div_ceil(outputs);
                let part = |i: usize| n.saturating_sub(i * most).min(most) as i64;
                (0..outputs).map(part).collect()
            }
        };
        let whole = parts.iter().try_fold(0i64, |sum, &p| sum.checked_add(p).filter(|_| p >= 0));
        if whole != Some(n as i64) || parts.len() != node.output.len() {
            return Err(malformed(&format!("Split of {n} into {parts:?}")));
        }

        let mut first = 0;
        let mut results = Vec::new();
        for part in parts {
            let positions: Vec<usize> = (first..first + part as usize).collect();
            first += part as usize;
            results.push(self.take(&x, axis, &positions)?);
        }
        Ok(results)
    }
}

/// Returns whether `indices` on `axis` belong to values of `x` with the same place on other axes.
pub(crate) fn are_beside(x: &Tensor, indices: &Tensor, axis: usize) -> bool {
    let inside = |a: usize| match x.is_batch(a) {
        true => indices.shape[a] == x.shape[a],
        false => a == axis || indices.shape[a] <= x.shape[a],
    };
    let rank = x.shape.len();
    indices.shape.len() == rank
        && indices.batch == x.batch
        && !x.is_batch(axis)
        && (0..rank).all(inside)
}

/// Returns the sum of the products of places and strides.
pub(crate) fn dot(at: &[usize], strides: &[usize]) -> usize {
    at.iter().zip(strides).map(|(i, stride)| i * stride).sum()
}

/// Returns `value` of each index of `shape`, in order.
pub(crate) fn each_index<T>(shape: &[usize], value: impl Fn(&[usize]) -> T) -> Vec<T> {
    let width = product(shape).unwrap_or(0);
    let mut at = vec![0; shape.len()];
    let mut values = Vec::with_capacity(width);
    for _ in 0..width {
        values.push(value(&at));
        for axis in (0..shape.len()).rev() {
            at[axis] += 1;
            if at[axis] < shape[axis] {
                break;
            }
            at[axis] = 0;
        }
    }
    values
}

/// Returns the first position from `start` to before `end` on an axis of `n` values, and the number
/// of steps; `None` for a step of 0.
pub(crate) fn slice_range([start, end, step]: [i64; 3], n: usize) -> Option<(i64, usize)> {
    let len = n as i64;
    let absolute = |i: i64| if i < 0 { i.saturating_add(len) } else { i };
    let (least, most) = if step > 0 { (0, len) } else { (-1, len - 1) };
    // Backwards, a start before the first value is the first value. Only an end may be before it.
    let first = absolute(start).clamp(least.max(0).min(most), most);
    let end = absolute(end).clamp(least, most);
    let span = if step > 0 { end - first } else { first - end };
    let steps = (span.max(0) as u64).checked_next_multiple_of(step.unsigned_abs())?;
    Some((first, (steps / step.unsigned_abs()) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_backwards_starts_at_the_first_value_or_later() {
        for (bounds, n, range) in [
            ([-100, -200, -1], 4, Some((0, 1))),
            ([100, -200, -2], 4, Some((3, 2))),
            ([-1, 0, -1], 4, Some((3, 3))),
            ([2, 1, -1], 0, Some((-1, 0))),
            ([-100, 200, 3], 4, Some((0, 2))),
            ([200, 300, 1], 4, Some((4, 0))),
            ([0, 1, 0], 4, None),
        ] {
            assert_eq!(slice_range(bounds, n), range, "{bounds:?} of {n}");
        }
    }
}

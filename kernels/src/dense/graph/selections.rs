//! Translates the operators that select values at known positions: `Gather` and its relatives,
//! `Slice` and `Split`. None of them selects among the samples of a batch.

use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Stop, malformed, unsupported};
use crate::dense::graph::shape_operators::axis_of;
use crate::dense::graph::tensor::{Batch, Size, Tensor, Values, product, strides};

impl Builder<'_> {
    /// Returns `x` with `positions` of one axis.
    pub fn take(&mut self, x: &Tensor, axis: usize, positions: &[usize]) -> Result<Tensor, Stop> {
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
        let width = product(shape).unwrap_or(usize::MAX);
        self.count(x, width)?;

        let mut at = vec![0; shape.len()];
        let mut picks = Vec::with_capacity(width);
        for _ in 0..width {
            picks.push(pick(&at) as u32);
            for axis in (0..shape.len()).rev() {
                at[axis] += 1;
                if at[axis] < shape[axis] {
                    break;
                }
                at[axis] = 0;
            }
        }
        self.pick_all(x, shape, batch, picks)
    }

    /// Returns the known positions that a tensor of indices has along an axis of `n` values.
    fn positions(&self, node: &NodeProto, indices: &Tensor, n: usize) -> Result<Vec<usize>, Stop> {
        let Some(Values::Ints(sizes)) = indices.known_values().map(|v| &**v) else {
            return Err(unsupported(node, "by computed indices"));
        };
        let position = |s: &Size| match s.constant() {
            Some(i) => {
                let i = if i < 0 { i.saturating_add(n as i64) } else { i };
                let found = usize::try_from(i).ok().filter(|i| *i < n);
                let op = node.op_type();
                found.ok_or_else(|| malformed(&format!("{op}: index {i} is out of range, {n}")))
            }
            None => Err(unsupported(node, "by the batch")),
        };
        sizes.iter().map(position).collect()
    }

    /// Translates `Gather` by known indices.
    pub fn gather(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
        let axis = axis_of(node, node.int("axis", 0), x.shape.len())?;
        if x.is_batch(axis) || indices.batch.is_some() {
            return Err(unsupported(node, "of the batch"));
        }
        let positions = self.positions(node, &indices, x.shape[axis])?;
        let taken = self.take(&x, axis, &positions)?;

        // The axis gives way to the axes of the indices.
        let mut shape = taken.shape.clone();
        shape.splice(axis..=axis, indices.shape.iter().copied());
        let shift = |b: Batch| {
            let axis = if b.axis > axis { b.axis + indices.shape.len() - 1 } else { b.axis };
            Batch { axis, ..b }
        };
        let batch = taken.batch.map(shift);
        Ok(Tensor { shape, batch, ..taken })
    }

    /// Translates `GatherND` by known indices.
    pub fn gather_nd(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
        let known = indices.known_values().cloned();
        let Some(Values::Ints(sizes)) = known.as_deref() else {
            return Err(unsupported(node, "by computed indices"));
        };
        let (Some(&depth), 0) = (indices.shape.last(), node.int("batch_dims", 0)) else {
            return Err(unsupported(node, "of batches"));
        };
        let has_batch = x.batch.is_some_and(|b| b.axis < depth) || indices.batch.is_some();
        if depth == 0 || depth > x.shape.len() || has_batch {
            return Err(unsupported(node, "of the batch"));
        }

        let own = strides(&x.shape);
        let mut firsts = Vec::new();
        for index in sizes.chunks_exact(depth) {
            let mut first = 0;
            for (axis, size) in index.iter().enumerate() {
                let one = Tensor::ints(vec![*size]);
                first += self.positions(node, &one, x.shape[axis])?[0] * own[axis];
            }
            firsts.push(first);
        }

        let rows = &indices.shape[..indices.shape.len() - 1];
        let shape: Vec<usize> = rows.iter().chain(&x.shape[depth..]).copied().collect();
        let row_strides = strides(rows);
        let pick = |at: &[usize]| {
            let row: usize = at.iter().zip(&row_strides).map(|(i, s)| i * s).sum();
            let rest = at[rows.len()..].iter().zip(&own[depth..]).map(|(i, s)| i * s);
            firsts[row] + rest.sum::<usize>()
        };
        let batch = x.batch.map(|b| Batch { axis: b.axis - depth + rows.len(), ..b });
        self.pick_each(&x, &shape, batch, &pick)
    }

    /// Translates `GatherElements` by known indices.
    pub fn gather_elements(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, indices) = (self.input(node, 0)?, self.input(node, 1)?);
        let axis = axis_of(node, node.int("axis", 0), x.shape.len())?;
        let same = indices.shape.len() == x.shape.len() && indices.batch == x.batch;
        let inside = |a: usize| a == axis || indices.shape[a] <= x.shape[a];
        if !same || x.is_batch(axis) || !(0..x.shape.len()).all(inside) {
            return Err(unsupported(node, "of the batch"));
        }
        let positions = self.positions(node, &indices, x.shape[axis])?;
        let (own, theirs) = (strides(&x.shape), strides(&indices.shape));
        let pick = |at: &[usize]| {
            let here: usize = at.iter().zip(&theirs).map(|(i, s)| i * s).sum();
            let along = |a: usize| if a == axis { positions[here] } else { at[a] };
            (0..at.len()).map(|a| along(a) * own[a]).sum()
        };
        self.pick_each(&x, &indices.shape, x.batch, &pick)
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
        let tensor = self.input(node, 2)?;
        match tensor.known_values().map(|v| &**v) {
            Some(Values::Ints(sizes)) => Ok(Some(sizes.clone())),
            _ => Err(unsupported(node, "by computed integers")),
        }
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
        let whole = parts.iter().try_fold(0i64, |sum, &p| sum.checked_add(p).filter(|_| p > 0));
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

/// Returns the first position from `start` to before `end` on an axis of `n` values, and the number
/// of steps; `None` for a step of 0.
pub(crate) fn slice_range([start, end, step]: [i64; 3], n: usize) -> Option<(i64, usize)> {
    let len = n as i64;
    let absolute = |i: i64| if i < 0 { i.saturating_add(len) } else { i };
    let (least, most) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let (first, end) = (absolute(start).clamp(least, most), absolute(end).clamp(least, most));
    let span = if step > 0 { end - first } else { first - end };
    let steps = (span.max(0) as u64).checked_next_multiple_of(step.unsigned_abs())?;
    Some((first, (steps / step.unsigned_abs()) as usize))
}

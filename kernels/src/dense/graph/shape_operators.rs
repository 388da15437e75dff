//! Translates the operators that move values or that compute shapes: views, selections,
//! concatenations and the arithmetic on constants. A selection becomes an index table, so it costs
//! one copy in a run, and none where it moves nothing.

use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{
    Builder, Op, Stop, Transposed, folded, limit, malformed, unsupported,
};
use crate::dense::graph::tensor::{
    Batch, Kind, Layout, RANK_MAX, Size, Tensor, Values, broadcast, broadcast_layout, product,
    strides,
};
use std::rc::Rc;

/// Entries of a list that an operator makes, at most.
pub(crate) const LIST_MAX: usize = 1 << 22;

impl Builder<'_> {
    /// Translates an operator on shapes and positions. Returns one result for each output.
    pub fn shape_operator(&mut self, node: &NodeProto) -> Result<Vec<Tensor>, Stop> {
        let one = match node.op_type() {
            "Flatten" => self.flatten(node),
            "Reshape" => self.reshape(node),
            "Unsqueeze" => self.unsqueeze(node),
            "Squeeze" => self.squeeze(node),
            "Transpose" => self.transpose_operator(node),
            "Expand" => self.expand(node),
            "Tile" => self.tile(node),
            "Concat" => self.concat(node),
            "Pad" => self.pad(node),
            "Slice" => self.slice(node),
            "Gather" => self.gather(node),
            "GatherND" => self.gather_nd(node),
            "GatherElements" => self.gather_elements(node),
            "Split" => return self.split(node),
            "Shape" => self.shape(node),
            "Size" => {
                let x = self.input(node, 0)?;
                let (fixed, batches) = (x.width() as i64, 0);
                let size = if x.batch.is_some() {
                    Size { fixed: 0, batches: fixed }
                } else {
                    Size { fixed, batches }
                };
                Ok(Tensor::known(Kind::Int64, Vec::new(), Values::Ints(vec![size])))
            }
            "ConstantOfShape" => self.constant_of_shape(node),
            "Range" => self.range(node),
            "Trilu" => self.triangle(node),
            _ => Err(unsupported(node, "")),
        }?;
        Ok(vec![one])
    }

    /// Returns the integers of input `i` or, in older files, of attribute `name`.
    pub fn integers(
        &mut self,
        node: &NodeProto,
        i: usize,
        name: &str,
    ) -> Result<Option<Vec<i64>>, Stop> {
        if let Some(ints) = node.ints(name) {
            check_length(node, ints.len())?;
            return Ok(Some(ints.to_vec()));
        }
        let Some(sizes) = self.sizes(node, i)? else { return Ok(None) };
        let fixed = sizes.iter().map(|s| s.constant()).collect::<Option<Vec<_>>>();
        fixed.map(Some).ok_or_else(|| unsupported(node, "by the batch"))
    }

    /// Returns the integers of input `i`, the batch among them.
    pub fn sizes(&mut self, node: &NodeProto, i: usize) -> Result<Option<Vec<Size>>, Stop> {
        let Some(tensor) = self.maybe(node, i)? else { return Ok(None) };
        match (tensor.kind.is_int(), tensor.known_values().map(|v| &**v)) {
            (true, Some(Values::Ints(sizes))) => {
                check_length(node, sizes.len())?;
                Ok(Some(sizes.clone()))
            }
            _ => Err(unsupported(node, "by computed integers")),
        }
    }

    /// Returns `tensor` with another shape; the values stay where they are.
    pub fn view(&self, tensor: &Tensor, target: &[Option<Size>]) -> Option<Tensor> {
        let (shape, batch) = tensor.reshaped(target)?;
        Some(Tensor { shape, batch, ..tensor.clone() })
    }

    fn flatten(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let rank = x.shape.len();
        let axis = match node.int("axis", 1) {
            axis if axis == rank as i64 => rank,
            axis => axis_of(node, axis, rank)?,
        };
        let side = |axes: std::ops::Range<usize>| {
            let has_batch = x.batch.is_some_and(|b| axes.contains(&b.axis));
            let n = x.shape[axes].iter().product::<usize>() as i64;
            Some(if has_batch { Size { fixed: 0, batches: n } } else { Size::fixed(n) })
        };
        let target = [side(0..axis), side(axis..rank)];
        self.view(&x, &target).ok_or_else(|| unsupported(node, "of the batch"))
    }

    fn reshape(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let Some(target) = self.sizes(node, 1)? else {
            return Err(malformed("Reshape without a shape"));
        };
        let zero_is_zero = self.opset >= 14 && node.int("allowzero", 0) != 0;
        let own = x.sizes();
        let size = |(axis, size): (usize, &Size)| match size.constant() {
            Some(-1) => Ok(None),
            Some(0) if !zero_is_zero => match own.get(axis) {
                Some(size) => Ok(Some(*size)),
                None => Err(malformed("Reshape copies the size of an axis that is missing")),
            },
            _ => Ok(Some(*size)),
        };
        let sizes = target.iter().enumerate().map(size).collect::<Result<Vec<_>, _>>()?;
        let to = || unsupported(node, &format!("of {own:?} to {target:?}"));
        self.view(&x, &sizes).ok_or_else(to)
    }

    fn unsqueeze(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let axes = self.integers(node, 1, "axes")?.unwrap_or_default();
        let rank = x.shape.len() + axes.len();
        if rank > RANK_MAX {
            return Err(unsupported(node, &format!("to {rank} axes")));
        }
        let mut tensor = x;
        for axis in distinct_axes(node, &axes, rank)? {
            tensor.shape.insert(axis.min(tensor.shape.len()), 1);
            tensor.batch =
                tensor.batch.map(|b| Batch { axis: b.axis + usize::from(axis <= b.axis), ..b });
        }
        Ok(tensor)
    }

    fn squeeze(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let rank = x.shape.len();
        let axes = match self.integers(node, 1, "axes")? {
            Some(axes) => distinct_axes(node, &axes, rank)?,
            None => (0..rank).filter(|&a| x.shape[a] == 1 && !x.is_batch(a)).collect(),
        };
        match axes.iter().find(|&&a| x.shape[a] != 1 || x.is_batch(a)) {
            Some(axis) => Err(unsupported(node, &format!("of axis {axis}"))),
            None => Ok(squeezed(x, &axes)),
        }
    }

    fn transpose_operator(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let rank = x.shape.len();
        let perm: Vec<usize> = match node.ints("perm") {
            None => (0..rank).rev().collect(),
            Some(perm) if perm.len() != rank => {
                let n = perm.len();
                return Err(malformed(&format!("Transpose of {rank} axes by {n} numbers")));
            }
            Some(perm) => perm.iter().map(|&a| axis_of(node, a, rank)).collect::<Result<_, _>>()?,
        };
        let mut sorted = perm.clone();
        sorted.sort_unstable();
        if sorted != (0..rank).collect::<Vec<_>>() {
            return Err(malformed(&format!("Transpose of {rank} axes by {perm:?}")));
        }
        self.transpose(&x, &perm)
    }

    /// Returns `x` with its axes in the order `perm`.
    pub fn transpose(&mut self, x: &Tensor, perm: &[usize]) -> Result<Tensor, Stop> {
        let result = self.pick(x, &x.permuted(perm))?;
        let rank = perm.len();
        let swaps_last = rank >= 2
            && (0..rank - 2).all(|a| perm[a] == a)
            && (perm[rank - 2], perm[rank - 1]) == (rank - 1, rank - 2);
        if let (true, None) = (swaps_last, x.known_values()) {
            let (from, to) = (self.computed(x)?, self.computed(&result)?);
            if from != to {
                let shape = [result.shape[rank - 2], result.shape[rank - 1]];
                self.transposed.insert(to, Transposed { from, shape });
            }
        }
        Ok(result)
    }

    fn expand(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let Some(target) = self.sizes(node, 1)? else {
            return Err(malformed("Expand without a shape"));
        };
        let shape = self.known_shape(node, &target)?;
        let (shape, batch) =
            broadcast(&[&x, &shape]).ok_or_else(|| unsupported(node, "to such a shape"))?;
        self.expand_to(&x, &shape, batch)
    }

    /// Returns a known tensor of the shape `target`, in which an axis may be that of the batch. It
    /// has no values.
    fn known_shape(&self, node: &NodeProto, target: &[Size]) -> Result<Tensor, Stop> {
        let mut batch = None;
        let mut shape = Vec::new();
        if target.len() > RANK_MAX {
            return Err(unsupported(node, &format!("to {} axes", target.len())));
        }
        for (axis, size) in target.iter().enumerate() {
            let n = if size.batches == 0 { size.fixed } else { size.batches };
            let is_legal = n >= 0 && (size.batches == 0 || (size.fixed == 0 && batch.is_none()));
            if !is_legal || n as usize > LIST_MAX {
                return Err(unsupported(node, &format!("to {target:?}")));
            }
            if size.batches != 0 {
                batch = Some(Batch { axis, outer: 1 });
            }
            shape.push(n as usize);
        }
        let values = Values::Floats(Vec::new());
        Ok(folded(Kind::Float, shape, batch, values))
    }

    /// Returns `x`, repeated to `shape`, to which it broadcasts.
    pub fn expand_to(
        &mut self,
        x: &Tensor,
        shape: &[usize],
        batch: Option<Batch>,
    ) -> Result<Tensor, Stop> {
        let whole = || Layout { shape: shape.to_vec(), batch, strides: strides(shape), first: 0 };
        let layout = match broadcast_layout(x, shape) {
            Some(layout) => Layout { batch, ..layout },
            None => whole(),
        };
        self.pick(x, &layout)
    }

    fn tile(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let Some(repeats) = self.sizes(node, 1)? else {
            return Err(malformed("Tile without repeats"));
        };
        if repeats.len() != x.shape.len() {
            return Err(malformed(&format!("Tile of {:?} by {repeats:?}", x.shape)));
        }

        let mut result = x;
        for (axis, repeat) in repeats.iter().enumerate() {
            let n = result.shape[axis];
            match (repeat.constant(), result.batch) {
                (Some(1), _) => {}
                (Some(times), _) if (1..=(LIST_MAX / n.max(1)) as i64).contains(&times) => {
                    if result.is_batch(axis) {
                        return Err(unsupported(node, "of the batch"));
                    }
                    let positions: Vec<usize> = (0..n * times as usize).map(|i| i % n).collect();
                    result = self.take(&result, axis, &positions)?;
                }
                (None, None) if n == 1 && *repeat == (Size { fixed: 0, batches: 1 }) => {
                    result.batch = Some(Batch { axis, outer: 1 });
                }
                _ => return Err(unsupported(node, "by such repeats")),
            }
        }
        Ok(result)
    }

    fn concat(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let mut all = Vec::new();
        for i in 0..node.input.len() {
            all.push(self.input(node, i)?);
        }
        let Some(first) = all.first().cloned() else { return Err(malformed("Concat of nothing")) };
        let axis = axis_of(node, node.int("axis", 1), first.shape.len())?;
        for tensor in &all {
            let fits = |a: usize| a == axis || tensor.shape[a] == first.shape[a];
            let rank = first.shape.len();
            if tensor.shape.len() != rank || !(0..rank).all(fits) || tensor.kind != first.kind {
                let (one, other) = (&first.shape, &tensor.shape);
                return Err(malformed(&format!("Concat of {other:?} beside {one:?}")));
            }
        }
        if all.iter().any(|t| t.batch != first.batch) || first.is_batch(axis) {
            return Err(unsupported(node, "of the batch"));
        }
        self.join(&all, axis)
    }

    /// Returns the tensors of `all` side by side on `axis`, which is not that of the batch. Their
    /// types and their other axes are equal.
    pub fn join(&mut self, all: &[Tensor], axis: usize) -> Result<Tensor, Stop> {
        let whole: Vec<Tensor> = all.iter().filter(|t| t.shape[axis] > 0).cloned().collect();
        let all = match whole.as_slice() {
            [] => return Ok(all[0].clone()),
            [one] => return Ok(one.clone()),
            several => several,
        };
        let Tensor { kind, batch, mut shape, .. } = all[0].clone();
        shape[axis] = all.iter().fold(0, |sum, t| sum.saturating_add(t.shape[axis]));
        if product(&shape).is_none() {
            return Err(limit(format!("a result of shape {shape:?}")));
        }
        let outer = shape[..axis].iter().product();
        let parts: Vec<usize> =
            all.iter().map(|t| t.shape[axis..].iter().product::<usize>()).collect();
        if all.iter().all(|t| t.known_values().is_some()) {
            let values = self.concat_known(all, &parts, outer)?;
            return Ok(folded(kind, shape, batch, values));
        }

        let inputs = all.iter().map(|t| self.computed(t)).collect::<Result<Vec<_>, _>>()?;
        let result = self.node(inputs, Op::Concat { outer, parts }, shape, batch)?;
        Ok(Tensor { kind, ..result })
    }

    fn concat_known(
        &mut self,
        all: &[Tensor],
        parts: &[usize],
        outer: usize,
    ) -> Result<Values, Stop> {
        // Counted before the list exists: a few nodes can double a list to any length.
        self.spend(parts.iter().sum::<usize>().saturating_mul(outer))?;
        let values: Vec<_> = all.iter().filter_map(|t| t.known_values()).map(Rc::clone).collect();
        let (mut floats, mut ints) = (Vec::new(), Vec::new());
        for row in 0..outer {
            for (values, &part) in values.iter().zip(parts) {
                let range = row * part..(row + 1) * part;
                match &**values {
                    Values::Floats(v) => floats.extend_from_slice(&v[range]),
                    Values::Ints(v) => ints.extend_from_slice(&v[range]),
                }
            }
        }
        let is_float = matches!(values.first().map(|v| &**v), Some(Values::Floats(_)));
        Ok(if is_float { Values::Floats(floats) } else { Values::Ints(ints) })
    }

    fn shape(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let sizes = self.input(node, 0)?.sizes();
        let rank = sizes.len() as i64;
        let clip = |at: i64| if at < 0 { at + rank } else { at }.clamp(0, rank) as usize;
        let (start, end) = (clip(node.int("start", 0)), clip(node.int("end", rank)));
        Ok(Tensor::ints(sizes.get(start..end).unwrap_or_default().to_vec()))
    }

    fn constant_of_shape(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let Some(target) = self.sizes(node, 0)? else {
            return Err(malformed("ConstantOfShape without a shape"));
        };
        let shape = self.known_shape(node, &target)?;
        let zero = Tensor::known(Kind::Float, vec![1], Values::Floats(vec![0.0]));
        let value = node.tensor("value").map_or(Ok(zero), |proto| self.stored_tensor(proto))?;
        let Some(values) = value.known_values().filter(|v| v.len() == 1) else {
            return Err(malformed("ConstantOfShape of several values"));
        };
        let width = product(&shape.shape).unwrap_or(usize::MAX);
        self.spend(width)?;
        Ok(folded(value.kind, shape.shape, shape.batch, values.pick(&vec![0; width])))
    }

    fn range(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        // The numbers of the samples.
        let whole = [Size::fixed(0), Size { fixed: 0, batches: 1 }, Size::fixed(1)];
        let mut bounds = Vec::new();
        for i in 0..3 {
            bounds.extend(self.sizes(node, i)?.unwrap_or_default());
        }
        if bounds == whole {
            let values = Values::Ints(vec![Size::SAMPLE]);
            return Ok(folded(Kind::Int64, vec![1], Some(Batch { axis: 0, outer: 1 }), values));
        }
        let mut bounds = Vec::new();
        for i in 0..3 {
            let fixed = self.integers(node, i, "")?.filter(|v| v.len() == 1);
            bounds.push(fixed.ok_or_else(|| malformed("Range of no integers"))?[0]);
        }
        let [start, end, delta] = [bounds[0], bounds[1], bounds[2]];
        let span = end.checked_sub(start).filter(|_| delta != 0);
        let n = span.and_then(|s| s.checked_add(delta - delta.signum())?.checked_div(delta));
        let n = n.map_or(usize::MAX, |n| n.max(0) as usize);
        if n > LIST_MAX {
            return Err(limit(format!("Range of {start}, {end}, {delta}: over {LIST_MAX} values")));
        }
        self.spend(n)?;
        let all = (0..n as i64).map(|i| Size::fixed(start + i * delta)).collect();
        Ok(Tensor { kind: self.input(node, 0)?.kind, ..Tensor::ints(all) })
    }

    /// Translates `Trilu`: the values above or below a diagonal stay, the others become 0.
    fn triangle(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let diagonal = self.integers(node, 1, "")?.map_or(Some(0), |k| k.first().copied());
        let rank = x.shape.len();
        let at_end = x.batch.is_some_and(|b| b.axis + 2 >= rank);
        let (Some(diagonal), false, true) = (diagonal, at_end, rank >= 2) else {
            return Err(unsupported(node, "of the batch"));
        };
        let (rows, columns) = (x.shape[rank - 2], x.shape[rank - 1]);
        let is_upper = node.int("upper", 1) != 0;
        let stays = |i: usize| {
            let offset = (i % columns) as i64 - (i / columns) as i64;
            if is_upper { offset >= diagonal } else { offset <= diagonal }
        };
        self.spend(rows * columns)?;
        let mask = (0..rows * columns).map(|i| Size::fixed(i64::from(stays(i)))).collect();
        let mask = Tensor::known(Kind::Bool, vec![rows, columns], Values::Ints(mask));
        let zero = if x.kind == Kind::Float {
            Values::Floats(vec![0.0])
        } else {
            Values::Ints(vec![Size::fixed(0)])
        };
        self.choose([mask, x.clone(), Tensor::known(x.kind, Vec::new(), zero)])
    }
}

/// Refuses a list of more numbers than there are axes, or results, before it is copied: each node
/// of a file may read the same one.
fn check_length(node: &NodeProto, n: usize) -> Result<(), Stop> {
    // `Pad` has two numbers for each axis, `Split` has one for each result.
    let most = (2 * RANK_MAX).max(node.output.len());
    if n <= most { Ok(()) } else { Err(unsupported(node, &format!("by {n} integers"))) }
}

/// Returns `x` without `axes`, which have one value each.
pub(crate) fn squeezed(x: Tensor, axes: &[usize]) -> Tensor {
    let kept = |axis: &usize| !axes.contains(axis);
    let shape = (0..x.shape.len()).filter(kept).map(|a| x.shape[a]).collect();
    let before = |axis: usize| axes.iter().filter(|&&a| a < axis).count();
    let batch = x.batch.map(|b| Batch { axis: b.axis - before(b.axis), ..b });
    Tensor { shape, batch, ..x }
}

/// Returns the axes that ONNX axes refer to, ascending. None of them may be there twice.
pub(crate) fn distinct_axes(
    node: &NodeProto,
    axes: &[i64],
    rank: usize,
) -> Result<Vec<usize>, Stop> {
    let axes = axes.iter().map(|&axis| axis_of(node, axis, rank));
    let mut axes = axes.collect::<Result<Vec<_>, _>>()?;
    axes.sort_unstable();
    match axes.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(malformed(&format!("{} of axis {} twice", node.op_type(), pair[0]))),
        None => Ok(axes),
    }
}

/// Returns the axis that an ONNX axis refers to, for a tensor with `rank` of them.
pub(crate) fn axis_of(node: &NodeProto, axis: i64, rank: usize) -> Result<usize, Stop> {
    let axis = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
    match usize::try_from(axis) {
        Ok(axis) if axis < rank => Ok(axis),
        _ => Err(malformed(&format!("{} of axis {axis} of {rank}", node.op_type()))),
    }
}

//! Translates the operators that make indices or write at them: `OneHot`, `NonZero`, `TopK`,
//! `ArgMax` and the scatters; and `CumSum`. None of them selects among the samples of a batch.

use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Fold, Op, Stop, folded, malformed, unsupported};
use crate::dense::graph::reductions::Reduction;
use crate::dense::graph::selections::{Positions, are_beside, dot, each_index};
use crate::dense::graph::shape_operators::{LIST_MAX, axis_of, squeezed};
use crate::dense::graph::tensor::{Batch, Kind, Size, Tensor, Values, strides};

impl Builder<'_> {
    /// Translates `OneHot`: a comparison of each index with all positions.
    pub fn one_hot(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (indices, values) = (self.input(node, 0)?, self.input(node, 2)?);
        let depth = self.integers(node, 1, "")?.filter(|depth| depth.len() == 1);
        let depth = depth.and_then(|depth| usize::try_from(depth[0]).ok());
        let Some(depth) = depth.filter(|n| (1..=LIST_MAX).contains(n)) else {
            return Err(unsupported(node, "of such a depth"));
        };
        self.keep(Kind::Int64, depth)?;
        let rank = indices.shape.len();
        let axis = axis_of(node, node.int("axis", -1), rank + 1)?;
        if values.shape != [2] || values.batch.is_some() || indices.kind == Kind::Bool {
            return Err(unsupported(node, "of such operands"));
        }

        let whole = match indices.kind {
            Kind::Float => self.map_to_int(&indices, Map::Trunc)?,
            _ => indices,
        };
        let mut places = self.map(&whole, Map::Wrap(depth as f32))?;
        places.shape.insert(axis, 1);
        places.batch =
            places.batch.map(|b| Batch { axis: b.axis + usize::from(b.axis >= axis), ..b });
        let all = Tensor::ints((0..depth as i64).map(Size::fixed).collect());
        let shape = [vec![depth], vec![1; rank - axis]].concat();
        let places = Tensor { kind: Kind::Int64, ..places };
        let hit = self.zip(Zip::Equal, [&places, &Tensor { shape, ..all }])?;
        let off = Tensor { shape: Vec::new(), ..self.take(&values, 0, &[0])? };
        let on = Tensor { shape: Vec::new(), ..self.take(&values, 0, &[1])? };
        self.choose([hit, on, off])
    }

    /// Translates `NonZero` of known values. Those that the batch repeats have the number of their
    /// sample as the first index.
    pub fn non_zero(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let is_first = Batch { axis: 0, outer: 1 };
        if x.batch.is_some_and(|b| b != is_first || x.shape[0] != 1) || x.shape.is_empty() {
            return Err(unsupported(node, "of the batch"));
        }
        let is_set = match x.known_values().map(|v| &**v) {
            Some(Values::Floats(v)) => v.iter().map(|x| Some(*x != 0.0)).collect(),
            Some(Values::Ints(v)) => v.iter().map(|s| Some(s.constant()? != 0)).collect(),
            None => None,
        };
        let is_set: Vec<bool> = is_set.ok_or_else(|| unsupported(node, "of computed values"))?;
        self.spend(x.width().saturating_mul(x.shape.len()))?;
        let all = each_index(&x.shape, <[usize]>::to_vec);
        let set: Vec<_> =
            all.iter().zip(is_set).filter(|(_, set)| *set).map(|(at, _)| at).collect();
        let rank = x.shape.len();
        let size = |axis: usize, at: usize| match x.is_batch(axis) {
            true => Size::SAMPLE,
            false => Size::fixed(at as i64),
        };
        let values = (0..rank).flat_map(|axis| set.iter().map(move |at| size(axis, at[axis])));
        let batch = x.batch.map(|b| Batch { axis: 1, ..b });
        let values = Values::Ints(values.collect());
        Ok(folded(Kind::Int64, vec![rank, set.len()], batch, values))
    }

    /// Translates `TopK`. Returns the values and their positions.
    pub fn top_k(&mut self, node: &NodeProto) -> Result<Vec<Tensor>, Stop> {
        let x = self.input(node, 0)?;
        let axis = axis_of(node, node.int("axis", -1), x.shape.len())?;
        let k = match node.maybe_int("k") {
            Some(k) => Some(k),
            None => self.integers(node, 1, "")?.filter(|k| k.len() == 1).map(|k| k[0]),
        };
        let k = k.and_then(|k| usize::try_from(k).ok()).filter(|k| (1..=x.shape[axis]).contains(k));
        let Some(k) = k else { return Err(unsupported(node, "of such a number")) };
        let largest = node.int("largest", 1) != 0;
        let order = self.order(node, &x, axis, k, largest)?;
        // Without a reader of the position, the best value needs none.
        if k == 1 && x.kind == Kind::Float {
            let fold = if largest { Fold::Max } else { Fold::Min };
            let best = match x.shape[axis] {
                1 => x,
                _ => self.reduce_axes(&x, &[axis], Reduction::Fold(fold))?,
            };
            return Ok(vec![best, order]);
        }
        let own = strides(&x.shape);
        let positions = self.strided(&order, own[axis])?;
        let theirs = strides(&order.shape);
        let pick = |at: &[usize]| [dot(at, &own) - at[axis] * own[axis], dot(at, &theirs)];
        let values = self.lookup(&x, &order.shape, x.batch, &positions, &pick)?;
        Ok(vec![values, order])
    }

    /// Returns the positions of the `k` best values on `axis`.
    fn order(
        &mut self,
        node: &NodeProto,
        x: &Tensor,
        axis: usize,
        k: usize,
        largest: bool,
    ) -> Result<Tensor, Stop> {
        if x.known_values().is_some() {
            return Err(unsupported(node, "of a constant"));
        }
        if x.is_batch(axis) || x.batch.is_none() || x.kind == Kind::Half {
            return Err(unsupported(node, "over the batch"));
        }
        let mut shape = x.shape.clone();
        shape[axis] = k;
        let (n, inner) = (x.shape[axis], x.shape[axis + 1..].iter().product());
        let id = self.computed(x)?;
        let order = self.node(vec![id], Op::Order { n, inner, k, largest }, shape, x.batch)?;
        Ok(Tensor { kind: Kind::Int64, ..order })
    }

    /// Translates `ArgMax` and `ArgMin`.
    pub fn arg(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let mut x = self.input(node, 0)?;
        let axis = axis_of(node, node.int("axis", 0), x.shape.len())?;
        let n = x.shape[axis];
        let from_end = node.int("select_last_index", 0) != 0;
        if n == 0 {
            return Err(malformed("the largest of no values"));
        }
        if from_end && !x.is_batch(axis) {
            x = self.take(&x, axis, &(0..n).rev().collect::<Vec<_>>())?;
        }
        let mut found = self.order(node, &x, axis, 1, node.op_type() == "ArgMax")?;
        if from_end {
            let last = Tensor::ints(vec![Size::fixed(n as i64 - 1)]);
            found = self.zip(Zip::Sub, [&Tensor { shape: Vec::new(), ..last }, &found])?;
        }
        let keep = node.int("keepdims", 1) != 0;
        Ok(if keep { found } else { squeezed(found, &[axis]) })
    }

    /// Translates `ScatterElements` and `ScatterND` at known indices: a selection among the values
    /// and the updates.
    pub fn scatter(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (x, indices, updates) =
            (self.input(node, 0)?, self.input(node, 1)?, self.input(node, 2)?);
        if !matches!(node.text("reduction"), "" | "none") || updates.kind != x.kind {
            return Err(unsupported(node, "with such a reduction"));
        }
        if indices.known_values().is_none() {
            return Err(unsupported(node, "at computed indices"));
        }
        let own = strides(&x.shape);
        let targets: Vec<usize> = if node.op_type() == "ScatterND" {
            let Some((&depth, rows)) = indices.shape.split_last() else {
                return Err(malformed("ScatterND by a scalar"));
            };
            let batch = match (x.batch, indices.batch) {
                (Some(b), None) if b.axis >= depth => {
                    Some(Batch { axis: b.axis + rows.len() - depth, ..b })
                }
                (Some(b), Some(own)) if b.axis < depth && own.axis < rows.len() => Some(own),
                (None, None) => None,
                _ => return Err(unsupported(node, "of the batch")),
            };
            let rest = x.shape.get(depth..).unwrap_or_default();
            if depth > x.shape.len()
                || updates.shape != [rows, rest].concat()
                || updates.batch != batch
            {
                return Err(unsupported(node, "of such updates"));
            }
            let Positions::Known(firsts) = self.row_positions(node, &x, &indices, 0..depth)? else {
                return Err(unsupported(node, "at computed indices"));
            };
            let inner: usize = rest.iter().product();
            self.spend(updates.width())?;
            firsts.iter().flat_map(|&first| first..first + inner).collect()
        } else {
            let axis = axis_of(node, node.int("axis", 0), x.shape.len())?;
            let fits = updates.shape == indices.shape && updates.batch == x.batch;
            if !fits || !are_beside(&x, &indices, axis) {
                return Err(unsupported(node, "of such updates"));
            }
            let Some(Values::Ints(sizes)) = indices.known_values().map(|v| &**v) else {
                return Err(malformed("indices that are no integers"));
            };
            let positions = self.known_positions(node, sizes, x.shape[axis])?;
            let theirs = strides(&indices.shape);
            self.spend(updates.width())?;
            each_index(&indices.shape, |at| {
                dot(at, &own) - at[axis] * own[axis] + positions[dot(at, &theirs)] * own[axis]
            })
        };

        self.spend(x.width())?;
        let mut picks: Vec<u32> = (0..x.width() as u32).collect();
        for (update, target) in targets.into_iter().enumerate() {
            picks[target] = (x.width() + update) as u32;
        }
        let line = |t: &Tensor| {
            let batch = t.batch.map(|_| Batch { axis: 0, outer: 1 });
            Tensor { shape: vec![1, t.width()], batch, ..t.clone() }
        };
        let both = self.join(&[line(&x), line(&updates)], 1)?;
        self.pick_all(&both, &x.shape, x.batch, picks)
    }

    /// Translates `CumSum`: sums in the order of the values. A product by a triangle of ones would
    /// multiply an infinity by 0.
    pub fn running_sum(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let axis = self.integers(node, 1, "")?.filter(|axis| axis.len() == 1);
        let axis = axis.ok_or_else(|| malformed("CumSum without an axis"))?[0];
        let axis = axis_of(node, axis, x.shape.len())?;
        let n = x.shape[axis];
        if x.is_batch(axis) || n == 0 {
            return Err(unsupported(node, "of such an operand"));
        }
        let (exclusive, reverse) = (node.int("exclusive", 0) != 0, node.int("reverse", 0) != 0);
        let x = if x.known_values().is_some() { x } else { self.summable(&x, n)? };
        let place = |i: usize| if reverse { n - 1 - i } else { i };
        let first = self.take(&x, axis, &[place(0)])?;
        let mut sums = Vec::new();
        if exclusive {
            let zero = if x.kind == Kind::Float {
                Values::Floats(vec![0.0; first.width()])
            } else {
                Values::Ints(vec![Size::fixed(0); first.width()])
            };
            self.spend(first.width())?;
            sums.push(folded(x.kind, first.shape.clone(), x.batch, zero));
        }
        sums.push(first);
        while sums.len() < n {
            let next = self.take(&x, axis, &[place(sums.len() - usize::from(exclusive))])?;
            let sum = self.zip(Zip::Add, [&sums[sums.len() - 1], &next])?;
            sums.push(sum);
        }
        sums.truncate(n);
        if reverse {
            sums.reverse();
        }
        self.join(&sums, axis)
    }
}

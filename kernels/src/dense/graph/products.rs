//! Translates the matrix products: `Gemm`, `MatMul` and `Einsum`. A product by weights becomes a
//! packed matrix. No product lets one sample meet another.

use crate::dense::graph::functions::Zip;
use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Op, Stop, malformed, unsupported};
use crate::dense::graph::shape_operators::squeezed;
use crate::dense::graph::tensor::{Batch, Kind, Size, Tensor, Values, broadcast, product};
use crate::dense::weights::Weights;

impl Builder<'_> {
    /// Translates `Gemm`.
    pub fn gemm(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (mut x, mut w) = (self.input(node, 0)?, self.input(node, 1)?);
        if [x.shape.len(), w.shape.len()] != [2; 2] || [x.kind, w.kind] != [Kind::Float; 2] {
            return Err(unsupported(node, "of such operands"));
        }
        if node.int("transA", 0) != 0 {
            x = self.transpose(&x, &[1, 0])?;
        }
        if node.int("transB", 0) != 0 {
            w = self.transpose(&w, &[1, 0])?;
        }
        let (alpha, beta) = (node.float("alpha", 1.0), node.float("beta", 1.0));
        let bias = self.maybe(node, 2)?;
        if let Some(result) = self.gemm_by_weights([&x, &w], bias.as_ref(), [alpha, beta])? {
            return Ok(result);
        }

        let named = |stop| in_operator(node, stop);
        let mut y = self.matmul(&x, &w).map_err(named)?;
        for (factor, scaled) in [(alpha, true), (beta, false)] {
            let factor = Tensor::known(Kind::Float, Vec::new(), Values::Floats(vec![factor]));
            if scaled && alpha != 1.0 {
                y = self.zip(Zip::Mul, [&y, &factor])?;
            }
            if let (false, Some(bias)) = (scaled, &bias) {
                let bias = self.zip(Zip::Mul, [bias, &factor])?;
                y = self.zip(Zip::Add, [&y, &bias]).map_err(named)?;
            }
        }
        Ok(y)
    }

    /// Translates a `Gemm` by known weights and bias to one matrix; `None` for another one.
    fn gemm_by_weights(
        &mut self,
        [x, w]: [&Tensor; 2],
        bias: Option<&Tensor>,
        [alpha, beta]: [f32; 2],
    ) -> Result<Option<Tensor>, Stop> {
        let is_known = |t: &Tensor| t.known_values().is_some() && t.batch.is_none();
        if !is_known(w) || is_known(x) || x.is_batch(1) || bias.is_some_and(|b| !is_known(b)) {
            return Ok(None);
        }
        let floats = |t: &Tensor| t.known_values().and_then(|v| v.floats()).unwrap_or_default();
        let (weights, [k, n]) = (floats(w), [w.shape[0], w.shape[1]]);
        let bias = bias.map_or(vec![0.0], floats);
        if k != x.shape[1] || n == 0 || !alpha.is_finite() || !beta.is_finite() {
            return Err(malformed(&format!(
                "Gemm of width {} by weights {:?}",
                x.shape[1], w.shape
            )));
        }
        if bias.len() != 1 && bias.len() != n {
            return Ok(None);
        }

        let at = |i: usize, j: usize| alpha * weights[i * n + j];
        // A scaled weight of f16 is no f16 any more.
        let form = if alpha == 1.0 { w.weights } else { Weights::F32 };
        let matrix = self.matrix(form, [k, n], &at, |j| beta * bias[j % bias.len()])?;
        let rows = x.shape[0];
        let id = self.computed(x)?;
        self.node(vec![id], Op::Matrix { rows, matrix }, vec![rows, n], x.batch).map(Some)
    }

    pub fn matmul_operator(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (a, b) = (self.input(node, 0)?, self.input(node, 1)?);
        if [a.kind, b.kind] != [Kind::Float; 2] {
            return Err(unsupported(node, &format!("of types {:?} and {:?}", a.kind, b.kind)));
        }
        self.matmul(&a, &b).map_err(|stop| in_operator(node, stop))
    }

    /// Adds the product of `a` `[.., m, k]` and `b` `[.., k, n]`. A vector stands for a row, or for
    /// a column.
    pub fn matmul(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor, Stop> {
        if a.shape.is_empty() || b.shape.is_empty() {
            return Err(malformed("MatMul of a scalar"));
        }
        let mut sides = [a, b].map(Tensor::clone);
        let is_vector = [a.shape.len() == 1, b.shape.len() == 1];
        let rank = a.shape.len().max(b.shape.len()).max(2);
        for (i, side) in sides.iter_mut().enumerate() {
            if is_vector[i] {
                side.shape.insert(i, 1);
                side.batch = side.batch.map(|b| Batch { axis: b.axis + 1 - i, ..b });
            }
            let shift = rank - side.shape.len();
            side.shape.splice(0..0, std::iter::repeat_n(1, shift));
            side.batch = side.batch.map(|b| Batch { axis: b.axis + shift, ..b });
        }

        let batches = sides.each_ref().map(|t| t.batch);
        let sides = sides.map(|t| t.without_batch().unwrap_or(t));
        let [a, b] = &sides;
        let (k, other) = (a.shape[rank - 1], b.shape[rank - 2]);
        if k != other {
            return Err(malformed(&format!("MatMul of {:?} by {:?}", a.shape, b.shape)));
        }
        let meet = match batches {
            [Some(a), _] if a.axis == rank - 1 => true,
            [_, Some(b)] if b.axis == rank - 2 => true,
            [Some(a), Some(b)] => a.axis != b.axis,
            _ => false,
        };
        if meet {
            return Err(Stop::Unsupported("of samples with each other".to_owned()));
        }

        let axes: Vec<usize> = (0..2).filter(|&i| is_vector[i]).map(|i| rank - 2 + i).collect();
        if a.known_values().is_some() && b.known_values().is_some() {
            let product = self.known_product(a, b)?;
            return Ok(squeezed(Tensor { batch: batches[0].or(batches[1]), ..product }, &axes));
        }
        let is_known = |t: &Tensor| t.known_values().is_some() && t.batch.is_none();
        let product = if is_known(b) {
            self.by_weights(a, b)?
        } else if is_known(a) {
            // a b = (b' a')'
            let swap = swapped(rank);
            let (a, b) = (self.transpose(a, &swap)?, self.transpose(b, &swap)?);
            let product = self.by_weights(&b, &a)?;
            self.transpose(&product, &swap)?
        } else {
            self.by_computed(a, b)?
        };
        Ok(squeezed(product, &axes))
    }

    /// Returns the product of two known tensors of the same rank, each value in the order of a run.
    fn known_product(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor, Stop> {
        let rank = a.shape.len();
        let lead = |t: &Tensor| Tensor { shape: t.shape[..rank - 2].to_vec(), ..t.clone() };
        let form = || Stop::Unsupported(format!("of {:?} and {:?}", a.sizes(), b.sizes()));
        let is_plain = a.batch.is_none() && b.batch.is_none();
        let lead = broadcast(&[&lead(a), &lead(b)]).filter(|_| is_plain).ok_or_else(form)?.0;
        let (m, k, n) = (a.shape[rank - 2], a.shape[rank - 1], b.shape[rank - 1]);
        let shape = [lead.as_slice(), &[m, n]].concat();
        // A product of no terms still has values.
        let terms = product(&shape).and_then(|all| all.checked_mul(k.max(1)));
        self.pack(terms.unwrap_or(usize::MAX))?;
        let a = self.expand_to(a, &[lead.as_slice(), &[m, k]].concat(), None)?;
        let b = self.expand_to(b, &[lead.as_slice(), &[k, n]].concat(), None)?;
        let floats = |t: &Tensor| t.known_values().and_then(|v| v.floats());
        let (a, b) = floats(&a).zip(floats(&b)).ok_or_else(form)?;
        let value = |i: usize| {
            let (row, group) = (i / n, i / (m * n));
            let terms = (0..k).map(|t| (a[row * k + t], b[(group * k + t) * n + i % n]));
            terms.fold(0.0f32, |sum, (x, y)| x.mul_add(y, sum))
        };
        let values = (0..shape.iter().product()).map(value).collect();
        Ok(Tensor::known(Kind::Float, shape, Values::Floats(values)))
    }

    /// Adds the product of `a` and known weights `b` of the same rank.
    fn by_weights(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor, Stop> {
        let rank = a.shape.len();
        let groups: Vec<usize> = (0..rank - 2).filter(|&axis| b.shape[axis] != 1).collect();
        if groups.is_empty() {
            return self.by_matrix(a, b, 1);
        }
        if groups.iter().any(|&g| a.is_batch(g)) {
            return Err(Stop::Unsupported("of the batch".to_owned()));
        }

        // The groups become the first axes, then they move to their places.
        let sizes: Vec<usize> = groups.iter().map(|&g| b.shape[g]).collect();
        let count: usize = sizes.iter().product();
        let product = if groups.iter().all(|&g| a.shape[g] == 1) {
            let wide = self.by_matrix(a, b, count)?;
            let mut shape = wide.shape.clone();
            shape.splice(rank - 1..rank, sizes.iter().copied().chain([b.shape[rank - 1]]));
            let wide = Tensor { shape, ..wide };
            let middle = rank - 1..rank - 1 + groups.len();
            let perm: Vec<usize> = middle.clone().chain(0..rank - 1).chain([middle.end]).collect();
            self.transpose(&wide, &perm)?
        } else {
            self.by_each_group(a, b, &groups)?
        };

        let at = |axis: usize| groups.iter().position(|&g| g == axis);
        let perm: Vec<usize> =
            (0..rank).map(|axis| at(axis).unwrap_or(axis + groups.len())).collect();
        let ones: Vec<usize> = groups.iter().map(|g| g + groups.len()).collect();
        let product = squeezed(product, &ones);
        let dropped = |axis: usize| ones.iter().filter(|&&one| one < axis).count();
        let perm: Vec<usize> = perm.into_iter().map(|axis| axis - dropped(axis)).collect();
        self.transpose(&product, &perm)
    }

    /// Multiplies each group of `a` by its own weights. Returns the products side by side, with
    /// the sizes of the groups as the first axes.
    fn by_each_group(&mut self, a: &Tensor, b: &Tensor, groups: &[usize]) -> Result<Tensor, Stop> {
        let sizes: Vec<usize> = groups.iter().map(|&g| b.shape[g]).collect();
        let mut products = Vec::new();
        for number in 0..sizes.iter().product::<usize>() {
            let (mut left, mut right, mut rest) = (a.clone(), b.clone(), number);
            for (&axis, &n) in groups.iter().zip(&sizes).rev() {
                if a.shape[axis] != 1 && a.shape[axis] != n {
                    return Err(malformed(&format!("MatMul of {:?} by {:?}", a.shape, b.shape)));
                }
                let of_a = if a.shape[axis] == 1 { 0 } else { rest % n };
                left = self.take(&left, axis, &[of_a])?;
                right = self.take(&right, axis, &[rest % n])?;
                rest /= n;
            }
            products.push(self.by_matrix(&left, &right, 1)?);
        }

        let Some(first) = products.first().cloned() else {
            return Err(malformed("MatMul of no groups"));
        };
        let parts = vec![first.width(); products.len()];
        let inputs = products.iter().map(|p| self.computed(p)).collect::<Result<Vec<_>, _>>()?;
        let shape = sizes.iter().chain(&first.shape).copied().collect();
        let batch = first.batch.map(|b| Batch { axis: b.axis + sizes.len(), ..b });
        self.node(inputs, Op::Concat { outer: 1, parts }, shape, batch)
    }

    /// Adds the product of `a` and `count` matrices, whose columns lie side by side in the result.
    fn by_matrix(&mut self, a: &Tensor, b: &Tensor, count: usize) -> Result<Tensor, Stop> {
        let rank = b.shape.len();
        let (k, n) = (b.shape[rank - 2], b.shape[rank - 1]);
        let Some(weights) = b.known_values().and_then(|v| v.floats()) else {
            return Err(malformed("weights that are no floats"));
        };
        let at = |i: usize, j: usize| weights[(j / n * k + i) * n + j % n];
        let matrix = self.matrix(b.weights, [k, count * n], &at, |_| 0.0)?;

        let mut shape = a.shape.clone();
        shape[rank - 1] = count * n;
        let rows = shape[..rank - 1].iter().product();
        let id = self.computed(a)?;
        self.node(vec![id], Op::Matrix { rows, matrix }, shape, a.batch)
    }

    /// Adds the products of two computed tensors of the same rank.
    fn by_computed(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor, Stop> {
        let rank = a.shape.len();
        let lead = |t: &Tensor| Tensor { shape: t.shape[..rank - 2].to_vec(), ..t.clone() };
        let in_lead = |t: &Tensor| t.batch.is_some_and(|b| b.axis < rank - 2);
        if !in_lead(a) || !in_lead(b) {
            return Err(Stop::Unsupported("of samples with each other".to_owned()));
        }
        let Some((lead, batch)) = broadcast(&[&lead(a), &lead(b)]) else {
            return Err(Stop::Unsupported(format!("of {:?} and {:?}", a.sizes(), b.sizes())));
        };

        let (m, k, n) = (a.shape[rank - 2], a.shape[rank - 1], b.shape[rank - 1]);
        let shape_of = |rows: usize, columns: usize| {
            lead.iter().copied().chain([rows, columns]).collect::<Vec<_>>()
        };
        let a = self.expand_to(a, &shape_of(m, k), batch)?;
        let b = self.expand_to(b, &shape_of(k, n), batch)?;
        let (x, y) = (self.computed(&a)?, self.computed(&b)?);
        // A view may have changed the shape since the transposition.
        let swapped = self.transposed.get(&y).filter(|t| t.shape == [k, n]);
        let (y, transposed) = swapped.map_or((y, false), |t| (t.from, true));
        let count = lead.iter().product();
        let op = Op::Products { count, m, k, n, transposed };
        self.node(vec![x, y], op, shape_of(m, n), batch)
    }

    /// Translates `Einsum` of one or two operands to sums, transpositions and one product.
    pub fn einsum(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let equation: String = node.text("equation").split_whitespace().collect();
        let Some((inputs, out)) = equation.split_once("->") else {
            return Err(unsupported(node, &format!("`{equation}`")));
        };
        if inputs.split(',').nth(2).is_some() {
            return Err(unsupported(node, "of over two operands"));
        }
        let named = |stop| in_operator(node, stop);
        let mut sides = Vec::new();
        for (i, labels) in inputs.split(',').enumerate() {
            let tensor = self.input(node, i)?;
            sides.push(Labelled::new(tensor, labels).ok_or_else(|| unsupported(node, &equation))?);
        }
        for i in 0..sides.len() {
            let elsewhere = |label: &char| {
                out.contains(*label)
                    || (0..sides.len()).any(|j| j != i && sides[j].labels.contains(label))
            };
            let summed: Vec<usize> =
                (0..sides[i].labels.len()).filter(|&a| !elsewhere(&sides[i].labels[a])).collect();
            if !summed.is_empty() {
                let tensor = self.sum_over(&sides[i].tensor, &summed).map_err(named)?;
                let labels = sides[i].labels.iter().filter(|l| elsewhere(l)).copied().collect();
                sides[i] = Labelled { tensor, labels };
            }
        }

        let result = match sides.as_slice() {
            [one] => one.clone(),
            [left, right] => self.contract(left, right, out).map_err(named)?,
            _ => return Err(unsupported(node, "of no operands")),
        };
        let perm: Option<Vec<usize>> = out.chars().map(|l| result.axis(l)).collect();
        let is_whole = |p: &Vec<usize>| (0..result.labels.len()).all(|axis| p.contains(&axis));
        let perm = perm.filter(|p| p.len() == result.labels.len() && is_whole(p));
        let Some(perm) = perm else { return Err(unsupported(node, &equation)) };
        self.transpose(&result.tensor, &perm)
    }

    /// Multiplies two tensors and sums over the labels that `out` lacks.
    fn contract(&mut self, left: &Labelled, right: &Labelled, out: &str) -> Result<Labelled, Stop> {
        let in_both = |l: &&char| right.labels.contains(l);
        let shared = |summed: bool| {
            let labels = left.labels.iter().filter(in_both);
            labels.filter(move |l| out.contains(**l) != summed).copied().collect::<Vec<_>>()
        };
        let (each, summed) = (shared(false), shared(true));
        let rows: Vec<char> = left.labels.iter().filter(|l| !in_both(l)).copied().collect();
        let columns: Vec<char> =
            right.labels.iter().filter(|l| !left.labels.contains(l)).copied().collect();

        let a = self.grouped(left, [&each, &rows, &summed])?;
        let b = self.grouped(right, [&each, &summed, &columns])?;
        let product = self.matmul(&a, &b)?;
        let size = |l: &char| {
            let side = if left.labels.contains(l) { left } else { right };
            side.axis(*l).map(|a| side.tensor.sizes()[a])
        };
        let labels: Vec<char> = each.iter().chain(&rows).chain(&columns).copied().collect();
        // The sizes of both sides: one of them may lack the batch.
        let target: Vec<Option<Size>> = labels
            .iter()
            .map(|l| {
                let other = right.axis(*l).map(|a| right.tensor.sizes()[a]);
                other.filter(|s| s.batches != 0).or_else(|| size(l))
            })
            .collect();
        let tensor = self.view(&product, &target);
        let tensor = tensor.ok_or_else(|| Stop::Unsupported("of the batch".to_owned()))?;
        Ok(Labelled { tensor, labels })
    }

    /// Returns the tensor of `side` with its axes in the order of `groups`. The second and the
    /// third group are one axis each.
    fn grouped(&mut self, side: &Labelled, groups: [&[char]; 3]) -> Result<Tensor, Stop> {
        let perm: Vec<usize> = groups.concat().iter().filter_map(|&l| side.axis(l)).collect();
        let tensor = self.transpose(&side.tensor, &perm)?;
        let sizes = tensor.sizes();
        let merged = |range: std::ops::Range<usize>| {
            let n = sizes[range.clone()].iter().map(|s| s.fixed.max(s.batches)).product();
            let has_batch = sizes[range].iter().any(|s| s.batches != 0);
            Some(if has_batch { Size { fixed: 0, batches: n } } else { Size::fixed(n) })
        };
        let first = groups[0].len();
        let second = first + groups[1].len();
        let mut target: Vec<Option<Size>> = sizes[..first].iter().copied().map(Some).collect();
        target.extend([merged(first..second), merged(second..sizes.len())]);
        self.view(&tensor, &target).ok_or_else(|| Stop::Unsupported("of the batch".to_owned()))
    }
}

/// A tensor whose axes have the labels of an `Einsum`.
#[derive(Clone)]
struct Labelled {
    tensor: Tensor,
    labels: Vec<char>,
}

impl Labelled {
    /// Returns `None` unless each axis has a label of its own.
    fn new(tensor: Tensor, labels: &str) -> Option<Self> {
        let labels: Vec<char> = labels.chars().collect();
        let is_new = |(i, l): (usize, &char)| l.is_alphabetic() && !labels[..i].contains(l);
        let is_plain = labels.len() == tensor.shape.len() && tensor.kind == Kind::Float;
        (is_plain && labels.iter().enumerate().all(is_new)).then_some(Self { tensor, labels })
    }

    fn axis(&self, label: char) -> Option<usize> {
        self.labels.iter().position(|&l| l == label)
    }
}

/// Returns the order of `rank` axes with the last two swapped.
pub(crate) fn swapped(rank: usize) -> Vec<usize> {
    (0..rank - 2).chain([rank - 1, rank - 2]).collect()
}

/// Returns the stop with the name of the operator.
pub(crate) fn in_operator(node: &NodeProto, stop: Stop) -> Stop {
    match stop {
        Stop::Unsupported(form) => unsupported(node, &form),
        refused @ Stop::Refused(_) => refused,
    }
}

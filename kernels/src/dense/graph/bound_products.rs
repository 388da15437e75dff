//! The rules of products, windows and recurrent operators: the shapes of their results, and the
//! multiply-adds. This file runs nothing.

use crate::dense::graph::bound_rules::merge;
use crate::dense::graph::bounds::{Bound, Bounds, Dim, elements, for_a_sample};
use crate::dense::graph::folding::zip_sizes;
use crate::dense::graph::functions::Zip;
use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::stop::{Stop, malformed, unsupported};
use crate::dense::graph::tensor::{RANK_MAX, Size};

/// How a window moves along an axis.
struct Window {
    size: i64,
    stride: i64,
    dilation: i64,
    pads: i64,
}

/// An axis that an equation of `Einsum` names.
struct Label {
    name: char,
    dim: Dim,
    /// Whether one operand has it, and only once.
    is_once: bool,
}

/// The name of the last axis that `...` stands for. The axes before it have the names after it.
const DOTS: u32 = 0xe000;

impl Bounds {
    pub fn gemm_bound(&mut self, node: &NodeProto) -> Result<Bound, Stop> {
        let (a, b) = (self.input(node, 0)?.dims, self.input(node, 1)?.dims);
        let ([a0, a1], [b0, b1]) = (&a[..], &b[..]) else {
            return Err(unsupported(node, "of such operands"));
        };
        let (m, k) = if node.int("transA", 0) != 0 { (a1, a0) } else { (a0, a1) };
        let n = if node.int("transB", 0) != 0 { b0 } else { b1 };
        self.count_product(node, &[*m, *k, *n])?;
        Ok(Bound::of(vec![*m, *n]))
    }

    pub fn matmul_bound(&mut self, node: &NodeProto) -> Result<Bound, Stop> {
        let (mut a, mut b) = (self.input(node, 0)?.dims, self.input(node, 1)?.dims);
        let is_vector = [a.len() == 1, b.len() == 1];
        if is_vector[0] {
            a.insert(0, Dim::fixed(1));
        }
        if is_vector[1] {
            b.push(Dim::fixed(1));
        }
        let (Some((n, b)), Some((k, a))) = (b.split_last(), a.split_last()) else {
            return Err(malformed("MatMul of a scalar"));
        };
        let (Some((m, a)), Some((_, b))) = (a.split_last(), b.split_last()) else {
            return Err(malformed("MatMul of a scalar"));
        };
        let mut dims = merge(a, b);
        self.count_product(node, &[&dims[..], &[*m, *k, *n]].concat())?;
        dims.extend((!is_vector[0]).then_some(m));
        dims.extend((!is_vector[1]).then_some(n));
        Ok(Bound::of(dims))
    }

    /// Counts the multiply-adds of a product over all of `dims`.
    fn count_product(&mut self, node: &NodeProto, dims: &[Dim]) -> Result<(), Stop> {
        let count = |dims: &[Dim]| {
            let each = dims.iter().map(|dim| for_a_sample(dim.most));
            each.fold(1u64, u64::saturating_mul)
        };
        if dims.iter().any(|dim| dim.most.batches != 0) && elements(dims).is_none() {
            return Err(unsupported(node, "of samples with each other"));
        }
        self.multiply(count(dims));
        Ok(())
    }

    pub fn einsum_bound(&mut self, node: &NodeProto) -> Result<Bound, Stop> {
        let equation: String = node.text("equation").split_whitespace().collect();
        let form = || unsupported(node, &format!("`{equation}`"));
        let (inputs, out) = match equation.split_once("->") {
            Some((inputs, out)) => (inputs, Some(out)),
            None => (equation.as_str(), None),
        };
        let mut labels: Vec<Label> = Vec::new();
        let mut repeats = false;
        for (i, term) in inputs.split(',').enumerate() {
            let dims = self.input(node, i)?.dims;
            let names = names_of(term, dims.len()).ok_or_else(form)?;
            // rten may copy an operand in another order of its axes.
            self.spend(node, &dims)?;
            for (name, dim) in names.into_iter().zip(dims) {
                let Some(at) = labels.iter().position(|label| label.name == name) else {
                    labels.push(Label { name, dim, is_once: true });
                    continue;
                };
                let known = labels[at].dim;
                repeats |= known.most != dim.most || !known.exact || !dim.exact;
                labels[at] = Label { name, dim: known.broadcast(dim), is_once: false };
            }
            if labels.len() > RANK_MAX {
                return Err(form());
            }
        }

        let all: Vec<Dim> = labels.iter().map(|label| label.dim).collect();
        self.count_product(node, &all)?;
        // rten makes a result for each further operand. It copies both operands of a product of
        // which one has an axis of one value that the other has longer.
        let operands = inputs.split(',').count();
        let copies = if repeats { 2 * (operands - 1) } else { 0 };
        for _ in 0..operands.saturating_sub(2) + copies {
            self.spend(node, &all)?;
        }
        let out = result_names(out, &labels).ok_or_else(form)?;
        let dim = |name| labels.iter().find(|label| label.name == name).map(|label| label.dim);
        let dims: Option<Vec<Dim>> = out.into_iter().map(dim).collect();
        Ok(Bound::of(dims.ok_or_else(form)?))
    }

    /// Returns the bound of `Conv` and of a pooling.
    pub fn windows(&mut self, node: &NodeProto) -> Result<Bound, Stop> {
        let x = self.input(node, 0)?.dims;
        let w = if node.op_type() == "Conv" { self.input(node, 1)?.dims } else { Vec::new() };
        let rank = x.len().saturating_sub(2);
        let weights: Option<Vec<i64>> = w.iter().skip(2).map(|dim| dim.constant()).collect();
        let sizes = match node.ints("kernel_shape") {
            Some(sizes) if w.is_empty() => sizes.to_vec(),
            _ => weights.unwrap_or_default(),
        };
        if rank == 0 || sizes.len() != rank || (node.op_type() == "Conv" && w.len() != x.len()) {
            return Err(unsupported(node, "of such operands"));
        }

        let list = |name: &str, i: usize, default: i64| {
            node.ints(name).map_or(default, |list| list.get(i).copied().unwrap_or(default))
        };
        let mut dims = vec![x[0], if w.is_empty() { x[1] } else { w[0] }];
        for (i, &size) in sizes.iter().enumerate() {
            let pads = list("pads", i, 0).saturating_add(list("pads", rank + i, 0));
            let (stride, dilation) = (list("strides", i, 1), list("dilations", i, 1));
            let window = Window { size, stride, dilation, pads };
            let dim = window.over(x[2 + i], node).ok_or_else(|| unsupported(node, "of such pads"));
            dims.push(dim?);
        }
        let inner = w.get(1).map_or(Dim::fixed(1), |channels| *channels);
        let size = sizes.iter().map(|&n| Dim::fixed(usize::try_from(n).unwrap_or(usize::MAX)));
        self.count_product(
            node,
            &dims.iter().copied().chain([inner]).chain(size).collect::<Vec<_>>(),
        )?;
        Ok(Bound::of(dims))
    }

    /// Returns the bounds of `GRU` and `LSTM`: all states, the last ones and the last cells.
    pub fn recurrent(&mut self, node: &NodeProto) -> Result<Vec<Bound>, Stop> {
        let (x, w, r) =
            (self.input(node, 0)?.dims, self.input(node, 1)?.dims, self.input(node, 2)?.dims);
        let ([steps, batch, width], [directions, gates, _], [_, _, hidden]) =
            (&x[..], &w[..], &r[..])
        else {
            return Err(unsupported(node, "of such operands"));
        };
        if node.int("layout", 0) != 0 {
            return Err(unsupported(node, "with the batch first"));
        }
        for k in [width, hidden] {
            self.count_product(node, &[*steps, *batch, *directions, *gates, *k])?;
        }
        self.spend(node, &[*steps, *batch, *directions, *gates])?;
        let last = Bound::of(vec![*directions, *batch, *hidden]);
        let all = Bound::of(vec![*steps, *directions, *batch, *hidden]);
        Ok(vec![all, last.clone(), last])
    }

    /// Returns the bound of `Attention` on `[batch, heads, length, width]`, without a cache.
    pub fn attention_bound(&mut self, node: &NodeProto) -> Result<Bound, Stop> {
        let all = [self.input(node, 0)?, self.input(node, 1)?, self.input(node, 2)?];
        let [q, k, v] = all.map(|bound| bound.dims);
        let ([b, heads, rows, width], [_, _, keys, _], [_, _, _, columns]) =
            (&q[..], &k[..], &v[..])
        else {
            return Err(unsupported(node, "of such operands"));
        };
        if node.input.iter().skip(4).any(|name| !name.is_empty()) {
            return Err(unsupported(node, "with a cache"));
        }
        for k in [width, columns] {
            self.count_product(node, &[*b, *heads, *rows, *keys, *k])?;
        }
        // The scores, twice, and copies of keys and values for each head.
        for _ in 0..2 {
            self.spend(node, &[*b, *heads, *rows, *keys])?;
            self.spend(node, &[*b, *heads, *keys, columns.broadcast(*width)])?;
        }
        Ok(Bound::of(vec![*b, *heads, *rows, *columns]))
    }
}

/// Returns the names of the axes of a `term` of `Einsum` with `rank` axes; `None` for another form.
fn names_of(term: &str, rank: usize) -> Option<Vec<char>> {
    let (before, after) = term.split_once("...").unwrap_or((term, ""));
    let letters = [before, after].concat();
    let dots = rank.checked_sub(letters.chars().count())?;
    if !letters.chars().all(char::is_alphabetic) || (dots > 0 && !term.contains("...")) {
        return None;
    }
    let dots = (0..dots as u32).rev().filter_map(|n| char::from_u32(DOTS + n));
    Some(before.chars().chain(dots).chain(after.chars()).collect())
}

/// Returns the names of the axes of a result. Without `out` they are those of `...`, and then the
/// letters that are used once, in their order.
fn result_names(out: Option<&str>, labels: &[Label]) -> Option<Vec<char>> {
    let is_dot = |label: &&Label| !label.name.is_alphabetic();
    let dots = labels.iter().filter(is_dot).count();
    if let Some(out) = out {
        let letters = out.chars().filter(|c| *c != '.').count();
        return names_of(out, if out.contains("...") { letters + dots } else { letters });
    }
    let once = labels.iter().filter(|label| !is_dot(label) && label.is_once);
    let mut once: Vec<char> = once.map(|label| label.name).collect();
    once.sort_unstable();
    Some([names_of("...", dots)?, once].concat())
}

impl Window {
    /// Returns the number of windows along an axis.
    fn over(&self, dim: Dim, node: &NodeProto) -> Option<Dim> {
        let Self { size, stride, dilation, pads } = *self;
        if size < 1 || stride < 1 || dilation < 1 || pads < 0 {
            return None;
        }
        // In rten a span beyond i64 wraps around, and the result becomes larger than the operand.
        let span = dilation.checked_mul(size - 1)?.checked_add(1)?;
        if node.text("auto_pad").starts_with("SAME") {
            return Some(Dim { exact: dim.exact && stride == 1, ..dim });
        }
        let Some(n) = dim.constant().filter(|_| node.int("ceil_mode", 0) == 0) else {
            let most = zip_sizes(Zip::Add, [dim.most, Size::fixed(pads)])?;
            return Some(Dim { most, exact: false });
        };
        let rest = n.checked_add(pads)?.checked_sub(span)?;
        Some(Dim::of(Size::fixed(if rest < 0 { 0 } else { rest / stride + 1 })))
    }
}

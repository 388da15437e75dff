//! Translates `Pad`: constants, or values of the tensor again, before and after the values of an
//! axis. The batch is never padded.

use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Stop, folded, malformed, unsupported};
use crate::dense::graph::shape_operators::{LIST_MAX, axis_of, distinct_axes};
use crate::dense::graph::tensor::{Kind, Size, Tensor, Values, product};

/// The values that an axis gets before and after its own; negative numbers take values away.
#[derive(Clone, Copy)]
struct Pads {
    axis: usize,
    before: i64,
    after: i64,
}

impl Builder<'_> {
    /// Translates `Pad`.
    pub fn pad(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let mut x = self.input(node, 0)?;
        for pads in self.pads(node, x.shape.len())? {
            if x.is_batch(pads.axis) {
                return Err(unsupported(node, "of the batch"));
            }
            x = match node.text("mode") {
                "" | "constant" => {
                    let value = self.pad_value(node, x.kind)?;
                    self.pad_axis(node, &x, pads, &value)?
                }
                mode => {
                    let positions = repeated(mode, pads, x.shape[pads.axis]);
                    let form = || unsupported(node, &format!("of mode `{mode}` and such pads"));
                    self.take(&x, pads.axis, &positions.ok_or_else(form)?)?
                }
            };
        }
        Ok(x)
    }

    /// Returns the pads of each axis that has some: an attribute before opset 11, an input after.
    fn pads(&mut self, node: &NodeProto, rank: usize) -> Result<Vec<Pads>, Stop> {
        let Some(pads) = self.integers(node, 1, "pads")? else {
            return Err(malformed("Pad without pads"));
        };
        let axes = match self.integers(node, 3, "")? {
            Some(axes) => axes,
            None => (0..rank as i64).collect(),
        };
        distinct_axes(node, &axes, rank)?;
        let axes = axes.iter().map(|&a| axis_of(node, a, rank)).collect::<Result<Vec<_>, _>>()?;
        if pads.len() != 2 * axes.len() {
            let (ends, axes) = (pads.len(), axes.len());
            return Err(malformed(&format!("Pad of {axes} axes by {ends} numbers")));
        }
        let ends = pads.iter().zip(&pads[axes.len()..]);
        let each =
            axes.iter().zip(ends).map(|(&axis, (&before, &after))| Pads { axis, before, after });
        Ok(each.filter(|p| (p.before, p.after) != (0, 0)).collect())
    }

    /// Returns the one value of type `kind` that constant pads have.
    fn pad_value(&mut self, node: &NodeProto, kind: Kind) -> Result<Tensor, Stop> {
        let given = if self.opset < 11 { None } else { self.maybe(node, 2)? };
        let Some(value) = given else {
            let value = if matches!(kind, Kind::Float | Kind::Half) {
                Values::Floats(vec![node.float("value", 0.0)])
            } else {
                Values::Ints(vec![Size::fixed(0)])
            };
            return Ok(Tensor::known(kind, Vec::new(), value));
        };
        match value.known_values() {
            Some(values) if values.len() == 1 && value.kind == kind => Ok(value),
            _ => Err(unsupported(node, &format!("by such a value of type {:?}", value.kind))),
        }
    }

    /// Returns `x` with `value` before and after the values of one axis.
    fn pad_axis(
        &mut self,
        node: &NodeProto,
        x: &Tensor,
        pads: Pads,
        value: &Tensor,
    ) -> Result<Tensor, Stop> {
        let Pads { axis, before, after } = pads;
        let n = x.shape[axis];
        let removed = |pad: i64| usize::try_from(pad.saturating_neg()).unwrap_or(0).min(n);
        let kept: Vec<usize> = (removed(before)..n - removed(after)).collect();
        if kept.is_empty() {
            return Err(unsupported(node, &format!("of all {n} values of axis {axis}")));
        }

        let kept = self.take(x, axis, &kept)?;
        let (before, after) =
            (self.constants(x, axis, before, value)?, self.constants(x, axis, after, value)?);
        let all: Vec<Tensor> = [before, Some(kept), after].into_iter().flatten().collect();
        self.join(&all, axis)
    }

    /// Returns a tensor like `x` with `pad` times `value` on one axis; `None` if that is nothing.
    fn constants(
        &mut self,
        x: &Tensor,
        axis: usize,
        pad: i64,
        value: &Tensor,
    ) -> Result<Option<Tensor>, Stop> {
        let Some(pad) = usize::try_from(pad).ok().filter(|pad| *pad > 0) else { return Ok(None) };
        let mut shape = x.shape.clone();
        shape[axis] = pad;
        let width = product(&shape).unwrap_or(usize::MAX);
        self.spend(width)?;
        let values = value.known_values().map(|v| v.pick(&vec![0; width]));
        let values = values.ok_or_else(|| malformed("Pad by a value that is computed"))?;
        Ok(Some(folded(x.kind, shape, x.batch, values)))
    }
}

/// Returns the positions, of `n` on an axis, that pads of a `mode` repeat; `None` for another mode
/// or for pads that the mode does not have.
fn repeated(mode: &str, pads: Pads, n: usize) -> Option<Vec<usize>> {
    let (before, after) = (usize::try_from(pads.before).ok()?, usize::try_from(pads.after).ok()?);
    let len = before.checked_add(after)?.checked_add(n).filter(|len| n > 0 && *len <= LIST_MAX)?;
    let (n, before) = (n as i64, before as i64);
    let position = |i: i64| match mode {
        "edge" => Some(i.clamp(0, n - 1)),
        "reflect" if i < 0 => Some(-i),
        "reflect" if i >= n => Some(2 * (n - 1) - i),
        "reflect" => Some(i),
        "wrap" => i.checked_rem_euclid(n),
        _ => None,
    };
    let all = (0..len as i64).map(|i| position(i - before).filter(|p| (0..n).contains(p)));
    all.map(|p| p.map(|p| p as usize)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_repeats_what_onnx_says_and_refuses_what_it_lacks() {
        let at = |mode, before, after, n| repeated(mode, Pads { axis: 0, before, after }, n);
        assert_eq!(at("edge", 2, 1, 2), Some(vec![0, 0, 0, 1, 1]));
        assert_eq!(at("reflect", 2, 1, 3), Some(vec![2, 1, 0, 1, 2, 1]));
        assert_eq!(at("wrap", 1, 2, 3), Some(vec![2, 0, 1, 2, 0, 1]));
        for (mode, before, after, n) in [
            ("reflect", 3, 0, 3),
            ("edge", -1, 0, 3),
            ("edge", 1, 0, 0),
            ("wrap", 1, 0, 0),
            ("edge", i64::MAX, i64::MAX, 3),
            ("mirror", 1, 0, 3),
        ] {
            assert_eq!(at(mode, before, after, n), None, "{mode}, {before}, {after}, {n}");
        }
    }
}

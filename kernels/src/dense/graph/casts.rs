//! Translates `Cast`, `CastLike` and `DequantizeLinear`. A computed value stays a f32, rounded as
//! its type demands, so an integer or a truth value is exact.

use crate::dense::graph::forms::{Scale, dequantize, is_ours};
use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::onnx::{BFLOAT16, NodeProto, kind_of, type_name};
use crate::dense::graph::onnx_graph::{Builder, Stop, folded, malformed, unsupported};
use crate::dense::graph::tensor::{Kind, Size, Tensor, Values};
use crate::dense::weights::Weights;
use half::f16;

/// The least and the greatest f32 that is an int32.
const INT32_RANGE: [f32; 2] = [-2_147_483_648.0, 2_147_483_520.0];
/// The least and the greatest f32 that is an int64.
const INT64_RANGE: [f32; 2] = [-9_223_372_036_854_775_808.0, 9_223_371_487_098_961_920.0];

impl Builder<'_> {
    /// Translates `Cast` and `CastLike`.
    pub fn cast(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        // Its values are f32 here, so the type of the tensor is lost.
        let is_brain = |name: &String| {
            self.stored.get(name.as_str()).is_some_and(|t| t.data_type() == BFLOAT16)
        };
        let to = match node.op_type() {
            "CastLike" if node.input.get(1).is_some_and(is_brain) => {
                return Err(unsupported(node, "to type BFLOAT16"));
            }
            "CastLike" => Some(self.input(node, 1)?.kind),
            _ => kind_of(node.int("to", 0)),
        };
        let Some(to) = to else {
            return Err(unsupported(node, &format!("to type {}", type_name(node.int("to", 0)))));
        };
        let from = x.kind;
        let relabelled = Ok(Tensor { kind: to, ..x.clone() });
        let stop = || Err(unsupported(node, &format!("from {from:?} to {to:?}")));
        match (from, to) {
            _ if from == to => Ok(x),
            // The products by these values can have them as f16: the bits of the result are equal.
            (Kind::Half, Kind::Float) => Ok(Tensor { weights: Weights::F16, ..relabelled? }),
            (Kind::Half, _) => stop(),
            (_, Kind::Half) => match x.known_values().and_then(|v| v.floats()) {
                Some(values) => {
                    self.keep(to, values.len())?;
                    let round = |x: f32| f16::from_f32(x).into();
                    let values = Values::Floats(values.into_iter().map(round).collect());
                    Ok(folded(to, x.shape, x.batch, values))
                }
                None if (from, to) == (Kind::Float, Kind::Half) => {
                    Ok(Tensor { kind: to, ..self.map(&x, Map::Half)? })
                }
                None => stop(),
            },
            (Kind::Int64, Kind::Int32) if x.known_values().is_none() => {
                Ok(Tensor { kind: to, ..self.check(&x, INT32_RANGE)? })
            }
            (Kind::Bool | Kind::Int32, Kind::Int64 | Kind::Int32) => relabelled,
            (Kind::Int64, Kind::Int32) => match x.known_values().map(|v| &**v) {
                Some(Values::Ints(values)) => {
                    self.keep(to, values.len())?;
                    let values = Values::Ints(values.iter().map(|s| s.wrapped(to)).collect());
                    Ok(folded(to, x.shape, x.batch, values))
                }
                _ => relabelled,
            },
            (_, Kind::Float) => self.cast_to_float(node, &x),
            (_, Kind::Bool) => Ok(Tensor { kind: to, ..self.map_to_int(&x, Map::NotZero)? }),
            (_, Kind::Int64 | Kind::Int32) => {
                let range = if to == Kind::Int32 { INT32_RANGE } else { INT64_RANGE };
                if let Some(Values::Floats(values)) = x.known_values().map(|v| &**v)
                    && !values.iter().all(|x| (range[0]..=range[1]).contains(&x.trunc()))
                {
                    return Err(unsupported(node, &format!("of such a constant to {to:?}")));
                }
                let whole = self.map_to_int(&x, Map::Trunc)?;
                let is_computed = x.kind == Kind::Float && whole.known_values().is_none();
                let whole = if is_computed { self.check(&whole, range)? } else { whole };
                Ok(Tensor { kind: to, ..whole })
            }
        }
    }

    fn cast_to_float(&mut self, node: &NodeProto, x: &Tensor) -> Result<Tensor, Stop> {
        let Some(values) = x.known_values() else {
            // The product of 0 and a negative integer is -0, which an integer is not.
            let zero = Tensor::known(Kind::Float, Vec::new(), Values::Floats(vec![0.0]));
            let plain = if x.kind.is_int() { self.zip(Zip::Add, [x, &zero])? } else { x.clone() };
            return Ok(Tensor { kind: Kind::Float, ..plain });
        };
        self.keep(Kind::Float, values.len())?;
        let Values::Ints(values) = &**values else { return Err(malformed("Cast of no integers")) };
        let float = |s: &Size| s.constant().map(|n| n as f32);
        match values.iter().map(float).collect::<Option<Vec<_>>>() {
            Some(all) => Ok(folded(Kind::Float, x.shape.clone(), x.batch, Values::Floats(all))),
            None => Err(unsupported(node, "of the batch")),
        }
    }

    /// Adds `map`, whose results are integers, to `x`.
    pub fn map_to_int(&mut self, x: &Tensor, map: Map) -> Result<Tensor, Stop> {
        let result = self.map(x, map)?;
        let Some(values) = result.known_values() else { return Ok(result) };
        self.keep(Kind::Int64, values.len())?;
        let values = match &**values {
            Values::Floats(v) => v.iter().map(|&x| Size::fixed(x as i64)).collect(),
            Values::Ints(v) => v.clone(),
        };
        Ok(folded(Kind::Int64, result.shape, result.batch, Values::Ints(values)))
    }

    /// Translates `DequantizeLinear` of stored int8 weights. The products by those that
    /// `forms.rs` made are computed in int8; others stand for their values.
    pub fn dequantize(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let stored = |i: usize| self.stored.get(node.input.get(i)?.as_str()).copied();
        let zero = node.input.get(2).map(|_| stored(2));
        let known = stored(0).zip(stored(1)).filter(|_| zero != Some(None));
        let values = known.and_then(|(tensor, scale)| {
            let by = Scale { scale, zero: zero.flatten(), axis: node.int("axis", 1) };
            let values = dequantize(tensor, &by)?;
            Some(Tensor::known(Kind::Float, tensor.sizes(), Values::Floats(values)))
        });
        let tensor = values.ok_or_else(|| unsupported(node, "of such operands"))?;
        self.keep(tensor.kind, tensor.width())?;
        let weights = if is_ours(node) { Weights::Int8 } else { Weights::F32 };
        Ok(Tensor { weights, ..tensor })
    }
}

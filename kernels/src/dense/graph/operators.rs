//! Translates each ONNX operator to nodes, and folds those of known tensors. A form of an operator
//! that has no node is `Unsupported`, and its meaning is never guessed. No operator lets the
//! samples of a batch meet. The operators on shapes, products and sums are in files of their own.

use crate::dense::graph::folding::{choose_known, zip_sizes};
use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Op, Operand, Stop, folded, malformed, unsupported};
use crate::dense::graph::products::in_operator;
use crate::dense::graph::tensor::{
    Data, Id, Kind, Size, Tensor, Values, broadcast, broadcast_layout, product,
};
use std::rc::Rc;

/// The greatest integer that arithmetic on f32 gives exactly and for no other sum.
const INTEGER_MAX: f32 = 16_777_215.0;

impl Builder<'_> {
    /// Adds the nodes that compute `node`. Returns one result for each output.
    pub fn operator(&mut self, node: &NodeProto) -> Result<Vec<Tensor>, Stop> {
        if !matches!(node.domain(), "" | "ai.onnx") {
            return Err(Stop::Unsupported(format!("{}.{}", node.domain(), node.op_type())));
        }
        if let Some(map) = self.function(node)? {
            let x = self.input(node, 0)?;
            return Ok(vec![self.map_checked(node, &x, map)?]);
        }
        if let Some(zip) = zip_of(node.op_type()) {
            return Ok(vec![self.zip_operator(node, zip)?]);
        }

        let one = match node.op_type() {
            "Constant" => self.constant(node),
            "Identity" => self.input(node, 0),
            "Dropout" => self.dropout(node),
            "Cast" | "CastLike" => self.cast(node),
            "DequantizeLinear" => self.dequantize(node),
            "Where" => self.select(node),
            "Greater" => self.flipped(node, Zip::Less),
            "GreaterOrEqual" => self.flipped(node, Zip::LessEqual),
            "Mod" => self.remainder(node),
            "And" | "Or" | "Xor" => self.logic(node),
            "Sum" | "Mean" => self.sum_of_inputs(node),
            "Gemm" => self.gemm(node),
            "MatMul" => self.matmul_operator(node),
            "Einsum" => self.einsum(node),
            "Conv" => self.convolution(node),
            "MaxPool" | "AveragePool" => self.pooling(node),
            "GlobalMaxPool" | "GlobalAveragePool" => self.global_pooling(node),
            "GRU" | "LSTM" | "RNN" => return self.recurrent(node),
            "TopK" => return self.top_k(node),
            "ArgMax" | "ArgMin" => self.arg(node),
            "OneHot" => self.one_hot(node),
            "NonZero" => self.non_zero(node),
            "Scatter" | "ScatterElements" | "ScatterND" => self.scatter(node),
            "CumSum" => self.running_sum(node),
            "Attention" => self.attention(node),
            "Softmax" | "LogSoftmax" => self.softmax_operator(node),
            "BatchNormalization" => self.batch_norm(node),
            "LayerNormalization" | "RMSNormalization" => self.layer_norm(node),
            "InstanceNormalization" | "GroupNormalization" => self.group_norm(node),
            "IsInf" => self.is_infinite(node),
            name if name.starts_with("Reduce") => self.reduce(node),
            _ => return self.shape_operator(node),
        }?;
        Ok(vec![one])
    }

    /// Returns the function of each value that `node` is; `None` for another operator.
    fn function(&mut self, node: &NodeProto) -> Result<Option<Map>, Stop> {
        let float = |name: &str, default| node.float(name, default);
        Ok(Some(match node.op_type() {
            "Relu" => Map::Relu,
            "Sigmoid" => Map::Sigmoid,
            "Tanh" => Map::Tanh,
            "Abs" => Map::Abs,
            "Neg" => Map::Neg,
            "Exp" => Map::Exp,
            "Log" => Map::Ln,
            "Sqrt" => Map::Sqrt,
            "Erf" => Map::Erf,
            "Floor" => Map::Floor,
            "Ceil" => Map::Ceil,
            "Round" => Map::Round,
            "Sign" => Map::Sign,
            "Sin" => Map::Sin,
            "Cos" => Map::Cos,
            "Tan" => Map::Tan,
            "Asin" => Map::Asin,
            "Acos" => Map::Acos,
            "Atan" => Map::Atan,
            "Sinh" => Map::Sinh,
            "Cosh" => Map::Cosh,
            "Asinh" => Map::Asinh,
            "Acosh" => Map::Acosh,
            "Atanh" => Map::Atanh,
            "Reciprocal" => Map::Reciprocal,
            "Softplus" => Map::Softplus,
            "Softsign" => Map::Softsign,
            "Mish" => Map::Mish,
            "Swish" if float("alpha", 1.0) == 1.0 => Map::Silu,
            "Not" => Map::IsZero,
            "IsNaN" => Map::IsNan,
            "Gelu" if node.text("approximate") == "tanh" => Map::GeluTanh,
            "Gelu" => Map::Gelu,
            "HardSwish" => Map::HardSwish,
            "HardSigmoid" => {
                Map::HardSigmoid { alpha: float("alpha", 0.2), beta: float("beta", 0.5) }
            }
            "LeakyRelu" => Map::LeakyRelu { alpha: float("alpha", 0.01) },
            "Elu" => Map::Elu { alpha: float("alpha", 1.0), scale: 1.0 },
            "Selu" => {
                Map::Elu { alpha: float("alpha", 1.673_263_2), scale: float("gamma", 1.050_701) }
            }
            "Celu" => Map::Celu { alpha: float("alpha", 1.0) },
            "ThresholdedRelu" => Map::ThresholdedRelu { alpha: float("alpha", 1.0) },
            "Clip" => self.clip(node)?,
            "Pow" => match self.scalar(node, 1)? {
                Some(y) if self.input(node, 0)?.kind == Kind::Float => Map::Pow(y),
                _ => return Ok(None),
            },
            _ => return Ok(None),
        }))
    }

    /// Returns the bounds of `Clip`: attributes before opset 11, inputs after.
    fn clip(&mut self, node: &NodeProto) -> Result<Map, Stop> {
        let mut bounds = [f32::NEG_INFINITY, f32::INFINITY];
        for (i, name) in ["min", "max"].into_iter().enumerate() {
            if self.opset < 11 {
                bounds[i] = node.float(name, bounds[i]);
            } else if self.maybe(node, i + 1)?.is_some() {
                let bound = self.scalar(node, i + 1)?;
                bounds[i] = bound.ok_or_else(|| unsupported(node, "by computed bounds"))?;
            }
        }
        Ok(Map::Clip { low: bounds[0], high: bounds[1] })
    }

    /// Returns the one known float that input `i` is.
    fn scalar(&mut self, node: &NodeProto, i: usize) -> Result<Option<f32>, Stop> {
        let tensor = self.input(node, i)?;
        let known = tensor.known_values().filter(|v| tensor.shape.is_empty() && v.len() == 1);
        Ok(known.and_then(|v| v.floats()).map(|v| v[0]))
    }

    fn map_checked(&mut self, node: &NodeProto, x: &Tensor, map: Map) -> Result<Tensor, Stop> {
        let fits = match map {
            Map::IsZero => x.kind == Kind::Bool,
            // An integer that is computed is exact as f32, and so are these results.
            Map::Abs | Map::Neg | Map::Relu | Map::Sign | Map::Clip { .. } => {
                x.kind == Kind::Float || x.kind.is_int()
            }
            _ => x.kind == Kind::Float,
        };
        if !fits {
            return Err(unsupported(node, &format!("of type {:?}", x.kind)));
        }
        match map {
            // Known truth values are integers.
            Map::IsNan => Ok(Tensor { kind: Kind::Bool, ..self.map_to_int(x, map)? }),
            _ => self.map(x, map),
        }
    }

    /// Adds a function of each value. The result has the type of `x`.
    pub fn map(&mut self, x: &Tensor, map: Map) -> Result<Tensor, Stop> {
        let kind = x.kind;
        let id = match &x.data {
            Data::Computed(id) => *id,
            Data::Known(values) => {
                let Some(values) = values.floats() else {
                    return Err(Stop::Unsupported("a function of such integers".to_owned()));
                };
                self.keep(kind, values.len())?;
                let values: Vec<f32> = values.into_iter().map(|x| map.apply(x)).collect();
                let values = if kind == Kind::Float {
                    Values::Floats(values)
                } else {
                    Values::Ints(values.iter().map(|&x| Size::fixed(x as i64)).collect())
                };
                return Ok(folded(kind, x.shape.clone(), x.batch, values));
            }
        };
        // A square is a product, which a GPU has too.
        let side = || Operand::Value { input: 0, picks: None };
        let op = match map {
            Map::Pow(2.0) => Op::Zip { zip: Zip::Mul, left: side(), right: side() },
            _ => Op::Map(map),
        };
        // The function of a product that is reordered, as a convolution's is, comes before the new
        // order. There the product takes over a Relu, and the next operator's order is joined. A
        // Sigmoid stays beside its operand, whose product with it is one function.
        if let Some((from, picks)) = self.reordered(x)
            && picks.len() == self.widths[from]
            && map != Map::Sigmoid
        {
            let picks = picks.to_vec();
            self.spend(picks.len())?;
            let result = self.node(vec![from], op, x.shape.clone(), x.batch)?;
            let result = self.pick_all(&result, &x.shape, x.batch, picks)?;
            return Ok(Tensor { kind, ..result });
        }
        let result = self.node(vec![id], op, x.shape.clone(), x.batch)?;
        Ok(Tensor { kind, ..result })
    }

    fn zip_operator(&mut self, node: &NodeProto, zip: Zip) -> Result<Tensor, Stop> {
        let mut result = self.input(node, 0)?;
        if matches!(zip, Zip::Min | Zip::Max) && node.input.len() == 1 {
            return Ok(result);
        }
        for i in 1..node.input.len().max(2) {
            let right = self.input(node, i)?;
            result = self.zip_checked(node, zip, [&result, &right])?;
        }
        Ok(result)
    }

    fn flipped(&mut self, node: &NodeProto, zip: Zip) -> Result<Tensor, Stop> {
        let (left, right) = (self.input(node, 0)?, self.input(node, 1)?);
        self.zip_checked(node, zip, [&right, &left])
    }

    fn zip_checked(
        &mut self,
        node: &NodeProto,
        zip: Zip,
        sides: [&Tensor; 2],
    ) -> Result<Tensor, Stop> {
        let kind = sides[0].kind;
        let are_known = sides.iter().all(|t| t.known_values().is_some());
        let is_whole = kind.is_int() && !are_known;
        let fits = match zip {
            Zip::Equal => kind.is_int() || matches!(kind, Kind::Float | Kind::Bool),
            Zip::Pow | Zip::PRelu => kind == Kind::Float || (kind.is_int() && are_known),
            _ => kind.is_int() || kind == Kind::Float,
        };
        let same = kind == sides[1].kind || (zip == Zip::Pow && are_known);
        if !fits || !same {
            let kinds = format!("of types {kind:?} and {:?}", sides[1].kind);
            return Err(unsupported(node, &kinds));
        }
        let by = if zip == Zip::Div && is_whole { Zip::Quotient } else { zip };
        let result = self.zip(by, sides).map_err(|stop| in_operator(node, stop))?;
        let grows = !matches!(zip, Zip::Equal | Zip::Less | Zip::LessEqual | Zip::Min | Zip::Max);
        if is_whole && grows { self.exact(&result) } else { Ok(result) }
    }

    /// Adds a function of each pair of values.
    pub fn zip(&mut self, zip: Zip, sides: [&Tensor; 2]) -> Result<Tensor, Stop> {
        let is_truth = matches!(zip, Zip::Equal | Zip::Less | Zip::LessEqual);
        let kind = if is_truth { Kind::Bool } else { sides[0].kind };
        let Some((shape, batch)) = broadcast(&sides) else {
            let shapes = format!("of shapes {:?} and {:?}", sides[0].sizes(), sides[1].sizes());
            return Err(Stop::Unsupported(shapes));
        };
        if sides.iter().all(|t| t.known_values().is_some()) {
            let values = self.fold_zip(zip, sides, &shape)?;
            return Ok(folded(kind, shape, batch, values));
        }

        let mut inputs = Vec::new();
        let left = self.operand(sides[0], &shape, &mut inputs)?;
        let right = self.operand(sides[1], &shape, &mut inputs)?;
        let result = self.node(inputs, Op::Zip { zip, left, right }, shape, batch)?;
        Ok(Tensor { kind, ..result })
    }

    fn fold_zip(&mut self, zip: Zip, sides: [&Tensor; 2], shape: &[usize]) -> Result<Values, Stop> {
        let is_float = sides[0].kind == Kind::Float;
        let left = self.spread(sides[0], shape)?;
        let right = self.spread(sides[1], shape)?;
        match (&*left, &*right) {
            (Values::Floats(a), Values::Floats(b)) => {
                let all = a.iter().zip(b).map(|(a, b)| zip.apply(*a, *b));
                Ok(match zip {
                    Zip::Equal | Zip::Less | Zip::LessEqual => {
                        self.keep(Kind::Bool, a.len())?;
                        Values::Ints(all.map(|x| Size::fixed(x as i64)).collect())
                    }
                    _ => Values::Floats(all.collect()),
                })
            }
            (Values::Ints(a), Values::Ints(b)) if !is_float => {
                let kind = sides[0].kind;
                let one = |(a, b): (&Size, &Size)| Some(zip_sizes(zip, [*a, *b])?.wrapped(kind));
                let all = a.iter().zip(b).map(one);
                let all = all.collect::<Option<Vec<_>>>();
                all.map(Values::Ints).ok_or_else(|| Stop::Unsupported("by the batch".to_owned()))
            }
            _ => Err(Stop::Unsupported("of such constants".to_owned())),
        }
    }

    /// Returns the known values of `tensor`, broadcast to `shape`.
    fn spread(&mut self, tensor: &Tensor, shape: &[usize]) -> Result<Rc<Values>, Stop> {
        let spread = self.expand_to(tensor, shape, tensor.batch)?;
        let values = spread.known_values().map(Rc::clone);
        values.ok_or_else(|| malformed("a constant that is computed"))
    }

    /// Returns `tensor` as an operand of a result with this shape, and adds it to `inputs`.
    pub fn operand(
        &mut self,
        tensor: &Tensor,
        shape: &[usize],
        inputs: &mut Vec<Id>,
    ) -> Result<Operand, Stop> {
        match &tensor.data {
            Data::Computed(id) => {
                let layout = broadcast_layout(tensor, shape);
                let width = product(shape).unwrap_or(usize::MAX);
                self.spend(if layout.is_some() { width } else { 0 })?;
                inputs.push(*id);
                Ok(Operand::Value { input: inputs.len() - 1, picks: layout.map(|l| l.picks()) })
            }
            Data::Known(_) => {
                let values = self.spread(tensor, shape)?;
                let inexact = || Stop::Unsupported("by such integers".to_owned());
                Ok(Operand::Constant(values.floats().ok_or_else(inexact)?))
            }
        }
    }

    /// Translates `And`, `Or` and `Xor` of truth values.
    fn logic(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let (left, right) = (self.input(node, 0)?, self.input(node, 1)?);
        if left.kind != Kind::Bool || right.kind != Kind::Bool {
            return Err(unsupported(node, "of numbers"));
        }
        let sides = [&left, &right];
        match node.op_type() {
            "And" => self.zip(Zip::Min, sides),
            "Or" => self.zip(Zip::Max, sides),
            _ => {
                let equal = self.zip(Zip::Equal, sides)?;
                self.map(&equal, Map::IsZero)
            }
        }
    }

    /// Adds the check that computed integers are exact: f32 arithmetic on integers is, if its
    /// result is below 2^24.
    pub fn exact(&mut self, x: &Tensor) -> Result<Tensor, Stop> {
        self.check(x, [-INTEGER_MAX, INTEGER_MAX])
    }

    /// Returns `x`, of which `n` values are added. Integers are checked first, so that every sum on
    /// the way is exact.
    pub fn summable(&mut self, x: &Tensor, n: usize) -> Result<Tensor, Stop> {
        let most = (INTEGER_MAX / n.max(1) as f32).trunc();
        if x.kind.is_int() { self.check(x, [-most, most]) } else { Ok(x.clone()) }
    }

    /// Translates `Mod`: the remainder has the sign of the divisor or, with `fmod`, the dividend's.
    fn remainder(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let sides = [self.input(node, 0)?, self.input(node, 1)?];
        let zip = if node.int("fmod", 0) == 0 { Zip::Modulo } else { Zip::Remainder };
        self.zip_checked(node, zip, sides.each_ref())
    }

    /// Translates `IsInf`: an equality with one of the two infinities, or with both.
    fn is_infinite(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let x = self.input(node, 0)?;
        let (x, sign) = match (node.int("detect_negative", 1), node.int("detect_positive", 1)) {
            (0, 0) => return Err(unsupported(node, "of nothing")),
            (0, _) => (x, 1.0),
            (_, 0) => (x, -1.0),
            _ => (self.map_checked(node, &x, Map::Abs)?, 1.0),
        };
        let infinity = Values::Floats(vec![sign * f32::INFINITY]);
        let infinity = Tensor::known(Kind::Float, Vec::new(), infinity);
        self.zip_checked(node, Zip::Equal, [&x, &infinity])
    }

    fn sum_of_inputs(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let mut sum = self.input(node, 0)?;
        for i in 1..node.input.len() {
            let next = self.input(node, i)?;
            sum = self.zip_checked(node, Zip::Add, [&sum, &next])?;
        }
        if node.op_type() == "Sum" {
            return Ok(sum);
        }
        let n = vec![node.input.len() as f32];
        let n = Tensor::known(Kind::Float, Vec::new(), Values::Floats(n));
        self.zip_checked(node, Zip::Div, [&sum, &n])
    }

    /// Translates `Where`.
    fn select(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let parts = [self.input(node, 0)?, self.input(node, 1)?, self.input(node, 2)?];
        self.choose(parts).map_err(|stop| in_operator(node, stop))
    }

    /// Returns the second tensor where the first is true, else the third.
    pub fn choose(&mut self, parts: [Tensor; 3]) -> Result<Tensor, Stop> {
        let [condition, yes, no] = &parts;
        let kind = yes.kind;
        if kind != no.kind || matches!(kind, Kind::Half) {
            return Err(Stop::Unsupported(format!("of types {kind:?} and {:?}", no.kind)));
        }
        let Some((shape, batch)) = broadcast(&[condition, yes, no]) else {
            return Err(Stop::Unsupported("of these shapes".to_owned()));
        };
        if condition.kind != Kind::Bool {
            return Err(malformed("a condition that is no truth value"));
        }
        if parts.iter().all(|t| t.known_values().is_some()) {
            let [condition, yes, no] = [condition, yes, no].map(|t| self.spread(t, &shape));
            let values = choose_known([&*condition?, &*yes?, &*no?]);
            let values = values.ok_or_else(|| malformed("a condition of another type"))?;
            return Ok(folded(kind, shape, batch, values));
        }

        let mut inputs = Vec::new();
        let condition = self.operand(condition, &shape, &mut inputs)?;
        let yes = self.operand(yes, &shape, &mut inputs)?;
        let no = self.operand(no, &shape, &mut inputs)?;
        let op = Op::Select(Box::new([condition, yes, no]));
        Ok(Tensor { kind, ..self.node(inputs, op, shape, batch)? })
    }

    fn dropout(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let training = self.maybe(node, 2)?;
        let is_off = |t: &Tensor| match t.known_values().map(|v| v.floats()) {
            Some(Some(values)) => values == [0.0],
            _ => false,
        };
        if node.output.iter().skip(1).any(|name| !name.is_empty())
            || training.is_some_and(|t| !is_off(&t))
        {
            return Err(unsupported(node, "in training"));
        }
        self.input(node, 0)
    }
}

pub(crate) fn zip_of(operator: &str) -> Option<Zip> {
    Some(match operator {
        "Add" => Zip::Add,
        "Sub" => Zip::Sub,
        "Mul" => Zip::Mul,
        "Div" => Zip::Div,
        "Pow" => Zip::Pow,
        "Min" => Zip::Min,
        "Max" => Zip::Max,
        "PRelu" => Zip::PRelu,
        "Equal" => Zip::Equal,
        "Less" => Zip::Less,
        "LessOrEqual" => Zip::LessEqual,
        _ => return None,
    })
}

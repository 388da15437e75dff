//! Translates `GRU`. The products of all inputs by their weights are one matrix product before the
//! loop. Each step of the loop multiplies the state by its weights.

use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Op, Stop, malformed, unsupported};
use crate::dense::graph::tensor::{Batch, Kind, Tensor, Values, product};
use crate::dense::weights::Weights;

/// The weights of one direction, each `[3 * hidden]` wide: update gate, reset gate, candidate.
struct Direction {
    /// `[3 * hidden, inputs]`.
    inputs: Vec<f32>,
    /// `[3 * hidden, hidden]`.
    states: Vec<f32>,
    /// Of the inputs, then of the states.
    bias: Vec<f32>,
    /// How the file stores the weights of the inputs, and those of the states.
    forms: [Weights; 2],
}

impl Builder<'_> {
    /// Translates `GRU` as PyTorch writes it. Returns the states of all steps and the last ones.
    pub fn gru(&mut self, node: &NodeProto) -> Result<Vec<Tensor>, Stop> {
        let x = self.input(node, 0)?;
        let second = Some(Batch { axis: 1, outer: 1 });
        let is_plain = x.shape.len() == 3 && x.shape[1] == 1 && x.kind == Kind::Float;
        if !is_plain || x.batch != second || node.int("layout", 0) != 0 {
            return Err(unsupported(node, "of such inputs"));
        }
        let names: Vec<&str> = match node.text("direction") {
            "" | "forward" => vec!["forward"],
            "reverse" => vec!["reverse"],
            "bidirectional" => vec!["forward", "reverse"],
            other => return Err(unsupported(node, &format!("in direction `{other}`"))),
        };
        let usual = |names: Vec<&str>| names == ["Sigmoid", "Tanh"].repeat(names.len() / 2);
        let is_plain = node.int("linear_before_reset", 0) != 0
            && node.strings("activations").is_none_or(usual)
            && node.maybe_float("clip").is_none()
            && self.maybe(node, 4)?.is_none();
        if !is_plain {
            return Err(unsupported(node, "with lengths or other gates"));
        }

        let mut states = Vec::new();
        for (number, name) in names.iter().enumerate() {
            states.push(self.direction(node, &x, [number, names.len()], *name == "reverse")?);
        }
        let (steps, hidden) = (x.shape[0], states[0].shape[2]);
        let mut lasts = Vec::new();
        for (state, name) in states.iter().zip(&names) {
            let at = if *name == "reverse" { 0 } else { steps - 1 };
            lasts.push(self.take(state, 0, &[at])?);
        }

        // All states are `[steps, directions, batch, hidden]`, the last ones `[directions, ..]`.
        if let ([state], [last]) = (states.as_slice(), lasts.as_slice()) {
            let batch = Some(Batch { axis: 2, outer: 1 });
            let all = Tensor { shape: vec![steps, 1, 1, hidden], batch, ..state.clone() };
            return Ok(vec![all, last.clone()]);
        }
        let inputs = states.iter().map(|s| self.computed(s)).collect::<Result<Vec<_>, _>>()?;
        let op = Op::Concat { outer: steps, parts: vec![hidden; names.len()] };
        let shape = vec![steps, names.len(), 1, hidden];
        let all = self.node(inputs, op, shape, Some(Batch { axis: 2, outer: 1 }))?;
        let inputs = lasts.iter().map(|s| self.computed(s)).collect::<Result<Vec<_>, _>>()?;
        let op = Op::Concat { outer: 1, parts: vec![hidden; names.len()] };
        let shape = vec![names.len(), 1, hidden];
        let last = self.node(inputs, op, shape, Some(Batch { axis: 1, outer: 1 }))?;
        Ok(vec![all, last])
    }

    /// Adds one direction; returns its states `[steps, batch, hidden]`.
    fn direction(
        &mut self,
        node: &NodeProto,
        x: &Tensor,
        [number, count]: [usize; 2],
        backwards: bool,
    ) -> Result<Tensor, Stop> {
        let (steps, width) = (x.shape[0], x.shape[2]);
        let Direction { inputs, states, bias, forms } =
            self.weights_of(node, number, count, width)?;
        let hidden = bias.len() / 6;
        let order: Vec<usize> =
            if backwards { (0..steps).rev().collect() } else { (0..steps).collect() };
        let x = self.take(x, 0, &order)?;

        let columns = 3 * hidden;
        let w = |i: usize, j: usize| inputs[j * width + i];
        let matrix = self.matrix(forms[0], [width, columns], &w, |j| bias[j])?;
        let id = self.computed(&x)?;
        let gates = Op::Matrix { rows: steps, matrix };
        let gates = self.node(vec![id], gates, vec![steps, 1, columns], x.batch)?;

        let at = |i: usize, j: usize| states[j * hidden + i];
        let matrix = self.matrix(forms[1], [hidden, columns], &at, |j| bias[columns + j])?;
        let mut operands = vec![self.computed(&gates)?];
        if let Some(first) = self.first_state(node, [number, count], hidden)? {
            operands.push(first);
        }
        let op = Op::Gru { steps, hidden, matrix };
        let result = self.node(operands, op, vec![steps, 1, hidden], x.batch)?;
        self.take(&result, 0, &order)
    }

    fn weights_of(
        &mut self,
        node: &NodeProto,
        number: usize,
        count: usize,
        width: usize,
    ) -> Result<Direction, Stop> {
        let hidden = usize::try_from(node.int("hidden_size", 0)).unwrap_or(0);
        let mut part = |i: usize, shape: &[usize]| {
            let Some(tensor) = self.maybe(node, i)? else { return Ok(None) };
            let known = tensor.known_values().and_then(|v| v.floats());
            let whole = tensor.shape == shape && tensor.kind == Kind::Float;
            let values = known.filter(|_| whole).ok_or_else(|| {
                unsupported(node, &format!("with weights {:?}, not {shape:?}", tensor.shape))
            })?;
            let n = values.len() / count;
            Ok::<_, Stop>(Some((values[number * n..][..n].to_vec(), tensor.weights)))
        };
        let columns = hidden.saturating_mul(3);
        if hidden == 0 || product(&[columns, hidden.max(width), count]).is_none() {
            return Err(malformed(&format!("GRU with hidden_size {hidden}")));
        }
        let missing = || malformed("GRU without weights");
        let (inputs, inputs_form) = part(1, &[count, columns, width])?.ok_or_else(missing)?;
        let (states, states_form) = part(2, &[count, columns, hidden])?.ok_or_else(missing)?;
        let bias = part(3, &[count, 2 * columns])?.map(|(bias, _)| bias);
        Ok(Direction {
            inputs,
            states,
            bias: bias.unwrap_or_else(|| vec![0.0; 2 * columns]),
            forms: [inputs_form, states_form],
        })
    }

    /// Returns the first state of a direction; `None` if it is zero.
    fn first_state(
        &mut self,
        node: &NodeProto,
        [number, count]: [usize; 2],
        hidden: usize,
    ) -> Result<Option<usize>, Stop> {
        let Some(first) = self.maybe(node, 5)? else { return Ok(None) };
        if let Some(Values::Floats(values)) = first.known_values().map(|v| &**v)
            && values.iter().all(|&x| x == 0.0)
        {
            return Ok(None);
        }
        let by_directions = Batch { axis: 1, outer: 1 };
        if first.shape != [count, 1, hidden] || first.batch != Some(by_directions) {
            return Err(unsupported(node, "with such a first state"));
        }
        let own = self.take(&first, 0, &[number])?;
        self.computed(&own).map(Some)
    }
}

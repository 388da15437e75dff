//! Translates `GRU`, `LSTM` and `RNN`. The products of all inputs by their weights are one matrix
//! product before the loop. Each step of the loop multiplies the state by its weights.

use crate::dense::graph::node::{CellKind, Recurrent};
use crate::dense::graph::onnx::NodeProto;
use crate::dense::graph::onnx_graph::{Builder, Op, Stop, malformed, unsupported};
use crate::dense::graph::tensor::{Batch, Id, Kind, Tensor, Values, product};
use crate::dense::weights::Weights;

/// The weights of one direction, each `[gates * hidden]` wide.
struct Direction {
    hidden: usize,
    /// `[gates * hidden, inputs]`.
    inputs: Vec<f32>,
    /// `[gates * hidden, hidden]`.
    states: Vec<f32>,
    /// Of the inputs, then of the states.
    bias: Vec<f32>,
    /// How the file stores the weights of the inputs, and those of the states.
    forms: [Weights; 2],
}

/// What all directions have in common.
struct Network {
    kind: CellKind,
    /// `[steps, batch, inputs]`.
    x: Tensor,
    /// The number of steps of each sample.
    length: Option<Id>,
    /// Whether the results have the last state, and the last cell, after the steps.
    has_last: bool,
    directions: usize,
}

impl Builder<'_> {
    /// Translates `GRU`, `LSTM` and `RNN`. Returns the states of all steps, the last ones, and the
    /// last cells of an LSTM.
    pub fn recurrent(&mut self, node: &NodeProto) -> Result<Vec<Tensor>, Stop> {
        let x = self.input(node, 0)?;
        let second = Some(Batch { axis: 1, outer: 1 });
        let is_plain = x.shape.len() == 3 && x.shape[1] == 1 && x.kind == Kind::Float;
        if !is_plain || x.batch != second || node.int("layout", 0) != 0 || x.shape[0] == 0 {
            return Err(unsupported(node, "of such inputs"));
        }
        let backwards: &[bool] = match node.text("direction") {
            "" | "forward" => &[false],
            "reverse" => &[true],
            "bidirectional" => &[false, true],
            other => return Err(unsupported(node, &format!("in direction `{other}`"))),
        };
        let directions = backwards.len();
        let kind = cell_kind(node, directions);
        let is_usual = node.maybe_float("clip").is_none()
            && node.int("input_forget", 0) == 0
            && node.input.get(7).is_none_or(String::is_empty);
        let Some(kind) = kind.filter(|_| is_usual) else {
            return Err(unsupported(node, "with other gates"));
        };

        let steps = x.shape[0];
        let length = self.length(node, steps)?;
        let reads_cell = node.output.get(2).is_some_and(|name| !name.is_empty());
        let has_last = length.is_some() || (reads_cell && kind == CellKind::Lstm);
        let network = Network { kind, x, length, has_last, directions };
        let mut parts: [Vec<Tensor>; 3] = Default::default();
        for (number, &backwards) in backwards.iter().enumerate() {
            let result = self.direction(node, &network, number, backwards)?;
            let last = match (has_last, backwards) {
                (true, _) => steps,
                (false, true) => 0,
                (false, false) => steps - 1,
            };
            parts[1].push(self.take(&result, 0, &[last])?);
            if result.shape[0] == steps + 2 {
                parts[2].push(self.take(&result, 0, &[steps + 1])?);
            }
            parts[0].push(self.take(&result, 0, &(0..steps).collect::<Vec<_>>())?);
        }

        // All states are `[steps, directions, batch, hidden]`, the last ones `[directions, ..]`.
        let [all, lasts, cells] = parts;
        let hidden = all[0].shape[2];
        let wide = |t: Tensor| Tensor {
            shape: vec![steps, 1, 1, hidden],
            batch: Some(Batch { axis: 2, outer: 1 }),
            ..t
        };
        let all: Vec<Tensor> = all.into_iter().map(wide).collect();
        let mut results = vec![self.join(&all, 1)?, self.join(&lasts, 0)?];
        if !cells.is_empty() {
            results.push(self.join(&cells, 0)?);
        }
        Ok(results)
    }

    /// Returns the number of steps of each sample, which the sample's run checks.
    fn length(&mut self, node: &NodeProto, steps: usize) -> Result<Option<Id>, Stop> {
        let Some(lengths) = self.maybe(node, 4)? else { return Ok(None) };
        let is_plain = lengths.kind.is_int() && lengths.shape == [1];
        if !is_plain || lengths.batch != Some(Batch { axis: 0, outer: 1 }) {
            return Err(unsupported(node, "with such lengths"));
        }
        let checked = self.check(&lengths, [0.0, steps as f32])?;
        self.computed(&checked).map(Some)
    }

    /// Adds one direction; returns its states `[steps, batch, hidden]`, and the last ones.
    fn direction(
        &mut self,
        node: &NodeProto,
        network: &Network,
        number: usize,
        backwards: bool,
    ) -> Result<Tensor, Stop> {
        let (kind, x) = (network.kind, &network.x);
        let (steps, width) = (x.shape[0], x.shape[2]);
        let Direction { hidden, inputs, states, bias, forms } =
            self.weights_of(node, network, number)?;
        let columns = kind.gates() * hidden;
        let w = |i: usize, j: usize| inputs[j * width + i];
        let matrix = self.matrix(forms[0], [width, columns], &w, |j| bias[j])?;
        let id = self.computed(x)?;
        let gates = Op::Matrix { rows: steps, matrix };
        let gates = self.node(vec![id], gates, vec![steps, 1, columns], x.batch)?;

        // A GRU that resets the state before its product multiplies it again.
        let is_linear = kind != CellKind::Gru || node.int("linear_before_reset", 0) != 0;
        let first = if is_linear { columns } else { 2 * hidden };
        let at = |i: usize, j: usize| states[j * hidden + i];
        let matrix = self.matrix(forms[1], [hidden, first], &at, |j| bias[columns + j])?;
        let candidate = if is_linear {
            None
        } else {
            let at = |i: usize, j: usize| states[(first + j) * hidden + i];
            let bias = |j: usize| bias[columns + first + j];
            Some(self.matrix(forms[1], [hidden, hidden], &at, bias)?)
        };

        let mut operands = vec![self.computed(&gates)?];
        let mut add = |id: Option<Id>| {
            operands.extend(id);
            id.map(|_| operands.len() - 1)
        };
        let state = add(self.first_state(node, 5, [number, network.directions], hidden)?);
        let cell = add(match kind {
            CellKind::Lstm => self.first_state(node, 6, [number, network.directions], hidden)?,
            _ => None,
        });
        let length = add(network.length);
        let has_last = network.has_last;
        let rows = steps + Recurrent::last_rows(kind, has_last);
        let op = Recurrent {
            kind,
            steps,
            hidden,
            matrix,
            candidate,
            backwards,
            state,
            cell,
            length,
            has_last,
        };
        self.node(operands, Op::Recurrent(Box::new(op)), vec![rows, 1, hidden], x.batch)
    }

    fn weights_of(
        &mut self,
        node: &NodeProto,
        network: &Network,
        number: usize,
    ) -> Result<Direction, Stop> {
        let hidden = usize::try_from(node.int("hidden_size", 0)).unwrap_or(0);
        let (count, width) = (network.directions, network.x.shape[2]);
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
        let columns = hidden.saturating_mul(network.kind.gates());
        let op = node.op_type();
        if hidden == 0 || product(&[columns, hidden.max(width), count]).is_none() {
            return Err(malformed(&format!("{op} with hidden_size {hidden}")));
        }
        let missing = || malformed(&format!("{op} without weights"));
        let (inputs, inputs_form) = part(1, &[count, columns, width])?.ok_or_else(missing)?;
        let (states, states_form) = part(2, &[count, columns, hidden])?.ok_or_else(missing)?;
        let bias = part(3, &[count, 2 * columns])?.map(|(bias, _)| bias);
        let bias = bias.unwrap_or_else(|| vec![0.0; 2 * columns]);
        Ok(Direction { hidden, inputs, states, bias, forms: [inputs_form, states_form] })
    }

    /// Returns the first state of a direction, which is input `i`; `None` if it is zero.
    fn first_state(
        &mut self,
        node: &NodeProto,
        i: usize,
        [number, count]: [usize; 2],
        hidden: usize,
    ) -> Result<Option<Id>, Stop> {
        let Some(first) = self.maybe(node, i)? else { return Ok(None) };
        let form = || unsupported(node, "with such a first state");
        if first.shape != [count, 1, hidden] {
            return Err(form());
        }
        if let Some(Values::Floats(values)) = first.known_values().map(|v| &**v)
            && values.iter().all(|&x| x == 0.0)
        {
            return Ok(None);
        }
        if first.batch != Some(Batch { axis: 1, outer: 1 }) {
            return Err(form());
        }
        let own = self.take(&first, 0, &[number])?;
        self.computed(&own).map(Some)
    }
}

/// Returns the function of a recurrent operator; `None` for activations that no kernel has.
fn cell_kind(node: &NodeProto, directions: usize) -> Option<CellKind> {
    let names = node.strings("activations").filter(|names| !names.is_empty());
    let are = |usual: &[&str]| names.as_ref().is_none_or(|n| *n == usual.repeat(directions));
    match node.op_type() {
        "GRU" if are(&["Sigmoid", "Tanh"]) => Some(CellKind::Gru),
        "LSTM" if are(&["Sigmoid", "Tanh", "Tanh"]) => Some(CellKind::Lstm),
        "RNN" if are(&["Tanh"]) => Some(CellKind::Tanh),
        "RNN" if are(&["Relu"]) => Some(CellKind::Relu),
        _ => None,
    }
}

//! The loops of recurrent networks: GRU, LSTM and plain cells. All samples of a block take a step
//! together; a sample whose steps are over keeps its state. Nothing here allocates.

use crate::dense::graph::node::{CellKind, Recurrent};
use crate::dense::matrix::gemm::GemmScratch;
use crate::dense::matrix::math;
use crate::dense::matrix::microkernel;
use crate::simd::isa::Isa;

/// The operands of all samples. `inputs` is `[samples, steps, gates * hidden]`, `state` and `cell`
/// are `[samples, hidden]`, or zero, and `length` is `[samples]`.
pub(in crate::dense) struct Operands<'a> {
    pub inputs: &'a [f32],
    pub state: Option<&'a [f32]>,
    pub cell: Option<&'a [f32]>,
    pub length: Option<&'a [f32]>,
}

impl<'a> Operands<'a> {
    /// Returns the operands of `cell`, of which `read(i)` is number `i`.
    pub fn of(cell: &Recurrent, read: impl Fn(usize) -> &'a [f32]) -> Self {
        Self {
            inputs: read(0),
            state: cell.state.map(&read),
            cell: cell.cell.map(&read),
            length: cell.length.map(&read),
        }
    }
}

impl Recurrent {
    /// Returns the floats of one sample's state, cell, products and reset state.
    pub fn state_width(&self) -> usize {
        (self.kind.gates() + 3) * self.hidden
    }

    /// Runs all samples. Writes the states after each step, and the last ones, to `out` `[samples,
    /// rows, hidden]`.
    pub(in crate::dense) fn run(
        &self,
        isa: Isa,
        operands: &Operands,
        out: &mut [f32],
        memory: &mut [f32],
        gemm: &mut GemmScratch,
    ) {
        let (hidden, columns) = (self.hidden, self.kind.gates() * self.hidden);
        let rows = self.steps + Self::last_rows(self.kind, self.has_last);
        let samples = memory.len() / self.state_width();
        let (states, memory) = memory.split_at_mut(samples * hidden);
        let (cells, memory) = memory.split_at_mut(samples * hidden);
        let (resets, gates) = memory.split_at_mut(samples * hidden);
        for (first, own) in [(operands.state, &mut *states), (operands.cell, &mut *cells)] {
            match first {
                Some(first) => own.copy_from_slice(first),
                None => own.fill(0.0),
            }
        }
        if operands.length.is_some() {
            out.fill(0.0);
        }

        let products = self.matrix.n;
        for step in 0..self.steps {
            // The products of a GRU's gates are followed by those of its candidate.
            let (gates, candidates) = gates.split_at_mut(samples * products);
            self.matrix.multiply(samples, states, gates, isa, gemm);
            if let Some(candidate) = &self.candidate {
                self.reset(isa, step, operands, [states, gates], resets);
                candidate.multiply(samples, resets, candidates, isa, gemm);
            }
            for sample in 0..samples {
                let Some(at) = self.time(operands, sample, step) else { continue };
                let at_sample = sample * hidden..(sample + 1) * hidden;
                let inputs = &operands.inputs[(sample * self.steps + at) * columns..][..columns];
                let own = &mut gates[sample * products..][..products];
                let state = &mut states[at_sample.clone()];
                match self.kind {
                    CellKind::Gru if self.candidate.is_some() => {
                        let candidate = &mut candidates[at_sample];
                        add(candidate, &inputs[2 * hidden..]);
                        microkernel::each(isa, candidate, math::tanh);
                        mix(state, candidate, &own[..hidden]);
                    }
                    CellKind::Gru => self.gru(isa, inputs, own, state),
                    CellKind::Lstm => self.lstm(isa, inputs, own, &mut cells[at_sample], state),
                    CellKind::Tanh => {
                        add(own, inputs);
                        state.copy_from_slice(own);
                        microkernel::each(isa, state, math::tanh);
                    }
                    CellKind::Relu => {
                        add(own, inputs);
                        state.copy_from_slice(own);
                        microkernel::each(isa, state, math::relu);
                    }
                }
                out[(sample * rows + at) * hidden..][..hidden].copy_from_slice(state);
            }
        }

        if self.has_last {
            self.write_last(operands, [states, cells], out);
        }
    }

    /// Writes the last state and cell of each sample behind its states after each step.
    fn write_last(&self, operands: &Operands, last: [&[f32]; 2], out: &mut [f32]) {
        let hidden = self.hidden;
        let rows = self.steps + Self::last_rows(self.kind, true);
        let [states, cells] = last.map(|part| part.chunks_exact(hidden));
        for (sample, (out, (state, cell))) in
            out.chunks_exact_mut(rows * hidden).zip(states.zip(cells)).enumerate()
        {
            // A sample without steps has zeros, as in ONNX Runtime, whatever its first state.
            if self.time(operands, sample, 0).is_none() {
                continue;
            }
            let (state_out, cell_out) = out[self.steps * hidden..].split_at_mut(hidden);
            state_out.copy_from_slice(state);
            if !cell_out.is_empty() {
                cell_out.copy_from_slice(cell);
            }
        }
    }

    /// Returns the input that a sample takes in a step; `None` after its last one.
    fn time(&self, operands: &Operands, sample: usize, step: usize) -> Option<usize> {
        // A length out of range marks its sample, so any number will do here.
        let length =
            operands.length.map_or(self.steps, |all| (all[sample] as usize).min(self.steps));
        let last = length.checked_sub(step + 1)?;
        Some(if self.backwards { last } else { step })
    }

    /// Computes the gates of a GRU and its reset state, which is multiplied after that.
    fn reset(
        &self,
        isa: Isa,
        step: usize,
        operands: &Operands,
        [states, gates]: [&mut [f32]; 2],
        resets: &mut [f32],
    ) {
        let (hidden, columns) = (self.hidden, 3 * self.hidden);
        for (sample, gates) in gates.chunks_exact_mut(2 * hidden).enumerate() {
            let Some(at) = self.time(operands, sample, step) else { continue };
            add(gates, &operands.inputs[(sample * self.steps + at) * columns..][..2 * hidden]);
            microkernel::each(isa, gates, math::sigmoid);
            let state = &states[sample * hidden..][..hidden];
            let own = &mut resets[sample * hidden..][..hidden];
            for ((to, h), r) in own.iter_mut().zip(state).zip(&gates[hidden..]) {
                *to = r * h;
            }
        }
    }

    /// Replaces the state of a GRU that resets the product of its state.
    fn gru(&self, isa: Isa, inputs: &[f32], gates: &mut [f32], state: &mut [f32]) {
        let hidden = self.hidden;
        let (open, candidate) = gates.split_at_mut(2 * hidden);
        let (of_gates, of_candidate) = inputs.split_at(2 * hidden);
        add(open, of_gates);
        microkernel::each(isa, open, math::sigmoid);

        let (update, reset) = open.split_at(hidden);
        for ((c, x), r) in candidate.iter_mut().zip(of_candidate).zip(reset) {
            *c = x + r * *c;
        }
        microkernel::each(isa, candidate, math::tanh);
        mix(state, candidate, update);
    }

    /// Replaces the cell and the state of an LSTM.
    fn lstm(
        &self,
        isa: Isa,
        inputs: &[f32],
        gates: &mut [f32],
        cell: &mut [f32],
        state: &mut [f32],
    ) {
        let hidden = self.hidden;
        add(gates, inputs);
        let (open, candidate) = gates.split_at_mut(3 * hidden);
        microkernel::each(isa, open, math::sigmoid);
        microkernel::each(isa, candidate, math::tanh);
        let (input, rest) = open.split_at(hidden);
        let (output, forget) = rest.split_at(hidden);
        for (((c, new), i), f) in cell.iter_mut().zip(candidate).zip(input).zip(forget) {
            *c = f * *c + i * *new;
        }
        state.copy_from_slice(cell);
        microkernel::each(isa, state, math::tanh);
        state.iter_mut().zip(output).for_each(|(h, o)| *h *= o);
    }
}

fn add(sums: &mut [f32], terms: &[f32]) {
    sums.iter_mut().zip(terms).for_each(|(sum, x)| *sum += x);
}

/// Replaces `h` by `(1 - z) c + z h`.
fn mix(state: &mut [f32], candidate: &[f32], update: &[f32]) {
    for ((h, c), z) in state.iter_mut().zip(candidate).zip(update) {
        *h = (1.0 - z) * *c + z * *h;
    }
}

//! Test cases that `tests/onnx/cases.py` writes: networks with inputs, and the outputs of ONNX
//! Runtime. This file reads such files and runs the networks. A case is: the ONNX file, the names
//! and widths of its inputs, the name of its output, the batch, the inputs, the expected output.
//! Numbers are little-endian, and a u32 before each part has its length.

#![allow(clippy::unwrap_used)]

use hatchback_kernels::dense::{Activation, DenseEngine, InputPart};
use hatchback_kernels::simd::isa::Isa;

/// Allowed difference from ONNX Runtime, relative to the largest output, or to 1 if that is larger.
pub const DIFFERENCE_MAX: f32 = 1e-5;

/// A network, its inputs and the expected output.
pub struct Case {
    pub name: String,
    pub onnx: Vec<u8>,
    pub inputs: Vec<(String, usize)>,
    pub output: String,
    pub batch: usize,
    pub values: Vec<Vec<f32>>,
    pub expected: Vec<f32>,
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes(&mut self) -> Vec<u8> {
        let n = self.number();
        let (head, rest) = self.0.split_at(n);
        self.0 = rest;
        head.to_vec()
    }

    fn number(&mut self) -> usize {
        let (head, rest) = self.0.split_at(4);
        self.0 = rest;
        u32::from_le_bytes(head.try_into().unwrap()) as usize
    }

    fn text(&mut self) -> String {
        String::from_utf8(self.bytes()).unwrap()
    }

    fn floats(&mut self) -> Vec<f32> {
        self.bytes().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn case(&mut self) -> Case {
        let (name, onnx) = (self.text(), self.bytes());
        let inputs: Vec<_> = (0..self.number()).map(|_| (self.text(), self.number())).collect();
        let (output, batch) = (self.text(), self.number());
        let values = inputs.iter().map(|_| self.floats()).collect();
        Case { name, onnx, inputs, output, batch, values, expected: self.floats() }
    }
}

/// Returns the cases of a file.
pub fn read(file: &[u8]) -> Vec<Case> {
    let mut reader = Reader(file);
    let mut cases = Vec::new();
    while !reader.0.is_empty() {
        cases.push(reader.case());
    }
    cases
}

impl Case {
    /// Runs the network on every instruction set: all samples at once, and each alone.
    /// Returns the largest difference from ONNX Runtime, or the problem.
    pub fn run(&self) -> Result<f32, String> {
        let mut difference = 0.0;
        let mut all: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let scores = self.run_on(isa)?;
            let bits: Vec<u32> = scores.iter().map(|s| s.to_bits()).collect();
            difference = self.compare(&scores)?;
            if all.is_some_and(|first| first != bits) {
                return Err(format!("other bits on {}", isa.name()));
            }
            all = Some(bits);
        }
        Ok(difference)
    }

    /// Loads the network on `isa`.
    pub fn load(&self, isa: Isa) -> Result<DenseEngine, String> {
        let inputs: Vec<(&str, usize)> =
            self.inputs.iter().map(|(name, width)| (name.as_str(), *width)).collect();
        let (onnx, activation) = (self.onnx.clone(), Activation::None);
        DenseEngine::load_for(
            isa,
            onnx,
            &inputs,
            &InputPart::whole(&inputs, &vec![false; inputs.len()]),
            &self.output,
            activation,
        )
        .map_err(|e| e.to_string())
    }

    fn run_on(&self, isa: Isa) -> Result<Vec<f32>, String> {
        let engine = self.load(isa)?;
        let n = engine.outputs();
        let mut scratch = engine.scratch(self.batch);
        let mut together = vec![f32::NAN; self.batch * n];
        engine
            .run(self.batch, &self.values, &mut together, &mut scratch)
            .map_err(|e| e.to_string())?;
        for sample in 0..self.batch {
            let sample_of = |(values, (_, width)): (&Vec<f32>, &(String, usize))| {
                values[sample * width..][..*width].to_vec()
            };
            let one: Vec<Vec<f32>> = self.values.iter().zip(&self.inputs).map(sample_of).collect();
            let mut alone = vec![f32::NAN; n];
            engine.run(1, &one, &mut alone, &mut scratch).map_err(|e| e.to_string())?;
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
            if !alone.iter().zip(&together[sample * n..]).all(same) {
                return Err(format!("sample {sample} has other bits alone"));
            }
        }
        Ok(together)
    }

    fn compare(&self, scores: &[f32]) -> Result<f32, String> {
        if scores.len() != self.expected.len() {
            return Err(format!("{} values, not {}", scores.len(), self.expected.len()));
        }
        let finite = |x: &&f32| x.is_finite();
        let largest = self.expected.iter().filter(finite).fold(1.0f32, |most, x| most.max(x.abs()));
        let mut furthest = 0.0f32;
        for (i, (a, b)) in scores.iter().zip(&self.expected).enumerate() {
            let same = a == b || (a.is_nan() && b.is_nan());
            let off = if same { 0.0 } else { (a - b).abs() / largest };
            if off.is_nan() || off > DIFFERENCE_MAX {
                return Err(format!("value {i} is {a}, ONNX Runtime gives {b}"));
            }
            furthest = furthest.max(off);
        }
        Ok(furthest)
    }
}

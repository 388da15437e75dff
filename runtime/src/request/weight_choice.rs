//! `dense_weights = "auto"`: chooses the type of each layer's weights when a model is opened. A
//! layer gets the narrowest type with which the scores of the probe set stay within
//! [`SCORE_DIFFERENCE_MAX`] of the trained network's. The scores are the same on every CPU, and so
//! is the choice.

use crate::clock::SystemClock;
use crate::flash::Flash;
use crate::limits::{SCORE_DIFFERENCE_MAX, WEIGHT_CHECK_SAMPLES_MAX};
use crate::model::backend::{ModelBackend, layer_names, sole_owner};
use crate::model::{Model, OpenError};
use crate::request::worker::{ScoreError, Worker};
use crate::schema::sample::Sample;
use hatchback_kernels::dense::{DenseEngine, DenseError, Weights};
use std::sync::Arc;

/// Returns `model`, whose weights are f32, with the narrowest weights that keep its probe set's
/// scores. The network is in memory twice during the choice.
///
/// # Errors
/// [`OpenError::Flash`] or [`OpenError::Dense`] if the probe set or the network cannot be read,
/// [`OpenError::Weights`] if a probe sample cannot be scored.
pub(crate) fn choose(model: Model, flash: &Flash) -> Result<Model, OpenError> {
    let ModelBackend::Cpu { dense: trained, .. } = model.backend() else { return Ok(model) };
    let (trained, name) = (Arc::clone(trained), model.generation().to_string());
    if trained.layers().is_empty() {
        log::info!("{name}: dense_weights = auto: f32, as the network has none for our kernels");
        return Ok(model);
    }
    let samples = flash.probe()?;
    if samples.is_empty() {
        log::warn!("{name}: dense_weights = auto: f32, because the bundle has no probe set");
        return Ok(model);
    }

    let mut chosen = model.schema().load_dense(flash.dense()?, Weights::F32)?;
    let (model, probe) = Probe::collect(model, &trained, &samples)?;
    let difference = Choice { trained: &trained, chosen: &mut chosen, probe: &probe }.run()?;
    log::info!(
        "{name}: dense_weights = auto: {}; {} probe samples score at most {difference:.1e} apart",
        layer_names(&chosen.layers()),
        probe.samples
    );
    model.map_backend(|backend| match backend {
        ModelBackend::Cpu { tables, .. } => {
            Ok(ModelBackend::Cpu { tables, dense: Arc::new(chosen) })
        }
        other => Ok(other),
    })
}

/// The inputs and scores of the probe set, from the trained network.
pub(crate) struct Probe {
    samples: usize,
    /// `[samples, width]` of each input.
    pub inputs: Vec<Vec<f32>>,
    /// `[samples, outputs]`, with f32 weights.
    pub scores: Vec<f32>,
}

impl Probe {
    /// Looks up the rows of `samples` and scores them with `trained`.
    pub fn collect(
        model: Model,
        trained: &DenseEngine,
        samples: &[Sample],
    ) -> Result<(Model, Self), OpenError> {
        let widths: Vec<usize> = model.input_widths().to_vec();
        let model = Arc::new(model);
        let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
        let mut batch = model.batch();
        let mut inputs = vec![Vec::new(); widths.len()];
        let samples = &samples[..samples.len().min(WEIGHT_CHECK_SAMPLES_MAX)];

        for (sample, probe) in samples.iter().enumerate() {
            let refuse = |problem| OpenError::Weights { weights: Weights::F32, sample, problem };
            batch.clear();
            batch.push(model.schema(), probe).map_err(|e| refuse(e.to_string()))?;
            match worker.score(&batch, None) {
                Ok(_) | Err(ScoreError::NotFinite(_)) => {}
                Err(e) => return Err(refuse(e.to_string())),
            }
            for ((all, from), width) in inputs.iter_mut().zip(worker.inputs()).zip(&widths) {
                all.extend_from_slice(&from[..*width]);
            }
        }

        drop(worker);
        let mut probe = Self { samples: samples.len(), inputs, scores: Vec::new() };
        probe.scores = probe.run(trained)?;
        Ok((sole_owner(model), probe))
    }

    /// Returns the scores of `network`, `[samples, outputs]`.
    fn run(&self, network: &DenseEngine) -> Result<Vec<f32>, DenseError> {
        let mut scores = vec![0.0; self.samples * network.outputs()];
        network.run(self.samples, &self.inputs, &mut scores, &mut network.scratch(self.samples))?;
        Ok(scores)
    }

    /// Returns the largest difference of a score of `network` from the trained one's. The
    /// difference is infinite if only the trained network has a finite score.
    fn difference(&self, network: &DenseEngine) -> Result<f32, DenseError> {
        let found = self.run(network)?;
        let pairs = found.iter().zip(&self.scores).filter(|(_, trained)| trained.is_finite());
        let differences = pairs.map(|(found, trained)| (found - trained).abs());
        Ok(differences.fold(0.0, |most, d| if d.is_nan() { f32::INFINITY } else { most.max(d) }))
    }
}

/// A choice in progress.
struct Choice<'a> {
    trained: &'a DenseEngine,
    chosen: &'a mut DenseEngine,
    probe: &'a Probe,
}

impl Choice<'_> {
    /// Narrows each layer as far as the scores allow, and returns the difference of the scores.
    /// First tries int8 for all layers. If the difference is too large, tries int8 for one layer
    /// after the other. Layers whose rounding changes the scores least, for each weight, come
    /// first. Then tries f16 for the rest.
    fn run(mut self) -> Result<f32, DenseError> {
        let layers = self.trained.layers();
        let int8 = (0..layers.len()).map(|at| self.set(at, Weights::Int8)).filter(|set| *set);
        if int8.count() == layers.len() {
            let difference = self.probe.difference(self.chosen)?;
            if difference <= SCORE_DIFFERENCE_MAX {
                return Ok(difference);
            }
        }
        for at in 0..layers.len() {
            self.set(at, Weights::F32);
        }

        let mut order = Vec::new();
        for (at, layer) in layers.iter().enumerate() {
            if self.set(at, Weights::Int8) {
                let difference = self.probe.difference(self.chosen)?;
                order.push((difference / (layer.inputs * layer.outputs) as f32, at));
            }
            self.set(at, Weights::F32);
        }
        order.sort_by(|a, b| a.0.total_cmp(&b.0));

        for (_, at) in order {
            self.narrow(at, Weights::Int8)?;
        }
        for at in 0..layers.len() {
            if self.chosen.layers()[at].weights == Weights::F32 {
                self.narrow(at, Weights::F16)?;
            }
        }
        self.probe.difference(self.chosen)
    }

    fn set(&mut self, layer: usize, weights: Weights) -> bool {
        self.chosen.set_weights(layer, weights, self.trained)
    }

    /// Stores the weights of `layer` as `weights` if the scores then stay within the bound.
    fn narrow(&mut self, layer: usize, weights: Weights) -> Result<(), DenseError> {
        if self.set(layer, weights) && self.probe.difference(self.chosen)? > SCORE_DIFFERENCE_MAX {
            self.set(layer, Weights::F32);
        }
        Ok(())
    }
}

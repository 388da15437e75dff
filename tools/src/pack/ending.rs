//! Ends a bundle: writes the network, the probe set and the manifest behind the tables. For a
//! snapshot with a probe set it first installs the tables beside the bundle, as a car does. There
//! it chooses the form of the network's weights, and compares the scores of the probe set with the
//! recorded ones.

use crate::pack::table::write_blob;
use crate::pack::weights;
use crate::report::temporary::TemporaryFolder;
use anyhow::{Context, Result, anyhow, ensure};
use hatchback::bundle::manifest::{Deferral, Generation, Manifest, TableBlobs};
use hatchback::bundle::{BundleReader, BundleWriter};
use hatchback::limits::PROBE_INPUTS_MAX;
use hatchback::request::probe_inputs::ProbeInputs;
use hatchback::request::worker::Worker;
use hatchback::schema::Schema;
use hatchback::schema::sample::Sample;
use hatchback::update::probe::Probed;
use hatchback::{Budget, Codec, DenseEngine, Flash, Model, OpenError, SystemClock};
use hatchback_link::program::is_machine_fault;
use std::path::Path;
use std::sync::Arc;

/// What follows the tables of a bundle.
pub(crate) struct Ending<'a> {
    pub generation: &'a Generation,
    /// The generation that a delta needs.
    pub parent: Option<&'a Flash>,
    pub schema: &'a Schema,
    pub tables: Vec<TableBlobs>,
    /// The encoded probe set.
    pub probe: Option<Vec<u8>>,
    pub deferral: Option<Deferral>,
}

/// The result of scoring the probe set.
#[derive(Debug)]
pub enum Proof {
    /// The probe set was scored.
    Scored(Probed),
    /// This machine cannot score it, which is no fault of the bundle.
    NotScored(String),
    /// A fault of this machine, such as a full disk: another try may succeed.
    Fault(anyhow::Error),
}

/// A bundle that was written.
pub(crate) struct Ended {
    /// Bytes of the file.
    pub bytes: u64,
    /// The network that it carries.
    pub onnx: Vec<u8>,
    pub proof: Proof,
}

impl Ending<'_> {
    /// Returns the samples of the probe set.
    ///
    /// # Errors
    /// The set does not decode.
    pub fn samples(&self) -> Result<Vec<Sample>> {
        Ok(self.probe.as_ref().map_or(Ok(Vec::new()), |probe| Sample::decode_set(probe))?)
    }

    /// Ends `bundle` with the network `onnx` as it is. Returns the bytes of the file.
    ///
    /// # Errors
    /// The network does not fit the schema, or the file cannot be written. No file is left then.
    pub fn finish(self, mut bundle: BundleWriter, onnx: &[u8]) -> Result<u64> {
        // Whatever changed the network before: a car must be able to load what is written.
        self.schema.load_dense(onnx.to_vec())?;
        let manifest = self.write(&mut bundle, onnx)?;
        Ok(bundle.finish(manifest)?)
    }

    /// Ends `bundle`, a snapshot, with `onnx` and the narrowest weights that keep the scores of the
    /// probe set. With tables of f32 alone the network stays as it is: its user wants all bits.
    ///
    /// # Errors
    /// The file cannot be written, the bundle cannot be installed, or the score of a probe sample
    /// differs from the recorded one by more than `difference_max`. No file is left then.
    pub fn finish_snapshot(
        self,
        mut bundle: BundleWriter,
        onnx: Vec<u8>,
        difference_max: Option<f32>,
    ) -> Result<Ended> {
        let can_be_narrow = self.schema.tables.iter().any(|table| table.codec != Codec::F32)
            && weights::can_be_narrow(&onnx)?;
        let samples = self.samples()?;
        if samples.is_empty() || !can_be_narrow && difference_max.is_none() {
            let proof = Proof::Scored(Probed::default());
            return Ok(Ended { bytes: self.finish(bundle, &onnx)?, onnx, proof });
        }

        let kept = bundle.blobs().len();
        let manifest = self.write(&mut bundle, &onnx)?;
        let draft = bundle.draft(manifest)?;
        let not_kept = || format!("{}: not kept", draft.with_extension("").display());
        let task = Task { onnx: &onnx, can_be_narrow, is_proven: difference_max.is_some() };
        let (narrowed, proof) = match task.run(&draft, &samples) {
            Ok((narrowed, scored)) => {
                check_difference(&scored, difference_max).with_context(not_kept)?;
                (narrowed, scored)
            }
            Err(e) if is_machine_fault(&e) => (None, Proof::Fault(e)),
            Err(e) => return Err(e.context(not_kept())),
        };
        let onnx = narrowed.unwrap_or(onnx);
        bundle.keep(kept)?;
        Ok(Ended { bytes: self.finish(bundle, &onnx)?, onnx, proof })
    }

    /// Ends `bundle`, a delta, with the network `onnx`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish_delta(self, bundle: BundleWriter, onnx: Vec<u8>) -> Result<Ended> {
        let proof = Proof::NotScored("a delta is scored where its parent is".to_owned());
        Ok(Ended { bytes: self.finish(bundle, &onnx)?, onnx, proof })
    }

    /// Writes the network and the probe set, and returns the manifest.
    fn write(&self, bundle: &mut BundleWriter, onnx: &[u8]) -> Result<Manifest> {
        let dense = write_blob(bundle, onnx)?;
        let probe = self.probe.as_ref().map(|bytes| write_blob(bundle, bytes)).transpose()?;
        Ok(Manifest {
            generation: self.generation.clone(),
            parent: self.parent.map(|parent| parent.manifest().generation.sequence),
            packed_on: self.parent.map(|parent| parent.record().live.manifest),
            schema: self.schema.clone(),
            blobs: Vec::new(),
            tables: self.tables.clone(),
            dense,
            probe,
            deferral: self.deferral,
            restored: None,
        })
    }
}

fn check_difference(proof: &Proof, most: Option<f32>) -> Result<()> {
    let (Proof::Scored(Probed { difference, .. }), Some(most)) = (proof, most) else {
        return Ok(());
    };
    ensure!(
        *difference <= most,
        "a probe score differs from the recorded one by {difference}, over {most}"
    );
    Ok(())
}

/// What is done with the installed tables.
struct Task<'a> {
    onnx: &'a [u8],
    can_be_narrow: bool,
    /// Whether scores are compared with the recorded ones.
    is_proven: bool,
}

impl Task<'_> {
    /// Installs the bundle at `draft` into a temporary folder beside it, and scores `samples`.
    /// Returns the network with narrow weights, if that was chosen, with which the samples were
    /// scored.
    fn run(&self, draft: &Path, samples: &[Sample]) -> Result<(Option<Vec<u8>>, Proof)> {
        let mut reader = BundleReader::open(draft)?;
        let folder = TemporaryFolder::beside(draft)?;
        let disk = hatchback::system_disk();
        let flash = Flash::install(&disk, folder.path(), &mut reader, |_| {})
            .context("the bundle cannot be installed")?;
        let model = match Model::open_to_probe(&flash, Budget::default(), &|| {}) {
            Ok(model) => Arc::new(model),
            Err(e) if e.is_fault_of_release() => return Err(e.into()),
            Err(e @ (OpenError::Flash(_) | OpenError::Segment(_))) => return Err(e.into()),
            Err(e) => return Ok((None, Proof::NotScored(e.to_string()))),
        };
        let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));

        let mut chosen = None;
        if self.can_be_narrow {
            let first = &samples[..samples.len().min(PROBE_INPUTS_MAX)];
            let inputs = ProbeInputs::collect(&mut worker, first)?;
            chosen = Some(weights::choose(self.onnx, model.schema(), &inputs)?);
        }
        if !self.is_proven {
            return Ok((chosen, Proof::NotScored("this caller asked for no proof".to_owned())));
        }
        let network = model.schema().load_dense(chosen.as_deref().unwrap_or(self.onnx).to_vec())?;
        let probed = score(&mut worker, &network, samples)?;
        Ok((chosen, Proof::Scored(probed)))
    }
}

/// Scores `samples` with `network` on the rows of the worker's model.
fn score(worker: &mut Worker, network: &DenseEngine, samples: &[Sample]) -> Result<Probed> {
    let mut probed = Probed::default();
    for (number, sample) in samples.iter().enumerate() {
        let inputs = ProbeInputs::collect(worker, std::slice::from_ref(sample))
            .map_err(|e| renumbered(e, number))?;
        let scores = inputs.scores(network)?;
        let added = probed.add(sample, &scores);
        added.map_err(|problem| anyhow!("probe sample {number}: {problem}"))?;
    }
    Ok(probed)
}

/// Returns the error with the number of the sample in the probe set.
fn renumbered(error: OpenError, number: usize) -> OpenError {
    match error {
        OpenError::Probe { problem, .. } => OpenError::Probe { sample: number, problem },
        other => other,
    }
}

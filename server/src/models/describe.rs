//! Descriptions of the server and of a model: metadata, configuration and statistics. Never changes
//! anything.

use crate::front::Front;
use crate::metrics::ns;
use crate::problem::{Code, Problem, not_served};
use crate::proto::{
    DataType, InferStatistics, ModelConfig, ModelInput, ModelMetadataResponse, ModelOutput,
    ModelStatistics, ModelStatisticsResponse, ServerMetadataResponse, StatisticDuration,
    TensorMetadata,
};
use crate::tensors::Layout;
use crate::tensors::outputs::Output;
use hatchback::schema::key_function::KeyFunction;
use hatchback::{Model, Served, Shortened};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The extensions of the protocol that the server has.
const EXTENSIONS: [&str; 5] =
    ["binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics"];
/// The platform of every model in its metadata.
const PLATFORM: &str = "hatchback";

/// Returns the number of a configuration for the type of a tensor.
fn data_type(datatype: &str) -> i32 {
    let name = format!("TYPE_{}", if datatype == "BYTES" { "STRING" } else { datatype });
    DataType::from_str_name(&name).unwrap_or_default().into()
}

/// Returns the metadata of the server.
pub fn server() -> ServerMetadataResponse {
    ServerMetadataResponse {
        name: PLATFORM.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        extensions: EXTENSIONS.map(str::to_owned).to_vec(),
    }
}

/// Returns the model of `served`. Its version is the sequence of its generation.
///
/// # Errors
/// The model was unloaded, or `version` is given and is another one.
pub fn version(served: &Served, version: &str) -> Result<Arc<Model>, Problem> {
    let name = served.name();
    let model = served.model().ok_or_else(|| not_served(name))?;
    check_version(name, model.generation().sequence, version)?;
    Ok(model)
}

/// Checks that the `sequence` of the generation of model `name` is `version`, if one is given.
///
/// # Errors
/// `version` is another one.
pub fn check_version(name: &str, sequence: u64, version: &str) -> Result<(), Problem> {
    if version.is_empty() || version == sequence.to_string() {
        return Ok(());
    }
    let version = Shortened(version);
    let message = format!("model `{name}` serves version {sequence}, not `{version}`");
    Err(Problem::new(Code::NotFound, message))
}

/// Returns the model of the handle with this `name`, as [`version`] does.
///
/// # Errors
/// There is no such model or version.
pub fn opened(front: &Front, name: &str, asked: &str) -> Result<Arc<Model>, Problem> {
    version(&*front.served(name)?, asked)
}

/// Returns the version of `model`.
pub fn version_of(model: &Model) -> String {
    model.generation().sequence.to_string()
}

fn tensor(name: &str, datatype: &str, shape: Vec<i64>) -> TensorMetadata {
    TensorMetadata { name: name.to_owned(), datatype: datatype.to_owned(), shape }
}

fn inputs(layout: &Layout) -> Vec<TensorMetadata> {
    let dense = layout.dense.iter().zip([false, true]).filter_map(|(name, shared)| {
        let width = layout.schema.dense_of(shared).count();
        (width > 0).then(|| tensor(name, "FP32", vec![-1, width as i64]))
    });
    let features = layout.schema.features.iter().filter(|feature| !feature.retired);
    let features = features.flat_map(|f| {
        let shape = vec![-1, f.hotness_max.into()];
        let keys = match &f.key {
            KeyFunction::Key => Some(tensor(&f.name, "INT64", shape.clone())),
            // Its columns are inputs already.
            KeyFunction::Cross { .. } => None,
            raw => Some(tensor(&format!("{}.values", f.name), raw_type(raw), shape.clone())),
        };
        let weights = f.weighted.then(|| tensor(&format!("{}.weights", f.name), "FP32", shape));
        keys.into_iter().chain(weights)
    });
    dense.chain(features).collect()
}

/// Returns the type of the values that `function` is made for.
fn raw_type(function: &KeyFunction) -> &'static str {
    match function {
        KeyFunction::Key | KeyFunction::Modulo { .. } | KeyFunction::Range { .. } => "INT64",
        KeyFunction::Hash { .. } | KeyFunction::Vocabulary { .. } | KeyFunction::Cross { .. } => {
            "BYTES"
        }
        KeyFunction::Buckets { .. } => "FP64",
    }
}

fn outputs(layout: &Layout, width: usize) -> Vec<TensorMetadata> {
    let outputs = layout.outputs.list.iter();
    let output = |o: &Output| tensor(&o.name, o.datatype(), o.shape(-1, width));
    outputs.map(output).collect()
}

/// Returns the metadata of the model `name`.
///
/// # Errors
/// There is no such model or version.
pub fn model(front: &Front, name: &str, asked: &str) -> Result<ModelMetadataResponse, Problem> {
    let model = opened(front, name, asked)?;
    let layout = front.layout(name, model.schema());
    Ok(ModelMetadataResponse {
        name: name.to_owned(),
        versions: vec![version_of(&model)],
        platform: PLATFORM.to_owned(),
        inputs: inputs(&layout),
        outputs: outputs(&layout, model.outputs()),
    })
}

/// Returns the configuration of the model `name`. The first dimension, the batch, is left out.
///
/// # Errors
/// There is no such model or version.
pub fn config(front: &Front, name: &str, asked: &str) -> Result<ModelConfig, Problem> {
    let batch_max = opened(front, name, asked)?.budget().batch_max;
    let ModelMetadataResponse { name, inputs, outputs, .. } = model(front, name, asked)?;
    let dims = |tensor: &TensorMetadata| match tensor.shape.as_slice() {
        [_, rest @ ..] if !rest.is_empty() => rest.to_vec(),
        // The output `generation` has no batch dimension, so nothing is left out.
        all => all.to_vec(),
    };
    let input = |tensor: &TensorMetadata| ModelInput {
        name: tensor.name.clone(),
        data_type: data_type(&tensor.datatype),
        dims: dims(tensor),
        optional: tensor.datatype != "FP32",
    };
    let output = |tensor: &TensorMetadata| ModelOutput {
        name: tensor.name.clone(),
        data_type: data_type(&tensor.datatype),
        dims: dims(tensor),
    };
    Ok(ModelConfig {
        input: inputs.iter().map(input).collect(),
        output: outputs.iter().map(output).collect(),
        name,
        platform: PLATFORM.to_owned(),
        max_batch_size: batch_max as i32,
        backend: PLATFORM.to_owned(),
    })
}

/// Returns the statistics of the model `name`, or of every model if the name is empty.
///
/// # Errors
/// There is no such model or version.
pub fn statistics(
    front: &Front,
    name: &str,
    asked: &str,
) -> Result<ModelStatisticsResponse, Problem> {
    let names = if name.is_empty() { front.serving.names() } else { vec![name.to_owned()] };
    let model_stats = names.into_iter().map(|name| statistics_of(front, name, asked));
    Ok(ModelStatisticsResponse { model_stats: model_stats.collect::<Result<_, _>>()? })
}

fn statistics_of(front: &Front, name: String, asked: &str) -> Result<ModelStatistics, Problem> {
    let version = version_of(&*opened(front, &name, asked)?);
    let model = front.metrics.model(&name);
    let (answered, stages_ns) = (model.answered(), model.stages_ns());
    let of = |count: u64, ns: u64| Some(StatisticDuration { count, ns });
    let [input, queue, infer, output] = stages_ns.map(|ns| of(answered, ns));
    Ok(ModelStatistics {
        name,
        version,
        last_inference: model.last_unix_ms.load(Ordering::Relaxed),
        inference_count: model.samples.get(),
        execution_count: answered,
        inference_stats: Some(InferStatistics {
            success: of(answered, stages_ns.iter().sum()),
            fail: of(model.failed.get(), ns(&model.failed_seconds)),
            queue,
            compute_input: input,
            compute_infer: infer,
            compute_output: output,
        }),
        // JSON shows the empty list, and gRPC leaves it out.
        batch_stats: vec![],
    })
}

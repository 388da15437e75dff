//! The messages of the Open Inference Protocol v2 with the extensions of its model servers: the
//! repository, the configuration and the statistics of a model. Field numbers are the protocol's.
//! Fields that the server neither reads nor writes are left out; a decoder skips them. Answers have
//! the same fields as JSON.

use hyper::body::Bytes;
use prost::{Message, Oneof};
use serde::{Serialize, Serializer};
use std::collections::HashMap;

/// The full name of the service, as a path.
pub const SERVICE: &str = "/inference.GRPCInferenceService/";

/// The path of a health check, by gRPC's own protocol `grpc.health.v1`.
pub const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";

/// The states of a health check.
pub const SERVING: i32 = 1;
pub const NOT_SERVING: i32 = 2;

/// The request of a health check; an empty name is the whole server.
#[derive(Clone, PartialEq, Message)]
pub struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    pub service: String,
}

/// The answer to a health check.
#[derive(Clone, PartialEq, Message)]
pub struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    pub status: i32,
}

/// The types of tensors: in metadata, as the number of a configuration, and as its name in JSON.
pub const DATA_TYPES: [(&str, i32, &str); 5] = [
    ("INT32", 8, "TYPE_INT32"),
    ("INT64", 9, "TYPE_INT64"),
    ("FP32", 11, "TYPE_FP32"),
    ("FP64", 12, "TYPE_FP64"),
    ("BYTES", 13, "TYPE_STRING"),
];

fn data_type_name<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
    let found = DATA_TYPES.iter().find(|(_, of, _)| of == number);
    to.serialize_str(found.map_or("TYPE_INVALID", |(_, _, name)| *name))
}

/// A request without fields that the server reads.
#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

/// The answer to `ServerLive`, `ServerReady` and `ModelReady`.
#[derive(Clone, PartialEq, Message)]
pub struct HealthResponse {
    #[prost(bool, tag = "1")]
    pub is_true: bool,
}

/// The request of `ModelReady`, `ModelMetadata`, `ModelConfig` and `ModelStatistics`.
#[derive(Clone, PartialEq, Message)]
pub struct ModelRequest {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
}

/// The answer to `ServerMetadata`.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ServerMetadataResponse {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
    #[prost(string, repeated, tag = "3")]
    pub extensions: Vec<String>,
}

/// A tensor of a model's metadata, where -1 in its shape is any size, or of an answer.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct TensorMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub datatype: String,
    #[prost(int64, repeated, tag = "3")]
    pub shape: Vec<i64>,
}

/// The answer to `ModelMetadata`.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ModelMetadataResponse {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, repeated, tag = "2")]
    pub versions: Vec<String>,
    #[prost(string, tag = "3")]
    pub platform: String,
    #[prost(message, repeated, tag = "4")]
    pub inputs: Vec<TensorMetadata>,
    #[prost(message, repeated, tag = "5")]
    pub outputs: Vec<TensorMetadata>,
}

/// The value of a parameter.
#[derive(Clone, PartialEq, Message)]
pub struct InferParameter {
    #[prost(oneof = "ParameterValue", tags = "1, 2, 3, 4, 5")]
    pub value: Option<ParameterValue>,
}

/// The types that a parameter may have.
#[derive(Clone, PartialEq, Oneof)]
pub enum ParameterValue {
    #[prost(bool, tag = "1")]
    Bool(bool),
    #[prost(int64, tag = "2")]
    Int64(i64),
    #[prost(string, tag = "3")]
    Text(String),
    #[prost(double, tag = "4")]
    Double(f64),
    #[prost(uint64, tag = "5")]
    Uint64(u64),
}

/// The values of a tensor that are not sent as raw bytes.
#[derive(Clone, PartialEq, Message)]
pub struct InferTensorContents {
    #[prost(int32, repeated, tag = "2")]
    pub int_contents: Vec<i32>,
    #[prost(int64, repeated, tag = "3")]
    pub int64_contents: Vec<i64>,
    #[prost(uint64, repeated, tag = "5")]
    pub uint64_contents: Vec<u64>,
    #[prost(float, repeated, tag = "6")]
    pub fp32_contents: Vec<f32>,
    #[prost(double, repeated, tag = "7")]
    pub fp64_contents: Vec<f64>,
    #[prost(bytes = "bytes", repeated, tag = "8")]
    pub bytes_contents: Vec<Bytes>,
}

/// An input of `ModelInfer`.
#[derive(Clone, PartialEq, Message)]
pub struct InferInputTensor {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub datatype: String,
    #[prost(int64, repeated, tag = "3")]
    pub shape: Vec<i64>,
    #[prost(map = "string, message", tag = "4")]
    pub parameters: HashMap<String, InferParameter>,
    #[prost(message, optional, tag = "5")]
    pub contents: Option<InferTensorContents>,
}

/// An output that the caller of `ModelInfer` wants.
#[derive(Clone, PartialEq, Message)]
pub struct InferRequestedOutputTensor {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(map = "string, message", tag = "2")]
    pub parameters: HashMap<String, InferParameter>,
}

/// The request of `ModelInfer`.
#[derive(Clone, PartialEq, Message)]
pub struct ModelInferRequest {
    #[prost(string, tag = "1")]
    pub model_name: String,
    #[prost(string, tag = "2")]
    pub model_version: String,
    #[prost(string, tag = "3")]
    pub id: String,
    #[prost(map = "string, message", tag = "4")]
    pub parameters: HashMap<String, InferParameter>,
    #[prost(message, repeated, tag = "5")]
    pub inputs: Vec<InferInputTensor>,
    #[prost(message, repeated, tag = "6")]
    pub outputs: Vec<InferRequestedOutputTensor>,
    #[prost(bytes = "bytes", repeated, tag = "7")]
    pub raw_input_contents: Vec<Bytes>,
}

/// The answer to `ModelInfer`.
#[derive(Clone, PartialEq, Message)]
pub struct ModelInferResponse {
    #[prost(string, tag = "1")]
    pub model_name: String,
    #[prost(string, tag = "2")]
    pub model_version: String,
    #[prost(string, tag = "3")]
    pub id: String,
    #[prost(message, repeated, tag = "5")]
    pub outputs: Vec<TensorMetadata>,
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub raw_output_contents: Vec<Bytes>,
}

/// An input of a model's configuration.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ModelInput {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(int32, tag = "2")]
    #[serde(serialize_with = "data_type_name")]
    pub data_type: i32,
    #[prost(int64, repeated, tag = "4")]
    pub dims: Vec<i64>,
    #[prost(bool, tag = "8")]
    pub optional: bool,
}

/// An output of a model's configuration.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ModelOutput {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(int32, tag = "2")]
    #[serde(serialize_with = "data_type_name")]
    pub data_type: i32,
    #[prost(int64, repeated, tag = "3")]
    pub dims: Vec<i64>,
}

/// The configuration of a model.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ModelConfig {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub platform: String,
    #[prost(int32, tag = "4")]
    pub max_batch_size: i32,
    #[prost(message, repeated, tag = "5")]
    pub input: Vec<ModelInput>,
    #[prost(message, repeated, tag = "6")]
    pub output: Vec<ModelOutput>,
    #[prost(string, tag = "17")]
    pub backend: String,
}

/// The answer to `ModelConfig`.
#[derive(Clone, PartialEq, Message)]
pub struct ModelConfigResponse {
    #[prost(message, optional, tag = "1")]
    pub config: Option<ModelConfig>,
}

/// A number of requests and the time that they took.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct StatisticDuration {
    #[prost(uint64, tag = "1")]
    pub count: u64,
    #[prost(uint64, tag = "2")]
    pub ns: u64,
}

/// The statistics of a model's requests.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct InferStatistics {
    #[prost(message, optional, tag = "1")]
    pub success: Option<StatisticDuration>,
    #[prost(message, optional, tag = "2")]
    pub fail: Option<StatisticDuration>,
    #[prost(message, optional, tag = "3")]
    pub queue: Option<StatisticDuration>,
    #[prost(message, optional, tag = "4")]
    pub compute_input: Option<StatisticDuration>,
    #[prost(message, optional, tag = "5")]
    pub compute_infer: Option<StatisticDuration>,
    #[prost(message, optional, tag = "6")]
    pub compute_output: Option<StatisticDuration>,
}

/// The statistics of a model.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ModelStatistics {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
    #[prost(uint64, tag = "3")]
    pub last_inference: u64,
    #[prost(uint64, tag = "4")]
    pub inference_count: u64,
    #[prost(uint64, tag = "5")]
    pub execution_count: u64,
    #[prost(message, optional, tag = "6")]
    pub inference_stats: Option<InferStatistics>,
}

/// The answer to `ModelStatistics`.
#[derive(Clone, PartialEq, Message)]
pub struct ModelStatisticsResponse {
    #[prost(message, repeated, tag = "1")]
    pub model_stats: Vec<ModelStatistics>,
}

/// The request of `RepositoryIndex`.
#[derive(Clone, PartialEq, Message)]
pub struct RepositoryIndexRequest {
    #[prost(bool, tag = "2")]
    pub ready: bool,
}

/// A model of the repository.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ModelIndex {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
    #[prost(string, tag = "3")]
    pub state: String,
    #[prost(string, tag = "4")]
    pub reason: String,
}

/// The answer to `RepositoryIndex`.
#[derive(Clone, PartialEq, Message)]
pub struct RepositoryIndexResponse {
    #[prost(message, repeated, tag = "1")]
    pub models: Vec<ModelIndex>,
}

/// The request of `RepositoryModelLoad` and `RepositoryModelUnload`.
#[derive(Clone, PartialEq, Message)]
pub struct RepositoryModelRequest {
    #[prost(string, tag = "2")]
    pub model_name: String,
    /// Overrides of the configuration; their values are skipped.
    #[prost(map = "string, message", tag = "3")]
    pub parameters: HashMap<String, Empty>,
}

//! The messages of the front door, generated from the files in `server/proto`, under the names that
//! the server uses. Answers have the same fields as JSON.

use serde::Serializer;

// Outside `src`: nobody edits these lines. Messages without fields that are read are never made.
#[allow(clippy::pedantic, clippy::nursery, dead_code, missing_docs, unreachable_pub)]
mod generated {
    include!("../proto/messages.rs");
}

use generated::grpc::health::v1::health_check_response::ServingStatus;
use generated::inference::{
    infer_parameter, model_infer_request, model_infer_response, model_metadata_response,
    repository_index_response,
};

pub use generated::grpc::health::v1::{HealthCheckRequest, HealthCheckResponse};
pub use generated::grpc::reflection::v1 as reflection;
pub use generated::inference::{
    DataType, InferParameter, InferStatistics, InferTensorContents, ModelConfig,
    ModelConfigResponse, ModelInferRequest, ModelInferResponse, ModelInput, ModelMetadataResponse,
    ModelOutput, ModelStatistics, ModelStatisticsResponse, RepositoryIndexRequest,
    RepositoryIndexResponse, ServerMetadataResponse, StatisticDuration,
};
pub use infer_parameter::ParameterChoice as ParameterValue;
pub use model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
pub use model_infer_response::InferOutputTensor;
pub use model_metadata_response::TensorMetadata;
pub use repository_index_response::ModelIndex;

/// The request of `ModelReady`, `ModelMetadata`, `ModelConfig` and `ModelStatistics`.
pub use generated::inference::ModelReadyRequest as ModelRequest;
/// The answer to `ServerLive`, `ServerReady` and `ModelReady`, which differ in the field's name.
pub use generated::inference::ModelReadyResponse as HealthResponse;
/// The request of `RepositoryModelLoad` and `RepositoryModelUnload`, and the answer to them.
pub use generated::inference::{
    RepositoryModelLoadRequest as RepositoryModelRequest, RepositoryModelLoadResponse as Empty,
};

/// The full name of the service, as a path.
pub const SERVICE: &str = "/inference.GRPCInferenceService/";

/// The path of a health check, by gRPC's own protocol `grpc.health.v1`.
pub const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";

/// The paths of server reflection, by gRPC's own protocol `grpc.reflection.v1`. Its older name has
/// the same messages, and some clients use only that.
pub const REFLECTION: [&str; 2] = [
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// The states of a health check.
pub const SERVING: i32 = ServingStatus::Serving as i32;
pub const NOT_SERVING: i32 = ServingStatus::NotServing as i32;

/// In JSON a type has its name.
fn data_type_name<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(DataType::try_from(*number).unwrap_or_default().as_str_name())
}

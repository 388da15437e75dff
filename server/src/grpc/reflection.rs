//! Server reflection: a caller reads the services and their messages from the server itself. They
//! are the files in `server/proto`, compiled by `server/proto/generate`.

use crate::problem::{Code, Problem, checked};
use crate::proto::reflection::server_reflection_request::MessageRequest;
use crate::proto::reflection::server_reflection_response::MessageResponse;
use crate::proto::reflection::{
    ErrorResponse, FileDescriptorResponse, ListServiceResponse, ServerReflectionRequest,
    ServerReflectionResponse, ServiceResponse,
};
use hatchback::Shortened;
use hyper::body::Bytes;

/// A file of messages and services.
struct File {
    name: &'static str,
    /// The full names of its services.
    services: &'static [&'static str],
    /// The full names of all that it defines.
    symbols: &'static [&'static str],
    descriptor: &'static [u8],
}

// Outside `src`: nobody edits these lines.
include!("../../proto/files.rs");

/// Answers `request`.
///
/// # Errors
/// It asks for a name that is too long, or for nothing that this server knows.
pub fn reflect(request: ServerReflectionRequest) -> Result<ServerReflectionResponse, Problem> {
    checked(&request.host)?;
    let response = match &request.message_request {
        Some(MessageRequest::ListServices(of)) => checked(of).map(|_| services())?,
        Some(MessageRequest::FileByFilename(name)) => {
            file(checked(name)?, |file| file.name == name)
        }
        Some(MessageRequest::FileContainingSymbol(name)) => {
            file(checked(name)?, |file| defines(file, name))
        }
        None => return Err(Problem::new(Code::Unimplemented, "no such reflection")),
    };
    let message_response = Some(response);
    let valid_host = request.host.clone();
    let original_request = Some(request);
    Ok(ServerReflectionResponse { valid_host, original_request, message_response })
}

fn services() -> MessageResponse {
    let names = FILES.iter().flat_map(|file| file.services);
    let service = names.map(|name| ServiceResponse { name: (*name).to_owned() }).collect();
    MessageResponse::ListServicesResponse(ListServiceResponse { service })
}

/// Returns whether `file` defines `symbol`, or what `symbol` is a part of.
fn defines(file: &File, symbol: &str) -> bool {
    let is_part = |rest: &str| rest.is_empty() || rest.starts_with('.');
    file.symbols.iter().any(|own| symbol.strip_prefix(own).is_some_and(is_part))
}

fn file(name: &str, is_it: impl Fn(&File) -> bool) -> MessageResponse {
    if let Some(file) = FILES.iter().find(|file| is_it(file)) {
        let file_descriptor_proto = vec![Bytes::from_static(file.descriptor)];
        return MessageResponse::FileDescriptorResponse(FileDescriptorResponse {
            file_descriptor_proto,
        });
    }
    let error_message = format!("no file for `{}`", Shortened(name));
    let error_code = Code::NotFound.grpc() as i32;
    MessageResponse::ErrorResponse(ErrorResponse { error_code, error_message })
}

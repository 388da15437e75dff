//! Server reflection: a caller reads the services and their messages from the server itself. They
//! are the files in `server/proto`, compiled.

use crate::grpc::request::text_of;
use crate::grpc::wire::Fields;
use crate::problem::{Code, Problem, checked};
use crate::proto::reflection::server_reflection_request::MessageRequest;
use crate::proto::reflection::server_reflection_response::MessageResponse;
use crate::proto::reflection::{
    ErrorResponse, FileDescriptorResponse, ListServiceResponse, ServerReflectionRequest,
    ServerReflectionResponse, ServiceResponse,
};
use hatchback::Shortened;
use hyper::body::Bytes;

/// A `FileDescriptorSet`: its only field is a list of files.
const DESCRIPTORS: &[u8] = include_bytes!("../../proto/descriptors.bin");
/// Fields of a file.
const NAME: u64 = 1;
const PACKAGE: u64 = 2;
const SERVICE: u64 = 6;
/// Fields of a file with what it defines: messages, enums and services.
const DEFINED: [u64; 3] = [4, 5, SERVICE];

/// Answers `request`.
///
/// # Errors
/// It asks for a name that is too long, or for nothing that this server knows.
pub fn reflect(request: ServerReflectionRequest) -> Result<ServerReflectionResponse, Problem> {
    checked(&request.host)?;
    let response = match &request.message_request {
        Some(MessageRequest::ListServices(of)) => checked(of).map(|_| services())?,
        Some(MessageRequest::FileByFilename(name)) => {
            file(checked(name)?, |file| text_of(file, NAME).is_ok_and(|of| of == name))
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

fn files() -> impl Iterator<Item = &'static [u8]> {
    Fields(DESCRIPTORS).flatten().filter_map(|file| file.bytes().ok())
}

/// Returns the names in the field `number` of `file`.
fn names(file: &'static [u8], number: u64) -> impl Iterator<Item = &'static str> {
    let fields = Fields(file).flatten().filter(move |field| field.number == number);
    fields.filter_map(|field| text_of(field.bytes().ok()?, NAME).ok())
}

fn services() -> MessageResponse {
    let of_file = |file| {
        let package = text_of(file, PACKAGE).unwrap_or_default();
        names(file, SERVICE).map(move |name| ServiceResponse { name: format!("{package}.{name}") })
    };
    let service = files().flat_map(of_file).collect();
    MessageResponse::ListServicesResponse(ListServiceResponse { service })
}

/// Returns whether `file` defines `symbol`, or what `symbol` is a part of.
fn defines(file: &'static [u8], symbol: &str) -> bool {
    let package = text_of(file, PACKAGE).unwrap_or_default();
    let rest = symbol.strip_prefix(package).and_then(|rest| rest.strip_prefix('.'));
    let first = rest.and_then(|rest| rest.split('.').next());
    first.is_some_and(|first| DEFINED.iter().any(|of| names(file, *of).any(|n| n == first)))
}

fn file(name: &str, is_it: impl Fn(&'static [u8]) -> bool) -> MessageResponse {
    if let Some(file) = files().find(|file| is_it(file)) {
        let file_descriptor_proto = vec![Bytes::from_static(file)];
        return MessageResponse::FileDescriptorResponse(FileDescriptorResponse {
            file_descriptor_proto,
        });
    }
    let error_message = format!("no file for `{}`", Shortened(name));
    let error_code = Code::NotFound.grpc() as i32;
    MessageResponse::ErrorResponse(ErrorResponse { error_code, error_message })
}

//! Routes a request to its answer by protocol, path and method. Checks the limits that hold for
//! every request.

mod control;
pub mod status;

use self::control::{Change, check_right};
use crate::connections::memory::{ByteBudget, Reservation, Share};
use crate::connections::{Connection, Peer};
use crate::front::{Front, Published};
use crate::grpc;
use crate::grpc::infer as grpc_infer;
use crate::grpc::reflection::reflect;
use crate::http::infer::{self as http_infer, Target};
use crate::http::page::page;
use crate::http::{
    Answered, header_text, json_reply, read_body, read_until, refusal, reply, skip_rest,
};
use crate::infer::{Call, Order};
use crate::limits::{
    CONTROL_BYTES_MAX, PATH_BYTES_MAX, REQUEST_BYTES, TRACE_BYTES_MAX, WINDOW_BYTES_MAX,
};
use crate::metrics::trace::Protocol;
use crate::models::describe;
use crate::models::repository;
use crate::problem::{Code, Problem, checked};
use crate::proto::{
    Empty, HEALTH_CHECK, HealthCheckRequest, HealthCheckResponse, HealthResponse,
    ModelConfigResponse, ModelRequest, NOT_SERVING, REFLECTION, RepositoryIndexRequest,
    RepositoryIndexResponse, RepositoryModelRequest, SERVICE, SERVING,
};
use crate::tensors::outputs::Wants;
use crate::tensors::{Layout, Read, batch_of};
use hatchback::schema::batch::Batch;
use hatchback::schema::object::Object;
use hatchback::{Schema, Shortened};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{ACCEPT, CONTENT_ENCODING, EXPECT, HOST, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, StatusCode, Version};
use percent_encoding::percent_decode_str;
use prost::Message;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The methods of gRPC whose request is one small message.
const UNARY: [&str; 10] = [
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
];
/// The header of a W3C trace, which a caller may send.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const JSON_TYPE: &str = "application/json";
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const UNKNOWN_PATH: &str = "no such path; a model is at /v2/models/NAME, and POST \
                            /v2/repository/index lists the models";

/// A request whose headers were read. Their other parts are dropped before the body arrives, so
/// that a caller cannot make the server keep headers.
pub struct Received {
    at: Instant,
    protocol: Protocol,
    trace: Option<HeaderValue>,
    may_change: bool,
    memory: Reservation,
    head: Result<Head, Problem>,
    body: Incoming,
    /// Whether an answer before the end of the body would end a connection on which the caller
    /// still writes.
    has_rest: bool,
}

/// What is kept of the headers of a request.
#[derive(Default)]
struct Head {
    method: Method,
    path: String,
    /// The time that a call of gRPC waits.
    timeout: Option<Duration>,
    /// The length of the JSON before binary data.
    json_bytes: Option<usize>,
    /// Whether the caller reads OpenMetrics.
    reads_openmetrics: bool,
}

impl Received {
    /// Reads the headers of `request` and checks the limits that hold for every request.
    pub fn new(front: &Front, connection: &Connection, request: Request<Incoming>) -> Self {
        let at = Instant::now();
        let (parts, body) = request.into_parts();
        let headers = &parts.headers;
        // A tunnel, which CONNECT asks for, begins with the 200 of every call of gRPC.
        let is_grpc = parts.method == Method::POST && grpc::is_call(headers);
        let protocol = if is_grpc { Protocol::Grpc } else { Protocol::Http };
        let trace = headers.get(TRACEPARENT).filter(|trace| trace.len() <= TRACE_BYTES_MAX);
        // A copy, because a part of the headers keeps all of them.
        let trace = trace.and_then(|trace| HeaderValue::from_bytes(trace.as_bytes()).ok());
        let may_change = control::has_right(front, connection, headers);
        let mut memory = connection.share.reservation();
        let head = Head::read(front, connection, protocol, &parts, &mut memory);
        // A caller that expects leave to send its body sends none after a refusal.
        let has_rest = parts.version < Version::HTTP_2 && !headers.contains_key(EXPECT);
        Self { at, protocol, trace, may_change, memory, head, body, has_rest }
    }
}

impl Head {
    fn read(
        front: &Front,
        connection: &Connection,
        protocol: Protocol,
        parts: &Parts,
        memory: &mut Reservation,
    ) -> Result<Self, Problem> {
        let Parts { method, uri, headers, .. } = parts;
        let header_bytes = headers.iter().map(|(name, value)| name.as_str().len() + value.len());
        connection.count_used(uri.path().len() + header_bytes.sum::<usize>());
        connection.count_request(front.rules.requests_per_s_max)?;
        check_host(connection, parts)?;
        if method.as_str().len() + uri.path().len() > PATH_BYTES_MAX {
            let message = format!("a path has at most {PATH_BYTES_MAX} bytes with its method");
            return Err(Problem::invalid(message));
        }
        front.connections.grow(memory, REQUEST_BYTES)?;

        let mut head =
            Self { method: method.clone(), path: uri.path().to_owned(), ..Self::default() };
        if protocol == Protocol::Grpc {
            head.timeout = grpc::timeout(headers)?;
            return Ok(head);
        }
        if let Some(encoding) = headers.get(CONTENT_ENCODING).filter(|e| *e != "identity") {
            let encoding = header_text(encoding);
            let message = format!("content-encoding `{encoding}`: send the body uncompressed");
            return Err(Problem::new(Code::Unimplemented, message));
        }
        head.json_bytes = http_infer::json_bytes(headers)?;
        let mut accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        head.reads_openmetrics =
            accepted.any(|value| value.contains("application/openmetrics-text"));
        Ok(head)
    }

    /// Checks that the request has the only method of its path.
    fn check(&self, method: &Method) -> Result<(), Problem> {
        if self.method == *method { Ok(()) } else { Err(self.unknown(Some(method))) }
    }

    /// Returns what `answer` returns, if the request is a GET.
    fn get(&self, answer: impl FnOnce() -> Result<Answered, Problem>) -> Result<Answered, Problem> {
        self.check(&Method::GET).and_then(|()| answer())
    }

    /// Returns the problem of a path that does not exist, or has the method `allowed` only.
    fn unknown(&self, allowed: Option<&Method>) -> Problem {
        let (method, path) = (Shortened(self.method.as_str()), Shortened(&self.path));
        let (code, what) = match allowed {
            Some(allowed) => (Code::Method, format!("use the method {allowed}")),
            None => (Code::NotFound, UNKNOWN_PATH.to_owned()),
        };
        Problem::new(code, format!("{method} {path}: {what}"))
    }
}

/// Answers `request` of `connection`. The answer holds its bytes of the budget until the caller has
/// taken it.
pub async fn answer(front: &Arc<Front>, connection: &Connection, request: Received) -> Answered {
    let Received { at: received, protocol, trace, may_change, memory, head, mut body, has_rest } =
        request;
    let (model, header, has_body) = (String::new(), trace.clone(), !body.is_end_stream());
    let timeout = head.as_ref().ok().and_then(|head| head.timeout);
    let mut call =
        Call { front, connection, protocol, received, memory, model, trace, timeout, may_change };
    let answered = match (head, protocol) {
        (Err(problem), _) => Err(problem),
        (Ok(head), Protocol::Grpc) => answer_grpc(&mut call, &head, &mut body).await,
        (Ok(head), Protocol::Http) => answer_http(&mut call, &head, &mut body).await,
    };

    let Call { model, mut memory, .. } = call;
    let answered = answered.and_then(|answered| {
        let bytes = REQUEST_BYTES + answered.body().data.len();
        // The time to take the answer begins now, however long the request took.
        connection.note_moved(bytes);
        front.connections.resize(&mut memory, bytes).map(|()| answered)
    });
    let mut answered = answered.unwrap_or_else(|problem| {
        front.metrics.refuse(&model, protocol, &problem, received.elapsed());
        if has_body && !has_rest {
            // What is left of the body is read and dropped. It belongs to a request.
            connection.count_used(WINDOW_BYTES_MAX as usize);
        }
        front.connections.make_room_to_decode(&memory);
        // `REQUEST_BYTES` has room for a message.
        memory.shrink(REQUEST_BYTES);
        match protocol {
            Protocol::Grpc => grpc::refusal(&problem),
            Protocol::Http => refusal(&problem),
        }
    });
    if let Some(trace) = header {
        answered.headers_mut().insert(TRACEPARENT, trace);
    }
    if has_rest {
        // A caller that still writes would get a broken connection in place of the answer.
        skip_rest(front, connection, &mut body).await;
    }
    hold(&mut answered, memory);
    answered
}

/// Lets `answered` hold `memory` until the caller has taken it.
fn hold(answered: &mut Answered, memory: Reservation) {
    let data = std::mem::take(&mut answered.body_mut().data);
    if !data.is_empty() {
        answered.body_mut().data = memory.hold(data);
    } else if let Some(message) = answered.headers_mut().get_mut(grpc::MESSAGE) {
        // The refusal of a call has no body: its last bytes are this header.
        let text = memory.hold(Bytes::copy_from_slice(message.as_bytes()));
        if let Ok(mut held) = HeaderValue::from_maybe_shared(text) {
            // Otherwise the table of HPACK would keep the value after it was sent.
            held.set_sensitive(true);
            *message = held;
        }
    }
}

async fn answer_grpc(
    call: &mut Call<'_>,
    head: &Head,
    body: &mut Incoming,
) -> Result<Answered, Problem> {
    if head.path == HEALTH_CHECK {
        let body = read_body(call, body, CONTROL_BYTES_MAX).await?;
        return service_health(call.front, decode(grpc::message_of(&body)?)?);
    }
    if REFLECTION.contains(&&*head.path) {
        // A client keeps its stream open for a further request; it opens another one for that.
        let body = read_until(call, body, CONTROL_BYTES_MAX, grpc::is_whole).await?;
        return Ok(message_reply(&reflect(decode(grpc::message_of(&body)?)?)?));
    }
    let no_method = || format!("no method `{}`", Shortened(&head.path));
    let unknown = || Problem::new(Code::Unimplemented, no_method());
    let method = head.path.strip_prefix(SERVICE).ok_or_else(unknown)?;
    if method == "ModelInfer" {
        let bytes_max = call.front.rules.request_bytes_max as usize;
        let body = read_body(call, body, bytes_max).await?;
        return grpc_infer::infer(call, body).await;
    }

    // Before the body: the client of a stream never ends it.
    if !UNARY.contains(&method) {
        return Err(unknown());
    }
    let body = read_body(call, body, CONTROL_BYTES_MAX).await?;
    let message = grpc::message_of(&body)?;
    match method {
        "ServerLive" => Ok(health(true)),
        "ServerReady" => Ok(health(is_ready(call.front))),
        "ServerMetadata" => Ok(message_reply(&describe::server())),
        "ModelReady" | "ModelMetadata" | "ModelConfig" | "ModelStatistics" => {
            let ModelRequest { name, version } = decode(message)?;
            about_model(call.front, method, checked(&name)?, checked(&version)?)
        }
        "RepositoryIndex" => match decode(message)? {
            RepositoryIndexRequest { ready: false } => {
                Ok(grpc::reply(call.front.shown().index_message))
            }
            RepositoryIndexRequest { ready: true } => {
                let models = repository::index(call.front, &[]);
                Ok(message_reply(&RepositoryIndexResponse { models }))
            }
        },
        "RepositoryModelLoad" => change_grpc(call, message, Change::Load).await,
        "RepositoryModelUnload" => change_grpc(call, message, Change::Unload).await,
        _ => Err(unknown()),
    }
}

/// Answers a health check for the whole server or for its service, by their names.
fn service_health(front: &Front, request: HealthCheckRequest) -> Result<Answered, Problem> {
    let service = checked(&request.service)?;
    if !service.is_empty() && service != SERVICE.trim_matches('/') {
        let message = format!("no service `{}`", Shortened(service));
        return Err(Problem::new(Code::NotFound, message));
    }
    let status = if is_ready(front) { SERVING } else { NOT_SERVING };
    Ok(message_reply(&HealthCheckResponse { status }))
}

fn decode<M: Message + Default>(message: Bytes) -> Result<M, Problem> {
    M::decode(message).map_err(|e| Problem::invalid(e.to_string()))
}

/// Answers `method`, which asks for a description of the model `name`.
fn about_model(
    front: &Front,
    method: &str,
    name: &str,
    version: &str,
) -> Result<Answered, Problem> {
    match method {
        "ModelReady" => Ok(health(describe::opened(front, name, version).is_ok())),
        "ModelMetadata" => Ok(message_reply(&describe::model(front, name, version)?)),
        "ModelConfig" => {
            let config = Some(describe::config(front, name, version)?);
            Ok(message_reply(&ModelConfigResponse { config }))
        }
        _ => Ok(message_reply(&describe::statistics(front, name, version)?)),
    }
}

fn message_reply(message: &impl Message) -> Answered {
    grpc::reply(grpc::frame(message).into())
}

fn health(ready: bool) -> Answered {
    message_reply(&HealthResponse { ready })
}

async fn change_grpc(
    call: &mut Call<'_>,
    message: Bytes,
    change: Change,
) -> Result<Answered, Problem> {
    check_right(call)?;
    let RepositoryModelRequest { model_name, parameters } = decode(message)?;
    let overrides = ["config", "file:"];
    if let Some(name) = parameters.keys().find(|key| overrides.iter().any(|o| key.starts_with(o))) {
        return Err(overrides_files(name));
    }
    control::change(call, checked(&model_name)?, change).await?;
    Ok(message_reply(&Empty {}))
}

/// Returns whether the server serves a model.
fn is_ready(front: &Front) -> bool {
    !front.serving.names().is_empty()
}

async fn answer_http(
    call: &mut Call<'_>,
    head: &Head,
    body: &mut Incoming,
) -> Result<Answered, Problem> {
    let part = |part| {
        let part = percent_decode_str(part).decode_utf8();
        part.map_err(|e| Problem::invalid(format!("path: {e}")))
    };
    // Split before the parts are decoded: an encoded slash belongs to a name.
    let path = head.path.trim_matches('/').split('/').map(part).collect::<Result<Vec<_>, _>>()?;
    let path: Vec<&str> = path.iter().map(|part| checked(part)).collect::<Result<_, _>>()?;

    let front = call.front;
    match path.as_slice() {
        [""] => head.get(|| Ok(page())),
        ["metrics"] => head.get(|| {
            let Published { metrics, metrics_prometheus, .. } = front.shown();
            Ok(match head.reads_openmetrics {
                true => reply(StatusCode::OK, METRICS_TYPE, metrics),
                false => reply(StatusCode::OK, PROMETHEUS_TYPE, metrics_prometheus),
            })
        }),
        ["status"] => head.get(|| Ok(reply(StatusCode::OK, JSON_TYPE, front.shown().status))),
        ["actions", action, name] => {
            head.check(&Method::POST)?;
            check_right(call)?;
            let done = control::act(call, action, name).await?;
            Ok(json_reply(&json!({"done": done})))
        }
        ["v2"] => head.get(|| Ok(json_reply(&describe::server()))),
        ["v2", "health", "live"] => head.get(|| Ok(json_reply(&json!({"live": true})))),
        ["v2", "health", "ready"] => head.get(|| ready_reply(is_ready(front))),
        // Before the paths of one model, which would take `stats` for a name.
        ["v2", "models", "stats"] => {
            head.get(|| Ok(json_reply(&describe::statistics(front, "", "")?)))
        }
        ["v2", "models", model, rest @ ..] => {
            let (version, rest) = match rest {
                ["versions", version, rest @ ..] => (*version, rest),
                _ => ("", rest),
            };
            answer_model(call, Target { model, version }, head, rest, body).await
        }
        ["v2", "repository", "index"] => {
            head.check(&Method::POST)?;
            let body = read_body(call, body, CONTROL_BYTES_MAX).await?;
            let IndexOrder { ready } = read_object(&body)?;
            Ok(match ready {
                true => json_reply(&repository::index(front, &[])),
                false => reply(StatusCode::OK, JSON_TYPE, front.shown().index),
            })
        }
        ["v2", "repository", "models", name, change @ ("load" | "unload")] => {
            head.check(&Method::POST)?;
            let change = if *change == "load" { Change::Load } else { Change::Unload };
            change_http(call, body, name, change).await
        }
        _ => Err(head.unknown(None)),
    }
}

/// Answers a request about one model.
async fn answer_model(
    call: &mut Call<'_>,
    target: Target<'_>,
    head: &Head,
    rest: &[&str],
    body: &mut Incoming,
) -> Result<Answered, Problem> {
    let (front, Target { model, version }) = (call.front, target);
    match rest {
        [what @ ("infer" | "prefetch")] => {
            head.check(&Method::POST)?;
            let body = read_body(call, body, front.rules.request_bytes_max as usize).await?;
            if *what == "infer" {
                return http_infer::infer(call, target, head.json_bytes, body).await;
            }
            let queued = http_infer::prefetch(call, target, head.json_bytes, &body)?;
            Ok(json_reply(&json!({"queued": queued})))
        }
        ["explain"] => {
            head.check(&Method::POST)?;
            check_right(call)?;
            describe::opened(front, model, version)?;
            let line = read_body(call, body, front.rules.request_bytes_max as usize).await?;
            call.memory.grow(http_infer::GROWTH * line.len())?;
            Ok(json_reply(&control::explain(call, model, line).await?))
        }
        [] => head.get(|| Ok(json_reply(&describe::model(front, model, version)?))),
        ["ready"] => head.get(|| ready_reply(describe::opened(front, model, version).is_ok())),
        ["config"] => head.get(|| Ok(json_reply(&describe::config(front, model, version)?))),
        ["stats"] => head.get(|| Ok(json_reply(&describe::statistics(front, model, version)?))),
        _ => Err(head.unknown(None)),
    }
}

fn ready_reply(is_ready: bool) -> Result<Answered, Problem> {
    let ready = is_ready.then(|| json_reply(&json!({"ready": true})));
    ready.ok_or_else(|| Problem::new(Code::Unavailable, "not ready"))
}

/// The body of a request for the index of models.
#[derive(Default, Deserialize)]
#[serde(default)]
struct IndexOrder {
    /// Whether it asks for the models that are served only.
    ready: bool,
}

/// Reads the body of a request that is one object of JSON, or empty.
fn read_object<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let body = if body.is_empty() || body == b"null" { b"{}" } else { body };
    let object = serde_json::from_slice(body).map(|Object(object)| object);
    object.map_err(|e| Problem::invalid(e.to_string()))
}

/// Returns the problem of a load whose parameter `name` would replace a file of the model.
fn overrides_files(name: &str) -> Problem {
    let what = "not supported; a model is loaded from its own files only";
    Problem::invalid(format!("parameter `{}`: {what}", Shortened(name)))
}

async fn change_http(
    call: &mut Call<'_>,
    body: &mut Incoming,
    name: &str,
    change: Change,
) -> Result<Answered, Problem> {
    // Before the body is read: a caller without the right takes no memory.
    check_right(call)?;
    let body = read_body(call, body, CONTROL_BYTES_MAX).await?;
    let order: Map<String, Value> = read_object(&body)?;
    if order.get("parameters").is_some_and(|own| !own["config"].is_null()) {
        return Err(overrides_files("config"));
    }
    control::change(call, name, change).await?;
    Ok(json_reply(&json!({})))
}

/// Decodes `body`, a request to a model with `schema`, into a batch; for fuzzing. Over HTTP it
/// begins with `json_bytes` of JSON; without these it is a message of gRPC. Never keeps more bytes
/// than the front door's budget allows.
///
/// # Errors
/// The request is malformed, does not fit the model, or exceeds the budget.
pub fn decode_request(
    body: &[u8],
    json_bytes: Option<usize>,
    schema: &Arc<Schema>,
    batch_max: usize,
) -> Result<Batch, Problem> {
    let mut memory = Share::new(&ByteBudget::new(64 << 20, 32 << 20)).reservation();
    memory.grow(body.len())?;
    let target = Target { model: "", version: "" };
    let Order { tensors, asked, every, top_k, .. } = match json_bytes {
        Some(_) => http_infer::order(target, json_bytes, body, &mut memory)?,
        None => grpc_infer::read(body, &mut memory)?,
    };
    let layout = Layout::new(Arc::clone(schema));
    Wants::new(&layout.outputs, &asked, every, top_k.is_some())?;
    batch_of(&layout, &tensors, Read::All, batch_max, &mut memory)
}

/// Refuses a request on the loopback device that names another host, in any of its headers or in
/// its address: a web page in a browser of this machine may have sent it.
fn check_host(connection: &Connection, parts: &Parts) -> Result<(), Problem> {
    if connection.peer != Peer::Loopback {
        return Ok(());
    }
    // HTTP/2 has the host in the request's address, and HTTP/1.1 may have it there too.
    let address = parts.uri.authority().map(|authority| authority.as_str().as_bytes());
    let headers = parts.headers.get_all(HOST).iter().map(HeaderValue::as_bytes);
    let mut hosts = address.into_iter().chain(headers).peekable();
    let other = match hosts.peek() {
        None => Some(&b""[..]),
        Some(_) => hosts.find(|host| !is_this_machine(host)),
    };
    let Some(other) = other else { return Ok(()) };
    let other = String::from_utf8_lossy(other);
    let message = format!("host `{}` is not this machine", Shortened(&other));
    Err(Problem::new(Code::Denied, message))
}

fn is_this_machine(host: &[u8]) -> bool {
    let host = host.to_ascii_lowercase();
    let names = [&b"localhost"[..], b"127.0.0.1", b"[::1]"];
    names.iter().any(|name| match host.strip_prefix(*name) {
        Some([b':', port @ ..]) => port.iter().all(u8::is_ascii_digit),
        rest => rest == Some(&[]),
    })
}

//! Routes a request to its answer by protocol, path and method. Checks the limits that hold for
//! every request.

use crate::connections::{Connection, Peer};
use crate::control::{self, Change, check_right};
use crate::describe;
use crate::front::Front;
use crate::grpc;
use crate::grpc_infer;
use crate::http::{Answered, json_reply, read_body, refusal, reply};
use crate::http_infer::{self, Target};
use crate::infer::Call;
use crate::limits::{CONTROL_BYTES_MAX, REQUEST_BYTES};
use crate::page::page;
use crate::problem::{Code, Problem};
use crate::proto::{
    Empty, HealthResponse, ModelConfigResponse, ModelRequest, ModelStatisticsResponse,
    RepositoryIndexRequest, RepositoryIndexResponse, RepositoryModelRequest, SERVICE,
};
use crate::repository;
use crate::trace::Protocol;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_ENCODING, HOST, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request, StatusCode};
use percent_encoding::percent_decode_str;
use prost::Message;
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// The header of a W3C trace, which a caller may send.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers `request` of `connection`.
pub async fn answer(
    front: &Arc<Front>,
    connection: &Connection,
    request: Request<Incoming>,
) -> Answered {
    let received = Instant::now();
    let (parts, body) = request.into_parts();
    let is_grpc = grpc::is_call(&parts.headers);
    let protocol = if is_grpc { Protocol::Grpc } else { Protocol::Http };
    let trace = parts.headers.get(TRACEPARENT).cloned();

    let refuse = |model: &str, problem: &Problem| {
        front.metrics.refuse(model, protocol, problem, received.elapsed());
    };
    let answered = match admit(front, connection, &parts) {
        Err(problem) => {
            // The request is not read yet, so its model is unknown.
            refuse("", &problem);
            Err(problem)
        }
        Ok(memory) => {
            let (model, trace) = (String::new(), trace.clone());
            let mut call = Call { front, connection, protocol, received, memory, model, trace };
            let answered = match protocol {
                Protocol::Grpc => answer_grpc(&mut call, &parts, body).await,
                Protocol::Http => answer_http(&mut call, &parts, body).await,
            };
            answered.inspect_err(|problem| refuse(&call.model, problem))
        }
    };
    let mut answered = answered.unwrap_or_else(|problem| match protocol {
        Protocol::Grpc => grpc::refusal(&problem),
        Protocol::Http => refusal(&problem),
    });
    if let Some(trace) = trace {
        answered.headers_mut().insert(TRACEPARENT, trace);
    }
    answered
}

/// Checks the limits that hold for every request, and reserves what its headers take.
fn admit(
    front: &Arc<Front>,
    connection: &Connection,
    parts: &Parts,
) -> Result<crate::memory::Reservation, Problem> {
    connection.count_request(front.rules.requests_per_s_max)?;
    let headers = &parts.headers;
    let header_bytes: usize =
        headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    front.bytes.reserve(REQUEST_BYTES + header_bytes)
}

async fn answer_grpc(
    call: &mut Call<'_>,
    parts: &Parts,
    body: Incoming,
) -> Result<Answered, Problem> {
    let unknown = || Problem::new(Code::Unimplemented, format!("no method {}", parts.uri.path()));
    let method = parts.uri.path().strip_prefix(SERVICE).ok_or_else(unknown)?;
    let timeout = grpc::timeout(&parts.headers)?;
    if method == "ModelInfer" {
        let bytes_max = call.front.rules.request_bytes_max as usize;
        let body = read_body(body, &mut call.memory, bytes_max).await?;
        return grpc_infer::infer(call, &body, timeout).await;
    }

    let body = read_body(body, &mut call.memory, CONTROL_BYTES_MAX).await?;
    let message = grpc::message_of(&body)?;
    match method {
        "ServerLive" => health(call, true),
        "ServerReady" => health(call, is_ready(call.front)),
        "ModelReady" => {
            let ModelRequest { name, version } = decode(message)?;
            health(call, describe::version(call.front, &name, &version).is_ok())
        }
        "ServerMetadata" => message_reply(call, &describe::server()),
        "ModelMetadata" => {
            let ModelRequest { name, version } = decode(message)?;
            message_reply(call, &describe::model(call.front, &name, &version)?)
        }
        "ModelConfig" => {
            let ModelRequest { name, version } = decode(message)?;
            let config = Some(describe::config(call.front, &name, &version)?);
            message_reply(call, &ModelConfigResponse { config })
        }
        "ModelStatistics" => {
            let ModelRequest { name, version } = decode(message)?;
            let model_stats = describe::statistics(call.front, &name, &version)?;
            message_reply(call, &ModelStatisticsResponse { model_stats })
        }
        "RepositoryIndex" => {
            let RepositoryIndexRequest { ready } = decode(message)?;
            let models = repository::index(call.front, ready);
            message_reply(call, &RepositoryIndexResponse { models })
        }
        "RepositoryModelLoad" => change_grpc(call, &parts.headers, message, Change::Load).await,
        "RepositoryModelUnload" => change_grpc(call, &parts.headers, message, Change::Unload).await,
        _ => Err(unknown()),
    }
}

fn decode<M: Message + Default>(message: Bytes) -> Result<M, Problem> {
    M::decode(message).map_err(|e| Problem::invalid(e.to_string()))
}

fn message_reply(call: &Call<'_>, message: &impl Message) -> Result<Answered, Problem> {
    grpc::reply_with(message, call.front.bytes.reserve(0)?)
}

fn health(call: &Call<'_>, is_true: bool) -> Result<Answered, Problem> {
    message_reply(call, &HealthResponse { is_true })
}

async fn change_grpc(
    call: &mut Call<'_>,
    headers: &HeaderMap,
    message: Bytes,
    change: Change,
) -> Result<Answered, Problem> {
    check_right(call, headers)?;
    let RepositoryModelRequest { model_name, parameters } = decode(message)?;
    let overrides = ["config", "file:"];
    if let Some(name) = parameters.keys().find(|key| overrides.iter().any(|o| key.starts_with(o))) {
        let name = name.escape_debug();
        return Err(Problem::invalid(format!(
            "parameter `{name}`: not supported; a model is loaded from its own files only"
        )));
    }
    control::change(call, &model_name, change).await?;
    message_reply(call, &Empty {})
}

/// Returns whether the server serves a model.
fn is_ready(front: &Front) -> bool {
    !front.serving.names().is_empty()
}

async fn answer_http(
    call: &mut Call<'_>,
    parts: &Parts,
    body: Incoming,
) -> Result<Answered, Problem> {
    check_host(call.connection, parts)?;
    let path = parts.uri.path().trim_matches('/');
    let path: Vec<String> = path
        // Split before the parts are decoded: an encoded slash belongs to a name.
        .split('/')
        .map(|part| percent_decode_str(part).decode_utf8().map(String::from))
        .collect::<Result<_, _>>()
        .map_err(|e| Problem::invalid(format!("path: {e}")))?;
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let unknown = || Problem::new(Code::NotFound, format!("{} {}", parts.method, parts.uri.path()));

    match (&parts.method, path.as_slice()) {
        (&Method::GET, [""]) => Ok(page()),
        (&Method::GET, ["metrics"]) => {
            Ok(reply(StatusCode::OK, METRICS_TYPE, call.front.shown_metrics()))
        }
        (&Method::GET, ["status"]) => {
            Ok(reply(StatusCode::OK, "application/json", call.front.shown_status()))
        }
        (&Method::POST, ["actions", action, name]) => {
            check_right(call, &parts.headers)?;
            let done = control::act(call, action, name).await?;
            Ok(json_reply(&json!({"done": done})))
        }
        (&Method::GET, ["v2"]) => Ok(json_reply(&describe::server_json())),
        (&Method::GET, ["v2", "health", "live"]) => Ok(json_reply(&json!({"live": true}))),
        (&Method::GET, ["v2", "health", "ready"]) => ready_reply(is_ready(call.front)),
        // Before the paths of one model, which would take `stats` for a name.
        (&Method::GET, ["v2", "models", "stats"]) => {
            let statistics = describe::statistics(call.front, "", "")?;
            Ok(json_reply(&describe::statistics_json(&statistics)))
        }
        (method, ["v2", "models", model, "versions", version, rest @ ..]) => {
            let target = Target { model, version };
            answer_model(call, target, method, rest, parts, body).await.unwrap_or(Err(unknown()))
        }
        (method, ["v2", "models", model, rest @ ..]) => {
            let target = Target { model, version: "" };
            answer_model(call, target, method, rest, parts, body).await.unwrap_or(Err(unknown()))
        }
        (&Method::POST, ["v2", "repository", "index"]) => {
            Ok(json_reply(&repository::index_json(&repository::index(call.front, false))))
        }
        (&Method::POST, ["v2", "repository", "models", name, "load"]) => {
            change_http(call, parts, body, name, Change::Load).await
        }
        (&Method::POST, ["v2", "repository", "models", name, "unload"]) => {
            change_http(call, parts, body, name, Change::Unload).await
        }
        _ => Err(unknown()),
    }
}

/// Answers a request about one model; `None` if there is no such path.
async fn answer_model(
    call: &mut Call<'_>,
    target: Target<'_>,
    method: &Method,
    rest: &[&str],
    parts: &Parts,
    body: Incoming,
) -> Option<Result<Answered, Problem>> {
    let Target { model, version } = target;
    let front = call.front;
    Some(match (method, rest) {
        (&Method::POST, ["infer"]) => infer_http(call, target, parts, body).await,
        (&Method::POST, ["prefetch"]) => prefetch_http(call, target, parts, body).await,
        (&Method::GET, []) => {
            describe::model(front, model, version).map(|m| json_reply(&describe::model_json(&m)))
        }
        (&Method::GET, ["ready"]) => ready_reply(describe::version(front, model, version).is_ok()),
        (&Method::GET, ["config"]) => {
            describe::config(front, model, version).map(|c| json_reply(&describe::config_json(&c)))
        }
        (&Method::GET, ["stats"]) => describe::statistics(front, model, version)
            .map(|statistics| json_reply(&describe::statistics_json(&statistics))),
        _ => return None,
    })
}

async fn infer_http(
    call: &mut Call<'_>,
    target: Target<'_>,
    parts: &Parts,
    body: Incoming,
) -> Result<Answered, Problem> {
    let body = read_infer(call, parts, body).await?;
    http_infer::infer(call, target, &parts.headers, &body).await
}

async fn prefetch_http(
    call: &mut Call<'_>,
    target: Target<'_>,
    parts: &Parts,
    body: Incoming,
) -> Result<Answered, Problem> {
    let body = read_infer(call, parts, body).await?;
    let queued = http_infer::prefetch(call, target, &parts.headers, &body)?;
    Ok(json_reply(&json!({"queued": queued})))
}

async fn read_infer(call: &mut Call<'_>, parts: &Parts, body: Incoming) -> Result<Bytes, Problem> {
    if let Some(encoding) = parts.headers.get(CONTENT_ENCODING).filter(|e| *e != "identity") {
        let message = format!("content-encoding {encoding:?}: send the body uncompressed");
        return Err(Problem::new(Code::Unimplemented, message));
    }
    let bytes_max = call.front.rules.request_bytes_max as usize;
    read_body(body, &mut call.memory, bytes_max).await
}

fn ready_reply(is_ready: bool) -> Result<Answered, Problem> {
    if is_ready {
        return Ok(json_reply(&json!({"ready": true})));
    }
    Err(Problem::new(Code::Unavailable, "not ready"))
}

async fn change_http(
    call: &mut Call<'_>,
    parts: &Parts,
    body: Incoming,
    name: &str,
    change: Change,
) -> Result<Answered, Problem> {
    // Before the body is read: a caller without the right takes no memory.
    check_right(call, &parts.headers)?;
    let body = read_body(body, &mut call.memory, CONTROL_BYTES_MAX).await?;
    let parameters: serde_json::Value = match body.is_empty() {
        true => json!({}),
        false => serde_json::from_slice(&body).map_err(|e| Problem::invalid(e.to_string()))?,
    };
    if !parameters["parameters"]["config"].is_null() {
        return Err(Problem::invalid(
            "parameter `config`: not supported; a model is loaded from its own files only",
        ));
    }
    control::change(call, name, change).await?;
    Ok(json_reply(&json!({})))
}

/// Refuses a request on the loopback device that names another host: a web page in a browser of
/// this machine may have sent it.
fn check_host(connection: &Connection, parts: &Parts) -> Result<(), Problem> {
    if connection.peer != Peer::Loopback {
        return Ok(());
    }
    let host = parts.headers.get(HOST).and_then(|value: &HeaderValue| value.to_str().ok());
    // HTTP/2 has the host in the request's address.
    let host = host.or(parts.uri.authority().map(|authority| authority.as_str())).unwrap_or("");
    // The last colon of `[::1]` belongs to the address.
    let name = host.rsplit_once(':').map_or(host, |(name, port)| {
        if port.bytes().all(|digit| digit.is_ascii_digit()) { name } else { host }
    });
    if matches!(name, "localhost" | "127.0.0.1" | "[::1]") {
        return Ok(());
    }
    Err(Problem::new(Code::Denied, format!("host {host:?} is not this machine")))
}

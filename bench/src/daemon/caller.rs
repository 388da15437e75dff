//! A caller of the daemon's front door: gRPC over HTTP/2 on a Unix socket. Never retries.

use anyhow::{Context, Result, anyhow};
use hatchback::Schema;
use hatchback::schema::batch::Batch;
use hatchback_server::proto::{
    InferInputTensor, InferRequestedOutputTensor, ModelInferRequest, RepositoryModelRequest,
    SERVICE,
};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HeaderValue, TE};
use hyper::{HeaderMap, Method, Request, Uri};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;

/// The status of gRPC for a caller that should retry.
const RESOURCE_EXHAUSTED: u32 = 8;

/// A connection to the front door.
pub struct Caller {
    sender: SendRequest<Full<Bytes>>,
    infer: Uri,
    headers: HeaderMap,
}

/// The outcome of a call.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The call was answered with this message, which has its prefix.
    Answered(Bytes),
    /// The front door refused the call.
    Refused(Refusal),
}

/// Why the front door refused a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("gRPC status {status}: {message}")]
pub struct Refusal {
    /// The number of gRPC.
    pub status: u32,
    /// The text.
    pub message: String,
    /// The time after which the caller should retry.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    /// Returns the time after which the caller should retry, if the front door was busy.
    ///
    /// # Errors
    /// The front door refused the call for another reason.
    pub fn busy(self) -> Result<Duration, Self> {
        let wait = self.retry_after.filter(|_| self.status == RESOURCE_EXHAUSTED);
        wait.ok_or(self)
    }
}

fn path_of(method: &str) -> Result<Uri> {
    Ok(format!("http://localhost{SERVICE}{method}").parse()?)
}

impl Caller {
    /// Connects to `socket`, on the runtime of the calling thread.
    ///
    /// # Errors
    /// Nobody answers there.
    pub async fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).await?;
        let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        tokio::spawn(async move {
            // The caller sees the end of the connection at its next call.
            let _ = connection.await;
        });
        let mut headers = HeaderMap::with_capacity(4);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        Ok(Self { sender, infer: path_of("ModelInfer")?, headers })
    }

    /// Calls `method` with `message`, which has its prefix.
    ///
    /// # Errors
    /// The connection ends.
    pub async fn call(
        &mut self,
        method: &str,
        message: Bytes,
        timeout: Option<Duration>,
    ) -> Result<Outcome> {
        self.send(path_of(method)?, message, timeout).await
    }

    /// Asks for scores with `message`, a request with its prefix.
    ///
    /// # Errors
    /// The connection ends.
    pub async fn infer(&mut self, message: Bytes, timeout: Option<Duration>) -> Result<Outcome> {
        self.send(self.infer.clone(), message, timeout).await
    }

    async fn send(
        &mut self,
        path: Uri,
        message: Bytes,
        timeout: Option<Duration>,
    ) -> Result<Outcome> {
        let mut request = Request::new(Full::new(message));
        (*request.method_mut(), *request.uri_mut()) = (Method::POST, path);
        *request.headers_mut() = self.headers.clone();
        if let Some(timeout) = timeout {
            request.headers_mut().insert("grpc-timeout", timeout_value(timeout)?);
        }
        self.sender.ready().await?;
        let (head, body) = self.sender.send_request(request).await?.into_parts();
        let Received { message, trailers } = receive(body).await?;
        Ok(outcome(message, trailers.as_ref().unwrap_or(&head.headers)))
    }
}

/// Returns the value of `grpc-timeout`, which has at most eight digits.
fn timeout_value(timeout: Duration) -> Result<HeaderValue> {
    let text = match timeout.as_micros() {
        us @ ..100_000_000 => format!("{us}u"),
        us => format!("{}m", us / 1000),
    };
    Ok(HeaderValue::from_str(&text)?)
}

/// The body of an answer.
#[derive(Default)]
struct Received {
    message: Bytes,
    trailers: Option<HeaderMap>,
}

async fn receive(mut body: Incoming) -> Result<Received> {
    let mut received = Received::default();
    while let Some(frame) = body.frame().await {
        match frame?.into_data() {
            Ok(data) if received.message.is_empty() => received.message = data,
            Ok(data) => received.message = [&received.message[..], &data].concat().into(),
            Err(frame) => received.trailers = frame.into_trailers().ok(),
        }
    }
    Ok(received)
}

fn outcome(message: Bytes, trailers: &HeaderMap) -> Outcome {
    let text = |name: &str| trailers.get(name).and_then(|value| value.to_str().ok());
    let number = |name: &str| text(name).and_then(|text| text.parse().ok());
    match number("grpc-status") {
        Some(0) => Outcome::Answered(message),
        status => Outcome::Refused(Refusal {
            status: status.unwrap_or(u32::MAX),
            message: text("grpc-message").unwrap_or_default().to_owned(),
            retry_after: number("grpc-retry-pushback-ms")
                .map(|ms| Duration::from_millis(ms.into())),
        }),
    }
}

fn framed(message: &impl Message) -> Result<Bytes> {
    let length = u32::try_from(message.encoded_len()).context("a message over 4 GiB")?;
    let mut bytes = vec![0];
    bytes.extend(length.to_be_bytes());
    message.encode(&mut bytes)?;
    Ok(bytes.into())
}

/// Returns the framed request for the scores of `batch` by `model`.
///
/// # Errors
/// The batch is too large for a message.
pub fn infer_request(model: &str, schema: &Schema, batch: &Batch) -> Result<Bytes> {
    let size = batch.size();
    let (mut inputs, mut raw) = (Vec::new(), Vec::new());
    let mut add = |name: &str, datatype: &str, width: usize, bytes: Vec<u8>| {
        inputs.push(InferInputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![size as i64, width as i64],
            ..InferInputTensor::default()
        });
        raw.push(Bytes::from(bytes));
    };

    if !schema.dense_features.is_empty() {
        let bytes = batch.dense().iter().flat_map(|value| value.to_le_bytes()).collect();
        add("dense", "FP32", schema.dense_features.len(), bytes);
    }
    for (f, feature) in schema.features.iter().enumerate() {
        let (bags, width) = (batch.bags(f), batch.hotness(f));
        let bag = |sample: usize| {
            let keys = &bags.keys[bags.offsets[sample] as usize..bags.offsets[sample + 1] as usize];
            let padding = std::iter::repeat_n(-1, width - keys.len());
            keys.iter().map(|key| *key as i64).chain(padding)
        };
        let bytes = (0..size).flat_map(bag).flat_map(i64::to_le_bytes).collect();
        // Without padding, every key of 64 bits has a place.
        let is_full = bags.keys.len() == size * width;
        add(&feature.name, if is_full { "UINT64" } else { "INT64" }, width, bytes);
    }

    let output =
        |name: &str| InferRequestedOutputTensor { name: name.to_owned(), ..Default::default() };
    framed(&ModelInferRequest {
        model_name: model.to_owned(),
        inputs,
        outputs: ["score", "status"].map(output).to_vec(),
        raw_input_contents: raw,
        ..ModelInferRequest::default()
    })
}

/// Returns the framed request to load or unload `model`.
///
/// # Errors
/// The name is too long for a message.
pub fn repository_request(model: &str) -> Result<Bytes> {
    framed(&RepositoryModelRequest { model_name: model.to_owned(), ..Default::default() })
}

/// Runs `work` on an event loop of the calling thread.
///
/// # Errors
/// The system gives no event loop, or the work fails.
pub fn on_event_loop<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|e| anyhow!("no event loop: {e}"))?.block_on(work)
}

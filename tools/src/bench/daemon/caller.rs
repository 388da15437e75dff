//! A caller of the daemon's front door: gRPC over HTTP/2 on a Unix socket. Never retries.

use anyhow::{Context, Result, anyhow, bail};
use hatchback::Schema;
use hatchback::schema::batch::Batch;
use hatchback_server::proto::{
    InferInputTensor, InferRequestedOutputTensor, ModelInferRequest, RepositoryModelRequest,
    SERVICE,
};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper::{HeaderMap, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;

/// The status of gRPC for a caller that should retry.
const RESOURCE_EXHAUSTED: u32 = 8;

/// A connection to the front door.
pub struct Caller(SendRequest<Full<Bytes>>);

/// The outcome of a call.
pub enum Outcome {
    /// The call was answered.
    Answered,
    /// The front door refused the call; the caller should retry after this time.
    Busy(Duration),
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
        Ok(Self(sender))
    }

    /// Calls `method` with `message`, which has its prefix.
    ///
    /// # Errors
    /// The connection ends, or the call fails.
    pub async fn call(&mut self, method: &str, message: Bytes) -> Result<Outcome> {
        let request = Request::post(format!("http://localhost{SERVICE}{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Full::new(message))?;
        self.0.ready().await?;
        let response = self.0.send_request(request).await?;
        let (head, body) = response.into_parts();
        let body = body.collect().await?;
        let trailers = body.trailers().unwrap_or(&head.headers);
        match number(trailers, "grpc-status") {
            Some(0) => Ok(Outcome::Answered),
            Some(RESOURCE_EXHAUSTED) => {
                let ms = number(trailers, "grpc-retry-pushback-ms").unwrap_or(1);
                Ok(Outcome::Busy(Duration::from_millis(ms.into())))
            }
            status => {
                let message = trailers.get("grpc-message").map(|m| format!("{m:?}"));
                bail!("{method}: status {status:?}: {}", message.unwrap_or_default())
            }
        }
    }
}

fn number(headers: &HeaderMap, name: &str) -> Option<u32> {
    headers.get(name)?.to_str().ok()?.parse().ok()
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

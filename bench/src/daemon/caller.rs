//! A caller of the daemon's front door: gRPC over HTTP/2 on a Unix socket. Never retries.

use anyhow::{Context, Result, anyhow};
use hatchback::Schema;
use hatchback::schema::sample::Sample;
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

/// Longest time for which a caller waits for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// The same for a change of the repository: a load reads whole tables.
const CHANGE_MAX: Duration = Duration::from_secs(600);

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

    /// Calls `method`, which changes the repository, with `message`, which has its prefix.
    ///
    /// # Errors
    /// The connection ends, or no answer comes for ten minutes.
    pub async fn change(&mut self, method: &str, message: Bytes) -> Result<Outcome> {
        let request = self.request(path_of(method)?, message);
        self.send(request, CHANGE_MAX).await
    }

    /// Asks for scores with `message`, a request with its prefix.
    ///
    /// # Errors
    /// The connection ends, or no answer comes for a minute.
    pub async fn infer(&mut self, message: Bytes, timeout: Option<Duration>) -> Result<Outcome> {
        let mut request = self.request(self.infer.clone(), message);
        if let Some(timeout) = timeout {
            request.headers_mut().insert("grpc-timeout", timeout_value(timeout)?);
        }
        self.send(request, ANSWER_MAX).await
    }

    fn request(&self, path: Uri, message: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(message));
        (*request.method_mut(), *request.uri_mut()) = (Method::POST, path);
        *request.headers_mut() = self.headers.clone();
        request
    }

    async fn send(&mut self, request: Request<Full<Bytes>>, longest: Duration) -> Result<Outcome> {
        let answer = async {
            self.sender.ready().await?;
            let (head, body) = self.sender.send_request(request).await?.into_parts();
            let Received { message, trailers } = receive(body).await?;
            Ok(outcome(message, trailers.as_ref().unwrap_or(&head.headers)))
        };
        let answer = tokio::time::timeout(longest, answer).await;
        answer.with_context(|| format!("no answer within {} s", longest.as_secs()))?
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

/// Returns the framed request for the scores of `samples` by `model`. Inputs of retired features
/// are left out, but for the columns of dense ones, which callers still send.
///
/// # Errors
/// The request is too large for a message.
pub fn infer_request(model: &str, schema: &Schema, samples: &[Sample]) -> Result<Bytes> {
    let (mut inputs, mut raw) = (Vec::new(), Vec::new());
    let mut add = |name: &str, datatype: &str, width: usize, bytes: Vec<u8>| {
        inputs.push(InferInputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![samples.len() as i64, width as i64],
            ..InferInputTensor::default()
        });
        raw.push(Bytes::from(bytes));
    };

    for (name, is_shared) in [("dense", false), ("dense.shared", true)] {
        let (features, width) = (&schema.dense_features, schema.dense_of(is_shared).count());
        if width > 0 {
            let values = samples.iter().flat_map(|sample| sample.dense.iter().zip(features));
            let own = values.filter(|(_, feature)| feature.shared == is_shared);
            add(name, "FP32", width, own.flat_map(|(value, _)| value.to_le_bytes()).collect());
        }
    }
    for (f, feature) in schema.features.iter().enumerate().filter(|(_, feature)| !feature.retired) {
        let bags = || samples.iter().map(|sample| &sample.sparse[f]);
        let width = bags().map(Vec::len).max().unwrap_or_default();
        let bag = |keys: &Vec<u64>| {
            let keys = keys.iter().map(|key| *key as i64).chain(std::iter::repeat(-1));
            keys.take(width).flat_map(i64::to_le_bytes).collect::<Vec<u8>>()
        };
        // Without padding, every key of 64 bits has a place.
        let is_full = bags().all(|keys| keys.len() == width);
        let keys = bags().flat_map(bag).collect();
        add(&feature.name, if is_full { "UINT64" } else { "INT64" }, width, keys);
        if feature.weighted {
            let weights = samples.iter().flat_map(|sample| {
                let own = sample.weights.get(f).into_iter().flatten().copied();
                own.chain(std::iter::repeat(0.0)).take(width)
            });
            let weights = weights.flat_map(f32::to_le_bytes).collect();
            add(&format!("{}.weights", feature.name), "FP32", width, weights);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback::schema::{DenseFeature, Feature, Network};

    #[test]
    fn a_request_has_the_inputs_of_features_that_are_in_use() {
        let dense =
            |name, shared, retired| DenseFeature { shared, retired, ..DenseFeature::plain(name) };
        let feature = |name, retired| Feature { retired, ..Feature::plain(name, 3) };
        let schema = Schema {
            dense_features: vec![
                dense("a", false, true),
                dense("b", true, false),
                dense("c", false, false),
            ],
            tables: vec![],
            features: vec![
                feature("gone", true),
                Feature { shared: true, weighted: true, ..feature("x", false) },
            ],
            lookups: vec![],
            network: Network { inputs: vec![], outputs: vec![] },
        };
        let sample = Sample {
            dense: vec![1.0, 2.0, 3.0],
            sparse: vec![vec![], vec![7, 8]],
            weights: vec![vec![], vec![0.5, 1.5]],
            ..Sample::default()
        };
        let message = infer_request("m", &schema, &[sample.clone(), sample]).unwrap();
        let sent = ModelInferRequest::decode(&message[5..]).unwrap();
        let shapes: Vec<(&str, &[i64])> =
            sent.inputs.iter().map(|input| (input.name.as_str(), &input.shape[..])).collect();
        let expected: [(&str, &[i64]); 4] =
            [("dense", &[2, 2]), ("dense.shared", &[2, 1]), ("x", &[2, 2]), ("x.weights", &[2, 2])];
        assert_eq!(shapes, expected);
        let floats =
            |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(sent.raw_input_contents[0], floats(&[1.0, 3.0, 1.0, 3.0]));
        assert_eq!(sent.raw_input_contents[3], floats(&[0.5, 1.5, 0.5, 1.5]));
    }
}

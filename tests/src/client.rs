//! A caller of the daemon: the Open Inference Protocol over HTTP/1.1 on a Unix socket, one request
//! at a time. Takes samples as `hatchback run` does, one line of JSON each.

use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection to the daemon.
pub struct Client(BufReader<UnixStream>);

/// An answer of the daemon.
pub struct HttpAnswer {
    /// The status.
    pub code: u16,
    /// The body.
    pub body: Vec<u8>,
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// No process listens there.
    pub fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self(BufReader::new(UnixStream::connect(path)?)))
    }

    /// Returns the stream, for its settings and for hostile bytes.
    pub fn stream(&self) -> &UnixStream {
        self.0.get_ref()
    }

    /// Sends a request without waiting for its answer. A request without a body is a GET.
    ///
    /// # Errors
    /// The daemon has closed the connection.
    pub fn send(&mut self, path: &str, body: Option<&[u8]>) -> io::Result<()> {
        let method = if body.is_some() { "POST" } else { "GET" };
        let body = body.unwrap_or_default();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
        );
        self.stream().write_all(&[head.as_bytes(), body].concat())
    }

    /// Reads an answer.
    ///
    /// # Errors
    /// The daemon closes the connection.
    pub fn receive(&mut self) -> io::Result<HttpAnswer> {
        let (mut line, mut length) = (String::new(), 0);
        self.0.read_line(&mut line)?;
        let code = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let code = code.ok_or_else(|| io::Error::other(format!("no answer: {line:?}")))?;
        loop {
            line.clear();
            self.0.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().map_err(io::Error::other)?;
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        Ok(HttpAnswer { code, body })
    }

    /// Returns what the daemon answers to a GET of `path`.
    ///
    /// # Errors
    /// The connection ends.
    pub fn get(&mut self, path: &str) -> io::Result<HttpAnswer> {
        self.send(path, None)?;
        self.receive()
    }

    /// Returns the models that the daemon serves.
    ///
    /// # Errors
    /// The connection ends.
    pub fn models(&mut self) -> io::Result<Vec<String>> {
        let answer: Value = serde_json::from_slice(&self.get("/v2/models/stats")?.body)?;
        let models = answer["model_stats"].as_array().cloned().unwrap_or_default();
        Ok(models.iter().filter_map(|model| Some(model["name"].as_str()?.to_owned())).collect())
    }

    /// Sends the sample `line` to `model` without waiting for its score.
    ///
    /// # Errors
    /// The connection ends, or the line is not JSON.
    pub fn send_sample(&mut self, model: &str, line: &str) -> io::Result<()> {
        let path = format!("/v2/models/{model}/infer");
        self.send(&path, Some(&request_of(line)?))
    }

    /// Reads the score of a sample: `{"score": [..], "status": {..}, "generation": n}`, or
    /// `{"error": "..", "code": n}`.
    ///
    /// # Errors
    /// The connection ends.
    pub fn receive_score(&mut self) -> io::Result<Value> {
        let HttpAnswer { code, body } = self.receive()?;
        let mut answer: Value = serde_json::from_slice(&body)?;
        if code != 200 {
            answer["code"] = code.into();
            return Ok(answer);
        }
        let data = |name: &str| {
            let outputs = answer["outputs"].as_array().cloned().unwrap_or_default();
            let output = outputs.into_iter().find(|output| output["name"] == name);
            output.map_or(Value::Null, |output| output["data"].clone())
        };
        let status = data("status");
        Ok(json!({
            "score": data("score"),
            "generation": data("generation")[0],
            "status": {
                "fresh": status[0], "defaulted": status[1], "absent": status[2],
                "damaged": status[3], "late": status[4] == 1,
            },
        }))
    }

    /// Returns the score of the sample `line` by `model`.
    ///
    /// # Errors
    /// The connection ends, or the line is not JSON.
    pub fn ask(&mut self, model: &str, line: &str) -> io::Result<Value> {
        self.send_sample(model, line)?;
        self.receive_score()
    }
}

/// Returns the body of a request for the sample `line`.
///
/// # Errors
/// The line is not JSON.
pub fn request_of(line: &str) -> io::Result<Vec<u8>> {
    let sample: Value = serde_json::from_str(line)?;
    let dense = sample["dense"].as_array().cloned().unwrap_or_default();
    let mut inputs = Vec::new();
    if !dense.is_empty() {
        let shape = [1, dense.len()];
        inputs.push(json!({"name": "dense", "datatype": "FP32", "shape": shape, "data": dense}));
    }
    for (name, keys) in sample["sparse"].as_object().into_iter().flatten() {
        let shape = [1, keys.as_array().map_or(0, Vec::len)];
        inputs.push(json!({"name": name, "datatype": "UINT64", "shape": shape, "data": keys}));
    }
    let timeout = &sample["timeout_us"];
    let parameters = if timeout.is_null() { json!({}) } else { json!({"timeout": timeout}) };
    Ok(json!({"inputs": inputs, "parameters": parameters}).to_string().into_bytes())
}

//! The server: one sample a line in, one score a line out, in order, with a thread for each
//! connection. When all request slots of a model are taken, the answer is `busy`, immediately. On
//! SIGTERM the server accepts no further connection, answers the lines that it has received, and
//! returns. Before the socket exists, SIGTERM ends the process.
//!
//! No caller can keep another one out: a silent connection makes room for a new one, and a caller
//! that does not take its answers counts as silent.

use crate::connections::{Connection, Connections};
use crate::latency::Latencies;
use crate::limits::{DRAIN_TIME_MAX, DRAINED_BYTES_MAX, LINE_BYTES_MAX};
use crate::log_limit::LogLimit;
use crate::shed::Shed;
use crate::socket::{Socket, Stop};
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::Serving;
use hatchback::schema::batch::Batch;
use hatchback::schema::outputs::NamedScores;
use hatchback::schema::raw_value::RawValue;
use hatchback::schema::sample::Sample;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How often an idle connection checks whether the daemon is stopping; pause after an error of
/// `accept`.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// What a connection needs to answer requests.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    /// The models.
    pub serving: &'a Serving,
    /// Latencies, by model.
    pub latencies: &'a Latencies,
    /// The load shedding of the daemon.
    pub shed: &'a Shed,
    /// Whether the car has exactly one model, so that callers need not name it.
    pub is_only: bool,
}

/// Serves until `stop` is requested.
pub fn serve(server: Server<'_>, socket: &Socket<'_>, stop: &Stop) {
    let connections = Connections::new();
    let ended_early = LogLimit::new("a connection ended early");
    std::thread::scope(|scope| {
        for stream in socket.listener().incoming() {
            if stop.is_requested() {
                return;
            }

            let stream = match stream {
                Ok(stream) => stream,
                Err(e) => {
                    // Without a file to spare, `accept` would fail again at once.
                    ended_early.warn(&e);
                    std::thread::sleep(STOP_CHECK_INTERVAL);
                    continue;
                }
            };
            let started = match connections.admit(stream) {
                Err(stream) => (&stream).write_all(b"{\"error\":\"busy\"}\n"),
                Ok(place) => {
                    let ended_early = &ended_early;
                    let work = move || {
                        let caller = Caller { server, connection: place.connection(), stop };
                        if let Err(e) = caller.answer_all() {
                            ended_early.warn(&e);
                        }
                    };
                    std::thread::Builder::new().spawn_scoped(scope, work).map(drop)
                }
            };
            if let Err(e) = started {
                ended_early.warn(&e);
            }
        }
    });
    ended_early.end();
    connections.end();
}

/// One caller of the socket, as the thread of its connection sees the caller.
struct Caller<'a> {
    server: Server<'a>,
    connection: &'a Connection,
    stop: &'a Stop,
}

/// What the bytes of one read were.
enum Part {
    /// A line, or what was left of one at the end of the connection.
    Line,
    /// Part of a line.
    More,
    /// The line is longer than any sample.
    TooLong,
    /// The caller sends no further line, or the daemon stops and has answered those received.
    End,
}

impl Caller<'_> {
    /// Answers each line of the connection.
    fn answer_all(&self) -> io::Result<()> {
        let stream = &self.connection.stream;
        stream.set_read_timeout(Some(STOP_CHECK_INTERVAL))?;
        stream.set_write_timeout(Some(STOP_CHECK_INTERVAL))?;
        let (mut reader, mut line) = (BufReader::new(stream), Vec::new());
        let mut is_stopping = false;

        while !self.connection.is_closing() {
            if self.stop.is_requested() && !is_stopping {
                // What was received is answered. A caller that never pauses cannot keep the daemon
                // from stopping, because nothing more is received.
                stream.shutdown(Shutdown::Read)?;
                is_stopping = true;
            }
            match self.read_part(&mut reader, &mut line) {
                Ok(Part::Line) => {
                    if !self.connection.begin_work() {
                        return Ok(());
                    }
                    let value = score(self.server, &line);
                    self.connection.end_work();
                    self.answer(&value)?;
                    line.clear();
                    line.shrink_to(LINE_BYTES_MAX);
                }
                Ok(Part::More) => {}
                Ok(Part::TooLong) => return self.refuse_line(&mut reader),
                Ok(Part::End) => return Ok(()),
                // `line` keeps the part of the line that was read.
                Err(e) if is_pause(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Adds the bytes of one read to `line`, up to the line's end.
    fn read_part(
        &self,
        reader: &mut BufReader<&UnixStream>,
        line: &mut Vec<u8>,
    ) -> io::Result<Part> {
        let is_short = line.len() < LINE_BYTES_MAX;
        let bytes_max = if is_short { LINE_BYTES_MAX } else { line_bytes_max(self.server.serving) };
        let room = bytes_max.saturating_sub(line.len());
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            let is_whole = !line.is_empty() && !self.stop.is_requested();
            return Ok(if is_whole { Part::Line } else { Part::End });
        }
        if room == 0 {
            return Ok(Part::TooLong);
        }

        self.connection.hear();
        let buffer = &buffer[..room.min(buffer.len())];
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(buffer.len(), |end| end + 1);
        line.extend_from_slice(&buffer[..taken]);
        reader.consume(taken);
        Ok(if end.is_some() { Part::Line } else { Part::More })
    }

    /// Answers a line that is too long, and ends the connection. Reads what the caller still sends:
    /// a socket that is closed with unread bytes is reset, and the caller may not see the answer.
    fn refuse_line(&self, reader: &mut BufReader<&UnixStream>) -> io::Result<()> {
        self.answer(&json!({"error": "the line is too long"}))?;
        self.connection.stream.shutdown(Shutdown::Write)?;

        let (start, mut bytes) = (Instant::now(), 0);
        while bytes < DRAINED_BYTES_MAX
            && start.elapsed() < DRAIN_TIME_MAX
            && !self.stop.is_requested()
        {
            match reader.fill_buf().map(<[u8]>::len) {
                Ok(0) => break,
                Ok(n) => {
                    reader.consume(n);
                    bytes += n;
                }
                Err(e) if is_pause(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Writes `value`. A caller that does not read blocks its own connection only, and only until
    /// the daemon stops or the place is needed for another caller.
    fn answer(&self, value: &Value) -> io::Result<()> {
        let text = format!("{value}\n");
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            match (&self.connection.stream).write(rest) {
                Ok(n) => {
                    self.connection.hear();
                    rest = &rest[n..];
                }
                Err(_) if self.connection.is_closing() => return Ok(()),
                Err(e) if is_pause(&e) && !self.stop.is_requested() => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// Returns whether a read or write only has to be repeated: its time was over, or a signal came.
fn is_pause(e: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(e.kind(), WouldBlock | TimedOut | Interrupted)
}

/// Returns the bytes of the longest line that can be a sample of a served model.
fn line_bytes_max(serving: &Serving) -> usize {
    let schemas = serving.names().into_iter().filter_map(|name| serving.schema(&name));
    schemas.map(|schema| Sample::json_bytes_max(&schema)).max().unwrap_or(0).max(LINE_BYTES_MAX)
}

/// The fields of a line beside its sample.
#[derive(Deserialize)]
struct Address<'a> {
    model: Option<String>,
    /// Time for the answer. Without it the request waits for every row.
    timeout_us: Option<u64>,
    /// Values of each feature whose rows to prefetch, instead of a sample.
    #[serde(borrow)]
    prefetch: Option<BTreeMap<String, Vec<RawValue<'a>>>>,
}

fn score(server: Server<'_>, line: &[u8]) -> Value {
    let Some(_turn) = server.shed.turn() else { return json!({"error": "busy"}) };
    try_score(server, line).unwrap_or_else(|problem| json!({"error": problem}))
}

fn try_score(server: Server<'_>, line: &[u8]) -> Result<Value, String> {
    let serving = server.serving;
    let text = std::str::from_utf8(line).map_err(|e| e.to_string())?;

    let names = serving.names();
    let Address { model, timeout_us, prefetch } =
        serde_json::from_str(text).map_err(|e| e.to_string())?;
    let name = match (model, names.as_slice()) {
        (Some(name), _) => name,
        (_, []) => return Err("no model is served yet".to_owned()),
        (_, [only]) if server.is_only => only.clone(),
        _ => return Err(format!("`model` must be one of {}", names.join(", "))),
    };

    let schema = serving.schema(&name).ok_or_else(|| RequestError::NotServed.to_string())?;
    if let Some(keys) = prefetch {
        return queue_prefetch(serving, &name, &keys);
    }
    let sample = Sample::from_json(text, &schema).map_err(|e| e.to_string())?;
    let mut batch = Batch::new(&schema, 1);
    batch.push(&schema, &sample).map_err(|e| e.to_string())?;

    let start = Instant::now();
    let deadline = timeout_us.map(|us| serving.now() + Duration::from_micros(us));
    let ticket = serving.submit(&name, &batch, deadline).map_err(|e| match e {
        RequestError::Busy(_) => "busy".to_owned(),
        e => e.to_string(),
    })?;
    let answer = ticket.wait().map_err(|e| e.to_string())?;
    server.latencies.record(&name, answer.generation(), start.elapsed());
    let scores = answer.scores();
    let score = NamedScores { outputs: &schema.network.outputs, values: scores.values };
    Ok(json!({"score": score, "status": scores.statuses[0]}))
}

/// Queues keys to prefetch for the model `name`. Answers how many had room.
fn queue_prefetch(
    serving: &Serving,
    name: &str,
    values: &BTreeMap<String, Vec<RawValue<'_>>>,
) -> Result<Value, String> {
    let schema = serving.schema(name).ok_or_else(|| RequestError::NotServed.to_string())?;
    let mut queued = 0;
    for (feature, values) in values {
        let number = schema.features.iter().position(|f| f.name == *feature);
        let number =
            number.ok_or_else(|| format!("prefetch: the model has no feature `{feature}`"))?;
        let keys = values.iter().map(|value| schema.key(number, value));
        let keys = keys.collect::<Result<Vec<_>, _>>();
        let keys = keys.map_err(|e| format!("prefetch: `{feature}`: {e}"))?;
        queued += serving.prefetch(name, number, &keys);
    }
    Ok(json!({"queued": queued}))
}

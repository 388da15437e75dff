//! The socket: one sample a line in, one score a line out, in order, a thread for each connection.
//! When all request slots of a model are taken the answer is `busy`, at once. SIGTERM ends
//! accepting, answers what was received, returns; before there is a socket it ends the process.

use crate::latency::Latencies;
use crate::shed::Shed;
use anyhow::{Context, Result};
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::Serving;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use rustix::net::{Shutdown, shutdown};
use serde::Deserialize;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Connections held at once; one more is told `busy` and let go.
const CONNECTIONS_MAX: usize = 256;
/// How often a connection whose caller neither writes nor reads looks whether the daemon is
/// stopping.
const IDLE: Duration = Duration::from_millis(100);
/// Bytes that a line may have whatever is served; what is served says how many more.
const LINE_BYTES: usize = 64 << 10;

/// What requests meet.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    /// The models.
    pub serving: &'a Serving,
    /// How long requests took.
    pub latencies: &'a Latencies,
    /// What is shed.
    pub shed: &'a Shed,
    /// Whether there is one model and no other to come: callers need not name it.
    pub is_only: bool,
}

/// What SIGTERM and SIGINT ask for.
#[derive(Default)]
pub struct Stop {
    asked: AtomicBool,
    listener: Mutex<Option<UnixListener>>,
}

impl Stop {
    /// Takes the signals from now on. One that comes before there is a socket ends the process,
    /// after `early`.
    ///
    /// # Errors
    /// The system refused.
    pub fn on_signal(self: &Arc<Self>, early: impl FnOnce() + Send + 'static) -> Result<()> {
        let (mut signals, stop) = (Signals::new([SIGTERM, SIGINT])?, Arc::clone(self));
        std::thread::spawn(move || {
            if signals.forever().next().is_none() {
                return;
            }
            stop.asked.store(true, Ordering::Release);
            let Some(listener) = &*stop.listener() else {
                log::info!("stopping before anything is served");
                early();
                std::process::exit(0);
            };
            log::info!("stopping: no new connections, answering what was received");
            // Ends the wait for callers even where somebody removed the socket's file.
            if let Err(e) = shutdown(listener, Shutdown::Both) {
                log::error!("the socket cannot be shut: {e}");
            }
        });
        Ok(())
    }

    fn listener(&self) -> MutexGuard<'_, Option<UnixListener>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }
}

/// The socket's place, given up at the end.
pub struct Socket<'a> {
    listener: UnixListener,
    path: &'a Path,
}

impl<'a> Socket<'a> {
    /// Takes the place at `path`; callers wait from then on, and `stop` ends that.
    ///
    /// # Errors
    /// The place is taken, or its folder may not be written.
    pub fn listen(path: &'a Path, stop: &Stop) -> Result<Self> {
        let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
        let socket = Self { listener, path };
        *stop.listener() = Some(socket.listener.try_clone()?);
        Ok(socket)
    }
}

impl Drop for Socket<'_> {
    fn drop(&mut self) {
        match std::fs::remove_file(self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                log::warn!("{}: {e}", self.path.display())
            }
            _ => {}
        }
    }
}

/// Serves until `stop` is asked for.
pub fn serve(server: Server<'_>, socket: &Socket<'_>, stop: &Stop) {
    let open = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for connection in socket.listener.incoming() {
            if stop.is_asked() {
                return;
            }
            let open = &open;
            let started = connection.and_then(|connection| {
                if open.load(Ordering::Acquire) >= CONNECTIONS_MAX {
                    return answer(&connection, &json!({"error": "busy"}), stop);
                }
                open.fetch_add(1, Ordering::AcqRel);
                let work = move || {
                    if let Err(e) = answer_all(server, &connection, stop) {
                        log::warn!("a connection was lost: {e}");
                    }
                    open.fetch_sub(1, Ordering::AcqRel);
                };
                let started = std::thread::Builder::new().spawn_scoped(scope, work).map(drop);
                started.inspect_err(|_| {
                    open.fetch_sub(1, Ordering::AcqRel);
                })
            });
            if let Err(e) = started {
                log::warn!("a connection was lost: {e}");
            }
        }
    });
}

fn answer_all(server: Server<'_>, connection: &UnixStream, stop: &Stop) -> io::Result<()> {
    connection.set_read_timeout(Some(IDLE))?;
    connection.set_write_timeout(Some(IDLE))?;
    let (mut reader, mut line) = (BufReader::new(connection), Vec::new());
    loop {
        let bytes_max =
            if line.len() < LINE_BYTES { LINE_BYTES } else { line_bytes_max(server.serving) };
        let room = bytes_max.saturating_sub(line.len()) as u64;
        match reader.by_ref().take(room).read_until(b'\n', &mut line) {
            Ok(0) if line.is_empty() => return Ok(()),
            Ok(0) if room == 0 => {
                return answer(connection, &json!({"error": "the line is too long"}), stop);
            }
            Ok(n) if n as u64 == room && line.last() != Some(&b'\n') => {}
            Ok(_) => {
                answer(connection, &score(server, &line), stop)?;
                line.clear();
                // A caller that never pauses must not keep the daemon from ending.
                if stop.is_asked() && reader.buffer().is_empty() {
                    return Ok(());
                }
            }
            // What was read of the line so far stays in `line`.
            Err(e) if is_timeout(&e) => {
                if stop.is_asked() {
                    return Ok(());
                }
            }
            Err(e) => return Err(e),
        }
    }
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Bytes of the longest line that is a sample of something served.
fn line_bytes_max(serving: &Serving) -> usize {
    let schemas = serving.names().into_iter().filter_map(|name| serving.schema(&name));
    schemas.map(|schema| Sample::json_bytes_max(&schema)).max().unwrap_or(0).max(LINE_BYTES)
}

/// What a line says beside its sample.
#[derive(Deserialize)]
struct Addressed {
    model: Option<String>,
}

fn score(server: Server<'_>, line: &[u8]) -> Value {
    let Some(_turn) = server.shed.turn() else { return json!({"error": "busy"}) };
    scored(server, line).unwrap_or_else(|problem| json!({"error": problem}))
}

fn scored(server: Server<'_>, line: &[u8]) -> Result<Value, String> {
    let serving = server.serving;
    let text = std::str::from_utf8(line).map_err(|e| e.to_string())?;
    let names = serving.names();
    let name = match (serde_json::from_str(text).map_err(|e| e.to_string())?, names.as_slice()) {
        (Addressed { model: Some(name) }, _) => name,
        (_, []) => return Err("no model is served yet".to_owned()),
        (_, [only]) if server.is_only => only.clone(),
        _ => return Err(format!("model: is to be one of {}", names.join(", "))),
    };
    let schema = serving.schema(&name).ok_or_else(|| RequestError::NotServed.to_string())?;
    let sample = Sample::from_json(text, &schema).map_err(|e| e.to_string())?;
    let mut batch = Batch::new(&schema, 1);
    batch.push(&schema, &sample).map_err(|e| e.to_string())?;
    let began = Instant::now();
    let ticket = serving.submit(&name, &batch, None).map_err(|e| match e {
        RequestError::Busy(_) => "busy".to_owned(),
        e => e.to_string(),
    })?;
    let answer = ticket.wait().map_err(|e| e.to_string())?;
    server.latencies.record(&name, ticket.generation(), began.elapsed());
    let scores = answer.scores();
    Ok(json!({"score": scores.values, "status": scores.statuses[0]}))
}

/// Writes `value`. A caller that does not read keeps its own connection waiting, and not the daemon
/// from ending.
fn answer(mut connection: &UnixStream, value: &Value, stop: &Stop) -> io::Result<()> {
    let text = format!("{value}\n");
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match connection.write(rest) {
            Ok(n) => rest = &rest[n..],
            Err(e)
                if e.kind() == io::ErrorKind::Interrupted || is_timeout(&e) && !stop.is_asked() => {
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

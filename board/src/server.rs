//! The socket: one sample a line in, one score a line out, in order, a thread for each connection. When all request
//! slots of a model are taken the answer is `busy`, at once. SIGTERM ends accepting, answers what was received, returns.

use crate::latency::Latencies;
use crate::shed::Shed;
use anyhow::{Context, Result};
use hatchback::batch::Batch;
use hatchback::limits::SAMPLE_BYTES_MAX;
use hatchback::pipeline::RequestError;
use hatchback::sample::Sample;
use hatchback::serving::Serving;
use rustix::net::{Shutdown, shutdown};
use serde::Deserialize;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Connections held at once; one more is told `busy` and let go.
const CONNECTIONS_MAX: usize = 256;
/// How often an idle connection looks whether the daemon is stopping.
const IDLE: Duration = Duration::from_millis(100);

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

/// Takes the socket's place; callers wait from then on.
///
/// # Errors
/// The place is taken, or its folder may not be written.
pub fn listen(socket: &Path) -> Result<UnixListener> {
    UnixListener::bind(socket).with_context(|| socket.display().to_string())
}

/// Serves until SIGTERM or SIGINT.
pub fn serve(server: Server<'_>, listener: &UnixListener, socket: &Path) -> Result<()> {
    let stopping = Arc::new(AtomicBool::new(false));
    stop_on_signal(&stopping, listener)?;
    let open = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for connection in listener.incoming() {
            if stopping.load(Ordering::Acquire) {
                return;
            }
            let (open, stopping) = (&open, &stopping);
            let started = connection.and_then(|connection| {
                if open.load(Ordering::Acquire) >= CONNECTIONS_MAX {
                    return answer(&connection, &json!({"error": "busy"}));
                }
                open.fetch_add(1, Ordering::AcqRel);
                let work = move || {
                    if let Err(e) = answer_all(server, &connection, stopping) {
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
    match std::fs::remove_file(socket) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).context(socket.display().to_string()),
        _ => Ok(()),
    }
}

/// On a signal sets `stopping` and shuts the listener, which ends its wait even where somebody removed the socket's file.
fn stop_on_signal(stopping: &Arc<AtomicBool>, listener: &UnixListener) -> Result<()> {
    let (mut signals, stopping, listener) =
        (Signals::new([SIGTERM, SIGINT])?, Arc::clone(stopping), listener.try_clone()?);
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            log::info!("stopping: no new connections, answering what was received");
            stopping.store(true, Ordering::Release);
            if let Err(e) = shutdown(&listener, Shutdown::Both) {
                log::error!("the socket cannot be shut: {e}");
            }
        }
    });
    Ok(())
}

fn answer_all(server: Server<'_>, connection: &UnixStream, stopping: &AtomicBool) -> io::Result<()> {
    connection.set_read_timeout(Some(IDLE))?;
    let (mut reader, mut line) = (BufReader::new(connection), Vec::new());
    loop {
        let room = (SAMPLE_BYTES_MAX + 1).saturating_sub(line.len()) as u64;
        match reader.by_ref().take(room).read_until(b'\n', &mut line) {
            Ok(0) if line.is_empty() => return Ok(()),
            Ok(_) if line.len() > SAMPLE_BYTES_MAX => {
                return answer(connection, &json!({"error": "the line is too long"}));
            }
            Ok(_) => {
                answer(connection, &score(server, &line))?;
                line.clear();
                // A caller that never pauses must not keep the daemon from ending.
                if stopping.load(Ordering::Acquire) && reader.buffer().is_empty() {
                    return Ok(());
                }
            }
            // What was read of the line so far stays in `line`.
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                if stopping.load(Ordering::Acquire) {
                    return Ok(());
                }
            }
            Err(e) => return Err(e),
        }
    }
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

fn answer(mut connection: &UnixStream, value: &Value) -> io::Result<()> {
    connection.write_all(format!("{value}\n").as_bytes())
}

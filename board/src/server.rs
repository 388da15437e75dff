//! The socket: one sample a line in, one score a line out, in order. A connection holds one worker; when all
//! are held the next one is told `busy` at once. SIGTERM ends accepting, finishes what was received, returns.

use anyhow::{Context, Result};
use hatchback::batch::Batch;
use hatchback::limits::SAMPLE_BYTES_MAX;
use hatchback::model::Model;
use hatchback::sample::Sample;
use hatchback::score::{SystemClock, Worker};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often an idle connection looks whether the daemon is stopping.
const IDLE: Duration = Duration::from_millis(100);

/// Serves until SIGTERM or SIGINT.
pub fn serve(model: &Arc<Model>, socket: &Path) -> Result<()> {
    let stopping = Arc::new(AtomicBool::new(false));
    let listener = UnixListener::bind(socket).with_context(|| socket.display().to_string())?;
    stop_on_signal(&stopping, socket)?;
    let workers = model.budget().workers as usize;
    let (sender, connections) = sync_channel(workers);
    let (connections, idle) = (Mutex::new(connections), AtomicUsize::new(workers));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| work(model, &connections, &idle, &stopping));
        }
        accept(&listener, sender, &idle, &stopping);
    });
    std::fs::remove_file(socket).with_context(|| socket.display().to_string())
}

/// On a signal sets `stopping` and wakes the listener with a connection of its own.
fn stop_on_signal(stopping: &Arc<AtomicBool>, socket: &Path) -> Result<()> {
    let (mut signals, stopping, socket) =
        (Signals::new([SIGTERM, SIGINT])?, Arc::clone(stopping), socket.to_owned());
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            log::info!("stopping: no new connections, answering what was received");
            stopping.store(true, Ordering::Release);
            let _ = UnixStream::connect(socket);
        }
    });
    Ok(())
}

/// Hands each connection to an idle worker, or refuses it: there is no place to wait.
fn accept(
    listener: &UnixListener,
    sender: SyncSender<UnixStream>,
    idle: &AtomicUsize,
    stopping: &AtomicBool,
) {
    for connection in listener.incoming() {
        if stopping.load(Ordering::Acquire) {
            return;
        }
        let taken = idle.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok();
        let handed = connection.and_then(|connection| match taken {
            true => sender.send(connection).map_err(io::Error::other),
            false => answer(&connection, &json!({"error": "busy"})),
        });
        if let Err(e) = handed {
            log::warn!("a connection was lost: {e}");
            idle.fetch_add(usize::from(taken), Ordering::AcqRel);
        }
    }
}

fn work(
    model: &Arc<Model>,
    connections: &Mutex<Receiver<UnixStream>>,
    idle: &AtomicUsize,
    stopping: &AtomicBool,
) {
    let mut worker = Worker::new(Arc::clone(model), Arc::new(SystemClock::default()));
    let mut batch = model.batch();
    loop {
        let next = connections.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(connection) = next else { return };
        if let Err(e) = answer_all(&mut worker, &mut batch, &connection, stopping) {
            log::warn!("a connection was lost: {e}");
        }
        idle.fetch_add(1, Ordering::AcqRel);
    }
}

fn answer_all(
    worker: &mut Worker,
    batch: &mut Batch,
    connection: &UnixStream,
    stopping: &AtomicBool,
) -> io::Result<()> {
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
                answer(connection, &score(worker, batch, &line))?;
                line.clear();
                worker.fetch_behind(usize::MAX);
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

fn score(worker: &mut Worker, batch: &mut Batch, line: &[u8]) -> serde_json::Value {
    let refuse = |e: &dyn std::fmt::Display| json!({"error": e.to_string()});
    let schema = worker.model().schema();
    let sample = match std::str::from_utf8(line) {
        Ok(text) => Sample::from_json(text, schema),
        Err(e) => return refuse(&e),
    };
    batch.clear();
    if let Err(e) = sample.map_err(Into::into).and_then(|s| batch.push(schema, &s)) {
        return refuse(&e);
    }
    match worker.score(batch, None) {
        Ok(scores) => json!({"score": scores.values, "status": scores.statuses[0]}),
        Err(e) => refuse(&e),
    }
}

fn answer(mut connection: &UnixStream, value: &serde_json::Value) -> io::Result<()> {
    connection.write_all(format!("{value}\n").as_bytes())
}

//! Hostile callers: many connections that send what no good caller sends, or nothing. What the
//! front door answers to such a caller does not matter here.

use super::beside::Beside;
use hyper::body::Bytes;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Connections that hostile callers want to hold at the same time.
const HELD: usize = 1000;
/// Connections a second, at most: the good callers need a processor too.
const PER_S: u64 = 1000;
/// Pause between two looks while there is no attack.
const PAUSE: Duration = Duration::from_millis(5);
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Streams that are opened and reset in one burst.
const RESETS: u32 = 100;

/// Returns a frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let stream = stream.to_be_bytes();
    [&length[1..], &[kind, flags], &stream[..], payload].concat()
}

/// Returns what each kind of attack sends. `message` is a good request of gRPC.
fn attacks(message: &[u8]) -> Vec<Vec<u8>> {
    let (settings, post) = (frame(4, 0, 0, &[]), [0x83, 0x86, 0x84]);
    let opening = [PREFACE, &settings].concat();
    // Streams that are reset as soon as they are open.
    let resets = (0..RESETS).flat_map(|n| {
        let stream = 2 * n + 1;
        [frame(1, 4, stream, &post), frame(3, 0, stream, &8u32.to_be_bytes())].concat()
    });
    let pings = (0..1000).flat_map(|_| frame(6, 0, 0, &[7; 8]));
    let endless_headers = (0..100).flat_map(|_| frame(9, 0, 1, &[0; 1000]));
    let garbage: Vec<u8> = message.iter().rev().copied().collect();
    let post_of = |length: usize, body: &str| {
        let head = "POST /v2/models/bench/infer HTTP/1.1\r\nhost: a\r\ncontent-length:";
        format!("{head} {length}\r\n\r\n{body}").into_bytes()
    };
    let json = |body: &str| post_of(body.len(), body);
    let wrong = r#"{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1], "data": [9]}]}"#;
    vec![
        Vec::new(),
        PREFACE.to_vec(),
        format!("GET / HTTP/1.1\r\nx: {}\r\n", "a".repeat(60_000)).into_bytes(),
        post_of(4_000_000, "{"),
        json(&"[".repeat(20_000)),
        json(wrong),
        garbage,
        [opening.clone(), resets.collect()].concat(),
        [opening.clone(), pings.collect()].concat(),
        [opening, frame(1, 0, 1, &post), endless_headers.collect()].concat(),
    ]
}

/// Attacks the front door at `socket` while `beside` says so, until the run is over.
pub fn attack(socket: &Path, messages: &[Bytes], beside: &Beside) {
    let kinds = attacks(&messages[0]);
    let mut held: VecDeque<UnixStream> = VecDeque::new();
    let mut start = Instant::now();
    let mut since = 0;
    while beside.goes_on() {
        if !beside.is_attacked.load(Ordering::Relaxed) {
            held.clear();
            (start, since) = (Instant::now(), 0);
            thread::sleep(PAUSE);
            continue;
        }
        let kind = &kinds[since as usize % kinds.len()];
        if let Ok(mut stream) = UnixStream::connect(socket) {
            let _ = stream.set_nonblocking(true);
            let _ = stream.write(kind);
            let _ = stream.read(&mut [0; 512]);
            held.push_back(stream);
        }
        if held.len() > HELD {
            held.pop_front();
        }
        since += 1;
        beside.attacks.fetch_add(1, Ordering::Relaxed);
        let due = Duration::from_micros(1_000_000 / PER_S * since);
        thread::sleep(due.saturating_sub(start.elapsed()).min(PAUSE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_its_length_its_stream_and_its_payload() {
        assert_eq!(frame(6, 1, 0x0102, &[9, 8]), [0, 0, 2, 6, 1, 0, 0, 1, 2, 9, 8]);
        assert!(attacks(b"ab").iter().any(|bytes| bytes == b"ba"));
    }
}

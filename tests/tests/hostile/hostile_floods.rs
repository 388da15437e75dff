//! Callers that hold what they can, and floods of frames. A good caller is answered beside them.

use crate::frames::{
    DATA, END_STREAM, Frames, HEADERS, PING, PRIORITY, SETTINGS, WINDOW_UPDATE, answer_of, block,
    frame,
};
use crate::open::{LOCAL, Open, SAMPLE, SERVICE, infer, text};
use hatchback_tests::front_door::RULES;
use prost::Message;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Asks until `is_over`. Every answer must have scores.
fn ask_until(open: &Open, is_over: &dyn Fn() -> bool) {
    let mut good = open.client();
    let mut answers = 0;
    while !is_over() || answers < 100 {
        let answer = good.ask("m", SAMPLE).unwrap();
        assert!(answer["score"].is_array(), "{answers} answers, then {answer}");
        answers += 1;
    }
}

/// Ten connections begin 128 requests each, with 12 KB of headers that the table of HPACK makes
/// short, and never send a body.
#[test]
fn headers_without_bodies_keep_no_caller_out() {
    let open = Open::new();
    let long = "h".repeat(3900);
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v2/models/m/infer"),
        (":authority", "localhost"),
    ];
    let mut held = Vec::new();
    for _ in 0..10 {
        let mut frames = Frames::new(open.unix(), 0);
        let first = [block(&headers, &[("x", &long)]), vec![0x80 | 62; 2]].concat();
        let next = [block(&headers, &[]), vec![0x80 | 62; 3]].concat();
        frames.request(&first, 0);
        (1..128).for_each(|_| {
            frames.request(&next, 0);
        });
        ask_until(&open, &|| true);
        held.push(frames);
    }
    ask_until(&open, &|| true);
}

/// Callers that send all but the end of the largest requests, and then a byte from time to time.
#[test]
fn callers_that_never_end_their_large_requests_keep_no_caller_out() {
    let open = Open::new();
    let length = RULES.request_bytes_max as usize;
    let head =
        format!("POST /v2/models/m/infer HTTP/1.1\r\n{LOCAL}content-length: {length}\r\n\r\n");
    let (part, is_over) = (vec![b' '; length - 1000], AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let mut stream = open.unix();
                    let mut sent = stream.write_all(&[head.as_bytes(), &part].concat());
                    while sent.is_ok() && !is_over.load(Ordering::Relaxed) {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                        sent = stream.write_all(b" ");
                    }
                }
            });
        }
        let start = std::time::Instant::now();
        ask_until(&open, &|| start.elapsed().as_secs() >= 2);
        is_over.store(true, Ordering::Relaxed);
    });
}

/// One connection holds all but the end of two requests of nearly the largest size, which is half
/// of the budget. It sends PINGs, so it is never silent.
fn hold_half(open: &Open, is_held: &AtomicBool, is_over: &AtomicBool) -> io::Result<()> {
    // Less than the most, so that the heads of both requests have room in the share.
    let length = RULES.request_bytes_max as usize - 8192;
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v2/models/m/infer"),
        (":authority", "localhost"),
        ("content-length", &length.to_string()),
    ];
    let mut frames = Frames::new(open.unix(), 1 << 20);
    let streams = [0; 2].map(|_| frames.request(&block(&headers, &[]), 0));
    frames.send_bodies(streams, length - 1)?;
    while !is_over.load(Ordering::Relaxed) {
        frames.stream.write_all(&frame(PING, 0, 0, &[7; 8]))?;
        loop {
            match frames.read()?.0 {
                PING => break,
                HEADERS => return Err(io::Error::other("refused")),
                _ => {}
            }
        }
        is_held.store(true, Ordering::Relaxed);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Ok(())
}

#[test]
fn one_connection_that_holds_half_of_the_budget_keeps_no_larger_caller_out() {
    let open = Open::new();
    // A field that the server skips. With it, the request is larger than a small one.
    let mut message = infer().encode_to_vec();
    message.extend([0xfa, 0x3f, 0x80, 0xe0, 0x12]);
    message.extend(vec![0; 300 << 10]);
    let body = [&[0], &(message.len() as u32).to_be_bytes()[..], &message].concat();
    let grpc = format!("POST {SERVICE}ModelInfer HTTP/1.1\r\n{LOCAL}");
    let head = grpc + "content-type: application/grpc\r\n";

    let (is_held, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let answers = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let _ = hold_half(&open, &is_held, &is_over);
                is_held.store(false, Ordering::Relaxed);
            }
        });
        let ask = || {
            while !is_held.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let answers = [0; 2].map(|_| text(&open.exchange(&head, &body)));
            answers.into_iter().find(|answer| answer.contains("score")).ok_or("refused twice")
        };
        let answers: Vec<_> = (0..10).map(|_| ask()).collect();
        // Before anything is asserted: the other thread must end first.
        is_over.store(true, Ordering::Relaxed);
        answers
    });
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
}

/// The bodies of refused requests are not read, and yet belong to requests.
#[test]
fn refused_requests_with_bodies_are_no_flood() {
    let open = Open::new();
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v2/models/m/infer"),
        (":authority", "localhost"),
        ("content-encoding", "gzip"),
    ];
    let (mut frames, mut window) = (Frames::new(open.unix(), 1 << 20), 65_535);
    let (body, mut sent) = ([0; 8 << 10], 0);
    for _ in 0..400 {
        let stream = frames.request(&block(&headers, &[]), 0);
        // Otherwise the answers were faster than the updates of the window.
        if window >= body.len() {
            frames.stream.write_all(&frame(DATA, END_STREAM, stream, &body)).unwrap();
            window -= body.len();
            sent += body.len();
        }
        loop {
            let (kind, other, payload) = frames.read().expect("the connection stays open");
            if kind == WINDOW_UPDATE && other == 0 {
                window += u32::from_be_bytes(payload.try_into().unwrap()) as usize;
            } else if kind == HEADERS && other == stream {
                break;
            }
        }
    }
    assert!(sent > 2 << 20, "{sent} bytes are no flood anyway");
}

/// Refusals and scores that a caller asks for and never takes: the window of HTTP/2 is 0. Their
/// bytes are counted until the connection ends, and the front door ends it.
#[test]
fn a_caller_that_takes_no_answer_is_counted_and_closed() {
    let open = Open::new();
    let head = |path| {
        let headers =
            [(":method", "GET"), (":scheme", "http"), (":path", path), (":authority", "localhost")];
        block(&headers, &[])
    };
    let mut frames = Frames::new(open.unix(), 0);
    (0..50).for_each(|_| {
        frames.request(&head("/nowhere"), END_STREAM);
    });
    (0..50).for_each(|_| {
        frames.request(&head("/v2/models/m"), END_STREAM);
    });
    while open.bytes() < 100 * 2048 {
        std::thread::yield_now();
    }
    let end = io::copy(&mut frames.stream, &mut io::sink());
    println!("{end:?}");
    while open.bytes() > 3 * 4096 {
        std::thread::yield_now();
    }
    ask_until(&open, &|| true);
}

/// A caller that sends requests and reads no answer. The system buffers the answers, in memory that
/// belongs to the front door. Its own bound would be 208 KiB for each connection.
#[test]
fn the_system_keeps_few_answers_of_a_caller_that_does_not_read() {
    let open = Open::new();
    let (mut stream, mut good) = (open.unix(), open.client());
    stream.set_nonblocking(true).unwrap();
    let request = b"GET /v2/models/m HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let (mut sent, mut waits) = (0, 0);
    // The good caller's answers show that the front door's only thread had many turns meanwhile.
    while waits < 100 {
        match stream.write(&request[sent % request.len()..]) {
            Ok(bytes) => (sent, waits) = (sent + bytes, 0),
            Err(e) => {
                assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
                assert!(good.ask("m", SAMPLE).unwrap()["score"].is_array());
                waits += 1;
            }
        }
    }
    let kept = rustix::io::ioctl_fionread(&stream).unwrap();
    println!("{sent} bytes were sent, {kept} bytes of answers are kept");
    assert!((1..32 << 10).contains(&kept), "{kept}");
}

/// The table of HPACK would keep a refusal, and then the connection would seem not to take it.
#[test]
fn a_refusal_that_was_taken_is_counted_no_more() {
    let open = Open::new();
    let mut frames = Frames::new(open.unix(), 1 << 20);
    let call = |path: &str| {
        let headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
        ];
        block(&headers, &[])
    };
    for number in 0..50 {
        frames.request(&call(&format!("{SERVICE}None{number}")), END_STREAM);
        assert!(answer_of(&frames.stream).unwrap().is_empty());
    }
    while open.bytes() > 3 * 4096 {
        std::thread::yield_now();
    }
    frames.request(&call(&format!("{SERVICE}None")), END_STREAM);
    assert!(answer_of(&frames.stream).unwrap().is_empty(), "the connection is open");
}

/// Frames without requests end their connection. A request is never far from the next turn, which
/// the unit test of a turn proves.
#[test]
fn a_flood_of_frames_without_requests_is_ended() {
    let open = Open::new();
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v2/models/m/infer"),
        (":authority", "localhost"),
    ];
    let priority = [0, 0, 0, 0, 9];
    let floods = [
        ("PRIORITY", frame(PRIORITY, 0, 1, &priority)),
        ("WINDOW_UPDATE", frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1])),
        ("PING", frame(PING, 0, 0, &[7; 8])),
        ("acknowledged PING", frame(PING, 1, 0, &[7; 8])),
        ("SETTINGS", frame(SETTINGS, 0, 0, &[])),
        ("empty DATA", frame(DATA, 0, 1, &[])),
        ("padded DATA", frame(DATA, 8, 1, &[1, 0])),
        ("unknown", frame(200, 0, 0, &[7; 100])),
    ];
    for (name, flood) in floods {
        let mut frames = Frames::new(open.unix(), 1 << 20);
        frames.request(&block(&headers, &[]), 0);
        let mut reading = frames.stream.try_clone().unwrap();
        let reader = std::thread::spawn(move || io::copy(&mut reading, &mut io::sink()));
        let (flood, mut sent) = (flood.repeat((64 << 10) / flood.len()), 0);
        let mut good = open.client();
        while frames.stream.write_all(&flood).is_ok() {
            sent += flood.len();
            assert!(sent < 64 << 20, "{name}: {sent} bytes");
            assert!(good.ask("m", SAMPLE).unwrap()["score"].is_array(), "{name}");
        }
        println!("{name}: ended after {sent} bytes");
        let _ = reader.join().unwrap();
    }
}

//! Frames of HTTP/2, written and read by hand: no client sends such ones as a hostile caller does.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// Frames of HTTP/2, written and read by hand.
pub struct Frames {
    pub stream: UnixStream,
    next: u32,
}

/// The kinds of frames that the tests use.
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const WINDOW_UPDATE: u8 = 8;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = &(payload.len() as u32).to_be_bytes()[1..];
    [length, &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Appends a text of HPACK, whose prefix has seven bits.
fn push_text(block: &mut Vec<u8>, text: &str) {
    match text.len() {
        short @ 0..127 => block.push(short as u8),
        long => {
            let rest = long - 127;
            assert!(rest < 1 << 14);
            block.extend([127, (rest & 127) as u8 | 128, (rest >> 7) as u8]);
        }
    }
    block.extend(text.as_bytes());
}

/// Returns a block of headers as literals, those after `indexed` with an entry in the table.
pub fn block(headers: &[(&str, &str)], indexed: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (kind, (name, value)) in
        headers.iter().map(|h| (0, h)).chain(indexed.iter().map(|h| (0x40, h)))
    {
        block.push(kind);
        push_text(&mut block, name);
        push_text(&mut block, value);
    }
    block
}

impl Frames {
    /// Begins a connection whose caller takes `window` bytes of each answer.
    pub fn begin(mut stream: impl Write, window: u32) {
        let window = [&[0, 4][..], &window.to_be_bytes()].concat();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        stream.write_all(&frame(SETTINGS, 0, 0, &window)).unwrap();
    }

    pub fn new(stream: UnixStream, window: u32) -> Self {
        Self::begin(&stream, window);
        Self { stream, next: 1 }
    }

    /// Begins a request with this block of headers. Returns the number of its stream.
    pub fn request(&mut self, block: &[u8], flags: u8) -> u32 {
        let number = self.next;
        self.next += 2;
        let headers = frame(HEADERS, flags | END_HEADERS, number, block);
        self.stream.write_all(&headers).unwrap();
        number
    }

    /// Reads a frame. Returns its kind, its stream and its payload.
    pub fn read(&mut self) -> io::Result<(u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head)?;
        let [a, b, c, kind, _, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok((kind, u32::from_be_bytes(stream), payload))
    }

    /// Sends `bytes` of the body of each of `streams`, as the windows allow it.
    pub fn send_bodies(&mut self, streams: [u32; 2], bytes: usize) -> io::Result<()> {
        // The windows that each connection begins with: the connection's, and both streams'.
        let (mut windows, mut left) = ([65_535; 3], [bytes; 2]);
        while left != [0; 2] {
            let mut is_waiting = true;
            for (number, stream) in streams.into_iter().enumerate() {
                let part = left[number].min(windows[0]).min(windows[1 + number]).min(16_384);
                if part > 0 {
                    self.stream.write_all(&frame(DATA, 0, stream, &vec![b' '; part]))?;
                    windows[0] -= part;
                    windows[1 + number] -= part;
                    left[number] -= part;
                    is_waiting = false;
                }
            }
            if is_waiting {
                let (kind, stream, payload) = self.read()?;
                let window = [0, streams[0], streams[1]].iter().position(|own| *own == stream);
                match (kind, window) {
                    (WINDOW_UPDATE, Some(window)) => {
                        let more = u32::from_be_bytes(payload.try_into().unwrap());
                        windows[window] += more as usize;
                    }
                    (HEADERS, _) => return Err(io::Error::other("refused")),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// Reads frames until a stream ends. Returns the data before its end; `None` if the connection
/// ends.
pub fn answer_of(mut stream: impl Read) -> Option<Vec<u8>> {
    let mut data = Vec::new();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).ok()?;
        if head[3] == DATA {
            data.extend(payload);
        }
        if matches!(head[3], DATA | HEADERS) && head[4] & END_STREAM != 0 {
            return Some(data);
        }
    }
}

//! The pass phrases of key files and the PINs of tokens: from the environment, or from the
//! terminal, without an echo. Never writes one to a file, a log or a message.

use anyhow::{Context, Result, bail, ensure};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};

/// The variable of the environment with a pass phrase.
const VARIABLE: &str = "HATCHBACK_KEY_PASSPHRASE";
/// The variable of the environment with the path of a file whose first line is a pass phrase.
const FILE_VARIABLE: &str = "HATCHBACK_KEY_PASSPHRASE_FILE";
/// Control-C and Control-D, as a terminal sends them.
const ENDS: [u8; 2] = [0x03, 0x04];
/// Delete and Backspace.
const ERASES: [u8; 2] = [0x7f, 0x08];

/// The pass phrases that one command has learned.
pub struct Passphrases {
    known: Vec<String>,
    /// Whether the first one is that of the environment. The terminal is not asked then.
    is_given: bool,
    /// That of the keys that this command makes.
    new: Option<String>,
    /// The PINs that were typed, by token.
    pins: BTreeMap<String, String>,
}

impl Passphrases {
    /// Reads the pass phrase of the environment, if it has one.
    ///
    /// # Errors
    /// The file that the environment names cannot be read, or its first line is empty.
    pub fn of_environment() -> Result<Self> {
        let given = match (std::env::var(VARIABLE), std::env::var(FILE_VARIABLE)) {
            (Ok(given), _) => Some(given),
            (_, Ok(path)) => {
                let named = || format!("{FILE_VARIABLE}: {path}");
                let text = std::fs::read_to_string(&path).with_context(named)?;
                Some(text.lines().next().unwrap_or_default().to_owned())
            }
            _ => None,
        };
        ensure!(given.as_deref() != Some(""), "{VARIABLE}: the pass phrase is empty");
        let (is_given, new) = (given.is_some(), given.clone());
        let (known, pins) = (given.into_iter().collect(), BTreeMap::new());
        Ok(Self { known, is_given, new, pins })
    }

    /// Returns the pass phrase of new keys: that of the environment, or one that the user types
    /// twice.
    ///
    /// # Errors
    /// There is neither, or the user types two different ones.
    pub fn of_new_keys(&mut self) -> Result<String> {
        if let Some(new) = &self.new {
            return Ok(new.clone());
        }
        let first = ask("pass phrase of the new keys: ")
            .context("the new keys have no pass phrase; `--plain` makes keys without one")?;
        ensure!(!first.is_empty(), "the pass phrase is empty; `--plain` makes keys without one");
        ensure!(ask("the same again: ")? == first, "the two pass phrases differ");
        self.known.push(first.clone());
        Ok(self.new.insert(first).clone())
    }

    /// Returns the PIN of the token `what`. No other one is tried: a token locks itself after a few
    /// wrong ones.
    ///
    /// # Errors
    /// The environment has no pass phrase, and no terminal can be asked.
    pub fn pin(&mut self, what: &str) -> Result<String> {
        let given = self.known.first().filter(|_| self.is_given);
        if let Some(pin) = given.or_else(|| self.pins.get(what)) {
            return Ok(pin.clone());
        }
        let typed = ask(&format!("PIN of {what}: ")).with_context(|| what.to_owned())?;
        Ok(self.pins.entry(what.to_owned()).or_insert(typed).clone())
    }

    /// Returns what `open` makes of a pass phrase. Tries the known ones first, then asks for that
    /// of `what` until it is right.
    ///
    /// # Errors
    /// The pass phrase of the environment is wrong, or no terminal can be asked.
    pub fn open<T>(&mut self, what: &str, open: impl Fn(&str) -> Option<T>) -> Result<T> {
        if let Some(opened) = self.known.iter().find_map(|known| open(known)) {
            return Ok(opened);
        }
        if self.is_given {
            bail!(
                "{what}: the pass phrase of {VARIABLE} or {FILE_VARIABLE} is not that of this key"
            );
        }
        loop {
            let typed =
                ask(&format!("pass phrase of {what}: ")).with_context(|| what.to_owned())?;
            ensure!(!typed.is_empty(), "{what}: no pass phrase was typed");
            if let Some(opened) = open(&typed) {
                self.known.push(typed);
                return Ok(opened);
            }
        }
    }
}

/// Asks the terminal, which shows no character that is typed.
fn ask(question: &str) -> Result<String> {
    let open = || File::options().read(true).write(true).open("/dev/tty");
    let mut terminal = open().with_context(|| {
        format!(
            "there is no terminal to ask for the pass phrase; set {VARIABLE} or {FILE_VARIABLE}"
        )
    })?;
    let before = tcgetattr(&terminal)?;
    let mut hidden = before.clone();
    // Control-C arrives as a character: its signal would end the program before the echo is back.
    hidden.local_modes -= LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
    tcsetattr(&terminal, OptionalActions::Flush, &hidden)?;
    let asked = terminal.write_all(question.as_bytes());
    let line = asked.map_err(Into::into).and_then(|()| read_line(&mut terminal));
    tcsetattr(&terminal, OptionalActions::Now, &before)?;
    terminal.write_all(b"\n")?;
    line
}

fn read_line(from: &mut impl Read) -> Result<String> {
    // One byte at a time: what follows the line is not this program's to read.
    let (mut line, mut next) = (Vec::new(), [0]);
    while from.read(&mut next)? == 1 {
        match next[0] {
            b'\n' | b'\r' => return String::from_utf8(line).context("is not UTF-8"),
            end if ENDS.contains(&end) => bail!("interrupted"),
            erase if ERASES.contains(&erase) => {
                // A character of UTF-8 is several bytes.
                while line.pop().is_some_and(|byte: u8| byte & 0xc0 == 0x80) {}
            }
            byte => line.push(byte),
        }
    }
    bail!("the terminal was closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_edited_and_can_be_interrupted() {
        let read = |typed: &[u8]| read_line(&mut &typed[..]).ok();
        assert_eq!(read(b"abc\n").as_deref(), Some("abc"));
        assert_eq!(read("ab\u{e9}\u{7f}\u{8}c\r".as_bytes()).as_deref(), Some("ac"));
        assert_eq!(read(b"\x7f\n").as_deref(), Some(""));
        assert_eq!((read(b"ab\x03c\n"), read(b"ab"), read(b"\xff\n")), (None, None, None));
    }
}

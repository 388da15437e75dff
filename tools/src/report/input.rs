//! Opens the files that a user names. Anything but a regular file is refused: a FIFO would keep the
//! command waiting, and a device has no end. Links are followed.

use aws_lc_rs::digest::{Context, SHA256};
use hatchback::bundle::manifest::hex;
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Bytes that are read at once to be hashed.
const HASHED_BYTES: usize = 1 << 20;

/// The mark that some editors write before the text of a file.
pub const BYTE_ORDER_MARK: char = '\u{feff}';

/// Opens a regular file.
///
/// # Errors
/// `InvalidInput` for anything else, and the errors of the system.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let kind = file.metadata()?.file_type();
    let what = match kind {
        _ if kind.is_file() => return Ok(file),
        _ if kind.is_dir() => "a directory",
        _ if kind.is_fifo() => "a FIFO",
        _ => "a device",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("is {what}, not a regular file")))
}

/// Reads a regular file of at most `bytes_max` bytes.
///
/// # Errors
/// As [`open`], and `FileTooLarge` for a longer file.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let why = format!("has over {bytes_max} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}

/// Returns the SHA-256 of a regular file, in hexadecimal digits.
///
/// # Errors
/// As [`open`].
pub fn sha256(path: &Path) -> io::Result<String> {
    let mut file = open(path)?;
    let (mut hash, mut block) = (Context::new(&SHA256), vec![0; HASHED_BYTES]);
    loop {
        match file.read(&mut block)? {
            0 => return Ok(hex(hash.finish().as_ref())),
            read => hash.update(&block[..read]),
        }
    }
}

/// Reads a text as [`read`] does, without the byte order mark that some editors write before it.
///
/// # Errors
/// As [`read`], and `InvalidData` for bytes that are not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let bytes = read(path, bytes_max)?;
    let text = String::from_utf8(bytes).map_err(|e| io::Error::new(ErrorKind::InvalidData, e))?;
    Ok(match text.strip_prefix(BYTE_ORDER_MARK) {
        Some(text) => text.to_owned(),
        None => text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_without_a_wait() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        for (path, what) in [
            (fifo.as_path(), "a FIFO"),
            (folder.path(), "a directory"),
            (Path::new("/dev/zero"), "a device"),
        ] {
            let error = open(path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert_eq!(error.to_string(), format!("is {what}, not a regular file"));
        }

        let file = folder.path().join("file");
        std::fs::write(&file, "four").unwrap();
        assert_eq!(read_text(&file, 4).unwrap(), "four");
        assert_eq!(read(&file, 3).unwrap_err().to_string(), "has over 3 bytes");
        assert_eq!(open(&folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}

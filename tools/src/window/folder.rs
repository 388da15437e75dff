//! A folder of windows: one subfolder for each, named by the window's number in 12 digits. Lists
//! closed windows only. Never opens one.

use crate::window::error::WindowError;
use crate::window::head::HEAD;
use std::path::{Path, PathBuf};

/// Digits of a window's folder.
const DIGITS: usize = 12;

/// A closed window of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClosedWindow {
    /// Its number.
    pub number: u64,
    /// Its folder.
    pub folder: PathBuf,
}

/// Returns the folder of window `number` below `folder`.
pub fn window_folder(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number:0DIGITS$}"))
}

/// Returns the closed windows of `folder`, in the order of their numbers.
///
/// # Errors
/// [`WindowError::Io`] if the folder cannot be listed.
pub fn closed_windows(folder: &Path) -> Result<Vec<ClosedWindow>, WindowError> {
    let mut closed = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(WindowError::io(folder))? {
        let path = entry.map_err(WindowError::io(folder))?.path();
        if let Some(number) = number_of(&path).filter(|_| path.join(HEAD).is_file()) {
            closed.push(ClosedWindow { number, folder: path });
        }
    }

    closed.sort_unstable_by_key(|window| window.number);
    Ok(closed)
}

/// Returns the closed windows of `folder` after window `last`, without a gap between them.
///
/// # Errors
/// [`WindowError::Gap`] if one is missing, [`WindowError::Io`] if the folder cannot be listed.
pub fn windows_after(folder: &Path, last: Option<u64>) -> Result<Vec<ClosedWindow>, WindowError> {
    let mut windows = closed_windows(folder)?;
    windows.retain(|window| last.is_none_or(|last| window.number > last));

    let mut before = last;
    for window in &windows {
        if let Some(missing) = before.map(|last| last + 1).filter(|next| *next != window.number) {
            let (path, found) = (folder.to_owned(), window.number);
            return Err(WindowError::Gap { path, missing, found });
        }
        before = Some(window.number);
    }
    Ok(windows)
}

fn number_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let digits = name.len() == DIGITS && name.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| name.parse().ok()).flatten()
}

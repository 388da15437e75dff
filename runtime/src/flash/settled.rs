//! Reads of a flash directory without its lock, beside the process that changes it.

use crate::flash::{Flash, FlashError};
use crate::limits::SETTLED_READS_MAX;
use std::fmt::Display;

/// Opens a flash directory with `open`, and reads it with `read`. It takes no lock, so the
/// daemon may remove files meanwhile: after a merge, an update or a rollback. What is missing
/// or damaged, because `read` fails or its result is not `is_whole`, counts only if the same state
/// was live before and after the read.
///
/// # Errors
/// Those of `open` and `read`. [`FlashError::Changing`] if the directory changed during each of
/// several reads.
pub fn read_settled<T, E: Display + From<FlashError>>(
    open: impl Fn() -> Result<Flash, E>,
    read: impl Fn(&Flash) -> Result<T, E>,
    is_whole: impl Fn(&T) -> bool,
) -> Result<T, E> {
    let state = || open().map(|flash| flash.record().clone()).map_err(|e| e.to_string());
    for _ in 0..SETTLED_READS_MAX {
        let before = state();
        let found = open().and_then(|flash| read(&flash));
        if found.as_ref().is_ok_and(&is_whole) || before == state() {
            return found;
        }
    }
    Err(FlashError::Changing.into())
}

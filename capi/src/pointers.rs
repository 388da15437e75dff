//! Converts pointers of a C caller to slices and texts. By the header, each points to as many
//! values as its length says, and no other code changes them during the call.

use crate::outcome::{Refusal, request};
use std::ffi::{CStr, c_char};

/// Returns the text at `text`. `name` is the argument's name, for the error.
pub fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str, Refusal> {
    if text.is_null() {
        return Err(request(format!("{name} is NULL")));
    }
    // SAFETY: `text` is not null; by the header it is a zero-terminated string that lives through
    // the call.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|e| request(format!("{name}: {e}")))
}

/// Returns the `length` values at `start`. `name` is the argument's name, for the error.
pub fn values<'a, T>(name: &str, start: *const T, length: usize) -> Result<&'a [T], Refusal> {
    match length {
        0 => Ok(&[]),
        _ if start.is_null() || !start.is_aligned() => {
            Err(request(format!("{name} is NULL or not aligned")))
        }
        // SAFETY: `start` is not null and aligned; by the header it has `length` values, which live
        // through the call.
        _ => Ok(unsafe { std::slice::from_raw_parts(start, length) }),
    }
}

/// Returns the `length` values at `start`, to be written. `name` is the argument's name, for the
/// error.
pub fn room<'a, T>(name: &str, start: *mut T, length: usize) -> Result<&'a mut [T], Refusal> {
    values(name, start.cast_const(), length)?;
    // SAFETY: as in `values`; by the header no other code reads or writes them during the call.
    Ok(if length == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(start, length) } })
}

/// Returns the value at `start`, to be written; `None` if `start` is null.
pub fn place<'a, T>(name: &str, start: *mut T) -> Result<Option<&'a mut T>, Refusal> {
    if start.is_null() { Ok(None) } else { Ok(room(name, start, 1)?.first_mut()) }
}

/// Writes `value` to `start`, which must not be null.
pub fn write<T>(name: &str, start: *mut T, value: T) -> Result<(), Refusal> {
    room(name, start, 1)?[0] = value;
    Ok(())
}

/// Copies `text` to `to` with a terminating zero, and cuts it to fit.
pub fn copy_text(text: &str, to: &mut [c_char]) {
    to.fill(0);
    let room = to.len() - 1;
    for (to, from) in to[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

//! Converts pointers of a C caller to slices and texts. By the header, each points to as many
//! values as its length says, and no other code changes them during the call.

use crate::outcome::{Refusal, request};
use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

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

/// Checks that `start` may point to values, unless `length` is 0.
fn check<T>(name: &str, start: *const T, length: usize) -> Result<(), Refusal> {
    match length > 0 && (start.is_null() || !start.is_aligned()) {
        true => Err(request(format!("{name} is NULL or not aligned"))),
        false => Ok(()),
    }
}

/// Returns the `length` values at `start`. `name` is the argument's name, for the error.
pub fn values<'a, T>(name: &str, start: *const T, length: usize) -> Result<&'a [T], Refusal> {
    check(name, start, length)?;
    // SAFETY: `start` is not null and aligned; by the header it has `length` values, which live
    // through the call.
    Ok(if length == 0 { &[] } else { unsafe { std::slice::from_raw_parts(start, length) } })
}

/// Returns the room for `length` values at `start`, which the caller need not have initialised.
/// `name` is the argument's name, for the error.
pub fn room<'a, T>(
    name: &str,
    start: *mut T,
    length: usize,
) -> Result<&'a mut [MaybeUninit<T>], Refusal> {
    check(name, start, length)?;
    let start = start.cast();
    // SAFETY: as in `values`; by the header no other code reads or writes the room during the call.
    // `MaybeUninit` has the layout of its value.
    Ok(if length == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(start, length) } })
}

/// Returns the room for `length` numbers at `start`, and sets them to 0.
pub fn zeros<'a>(name: &str, start: *mut u32, length: usize) -> Result<&'a mut [u32], Refusal> {
    let room = room(name, start, length)?;
    for number in &mut *room {
        number.write(0);
    }
    // SAFETY: each number was written.
    Ok(unsafe { room.assume_init_mut() })
}

/// Returns the room for a value at `start`; `None` if `start` is null.
pub fn place<'a, T>(name: &str, start: *mut T) -> Result<Option<&'a mut MaybeUninit<T>>, Refusal> {
    if start.is_null() { Ok(None) } else { Ok(room(name, start, 1)?.first_mut()) }
}

/// Writes `value` to `start`, which must not be null.
pub fn write<T>(name: &str, start: *mut T, value: T) -> Result<(), Refusal> {
    room(name, start, 1)?[0].write(value);
    Ok(())
}

/// Copies `text` to `to` with a terminating zero, and cuts it to fit after a whole character.
pub fn copy_text(text: &str, to: &mut [c_char]) {
    to.fill(0);
    let text = &text[..text.floor_char_boundary(to.len() - 1)];
    for (to, from) in to.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_after_a_whole_character() {
        for (text, expected) in [("city", "city"), ("größe", "grö"), ("aaaé", "aaa"), ("", "")]
        {
            let mut to: [c_char; 5] = [7; 5];
            copy_text(text, &mut to);
            let bytes: Vec<u8> = to.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
            assert_eq!(std::str::from_utf8(&bytes), Ok(expected), "{text}");
        }
    }
}

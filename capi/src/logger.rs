//! Passes the runtime's log messages to a function of the caller.

use crate::pointers::copy_text;
use hatchback::locks::lock;
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, OnceLock};

/// Bytes of a message with its terminating zero. A longer message is cut.
const MESSAGE_BYTES_MAX: usize = 1024;

/// A function that takes messages, `hatchback_logger` in C.
pub type Logger = extern "C" fn(level: c_int, message: *const c_char, context: *mut c_void);

/// The caller's function, and its context pointer as a number.
static LOGGER: Mutex<Option<(Logger, usize)>> = Mutex::new(None);

/// Whether the process logs through this file: a Rust program may have set another logger.
static IS_LOGGER: OnceLock<bool> = OnceLock::new();

struct ToCaller;

impl Log for ToCaller {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Info
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let logger = *lock(&LOGGER);
        if let Some((logger, context)) = logger {
            let mut message = [0; MESSAGE_BYTES_MAX];
            copy_text(&record.args().to_string(), &mut message);
            logger(record.level() as c_int, message.as_ptr(), context as *mut c_void);
        }
    }

    fn flush(&self) {}
}

/// Passes messages to `logger` from now on, or nowhere if it is `None`. Returns false if the
/// program has another Rust logger.
pub fn set(logger: Option<Logger>, context: *mut c_void) -> bool {
    let is_logger = *IS_LOGGER.get_or_init(|| {
        let is_logger = log::set_logger(&ToCaller).is_ok();
        if is_logger {
            log::set_max_level(LevelFilter::Info);
        }
        is_logger
    });
    *lock(&LOGGER) = logger.map(|logger| (logger, context as usize));
    is_logger
}

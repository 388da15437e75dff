//! The results of calls and the text of the last error of each thread. No panic leaves a call.

use hatchback::request::explain::ExplainError;
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::ServingError;
use hatchback::schema::batch::BatchError;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of a call, `hatchback_result` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The call succeeded.
    Ok = 0,
    /// Every request slot is taken.
    Busy = 1,
    /// An argument or the batch does not fit the model.
    Request = 2,
    /// The target or the flash directory is refused.
    Open = 3,
    /// The request could not be computed.
    Failed = 4,
    /// A score is not a number.
    NotFinite = 5,
    /// The deadline passed before the request had scores.
    DeadlineExceeded = 6,
    /// The handle was closed, or was never open.
    Closed = 7,
}

/// Why a call failed: its result and its error text.
pub struct Refusal(pub Outcome, pub String);

/// Returns the refusal of an argument.
pub fn request(problem: impl Into<String>) -> Refusal {
    Refusal(Outcome::Request, problem.into())
}

/// Returns the refusal of a target or a flash directory.
pub fn refused(e: impl std::fmt::Display) -> Refusal {
    Refusal(Outcome::Open, e.to_string())
}

/// Returns the refusal of a handle that is not open.
pub fn closed(what: &str) -> Refusal {
    Refusal(Outcome::Closed, format!("the {what} is closed, or was never open"))
}

impl From<RequestError> for Refusal {
    fn from(e: RequestError) -> Self {
        let outcome = match e {
            RequestError::Busy(_) | RequestError::Replaced => Outcome::Busy,
            RequestError::NotFinite(_) => Outcome::NotFinite,
            RequestError::DeadlineExceeded => Outcome::DeadlineExceeded,
            RequestError::NotServed => Outcome::Closed,
            _ => Outcome::Failed,
        };
        Self(outcome, e.to_string())
    }
}

impl From<BatchError> for Refusal {
    fn from(e: BatchError) -> Self {
        request(e.to_string())
    }
}

impl From<ServingError> for Refusal {
    fn from(e: ServingError) -> Self {
        refused(e)
    }
}

impl From<ExplainError> for Refusal {
    fn from(e: ExplainError) -> Self {
        let outcome = match e {
            ExplainError::Sample(_) | ExplainError::Batch(_) => Outcome::Request,
            ExplainError::NotServed(_) => Outcome::Closed,
            ExplainError::Flash(_) | ExplainError::Open(_) => Outcome::Open,
            _ => Outcome::Failed,
        };
        Self(outcome, e.to_string())
    }
}

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
    static EXPLANATION: RefCell<CString> = RefCell::default();
}

/// Runs `work` and keeps the text of its error for `hatchback_error`.
pub fn answer(work: impl FnOnce() -> Result<(), Refusal>) -> Outcome {
    let panicked = || Refusal(Outcome::Failed, "a panic inside libhatchback".to_owned());
    match catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked())) {
        Ok(()) => Outcome::Ok,
        Err(Refusal(outcome, text)) => {
            // A C string cannot contain a zero byte.
            ERROR.set(CString::new(text.replace('\0', " ")).unwrap_or_default());
            outcome
        }
    }
}

/// Keeps `text` as the calling thread's last explanation, and returns it.
pub fn keep_explanation(text: String) -> *const c_char {
    // JSON escapes zero bytes.
    EXPLANATION.set(CString::new(text).unwrap_or_default());
    EXPLANATION.with_borrow(|text| text.as_ptr())
}

/// Returns the text of the calling thread's last error. It lives until the thread's next error.
pub fn last_error() -> *const c_char {
    ERROR.with_borrow(|text| text.as_ptr())
}

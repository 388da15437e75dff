//! The status page: one file that loads nothing, and the headers that enforce this.

use crate::http::{Answered, reply};
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::header::{CONTENT_SECURITY_POLICY, HeaderValue, REFERRER_POLICY, X_FRAME_OPTIONS};

const PAGE: &str = include_str!("page.html");
/// The page runs its own script and style, and talks to its own server only.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Returns the page.
pub fn page() -> Answered {
    let data = Bytes::from_static(PAGE.as_bytes());
    let mut response = reply(StatusCode::OK, "text/html; charset=utf-8", data);
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

//! Actions of the car's owner: load and unload models, and the actions of the status page. A
//! caller shows that right by its user on a Unix socket, or by the token.

use crate::connections::{Connection, Peer};
use crate::front::Front;
use crate::infer::Call;
use crate::limits::RETRY_MAX;
use crate::models::repository;
use crate::problem::{Code, Problem};
use crate::route::status;
use hatchback::request::explain::Explanation;
use hyper::HeaderMap;
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, HeaderValue};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// A change that a caller requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Load,
    Unload,
}

/// Returns whether the caller may change the car: root or the daemon's own user on a Unix socket,
/// or a caller with the token.
pub fn has_right(front: &Front, connection: &Connection, headers: &HeaderMap) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let is_owner = matches!(connection.peer, Peer::User(user) if user == 0 || user == own);
    let given = headers.get(AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let given = given.strip_prefix(b"Bearer ").unwrap_or_default();
    is_owner || is_token(given, front.token.as_bytes())
}

/// Checks that the caller may change the car.
///
/// # Errors
/// The caller may not.
pub fn check_right(call: &Call<'_>) -> Result<(), Problem> {
    if call.may_change {
        return Ok(());
    }
    let peer = call.connection.peer;
    let message = format!(
        "{peer} may not do this without the token: send `authorization: Bearer TOKEN`, with the \
         word from the file beside the daemon's socket"
    );
    Err(Problem::new(Code::Denied, message))
}

/// Compares `given` with `token` in a time that does not depend on where they differ.
fn is_token(given: &[u8], token: &[u8]) -> bool {
    let differs = given.iter().zip(token).fold(0, |sum, (a, b)| sum | (a ^ b));
    // Without a token no caller has the right: an empty text would equal an empty header.
    !token.is_empty() && given.len() == token.len() && differs == 0
}

/// Loads or unloads the model `name`, on a thread that may block. The connection of `call` is not
/// closed for another one until the work has ended.
///
/// # Errors
/// Another load or unload is in progress, or this one fails.
pub async fn change(call: &Call<'_>, name: &str, change: Change) -> Result<(), Problem> {
    let _work = call.connection.begin_work()?;
    let (front, name) = (Arc::clone(call.front), name.to_owned());
    blocking(move || {
        // The turn belongs to this closure, which goes on even if its caller hangs up.
        let _turn = turn(&front.changes, "another load or unload")?;
        let changed = match change {
            Change::Load => repository::load(&front, &name),
            Change::Unload => repository::unload(&front, &name),
        };
        // Before the answer: a caller that reads the index next finds the change.
        status::show(&front);
        changed
    })
    .await
}

/// Does an action of the status page for the model `name`, as `call` asks.
///
/// # Errors
/// There is no such action, or it is not possible now.
pub async fn act(call: &Call<'_>, action: &str, name: &str) -> Result<String, Problem> {
    if action == "load" {
        change(call, name, Change::Load).await?;
        return Ok(format!("`{name}` is loaded"));
    }
    let _work = call.connection.begin_work()?;
    let (front, action, name) = (Arc::clone(call.front), action.to_owned(), name.to_owned());
    blocking(move || (front.act)(&action, &name)).await
}

/// Explains the score of the sample in `line` by the model `name`, on a thread that may block.
///
/// # Errors
/// A load, unload or other explanation is in progress, or the sample cannot be explained.
pub async fn explain(call: &Call<'_>, name: &str, line: Bytes) -> Result<Explanation, Problem> {
    let _work = call.connection.begin_work()?;
    let (front, name) = (Arc::clone(call.front), name.to_owned());
    blocking(move || {
        // One at a time, and none beside a load: each takes memory for a network.
        let _turn = turn(&front.changes, "an explanation or a change")?;
        repository::explain(&front, &name, &line)
    })
    .await
}

/// Takes the turn of `changes`, unless `what` has it. A panic in an earlier turn is over.
fn turn<'a, T>(changes: &'a Mutex<T>, what: &str) -> Result<MutexGuard<'a, T>, Problem> {
    match changes.try_lock() {
        Ok(turn) => Ok(turn),
        Err(TryLockError::Poisoned(turn)) => Ok(turn.into_inner()),
        Err(TryLockError::WouldBlock) => {
            Err(Problem::busy(format!("busy: {what} is in progress"), RETRY_MAX))
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let (sender, done) = tokio::sync::oneshot::channel();
    // The caller may have hung up, and then nobody receives the outcome.
    let run = move || drop(sender.send(work()));
    let thread = std::thread::Builder::new().name("change".to_owned()).spawn(run);
    thread.map_err(|e| Problem::new(Code::Internal, format!("no thread for the change: {e}")))?;
    let panicked = |_| Problem::new(Code::Internal, "the change panicked");
    done.await.map_err(panicked)?
}

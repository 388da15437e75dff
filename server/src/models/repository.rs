//! The model repository: the folders of the car that hold a model. Lists them, loads one within the
//! budget, and unloads one. Opens flash, never writes to it.

use crate::front::Front;
use crate::limits::RETRY_MAX;
use crate::metrics::facts::ModelFolder;
use crate::models::describe;
use crate::problem::{Code, Problem, not_served};
use crate::proto::ModelIndex;
use hatchback::request::explain::{ExplainError, Explanation, explain_served};
use hatchback::{Flash, FlashError, ServingError, Shortened, system_disk};
use std::path::PathBuf;

/// Returns the models that are served, and those of `folders` that are not.
pub fn index(front: &Front, folders: &[ModelFolder]) -> Vec<ModelIndex> {
    let served = front.serving.served();
    let ready = served.iter().map(|served| ModelIndex {
        name: served.name().to_owned(),
        version: served.model().map_or(String::new(), |model| describe::version_of(&model)),
        state: "READY".to_owned(),
        ..ModelIndex::default()
    });
    let others = folders.iter().filter(|folder| !served.iter().any(|s| s.name() == folder.name));
    let others = others.map(|folder| {
        let is_unloaded = front.serving.is_unloaded(&folder.name);
        let reason = if is_unloaded { "unloaded" } else { "not loaded" };
        let (name, state) = (folder.name.clone(), "UNAVAILABLE".to_owned());
        ModelIndex { name, state, reason: reason.to_owned(), ..ModelIndex::default() }
    });
    ready.chain(others).collect()
}

/// Serves the live generation of the model `name`: loads the model, or swaps to a generation that
/// became live since. Takes seconds for a large model.
///
/// # Errors
/// No folder holds such a model, it cannot be opened, or it does not fit the budget.
pub fn load(front: &Front, name: &str) -> Result<(), Problem> {
    let directory = directory_of(front, name)?;
    // A merge between the two opens would remove segments that the first one saw; the lock prevents
    // it.
    let open = || Flash::open(&system_disk(), &directory);
    let opened = open().and_then(|flash| flash.lock());
    let _lock = opened.map_err(|e| flash_problem(&e))?;
    let flash = open().map_err(|e| flash_problem(&e))?;
    let result = match front.serving.model(name).map(|model| model.id()) {
        None => front.serving.load(name, &flash, front.budget).map(drop),
        // Not compared by the number: one that replaced a damaged generation has the same.
        Some(served) if served == flash.record().id() => Ok(()),
        Some(_) => front.serving.swap(name, &flash, front.budget, &|_| {}).map(drop),
    };
    result.map_err(|e| serving_problem(name, &e))?;
    log::info!("serving {} as `{name}`, as a caller asked", flash.manifest().generation);
    Ok(())
}

fn directory_of(front: &Front, name: &str) -> Result<PathBuf, Problem> {
    let folder = (front.models)().into_iter().find(|folder| folder.name == name);
    let missing = || format!("no folder holds a model `{}`", Shortened(name));
    folder.map(|f| f.directory).ok_or_else(|| Problem::new(Code::NotFound, missing()))
}

/// Explains the score that the model `name` gives to the sample in `line`, a line of JSON as
/// `hatchback run` takes it.
///
/// # Errors
/// The model is not served from a folder of the car, or the line is no sample of it.
pub fn explain(front: &Front, name: &str, line: &[u8]) -> Result<Explanation, Problem> {
    let line = std::str::from_utf8(line).map_err(|e| Problem::invalid(format!("sample: {e}")))?;
    let directory = directory_of(front, name)?;
    explain_served(&front.serving, name, &directory, line).map_err(|e| match e {
        ExplainError::Sample(_) | ExplainError::Batch(_) => Problem::invalid(e.to_string()),
        ExplainError::NotServed(_) => not_served(name),
        e => Problem::new(Code::Refused, e.to_string()),
    })
}

fn flash_problem(e: &FlashError) -> Problem {
    match e {
        FlashError::Busy { .. } => Problem::busy(e.to_string(), RETRY_MAX),
        e => Problem::new(Code::Refused, e.to_string()),
    }
}

fn serving_problem(name: &str, e: &ServingError) -> Problem {
    let code = match e {
        ServingError::NotLoaded(_) => return not_served(name),
        ServingError::Memory { .. } | ServingError::Reads { .. } => Code::TooLarge,
        ServingError::Threads(_) => Code::Internal,
        ServingError::Open { .. } | ServingError::Loaded(_) | ServingError::Shape { .. } => {
            Code::Refused
        }
    };
    Problem::new(code, e.to_string())
}

/// Stops serving the model `name` after its requests are answered. An update does not bring the
/// model back: only [`load`] or the next start does.
///
/// # Errors
/// The model is not served.
pub fn unload(front: &Front, name: &str) -> Result<(), Problem> {
    front.serving.unload(name).map_err(|e| serving_problem(name, &e))?;
    log::info!("unloaded `{name}`, as a caller asked");
    Ok(())
}

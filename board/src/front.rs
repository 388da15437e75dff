//! The daemon's side of the front door: the models of the car, its facts and its actions. Knows no
//! protocol.

use crate::car::Car;
use crate::cli::NamedDirectory;
use crate::latency::Latencies;
use crate::maintenance::Wears;
use crate::models;
use crate::shed::Shed;
use anyhow::{Context, Result};
use hatchback::bundle::manifest::hex;
use hatchback::car::update_steps::ModelUpdates;
use hatchback::request::serving::Serving;
use hatchback::update::Updater;
use hatchback::{Generation, Shortened, UpdateStatus};
use hatchback_link::daemon::now;
use hatchback_server::{CarFacts, Code, Front, FrontOptions, ModelFolder, Problem};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Bytes of a token, before they are written as hexadecimal digits.
const TOKEN_BYTES: usize = 16;

/// State of other threads of the daemon that the front door shows.
pub struct Shown {
    pub latencies: Arc<Latencies>,
    pub shed: Arc<Shed>,
    pub wears: Wears,
}

/// Returns the front door of `car`, whose models have `updates`.
pub fn front(
    car: &Car<'_>,
    serving: &Arc<Serving>,
    updates: &[ModelUpdates],
    shown: &Shown,
    token: &Token,
) -> Arc<Front> {
    let updaters: Arc<[NamedUpdater]> = updates.iter().map(NamedUpdater::of).collect();
    let latencies = Arc::clone(&shown.latencies);
    let on_answer =
        move |model: &str, of: &Generation, time: Duration| latencies.record(model, of, time);
    let (shed, wears) = (Arc::clone(&shown.shed), shown.wears.clone());
    let of_facts = Arc::clone(&updaters);
    let facts = move || {
        let sensors = shed.sensors();
        CarFacts {
            updates: of_facts.iter().filter_map(NamedUpdater::status).collect(),
            wear: wears.list(),
            celsius: sensors.celsius,
            watts: sensors.watts,
            shed_level: shed.level_number(),
        }
    };
    Front::new(FrontOptions {
        serving: Arc::clone(serving),
        rules: car.target.server.clone(),
        budget: car.target.budget,
        gate: Arc::clone(shown.shed.gate()),
        models: model_folders(car),
        on_answer: Box::new(on_answer),
        facts: Box::new(facts),
        act: Box::new(move |action, model| act(&updaters, action, model)),
        token: token.word.clone(),
    })
}

/// Returns the function that lists the car's models: those of the command line, or those in the
/// target's folder, new ones included.
fn model_folders(car: &Car<'_>) -> Box<dyn Fn() -> Vec<ModelFolder> + Send + Sync> {
    let (are_found, folder) = (car.are_found, car.target.machine.models.clone());
    let given = car.models.clone();
    let lineages: Mutex<BTreeMap<PathBuf, String>> = Mutex::default();
    Box::new(move || {
        let models = if are_found { models::models_in(&folder) } else { given.clone() };
        let named = |model: NamedDirectory| {
            let name = model.name.clone().or_else(|| lineage(&lineages, &model))?;
            Some(ModelFolder { name, directory: model.directory })
        };
        models.into_iter().filter_map(named).collect()
    })
}

/// Returns the lineage of `model`, and remembers it after the first call; `None` if the model has
/// no generation that can be opened.
fn lineage(known: &Mutex<BTreeMap<PathBuf, String>>, model: &NamedDirectory) -> Option<String> {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(lineage) = known.get(&model.directory) {
        return Some(lineage.clone());
    }
    let (lineage, _) = models::open(model).ok()?;
    known.insert(model.directory.clone(), lineage.clone());
    Some(lineage)
}

/// A model's updater with the model's name.
struct NamedUpdater {
    /// Empty for the only model, which is named by its lineage.
    name: String,
    updater: Updater,
}

impl NamedUpdater {
    fn of(update: &ModelUpdates) -> Self {
        Self { name: update.name.clone(), updater: update.updater.clone() }
    }

    /// Returns the name and the status of the update; `None` if the record cannot be read.
    fn status(&self) -> Option<(String, UpdateStatus)> {
        let status = self.updater.status().ok()?;
        let lineage = || {
            let live =
                status.live.as_deref().and_then(|live| Some(live.split('@').next()?.to_owned()));
            // The owner can consent to the first release.
            let first = || Some(status.release.as_ref()?.generation.lineage.clone());
            live.or_else(first).unwrap_or_default()
        };
        let name = if self.name.is_empty() { lineage() } else { self.name.clone() };
        Some((name, status))
    }
}

/// Does an action of the status page for `model`.
fn act(updaters: &[NamedUpdater], action: &str, model: &str) -> Result<String, Problem> {
    if action != "consent" {
        let action = Shortened(action);
        return Err(Problem::new(Code::NotFound, format!("no action `{action}`")));
    }
    let of_model =
        |updater: &&NamedUpdater| updater.status().is_some_and(|(name, _)| name == model);
    let Some(NamedUpdater { updater, .. }) = updaters.iter().find(of_model) else {
        let model = Shortened(model);
        return Err(Problem::new(Code::NotFound, format!("model `{model}` has no updates")));
    };
    match updater.consent(now()) {
        Ok(true) => Ok(format!("the release for `{model}` is accepted")),
        Ok(false) => {
            let message = format!("no release for `{model}` waits for consent");
            Err(Problem::new(Code::Refused, message))
        }
        Err(e) => Err(Problem::new(Code::Refused, e.to_string())),
    }
}

/// The secret that allows a caller to load, unload and act, in a file that only the daemon's user
/// can read. Dropping it removes the file.
pub struct Token {
    word: String,
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
}

impl Token {
    /// Writes a new token beside `socket`.
    ///
    /// # Errors
    /// The file cannot be written, or the system gives no random bytes.
    pub fn beside(socket: &Path) -> Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        let random =
            File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes));
        random.context("/dev/urandom")?;
        let word = hex(&bytes);

        let path = PathBuf::from(format!("{}.token", socket.display()));
        let name = || format!("token {}", path.display());
        // A killed daemon may have left a file with another owner or other rights.
        let _ = std::fs::remove_file(&path);
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        let mut file = options.open(&path).with_context(name)?;
        writeln!(file, "{word}").with_context(name)?;
        let made = file.metadata().with_context(name)?;
        Ok(Self { word, path, file: (made.dev(), made.ino()) })
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        // Another daemon may have replaced the token since, or the folder is gone.
        let found = std::fs::symlink_metadata(&self.path).map(|file| (file.dev(), file.ino()));
        if found.is_ok_and(|found| found == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

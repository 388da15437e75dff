//! What a soak runs on: a model on flash with the delta that follows it, a second model, the front
//! door of both, a control, and how callers change what is served. Never measures.

use super::args::DaemonArgs;
use super::caller::{Caller, Outcome, repository_request};
use super::control::{Control, Sockets};
use super::front_door::{Daemon, MODEL, RULES, Requests};
use crate::delta::pack_generations;
use crate::results::{HostMachine, resident_memory};
use crate::stalling_disk::StallingDisk;
use anyhow::{Context, Result, anyhow};
use hatchback::bundle::BundleReader;
use hatchback::io::disk::Disk;
use hatchback::model::budget::Budget;
use hatchback::schema::MissPolicy;
use hatchback::{Flash, ServerRules};
use hatchback_server::ModelFolder;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The model that is loaded and unloaded.
pub const OTHER: &str = "other";
/// Connections of all callers: hostile ones want many more.
const CONNECTIONS: u32 = 64;
/// Connections of one change of the repository: a slow machine may close some before their call.
const CONNECTIONS_TRIED: u32 = 100;
/// Longest time for which another change may keep a change of the repository out.
const BUSY_MAX: Duration = Duration::from_secs(60);
/// Time between two tries to change what is served.
pub const LOOK: Duration = Duration::from_millis(20);

/// The model on flash, the delta that follows it, and the front door.
pub struct Stage {
    disk: Arc<dyn Disk>,
    pub stalling: StallingDisk,
    directory: PathBuf,
    delta: PathBuf,
    daemon: Daemon,
    /// Serves the same snapshot, from files of its own.
    control: Control,
    budget: Budget,
    models: Vec<ModelFolder>,
    pub requests: Requests,
    /// The generation of the snapshot.
    pub model: String,
    _folder: tempfile::TempDir,
}

impl Stage {
    /// Packs and installs the models, and loads the first.
    ///
    /// # Errors
    /// A file cannot be written, or the runtime refuses the model.
    pub fn new(args: &DaemonArgs) -> Result<Self> {
        let folder = tempfile::tempdir().context("a temporary folder")?;
        let bundles =
            pack_generations(args.model.rows_max(), 1, [MissPolicy::Wait; 2], folder.path())?;
        let stalling = StallingDisk::default();
        let disk: Arc<dyn Disk> = Arc::new(stalling.clone());
        let [snapshot, delta] = &bundles[..] else { return Err(anyhow!("a snapshot and a delta")) };
        let install = |name: &str| {
            let mut bundle = BundleReader::open(snapshot)?;
            Flash::install(&disk, &folder.path().join(name), &mut bundle, |_| ())
        };
        let (flash, other, unchanged) = (install(MODEL)?, install(OTHER)?, install("control")?);

        let tables = &flash.manifest().schema.tables;
        let rows_bytes: u64 = tables.iter().map(|table| table.row_bytes_total()).sum();
        let workers = HostMachine::this().cores as u32;
        let budget = Budget {
            memory_bytes_max: 4 << 30,
            cache_bytes_max: rows_bytes / 4,
            reads_max: 8 * workers,
            slots: 64,
            workers,
            ..Budget::default()
        };
        let daemon = Daemon::new(&flash, budget)?;
        let folder_of = |name: &str, flash: &Flash| ModelFolder {
            name: name.to_owned(),
            directory: flash.directory().to_owned(),
        };
        Ok(Self {
            requests: Requests::draw(&daemon, &flash, args.batch as usize)?,
            models: vec![folder_of(MODEL, &flash), folder_of(OTHER, &other)],
            directory: flash.directory().to_owned(),
            delta: delta.clone(),
            model: flash.manifest().generation.to_string(),
            disk: Arc::clone(&disk),
            stalling,
            daemon,
            control: Control::new(&unchanged, budget)?,
            budget,
            _folder: folder,
        })
    }

    /// Runs `work` beside the front door and the control.
    ///
    /// # Errors
    /// A socket cannot be bound, or the work fails.
    pub fn serve<T>(&self, work: impl FnOnce(&Sockets<'_>) -> Result<T>) -> Result<T> {
        let rules = ServerRules { connections_max: CONNECTIONS, ..RULES };
        self.daemon.serve(rules, self.models.clone(), self.budget, |measured| {
            self.control.serve(|control| work(&Sockets { measured, control }))
        })
    }

    /// Returns the resident memory of the process without that of the control's model, bytes.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn memory_bytes(&self) -> Result<u64> {
        Ok(resident_memory()?.now.saturating_sub(self.control.bytes()))
    }

    /// Applies an update and rolls it back. After each, a call of gRPC to `socket` makes the daemon
    /// swap to the live generation. Returns the times of the two calls.
    ///
    /// # Errors
    /// The update or a swap fails.
    pub async fn swap_twice(&self, socket: &Path) -> Result<[Duration; 2]> {
        let mut bundle = BundleReader::open(&self.delta)?;
        let flash = Flash::install(&self.disk, &self.directory, &mut bundle, |_| ())?;
        let forward = change(socket, "RepositoryModelLoad", MODEL).await?;
        flash.rollback()?;
        Ok([forward, change(socket, "RepositoryModelLoad", MODEL).await?])
    }
}

/// Calls `method` of the repository, again while another change is in hand. Connects for each call:
/// under attack the daemon closes a connection that was silent for a while. Returns the time of the
/// last call.
///
/// # Errors
/// The daemon refuses the change, is busy for too long, or closes every connection.
pub async fn change(socket: &Path, method: &str, model: &str) -> Result<Duration> {
    let (request, mut connections, mut busy_since) = (repository_request(model)?, 0, None);
    loop {
        connections += 1;
        let start = Instant::now();
        let call = async { Caller::connect(socket).await?.change(method, request.clone()).await };
        match call.await {
            Ok(Outcome::Answered(_)) => return Ok(start.elapsed()),
            Ok(Outcome::Refused(refusal)) => {
                // From its first refusal on: the tries before it may have been slow themselves.
                if busy_since.get_or_insert_with(Instant::now).elapsed() >= BUSY_MAX {
                    return Err(refusal.into());
                }
                refusal.busy()?;
            }
            Err(e) if connections >= CONNECTIONS_TRIED => return Err(e),
            Err(_) => {}
        }
        tokio::time::sleep(LOOK).await;
    }
}

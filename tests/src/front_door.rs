//! A front door in this process: models of a [`Serving`], on a Unix socket and on a port. Callers
//! can unload its models, but load none. A folder that cannot be opened has the model `closed`.

use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::model::budget::Budget;
use hatchback::{ServerRules, Serving};
use hatchback_server::{CarFacts, Front, FrontOptions, Gate, Listener, ModelFolder, Stopping};
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use tempfile::TempDir;

/// The word that allows a caller to load, unload and act.
pub const TOKEN: &str = "0123456789abcdef";

/// The limits for callers in tests.
pub const RULES: ServerRules = ServerRules {
    threads: 1,
    connections_max: 16,
    bytes_max: 16 << 20,
    request_bytes_max: 4 << 20,
    requests_per_s_max: 0,
    tcp: None,
    tls: None,
};

/// Returns a server of the model in `flash`, as `name`, with `budget` and the system's clock.
pub fn serving(name: &str, flash: &Flash, budget: Budget) -> Serving {
    let clock = Arc::new(SystemClock::default());
    let serving = Serving::new(budget.memory_bytes_max, budget.reads_max, clock);
    serving.load(name, flash, budget).unwrap();
    serving
}

/// A front door; dropping it stops it.
pub struct FrontDoor {
    /// What serves its models.
    pub serving: Arc<Serving>,
    /// Lets requests pass.
    pub gate: Arc<Gate>,
    folder: TempDir,
    stopping: Arc<Stopping>,
    listeners: Vec<Arc<Listener>>,
    server: Option<JoinHandle<io::Result<()>>>,
}

impl FrontDoor {
    /// Opens a front door for `serving` on a Unix socket, and on `listener` if there is one.
    ///
    /// # Errors
    /// The socket cannot be bound.
    pub fn open(serving: Serving, listener: Option<Listener>) -> io::Result<Self> {
        Self::start(serving, listener, TOKEN, Vec::new())
    }

    /// Opens a front door as [`FrontDoor::open`] does. The word `token` gives the right to load,
    /// unload and act; empty for none. The models are in `folders`.
    ///
    /// # Errors
    /// The socket cannot be bound.
    pub fn start(
        serving: Serving,
        listener: Option<Listener>,
        token: &str,
        folders: Vec<ModelFolder>,
    ) -> io::Result<Self> {
        let (serving, gate) = (Arc::new(serving), Arc::new(Gate::default()));
        let front = Front::new(FrontOptions {
            serving: Arc::clone(&serving),
            rules: RULES,
            budget: Budget::default(),
            gate: Arc::clone(&gate),
            models: Box::new(move || model_folders(&folders)),
            on_answer: Box::new(|_, _, _| {}),
            facts: Box::new(CarFacts::default),
            act: Box::new(|_, _| Ok(String::new())),
            token: token.to_owned(),
        });
        let (folder, stopping) = (tempfile::tempdir()?, Arc::new(Stopping::default()));
        let unix = Listener::Unix(UnixListener::bind(folder.path().join("socket"))?);
        let listeners: Vec<Arc<Listener>> =
            [Some(unix), listener].into_iter().flatten().map(Arc::new).collect();
        let (theirs, until) = (listeners.clone(), Arc::clone(&stopping));
        let server = std::thread::spawn(move || hatchback_server::serve(&front, &theirs, &until));
        Ok(Self { serving, gate, folder, stopping, listeners, server: Some(server) })
    }

    /// Returns the path of the Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }
}

/// Lists `folders` and the one that cannot be opened.
///
/// # Panics
/// If a serving thread, named `front` and a number, calls this: the disk may be slow.
fn model_folders(folders: &[ModelFolder]) -> Vec<ModelFolder> {
    let thread = std::thread::current();
    assert!(!thread.name().is_some_and(|name| name.starts_with("front ")), "{thread:?}");
    let closed = ModelFolder { name: "closed".to_owned(), directory: PathBuf::from("/nowhere") };
    folders.iter().cloned().chain([closed]).collect()
}

impl Drop for FrontDoor {
    fn drop(&mut self) {
        self.stopping.request();
        self.listeners.iter().for_each(|listener| listener.shut_down().unwrap());
        if let Some(server) = self.server.take() {
            server.join().unwrap().unwrap();
        }
    }
}

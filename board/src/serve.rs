//! `hatchbackd serve`: loads the models, then serves callers with maintenance and updates beside
//! them until SIGTERM. This process never opens a network connection.

use crate::car::Car;
use crate::cli::{NamedDirectory, ServeArgs};
use crate::front::{Shown, Token, front};
use crate::latency::Latencies;
use crate::maintenance::{MaintenanceThread, Wears};
use crate::shed::Shed;
use crate::socket::{Socket, Stop};
use crate::update::UpdateThread;
use crate::{machine, models, settings, systemd};
use anyhow::{Context, Result, ensure};
use hatchback::car::plan_thread;
use hatchback::car::update_steps::{ModelUpdates, record_end};
use hatchback::io::disk;
use hatchback::request::serving::Serving;
use hatchback::update::Updater;
use hatchback::update::host::Watched;
use hatchback::update::program::Program;
use hatchback_link::daemon::now;
use hatchback_link::program::explain;
use hatchback_server::{Listener, Tls, front_bytes};
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

/// Serves the models of `car` until SIGTERM or SIGINT.
///
/// # Errors
/// The socket cannot be bound, an option is wrong, or no model can be loaded and no release can
/// change that.
pub fn run(car: &Car<'_>, args: &ServeArgs, sync: &[NamedDirectory]) -> Result<()> {
    let updates = updates(car, sync, args.root.as_deref())?;
    let updaters: Vec<Updater> = updates.iter().map(|update| update.updater.clone()).collect();

    // Threads inherit the settings of their parent, so these are applied before any thread starts.
    for refused in settings::apply(car.target).iter().filter_map(|reading| reading.refusal()) {
        log::warn!("{refused}");
    }

    let stop = Arc::new(Stop::default());
    let on_early_stop = updaters.clone();
    // Before the models are loaded, which takes seconds: a stop in that time must not count as a
    // crash.
    stop.on_signal(move || on_early_stop.iter().for_each(end_unwatched))?;

    let beside = front_bytes(&car.target.server);
    let serving = models::new_serving(car.target, car.target_path, car.device, &beside)?;
    let served = load_models(car, &updates, &serving).and_then(|()| {
        models::log_memory(&serving);
        serve_until_stopped(car, &serving, updates, args, &stop)
    });

    // An error here is not the fault of a release: a model that cannot be opened does not end the
    // daemon. So the current trial of a release is recorded as ended normally.
    served.inspect_err(|_| updaters.iter().for_each(end_unwatched))
}

/// Records that this process ends without having served requests.
fn end_unwatched(updater: &Updater) {
    record_end(updater, Watched::default());
}

/// Loads every model that can be loaded. A model that waits for a release, or is damaged, does not
/// keep the others from being served.
///
/// # Errors
/// No model can be loaded, and no model has updates that may change that.
fn load_models(car: &Car<'_>, updates: &[ModelUpdates], serving: &Serving) -> Result<()> {
    let (mut loaded, mut fault, mut begun) = (0, None, BTreeSet::new());
    for model in &car.models {
        let own = || updates.iter().filter(|update| update.updater.flash == model.directory);
        // Just before the model is opened: a crash in `open` counts against this release only. Two
        // models may name one directory.
        if begun.insert(&model.directory) {
            own().for_each(|update| update.begin(now()));
        }
        if own().any(ModelUpdates::awaits_release) {
            continue;
        }
        match models::load(serving, car.target, model) {
            Ok(_) => loaded += 1,
            Err(e) => {
                log::error!("{model} is not served: {}", explain(&e));
                fault = Some(e);
            }
        }
        own().for_each(ModelUpdates::record_loaded);
    }
    fault.filter(|_| loaded == 0 && updates.is_empty()).map_or(Ok(()), Err)
}

/// Serves callers, with a maintenance thread for each flash directory and an update thread for each
/// sync directory.
fn serve_until_stopped(
    car: &Car<'_>,
    serving: &Arc<Serving>,
    updates: Vec<ModelUpdates>,
    args: &ServeArgs,
    stop: &Stop,
) -> Result<()> {
    // After the models are loaded: a caller that can connect finds them.
    let socket = Socket::listen(&args.socket)?;
    let token = Token::beside(&args.socket)?;
    let listeners: Vec<Arc<Listener>> =
        [Some(Arc::clone(socket.listener())), tcp_listener(car)?].into_iter().flatten().collect();
    stop.end(&listeners);
    let shown = Shown {
        latencies: Arc::new(Latencies::new(car.target.update.latency_us_p99_max)),
        shed: Arc::new(Shed::default()),
        wears: Wears::default(),
    };
    let front = front(car, serving, &updates, &shown, &token);

    // Two models may name one directory, which gets one maintenance thread.
    let directories: BTreeSet<&Path> =
        car.models.iter().map(|model| model.directory.as_path()).collect();
    let rules = car.target.maintenance;
    let start = |directory: &Path| {
        let updater = updates.iter().map(|update| &update.updater).find(|u| u.flash == directory);
        let shed = Arc::clone(&shown.shed);
        MaintenanceThread::start(directory, updater.cloned(), rules, shed, &shown.wears)
    };
    let maintenance = directories.into_iter().map(start).collect::<Result<Vec<_>>>()?;

    plan_thread::start(serving, car.target.update.busy())?;

    let start = |update| UpdateThread::start(update, serving, &shown.latencies);
    let updates = updates.into_iter().map(start).collect::<Result<Vec<_>>>()?;

    let serve = || hatchback_server::serve(&front, &listeners, stop.stopping());
    let served =
        shown.shed.watch(car.root, &car.target.shed, || systemd::notify_while(serving, serve));

    updates.into_iter().for_each(UpdateThread::stop);
    maintenance.into_iter().for_each(MaintenanceThread::stop);
    served.context("the front door")
}

/// Binds the target's address, if it has one. With certificates in the target, callers must show
/// one; without, only processes of this machine can connect.
fn tcp_listener(car: &Car<'_>) -> Result<Option<Arc<Listener>>> {
    let rules = &car.target.server;
    let Some(address) = rules.tcp else { return Ok(None) };
    let tls = rules.tls.as_ref().map(Tls::open).transpose()?;
    let bound = TcpListener::bind(address).with_context(|| format!("server.tcp = {address}"))?;
    let address = bound.local_addr()?;
    Ok(Some(Arc::new(match tls {
        None => {
            log::info!("listening on {address}");
            Listener::Tcp(bound)
        }
        Some(tls) => {
            log::info!("listening on {address} for callers with certificates");
            Listener::Tls(bound, tls)
        }
    })))
}

/// Returns the updates of the models that have a directory in `sync`. `root` is the file of the
/// fleet's first root metadata; it is read only if there is a sync directory.
fn updates(
    car: &Car<'_>,
    sync: &[NamedDirectory],
    root: Option<&Path>,
) -> Result<Vec<ModelUpdates>> {
    // Otherwise the process that can write the sync directory would choose whose keys to trust.
    ensure!(sync.is_empty() || root.is_some(), "--sync needs --root FILE, the fleet's first root");
    let root = root.filter(|_| !sync.is_empty());
    let root = root
        .map(|path| std::fs::read(path).with_context(|| path.display().to_string()))
        .transpose()?;

    let boot = machine::boot_number(car.root);
    let update = |given: &NamedDirectory| {
        let model = car.models.iter().find(|m| car.models.len() == 1 || m.name == given.name);
        let model = model.with_context(|| {
            format!("--sync {given}: no model has this name; pass NAME=DIR as with --flash")
        })?;
        let updater = Updater {
            disk: disk::system(),
            directory: given.directory.clone(),
            flash: model.directory.clone(),
            lineage: None,
            cohort: 0,
            program: Program::this(),
        };
        let name = model.name.as_ref().or(given.name.as_ref()).cloned().unwrap_or_default();
        let (budget, policy) = (car.target.budget, car.target.update);
        let root = root.clone();
        Ok(ModelUpdates { name, updater, budget, policy, root, boot })
    };
    sync.iter().map(update).collect()
}

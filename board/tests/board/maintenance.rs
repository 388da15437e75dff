//! Maintenance while the daemon serves: it merges deltas between requests, continues after a
//! restart, and follows a generation that another process installs.

use hatchback::bundle::BundleReader;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk;
use hatchback::maintenance::catalog::{Catalog, CatalogState};
use hatchback_tests::client::Client;
use hatchback_tests::flash_check::whole_generation;
use hatchback_tests::versions::Versions;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

struct Car {
    folder: tempfile::TempDir,
    versions: Versions,
}

impl Car {
    fn new() -> Self {
        let car =
            Self { folder: tempfile::tempdir().unwrap(), versions: Versions::new(4, 3000, 61) };
        (1..=3).for_each(|generation| car.install(generation));
        car
    }

    fn install(&self, generation: usize) {
        let mut bundle = BundleReader::open(&self.versions.deltas[generation - 1]).unwrap();
        loop {
            match Flash::install(&disk::system(), &self.flash_directory(), &mut bundle, |_| ()) {
                // The daemon holds the directory's lock.
                Err(FlashError::Busy { .. }) => {}
                installed => return drop(installed.unwrap()),
            }
        }
    }

    fn flash_directory(&self) -> PathBuf {
        self.folder.path().join("flash")
    }

    fn flash(&self) -> Flash {
        Flash::open(&disk::system(), &self.flash_directory()).unwrap()
    }

    fn deltas(&self) -> usize {
        self.flash().record().live.tables.iter().map(|t| t.deltas.len()).sum()
    }

    /// Starts the daemon with `rules` in `[maintenance]` and waits for its socket.
    fn serve(&self, rules: &str) -> (Child, PathBuf) {
        let targets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../targets");
        std::fs::copy(targets.join("base.toml"), self.folder.path().join("base.toml")).unwrap();
        let target = self.folder.path().join("car.toml");
        let text = format!(
            "inherits = \"base\"\ntriple = \"x\"\ndevice = \"cpu\"\n[maintenance]\n{rules}"
        );
        std::fs::write(&target, text).unwrap();
        let socket = self.folder.path().join("socket");
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchbackd"));
        command.arg("--target").arg(target).arg("--flash").arg(self.flash_directory());
        let child = crate::serve(command.arg("serve").arg("--socket").arg(&socket), &socket);
        (child, socket)
    }
}

/// Asks until the daemon is not busy. Returns the score of the row with index 5.
fn score(socket: &Path) -> Value {
    let mut client = Client::connect(socket).unwrap();
    let model = client.models().unwrap().remove(0);
    loop {
        let answer = client.ask(&model, r#"{"sparse": {"f0": [5], "f1": [5]}}"#).unwrap();
        if answer["code"] != 503 {
            assert_eq!(answer["status"]["damaged"], 0, "{answer}");
            return answer["score"].clone();
        }
    }
}

fn stop(mut daemon: Child) {
    Command::new("kill").args(["-TERM", &daemon.id().to_string()]).status().unwrap();
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn a_serving_daemon_merges_follows_installs_and_stops() {
    let car = Car::new();
    assert_eq!(car.deltas(), 4);
    let part = |car: &Car| {
        let live = car.flash_directory().join("g000000000003");
        let files = std::fs::read_dir(live).unwrap().map(|f| f.unwrap().path());
        files
            .filter(|f| f.extension().is_some_and(|e| e == "part"))
            .map(|f| f.metadata().unwrap().len())
            .max()
    };

    // The budget ends within the first table: the merged part is on disk when the daemon stops.
    let merge = "deltas_max = 0\nbusy_percent_max = 100\nwear_bytes_per_day_max =";
    let (daemon, socket) = car.serve(&format!("{merge} 40_000"));
    let before = score(&socket);
    while part(&car).unwrap_or(0) == 0 {
        assert_eq!(score(&socket), before);
    }

    stop(daemon);
    let left = part(&car).unwrap();
    assert!(
        left > 0 && left % 4096 == 0 && car.deltas() == 4,
        "{left} bytes, {} deltas",
        car.deltas()
    );

    // The next start continues the merge with a larger budget. Scores stay the same while the
    // segments that the model has open are removed.
    let (daemon, socket) = car.serve(&format!("{merge} 1_000_000_000"));
    while car.deltas() > 0 {
        assert_eq!(score(&socket), before);
    }

    assert_eq!(score(&socket), before);
    assert_eq!(whole_generation(&car.flash(), &car.versions, "merged while serving"), 3);

    // Another process installs a generation; maintenance follows and merges it.
    car.install(4);
    while car.deltas() > 0 {
        assert_eq!(score(&socket), before, "the served generation changes at the next start only");
    }

    stop(daemon);
    let flash = car.flash();
    assert_eq!(whole_generation(&flash, &car.versions, "followed"), 4);

    let (_, notes, found) = Catalog::open(&Catalog::path_in(flash.directory()), &flash).unwrap();
    let installed: u64 = flash.manifest().blobs.iter().map(|b| b.raw_bytes()).sum();
    assert_eq!(found, CatalogState::Kept);
    assert!(
        notes.wear.bytes_total > installed + 40_000,
        "{:?} does not count the install",
        notes.wear
    );
}

//! Targets: TOML files that describe a machine and limit what the runtime may use of it. A target
//! can inherit from another. `docs/targets.md` lists every key. Reads text files, never the
//! machine.

mod error;
mod server_rules;
mod source;

pub use error::{Position, TargetError};
pub use server_rules::{ServerRules, TlsRules};

use crate::limits::{
    BATCH_MAX, CHUNK_BYTES, CPUS_MAX, DELTAS_MAX, POLL_MINUTES_MAX, REALTIME_PRIORITY_MAX,
    SLOTS_MAX,
};
use crate::maintenance::share::BusyBounds;
use crate::maintenance::{MaintenanceRules, WEAR_BYTES_PER_DAY_MIN};
use crate::model::budget::Budget;
use crate::update::host::Policy;
use crate::update::link::{LinkLimits, LinkRules};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::{CudaError, Profile};
use hatchback_kernels::gpu::{GpuDense, Precision, TensorRtOptions};
use serde::Deserialize;
use source::Chain;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Value;

/// The processor that computes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

/// The kind of machine, which decides what `hatchbackd --report` reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MachineKind {
    /// An NVIDIA DRIVE AGX Orin.
    Orin,
    /// Any Linux machine that takes the place of one.
    Sim,
}

/// How the daemon runs on the machine.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The kind of machine.
    pub kind: MachineKind,
    /// Whether the daemon locks its memory (`mlockall`).
    pub lock_memory: bool,
    /// Real-time priority of the threads that serve requests; 0 is the ordinary scheduling class.
    pub realtime_priority: u8,
    /// The CPUs that the daemon runs on; an empty list means all.
    pub cpus: Vec<u16>,
    /// The directory whose folders are models on flash.
    pub models: PathBuf,
    /// The directory whose folders are the sync directories of models, by the models' names.
    pub updates: PathBuf,
}

/// The temperatures (°C, hottest thermal zone) and powers (W, sum of all rails) above which the
/// daemon sheds load. Without a limit the daemon sheds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shed {
    /// Above this temperature maintenance waits, °C.
    pub maintenance_celsius: u32,
    /// Above this temperature the daemon serves one request at a time, °C.
    pub requests_celsius: u32,
    /// Above this power maintenance waits, W.
    pub maintenance_watts: Option<u32>,
    /// Above this power the daemon serves one request at a time, W.
    pub requests_watts: Option<u32>,
}

/// A device name that is neither `cpu` nor `cuda`.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is neither `cpu` nor `cuda`")]
pub struct UnknownDevice(String);

impl FromStr for DeviceKind {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, UnknownDevice> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            other => Err(UnknownDevice(other.to_owned())),
        }
    }
}

impl DeviceKind {
    /// Opens the machine's device of this kind. For `tegra_profile` see [`Target::tegra_profile`].
    ///
    /// # Errors
    /// The machine has no CUDA driver, or no GPU that can run the kernels.
    pub fn open(self, tegra_profile: bool) -> Result<Device, CudaError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => Device::cuda(Profile { tegra: tegra_profile }),
        }
    }
}

/// The description of one machine, and the limits of the runtime on it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The Rust target triple of the programs.
    pub triple: String,
    /// The CPU that the programs are compiled for, as rustc names it; `None` for any of `triple`.
    pub target_cpu: Option<String>,
    /// The newest glibc that the programs may need.
    pub glibc: Option<String>,
    /// The processor that computes requests.
    pub device: DeviceKind,
    /// Compute capability of the GPU, such as `87`.
    pub sm: Option<u32>,
    /// Whether the GPU is used as on a Tegra: the driver compiles no PTX.
    #[serde(default)]
    pub tegra_profile: bool,
    /// How precisely a GPU computes the dense network.
    #[serde(default)]
    pub precision: Precision,
    /// How TensorRT runs the dense network if `precision` is not "exact"; `None` for the runtime's
    /// own kernels.
    pub tensorrt_options: Option<TensorRtOptions>,
    /// The memory, threads and reads that the models may use.
    pub budget: Budget,
    /// Limits and intervals of the maintenance of the flash tier.
    pub maintenance: MaintenanceRules,
    /// When `hatchback-sync` polls for releases, and how much it may receive.
    pub link: LinkRules,
    /// The conditions that a release must meet before it is committed.
    pub update: Policy,
    /// Limits of the daemon's callers.
    pub server: ServerRules,
    /// How the daemon runs on the machine.
    pub machine: Machine,
    /// When the daemon sheds load.
    pub shed: Shed,
}

/// A key whose value is out of its range.
struct WrongValue {
    key: &'static str,
    value: String,
    problem: String,
}

/// Refuses `value` of the dotted `key` unless `sound`.
fn check(
    key: &'static str,
    value: impl ToString,
    sound: bool,
    problem: impl Into<String>,
) -> Result<(), WrongValue> {
    if sound {
        return Ok(());
    }
    Err(WrongValue { key, value: value.to_string(), problem: problem.into() })
}

/// Refuses shares that are not 1 to 100 per cent, or a least share above the most. `keys` are the
/// keys of the least and of the most share.
fn check_busy(keys: [&'static str; 2], busy: BusyBounds) -> Result<(), WrongValue> {
    let ([min_key, max_key], BusyBounds { percent_min, percent_max }) = (keys, busy);
    check(max_key, percent_max, (1..=100).contains(&percent_max), "must be 1 to 100")?;

    let problem = format!("must be 1 to {percent_max}, the value of {max_key}");
    check(min_key, percent_min, (1..=percent_max).contains(&percent_min), problem)
}

impl Target {
    /// Returns how a GPU runs dense networks.
    pub fn gpu_dense(&self) -> GpuDense {
        GpuDense { tensorrt: self.tensorrt_options.clone(), precision: self.precision }
    }

    /// Reads the target at `path` and the files that it inherits from: `inherits = "base"` means
    /// `base.toml` in the same folder. A key of the file that inherits wins.
    ///
    /// # Errors
    /// [`TargetError::Io`] where a file cannot be read. [`TargetError::Parse`] where a key is
    /// missing, unknown or of another type. [`TargetError::Field`] where a value is out of range.
    pub fn load(path: &Path) -> Result<Self, TargetError> {
        let chain = Chain::read(path)?;
        let target: Self =
            Value::Table(chain.merged()).try_into().map_err(|e| chain.parse_error(&e))?;

        match target.check() {
            Ok(()) => Ok(target),
            Err(WrongValue { key, value, problem }) => {
                Err(TargetError::Field { position: chain.position_of(key), key, value, problem })
            }
        }
    }

    /// Returns the paths of the file at `path` and of those that it inherits from.
    ///
    /// # Errors
    /// [`TargetError::Io`] or [`TargetError::Parse`], with the file at fault.
    pub fn files(path: &Path) -> Result<Vec<PathBuf>, TargetError> {
        Ok(Chain::read(path)?.paths())
    }

    /// Finds the first value that is out of its range.
    fn check(&self) -> Result<(), WrongValue> {
        self.check_budget()?;
        self.check_maintenance_and_updates()?;
        self.server.check()?;
        self.check_machine()?;
        self.check_shed()
    }

    fn check_budget(&self) -> Result<(), WrongValue> {
        let Budget { slots, workers, batch_max, reads_max, .. } = self.budget;
        let slots_fit = (1..=SLOTS_MAX).contains(&(slots as usize));
        check("budget.slots", slots, slots_fit, format!("must be 1 to {SLOTS_MAX}"))?;
        // More workers than requests would only wait, and their memory could exceed any number.
        let workers_fit = (1..=SLOTS_MAX).contains(&(workers as usize));
        check("budget.workers", workers, workers_fit, format!("must be 1 to {SLOTS_MAX}"))?;
        let batch_fits = (1..=BATCH_MAX).contains(&(batch_max as usize));
        check("budget.batch_max", batch_max, batch_fits, format!("must be 1 to {BATCH_MAX}"))?;

        let problem = format!("must be {workers} or more: one read for each of budget.workers");
        check("budget.reads_max", reads_max, reads_max >= workers, problem)
    }

    fn check_maintenance_and_updates(&self) -> Result<(), WrongValue> {
        let MaintenanceRules { deltas_max, scrub_every, wear_bytes_per_day_max: bytes, .. } =
            self.maintenance;
        let problem = format!("must be below {DELTAS_MAX}, the most deltas that a table can have");
        check("maintenance.deltas_max", deltas_max, deltas_max < DELTAS_MAX, problem)?;
        let hours = scrub_every.as_secs() / 3600;
        // Scrubs without a pause would spend the wear budget on records of their ends.
        check("maintenance.scrub_every_hours", hours, hours > 0, "must be 1 or more")?;
        let problem = format!("must be {WEAR_BYTES_PER_DAY_MIN} or more: below it no merge begins");
        let is_enough = bytes >= WEAR_BYTES_PER_DAY_MIN;
        check("maintenance.wear_bytes_per_day_max", bytes, is_enough, problem)?;
        check_busy(
            ["maintenance.busy_percent_min", "maintenance.busy_percent_max"],
            self.maintenance.busy(),
        )?;
        check_busy(["update.busy_percent_min", "update.busy_percent_max"], self.update.busy())?;

        let Policy { probe_difference_max, .. } = self.update;
        let is_distance = probe_difference_max.is_finite() && probe_difference_max >= 0.0;
        let problem = "must be 0 or more";
        check("update.probe_difference_max", probe_difference_max, is_distance, problem)?;

        self.check_link()
    }

    fn check_link(&self) -> Result<(), WrongValue> {
        let LinkRules { poll_minutes, bytes_per_day_max, bytes_per_s_max, hours } = self.link;
        let are_minutes = (1..=POLL_MINUTES_MAX).contains(&poll_minutes);
        let problem = format!("must be 1 to {POLL_MINUTES_MAX}, which is a week");
        check("link.poll_minutes", poll_minutes, are_minutes, problem)?;

        let is_chunk = bytes_per_day_max >= CHUNK_BYTES as u64;
        let problem = format!("must be {CHUNK_BYTES} or more, the bytes of a chunk");
        check("link.bytes_per_day_max", bytes_per_day_max, is_chunk, problem)?;

        // Twice the rate at which a transfer is ended as too slow: the link also pauses.
        let rate_min = 2 * LinkLimits::default().rate_min;
        let is_rate = bytes_per_s_max == 0 || bytes_per_s_max >= rate_min;
        let problem = format!("must be 0, or {rate_min} or more: a slower transfer may be ended");
        check("link.bytes_per_s_max", bytes_per_s_max, is_rate, problem)?;

        let are_hours = hours.iter().all(|&hour| hour <= 24);
        check("link.hours", format!("{hours:?}"), are_hours, "hours must be 0 to 24")
    }

    fn check_machine(&self) -> Result<(), WrongValue> {
        let Machine { realtime_priority, ref cpus, .. } = self.machine;
        let problem = format!(
            "must be at most {REALTIME_PRIORITY_MAX}: a real-time kernel serves interrupts above it"
        );
        check(
            "machine.realtime_priority",
            realtime_priority,
            realtime_priority <= REALTIME_PRIORITY_MAX,
            problem,
        )?;

        let are_cpus = cpus.iter().all(|&cpu| cpu < CPUS_MAX);
        let problem = format!("CPU numbers must be below {CPUS_MAX}");
        check("machine.cpus", format!("{cpus:?}"), are_cpus, problem)
    }

    /// Checks that the limits of maintenance, which is shed first, are not above those of requests.
    fn check_shed(&self) -> Result<(), WrongValue> {
        let Shed { maintenance_celsius, requests_celsius, maintenance_watts, requests_watts } =
            self.shed;
        let problem = format!(
            "must be at most shed.requests_celsius = {requests_celsius}: maintenance is shed first"
        );
        check(
            "shed.maintenance_celsius",
            maintenance_celsius,
            maintenance_celsius <= requests_celsius,
            problem,
        )?;

        let Some((maintenance, requests)) = maintenance_watts.zip(requests_watts) else {
            return Ok(());
        };
        let problem =
            format!("must be at most shed.requests_watts = {requests}: maintenance is shed first");
        check("shed.maintenance_watts", maintenance, maintenance <= requests, problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../targets")
    }

    #[test]
    fn every_target_of_the_tree_loads() {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(targets()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "toml") && !path.ends_with("base.toml") {
                Target::load(&path).unwrap();
                names.push(path.file_stem().unwrap().to_string_lossy().into_owned());
            }
        }
        names.sort();
        assert_eq!(names, ["cpu", "drive-orin", "drive-thor", "x86-cuda"]);
        let orin = Target::load(&targets().join("drive-orin.toml")).unwrap();
        assert_eq!((orin.device, orin.sm, orin.tegra_profile), (DeviceKind::Cuda, Some(87), true));
        assert_eq!(
            (orin.target_cpu.as_deref(), orin.glibc.as_deref()),
            (Some("cortex-a78ae"), Some("2.31"))
        );
    }

    /// Fields of a target that are refused, and texts of the error.
    const WRONG: &[(&str, [&str; 2])] = &[
        ("[budget]\nslots = 0", [":5: budget.slots = 0", "1 to 1024"]),
        ("[budget]\nworkers = 1025\nreads_max = 1025", [":5: budget.workers = 1025", "1 to 1024"]),
        ("[budget]\nworkers = 9\nreads_max = 8", [":6: budget.reads_max = 8", "9 or more"]),
        ("[maintenance]\nbusy_percent_max = 0", ["maintenance.busy_percent_max = 0", "100"]),
        ("[update]\nbusy_percent_max = 101", ["update.busy_percent_max = 101", "1 to 100"]),
        (
            "[update]\nbusy_percent_min = 61",
            ["update.busy_percent_min = 61", "1 to 60, the value of update.busy_percent_max"],
        ),
        ("[update]\nbusy_percent_min = 0", [":5: update.busy_percent_min = 0", "1 to 60"]),
        (
            "[maintenance]\nbusy_percent_min = 6\nbusy_percent_max = 5",
            [":5: maintenance.busy_percent_min = 6", "maintenance.busy_percent_max"],
        ),
        ("[update]\nprobe_difference_max = -1.0", ["probe_difference_max = -1", "0 or more"]),
        ("[link]\npoll_minutes = 0", ["link.poll_minutes = 0", "1 to 10080"]),
        ("[link]\npoll_minutes = 10081", ["link.poll_minutes = 10081", "1 to 10080"]),
        ("[link]\nbytes_per_day_max = 0", ["link.bytes_per_day_max = 0", "1048576 or more"]),
        ("[link]\nbytes_per_day_max = 1_048_575", [":5: link.bytes_per_day_max = 1048575", ""]),
        ("[link]\nbytes_per_s_max = 1", ["link.bytes_per_s_max = 1", "0, or 2048 or more"]),
        ("[link]\nbytes_per_s_max = 2047", [":5: link.bytes_per_s_max = 2047", "2048"]),
        ("[link]\nhours = [0, 25]", ["link.hours = [0, 25]", "0 to 24"]),
        ("[maintenance]\ndeltas_max = 64", ["maintenance.deltas_max = 64", "below 64"]),
        ("[maintenance]\nscrub_every_hours = 0", ["scrub_every_hours = 0", "1 or more"]),
        (
            "[maintenance]\nwear_bytes_per_day_max = 20_479",
            [":5: maintenance.wear_bytes_per_day_max = 20479", "20480 or more"],
        ),
        ("[maintenance]\ndeltas_max = -1", [":5: ", "maintenance.deltas_max"]),
        ("[maintenance]\nscrub_every_hours = \"weekly\"", [":5: ", "scrub_every_hours"]),
        ("[maintenance]\nscrub_hours = 1", [":5: ", "scrub_hours"]),
        ("[server]\nthreads = 0", [":5: server.threads = 0", "1 to 64"]),
        ("[server]\nbytes_max = 9", [":5: server.bytes_max = 9", "request_bytes_max = 4194304"]),
        ("[server]\ntcp = \"0.0.0.0:80\"", ["server.tcp = 0.0.0.0:80", "loopback"]),
        ("[server]\ntcp = \"localhost\"", [":5: ", "tcp"]),
        (
            "[server]\ntls = { certificate = \"a\", key = \"b\", client_ca = \"c\" }",
            ["server.tls = ", "server.tcp is not set"],
        ),
        (
            "[server]\ntcp = \"0.0.0.0:80\"\ntls = { certificate = \"a\", key = \"b\" }",
            [":6: ", "client_ca"],
        ),
        ("[machine]\nkind = \"qnx\"", ["machine", "qnx"]),
        ("[machine]\nrealtime_priority = 50", ["machine.realtime_priority = 50", "most 49"]),
        ("[machine]\nrealtime_priority = 300", ["machine", "realtime_priority"]),
        ("[machine]\ncpus = [3, 1024]", ["machine.cpus = [3, 1024]", "below 1024"]),
        (
            "[shed]\nmaintenance_celsius = 200",
            ["shed.maintenance_celsius = 200", "requests_celsius"],
        ),
        (
            "[shed]\nmaintenance_watts = 9\nrequests_watts = 8",
            [":5: shed.maintenance_watts = 9", "requests_watts = 8"],
        ),
        ("[shed]\nmaintenance_kelvin = 9", [":5: ", "maintenance_kelvin"]),
        ("not toml", [":4: ", ""]),
    ];

    #[test]
    fn an_error_names_file_line_key_and_value() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.toml");
        let error = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Target::load(&path).unwrap_err().to_string()
        };
        assert!(error("inherits = \"a\"").contains("chain"));
        assert!(error("inherits = \"../a\"").contains("inherits"));
        assert!(error("triple = \"x\"\ndevice = \"tpu\"").contains("tpu"));
        assert!(error("triple = \"x\"\ndevice = \"cpu\"").contains("budget"));
        std::fs::copy(targets().join("base.toml"), directory.path().join("base.toml")).unwrap();
        let with = |fields: &str| {
            error(&format!("inherits = \"base\"\ntriple = \"x\"\ndevice = \"cpu\"\n{fields}"))
        };
        let at = path.display().to_string();
        for (fields, texts) in WRONG {
            let said = with(fields);
            assert!(
                said.starts_with(&at) && texts.iter().all(|t| said.contains(t)),
                "{fields}: {said}"
            );
        }
    }

    /// The keys that serde knows in `section` (empty: the top level), as its error lists them.
    fn keys_of(section: &str) -> Vec<String> {
        let base = std::fs::read_to_string(targets().join("base.toml")).unwrap();
        let mut table: toml::Table = base.parse().unwrap();
        table.insert("triple".to_owned(), "x".into());
        table.insert("device".to_owned(), "cpu".into());
        let within = match section {
            "" => &mut table,
            name => table
                .entry(name)
                .or_insert(Value::Table(toml::Table::new()))
                .as_table_mut()
                .unwrap(),
        };
        within.insert("a key that is unknown".to_owned(), 0.into());

        let error = Value::Table(table).try_into::<Target>().unwrap_err().to_string();
        let (_, known) = error.split_once("expected").unwrap_or_else(|| panic!("{error}"));
        let known = known.lines().next().unwrap();
        known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn the_reference_names_every_key_and_its_default() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/targets.md");
        let page = std::fs::read_to_string(page).unwrap();
        let base = std::fs::read_to_string(targets().join("base.toml")).unwrap();
        let base: toml::Table = base.parse().unwrap();

        let (mut section, mut described) = (None, Vec::new());
        for line in page.lines() {
            if let Some(title) = line.strip_prefix("## ") {
                let name = title.trim_start_matches("`[").trim_end_matches("]`");
                section = Some(if name == "Top level" { "" } else { name });
            }
            let (Some(section), true) = (section, line.starts_with("| `")) else { continue };
            let cells: Vec<&str> = line.split(" | ").collect();
            let key = cells[0].trim_start_matches("| ").trim_matches('`');
            described.push((section, key));
            let own = if section.is_empty() { None } else { base.get(section) };
            let default = own.and_then(|own| own.get(key));
            let default = default.map(|value| format!("`{value}`"));
            match default {
                Some(default) => assert_eq!(cells[2], default, "{section}: {key}"),
                None => assert!(
                    cells[2] == "required" || cells[2].starts_with("none"),
                    "{section}: {key} has no default in base.toml"
                ),
            }
        }

        let sections: Vec<String> = keys_of("")
            .into_iter()
            .filter(|key| base.contains_key(key) || key == "tensorrt_options")
            .collect();
        let mut known = vec![("", "inherits".to_owned())];
        known.extend(keys_of("").into_iter().filter(|k| !sections.contains(k)).map(|k| ("", k)));
        for section in &sections {
            known.extend(keys_of(section).into_iter().map(|key| (section.as_str(), key)));
        }
        let known: std::collections::BTreeSet<_> =
            known.iter().map(|(section, key)| (*section, key.as_str())).collect();
        let described: std::collections::BTreeSet<_> = described.into_iter().collect();
        let missing: Vec<_> = known.difference(&described).collect();
        let stale: Vec<_> = described.difference(&known).collect();
        assert!(
            missing.is_empty() && stale.is_empty(),
            "docs/targets.md: missing {missing:?}, stale {stale:?}"
        );
    }
}

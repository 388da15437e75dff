//! The daemon on machines that are folders: what it reports of them, what it sheds when they run
//! hot, and what it tells systemd. No reading here is this machine's own.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_tools::pack::{Overrides, pack_file};
use hatchback_tools::serve::lay_on_flash;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A machine: its files, its target and, where it serves, its model.
struct Machine(tempfile::TempDir);

impl Machine {
    /// With a target that inherits from `base`, and `more` in it.
    fn new(base: &str, more: &str) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        for entry in std::fs::read_dir(repository("targets")).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, machine.path(path.file_name().unwrap().to_str().unwrap()))
                .unwrap();
        }
        std::fs::write(machine.path("own.toml"), format!("inherits = \"{base}\"\n{more}")).unwrap();
        machine
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn says(&self, file: &str, text: &str) {
        let path = self.path("root").join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // As sysfs changes: at once.
        let new = self.path("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    fn daemon(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchbackd"));
        command.arg("--target").arg(self.path("own.toml")).arg("--system").arg(self.path("root"));
        command
    }

    fn report(&self) -> Value {
        let output = self.daemon().args(["--report", "--json"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// With the demo model, where the target looks for models.
    fn with_model(self) -> Self {
        let bundle = self.path("bundle");
        let spec = repository("tools/demo/coupon/model.toml");
        pack_file(&spec, &bundle, Overrides::default(), &mut |_, _| {}).unwrap();
        lay_on_flash(&bundle, &self.path("models/coupon")).unwrap();
        let target = std::fs::read_to_string(self.path("own.toml")).unwrap();
        let models = self.path("models");
        std::fs::write(
            self.path("own.toml"),
            format!("{target}\n[machine]\nmodels = {models:?}\n"),
        )
        .unwrap();
        self
    }

    /// Serves until it is dropped.
    fn serve(&self, command: &mut Command) -> Serves {
        let socket = self.path("socket");
        let daemon = command.arg("serve").arg("--socket").arg(&socket).spawn().unwrap();
        let serves = Serves { daemon, socket };
        while UnixStream::connect(&serves.socket).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        serves
    }
}

struct Serves {
    daemon: Child,
    socket: PathBuf,
}

impl Serves {
    fn ask(&self, connections: usize) -> Vec<Value> {
        let line = std::fs::read_to_string(repository("tools/demo/coupon/probe.jsonl")).unwrap();
        let line = line.lines().next().unwrap();
        let ask = || {
            let mut connection = BufReader::new(UnixStream::connect(&self.socket).unwrap());
            let mut answer = String::new();
            writeln!(connection.get_mut(), "{line}").unwrap();
            connection.read_line(&mut answer).unwrap();
            serde_json::from_str(&answer).unwrap()
        };
        std::thread::scope(|scope| {
            let asking: Vec<_> = (0..connections).map(|_| scope.spawn(ask)).collect();
            asking.into_iter().map(|asked| asked.join().unwrap()).collect()
        })
    }
}

impl Drop for Serves {
    fn drop(&mut self) {
        Command::new("kill").args(["-TERM", &self.daemon.id().to_string()]).status().unwrap();
        self.daemon.wait().unwrap();
    }
}

/// A reading's value, or why it is missing.
fn reading(report: &Value, section: &str, name: &str) -> Value {
    let readings = report["readings"].as_array().unwrap();
    let found = readings.iter().find(|r| r["section"] == section && r["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no {section}: {name} in {report:#}"));
    found.get("value").unwrap_or(&found["missing"]).clone()
}

fn problems(report: &Value) -> String {
    report["problems"].to_string()
}

/// What a board says where all is well.
fn orin() -> Machine {
    let board = Machine::new(
        "drive-orin",
        "[machine]\nlock_memory = false\nrealtime_priority = 0\ncpus = []\n",
    );
    for (file, text) in [
        ("proc/device-tree/model", "NVIDIA DRIVE Orin\0"),
        ("etc/os-release", "NAME=x\nPRETTY_NAME=\"Ubuntu 20.04.6 LTS\"\n"),
        ("proc/sys/kernel/osrelease", "5.15.98-rt62-tegra\n"),
        ("sys/kernel/realtime", "1\n"),
        ("sys/devices/system/cpu/online", "0-11\n"),
        (
            "proc/cpuinfo",
            "processor\t: 0\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp\n",
        ),
        (
            "proc/meminfo",
            "MemTotal: 29000000 kB\nMemAvailable: 20000000 kB\nNvMapMemUsed: 1024 kB\n",
        ),
        ("sys/class/thermal/thermal_zone0/temp", "45500\n"),
        ("sys/class/thermal/thermal_zone0/type", "CPU-therm\n"),
        ("sys/class/thermal/thermal_zone1/temp", "-256000\n"),
        ("sys/class/thermal/thermal_zone1/type", "off\n"),
        ("sys/class/hwmon/hwmon3/in1_input", "5000\n"),
        ("sys/class/hwmon/hwmon3/curr1_input", "2500\n"),
        ("sys/class/hwmon/hwmon3/in1_label", "VDD_CPU\n"),
        // The sum of its rails and the voltage of a shunt: no rail.
        ("sys/class/hwmon/hwmon3/curr4_input", "2500\n"),
        ("sys/class/hwmon/hwmon3/in4_input", "40\n"),
        ("sys/class/hwmon/hwmon4/power1_input", "7500000\n"),
        // The same watts once more.
        ("sys/class/hwmon/hwmon4/curr1_input", "1500\n"),
        ("sys/class/hwmon/hwmon4/in1_input", "5000\n"),
        ("sys/class/hwmon/hwmon4/name", "ina\n"),
        ("sys/class/watchdog/watchdog0/identity", "Tegra WDT\n"),
        ("sys/class/watchdog/watchdog0/timeout", "120\n"),
        ("sys/class/watchdog/watchdog0/state", "inactive\n"),
        ("dev/nvhost-ctrl-gpu", ""),
        ("sys/devices/gpu.0/load", "137\n"),
        ("sys/class/devfreq/17000000.ga10b/cur_freq", "1275000000\n"),
        ("usr/lib/aarch64-linux-gnu/libcuda.so.1", ""),
    ] {
        board.says(file, text);
    }
    board
}

#[test]
fn a_board_is_reported_as_it_is() {
    let board = orin();
    let report = board.report();
    for (section, name, value) in [
        ("system", "model", "NVIDIA DRIVE Orin".into()),
        ("system", "os", "Ubuntu 20.04.6 LTS".into()),
        ("system", "real-time kernel", true.into()),
        ("cpu", "online", "0-11".into()),
        ("cpu", "instructions lacking", "none".into()),
        ("memory", "total bytes", 29_696_000_000u64.into()),
        ("memory", "taken by the GPU bytes", 1_048_576.into()),
        ("thermal", "CPU-therm", 45.5.into()),
        ("power", "VDD_CPU", 12.5.into()),
        ("power", "ina 1", 7.5.into()),
        ("watchdog", "watchdog0", "Tegra WDT, 120 s, inactive".into()),
        ("gpu", "node", "/dev/nvhost-ctrl-gpu".into()),
        ("gpu", "load per mille", 137.into()),
        ("gpu", "frequency MHz", 1275.into()),
        ("gpu", "libcuda.so.1", "/usr/lib/aarch64-linux-gnu/libcuda.so.1".into()),
        ("settings", "lock_memory", "as it was".into()),
    ] {
        let value: Value = value;
        assert_eq!(reading(&report, section, name), value, "{section}: {name}");
    }
    assert!(
        reading(&report, "gpu", "libnvinfer.so.8").as_str().unwrap().contains("none of"),
        "{report:#}"
    );
    let readings = report["readings"].as_array().unwrap();
    assert!(readings.iter().all(|r| r["name"] != "off"), "a zone that is off is no reading");
    assert_eq!(
        readings.iter().filter(|r| r["section"] == "power").count(),
        2,
        "each rail is read once"
    );
    let said = board.daemon().arg("--report").output().unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("CPU-therm                        45.5\n"), "{said}");
}

#[test]
fn what_does_not_fit_is_named() {
    let board = orin();
    board.says("proc/cpuinfo", "Features\t: fp asimd aes pmull sha1 sha2 crc32\n");
    board.says("proc/meminfo", "MemTotal: 1000 kB\n");
    let said = problems(&board.report());
    assert!(
        said.contains("atomics fphp asimdhp asimddp") && said.contains("1024000 bytes"),
        "{said}"
    );
    let other = if cfg!(target_arch = "x86_64") { "drive-orin" } else { "cpu" };
    assert!(problems(&Machine::new(other, "").report()).contains(std::env::consts::ARCH));
    let board = Machine::new("cpu", "[machine]\ncpus = [1023]\n");
    assert!(problems(&board.report()).contains("[1023]"), "a CPU that is not there is not granted");
    let desk = Machine::new("cpu", "").with_model();
    assert!(!problems(&desk.report()).contains("model "));
    std::fs::write(desk.path("models/coupon/live"), "damaged").unwrap();
    assert!(problems(&desk.report()).contains("models/coupon/live"), "a damaged model is named");
}

/// What would keep a start from happening stands in the report; so does a GPU other than the
/// target's.
#[test]
fn a_gpu_that_is_not_there_or_not_the_targets_is_named() {
    let desk = Machine::new("cpu", "");
    assert_eq!(reading(&desk.report(), "settings", "lookups on"), "CPU");
    let desk = Machine::new("x86-cuda", "sm = 90\n");
    if Path::new("/dev/nvidiactl").exists() {
        println!("SKIPPED: a report without a driver: this machine has one");
    } else {
        let said = problems(&desk.report());
        assert!(said.contains("lookups on: no CUDA driver on this machine"), "{said}");
    }
    let driver = hatchback_tests::standin::build("standin", &[]);
    let output =
        desk.daemon().args(["--report", "--json"]).env("LD_PRELOAD", driver).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(problems(&report).contains("sm = 90: the GPU's is 87"), "{report:#}");
}

/// Models and updates must outlive a start, and on a board an update of its OS.
#[test]
fn what_does_not_last_is_named() {
    let board = orin();
    let target = std::fs::read_to_string(board.path("own.toml")).unwrap();
    let state = board.path("state");
    std::fs::create_dir(&state).unwrap();
    let state = state.canonicalize().unwrap();
    let [models, updates] = ["models", "updates"].map(|name| state.join(name));
    std::fs::write(
        board.path("own.toml"),
        format!("{target}models = {models:?}\nupdates = {updates:?}\n"),
    )
    .unwrap();
    let lies_on = |mounts: &[(&Path, &str)]| {
        let line =
            |(point, rest): &(&Path, &str)| format!("36 1 98:0 / {} {rest}\n", point.display());
        board.says("proc/self/mountinfo", &mounts.iter().map(line).collect::<String>());
        let report = board.report();
        let told = reading(&report, "flash", "updates lie on").as_str().unwrap().to_owned();
        (told, problems(&report))
    };
    let root = Path::new("/");
    let all = (root, "rw,relatime shared:1 - ext4 /dev/vblkdev1 rw");
    // The partition that the image is for, with the folder of a mount hidden by the next.
    let (told, said) =
        lies_on(&[(&state, "rw - tmpfs none rw"), all, (&state, "rw - ext4 /dev/vblkdev3 rw")]);
    assert_eq!(told, format!("ext4 of /dev/vblkdev3 at {}", state.display()));
    assert!(!said.contains("lies on"), "{said}");
    for (mounts, fault) in [
        (vec![all], "the root file system, which an update of the OS replaces"),
        (
            vec![all, (&state, "rw - tmpfs none rw")],
            "lies on tmpfs, which is empty after each start",
        ),
        (vec![(root, "rw - overlay overlay rw,upperdir=/up")], "lies on an overlay"),
        (vec![all, (&state, "ro,noatime - ext4 /dev/vblkdev3 rw")], "read-only"),
        (vec![all, (&state, "rw - squashfs /dev/vblkdev3 ro")], "read-only"),
    ] {
        let (_, said) = lies_on(&mounts);
        for (name, place) in [("models", &models), ("updates", &updates)] {
            assert!(said.contains(&format!("machine.{name} = {}", place.display())), "{said}");
        }
        assert!(said.contains(fault), "{fault}: {said}");
    }
    // One of the two alone.
    std::fs::create_dir(&models).unwrap();
    let (_, said) = lies_on(&[all, (&models, "rw - ext4 /dev/vblkdev3 rw")]);
    assert!(said.contains("machine.updates") && !said.contains("machine.models"), "{said}");
    // A desk's root file system is as good as any.
    let desk = Machine::new("cpu", "");
    desk.says("proc/self/mountinfo", "36 1 98:0 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n");
    assert!(!problems(&desk.report()).contains("lies on"));
}

#[test]
fn a_machine_that_tells_nothing_is_reported_too() {
    for base in ["drive-orin", "cpu"] {
        let report = Machine::new(base, "").report();
        let readings = report["readings"].as_array().unwrap();
        let missing =
            readings.iter().filter(|r| r.get("missing").is_some_and(|why| why != "")).count();
        assert!(missing > 12 && readings.len() > missing, "{report:#}");
        let both = readings.iter().any(|r| r.get("value").is_some() == r.get("missing").is_some());
        assert!(!both, "a reading has a value or a reason: {report:#}");
    }
}

#[test]
fn a_hot_machine_serves_one_at_a_time_and_says_busy() {
    let machine =
        Machine::new("cpu", "[shed]\nupkeep_celsius = 60\nrequests_celsius = 80\n").with_model();
    machine.says("sys/class/thermal/thermal_zone0/temp", "50000");
    let serves = machine.serve(&mut machine.daemon());
    let busy = |answers: &[Value]| answers.iter().filter(|a| a["error"] == "busy").count();
    assert_eq!(busy(&serves.ask(8)), 0);
    machine.says("sys/class/thermal/thermal_zone0/temp", "90000");
    // Hot: some caller meets another sooner or later; each still gets an answer.
    while busy(&serves.ask(16)) == 0 {}
    assert_eq!(busy(&serves.ask(1)), 0, "one at a time is served");
    machine.says("sys/class/thermal/thermal_zone0/temp", "50000");
    while busy(&serves.ask(16)) > 0 {}
}

#[test]
fn systemd_is_told_while_models_score() {
    let machine = Machine::new("cpu", "").with_model();
    let place = machine.path("notify");
    let told = UnixDatagram::bind(&place).unwrap();
    let mut command = machine.daemon();
    command.env("NOTIFY_SOCKET", &place).env("WATCHDOG_USEC", "300000");
    let serves = machine.serve(&mut command);
    let next = || {
        let mut bytes = [0; 64];
        let length = told.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).trim().to_owned()
    };
    assert_eq!(next(), "READY=1");
    for _ in 0..3 {
        assert_eq!(next(), "WATCHDOG=1");
    }
    drop(serves);
    while next() != "STOPPING=1" {}
}

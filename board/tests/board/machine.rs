//! The daemon on machines that are folders: its report, load shedding when they run hot, and its
//! notifications to systemd. Only the settings of the process are those of the real machine.

use hatchback_tests::client::Client;
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::serve::install;
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A machine in a folder: its files, its target and, where it serves, its model.
struct Machine(tempfile::TempDir);

impl Machine {
    /// Returns a machine whose target inherits from `base` and has the text `more`.
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

    fn set(&self, file: &str, text: &str) {
        let path = self.path("root").join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Replaced atomically, as a file of sysfs changes.
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

    /// Returns the machine with the demo model in the target's folder of models.
    fn with_model(self) -> Self {
        let bundle = self.path("bundle");
        let spec = repository("tools/demo/coupon/model.toml");
        let job = PackJob::read(&spec, Overrides::default()).unwrap();
        job.pack(None, &bundle, &mut |_, _| {}).unwrap();
        install(&bundle, &self.path("models/coupon")).unwrap();
        let target = std::fs::read_to_string(self.path("own.toml")).unwrap();
        let models = self.path("models");
        std::fs::write(
            self.path("own.toml"),
            format!("{target}\n[machine]\nmodels = {models:?}\n"),
        )
        .unwrap();
        self
    }

    /// Starts the daemon and waits for its socket.
    fn serve(&self, command: &mut Command) -> Serving {
        let socket = self.path("socket");
        let daemon = crate::serve(command.arg("serve").arg("--socket").arg(&socket), &socket);
        Serving { daemon, socket }
    }
}

struct Serving {
    daemon: Child,
    socket: PathBuf,
}

impl Serving {
    fn ask(&self, connections: usize) -> Vec<Value> {
        let line = std::fs::read_to_string(repository("tools/demo/coupon/probe.jsonl")).unwrap();
        let line = line.lines().next().unwrap();
        let ask = || {
            let mut client = Client::connect(&self.socket).unwrap();
            let model = client.models().unwrap().remove(0);
            client.ask(&model, line).unwrap()
        };
        std::thread::scope(|scope| {
            let asking: Vec<_> = (0..connections).map(|_| scope.spawn(ask)).collect();
            asking.into_iter().map(|asked| asked.join().unwrap()).collect()
        })
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        Command::new("kill").args(["-TERM", &self.daemon.id().to_string()]).status().unwrap();
        self.daemon.wait().unwrap();
    }
}

/// Returns the value of a reading, or why it is missing.
fn reading(report: &Value, section: &str, name: &str) -> Value {
    let readings = report["readings"].as_array().unwrap();
    let found = readings.iter().find(|r| r["section"] == section && r["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no {section}: {name} in {report:#}"));
    found.get("value").unwrap_or(&found["missing"]).clone()
}

fn problems(report: &Value) -> String {
    report["problems"].to_string()
}

/// Returns a board without problems.
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
            "processor\t: 0\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp \
             asimddp\n",
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
        // The sum of the rails and a shunt voltage, neither of which is a rail.
        ("sys/class/hwmon/hwmon3/curr4_input", "2500\n"),
        ("sys/class/hwmon/hwmon3/in4_input", "40\n"),
        ("sys/class/hwmon/hwmon4/power1_input", "7500000\n"),
        // The same power, measured once more.
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
        board.set(file, text);
    }

    board
}

#[test]
fn the_report_names_what_a_board_has() {
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
        ("gpu", "libcuda.so", "/usr/lib/aarch64-linux-gnu/libcuda.so.1".into()),
        ("settings", "lock_memory", "not requested".into()),
    ] {
        let value: Value = value;

        assert_eq!(reading(&report, section, name), value, "{section}: {name}");
    }

    assert!(
        reading(&report, "gpu", "libnvinfer.so").as_str().unwrap().contains("none of"),
        "{report:#}"
    );

    let readings = report["readings"].as_array().unwrap();
    assert!(readings.iter().all(|r| r["name"] != "off"), "a zone that is off gives no reading");
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
fn the_report_names_what_does_not_fit_the_target() {
    let board = orin();
    board.set("proc/cpuinfo", "Features\t: fp asimd aes pmull sha1 sha2 crc32\n");
    board.set("proc/meminfo", "MemTotal: 1000 kB\n");
    let said = problems(&board.report());
    assert!(
        said.contains("atomics fphp asimdhp asimddp") && said.contains("1024000 bytes"),
        "{said}"
    );
    let other = if cfg!(target_arch = "x86_64") { "drive-orin" } else { "cpu" };
    assert!(problems(&Machine::new(other, "").report()).contains(std::env::consts::ARCH));
    let board = Machine::new("cpu", "[machine]\ncpus = [1023]\n");
    assert!(problems(&board.report()).contains("[1023]"), "a CPU that does not exist is refused");
    let desk = Machine::new("cpu", "").with_model();
    assert!(!problems(&desk.report()).contains("model "));
    for name in ["live.a", "live.b"] {
        std::fs::write(desk.path("models/coupon").join(name), "damaged").unwrap();
    }
    assert!(problems(&desk.report()).contains("models/coupon/live."), "a damaged model is named");
}

/// The report names what would keep the daemon from starting, and a GPU other than the target's.
#[test]
fn the_report_names_a_gpu_that_is_missing_or_not_the_targets() {
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
    let mut daemon = desk.daemon();
    daemon.args(["--report", "--json"]).env("LD_PRELOAD", driver).env("STANDIN_DEVICE", "sm_121");
    let report: Value = serde_json::from_slice(&daemon.output().unwrap().stdout).unwrap();
    assert!(problems(&report).contains("sm = 90: the GPU's is 121"), "{report:#}");
    // The stand-in takes 64 MiB for each of three modules.
    let taken = reading(&report, "gpu", "taken by its driver bytes").as_u64().unwrap();
    assert!(taken >= 3 * (64 << 20), "{taken}");
    // And 32 MiB for the context.
    assert_eq!(reading(&report, "gpu", "used before the models bytes"), 32 << 20);
}

/// Models and updates must survive a restart and, on a board, an update of its OS.
#[test]
fn the_report_names_directories_that_do_not_last() {
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

    let with_mounts = |mounts: &[(&Path, &str)]| {
        let line =
            |(point, rest): &(&Path, &str)| format!("36 1 98:0 / {} {rest}\n", point.display());
        board.set("proc/self/mountinfo", &mounts.iter().map(line).collect::<String>());
        let report = board.report();
        let file_system =
            reading(&report, "flash", "file system of updates").as_str().unwrap().to_owned();
        (file_system, problems(&report))
    };

    let root = Path::new("/");
    let all = (root, "rw,relatime shared:1 - ext4 /dev/vblkdev1 rw");

    // The partition that the image is for. Its mount hides an earlier mount of the same folder.
    let (file_system, said) =
        with_mounts(&[(&state, "rw - tmpfs none rw"), all, (&state, "rw - ext4 /dev/vblkdev3 rw")]);
    assert_eq!(file_system, format!("ext4 of /dev/vblkdev3 at {}", state.display()));
    assert!(!said.contains("machine.models"), "{said}");

    for (mounts, fault) in [
        (vec![all], "the root file system, which an update of the OS replaces"),
        (vec![all, (&state, "rw - tmpfs none rw")], "is on tmpfs, which is empty after each start"),
        (vec![(root, "rw - overlay overlay rw,upperdir=/up")], "is on an overlay"),
        (vec![all, (&state, "ro,noatime - ext4 /dev/vblkdev3 rw")], "read-only"),
        (vec![all, (&state, "rw - squashfs /dev/vblkdev3 ro")], "read-only"),
    ] {
        let (_, said) = with_mounts(&mounts);
        for (name, place) in [("models", &models), ("updates", &updates)] {
            assert!(said.contains(&format!("machine.{name} = {}", place.display())), "{said}");
        }
        assert!(said.contains(fault), "{fault}: {said}");
    }

    // Only one of the two folders.
    std::fs::create_dir(&models).unwrap();
    let (_, said) = with_mounts(&[all, (&models, "rw - ext4 /dev/vblkdev3 rw")]);
    assert!(said.contains("machine.updates") && !said.contains("machine.models"), "{said}");

    // On a desk the root file system is no problem.
    let desk = Machine::new("cpu", "");
    desk.set("proc/self/mountinfo", "36 1 98:0 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n");
    assert!(!problems(&desk.report()).contains("machine.models"));
}

#[test]
fn a_machine_without_any_reading_is_reported_too() {
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
    let machine = Machine::new("cpu", "[shed]\nmaintenance_celsius = 60\nrequests_celsius = 80\n")
        .with_model();
    machine.set("sys/class/thermal/thermal_zone0/temp", "50000");
    let serving = machine.serve(&mut machine.daemon());
    let busy = |answers: &[Value]| answers.iter().filter(|a| a["code"] == 503).count();
    assert_eq!(busy(&serving.ask(8)), 0);
    machine.set("sys/class/thermal/thermal_zone0/temp", "90000");
    // While it is hot, concurrent callers are refused sooner or later, and each gets an answer.
    while busy(&serving.ask(16)) == 0 {}
    assert_eq!(busy(&serving.ask(1)), 0, "one at a time is served");
    machine.set("sys/class/thermal/thermal_zone0/temp", "50000");
    while busy(&serving.ask(16)) > 0 {}
}

#[test]
fn the_watchdog_is_fed_and_counts_as_no_request() {
    let machine = Machine::new("cpu", "").with_model();
    let place = machine.path("notify");
    let notifications = UnixDatagram::bind(&place).unwrap();
    let mut command = machine.daemon();
    command.env("NOTIFY_SOCKET", &place).env("WATCHDOG_USEC", "300000");
    let serving = machine.serve(&mut command);
    let next = || {
        let mut bytes = [0; 64];
        let length = notifications.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).trim().to_owned()
    };
    assert_eq!(next(), "READY=1");
    for _ in 0..3 {
        assert_eq!(next(), "WATCHDOG=1");
    }
    let metrics = Client::connect(&serving.socket).unwrap().get("/metrics").unwrap().body;
    let metrics = String::from_utf8(metrics).unwrap();
    let mut counts = metrics.lines().filter(|l| l.starts_with("hatchback_pipeline_requests_total"));
    assert!(counts.next().unwrap().ends_with(" 0.0"), "the watchdog is no caller: {metrics}");
    drop(serving);
    while next() != "STOPPING=1" {}
}

/// The fields of a process that `mlockall`, `setrlimit` and the scheduler's calls change.
fn settings_of(process: u32) -> Vec<String> {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{process}/{file}")).unwrap();
    let (limits, status, stat) = (read("limits"), read("status"), read("stat"));
    let mut found: Vec<String> = limits
        .lines()
        .chain(status.lines())
        .filter(|line| ["Max ", "VmLck", "Cpus_allowed"].iter().any(|name| line.starts_with(name)))
        .map(str::to_owned)
        .collect();
    // Priority, nice value, real-time priority and policy.
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    found.push(format!("{} {} {} {}", fields[15], fields[16], fields[37], fields[38]));
    found
}

/// Waits until a process sleeps: two samples in a row show it asleep and without a step between
/// them.
fn wait_until_blocked(process: u32) {
    let sample = || {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let lines =
            status.lines().filter(|l| l.starts_with("State") || l.contains("ctxt_switches"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let mut before = sample();
    loop {
        std::thread::sleep(Duration::from_millis(300));
        let now = sample();
        if now == before && now[0].contains("sleeping") {
            return;
        }
        before = now;
    }
}

/// A report under a target that requests every setting. Its output is a pipe that is full, so the
/// daemon blocks when its work is done. The test then compares its settings with those of a process
/// that changes nothing.
#[test]
fn a_report_changes_no_setting_of_the_process() {
    let more = "[machine]\nlock_memory = true\nrealtime_priority = 1\ncpus = [0]\n";
    let machine = Machine::new("cpu", more);
    // A limit that `serve` would raise.
    let shell = |script: &str| {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("ulimit -Sn 64 && exec {script}")).arg("sh");
        shell
    };
    let mut idle = shell("sleep 1000").spawn().unwrap();
    wait_until_blocked(idle.id());

    let (mut reader, writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    let mut filler = 0;
    while let Ok(n) = (&writer).write(b" ") {
        filler += n;
    }
    rustix::io::ioctl_fionbio(&writer, false).unwrap();

    let daemon = machine.daemon();
    let mut command = shell("\"$@\"");
    command.arg(daemon.get_program()).args(daemon.get_args()).args(["--report", "--json"]);
    let mut report = command.stdout(writer).spawn().unwrap();
    // The command also holds the writing end.
    drop(command);
    wait_until_blocked(report.id());
    assert_eq!(settings_of(report.id()), settings_of(idle.id()));
    idle.kill().unwrap();
    idle.wait().unwrap();

    let mut text = vec![0; filler];
    reader.read_exact(&mut text).unwrap();
    text.clear();
    reader.read_to_end(&mut text).unwrap();
    assert!(report.wait().unwrap().success());
    let report: Value = serde_json::from_slice(&text).unwrap();
    reading(&report, "settings", "lock_memory");
}

/// `--report | head -1` ends the daemon quietly.
#[test]
fn a_report_into_a_closed_pipe_ends_quietly() {
    let machine = Machine::new("cpu", "");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = machine.daemon().arg("--report").stdout(writer).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(141) && said.is_empty(), "{said}");
}

/// As `hatchback` does: one line for an error, no backtrace, and 2 for a wrong command line.
#[test]
fn an_error_is_one_line_and_the_status_says_who_must_act() {
    let machine = Machine::new("cpu", "");
    let run = |arguments: &[&str], backtrace: &str| {
        let mut command = machine.daemon();
        let output = command.args(arguments).env("RUST_BACKTRACE", backtrace).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for backtrace in ["0", "1"] {
        let nowhere = run(&["--flash", "nowhere", "check"], backtrace);
        let lines: Vec<&str> = nowhere.1.lines().filter(|line| !line.starts_with('[')).collect();
        assert_eq!(nowhere.0, Some(1));
        assert_eq!(lines, ["error: nowhere: no such folder"]);
    }
    let (status, said) = run(&[], "1");
    assert!(status == Some(2) && said.starts_with("error: pass --report or a command"), "{said}");

    let mut unknown = Command::new(env!("CARGO_BIN_EXE_hatchbackd"));
    let output = unknown.args(["--target", "nosuch.toml", "check"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "error: nosuch.toml: No such file or directory (os error 2)\n");
}

#[test]
fn help_and_version_name_the_product() {
    let run = |flag: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_hatchbackd")).arg(flag).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let version = run("--version");
    let expected = concat!("hatchbackd ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(version, expected);
    let help = run("--help");
    for text in
        ["Serves recommendation models from flash", "check", "serve", "sync", "/etc/hatchback"]
    {
        assert!(help.contains(text), "{help}");
    }
}

//! What every program of Prometheus says of itself: its version and its process. Read from `/proc`
//! once a second, when what is shown is made; a value that cannot be read is left out.

use hatchback::Program;
use std::fmt::Write;
use std::fs;

/// Ticks a second in `/proc/self/stat`: the same on every Linux (`USER_HZ`).
const TICKS_A_SECOND: f64 = 100.0;
/// Bytes of a page of memory.
const PAGE_BYTES: f64 = 4096.0;

/// Returns the metrics of this process in the text format of OpenMetrics, without its end.
pub fn text() -> String {
    let mut text = String::new();
    let version = &Program::this().version;
    let labels = format!("{{version=\"{version}\"}}");
    let mut add = |name: &str, kind: &str, help: &str, labels: &str, value: Option<f64>| {
        let Some(value) = value else { return };
        let end = if kind == "counter" { "_total" } else { "" };
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "# HELP {name} {help}.\n# TYPE {name} {kind}\n{name}{end}{labels} {value}\n"
        );
    };
    let help = "The version of the program";
    add("hatchback_build_info", "gauge", help, &labels, Some(1.0));

    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field is the program's name, which may contain spaces; the third is number 0 here.
    let fields: Vec<&str> =
        stat.rsplit_once(") ").map_or(Vec::new(), |(_, rest)| rest.split(' ').collect());
    let field = |number: usize| fields.get(number)?.parse::<f64>().ok();
    let cpu = field(11).zip(field(12)).map(|(user, system)| (user + system) / TICKS_A_SECOND);
    let started = field(19).zip(boot_s()).map(|(ticks, boot)| boot + ticks / TICKS_A_SECOND);
    let resident = field(21).map(|pages| pages * PAGE_BYTES);
    let open = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as f64);

    let help = "User and system time of the process";
    add("process_cpu_seconds", "counter", help, "", cpu);
    let help = "Start of the process, seconds since 1970";
    add("process_start_time_seconds", "gauge", help, "", started);
    add("process_resident_memory_bytes", "gauge", "Resident memory", "", resident);
    add("process_virtual_memory_bytes", "gauge", "Virtual memory", "", field(20));
    add("process_open_fds", "gauge", "Open files and sockets", "", open);
    add("process_max_fds", "gauge", "Limit of open files and sockets", "", files_max());
    text
}

/// Returns the start of the machine, in seconds since 1970.
fn boot_s() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.parse().ok())
}

fn files_max() -> Option<f64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Converts the text of OpenMetrics into that of Prometheus, version 0.0.4. There a counter has the
/// name of its sample, and nothing marks the end or a unit.
pub fn prometheus(openmetrics: &str) -> String {
    let mut text = String::with_capacity(openmetrics.len());
    let lines: Vec<&str> = openmetrics.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        if *line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        // HELP comes right before TYPE, which names the kind.
        let kind = lines[number..].iter().take(2).find_map(|line| line.strip_prefix("# TYPE "));
        let counter = kind.and_then(|kind| kind.strip_suffix(" counter"));
        let of_family = counter.filter(|_| line.starts_with("# "));
        match of_family {
            Some(name) => text.push_str(&line.replacen(name, &format!("{name}_total"), 1)),
            None => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_describes_itself() {
        let text = text();
        let version = &Program::this().version;
        assert!(text.contains(&format!("hatchback_build_info{{version=\"{version}\"}} 1\n")));
        for name in ["process_cpu_seconds_total", "process_max_fds", "process_open_fds"] {
            assert!(text.lines().any(|line| line.starts_with(&format!("{name} "))), "{text}");
        }
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().parse::<f64>().unwrap()
        };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        assert!(
            (0.0..86_400.0).contains(&(now.as_secs_f64() - value("process_start_time_seconds")))
        );
        assert!(value("process_resident_memory_bytes") > 1e5);
    }

    #[test]
    fn a_counter_has_its_samples_name_in_the_older_format() {
        let openmetrics = "# HELP a Requests.\n# TYPE a counter\n# UNIT a s\na_total{m=\"x\"} 1\n\
                           # HELP b Now.\n# TYPE b gauge\nb 2\n# EOF\n";
        let text = "# HELP a_total Requests.\n# TYPE a_total counter\na_total{m=\"x\"} 1\n\
                    # HELP b Now.\n# TYPE b gauge\nb 2\n";
        assert_eq!(prometheus(openmetrics), text);
    }
}

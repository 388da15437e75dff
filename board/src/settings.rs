//! The daemon's settings of its own process: open files, locked memory, CPUs, scheduling class.
//! `apply` sets each of them once, in the first thread, before others exist; threads inherit them.
//! A refused setting is logged, and the daemon serves without it. `preview` only reads the limits
//! that decide what `apply` would be granted.

use crate::machine::{Reading, Root, reading};
use hatchback::io::disk::raise_open_files;
use hatchback::targets::{Machine, Target};
use rustix::mm::MlockAllFlags;
use rustix::process::Resource;
use rustix::thread::CpuSet;
use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// Memory of the daemon beside the target's budget: the program, stacks, connections.
const BESIDE_BYTES: u64 = 512 << 20;

const MEMLOCK_HINT: &str = "the unit needs LimitMEMLOCK=infinity";

/// Applies the settings that `target` requests, and raises the limit of open files. Returns a
/// reading for each setting.
pub fn apply(target: &Target) -> Vec<Reading> {
    let Machine { lock_memory, realtime_priority, ref cpus, .. } = target.machine;
    vec![
        reading("settings", "open files", open_files()),
        setting("lock_memory", lock_memory, || lock_memory_of(bytes_locked(target))),
        setting("cpus", !cpus.is_empty(), || run_on(cpus)),
        setting("realtime_priority", realtime_priority > 0, || run_realtime(realtime_priority)),
    ]
}

/// Returns the readings that `apply` would return, as far as limits and online CPUs decide them.
/// Changes nothing.
pub fn preview(root: &Root, target: &Target) -> Vec<Reading> {
    let Machine { lock_memory, realtime_priority, ref cpus, .. } = target.machine;
    vec![
        reading("settings", "open files", Ok(files_text(open_files_limit()))),
        setting("lock_memory", lock_memory, || can_lock(bytes_locked(target))),
        setting("cpus", !cpus.is_empty(), || are_online(root, cpus)),
        setting("realtime_priority", realtime_priority > 0, || can_run_realtime(realtime_priority)),
    ]
}

/// Returns the reading of a setting; if the target does not request it, `granted` is not called.
fn setting(
    name: &str,
    is_requested: bool,
    granted: impl FnOnce() -> Result<String, String>,
) -> Reading {
    let found = if is_requested { granted() } else { Ok("not requested".to_owned()) };
    reading("settings", name, found)
}

fn bytes_locked(target: &Target) -> u64 {
    target.budget.memory_bytes_max.saturating_add(BESIDE_BYTES)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn open_files_limit() -> Option<u64> {
    rustix::process::getrlimit(Resource::Nofile).maximum
}

fn open_files() -> Result<String, String> {
    raise_open_files().map(files_text).map_err(|e| format!("{e}; the unit needs LimitNOFILE"))
}

fn files_text(limit: Option<u64>) -> String {
    limit.map_or("no limit".to_owned(), |files| format!("at most {files}"))
}

/// Returns whether the limits let the daemon lock `bytes`.
fn can_lock(bytes: u64) -> Result<String, String> {
    let limit = rustix::process::getrlimit(Resource::Memlock).current;
    // The kernel does not apply the limit to root.
    match limit.filter(|&limit| limit < bytes && !is_root()) {
        Some(limit) => {
            Err(format!("{limit} bytes may be locked and {bytes} are needed; {MEMLOCK_HINT}"))
        }
        None => Ok("allowed".to_owned()),
    }
}

/// Locks each page of the process from its first use. Does nothing if the limit is below `bytes`: a
/// process with locked memory gets no more memory at its limit.
fn lock_memory_of(bytes: u64) -> Result<String, String> {
    can_lock(bytes)?;
    rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
        .map(|()| "memory is locked".to_owned())
        .map_err(|e| format!("{e}; {MEMLOCK_HINT}"))
}

/// Returns whether all of `cpus` are online on the machine at `root`.
fn are_online(root: &Root, cpus: &[u16]) -> Result<String, String> {
    let online = root
        .text("/sys/devices/system/cpu/online")
        .map_err(|e| format!("{cpus:?}: cannot tell which CPUs are online: {e}"))?;
    if cpus.iter().all(|&cpu| is_in_list(&online, cpu)) {
        Ok(format!("{cpus:?}"))
    } else {
        Err(format!("{cpus:?}: only {online} are online; change machine.cpus"))
    }
}

/// Returns whether `cpu` is in a list in the kernel's form, such as `0-3,8`.
fn is_in_list(list: &str, cpu: u16) -> bool {
    list.split(',').any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse(), last.trim().parse());
        matches!((first, last), (Ok(first), Ok(last)) if (first..=last).contains(&cpu))
    })
}

fn run_on(cpus: &[u16]) -> Result<String, String> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(usize::from(cpu)));
    rustix::thread::sched_setaffinity(None, &set)
        .map(|()| format!("{cpus:?}"))
        .map_err(|e| format!("{cpus:?}: {e}; check that these CPUs are online"))
}

fn realtime_hint(priority: u8) -> String {
    format!("the unit needs LimitRTPRIO={priority} or more")
}

/// Returns whether the limits let the daemon run at this real-time priority.
fn can_run_realtime(priority: u8) -> Result<String, String> {
    let limit = rustix::process::getrlimit(Resource::Rtprio).current;
    match limit.filter(|&limit| limit < u64::from(priority) && !is_root()) {
        Some(limit) => {
            let hint = realtime_hint(priority);
            Err(format!("{priority}: the limit is {limit}; {hint}"))
        }
        None => Ok(format!("SCHED_RR {priority} is allowed")),
    }
}

fn run_realtime(priority: u8) -> Result<String, String> {
    let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::RoundRobin);
    let value = ThreadPriority::Crossplatform(
        priority.try_into().map_err(|e| format!("realtime_priority = {priority}: {e}"))?,
    );
    set_thread_priority_and_policy(thread_native_id(), value, policy)
        .map(|()| format!("SCHED_RR {priority}"))
        .map_err(|e| format!("{priority}: {e}; {}", realtime_hint(priority)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_cpus_is_read_as_the_kernel_writes_it() {
        for (list, cpu, expected) in [
            ("0-11", 11, true),
            ("0-11", 12, false),
            ("0,2-3,8", 2, true),
            ("0,2-3,8", 8, true),
            ("0,2-3,8", 7, false),
            ("", 0, false),
        ] {
            assert_eq!(is_in_list(list, cpu), expected, "{cpu} in {list}");
        }
    }
}

//! What the daemon asks of the system for itself: that its memory stays in memory, a scheduling
//! class, CPUs. Each is asked for once, in the first thread, before there are others; threads
//! inherit it. What is refused is said, and the daemon serves on.

use crate::machine::{Reading, reading};
use hatchback::target::Target;
use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit};
use rustix::thread::CpuSet;
use thread_priority::{
    NormalThreadSchedulePolicy, RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// Memory beside the target's budget: the program itself, its threads' stacks, connections.
const BESIDE_BYTES: u64 = 512 << 20;

/// Asks for what `target` says; what it does not say stays as it is.
pub fn apply(target: &Target) -> Vec<Reading> {
    let machine = &target.machine;
    let memory = target.budget.memory_bytes_max.saturating_add(BESIDE_BYTES);
    let said = |asked: bool, what: &dyn Fn() -> Result<String, String>| {
        if asked { what() } else { Ok("as it was".to_owned()) }
    };
    vec![
        reading("settings", "open files", raise_open_files()),
        reading("settings", "lock_memory", said(machine.lock_memory, &|| lock_memory(memory))),
        reading("settings", "cpus", said(!machine.cpus.is_empty(), &|| keep_to(&machine.cpus))),
        reading(
            "settings",
            "realtime_priority",
            said(machine.realtime_priority > 0, &|| realtime(machine.realtime_priority)),
        ),
    ]
}

/// What was asked for and not granted, and why.
pub fn refused(setting: &Reading) -> Option<String> {
    setting.missing.as_ref().map(|why| format!("{}: {why}", setting.name))
}

/// As many as the system allows: each segment of a cached table is an open file, in an update those
/// of two generations.
fn raise_open_files() -> Result<String, String> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .map(|()| {
            limit
                .maximum
                .map_or("as many as they like".to_owned(), |files| format!("at most {files}"))
        })
        .map_err(|e| format!("{e}; the unit needs LimitNOFILE"))
}

/// Pages stay from when they are first touched: nothing is read in that is not used. Under a limit
/// below `bytes` it is not tried: the daemon would get no more memory from the system once it has
/// reached it.
fn lock_memory(bytes: u64) -> Result<String, String> {
    let limit = rustix::process::getrlimit(Resource::Memlock).current;
    if let Some(limit) =
        limit.filter(|&limit| limit < bytes && !rustix::process::geteuid().is_root())
    {
        return Err(format!(
            "{limit} bytes may be locked and {bytes} are needed; the unit needs LimitMEMLOCK=infinity"
        ));
    }
    rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
        .map(|()| "memory is locked".to_owned())
        .map_err(|e| format!("{e}; the unit needs LimitMEMLOCK=infinity"))
}

fn keep_to(cpus: &[u16]) -> Result<String, String> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(usize::from(cpu)));
    rustix::thread::sched_setaffinity(None, &set)
        .map(|()| format!("{cpus:?}"))
        .map_err(|e| format!("{cpus:?}: {e}; are they online?"))
}

fn realtime(priority: u8) -> Result<String, String> {
    let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::RoundRobin);
    let value = ThreadPriority::Crossplatform(
        priority.try_into().map_err(|e| format!("realtime_priority = {priority}: {e}"))?,
    );
    set_thread_priority_and_policy(thread_native_id(), value, policy)
        .map(|()| format!("SCHED_RR {priority}"))
        .map_err(|e| format!("{priority}: {e}; the unit needs LimitRTPRIO={priority} or more"))
}

/// Takes the calling thread out of the real-time class and has it run where nobody else wants the
/// CPU: it is put aside at once when a request comes, which the lowest priority of the ordinary
/// class is not (a slice of it may last milliseconds). The kernel derives that of its reads and
/// writes from it.
pub fn behind_all() {
    let policy = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    if let Err(e) = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, policy)
    {
        log::warn!("a thread beside requests runs at their priority: {e}");
    }
}

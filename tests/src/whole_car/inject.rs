//! The injection of faults: starts a fault of one of the allowed classes, and ends it some steps
//! later.

use crate::random::Random;
use crate::whole_car::faults::Fault;
use crate::whole_car::model::LEVELS;
use crate::whole_car::names::{self, FLASH, SYNC};
use crate::whole_car::repository::Contents;
use crate::whole_car::world::{Process, Wall, World};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Starts of the daemon in a row that faults may end before the first answer. The product counts
/// further ones against the release.
const EARLY_DEATHS_MAX: u32 = 3;
/// Older versions of the sync directory that the hostile process keeps.
const OLD_MAX: usize = 8;
/// Steps that a lasting fault lasts at most.
const LASTS_MAX: u64 = 60;
/// Bytes of a huge file of the hostile process.
const HUGE_BYTES: usize = 1 << 20;

/// How a lasting fault ends.
#[derive(Clone, Copy, Debug)]
enum End {
    Room(&'static str),
    ReadOnly(&'static str),
    Slow,
    Clock(Process),
}

/// The faults that last, and what the hostile process knows.
#[derive(Default)]
pub struct Lasting {
    ends: Vec<(u64, End)>,
    /// Versions of the files of the sync directory.
    old: Vec<BTreeMap<PathBuf, Vec<u8>>>,
}

impl World {
    /// Begins a random fault.
    pub fn inject(self: &Rc<Self>) {
        let allowed: Vec<Fault> = self.knobs.faults.iter().copied().collect();
        if allowed.is_empty() {
            return;
        }
        let fault = self.random(|random| *random.pick(&allowed));
        if self.begin(fault) {
            self.count_fault(fault);
            self.note(format_args!("fault: {fault:?}"));
        }
    }

    fn count_fault(&self, fault: Fault) {
        let name: &'static str = match fault {
            Fault::Kill => "fault kill",
            Fault::Exit => "fault exit",
            Fault::Stop => "fault stop",
            Fault::Power => "fault power",
            Fault::Clock => "fault clock",
            Fault::Link => "fault link",
            Fault::WriteError => "fault write-error",
            Fault::ReadError => "fault read-error",
            Fault::Full => "fault full",
            Fault::ReadOnly => "fault read-only",
            Fault::Slow => "fault slow",
            Fault::FlashDamage => "fault flash-damage",
            Fault::FlashLoss => "fault flash-loss",
            Fault::SyncDamage => "fault sync-damage",
            Fault::LostObject => "fault lost-object",
            Fault::Hostile => "fault hostile",
            Fault::Version => "fault version",
            Fault::Callers => "fault callers",
        };
        self.count(name);
    }

    /// Begins `fault`. Returns false if it cannot come now.
    fn begin(self: &Rc<Self>, fault: Fault) -> bool {
        let until = self.step_number() + 1 + self.below(LASTS_MAX);
        let process = self.random(|random| *random.pick(&Process::BOTH));
        let place = self.random(|random| *random.pick(&[SYNC, FLASH]));
        match fault {
            Fault::Kill => return self.kill(process),
            Fault::Exit => self.end_in_order(process),
            Fault::Stop => self.process(process).borrow_mut().stopped_until = until,
            Fault::Power => return self.cut_power(),
            Fault::Clock => {
                let wall = self.random(|r| *r.pick(&[Wall::Year1970, Wall::Year2090]));
                self.process(process).borrow_mut().wall = wall;
                self.ends_at(until, End::Clock(process));
            }
            Fault::Link => self.link_bad_until.set(until),
            Fault::WriteError => self.disk.fail_after(self.below(80)),
            Fault::ReadError => self.disk.fail_read_after(self.below(80)),
            Fault::Full => {
                self.disk.set_room(Path::new(place), Some(self.below(60_000)));
                self.ends_at(until, End::Room(place));
            }
            Fault::ReadOnly => {
                self.disk.set_read_only(Path::new(place), true);
                self.ends_at(until, End::ReadOnly(place));
            }
            Fault::Slow => {
                self.disk.slow(self.below(20_000), 1_000_000);
                self.ends_at(until, End::Slow);
            }
            Fault::FlashDamage => return self.damage(true),
            Fault::FlashLoss => return self.lose(),
            Fault::SyncDamage => return self.damage(false),
            Fault::LostObject => return self.lose_object(),
            Fault::Hostile => self.hostile_until.set(until),
            Fault::Callers => self.callers_until.set(until),
            Fault::Version => {
                self.level.set(1 + self.below(u64::from(LEVELS)) as u8);
                Process::BOTH.iter().for_each(|process| self.end_in_order(*process));
            }
        }
        true
    }

    fn ends_at(&self, step: u64, end: End) {
        self.lasting.borrow_mut().ends.push((step, end));
    }

    /// Returns whether a fault may kill the daemon now. Too many deaths before the first answer
    /// count against a release.
    fn may_daemon_die(&self) -> bool {
        let state = self.process(Process::Daemon).borrow();
        state.has_answered || state.early_deaths < EARLY_DEATHS_MAX
    }

    fn kill(&self, process: Process) -> bool {
        let state = self.process(process).borrow();
        let may_die = process == Process::Sync || self.may_daemon_die();
        if !state.is_up || !may_die {
            return false;
        }
        if self.one_in(2) {
            state.disk.kill();
        } else {
            state.disk.kill_after(self.below(60));
        }
        true
    }

    fn cut_power(&self) -> bool {
        if !self.may_daemon_die() {
            return false;
        }
        if self.one_in(2) {
            self.disk.cut();
        } else {
            self.disk.cut_after(self.below(40));
        }
        true
    }

    /// Ends the lasting faults whose time is over, and lets the hostile process act.
    pub fn pass_faults(&self) {
        let now = self.step_number();
        let ends: Vec<End> = {
            let mut lasting = self.lasting.borrow_mut();
            let over = lasting.ends.iter().filter(|(step, _)| *step <= now).map(|(_, end)| *end);
            let over = over.collect();
            lasting.ends.retain(|(step, _)| *step > now);
            over
        };
        for end in ends {
            match end {
                End::Room(place) => self.disk.set_room(Path::new(place), None),
                End::ReadOnly(place) => self.disk.set_read_only(Path::new(place), false),
                End::Slow => self.disk.slow(0, 0),
                End::Clock(process) => self.process(process).borrow_mut().wall = Wall::Right,
            }
        }
        if self.hostile_until.get() > now && self.one_in(3) {
            self.attack();
        }
    }

    /// Ends all faults: from now on no call fails.
    pub fn end_faults(self: &Rc<Self>) {
        self.is_healing.set(true);
        self.disk.end_faults();
        self.lasting.borrow_mut().ends.clear();
        self.link_bad_until.set(0);
        self.hostile_until.set(0);
        // Callers that hold an answer keep it to the end.
        self.callers_until.set(0);
        for process in Process::BOTH {
            let mut state = self.process(process).borrow_mut();
            (state.wall, state.stopped_until, state.due) = (Wall::Right, 0, 0);
            state.disk.kill_after(u64::MAX);
        }
        self.restore_objects();
        // A process that was in a step when another version came still runs the earlier one.
        Process::BOTH.iter().for_each(|process| self.end_in_order(*process));
        let level = self.level.get();
        self.note(format_args!("the faults have ended, the programs are of level {level}"));
    }

    /// Returns a random file of one of the directories, never a second copy of a record.
    fn any_file(&self, is_on_flash: bool) -> Option<PathBuf> {
        // Between the writes of the two copies of a record, only the first copy has the new
        // content.
        let is_only_copy = |path: &PathBuf| {
            let second = names::second_copy_of(path);
            second.is_some_and(|second| self.disk.content(&second) != self.disk.content(path))
        };
        let is_wanted = |path: &PathBuf| {
            names::is_on_flash(path) == is_on_flash
                && !names::is_second_copy(path)
                && !is_only_copy(path)
        };
        let files: Vec<PathBuf> = self.disk.paths().into_iter().filter(is_wanted).collect();
        (!files.is_empty()).then(|| self.random(|random| random.pick(&files).clone()))
    }

    fn lose(&self) -> bool {
        let Some(path) = self.any_file(true) else { return false };
        self.note(format_args!("lost: {}", path.display()));
        self.disk.lose(&path);
        true
    }

    /// The repository loses a chunk or a manifest, or keeps only a part of it.
    fn lose_object(&self) -> bool {
        let mut shown = self.shown.borrow_mut();
        let is_wanted =
            |path: &&String| path.starts_with("chunks/") || path.starts_with("targets/");
        let paths: Vec<String> = shown.view.keys().filter(is_wanted).cloned().collect();
        if paths.is_empty() {
            return false;
        }
        let path = self.random(|random| random.pick(&paths).clone());
        self.note(format_args!("the repository loses {}", path.split('/').next().unwrap_or("")));
        let mut view = Contents::clone(&shown.view);
        let lost = view.remove(&path).unwrap_or_default();
        if self.one_in(3) {
            view.insert(path.clone(), Arc::new(lost[..lost.len() / 2].to_vec()));
        }
        shown.view = Rc::new(view);
        true
    }

    /// Restores the lost objects without which no car could reach the last release.
    fn restore_objects(&self) {
        let mut shown = self.shown.borrow_mut();
        let mut view = Contents::clone(&shown.view);
        let objects = &self.history().states[shown.state].objects;
        for path in self.history().vital.iter().filter(|path| objects.contains_key(*path)) {
            view.insert(path.clone(), Arc::clone(&objects[path]));
        }
        shown.view = Rc::new(view);
    }

    fn damage(&self, is_on_flash: bool) -> bool {
        let Some(path) = self.any_file(is_on_flash) else { return false };
        let kind = self.below(if is_on_flash { 5 } else { 6 });
        let content = self.disk.content(&path).unwrap_or_default();
        self.note(format_args!("damaged ({kind}): {}", path.display()));
        if kind == 5 {
            self.disk.lose(&path);
            return true;
        }
        let damaged = self.random(|random| damaged(&path, content, kind, random));
        self.disk.put(&path, damaged);
        true
    }

    /// Keeps the files of the sync directory for the hostile process.
    pub fn remember_files(&self) {
        let mut lasting = self.lasting.borrow_mut();
        if !self.knobs.faults.contains(&Fault::Hostile) || lasting.old.len() >= OLD_MAX {
            return;
        }
        let paths = self.disk.paths().into_iter().filter(|path| !names::is_on_flash(path));
        let files = paths.filter_map(|path| Some((path.clone(), self.disk.content(&path)?)));
        lasting.old.push(files.collect());
    }

    /// The hostile process writes one file.
    fn attack(&self) {
        self.checks.borrow_mut().known = None;
        let Some(path) = self.any_file(false).filter(|p| !names::is_memory_of_sync(p)) else {
            return;
        };
        let kind = self.below(8);
        self.note(format_args!("attack ({kind}): {}", path.display()));
        self.count("attacks");
        let content = self.disk.content(&path).unwrap_or_default();
        match kind {
            0 => self.disk.lose(&path),
            1 => self.disk.put(&path, vec![0xff; HUGE_BYTES]),
            2 => {
                let other = self.any_file(false).and_then(|p| self.disk.content(&p));
                self.disk.put(&path, other.unwrap_or_default());
            }
            3..6 => self.put_back_older(&path),
            _ => {
                let damaged = self.random(|random| damaged(&path, content, kind - 6, random));
                self.disk.put(&path, damaged);
            }
        }
    }

    /// Puts an older version of one file back, or of all files that the hostile process may write.
    fn put_back_older(&self, path: &Path) {
        let lasting = self.lasting.borrow();
        if lasting.old.is_empty() {
            return;
        }
        let old = self.random(|random| random.pick(&lasting.old).clone());
        let takes_all = self.one_in(2);
        for (at, content) in old {
            if (takes_all || at == path) && !names::is_memory_of_sync(&at) {
                self.disk.put(&at, content);
            }
        }
    }
}

/// Returns `content` after a fault of this kind: a flipped bit, a cut, nothing, zeros, garbage.
fn damaged(path: &Path, mut content: Vec<u8>, kind: u64, random: &mut Random) -> Vec<u8> {
    if content.is_empty() {
        return vec![0xff; 64];
    }
    match kind {
        0 => {
            let at = random.below(content.len() as u64) as usize;
            // The highest bit damages a text wherever it is; another bit might have no effect.
            let bit = if names::is_text(path) { 7 } else { random.below(8) };
            content[at] ^= 1 << bit;
        }
        1 => content.truncate(random.below(content.len() as u64) as usize),
        2 => content.clear(),
        3 => content.fill(0),
        _ => {
            content.iter_mut().for_each(|byte| *byte = random.bits() as u8);
            content[0] = 0xff;
        }
    }
    content
}

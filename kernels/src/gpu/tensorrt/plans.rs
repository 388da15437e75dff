//! A folder of TensorRT plans that were built on this machine, so that a start need not build them
//! again. A file's name is the hash of everything that the plan depends on. Its last 32 bytes are
//! the hash of the plan; a damaged plan is built again. An empty plan records that the built one
//! was useless: its scores differed from the CPU's. A plan is `.unproven` until the probe set of
//! its network has proven it. Beside the plans are the timings that builds measured. All of it can
//! be made again, so the folder may be lost.

use crate::gpu::tensorrt::build::Build;
use crate::gpu::tensorrt::error::TensorRtError;
use crate::gpu::tensorrt::shim::TensorRt;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Bytes of a hash.
const HASH_BYTES: usize = 32;

/// Plans that a folder keeps: the most recently used ones.
const KEPT_PLANS: usize = 8;

/// Builds of one plan that may end with the process: a network that crashes TensorRT would
/// otherwise crash each process that serves another.
const BUILDS_MAX: usize = 8;

/// Endings of the files of plans. The folder has [`KEPT_PLANS`] files of each.
const PLAN: &str = "plan";
const UNPROVEN: &str = "unproven";
const BUILDS: &str = "builds";

/// A build that counts as ended by a crash until it is dropped.
pub struct OpenBuild(PathBuf);

impl Drop for OpenBuild {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A folder of plans.
#[derive(Clone, Debug)]
pub struct Plans {
    folder: PathBuf,
}

impl Plans {
    /// Returns the store of plans in `folder`, which is created with the first plan.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// Returns the plan in file `path`, or `None`, and marks the plan as used. A file that is
    /// damaged or cannot be read is logged and counts as absent.
    ///
    /// # Errors
    /// [`TensorRtError::Useless`] if the plan that was built was useless.
    pub fn kept(&self, path: &Path) -> Result<Option<Vec<u8>>, TensorRtError> {
        match fs::read(path).map(verified) {
            Ok(Some(plan)) if plan.is_empty() => {
                return Err(TensorRtError::Useless { path: path.to_owned() });
            }
            Ok(Some(plan)) => {
                let marked =
                    fs::File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
                marked.unwrap_or_else(|e| {
                    log::warn!("{}: the plan cannot be marked as used: {e}", path.display())
                });
                return Ok(Some(plan));
            }
            Ok(None) => log::warn!("{}: the plan is damaged and is built again", path.display()),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => log::warn!("{}: the plan cannot be read: {e}", path.display()),
        }
        Ok(None)
    }

    /// Returns the plan of file `path` that was built and not proven yet.
    pub fn unproven(&self, path: &Path) -> Option<Vec<u8>> {
        self.kept(&path.with_extension(UNPROVEN)).ok().flatten()
    }

    /// Returns whether any plan was built and not proven yet.
    pub fn has_unproven(&self) -> bool {
        let mut files = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        files.any(|file| file.path().extension().is_some_and(|end| end == UNPROVEN))
    }

    /// Counts a build of a plan of the network `onnx` by `tensorrt` until the result is dropped.
    /// Nothing of the network was read before.
    ///
    /// # Errors
    /// [`TensorRtError::Crashes`] if too many builds ended with the process.
    pub fn begin_build(
        &self,
        tensorrt: &TensorRt,
        onnx: &[u8],
    ) -> Result<OpenBuild, TensorRtError> {
        let hash = Sha256::new_with_prefix(tensorrt.version().0.to_le_bytes()).chain_update(onnx);
        let path = self.folder.join(hex(hash)).with_extension(BUILDS);
        let builds = fs::read(&path).map_or(0, |counted| counted.len());
        if builds >= BUILDS_MAX {
            return Err(TensorRtError::Crashes { path, builds });
        }
        self.log_failure(&path, self.replace(&path, &vec![b'.'; builds + 1]));
        Ok(OpenBuild(path))
    }

    /// Keeps `built`, the plan of file `path`, until it is proven.
    pub fn keep_unproven(&self, path: &Path, built: &[u8]) {
        self.keep(&path.with_extension(UNPROVEN), built);
    }

    /// Keeps the unproven plan of file `path` for use if `is_good`. Otherwise the file records that
    /// it is useless.
    pub fn settle(&self, path: &Path, is_good: bool) {
        if is_good {
            return self.log_failure(path, fs::rename(path.with_extension(UNPROVEN), path));
        }
        self.keep(path, &[]);
        self.forget(path);
    }

    /// Removes the unproven plan of file `path`.
    pub fn forget(&self, path: &Path) {
        let _ = fs::remove_file(path.with_extension(UNPROVEN));
    }

    /// Writes `plan` to file `path`, and removes all but the most recently used of its kind. A
    /// failure is logged; the next start then builds the plan again.
    pub fn keep(&self, path: &Path, plan: &[u8]) {
        self.log_failure(path, self.replace(path, &[plan, &Sha256::digest(plan)].concat()));
    }

    fn log_failure(&self, path: &Path, kept: io::Result<()>) {
        kept.unwrap_or_else(|e| log::warn!("{}: the plan cannot be kept: {e}", path.display()));
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let unfinished = path.with_extension("unfinished");
        fs::write(&unfinished, bytes)?;
        fs::rename(&unfinished, path)?;

        let mut plans = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.path().extension() == path.extension() {
                plans.push((entry.metadata()?.modified()?, entry.path()));
            }
        }
        plans.sort_unstable();
        let surplus = plans.len().saturating_sub(KEPT_PLANS);
        plans[..surplus]
            .iter()
            .filter(|(_, old)| old != path)
            .try_for_each(|(_, old)| fs::remove_file(old))
    }

    /// Returns the file of the timings of all builds by `tensorrt` for GPUs of the kind `gpu`.
    pub fn timings(&self, tensorrt: &TensorRt, gpu: &str) -> PathBuf {
        let name = format!("{} {gpu}", tensorrt.version());
        self.folder.join(hex(Sha256::new_with_prefix(name))).with_extension("timings")
    }

    /// Returns the file of the plan of `build` for GPUs of the kind `gpu`.
    pub fn path(&self, tensorrt: &TensorRt, gpu: &str, build: &Build) -> PathBuf {
        let mut hash = Sha256::new();
        let mut take = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        take(build.onnx);
        take(&tensorrt.version().0.to_le_bytes());
        take(gpu.as_bytes());
        for input in &build.inputs {
            take(input.name.as_bytes());
            input.shape.iter().for_each(|s| take(&(*s as u64).to_le_bytes()));
            take(&[input.of.bytes() as u8]);
        }
        take(build.output.as_bytes());
        let batches = build.batches.iter().flat_map(|class| [class.least, class.most]);
        let numbers = batches.map(|batch| batch as u64).chain([build.workspace_bytes_max]);
        numbers.for_each(|number| take(&number.to_le_bytes()));
        take(&[build.types as u8]);
        take(&build.compute_capability.unwrap_or(0).to_le_bytes());
        self.folder.join(hex(hash)).with_extension(PLAN)
    }
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Returns the plan in a file's bytes, or `None` if the plan does not match the hash after it.
fn verified(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let hash = bytes.split_off(bytes.len().checked_sub(HASH_BYTES)?);
    (Sha256::digest(&bytes).as_slice() == hash).then_some(bytes)
}

//! Plans that were built here, kept in a folder so that a start need not build them again. A file's
//! name is the hash of all that a plan depends on, and its end the hash of what it holds: a plan of
//! anything else, torn or altered, is built anew. An empty plan says that the one that was built is
//! of no use. Never the only copy of anything.

use crate::gpu::tensorrt::{Build, TensorRt, TensorRtError};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The bytes of a hash.
const HASH: usize = 32;

/// Plans that a folder keeps: those that were used last.
const PLANS_MAX: usize = 8;

/// A folder of plans.
#[derive(Clone, Debug)]
pub struct Plans {
    folder: PathBuf,
}

impl Plans {
    /// In `folder`, which is made with the first plan.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The plan that lies at `path`, if there is one; it counts as used. A folder that cannot be
    /// read is logged.
    ///
    /// # Errors
    /// The plan that was built is of no use.
    pub fn kept(&self, path: &Path) -> Result<Option<Vec<u8>>, TensorRtError> {
        match fs::read(path).map(whole) {
            Ok(Some(plan)) if plan.is_empty() => {
                return Err(TensorRtError::OfNoUse { path: path.to_owned() });
            }
            Ok(Some(plan)) => {
                let noted =
                    fs::File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
                noted.unwrap_or_else(|e| log::warn!("{}: {e}", path.display()));
                return Ok(Some(plan));
            }
            Ok(None) => log::warn!("{}: not the plan that was written", path.display()),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => log::warn!("{}: {e}", path.display()),
        }
        Ok(None)
    }

    /// Keeps `plan` at `path`, and of the others those that were used last. A folder that cannot be
    /// written costs the next start a build and is logged.
    pub fn keep(&self, path: &Path, plan: &[u8]) {
        self.write(path, plan)
            .unwrap_or_else(|e| log::warn!("{}: {e}; the plan is not kept", path.display()));
    }

    fn write(&self, path: &Path, plan: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let unfinished = path.with_extension("unfinished");
        fs::write(&unfinished, [plan, &Sha256::digest(plan)].concat())?;
        fs::rename(&unfinished, path)?;
        let mut plans = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.path().extension().is_some_and(|end| end == "plan") {
                plans.push((entry.metadata()?.modified()?, entry.path()));
            }
        }
        plans.sort_unstable();
        let more = plans.len().saturating_sub(PLANS_MAX);
        plans[..more]
            .iter()
            .filter(|(_, old)| old != path)
            .try_for_each(|(_, old)| fs::remove_file(old))
    }

    /// Where the plan of `build` for the GPU named `gpu` lies.
    pub fn path(&self, tensorrt: &TensorRt, gpu: &str, build: &Build) -> PathBuf {
        let mut hash = Sha256::new();
        let mut take = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        take(build.onnx);
        take(&tensorrt.version().0.to_le_bytes());
        take(gpu.as_bytes());
        for (name, shape) in &build.inputs {
            take(name.as_bytes());
            shape.iter().for_each(|s| take(&(*s as u64).to_le_bytes()));
        }
        take(build.output.as_bytes());
        for number in
            [build.batch_typical as u64, build.batch_max as u64, build.workspace_bytes_max]
        {
            take(&number.to_le_bytes());
        }
        take(&[u8::from(build.fp16)]);
        take(&build.compute_capability.unwrap_or(0).to_le_bytes());
        let name: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        self.folder.join(format!("{name}.plan"))
    }
}

/// The plan in a file, if it is whole.
fn whole(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let hash = bytes.split_off(bytes.len().checked_sub(HASH)?);
    (Sha256::digest(&bytes).as_slice() == hash).then_some(bytes)
}

//! Plans that were built here, kept in a folder so that a start need not build them again. A file's name is the hash
//! of all that a plan depends on, and its end the hash of what it holds: a plan of anything else, torn or altered, is
//! built anew. Never the only copy of anything.

use super::{Build, TensorRt, TensorRtError};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The bytes of a hash.
const HASH: usize = 32;

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

    /// The plan of `build` for the GPU named `gpu`, and whether it was built now. A folder that cannot be read or written
    /// costs the next start a build and is logged.
    ///
    /// # Errors
    /// It cannot be built.
    pub fn get(
        &self,
        tensorrt: &TensorRt,
        gpu: &str,
        build: &Build,
    ) -> Result<(Vec<u8>, bool), TensorRtError> {
        let path = self.path(tensorrt, gpu, build);
        match fs::read(&path).map(whole) {
            Ok(Some(plan)) => return Ok((plan, false)),
            Ok(None) => log::warn!("{}: not the plan that was written; built anew", path.display()),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => log::warn!("{}: {e}; built anew", path.display()),
        }
        let plan = tensorrt.build(build)?;
        if let Err(e) = self.keep(&path, &plan) {
            log::warn!("{}: {e}; the plan is not kept", path.display());
        }
        Ok((plan, true))
    }

    fn keep(&self, path: &Path, plan: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let unfinished = path.with_extension("unfinished");
        fs::write(&unfinished, [plan, &Sha256::digest(plan)].concat())?;
        fs::rename(&unfinished, path)
    }

    /// Where the plan of `build` lies.
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
        for number in [build.batch_typical as u64, build.batch_max as u64, build.workspace_bytes_max] {
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

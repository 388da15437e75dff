//! The trust record of the serving process: the newest root that it verified, and the lowest
//! version of the targets that it accepts. The record is in the flash directory, which the sync
//! process cannot write. An attacker with control of the sync directory therefore cannot bring back
//! keys or releases that the fleet has revoked.

use crate::io::paired_record::{PairedRecord, Stored};
use crate::limits::{ROOT_BYTES_MAX, ROTATIONS_MAX, TARGETS_BYTES_MAX, TRUST_BYTES_MAX};
use crate::update::error::{UpdateError, from_tuf, io_error};
use crate::update::trust::{Trust, root_name};
use crate::update::updater::Updater;
use serde::{Deserialize, Serialize};
use sigstore_tuf::{Metadata, Root, Targets, TrustedMetadataSet};
use std::collections::BTreeSet;

/// The record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// The newest verified root, as signed; empty before the first.
    pub root: Vec<u8>,
    /// The lowest version of the targets to accept.
    pub targets: u64,
}

impl PairedRecord for Accepted {
    const MAGIC: &'static [u8; 8] = b"HATCHTRU";
    const FORMAT: u32 = 1;
    const NAMES: [&'static str; 2] = ["trust.a", "trust.b"];
    const BYTES_MAX: u64 = TRUST_BYTES_MAX;
}

/// Returns the keys of every role but the root's.
fn role_keys(root: &Root) -> [BTreeSet<String>; 3] {
    ["timestamp", "snapshot", "targets"]
        .map(|role| root.role(role).map(|r| r.keyids.iter().cloned().collect()).unwrap_or_default())
}

impl Updater {
    /// Verifies the targets in the sync directory, without a link and without a clock, and returns
    /// them. Starts from the newer of two roots: the newest that this process verified before, and
    /// `root`, the fleet's first. Without either it starts from the root in the sync directory.
    /// Follows the later roots in the sync directory. Records the root and the version of the
    /// targets.
    ///
    /// Timestamp and snapshot are not checked, because an interrupted refresh leaves newer ones
    /// than the targets.
    ///
    /// # Errors
    /// [`UpdateError`] if the targets are missing, not signed or older than those accepted before.
    /// `UpdateError::Io` if the record cannot be written.
    pub(super) fn verify_targets(&self, root: Option<&[u8]>) -> Result<Targets, UpdateError> {
        let (disk, effect) = (self.disk.as_ref(), "trust starts anew from the fleet's first root");
        let stored = Accepted::load_undamaged(disk, &self.flash, effect)?;
        let Stored { value: mut accepted, writes, is_in_both } = stored.unwrap_or_default();
        let before = accepted.clone();

        let set = self.newest_root(&mut accepted, root)?;
        let (name, root) = ("targets.json", set.root());
        let path = self.directory.join(name);
        let bytes = self.disk.read(&path, TARGETS_BYTES_MAX).map_err(io_error(&path))?;
        let targets = Metadata::<Targets>::from_slice(&bytes).map_err(|e| from_tuf(e, name, 0))?;
        let keys = root.role("targets").ok_or_else(|| UpdateError::Malformed {
            path: "root.json".to_owned(),
            problem: "has no role `targets`".to_owned(),
        })?;
        targets.verify_threshold(&root.keys, keys, "targets").map_err(|e| from_tuf(e, name, 0))?;

        let targets = targets.into_signed();
        let (offered, floor) = (targets.version, accepted.targets);
        if offered < floor {
            return Err(UpdateError::Replay { role: "targets", floor, offered });
        }
        accepted.targets = offered;
        if accepted != before || !is_in_both {
            accepted.store(disk, &self.flash, writes + 1)?;
        }
        Ok(targets)
    }

    /// Returns the newest root that can be verified, and stores it in `accepted`.
    fn newest_root(
        &self,
        accepted: &mut Accepted,
        first: Option<&[u8]>,
    ) -> Result<TrustedMetadataSet, UpdateError> {
        let load = |bytes: &[u8]| TrustedMetadataSet::from_root(bytes);
        let known = Some(accepted.root.as_slice()).filter(|root| !root.is_empty());
        let known = known.and_then(|root| load(root).ok());
        let keys = known.as_ref().map(|set| role_keys(set.root()));
        let first = match first {
            Some(bytes) => {
                let set = load(bytes).map_err(|e| from_tuf(e, "the fleet's root (--root)", 0))?;
                Some((bytes.to_vec(), set))
            }
            None if known.is_none() => {
                Some(Trust::newest_root(self.disk.as_ref(), &self.directory)?)
            }
            None => None,
        };

        let mut set = match (known, first) {
            (Some(known), Some((_, set))) if known.root().version >= set.root().version => known,
            (Some(known), None) => known,
            (_, Some((bytes, set))) => {
                accepted.root = bytes;
                set
            }
            (None, None) => unreachable!("`first` is read where no root is known"),
        };
        for _ in 0..ROTATIONS_MAX {
            let name = root_name(set.root().version.saturating_add(1));
            let path = self.directory.join(&name);
            let Ok(bytes) = self.disk.read(&path, ROOT_BYTES_MAX) else { break };
            if let Err(e) = set.update_root(&bytes) {
                let e = from_tuf(e, &path.display().to_string(), 0);
                log::warn!("this root is not used: {e}");
                break;
            }
            accepted.root = bytes;
        }

        // With stolen old keys any version could have been signed, so the old version no longer
        // counts.
        if keys.is_some_and(|keys| keys != role_keys(set.root())) {
            accepted.targets = 0;
        }
        Ok(set)
    }
}

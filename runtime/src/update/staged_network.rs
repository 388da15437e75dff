//! The dense network of a staged release, before the release is installed. It is read only if the
//! release is signed and its bytes have the signed hashes. Never judges the release: a later step
//! does that. A crash of the process here counts as one in an install.

use crate::bundle::manifest::{Hash, sha256};
use crate::bundle::{BundleError, BundleReader};
use crate::request::open::NextNetwork;
use crate::update::error::UpdateError;
use crate::update::install_status::InstallState;
use crate::update::release::{Release, releases};
use crate::update::staging::Staging;
use crate::update::updater::Updater;

impl Updater {
    /// Returns the release that waits for consent or is about to be installed, unless it is
    /// `known`.
    ///
    /// # Errors
    /// `UpdateError::Io` if the device cannot read the record.
    pub fn release_in_hand(&self, known: Option<Hash>) -> Result<Option<Release>, UpdateError> {
        let status = self.install_status()?;
        let is_staged = matches!(status.state, InstallState::AwaitConsent | InstallState::Applying);
        Ok(status.release.filter(|release| is_staged && Some(release.manifest) != known))
    }

    /// Returns the network of the staged bundle of `release`, of at most `bytes_max` bytes. `root`
    /// is the fleet's first root, and `boot` the boot of the machine.
    ///
    /// # Errors
    /// `UpdateError::Car` if the release is not signed, its network is too large, its bundle is
    /// missing or damaged, or crashes ended too many attempts. `UpdateError::{Io, Busy}` if the
    /// record cannot be read or written.
    pub fn staged_network(
        &self,
        release: &Release,
        root: Option<&[u8]>,
        boot: u64,
        bytes_max: u64,
    ) -> Result<NextNetwork, UpdateError> {
        let _lock = self.lock_install()?;
        let mut status = self.install_status()?;
        // Counted before the first byte is read, as by an install.
        let before = (status.installs, status.install_cuts, status.install_boot);
        if let Some(problem) = status.count_install(boot) {
            return Err(UpdateError::Car { problem });
        }
        self.write_install(&mut status)?;
        let network = self.read_network(release, root, bytes_max);
        // The read ended, so nothing of this boot counts.
        (status.installs, status.install_cuts, status.install_boot) = before;
        self.write_install(&mut status)?;
        network
    }

    fn read_network(
        &self,
        release: &Release,
        root: Option<&[u8]>,
        bytes_max: u64,
    ) -> Result<NextNetwork, UpdateError> {
        let refuse = |problem: &str| UpdateError::Car { problem: problem.to_owned() };
        let unread = |e: BundleError| refuse(&e.to_string());
        let targets = self.verify_targets(root)?;
        let manifest = release.manifest;
        let listed = releases(&targets, &self.program);
        if !listed.iter().any(|r| r.manifest == manifest && r.lacks.is_none()) {
            return Err(refuse("the release is not listed for this version"));
        }

        let path = Staging::bundle_in(&self.directory.join("staged"), release);
        let mut bundle = BundleReader::open_on(self.disk.as_ref(), &path).map_err(unread)?;
        if sha256(bundle.manifest_bytes()) != manifest {
            return Err(refuse("its manifest is not the signed one"));
        }
        let (schema, dense) = (bundle.manifest().schema.clone(), bundle.manifest().dense);
        let bytes = bundle.manifest().blobs[dense as usize].raw_bytes();
        if bytes > bytes_max {
            return Err(refuse(&format!("its network has {bytes} bytes; {bytes_max} are left")));
        }
        Ok(NextNetwork { manifest, schema, onnx: bundle.blob(dense).map_err(unread)? })
    }
}

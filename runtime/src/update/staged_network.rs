//! The dense network of a staged release, before the release is installed. It is read only if the
//! release is signed and its bytes have the signed hashes. Never judges the release: a later step
//! does that.

use crate::bundle::manifest::{Hash, sha256};
use crate::bundle::{BundleError, BundleReader};
use crate::limits::DENSE_BYTES_MAX;
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

    /// Returns the network of the staged bundle of `release`. `root` is the fleet's first root.
    ///
    /// # Errors
    /// `UpdateError::Car` if the release is not signed, or its bundle is missing or damaged.
    pub fn staged_network(
        &self,
        release: &Release,
        root: Option<&[u8]>,
    ) -> Result<NextNetwork, UpdateError> {
        let refuse = |problem: &str| UpdateError::Car { problem: problem.to_owned() };
        let unread = |e: BundleError| refuse(&e.to_string());
        let targets = {
            let _lock = self.lock_install()?;
            self.verify_targets(root)?
        };
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
        if bundle.manifest().blobs[dense as usize].raw_bytes() > DENSE_BYTES_MAX {
            return Err(refuse("its network is too large"));
        }
        Ok(NextNetwork { manifest, schema, onnx: bundle.blob(dense).map_err(unread)? })
    }
}

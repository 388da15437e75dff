//! Approvals: the record that a bundle passed the accuracy gate of a policy. The file is beside the
//! bundle and has the hashes of manifest, policy and samples. `gate` writes it, and `publish
//! --policy` refuses a bundle without it. Never evaluates a model.

use crate::report::temporary::write_file;
use anyhow::{Context, Result, bail, ensure};
use hatchback::bundle::manifest::{Hash, hex, sha256};
use hatchback::schema::object::Object;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The format of approvals.
pub const APPROVAL_FORMAT: u32 = 1;

/// A bundle's approval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Approval {
    /// The format: 1.
    pub format: u32,
    /// SHA-256 of the bundle's manifest, hexadecimal.
    pub manifest: String,
    /// SHA-256 of the policy file, hexadecimal.
    pub policy: String,
    /// SHA-256 of the file of held-out samples, hexadecimal.
    pub samples: String,
}

/// Returns the path of the approval of `bundle`.
pub fn approval_path(bundle: &Path) -> PathBuf {
    let mut name = bundle.as_os_str().to_owned();
    name.push(".approved");
    name.into()
}

/// Returns the SHA-256 of the file at `path`, hexadecimal.
///
/// # Errors
/// The file cannot be read.
pub fn hash_of(path: &Path) -> Result<String> {
    let content = std::fs::read(path).with_context(|| path.display().to_string())?;
    Ok(hex(&sha256(&content)))
}

/// Writes `approval` beside `bundle`. Its hashes are those of what was evaluated: another file may
/// lie at the same path by now.
///
/// # Errors
/// The approval cannot be written.
pub fn approve(bundle: &Path, approval: &Approval) -> Result<()> {
    let path = approval_path(bundle);
    let mut text = serde_json::to_vec_pretty(approval)?;
    text.push(b'\n');
    write_file(&path, &text)
}

/// Removes the approval of `bundle`, if it has one.
///
/// # Errors
/// The file cannot be removed.
pub fn withdraw(bundle: &Path) -> Result<()> {
    let path = approval_path(bundle);
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| path.display().to_string())
        }
        _ => Ok(()),
    }
}

/// Checks that the bundle with the SHA-256 `manifest`, which was opened at `bundle`, passed
/// `policy`.
///
/// # Errors
/// The approval is missing, or is that of another manifest or policy.
pub fn check_approval(bundle: &Path, manifest: Hash, policy: &Path) -> Result<()> {
    let path = approval_path(bundle);
    let name = path.display();
    let text = match std::fs::read(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            bail!("{}: has not passed the gate; run `hatchback gate`", bundle.display())
        }
        text => text.with_context(|| name.to_string())?,
    };
    let Object(approval) =
        serde_json::from_slice::<Object<Approval>>(&text).with_context(|| name.to_string())?;
    ensure!(
        approval.format == APPROVAL_FORMAT,
        "{name}: format {} is not supported, only {APPROVAL_FORMAT} is",
        approval.format
    );

    for (field, approved, found) in [
        ("manifest", &approval.manifest, hex(&manifest)),
        ("policy", &approval.policy, hash_of(policy)?),
    ] {
        ensure!(
            *approved == found,
            "{name}: {field} is {approved}, but that of the file is {found}; run `hatchback gate` \
             again"
        );
    }
    Ok(())
}

//! The private keys in a folder: `ROLE-VERSION-ID.pk8`, a PKCS#8 file (DER), encrypted or plain,
//! and `ROLE-VERSION-ID.uri`, the PKCS#11 URI of a key that a token holds. The name has the start
//! of the key's id, so that a command asks for the pass phrase of a key only if it signs with it.
//! Never changes a file.

use crate::repository::encrypted_key::EncryptedKey;
use crate::repository::passphrase::Passphrases;
use crate::repository::token::open_token;
use anyhow::{Context, Result};
use aws_lc_rs::rand::SecureRandom;
use hatchback::bundle::manifest::hex;
use std::collections::HashSet;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tough::async_trait;
use tough::key_source::KeySource;
use tough::schema::RoleType;
use tough::schema::decoded::{Decoded, Hex};
use tough::schema::key::Key;
use tough::sign::{Sign, parse_keypair};

/// The id of a key: the SHA-256 of its public half.
pub type KeyId = Decoded<Hex>;

/// Bytes of a key's id in the name of its file.
const NAMED_BYTES: usize = 4;

/// Where a private key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// In the file, as it is.
    Plain,
    /// In the file, under a pass phrase.
    Encrypted,
    /// In a token that the file names.
    Token,
}

impl Form {
    /// Returns the word for users.
    pub fn word(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Encrypted => "encrypted",
            Self::Token => "token",
        }
    }
}

/// The file of a private key.
pub struct KeyFile {
    pub path: PathBuf,
    pub form: Form,
    content: Vec<u8>,
    /// The key's id, or its start: of an encrypted key no more is known, and nothing at all if its
    /// file has a name of another form.
    id: Option<Vec<u8>>,
}

impl KeyFile {
    fn read(path: PathBuf) -> Result<Self> {
        let named = || path.display().to_string();
        let content = std::fs::read(&path).with_context(named)?;
        let form = match path.extension().is_some_and(|e| e == "uri") {
            true => Form::Token,
            false if EncryptedKey::is_one(&content) => Form::Encrypted,
            false => Form::Plain,
        };
        let id = match form {
            Form::Plain => {
                Some(public_of(&parse_keypair(&content).with_context(named)?)?.0.to_vec())
            }
            Form::Encrypted | Form::Token => named_id(&path),
        };
        Ok(Self { path, form, content, id })
    }

    /// Returns whether this is the key `id`, as far as its file tells. An unknown key is none.
    pub fn is_key(&self, id: &KeyId) -> bool {
        self.id.as_ref().is_some_and(|start| id.starts_with(start))
    }

    /// Returns whether the file tells which key it has.
    pub fn is_known(&self) -> bool {
        self.id.is_some()
    }

    /// Opens the key, so that it can sign.
    ///
    /// # Errors
    /// The pass phrase is wrong, or the token does not have the key.
    pub fn open(&self, secrets: &mut Passphrases) -> Result<Arc<dyn Sign>> {
        let what = self.path.display().to_string();
        let pair = match self.form {
            Form::Plain => parse_keypair(&self.content).context(what)?,
            Form::Encrypted => {
                let key = EncryptedKey::read(&self.content).with_context(|| what.clone())?;
                let private = secrets.open(&what, |typed| key.open(typed))?;
                parse_keypair(&private).context(what)?
            }
            Form::Token => {
                let uri = String::from_utf8_lossy(&self.content);
                return open_token(uri.trim(), secrets).context(what);
            }
        };
        Ok(Arc::new(pair))
    }
}

/// Returns the start of a key's id that the name of its file ends with.
fn named_id(path: &Path) -> Option<Vec<u8>> {
    let digits = path.file_stem()?.to_str()?.rsplit_once('-')?.1;
    let (pairs, []) = digits.as_bytes().as_chunks::<2>() else { return None };
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.iter().map(byte).collect::<Option<Vec<u8>>>().filter(|id| id.len() == NAMED_BYTES)
}

/// Returns the name of the file of a key, without its ending. It has the key's id, so that no file
/// is ever overwritten.
pub fn file_stem(role: RoleType, version: NonZeroU64, id: &KeyId) -> String {
    format!("{role}-{version}-{}", hex(&id[..NAMED_BYTES]))
}

/// Returns the public half of a key, with its id.
///
/// # Errors
/// The key cannot be written as metadata.
pub fn public_of(key: &dyn Sign) -> Result<(KeyId, Key)> {
    let key = key.tuf_key();
    Ok((key.key_id()?, key))
}

/// Returns the paths in `folder` whose names are `wanted`, sorted.
///
/// # Errors
/// The folder cannot be read.
pub fn files(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| wanted(&name.to_string_lossy())) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the paths of the keys in `folder`.
///
/// # Errors
/// The folder cannot be read.
pub fn key_paths(folder: &Path) -> Result<Vec<PathBuf>> {
    files(folder, |name| [".pk8", ".uri"].iter().any(|ending| name.ends_with(ending)))
}

/// Returns the keys in `folder`.
///
/// # Errors
/// The folder or a file cannot be read.
pub fn key_files(folder: &Path) -> Result<Vec<KeyFile>> {
    key_paths(folder)?.into_iter().map(KeyFile::read).collect()
}

/// Opens the keys in `folder` that may be one of the `wanted` ones.
///
/// # Errors
/// As [`KeyFile::open`], or the folder cannot be read.
pub fn sources(
    folder: &Path,
    wanted: &HashSet<KeyId>,
    secrets: &mut Passphrases,
) -> Result<Vec<Box<dyn KeySource>>> {
    let mut sources: Vec<Box<dyn KeySource>> = Vec::new();
    for file in key_files(folder)? {
        if !file.is_known() || wanted.iter().any(|id| file.is_key(id)) {
            sources.push(Box::new(OpenKey(file.open(secrets)?)));
        }
    }
    Ok(sources)
}

/// An open key.
pub struct OpenKey(pub Arc<dyn Sign>);

impl std::fmt::Debug for OpenKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OpenKey")
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync + 'static>;

#[async_trait]
impl KeySource for OpenKey {
    async fn as_sign(&self) -> Result<Box<dyn Sign>, Failure> {
        Ok(Box::new(Self(Arc::clone(&self.0))))
    }

    async fn write(&self, _value: &str, _key_id_hex: &str) -> Result<(), Failure> {
        Err("`hatchback keys` writes keys".into())
    }
}

#[async_trait]
impl Sign for OpenKey {
    fn tuf_key(&self) -> Key {
        self.0.tuf_key()
    }

    async fn sign(
        &self,
        message: &[u8],
        random: &(dyn SecureRandom + Sync),
    ) -> Result<Vec<u8>, Failure> {
        self.0.sign(message, random).await
    }
}

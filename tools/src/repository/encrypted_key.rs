//! An encrypted private key: PKCS#8 (RFC 5958) under PBES2 (RFC 8018), with PBKDF2-HMAC-SHA256 and
//! AES-256-CBC. `openssl pkcs8 -topk8 -v2 aes-256-cbc -outform DER` writes the same form. Reads no
//! other form, and never asks for a pass phrase.

use crate::limits::PBKDF2_ROUNDS_MAX;
use crate::repository::der::{
    INTEGER, NULL, OBJECT, OCTETS, SEQUENCE, number, put, put_number, take,
};
use anyhow::{Context, Result, ensure};
use aws_lc_rs::cipher::{
    AES_256, DecryptionContext, PaddedBlockDecryptingKey, PaddedBlockEncryptingKey,
    UnboundCipherKey,
};
use aws_lc_rs::iv::FixedLength;
use aws_lc_rs::pbkdf2::{PBKDF2_HMAC_SHA256, derive};
use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use std::num::NonZeroU32;

/// Rounds of a new key: some tenths of a second for each guess of a pass phrase.
const ROUNDS: u32 = 600_000;
const SALT_BYTES: usize = 16;

// Names of the algorithms, as DER.
const PBES2: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x05, 0x0d];
const PBKDF2: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x05, 0x0c];
const HMAC_SHA256: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x02, 0x09];
const AES_256_CBC: &[u8] = &[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x01, 0x2a];

/// An encrypted private key that was read.
pub struct EncryptedKey {
    salt: Vec<u8>,
    rounds: NonZeroU32,
    iv: [u8; 16],
    content: Vec<u8>,
}

impl EncryptedKey {
    /// Returns whether `file` is an encrypted private key of any form.
    pub fn is_one(mut file: &[u8]) -> bool {
        // A plain key begins with a version, an encrypted one with its algorithm.
        take(&mut file, SEQUENCE).is_some_and(|whole| whole.first() == Some(&SEQUENCE))
    }

    /// Reads an encrypted private key.
    ///
    /// # Errors
    /// Its form is another one, or its rounds are too many.
    pub fn read(file: &[u8]) -> Result<Self> {
        let key = parse(file).context(
            "is encrypted in a form that is not read here: it is not PBES2 with \
             PBKDF2-HMAC-SHA256 and AES-256-CBC",
        )?;
        let rounds = key.rounds.get();
        ensure!(rounds <= PBKDF2_ROUNDS_MAX, "{rounds} rounds of PBKDF2, over {PBKDF2_ROUNDS_MAX}");
        Ok(key)
    }

    /// Returns the private key as PKCS#8; `None` if the pass phrase is another one.
    pub fn open(&self, passphrase: &str) -> Option<Vec<u8>> {
        let key = PaddedBlockDecryptingKey::cbc_pkcs7(self.key(passphrase)?).ok()?;
        let mut content = self.content.clone();
        let context = DecryptionContext::Iv128(FixedLength::from(&self.iv));
        let opened = key.decrypt(&mut content, context).ok()?.to_vec();
        // One wrong pass phrase in 256 leaves right padding, and no key before it.
        take(&mut opened.as_slice(), SEQUENCE).map(drop)?;
        Some(opened)
    }

    fn key(&self, passphrase: &str) -> Option<UnboundCipherKey> {
        let mut key = [0; 32];
        derive(PBKDF2_HMAC_SHA256, self.rounds, &self.salt, passphrase.as_bytes(), &mut key);
        UnboundCipherKey::new(&AES_256, &key).ok()
    }
}

/// Returns the file of the `private` key, encrypted under `passphrase`.
///
/// # Errors
/// The system has no random numbers.
pub fn encrypt(private: &[u8], passphrase: &str) -> Result<Vec<u8>> {
    let mut salt = vec![0; SALT_BYTES];
    SystemRandom::new().fill(&mut salt).context("the system has no random numbers")?;
    let rounds = NonZeroU32::new(ROUNDS).context("rounds")?;
    let mut key = EncryptedKey { salt, rounds, iv: [0; 16], content: private.to_vec() };
    let cipher = key.key(passphrase).context("the key of the cipher")?;
    let cipher = PaddedBlockEncryptingKey::cbc_pkcs7(cipher).context("the cipher")?;
    let used = cipher.encrypt(&mut key.content).context("the cipher")?;
    let iv: &[u8] = (&used).try_into().context("the cipher")?;

    let algorithm =
        |name: &[u8], parameters: &[u8]| put(SEQUENCE, &[&put(OBJECT, &[name]), parameters]);
    let hash = algorithm(HMAC_SHA256, &put(NULL, &[]));
    let rounds = put_number(&ROUNDS.to_be_bytes());
    let derivation = put(SEQUENCE, &[&put(OCTETS, &[&key.salt]), &rounds, &hash]);
    let derivation = algorithm(PBKDF2, &derivation);
    let cipher = algorithm(AES_256_CBC, &put(OCTETS, &[iv]));
    let scheme = algorithm(PBES2, &put(SEQUENCE, &[&derivation, &cipher]));
    Ok(put(SEQUENCE, &[&scheme, &put(OCTETS, &[&key.content])]))
}

fn parse(mut file: &[u8]) -> Option<EncryptedKey> {
    let mut whole = take(&mut file, SEQUENCE)?;
    let mut scheme = parameters(&mut whole, PBES2)?;
    let content = take(&mut whole, OCTETS)?.to_vec();
    let mut scheme = take(&mut scheme, SEQUENCE)?;

    let mut derivation = parameters(&mut scheme, PBKDF2)?;
    let mut derivation = take(&mut derivation, SEQUENCE)?;
    let salt = take(&mut derivation, OCTETS)?.to_vec();
    let rounds = number(take(&mut derivation, INTEGER)?)?;
    // The length of the key may be stated.
    if derivation.first() == Some(&INTEGER) && number(take(&mut derivation, INTEGER)?)? != 32 {
        return None;
    }
    parameters(&mut derivation, HMAC_SHA256)?;

    let mut cipher = parameters(&mut scheme, AES_256_CBC)?;
    let iv = take(&mut cipher, OCTETS)?.try_into().ok()?;
    let rounds = NonZeroU32::new(rounds)?;
    file.is_empty().then_some(EncryptedKey { salt, rounds, iv, content })
}

/// Takes an algorithm with this name from `bytes`. Returns its parameters.
fn parameters<'a>(bytes: &mut &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let mut algorithm = take(bytes, SEQUENCE)?;
    (take(&mut algorithm, OBJECT)? == name).then_some(algorithm)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: &[u8] = &[0x30, 0x03, 0x02, 0x01, 0x00];

    #[test]
    fn a_key_opens_with_its_pass_phrase_only() {
        let file = encrypt(PRIVATE, "a pass phrase").unwrap();
        assert!(EncryptedKey::is_one(&file) && !EncryptedKey::is_one(PRIVATE));
        let key = EncryptedKey::read(&file).unwrap();
        assert_eq!(key.open("a pass phrase").as_deref(), Some(PRIVATE));
        assert_eq!(key.open("another one"), None);
        assert!(file != encrypt(PRIVATE, "a pass phrase").unwrap(), "each file has its own salt");
    }

    #[test]
    fn a_cut_file_is_refused_and_no_flipped_byte_is_a_panic() {
        let file = encrypt(PRIVATE, "x").unwrap();
        for length in 0..file.len() {
            assert!(EncryptedKey::read(&file[..length]).is_err(), "{length} bytes");
        }
        for at in 0..file.len() {
            for bit in 0..8 {
                let mut file = file.clone();
                file[at] ^= 1 << bit;
                let _ = (EncryptedKey::is_one(&file), EncryptedKey::read(&file).is_ok());
            }
        }
    }
}

//! Keys that a token holds: a hardware module, or a key service of a cloud through its PKCS#11
//! library. A URI of RFC 7512 names the key. The private half never leaves the token, which makes
//! the signatures. Never makes or changes a key.

use crate::repository::der::{OCTETS, SEQUENCE, put, put_number, take};
use crate::repository::passphrase::Passphrases;
use anyhow::{Context, Result, bail, ensure};
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::SecureRandom;
use cryptoki::context::{CInitializeArgs, CInitializeFlags, Pkcs11};
use cryptoki::error::{Error, RvError};
use cryptoki::mechanism::eddsa::{EddsaParams, EddsaSignatureScheme};
use cryptoki::mechanism::rsa::{PkcsMgfType, PkcsPssParams};
use cryptoki::mechanism::{Mechanism, MechanismType};
use cryptoki::object::{Attribute, AttributeType, KeyType, ObjectClass, ObjectHandle};
use cryptoki::session::{Session, UserType};
use cryptoki::slot::Slot;
use cryptoki::types::AuthPin;
use percent_encoding::percent_decode_str;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use tough::async_trait;
use tough::schema::key::{
    EcdsaKey, EcdsaScheme, Ed25519Key, Ed25519Scheme, Key, RsaKey, RsaScheme,
};
use tough::sign::Sign;

/// The curve P-256 and Ed25519, as the DER of a token's `CKA_EC_PARAMS`.
const P256: &[u8] = &[0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
/// Bytes of a SHA-256.
const HASH_BYTES: std::ffi::c_ulong = 32;

/// What a URI names.
struct Uri {
    module: PathBuf,
    /// The label of the token; `None` for the only one.
    token: Option<String>,
    /// The label of the key.
    object: Option<String>,
    id: Option<Vec<u8>>,
    /// The PIN; `None` if it is asked for.
    pin: Option<String>,
}

impl Uri {
    fn parse(text: &str) -> Result<Self> {
        let body = text.strip_prefix("pkcs11:").context("does not begin with `pkcs11:`")?;
        let (path, query) = body.split_once('?').unwrap_or((body, ""));
        let mut attributes: HashMap<&str, Vec<u8>> = HashMap::new();
        for part in path.split(';').chain(query.split('&')).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').with_context(|| format!("`{part}`"))?;
            attributes.insert(name, percent_decode_str(value).collect());
        }

        let mut text = |name| {
            let value = attributes.remove(name).map(String::from_utf8);
            value.transpose().with_context(|| format!("{name}: is not UTF-8"))
        };
        let module = text("module-path")?;
        let module = module.context("lacks `module-path`, the PKCS#11 library of the token")?;
        let (token, object) = (text("token")?, text("object")?);
        let pin = match (text("pin-value")?, text("pin-source")?) {
            (Some(pin), _) => Some(pin),
            (None, Some(source)) => {
                let path = source.strip_prefix("file:").unwrap_or(&source);
                let read = std::fs::read_to_string(path);
                let read = read.with_context(|| format!("pin-source: {path}"))?;
                Some(read.lines().next().unwrap_or_default().to_owned())
            }
            _ => None,
        };
        // What only tells tokens or objects apart may be more than is needed.
        let _ = text("type")?;
        let id = attributes.remove("id");
        if let Some(name) = attributes.keys().next() {
            bail!("{name}: is none of token, object, id, type, module-path, pin-value, pin-source");
        }
        ensure!(object.is_some() || id.is_some(), "names no key: it lacks `object` and `id`");
        Ok(Self { module: module.into(), token, object, id, pin })
    }

    /// Returns the attributes by which the token finds the key.
    fn template(&self, class: ObjectClass) -> Vec<Attribute> {
        let label = self.object.as_ref().map(|label| Attribute::Label(label.clone().into()));
        let id = self.id.clone().map(Attribute::Id);
        [Attribute::Class(class)].into_iter().chain(label).chain(id).collect()
    }
}

/// Returns the library at `path`, which a process may initialize only once.
fn library(path: &PathBuf) -> Result<Pkcs11> {
    static LIBRARIES: LazyLock<Mutex<BTreeMap<PathBuf, Pkcs11>>> = LazyLock::new(Mutex::default);
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = libraries.get(path) {
        return Ok(library.clone());
    }
    let library = Pkcs11::new(path)?;
    library.initialize(CInitializeArgs::new(CInitializeFlags::OS_LOCKING_OK))?;
    libraries.insert(path.clone(), library.clone());
    Ok(library)
}

/// A key that a token holds.
struct TokenKey {
    library: Pkcs11,
    slot: Slot,
    uri: Uri,
    pin: Option<AuthPin>,
    public: Key,
}

/// Opens the key that `uri` names.
///
/// # Errors
/// The library or the token is missing, the PIN is wrong, or the token has no such key of a kind
/// that cars verify.
pub fn open_token(uri: &str, secrets: &mut Passphrases) -> Result<Arc<dyn Sign>> {
    let uri = Uri::parse(uri)?;
    let named = || uri.module.display().to_string();
    let library = library(&uri.module).with_context(named)?;
    let slot = find_slot(&library, uri.token.as_deref()).with_context(named)?;
    let token = library.get_token_info(slot).with_context(named)?;
    let pin = match &uri.pin {
        _ if !token.login_required() => None,
        Some(pin) => Some(pin.clone()),
        None => Some(secrets.pin(&format!("token {}", token.label()))?),
    };
    let pin = pin.map(|pin| AuthPin::new(pin.into()));
    let session = session(&library, slot, pin.as_ref());
    let session = session.with_context(|| format!("token {}", token.label()))?;
    let public = read_public(&session, &uri)?;
    Ok(Arc::new(TokenKey { library, slot, uri, pin, public }))
}

/// Returns the slot of the token with this label, or of the only token.
fn find_slot(library: &Pkcs11, label: Option<&str>) -> Result<Slot> {
    let mut labels = Vec::new();
    let mut found = Vec::new();
    for slot in library.get_slots_with_token()? {
        let info = library.get_token_info(slot)?;
        if info.token_initialized() {
            labels.push(info.label().to_owned());
            found.extend(label.is_none_or(|label| info.label() == label).then_some(slot));
        }
    }
    match found.as_slice() {
        [slot] => Ok(*slot),
        slots => bail!("{} tokens are the wanted one, of: {}", slots.len(), labels.join(", ")),
    }
}

/// Opens a session in which private keys can be used.
fn session(library: &Pkcs11, slot: Slot, pin: Option<&AuthPin>) -> Result<Session, Error> {
    let session = library.open_ro_session(slot)?;
    match pin.map_or(Ok(()), |pin| session.login(UserType::User, Some(pin))) {
        Err(Error::Pkcs11(RvError::UserAlreadyLoggedIn, _)) => Ok(session),
        logged_in => logged_in.map(|()| session),
    }
}

/// Returns the one object of this class that `uri` names.
fn find(session: &Session, uri: &Uri, class: ObjectClass) -> Result<ObjectHandle> {
    match session.find_objects(&uri.template(class))?.as_slice() {
        [object] => Ok(*object),
        objects => bail!("the token has {} objects of class {class} by this name", objects.len()),
    }
}

/// Reads the public half of the key.
fn read_public(session: &Session, uri: &Uri) -> Result<Key> {
    find(session, uri, ObjectClass::PRIVATE_KEY)?;
    let object = find(session, uri, ObjectClass::PUBLIC_KEY)?;
    let kinds = [
        AttributeType::KeyType,
        AttributeType::EcParams,
        AttributeType::EcPoint,
        AttributeType::Modulus,
        AttributeType::PublicExponent,
    ];
    let (mut kind, mut curve, mut point, mut modulus, mut exponent) =
        (None, vec![], vec![], vec![], vec![]);
    for attribute in session.get_attributes(object, &kinds)? {
        match attribute {
            Attribute::KeyType(found) => kind = Some(found),
            Attribute::EcParams(found) => curve = found,
            Attribute::EcPoint(found) => point = found,
            Attribute::Modulus(found) => modulus = found,
            Attribute::PublicExponent(found) => exponent = found,
            _ => {}
        }
    }
    // The point is an octet string, but some libraries leave out its head.
    let point = take(&mut &point[..], OCTETS).map_or_else(|| point.clone(), <[u8]>::to_vec);
    let _extra = HashMap::new();
    match kind {
        Some(KeyType::EC) if curve == P256 => {
            let keyval = EcdsaKey { public: point.into(), _extra: HashMap::new() };
            Ok(Key::Ecdsa { keyval, scheme: EcdsaScheme::EcdsaSha2Nistp256, _extra })
        }
        Some(KeyType::EC_EDWARDS) if point.len() == 32 => {
            let keyval = Ed25519Key { public: point.into(), _extra: HashMap::new() };
            Ok(Key::Ed25519 { keyval, scheme: Ed25519Scheme::Ed25519, _extra })
        }
        Some(KeyType::RSA) => {
            let numbers = [put_number(&modulus), put_number(&exponent)];
            let public = put(SEQUENCE, &[&numbers[0], &numbers[1]]);
            let keyval = RsaKey { public: public.into(), _extra: HashMap::new() };
            Ok(Key::Rsa { keyval, scheme: RsaScheme::RsassaPssSha256, _extra })
        }
        _ => bail!("the key is none of Ed25519, the curve P-256, or RSA"),
    }
}

impl TokenKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        let session = session(&self.library, self.slot, self.pin.as_ref())?;
        let key = find(&session, &self.uri, ObjectClass::PRIVATE_KEY)?;
        // A hash of our own: not every token hashes.
        let hash = digest(&SHA256, message);
        let signature = match self.public {
            Key::Ed25519 { .. } => {
                let scheme = EddsaParams::new(EddsaSignatureScheme::Ed25519);
                session.sign(&Mechanism::Eddsa(scheme), key, message)?
            }
            Key::Rsa { .. } => {
                let (hash_alg, mgf) = (MechanismType::SHA256, PkcsMgfType::MGF1_SHA256);
                let pss = PkcsPssParams { hash_alg, mgf, s_len: HASH_BYTES.into() };
                session.sign(&Mechanism::RsaPkcsPss(pss), key, hash.as_ref())?
            }
            Key::Ecdsa { .. } | Key::EcdsaOld { .. } => {
                let both = session.sign(&Mechanism::Ecdsa, key, hash.as_ref())?;
                let (r, s) = both.split_at(both.len() / 2);
                put(SEQUENCE, &[&put_number(r), &put_number(s)])
            }
        };
        Ok(signature)
    }
}

#[async_trait]
impl Sign for TokenKey {
    fn tuf_key(&self) -> Key {
        self.public.clone()
    }

    async fn sign(
        &self,
        message: &[u8],
        _random: &(dyn SecureRandom + Sync),
    ) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync + 'static>> {
        Ok(Self::sign(self, message)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_names_a_key_and_nothing_that_is_ignored() {
        let uri = "pkcs11:token=My%20fleet;object=targets;id=%01%ff;type=private\
                   ?module-path=/lib/x.so&pin-value=12%3b34";
        let uri = Uri::parse(uri).unwrap();
        assert_eq!((uri.token.as_deref(), uri.pin.as_deref()), (Some("My fleet"), Some("12;34")));
        assert_eq!((uri.object.as_deref(), uri.id.unwrap()), (Some("targets"), vec![1, 255]));
        for (uri, why) in [
            ("file:key", "does not begin with `pkcs11:`"),
            ("pkcs11:object=a", "lacks `module-path`"),
            ("pkcs11:token=a?module-path=/x", "names no key"),
            ("pkcs11:object=a;slot-id=3?module-path=/x", "slot-id: is none of"),
            ("pkcs11:object?module-path=/x", "`object`"),
            ("pkcs11:object=%ff?module-path=/x", "object: is not UTF-8"),
        ] {
            let refused = format!("{:#}", Uri::parse(uri).err().unwrap());
            assert!(refused.contains(why), "{uri}: {refused}");
        }
    }
}

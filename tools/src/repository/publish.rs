//! `publish`: turns bundles into releases that cars find. [`publish`] goes in this order:
//!
//! 1. It reads and verifies the metadata in force, and checks its clock against them.
//! 2. It opens the bundles, and finds the releases to restore, to revoke and to re-sign.
//! 3. It checks that no release name gets other content.
//! 4. It uploads chunks, each under its hash, and manifests.
//! 5. It signs the next version of the metadata.
//! 6. It uploads targets and snapshot metadata.
//! 7. It checks that no chunk was removed since step 4, and its clock against the store's.
//! 8. It uploads new roots, and replaces the timestamp, the one file that leads to everything else.
//!
//! A publish that is killed before step 8 leaves nothing that a car can see. It never removes an
//! object: `prune` does. A (lineage, sequence) pair is immutable. After a rotation of the targets'
//! key, `publish` re-signs only the releases that its caller lists.

use crate::limits::ROOT_DAYS_MIN;
use crate::report::temporary::TemporaryFolder;
use crate::report::{self, Json};
use crate::repository::approval::check_approval;
use crate::repository::clock::{ClockError, DAY_S, now, signing_time};
use crate::repository::keys::{block_on, release_keys, root_expiry};
use crate::repository::metadata::{
    LATE, Signing, missing_roots, next_versions, read_signed, upload_metadata,
};
use crate::repository::offer::{Content, Offer, Uploads};
use crate::repository::restore::restore;
use crate::repository::state::{ReleaseNames, RepositoryState, TIMESTAMP};
use crate::repository::store::{DryRun, Objects, Store, confirm};
use crate::repository::variants::{self, Bundle};
use crate::say;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::{Generation, Manifest, hex, sha256};
use hatchback::clock::utc;
use hatchback::schema::change::check_change;
use hatchback::update::program::needs_of;
use hatchback::update::release::parse_name;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tough::TargetName;
use tough::schema::Target;

/// Signs bundles and puts them where cars fetch them
#[derive(Args, Debug)]
pub struct PublishArgs {
    /// Bundles: snapshots and deltas. Several for one generation are variants, for cars of
    /// different versions: a car takes the first that it can read. Without a bundle, the timestamp
    /// is signed again
    bundles: Vec<PathBuf>,
    /// The repository: a directory that a web server or a CDN serves, or with the feature `s3` an
    /// `s3://BUCKET/PREFIX` (endpoint and keys from the AWS_... environment)
    #[arg(long)]
    to: String,
    /// The folder of the keys and roots (`hatchback keys new`)
    #[arg(long)]
    keys: PathBuf,
    /// Publishes the content of this earlier release again, as the next one: no bundle is needed,
    /// and no row is uploaded. Cars at later releases return to it
    #[arg(long, value_name = "[LINEAGE/]SEQUENCE", conflicts_with_all = ["bundles", "policy"])]
    restore: Option<String>,
    /// Revokes this release, or one target by its whole name. A car that has committed the release
    /// reports that, and stays on it until a newer one comes
    #[arg(long, value_name = "[LINEAGE/]SEQUENCE")]
    revoke: Vec<String>,
    /// After a rotation of the targets' key: signs this release, which only the replaced key has
    /// signed, with the new key. Each listed release needs --re-sign, --revoke or its bundle,
    /// because whoever stole the old key may have listed some
    #[arg(long, value_name = "[LINEAGE/]SEQUENCE")]
    re_sign: Vec<String>,
    /// Per cent of the fleet that may fetch these bundles, by default all of it; publish them again
    /// to raise it
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=100))]
    share: Option<u8>,
    /// Days until the timestamp expires and cars refuse it as frozen: publish again before that
    #[arg(long, default_value_t = 7, value_parser = report::args::days)]
    days: u64,
    /// Refuses each bundle that `hatchback gate` has not approved under this policy file
    #[arg(long, requires = "bundles")]
    policy: Option<PathBuf>,
    /// Prints what would be done, and writes nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: Json,
}

/// The changes of a publish.
#[derive(Clone, Debug)]
pub struct Change {
    /// Bundles to add.
    pub bundles: Vec<PathBuf>,
    /// The policy under which `gate` must have approved each of them.
    pub policy: Option<PathBuf>,
    /// A release to restore, in the form of those to revoke.
    pub restore: Option<String>,
    /// Per cent of the fleet that may fetch them.
    pub share: u8,
    /// Releases to revoke: `SEQUENCE` if the repository has one lineage, `LINEAGE/SEQUENCE`, or the
    /// whole name of a target.
    pub revoke: Vec<String>,
    /// Releases to sign again after a rotation of keys, in the same forms.
    pub re_sign: Vec<String>,
    /// Seconds until the timestamp expires. Snapshot and targets last ten times as long.
    pub expires_s: u64,
}

impl Default for Change {
    /// Returns a change that only renews the timestamp, for a day.
    fn default() -> Self {
        Self {
            bundles: Vec::new(),
            policy: None,
            restore: None,
            share: 100,
            revoke: Vec::new(),
            re_sign: Vec::new(),
            expires_s: DAY_S,
        }
    }
}

/// The result of a publish.
#[derive(Debug, Default, Serialize)]
pub struct Published {
    /// Names of the targets that were added.
    pub added: Vec<String>,
    /// Names of the targets that were revoked.
    pub revoked: Vec<String>,
    /// Targets that only replaced keys had signed and that the new keys have signed now: name and
    /// SHA-256 of the manifest.
    pub resigned: Vec<String>,
    /// Added targets that could not be compared with what callers of the release before them send:
    /// its manifest is lost or damaged.
    pub not_compared: Vec<String>,
    /// Chunks that were uploaded.
    pub chunks: u64,
    /// Bytes of the uploaded chunks.
    pub chunk_bytes: u64,
    /// Chunks that the repository already had.
    pub chunks_known: u64,
    /// Version of the new timestamp.
    pub version: u64,
    /// When the timestamp expires.
    pub timestamp_expires: String,
    /// When the snapshot and targets metadata expire.
    pub metadata_expire: String,
    /// When the root expires.
    pub root_expires: String,
}

/// Runs the command.
///
/// # Errors
/// A bundle, a key or the repository is refused. Cars see no change then.
pub fn run(args: &PublishArgs) -> Result<()> {
    ensure!(
        args.share.is_none() || args.restore.is_some() || !args.bundles.is_empty(),
        "--share needs the bundles whose share it is, or --restore"
    );
    let is_new = !args.to.contains("://") && !Path::new(&args.to).exists();
    let done = run_at(args);
    if is_new {
        // A run that published nothing leaves no empty folder.
        let _ = std::fs::remove_dir(&args.to);
    }
    done
}

fn run_at(args: &PublishArgs) -> Result<()> {
    let store = match args.bundles.as_slice() {
        [] => Objects::existing(&args.to)?,
        _ => Objects::open(&args.to)?,
    };
    ensure!(
        !args.bundles.is_empty() || store.bytes(TIMESTAMP)?.is_some(),
        "{}: nothing is published in this repository; pass a bundle",
        args.to
    );
    let dry = DryRun(&store);
    let store: &dyn Store = if args.dry_run { &dry } else { &store };
    let change = Change {
        bundles: args.bundles.clone(),
        policy: args.policy.clone(),
        restore: args.restore.clone(),
        share: args.share.unwrap_or(100),
        revoke: args.revoke.clone(),
        re_sign: args.re_sign.clone(),
        expires_s: args.days * DAY_S,
    };
    let now = now()?;
    check_root(&args.keys, now)?;
    let done = publish(store, &args.keys, &change, now)?;

    args.json.write(&done, || {
        done.print()?;
        if args.dry_run { say!("dry run: nothing was written") } else { Ok(()) }
    })
}

impl Published {
    fn print(&self) -> Result<()> {
        self.added.iter().try_for_each(|name| say!("+ {name}"))?;
        self.revoked.iter().try_for_each(|name| say!("- {name}"))?;
        self.resigned.iter().try_for_each(|target| say!("= {target}"))?;
        for name in &self.not_compared {
            say!(
                "{name}: not compared with what callers send: the release before it cannot be read"
            )?;
        }

        let (chunks, bytes) = (report::count(self.chunks), report::bytes(self.chunk_bytes));
        let (version, known) = (self.version, report::count(self.chunks_known));
        say!("version {version}: {chunks} chunks uploaded, {bytes}; {known} were already there")?;
        let (timestamp, metadata) = (&self.timestamp_expires, &self.metadata_expire);
        say!("expires: timestamp {timestamp}, metadata {metadata}, root {}", self.root_expires)
    }
}

/// A target that replaced keys have signed.
struct Resigned {
    name: TargetName,
    target: Target,
}

/// Publishes `change` in `store`, signed with the keys in the folder `keys`, at the time `now` in
/// seconds since 1970. The head of this file lists the steps.
///
/// # Errors
/// A bundle, a key or the repository is refused. Cars see no change then.
pub fn publish(store: &dyn Store, keys: &Path, change: &Change, now: u64) -> Result<Published> {
    let state = RepositoryState::read(store, keys)?;
    let now = signing_time(now, TIMESTAMP, state.published)?;
    let missing_roots = missing_roots(store, keys)?;

    let mut names = match (change.bundles.as_slice(), change.re_sign.as_slice()) {
        ([], []) if change.restore.is_none() => ReleaseNames::default(),
        _ => ReleaseNames::read(store, &state)?,
    };
    let revoked = find_releases(&state, &change.revoke, "--revoke")?;
    let before = names.clone();
    let mut offers = match &change.restore {
        Some(release) => restored_offers(store, change, release, &mut names, &state, &revoked)?,
        None => open_offers(change, &mut names, &state)?,
    };
    let resigned = find_resigned(&state, change, &revoked, &offers)?;

    resigned
        .iter()
        .try_for_each(|resigned| names.hold(&resigned.name, &resigned.target.hashes.sha256))?;
    let not_compared = check_callers(store, &before, &offers)?;
    note_unreached(&state, &revoked, &offers);
    let published = Published {
        added: offers.iter().map(|offer| offer.name.raw().to_owned()).collect(),
        revoked: revoked.iter().map(|name| name.raw().to_owned()).collect(),
        resigned: resigned.iter().map(|r| describe(&r.name, &r.target)).collect(),
        not_compared,
        version: state.timestamp + 1,
        timestamp_expires: utc(now + change.expires_s),
        metadata_expire: utc(now + LATE * change.expires_s),
        root_expires: utc(root_expiry(keys)?),
        ..Published::default()
    };

    // Before the uploads: a pass phrase is asked for while its reader is still there.
    let signers = release_keys(keys)?;
    let mut uploads = Uploads::new(store);
    offers.iter_mut().try_for_each(|offer| offer.upload(&mut uploads))?;

    let next = next_versions(store, &state)?;
    let signing = Signing {
        keys,
        signers,
        state: &state,
        next: &next,
        added: offers.into_iter().map(|offer| (offer.name, offer.target)).collect(),
        revoked: &revoked,
        now,
        expires_s: change.expires_s,
    };
    let folder = TemporaryFolder::new()?;
    block_on(signing.sign(folder.path()))??;

    upload_metadata(store, &next, folder.path())?;
    uploads.check_known()?;
    let stored = store.stored_at(&format!("metadata/{}.snapshot.json", next.snapshot))?;
    check_ahead(&state, now, stored)?;
    let timestamp = read_signed(folder.path(), "timestamp.json")?;
    // Not before: a car that finds a new root refuses a timestamp that its keys did not sign.
    missing_roots.into_iter().try_for_each(|(name, root)| store.put(&name, root))?;
    let replaced = store.replace(TIMESTAMP, state.stamp.as_deref(), timestamp.clone());
    let replaced = replaced.context(
        "nothing was published: another publisher may have replaced the timestamp first; \
         publish again",
    );
    confirm(store, TIMESTAMP, &timestamp, replaced)?;
    Ok(Published {
        chunks: uploads.chunks,
        chunk_bytes: uploads.chunk_bytes,
        chunks_known: uploads.chunks_known(),
        ..published
    })
}

/// Checks that the callers of the release before each of `offers` can use it, in the repository or
/// in the same publish: every car would fetch a bundle that they cannot use, and reject it.
/// Returns the names of the offers whose release before them has no readable manifest. `names` are
/// those before this publish.
fn check_callers(store: &dyn Store, names: &ReleaseNames, offers: &[Offer]) -> Result<Vec<String>> {
    let mut not_compared = Vec::new();
    for offer in offers {
        let new = offer.content.manifest();
        let before = names.before(store, &new.generation)?;
        // A lost or damaged object must not keep a publisher from replacing it.
        if before.is_lost {
            not_compared.push(offer.name.raw().to_owned());
        }
        let others = offers.iter().map(|other| other.content.manifest());
        let others = others.filter(|other| {
            other.generation.lineage == new.generation.lineage
                && other.generation.sequence < new.generation.sequence
        });
        for old in before.manifests.iter().chain(others) {
            if let Err(problem) = check_change(&old.schema, &new.schema) {
                let ((what, remedy), old) = (offer.content.words(), &old.generation);
                bail!("{what}: callers of {old} cannot use it: {problem}; {remedy}");
            }
        }
    }
    Ok(not_compared)
}

/// Prints a note for each of `offers` that no car will take.
fn note_unreached(state: &RepositoryState, revoked: &[TargetName], offers: &[Offer]) {
    let listed = state.listed().map(|(name, _)| name).filter(|name| !revoked.contains(name));
    let names = listed.chain(offers.iter().map(|offer| &offer.name));
    let known: Vec<Generation> = names.filter_map(|name| Some(parse_name(name.raw())?.0)).collect();
    for offer in offers {
        let (name, manifest) = (offer.name.raw(), offer.content.manifest());
        let Generation { lineage, sequence } = &manifest.generation;
        let mut others = known.iter().filter(|other| other.lineage == *lineage);
        if let Some(newer) = others.clone().map(|other| other.sequence).max()
            && newer > *sequence
        {
            report::note(format_args!(
                "{name}: release {newer} is listed, and a car takes no older one"
            ));
        }
        if let Some(parent) = manifest.parent
            && !others.any(|other| other.sequence == parent)
        {
            report::note(format_args!(
                "{name}: no release {parent} is listed: only a car that has it can take this delta"
            ));
        }
    }
}

/// Checks that the newest root is in force at the time `now`. Prints a note if it expires soon.
///
/// # Errors
/// It has expired: cars refuse whatever its keys sign.
pub fn check_root(keys: &Path, now: u64) -> Result<()> {
    let expires = root_expiry(keys)?;
    let (folder, date) = (keys.display(), utc(expires));
    let rotate = format!("rotate it with `hatchback keys rotate {folder} root`");
    ensure!(now < expires, "nothing was signed: {folder}: the root expired at {date}; {rotate}");
    let days = (expires - now) / DAY_S;
    if days < ROOT_DAYS_MIN {
        report::note(format_args!(
            "{folder}: the root expires at {date}, in {days} days; {rotate}"
        ));
    }
    Ok(())
}

/// Opens the bundles of `change` and names their releases.
///
/// # Errors
/// A bundle cannot be read, has no approval, or its release name was published with other content.
fn open_offers(
    change: &Change,
    names: &mut ReleaseNames,
    state: &RepositoryState,
) -> Result<Vec<Offer>> {
    let open = |path: &PathBuf| {
        let bundle = BundleReader::open(path)?;
        // That of the bundle that is uploaded, whatever lies at its path later.
        let manifest = sha256(bundle.manifest_bytes());
        if bundle.manifest().probe.is_none() {
            report::note(format_args!(
                "{}: has no probe set; a car whose target has `probe_samples_min` above 0 rejects \
                 it for good",
                path.display()
            ));
        }
        let policy = change.policy.as_ref();
        policy.map_or(Ok(()), |policy| check_approval(path, manifest, policy))?;
        Ok(bundle)
    };
    let mut readers = change.bundles.iter().map(open).collect::<Result<Vec<_>>>()?;
    let describe = |reader: &mut BundleReader| {
        let needs = needs_of(reader);
        let Manifest { generation, parent, .. } = reader.manifest().clone();
        Bundle { generation, parent, manifest: sha256(reader.manifest_bytes()), needs }
    };
    let bundles: Vec<Bundle> = readers.iter_mut().map(describe).collect();

    let mut named = variants::name(&bundles, names, state)?;
    for (named, bundle) in named.iter().zip(&bundles) {
        names.hold(&named.name, &bundle.manifest)?;
    }
    readers.iter().for_each(|reader| note_parent(reader, names));
    variants::add_parents(&mut named, names)?;
    let offers = readers.into_iter().zip(named);
    let offer = |(bundle, named)| Offer::new(Content::Bundle(bundle), named, change.share);
    Ok(offers.map(offer).collect())
}

/// Prints a note for a delta that was packed on a release in a form that was not published: a car
/// would keep every row that only that form has.
fn note_parent(bundle: &BundleReader, names: &ReleaseNames) {
    let Manifest { generation, parent, packed_on, .. } = bundle.manifest();
    let (Some(parent), Some(packed_on)) = (parent, packed_on) else { return };
    let is_parent = |name: &TargetName| {
        parse_name(name.raw()).is_some_and(|(release, ..)| {
            release.lineage == generation.lineage && release.sequence == *parent
        })
    };
    let mut published = names.hashes(is_parent).peekable();
    if published.peek().is_some() && !published.any(|hash| hash == packed_on) {
        report::note(format_args!(
            "{}: was packed on a release {parent} that was not published so: its rows must be \
             those of the published one",
            bundle.path().display()
        ));
    }
}

/// Returns the targets that restore the listed `release`.
///
/// # Errors
/// As [`restore`].
fn restored_offers(
    store: &dyn Store,
    change: &Change,
    release: &str,
    names: &mut ReleaseNames,
    state: &RepositoryState,
    revoked: &[TargetName],
) -> Result<Vec<Offer>> {
    let earlier = find_releases(state, &[release.to_owned()], "--restore")?;
    let restored = restore(store, state, names, &earlier, revoked);
    let restored = restored.with_context(|| format!("--restore {release}"))?;
    for restoration in &restored {
        names.hold(&restoration.named.name, &sha256(&restoration.bytes))?;
    }
    Ok(restored.into_iter().map(|r| Offer::restored(r, change.share)).collect())
}

/// Checks `now` if it is more than a day after the last publish: against the time at which the
/// store's own clock says that it `stored` an object of this publish. A pause alone is no error.
/// Nothing else tells the time of a directory, so there the publisher only reads a note, once the
/// metadata in force have expired.
fn check_ahead(state: &RepositoryState, now: u64, stored: Option<u64>) -> Result<(), ClockError> {
    let is_ahead = now > state.published.saturating_add(DAY_S);
    match stored {
        Some(store) if is_ahead && store.abs_diff(now) > DAY_S => {
            Err(ClockError::NotThatOfTheStore { now, store })
        }
        None if is_ahead && state.published > 0 && now > state.expires => {
            let [expires, now] = [state.expires, now].map(utc);
            report::note(format_args!(
                "the metadata in force expired at {expires}; if this clock, {now}, is ahead, see \
                 \"The publisher's clock\" in docs/fleet.md"
            ));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Returns the name and the content hash of a target, as users see it.
fn describe(name: &TargetName, target: &Target) -> String {
    format!("{} sha256 {}", name.raw(), hex(&target.hashes.sha256))
}

/// Returns the targets to sign again after the targets' keys were replaced: those that `change`
/// lists and no others.
///
/// # Errors
/// The change leaves the fate of a listed release open, or no keys were replaced.
fn find_resigned(
    state: &RepositoryState,
    change: &Change,
    revoked: &[TargetName],
    offers: &[Offer],
) -> Result<Vec<Resigned>> {
    if !state.is_outdated {
        ensure!(
            change.re_sign.is_empty(),
            "--re-sign: nothing to re-sign, the keys of the newest root signed all listed releases"
        );
        return Ok(Vec::new());
    }

    let wanted = find_releases(state, &change.re_sign, "--re-sign")?;
    let is_open = |name: &TargetName| {
        !wanted.contains(name)
            && !revoked.contains(name)
            && !offers.iter().any(|offer| offer.name == *name)
    };
    let open = state.listed().filter(|(name, _)| is_open(name));
    let mut open: Vec<String> = open.map(|(name, target)| describe(name, target)).collect();
    open.sort();
    ensure!(
        open.is_empty(),
        "the targets' key was rotated; pass --re-sign, --revoke or the bundle for each of {}",
        open.join(", ")
    );

    let resigned =
        state.listed().filter(|(name, _)| wanted.contains(name) && !revoked.contains(name));
    let owned = |(name, target): (&TargetName, &Target)| Resigned {
        name: name.clone(),
        target: target.clone(),
    };
    Ok(resigned.map(owned).collect())
}

/// Returns the listed targets that match `releases`, the values of `flag`. A value without a
/// lineage requires that the repository has only one.
fn find_releases(
    state: &RepositoryState,
    releases: &[String],
    flag: &str,
) -> Result<Vec<TargetName>> {
    let names: Vec<TargetName> = state.listed().map(|(name, _)| name.clone()).collect();
    let parts = |name: &TargetName| {
        let (lineage, file) = name.raw().split_once('/')?;
        Some((lineage.to_owned(), file.split('-').next()?.parse::<u64>().ok()?))
    };
    let lineages: BTreeSet<String> =
        names.iter().filter_map(parts).map(|(lineage, _)| lineage).collect();

    let mut found = Vec::new();
    for release in releases {
        if let Some(name) = names.iter().find(|name| name.raw() == release) {
            found.push(name.clone());
            continue;
        }

        let (lineage, sequence) = match (release.split_once('/'), lineages.first()) {
            (Some((lineage, sequence)), _) => (lineage, sequence),
            (None, Some(only)) if lineages.len() == 1 => (only.as_str(), release.as_str()),
            _ => bail!(
                "{flag} {release}: pass LINEAGE/SEQUENCE; the repository has the lineages {}",
                lineages.into_iter().collect::<Vec<_>>().join(", ")
            ),
        };
        let sequence: u64 = sequence
            .parse()
            .with_context(|| format!("{flag} {release}: the sequence is not a number"))?;

        let before = found.len();
        let wanted = Some((lineage.to_owned(), sequence));
        found.extend(names.iter().filter(|name| parts(name) == wanted).cloned());
        ensure!(found.len() > before, "{flag} {release}: the repository lists no such release");
    }
    Ok(found)
}

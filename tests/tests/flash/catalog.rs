//! A lost, stale or damaged catalog, and one full of garbage, is moved aside and rebuilt. The model
//! loses nothing. Failures name the seed.

use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::catalog::{Catalog, CatalogError, CatalogState};
use hatchback::maintenance::catalog_entries::CatalogEntries;
use hatchback_tests::flash_check::whole_generation;
use hatchback_tests::mutate::mutated;
use hatchback_tests::random::Random;
use hatchback_tests::versions::Versions;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A flash directory with two generations, and its catalog.
struct Car {
    versions: Versions,
    folder: tempfile::TempDir,
}

impl Car {
    fn new() -> Self {
        let car =
            Self { versions: Versions::new(3, 300, 31), folder: tempfile::tempdir().unwrap() };
        car.install(1);
        car.install(2);
        car
    }

    fn directory(&self) -> PathBuf {
        self.folder.path().join("flash")
    }

    fn catalog(&self) -> PathBuf {
        self.directory().join("catalog")
    }

    fn install(&self, generation: usize) {
        let mut bundle = BundleReader::open(&self.versions.deltas[generation - 1]).unwrap();
        Flash::install(&disk::system(), &self.directory(), &mut bundle, |_| ()).unwrap();
    }

    fn flash(&self) -> Flash {
        Flash::open(&disk::system(), &self.directory()).unwrap()
    }

    fn open(&self) -> (Catalog, CatalogEntries, CatalogState) {
        Catalog::open(&self.catalog(), &self.flash()).unwrap()
    }

    /// Checks that no row of the model depends on the catalog.
    fn check_rows(&self, what: &str) {
        whole_generation(&self.flash(), &self.versions, what);
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { all.extend(files(&path)) } else { all.push(path) }
    }
    all.sort();
    all
}

/// Returns the files of a directory with their contents, for `restore`.
fn snapshot(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    files(directory).into_iter().map(|f| (f.clone(), fs::read(&f).unwrap())).collect()
}

fn restore(directory: &Path, files: &[(PathBuf, Vec<u8>)]) {
    let _ = fs::remove_dir_all(directory);
    for (path, content) in files {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

/// Returns the entries of a catalog that was rebuilt after damage.
fn lost() -> CatalogEntries {
    CatalogEntries { sequence: 2, ..CatalogEntries::lost() }
}

/// Returns entries with a value in every field, committed `times` times.
fn filled(car: &Car, times: u64) -> CatalogEntries {
    let (catalog, mut entries, _) = car.open();
    for n in 0..times {
        entries.wear.spend(DAY * 20_000, 1000);
        entries.scrub.pages = n;
        catalog.write(&entries).unwrap();
    }
    entries
}

#[test]
fn committed_entries_are_found_at_the_next_open() {
    let car = Car::new();
    let (catalog, entries, found) = car.open();
    assert_eq!((found, catalog.quarantined()), (CatalogState::Missing, 0));
    assert_eq!(entries, CatalogEntries { sequence: 2, ..CatalogEntries::default() });
    drop(catalog);
    let written = filled(&car, 50);
    let (_, entries, found) = car.open();
    assert_eq!((entries, found), (written, CatalogState::Kept));
}

#[test]
fn other_users_cannot_hold_the_lock_of_a_catalog() {
    let car = Car::new();
    drop(car.open());
    fs::set_permissions(car.catalog(), fs::Permissions::from_mode(0o750)).unwrap();
    drop(car.open());
    let mode = fs::metadata(car.catalog()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn an_open_catalog_is_not_taken_for_a_damaged_one() {
    let car = Car::new();
    let (_held, ..) = car.open();
    let refused = Catalog::open(&car.catalog(), &car.flash()).err().unwrap();
    assert!(matches!(refused, CatalogError::InUse { .. }), "{refused}");
    assert!(car.catalog().exists());
}

#[test]
fn a_peek_reads_beside_an_open_catalog_and_changes_nothing() {
    let car = Car::new();
    filled(&car, 5);
    let (_held, entries, _) = car.open();
    let (before, scratch) = (snapshot(&car.catalog()), tempfile::tempdir().unwrap());
    assert_eq!(Catalog::peek(&car.catalog(), scratch.path()).unwrap(), entries);
    assert!(snapshot(&car.catalog()) == before);
    let scratch = tempfile::tempdir().unwrap();
    assert!(Catalog::peek(&car.directory().join("none"), scratch.path()).is_err());
}

#[test]
fn a_stale_catalog_keeps_the_wear_state() {
    let car = Car::new();
    let before = filled(&car, 3);
    car.install(3);
    let (catalog, entries, found) = car.open();
    assert_eq!((found, catalog.quarantined()), (CatalogState::Stale { sequence: 2 }, 1));
    assert_eq!((entries.sequence, entries.wear), (3, before.wear));
    car.check_rows("stale");
    drop(catalog);
    assert_eq!(car.open().2, CatalogState::Kept);
}

/// Another generation became live while the catalog was open, and the entries followed.
#[test]
fn a_catalog_that_followed_is_not_stale() {
    let car = Car::new();
    let (catalog, mut entries, _) = car.open();
    car.install(3);
    entries.follow(&car.flash());
    catalog.write(&entries).unwrap();
    drop(catalog);
    let (_, again, found) = car.open();
    assert_eq!((again, found), (entries, CatalogState::Kept));
}

/// A power cut that undoes the last commits leaves the catalog of an earlier commit.
#[test]
fn an_undone_commit_changes_nothing_that_matters() {
    let car = Car::new();
    let before = filled(&car, 5);
    let saved = snapshot(&car.catalog());
    let after = filled(&car, 5);
    assert_ne!(before, after);
    restore(&car.catalog(), &saved);
    let (_, entries, found) = car.open();
    assert_eq!((entries, found), (before, CatalogState::Kept));
    car.check_rows("undone");
}

/// Every file of the catalog is garbage, empty or missing; or the directory is missing.
#[test]
fn garbage_is_moved_aside() {
    let car = Car::new();
    filled(&car, 20);
    let (saved, mut random) = (snapshot(&car.catalog()), Random::new(1));
    let garbage =
        |n: usize, random: &mut Random| (0..n).map(|_| random.bits() as u8).collect::<Vec<u8>>();
    let (catalog, _, _) = car.open();
    let mut quarantined = catalog.quarantined();
    drop(catalog);

    for length in [0, 1, 100, 5000, 1 << 20] {
        let mut files = saved.clone();
        files.iter_mut().for_each(|(_, content)| *content = garbage(length, &mut random));
        restore(&car.catalog(), &files);
        let (catalog, entries, found) = car.open();
        assert!(matches!(found, CatalogState::Damaged { .. }), "{length}: {found:?}");
        quarantined += 1;
        assert_eq!((catalog.quarantined(), entries), (quarantined, lost()));
        car.check_rows("garbage");
    }

    fs::remove_dir_all(car.catalog()).unwrap();
    fs::write(car.catalog(), b"a file where a directory should be").unwrap();
    assert!(matches!(car.open().2, CatalogState::Damaged { .. }));

    fs::remove_dir_all(car.catalog()).unwrap();
    assert_eq!(car.open().2, CatalogState::Missing);
    let aside = fs::read_dir(car.directory()).unwrap().map(|e| e.unwrap().file_name());
    let aside = aside.filter(|n| n.to_string_lossy().starts_with("catalog.bad-")).count();

    assert_eq!(aside, 2, "only the two newest are kept");
}

fn rounds() -> u64 {
    std::env::var("HATCHBACK_CATALOGS").ok().and_then(|n| n.parse().ok()).unwrap_or(50)
}

/// Damages the files of the catalog and returns the kind of damage.
fn damage(files: &mut [(PathBuf, Vec<u8>)], random: &mut Random) -> &'static str {
    let others: Vec<Vec<u8>> = files.iter().map(|(_, content)| content.clone()).collect();
    // Most of the file is unused, so the damage is placed in the used part.
    let used = |content: &[u8]| content.iter().rposition(|b| *b != 0).map_or(1, |at| at + 1) as u64;
    let count = files.len() as u64;
    let (_, content) = &mut files[random.below(count) as usize];

    if content.is_empty() {
        *content = vec![1, 2, 3];
        return "filled";
    }

    match random.below(4) {
        0 => {
            let at = random.below(used(content));
            content.truncate(at as usize);
            "truncated"
        }
        1 => {
            let at = random.below(used(content)) as usize;
            let end = (at + 4096).min(content.len());
            content[at..end].fill(0);
            "zeroed"
        }
        2 => {
            let end = used(content) as usize;
            *content = mutated(&content[..end], &others, random);
            "mutated"
        }
        _ => {
            for _ in 0..=random.below(8) {
                let at = random.below(used(content)) as usize;
                content[at] ^= 1 << random.below(8);
            }
            "flipped"
        }
    }
}

/// After any damage to its bytes, the catalog opens with committed entries or is rebuilt.
#[test]
fn no_damage_matters() {
    let car = Car::new();
    let mut written = vec![car.open().1];
    for _ in 0..30 {
        written.push(filled(&car, 1));
    }

    let saved = snapshot(&car.catalog());
    let (mut kept, mut rebuilt, mut undone) = (0, 0, 0);
    for seed in 0..rounds() {
        let (mut random, mut files) = (Random::new(seed), saved.clone());
        let how = damage(&mut files, &mut random);
        restore(&car.catalog(), &files);
        let (catalog, mut entries, found) = car.open();

        match found {
            CatalogState::Kept => {
                assert!(written.contains(&entries), "seed {seed}, {how}: {entries:?}")
            }
            CatalogState::Damaged { .. } => {
                assert_eq!(entries, lost(), "seed {seed}, {how}")
            }
            other => panic!("seed {seed}, {how}: {other:?}"),
        }

        let is_kept = found == CatalogState::Kept;
        (kept, rebuilt) = (kept + u64::from(is_kept), rebuilt + u64::from(!is_kept));

        // The opened catalog accepts a commit or returns an error.
        entries.wear.spend(DAY * 20_001, 1);
        let wrote = catalog.write(&entries).is_ok();
        drop(catalog);
        assert!(wrote || is_kept, "seed {seed}, {how}: a rebuilt catalog refuses a commit");
        let (_, again, found) = car.open();

        // sled may not notice some damage. It may then acknowledge a commit that the next open does
        // not find.
        let known = again == entries || (is_kept && written.contains(&again));
        undone += u64::from(wrote && found == CatalogState::Kept && again != entries);

        assert!(known || found != CatalogState::Kept, "seed {seed}, {how}: {again:?}");
    }

    car.check_rows("after all damage");
    println!(
        "{} damaged catalogs: {kept} kept with committed entries, {undone} of which lost the next \
         commit, {rebuilt} rebuilt",
        rounds()
    );
}

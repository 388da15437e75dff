//! The storage of a repository's objects: a directory, or with the feature `s3` a server with the
//! S3 protocol, both through the `object_store` crate. Knows nothing of releases.

use crate::report::temporary::uninterrupted;
use crate::repository::clock::unix_s;
use anyhow::{Context, Result, ensure};
use futures_util::TryStreamExt;
use hatchback::io::disk::create_directories;
use object_store::local::LocalFileSystem;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};
use std::error::Error;
use std::path::{Path, PathBuf};
use tokio::runtime::Runtime;
use url::Url;

/// An object of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Path of the object in the store.
    pub path: String,
    /// Size of the object.
    pub bytes: u64,
    /// Time of the upload, in seconds since 1970.
    pub modified: u64,
}

/// The storage of a repository's objects.
pub trait Store {
    /// Returns the object at `path`, if it exists.
    ///
    /// # Errors
    /// The store fails.
    fn get(&self, path: &str) -> Result<Option<Vec<u8>>>;

    /// Returns the size of the object at `path`, if it exists.
    ///
    /// # Errors
    /// The store fails.
    fn bytes(&self, path: &str) -> Result<Option<u64>>;

    /// Returns whether the object at `path` is `content`, as far as the store tells cheaply: by the
    /// size at least.
    ///
    /// # Errors
    /// The store fails.
    fn holds(&self, path: &str, content: &[u8]) -> Result<bool> {
        Ok(self.bytes(path)? == Some(content.len() as u64))
    }

    /// Stores an object at `path`, completely or not at all. On return it is durable.
    ///
    /// # Errors
    /// The store fails.
    fn put(&self, path: &str, content: Vec<u8>) -> Result<()>;

    /// Stores a new object at `path`, as `put` does.
    ///
    /// # Errors
    /// An object exists at `path`, or the store fails.
    fn put_new(&self, path: &str, content: Vec<u8>) -> Result<()>;

    /// Replaces the object at `path`, whose content is `before`; with `None` stores a new object. A
    /// store without conditional writes, such as a directory, compares first and then writes.
    /// Between the two, another writer's change would be lost.
    ///
    /// # Errors
    /// The object has other content, or the store fails.
    fn replace(&self, path: &str, before: Option<&[u8]>, content: Vec<u8>) -> Result<()>;

    /// Returns the time at which the object at `path` was stored, by the store's own clock, in
    /// seconds since 1970. `None` if it has no such object, or no clock of its own.
    ///
    /// # Errors
    /// The store fails.
    fn stored_at(&self, _path: &str) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Returns every object, and what killed uploads left (see [`split_leftover`]).
    ///
    /// # Errors
    /// The store fails.
    fn list(&self) -> Result<Vec<Object>>;

    /// Removes the object at `path`.
    ///
    /// # Errors
    /// The store fails.
    fn delete(&self, path: &str) -> Result<()>;
}

/// Returns `put`, the result of a conditional write of `content` to `path`, or success if the
/// store has the content: a server may store an object and then refuse the repeated request.
///
/// # Errors
/// That of `put`, or the store cannot be read after it.
pub fn confirm(store: &dyn Store, path: &str, content: &[u8], put: Result<()>) -> Result<()> {
    let Err(error) = put else { return Ok(()) };
    let stored = store.get(path).with_context(|| {
        format!("{path} was written or not: the store does not answer; publish again")
    })?;
    if stored.as_deref() == Some(content) { Ok(()) } else { Err(error) }
}

/// A store that the `object_store` crate supports.
pub struct Objects {
    store: Box<dyn ObjectStore>,
    /// The directory of the objects; `None` on a server, which has a clock of its own.
    directory: Option<PathBuf>,
    /// One runtime for all calls, because it owns the connections.
    runtime: Runtime,
}

impl Objects {
    /// Opens the directory at `path`; creates it if it is missing.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn directory(path: &Path) -> Result<Self> {
        create_folder(path, 0o777)?;
        let store = LocalFileSystem::new_with_prefix(path)?.with_fsync(true);
        Self::of(Box::new(store), Some(path.to_owned()))
    }

    /// Opens the store at `to`: a URL that `object_store` supports, or a directory.
    ///
    /// # Errors
    /// The store does not exist, or this program was built without support for it.
    pub fn open(to: &str) -> Result<Self> {
        if !to.contains("://") {
            return Self::directory(Path::new(to));
        }
        let address = Url::parse(to).with_context(|| to.to_owned())?;
        let options = std::env::vars().map(|(key, value)| (key.to_ascii_lowercase(), value));
        let options = options.filter(|(key, _)| key.starts_with("aws_"));
        let (store, prefix) =
            object_store::parse_url_opts(&address, options).with_context(|| to.to_owned())?;
        Self::of(Box::new(PrefixStore::new(store, prefix)), None)
    }

    /// Opens the store at `to` as [`Objects::open`] does, and creates nothing: a name with a typing
    /// error must not become a new repository.
    ///
    /// # Errors
    /// The directory does not exist, or as [`Objects::open`].
    pub fn existing(to: &str) -> Result<Self> {
        ensure!(to.contains("://") || Path::new(to).is_dir(), "{to}: no such repository");
        Self::open(to)
    }

    fn of(store: Box<dyn ObjectStore>, directory: Option<PathBuf>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { store, directory, runtime })
    }
}

/// Creates a folder durably with `mode` less the umask, and its missing parents.
///
/// # Errors
/// The system refused.
pub(super) fn create_folder(folder: &Path, mode: u32) -> Result<()> {
    create_directories(folder, mode).with_context(|| folder.display().to_string())
}

/// Splits the path of what a killed upload left in a directory into the path of its object and a
/// number. `object_store` writes `OBJECT#NUMBER`, renames it to `OBJECT`, and never lists it.
pub fn split_leftover(path: &str) -> Option<(&str, &str)> {
    path.rsplit_once('#').filter(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Adds to `found` the leftovers in `folder` of the repository `root`.
fn find_leftovers(root: &Path, folder: &Path, found: &mut Vec<Object>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        // A running publish may rename a file meanwhile.
        let Ok(data) = path.symlink_metadata() else { continue };
        if data.is_dir() {
            find_leftovers(root, &path, found)?;
        } else if split_leftover(&name).is_some() {
            let modified = unix_s(data.modified()?);
            found.push(Object { path: name, bytes: data.len(), modified });
        }
    }
    Ok(())
}

impl Objects {
    /// Runs `work` on the object at `path`.
    fn run<T>(&self, path: &str, work: impl Future<Output = object_store::Result<T>>) -> Result<T> {
        self.runtime.block_on(work).map_err(|error| self.named(path, error))
    }

    /// Runs `work` on the object at `path`. Returns `None` if there is no such object.
    fn find<T>(
        &self,
        path: &str,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<Option<T>> {
        match self.runtime.block_on(work) {
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            found => found.map(Some).map_err(|error| self.named(path, error)),
        }
    }

    /// Adds the place of the object at `path` to an error. Of an error of the system only the
    /// system's own words stay: `object_store` puts the names of its parts around them.
    fn named(&self, path: &str, error: object_store::Error) -> anyhow::Error {
        let place = self.directory.as_ref().map_or(PathBuf::from(path), |root| root.join(path));
        let first: &(dyn Error + 'static) = &error;
        let causes = std::iter::successors(Some(first), |cause| (*cause).source());
        let number = causes
            .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
            .find_map(std::io::Error::raw_os_error);
        let cause = match number {
            Some(number) => std::io::Error::from_raw_os_error(number).into(),
            None => anyhow::Error::from(error),
        };
        cause.context(place.display().to_string())
    }

    /// Runs a put of the object at `path`. In a directory a signal waits for its end: until then
    /// the object is a file of another name, which nobody would remove.
    fn run_put<T>(
        &self,
        path: &str,
        put: impl Future<Output = object_store::Result<T>>,
    ) -> Result<()> {
        let run = || self.run(path, put).map(drop);
        if self.directory.is_some() { uninterrupted(run) } else { run() }
    }
}

impl Store for Objects {
    fn get(&self, path: &str) -> Result<Option<Vec<u8>>> {
        let object = path.into();
        let bytes = self.find(path, async { self.store.get(&object).await?.bytes().await })?;
        Ok(bytes.map(Into::into))
    }

    fn bytes(&self, path: &str) -> Result<Option<u64>> {
        Ok(self.find(path, self.store.head(&path.into()))?.map(|meta| meta.size))
    }

    fn holds(&self, path: &str, content: &[u8]) -> Result<bool> {
        // A server checks its objects itself.
        let is_of_size = self.bytes(path)? == Some(content.len() as u64);
        Ok(is_of_size && (self.directory.is_none() || self.get(path)?.as_deref() == Some(content)))
    }

    fn put(&self, path: &str, content: Vec<u8>) -> Result<()> {
        self.run_put(path, self.store.put(&path.into(), PutPayload::from(content)))
    }

    fn put_new(&self, path: &str, content: Vec<u8>) -> Result<()> {
        let (object, new) = (path.into(), PutOptions::from(PutMode::Create));
        self.run_put(path, self.store.put_opts(&object, PutPayload::from(content), new))
    }

    fn replace(&self, path: &str, before: Option<&[u8]>, content: Vec<u8>) -> Result<()> {
        let Some(before) = before else { return self.put_new(path, content) };
        let (object, content) = (path.into(), PutPayload::from(content));
        let found = self.run(path, self.store.get(&object))?;
        let (e_tag, version) = (found.meta.e_tag.clone(), found.meta.version.clone());
        ensure!(
            self.run(path, found.bytes())? == before,
            "{path} has changed since this publish read it"
        );

        let same = PutOptions::from(PutMode::Update(UpdateVersion { e_tag, version }));
        let put = async {
            match self.store.put_opts(&object, content.clone(), same).await {
                Err(object_store::Error::NotImplemented { .. }) => {
                    self.store.put(&object, content).await
                }
                put => put,
            }
        };
        self.run_put(path, put)
    }

    fn stored_at(&self, path: &str) -> Result<Option<u64>> {
        let stored = self.find(path, self.store.head(&path.into()))?;
        // A directory's clock is that of this publisher.
        Ok(stored
            .filter(|_| self.directory.is_none())
            .map(|meta| unix_s(meta.last_modified.into())))
    }

    fn list(&self) -> Result<Vec<Object>> {
        let objects = self.store.list(None).map_ok(|meta| {
            let modified = u64::try_from(meta.last_modified.timestamp()).unwrap_or(0);
            Object { path: meta.location.into(), bytes: meta.size, modified }
        });
        let mut objects: Vec<Object> = self.run("", objects.try_collect())?;
        if let Some(root) = &self.directory {
            find_leftovers(root, root, &mut objects).with_context(|| root.display().to_string())?;
        }
        Ok(objects)
    }

    fn delete(&self, path: &str) -> Result<()> {
        if let (Some(root), Some(_)) = (&self.directory, split_leftover(path)) {
            let place = root.join(path);
            return std::fs::remove_file(&place).with_context(|| place.display().to_string());
        }
        self.run(path, self.store.delete(&path.into()))
    }
}

/// A store that reads from another store and writes nothing, for `--dry-run`.
pub struct DryRun<'a>(pub &'a dyn Store);

impl Store for DryRun<'_> {
    fn get(&self, path: &str) -> Result<Option<Vec<u8>>> {
        self.0.get(path)
    }

    fn bytes(&self, path: &str) -> Result<Option<u64>> {
        self.0.bytes(path)
    }

    fn holds(&self, path: &str, content: &[u8]) -> Result<bool> {
        self.0.holds(path, content)
    }

    fn put(&self, _: &str, _: Vec<u8>) -> Result<()> {
        Ok(())
    }

    fn put_new(&self, _: &str, _: Vec<u8>) -> Result<()> {
        Ok(())
    }

    fn replace(&self, _: &str, _: Option<&[u8]>, _: Vec<u8>) -> Result<()> {
        Ok(())
    }

    fn list(&self) -> Result<Vec<Object>> {
        self.0.list()
    }

    fn delete(&self, _: &str) -> Result<()> {
        Ok(())
    }
}

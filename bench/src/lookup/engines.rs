//! The engines that `bench lookup` compares: the lookups of the request path, and the peers. They
//! take turns, also with mere reads of the rows. Never judges their times.

use super::calls::{BATCHES, Calls, Shape, popular};
use super::figures::{LookupFigures, LookupMeasurement, OURS, OurEngine, READS, RowPlace};
use super::row_reads::RowReads;
use crate::filled_cache::{FilledCache, SampleRows, TABLES};
use crate::peer::{self, BestTimes, Peer, PeerAbout, RoundTimes, cpu_us};
use anyhow::{Context, Result, ensure};
use hatchback::{LookupStatus, Pooling, RowFormat};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::resident::Resident;
use hatchback_kernels::cuda::{Device, HostMemory};
use hatchback_kernels::lookup::feature_prefetch::FeaturePrefetch;
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_kernels::lookup::{Bags, FeatureView, Input, RowStore};
use hatchback_kernels::simd::isa::Isa;
use hatchback_tools::workload::key_distributions::Scatter;
use rand::rngs::StdRng;
use serde_json::json;
use std::path::Path;

/// Keys of all calls of a round, at most for one table.
const ROUND_KEYS: usize = 40_000;

/// Returns the samples of the largest call.
fn batch_max() -> usize {
    BATCHES.into_iter().max().unwrap_or(1)
}

/// Where the rows of [`OurLookups`] are.
enum OurTables {
    /// All tables in one cache.
    Cached(Box<Cache>),
    /// Each table whole.
    Resident(Vec<Resident>),
}

/// The lookups of the request path.
struct OurLookups {
    format: RowFormat,
    tables: OurTables,
    default_row: Vec<f32>,
    misses: MissList,
    statuses: Vec<LookupStatus>,
    out: HostMemory<f32>,
    keys: PopularKeys,
}

/// The keys of each table, the most popular first.
enum PopularKeys {
    /// The keys of a hashed cache, without those of its overflowed sets. Their hashes separate
    /// popular rows.
    Hashed(Vec<Vec<u64>>),
    /// All keys. The scatter separates popular rows, differently in each table.
    Scattered(Vec<Scatter>),
}

impl PopularKeys {
    fn key(&self, table: usize, rank: u64) -> u64 {
        match self {
            Self::Hashed(keys) => keys[table][rank as usize],
            Self::Scattered(scatters) => scatters[table].position(rank),
        }
    }
}

impl OurLookups {
    fn new(engine: &OurEngine, dim: usize, rows: usize) -> Result<Self> {
        let format = RowFormat::new(engine.codec, dim, 0).context("--dim: no such row")?;
        let mut encoded = vec![0; format.row_bytes()];
        let values: Vec<f32> = (0..dim).map(|i| (i % 7) as f32).collect();
        format.encode(&values, &mut encoded)?;

        let samples = SampleRows::repeated(&encoded);
        let in_cache = |cache| OurTables::Cached(Box::new(cache));
        let scatters = (0..TABLES).map(|table| Scatter::of_table(table, rows as u64));
        let all = PopularKeys::Scattered(scatters.collect());
        let (tables, keys) = match engine.place {
            RowPlace::Cached => (in_cache(FilledCache::whole(rows, &samples)?.cache), all),
            RowPlace::Hashed => {
                let half = FilledCache::hashed(rows, rows.div_ceil(2), &samples)?;
                let enough = half.keys.iter().all(|keys| keys.len() >= popular(rows));
                ensure!(enough, "--rows {rows}: too few for a hashed cache, its sets overflow");
                (in_cache(half.cache), PopularKeys::Hashed(half.keys))
            }
            RowPlace::Resident => {
                let table = || Resident::indexed(format.row_bytes(), &encoded.repeat(rows));
                (OurTables::Resident((0..TABLES).map(|_| table()).collect()), all)
            }
        };

        Ok(Self {
            format,
            tables,
            default_row: vec![0.0; dim],
            misses: MissList::new(16, format.row_bytes()),
            statuses: vec![LookupStatus::default(); batch_max()],
            out: Device::Cpu.host_memory(batch_max() * TABLES * dim)?,
            keys,
        })
    }

    fn feature<'a>(
        format: RowFormat,
        tables: &'a OurTables,
        default_row: &'a [f32],
        table: usize,
    ) -> FeatureView<'a> {
        FeatureView {
            id: table as u16,
            table: table as u16,
            format,
            keys_end: None,
            default_row,
            pooling: Pooling::Sum,
            rows: match tables {
                OurTables::Cached(cache) => RowStore::Cached(cache),
                OurTables::Resident(tables) => RowStore::Resident(&tables[table]),
            },
            column: table * format.dim(),
            width: format.dim(),
        }
    }

    /// Returns the CPU time of each timed call, µs.
    fn run(&mut self, calls: &Calls) -> Result<Vec<f64>> {
        let (dim, batch) = (self.format.dim(), calls.shape.batch);
        let requested = batch * calls.shape.hotness * TABLES;
        let mut times = Vec::with_capacity(calls.ranks.len());
        let drawn = calls.keys(|table, rank| self.keys.key(table, rank));

        for keys in &drawn {
            let statuses = &mut self.statuses[..batch];
            statuses.fill(LookupStatus::default());

            let start = cpu_us();
            let (isa, prefetch) = (Isa::detect(), FeaturePrefetch::new(requested, TABLES));
            let (format, tables, default_row) = (self.format, &self.tables, &self.default_row);
            let feature = |t: usize| {
                let bags = Bags::new(&keys[t], &calls.offsets);
                (Self::feature(format, tables, default_row, t), bags)
            };
            for t in 0..TABLES {
                prefetch.prefetch(isa, t, feature);
                let mut input = Input { data: &mut self.out, stride: TABLES * dim };
                let (feature, bags) = feature(t);
                feature.query(isa, bags, 0, &mut input, &mut self.misses, statuses);
            }
            times.push(cpu_us() - start);

            let fresh: u32 = statuses.iter().map(|s| s.fresh).sum();
            ensure!(fresh as usize == requested, "{fresh} of {requested} rows were in memory");
        }
        times.remove(0);
        Ok(times)
    }
}

/// PyTorch and FBGEMM.
pub struct LookupPeers {
    peer: Peer,
    rows: usize,
    /// The program's description of itself.
    pub about: PeerAbout,
}

impl LookupPeers {
    /// Starts the program with tables of `rows` rows of `dim` columns.
    ///
    /// # Errors
    /// The Python environment is missing, or the program refuses.
    pub fn start(venv: &Path, dim: usize, rows: usize) -> Result<Self> {
        let mut peer = Peer::start(venv, peer::LOOKUPS)?;
        let about =
            peer.request("setup", &json!({ "tables": TABLES, "rows": rows, "dim": dim }))?;
        Ok(Self { peer, rows, about })
    }

    fn times(&mut self, engine: &str, shape: Shape, calls: usize, seed: usize) -> Result<Vec<f64>> {
        let options = json!({
            "engine": engine,
            "rows": shape.rows_requested(self.rows),
            "keys": shape.keys,
            "hotness": shape.hotness,
            "batch": shape.batch,
            "calls": calls,
            "seed": seed,
        });
        Ok(self.peer.request::<RoundTimes>("round", &options)?.times_us)
    }
}

/// All engines at one row width.
pub struct Engines {
    dim: usize,
    rows: usize,
    ours: Vec<OurLookups>,
    peers: Option<LookupPeers>,
    reads: Vec<RowReads>,
}

impl Engines {
    /// Fills the tables of our engines and of the reads: `rows` rows of `dim` columns each.
    ///
    /// # Errors
    /// The rows do not fit in memory.
    pub fn new(dim: usize, rows: usize, peers: Option<LookupPeers>) -> Result<Self> {
        let ours = OURS.iter().map(|engine| OurLookups::new(engine, dim, rows));
        let ours = ours.collect::<Result<_>>()?;
        let reads = READS.iter().map(|(_, codec)| RowReads::new(rows, codec.row_bytes(dim)));
        Ok(Self { dim, rows, ours, peers, reads: reads.collect() })
    }

    /// Measures `rounds` rounds at `shape`, in which each engine that has these keys has one turn.
    /// Returns the best of each engine.
    ///
    /// # Errors
    /// A row is missing, or a peer fails.
    pub fn measure(
        &mut self,
        shape: Shape,
        rounds: usize,
        rng: &mut StdRng,
    ) -> Result<Vec<LookupMeasurement>> {
        let peers = self.peers.iter().flat_map(|p| p.about.engines.clone());
        let peers: Vec<String> = peers.collect();
        let ours = OURS.iter().zip(&mut self.ours).filter(|(engine, _)| engine.has_keys_of(shape));
        let (ours, mut lookups): (Vec<_>, Vec<_>) = ours.unzip();
        let ours = ours.into_iter().map(|engine| engine.name.to_owned());
        let reads = READS.iter().map(|(name, _)| (*name).to_owned());
        let names: Vec<String> = ours.chain(peers.clone()).chain(reads).collect();
        let calls = (ROUND_KEYS / (shape.batch * shape.hotness)).clamp(5, 400);
        let mut best = vec![BestTimes::default(); names.len()];

        for round in 0..rounds {
            let drawn = Calls::draw(shape, self.rows, calls, rng)?;
            let mut times = Vec::with_capacity(names.len());
            for lookups in &mut lookups {
                times.push(lookups.run(&drawn)?);
            }
            if let Some(running) = &mut self.peers {
                for name in &peers {
                    times.push(running.times(name, shape, calls, round)?);
                }
            }
            times.extend(self.reads.iter().map(|reads| reads.run(&drawn)));
            best.iter_mut().zip(times).for_each(|(best, times)| best.add_round(times));
        }

        let figures = |(engine, best)| {
            LookupMeasurement::Measured(LookupFigures::new(engine, self.dim, shape, best))
        };
        Ok(names.into_iter().zip(best).map(figures).collect())
    }
}

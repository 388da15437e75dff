"""Tiny models of all nine families, with random seeded weights, for tests of the importer and
of the request path.

Between them they have sum, mean and no pooling, hotness up to 4, and a table that two features
share. They also have sparse u64 keys with each kind of default row, and dims that are no power of
two. They are never trained: their labels are drawn from their scores.
"""

import random
from pathlib import Path

import torch

from ..embeddings import Embeddings, scores
from ..model_files import export_model
from ..models import DLRM, DCNv2, DeepFM, WideDeep, init_xavier
from ..samples import Sample
from ..schema import Feature, Input, Schema, Table
from ..sequence_models import BST, DIEN, DIN, HSTU, MMoE

DENSE = ("speed", "temperature", "fuel")
PROBES = 32


def sparse_keys(rows, seed):
    """Returns distinct u64 keys in random order: small ones, large ones, and one above
    2^63 (negative as i64)."""
    rng = random.Random(seed)
    small = [7 * row for row in range(rows // 2)]
    big = rng.sample(range(1 << 40, 1 << 62), rows - len(small) - 1)
    keys = [*small, *big, (1 << 63) + 12345]
    rng.shuffle(keys)
    return tuple(keys)


def dlrm():
    """Dim 8; sparse keys with a default row of its own; access counts."""
    default = (0.5, -0.25, 0.125, 0.0, -0.5, 0.75, -1.0, 0.25)
    tables = (
        Table("city", 40, 8, codec="f32", counted=True),
        Table("road", 3, 8, codec="f32", placement="resident", counted=True),
        Table("genre", 20, 8, codec="f32", counted=True),
        Table(
            "song", 120, 8, keys=sparse_keys(120, 1), default=default, codec="f32",
            placement="cached", counted=True
        ),
        Table("hour", 24, 8, codec="f32", counted=True),
        Table("artist", 61, 8, codec="f32", placement="cached", counted=True),
    )
    features = (
        Feature("city", "city"),
        Feature("road", "road"),
        Feature("genre", "genre", "mean", 3),
        Feature("song", "song", "sum", 4),
        Feature("hour", "hour"),
        Feature("artist", "artist", "mean", 2),
    )
    inputs = (Input("dense"), Input("emb", tuple(f.name for f in features), stacked=True))
    schema = Schema("tiny-dlrm", DENSE, inputs, tables, features)
    return schema, DLRM(len(DENSE), len(features), 8, bottom=[12], top=[16, 8])


def dcnv2():
    """Dim 4; the table `place` is shared by two features with different pooling, not
    in the tables' order."""
    tables = (
        Table("place", 150, 4, codec="f32", placement="cached"),
        Table("driver", 90, 4, codec="f32", placement="cached"),
        Table("weather", 5, 4, codec="f32", placement="resident"),
        Table("day", 7, 4, codec="f32"),
        Table("brand", 33, 4, codec="f32"),
        Table("tag", 64, 4, codec="f32"),
    )
    features = (
        Feature("recent_places", "place", "mean", 4),
        Feature("driver", "driver"),
        Feature("weather", "weather"),
        Feature("day", "day"),
        Feature("brand", "brand", "sum", 2),
        Feature("tags", "tag", "sum", 4),
        Feature("destination", "place"),
    )
    inputs = (Input("dense"), Input("emb", tuple(f.name for f in features), stacked=True))
    schema = Schema("tiny-dcnv2", DENSE, inputs, tables, features)
    return schema, DCNv2(len(DENSE), len(features), 4, bottom=[8], crosses=2, rank=6, top=[12])


def deepfm():
    """Each feature has two tables: `<name>_first` of dim 1, and `<name>` of dim 5."""
    kinds = (
        ("city", 40, "sum", 1), ("genre", 20, "mean", 3), ("song", 100, "sum", 2),
        ("hour", 24, "sum", 1)
    )
    tables, features = [], []
    for name, rows, pooling, hotness_max in kinds:
        for table, dim in ((f"{name}_first", 1), (name, 5)):
            tables.append(Table(table, rows, dim, codec="f32"))
        features.append(Feature(name, (f"{name}_first", name), pooling, hotness_max))
    first, second = (tuple(f"{f.name}@{f.tables[n]}" for f in features) for n in (0, 1))
    inputs = (Input("dense"), Input("first", first), Input("second", second, stacked=True))
    schema = Schema("tiny-deepfm", DENSE, inputs, tuple(tables), tuple(features))
    return schema, DeepFM(len(DENSE), len(kinds), 5, deep=[12, 8])


def wide_deep():
    """Mixed dims; `last_songs` is not pooled: 3 rows of dim 6 side by side; sparse keys whose
    default row is the mean."""
    tables = (
        Table("city_weight", 40, 1, codec="f32"),
        Table("hour_weight", 24, 1, codec="f32", placement="resident"),
        Table("city", 40, 4, codec="f32", default=(0.5, -0.5, 0.25, -0.25)),
        Table(
            "song", 110, 6, keys=sparse_keys(110, 2), default="mean", codec="f32",
            placement="cached"
        ),
        Table("genre", 20, 8, codec="f32"),
        Table("tag", 64, 5, codec="f32", placement="cached"),
    )
    features = (
        Feature("city_wide", "city_weight"),
        Feature("hours_wide", "hour_weight", "sum", 4),
        Feature("city", "city"),
        Feature("last_songs", "song", "none", 3),
        Feature("genre", "genre", "mean", 3),
        Feature("tags", "tag", "sum", 4),
    )
    wide, deep = ("city_wide", "hours_wide"), ("city", "last_songs", "genre", "tags")
    inputs = (Input("dense"), Input("wide", wide), Input("deep", deep))
    schema = Schema("tiny-wide-deep", DENSE, inputs, tables, features)
    width = sum(schema.width(name) for name in deep)
    return schema, WideDeep(len(DENSE), width, deep=[16, 8])


def mmoe():
    """Mixed dims, one after the other; two outputs, and only a click tells whether it
    led to a conversion."""
    tables = (
        Table("city", 40, 4, codec="f32"),
        Table(
            "song", 110, 6, keys=sparse_keys(110, 3), default="mean", codec="f32",
            placement="cached"
        ),
        Table("tag", 64, 5, codec="f32", placement="cached"),
    )
    features = (
        Feature("city", "city"), Feature("song", "song", "mean", 3),
        Feature("tags", "tag", "sum", 4)
    )
    inputs = (Input("dense"), Input("emb", tuple(f.name for f in features)))
    schema = Schema("tiny-mmoe", DENSE, inputs, tables, features, outputs=("ctr", "cvr"))
    return schema, MMoE(len(DENSE), 15, experts=3, expert=[12, 8], tower=[6])


def with_history(family, network, length, dim):
    """A target and a history of the same table, which is not pooled; an absent song
    has the zero row."""
    tables = (Table("song", 130, dim, keys=sparse_keys(130, 4), codec="f32", placement="cached"),)
    features = (Feature("song", "song"), Feature("last_songs", "song", "none", length))
    inputs = (Input("dense"), Input("target", ("song",)), Input("history", ("last_songs",)))
    return Schema(f"tiny-{family}", DENSE, inputs, tables, features), network


def din():
    return with_history("din", DIN(len(DENSE), 5, 6, hidden=8, top=[12]), 5, 6)


def dien():
    return with_history("dien", DIEN(len(DENSE), 4, 6, hidden=8, top=[12]), 4, 6)


def bst():
    return with_history("bst", BST(len(DENSE), 5, 8, heads=2, hidden=12, top=[12]), 5, 8)


def hstu():
    return with_history("hstu", HSTU(len(DENSE), 5, 8, heads=2, top=[12]), 5, 8)


FAMILIES = {
    "dlrm": dlrm,
    "dcnv2": dcnv2,
    "deepfm": deepfm,
    "wide_deep": wide_deep,
    "mmoe": mmoe,
    "din": din,
    "dien": dien,
    "bst": bst,
    "hstu": hstu,
}


def random_bag(rng, table, hotness_max):
    """Keys of one feature: empty in one of five; with hotness, a key twice in one of three; sparse
    keys may be unknown."""
    if rng.random() < 0.2:
        return []
    keys = table.keys or range(table.rows)
    bag = [rng.choice(keys) for _ in range(rng.randint(1, hotness_max))]
    if len(bag) > 1 and rng.random() < 0.33:
        bag[-1] = bag[0]
    if table.keys and rng.random() < 0.2:
        bag[0] = 999_999_999  # a key without a row: the default row
    return bag


def random_samples(schema, seed, count=PROBES):
    """Makes edge cases. Sample 1 has no keys. Sample 2 has an empty list for each feature, which
    must give the same score. Sample 3 has the highest key of each table."""
    rng = random.Random(seed)
    samples = [Sample([0.0] * len(schema.dense_features)) for _ in range(count)]
    samples[1].sparse = {feature.name: [] for feature in schema.features}
    for sample in samples[2:]:
        sample.dense = [round(rng.gauss(0, 1), 3) for _ in schema.dense_features]
        bags = {
            f.name: random_bag(rng, schema.table(f.tables[-1]), f.hotness_max)
            for f in schema.features
        }
        sample.sparse = {name: bag for name, bag in bags.items() if bag}
    tables = {f.name: schema.table(f.tables[-1]) for f in schema.features}
    samples[2].sparse = {
        name: [max(table.keys or [table.rows - 1])] for name, table in tables.items()
    }
    return samples


def export_family(family, out):
    torch.manual_seed(2024)
    schema, network = FAMILIES[family]()
    init_xavier(network)
    embeddings = Embeddings(schema, std=0.5)
    counts = {table.name: torch.randint(0, 1000, (table.rows,)) for table in schema.tables}
    samples = random_samples(schema, seed=family)
    rng = random.Random(family)
    for sample, score in zip(samples, scores(embeddings, network, samples)):
        sample.score = score
        if not isinstance(score, dict):
            sample.label = int(rng.random() < score)
            continue
        sample.label = {"ctr": int(rng.random() < score["ctr"])}
        if sample.label["ctr"]:
            sample.label["cvr"] = int(rng.random() < score["cvr"])
    export_model(embeddings, network, samples, Path(out) / family, counts)


def export_all(out):
    for family in FAMILIES:
        export_family(family, out)
        print(f"{family}: written to {Path(out) / family}")

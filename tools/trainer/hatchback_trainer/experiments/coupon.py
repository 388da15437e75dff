"""Trains a DLRM on the in-vehicle coupon data (seconds on one core) and exports it
with its held-out samples.

The model, its scores and its split depend only on the CSV and the seed. Training never
uses a held-out row.
"""

import json
import random
from pathlib import Path

import torch
from torch.nn import functional as F

from ..embeddings import Embeddings, make_batch, scores
from ..model_files import export_model
from ..models import DLRM
from ..samples import write_lines
from . import coupon_data as data
from .metrics import auc, logloss

SEED = 7
EPOCHS = 5  # this and the decay were chosen on a part of the training rows
BATCH = 128
RATE = 0.001
EMBEDDING_DECAY = 3.0
PROBES = 64

ATTRIBUTION = """\
The tables and the dense network in this folder were trained on, and the sample files were \
derived from, the data set

    In-Vehicle Coupon Recommendation. UCI Machine Learning Repository, data set 603. \
doi 10.24432/C5GS4P.
    Wang, Rudin, Doshi-Velez, Liu, Klampfl, MacNeille: A Bayesian Framework for Learning \
Rule Sets for
    Interpretable Classification. Journal of Machine Learning Research 18 (2017).

Licence of the data set: Creative Commons Attribution 4.0 International (CC BY 4.0),
https://creativecommons.org/licenses/by/4.0/

Changes: values were mapped to integer keys (vocabulary.json has the values) and numbers, \
columns were combined into
hashed keys, the rows were split into a training and a held-out part, and a model's score \
was added to each row.
"""


def scale_of(samples):
    """Returns the mean and the standard deviation of each dense feature, `[nd]` each."""
    dense = torch.tensor([sample.dense for sample in samples])  # [samples, nd]
    return dense.mean(dim=0), dense.std(dim=0)


def fold_scale(linear, mean, std):
    """Changes a trained layer so that its input is `x` instead of `(x - mean) / std`."""
    with torch.no_grad():
        linear.weight /= std
        linear.bias -= linear.weight @ mean


def train_epoch(embeddings, network, optimizer, samples, scale):
    mean, std = scale
    for start in range(0, len(samples), BATCH):
        part = samples[start : start + BATCH]
        batch = make_batch(embeddings.schema, part)
        batch.dense = (batch.dense - mean) / std
        label = torch.tensor([[float(sample.label)] for sample in part])  # [B, 1]
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(network(*embeddings(batch)), label)
        loss.backward()
        optimizer.step()


def train(schema, samples):
    torch.manual_seed(SEED)
    embeddings = Embeddings(schema, std=0.1)
    network = DLRM(
        len(schema.dense_features), len(schema.features), data.DIM, bottom=[32], top=[64, 32]
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": embeddings.parameters(), "weight_decay": EMBEDDING_DECAY},
            {"params": network.parameters()},
        ],
        lr=RATE,
    )
    scale = scale_of(samples)
    order, rng = list(samples), random.Random(SEED)
    for _ in range(EPOCHS):
        rng.shuffle(order)
        train_epoch(embeddings, network, optimizer, order, scale)
    fold_scale(network.bottom[0], *scale)
    return embeddings, network


def key_counts(schema, samples):
    """Maps each table name to I64 `[rows]`: the occurrences of each key in the samples."""
    counts = {table.name: torch.zeros(table.rows, dtype=torch.int64) for table in schema.tables}
    for feature in schema.features:
        keys = [key for sample in samples for key in sample.sparse.get(feature.name, ())]
        for table in feature.tables:
            counts[table] += torch.bincount(torch.tensor(keys), minlength=len(counts[table]))
    return counts


def add_scores(embeddings, network, samples):
    for sample, score in zip(samples, scores(embeddings, network, samples)):
        sample.score = score


def report(name, samples):
    labels, values = [sample.label for sample in samples], [sample.score for sample in samples]
    print(
        f"{name}: {len(samples)} samples, AUC {auc(labels, values):.4f}, "
        f"log loss {logloss(labels, values):.4f}"
    )


def train_and_export(csv_path, out):
    rows = data.read_rows(csv_path)
    words = data.vocabulary(rows)
    train_samples, held_out = data.split(rows, words)
    embeddings, network = train(data.schema(words), train_samples)
    for name, samples in (("training", train_samples), ("held out", held_out)):
        add_scores(embeddings, network, samples)
        report(name, samples)
    probe = held_out[:: len(held_out) // PROBES][:PROBES]
    export_model(embeddings, network, probe, out, key_counts(embeddings.schema, train_samples))
    write_lines(Path(out) / "heldout.jsonl", held_out)
    (Path(out) / "vocabulary.json").write_text(json.dumps(words, indent=1) + "\n", encoding="ascii")
    (Path(out) / "ATTRIBUTION.txt").write_text(ATTRIBUTION, encoding="ascii")
    print(f"coupon: written to {out}")

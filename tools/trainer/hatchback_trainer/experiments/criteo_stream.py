"""A Criteo-shaped stream of samples whose truth drifts: 13 dense and 26 categorical
features with power-law keys.

Every key has a weight in the label's logit that swings slowly, and the large features get new keys
all the time. It replaces click logs that may not be redistributed; its figures say nothing about
real ones. The same seed gives the same stream.
"""

import numpy as np

from ..samples import Sample
from .flights import Stream

CATEGORIES = 26
DENSE = tuple(f"i{number}" for number in range(1, 14))
ROWS = (20_000, 5_000, 1_000, 200, 50, 10)  # the features take turns through these sizes
ALPHA = 1.05
BASE, WINDOWS, WINDOW = 60_000, 12, 4_000
NEW_KEYS = 0.01  # share of a large feature's keys that a window replaces by new ones


def mixed(words):
    """Returns 64 well-mixed bits of u64 words (the finalizer of SplitMix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def unit(keys, purpose):
    """Returns a number in 0..1 for each key."""
    return (mixed(keys ^ np.uint64(purpose << 56)) >> np.uint64(11)).astype(np.float64) / (1 << 53)


def weight(keys, time):
    """Returns the weight of each key at a time, which counts windows: half
    is fixed, half swings."""
    swing = np.sin(6.28 * unit(keys, 2) + time * (0.1 + 0.4 * unit(keys, 3)))
    return (unit(keys, 1) - 0.5) + 0.5 * swing


def draw(rng, feature, count, time):
    """Returns keys of a feature: the rank follows a power law, and a rank's
    key changes with time."""
    rows = ROWS[feature % len(ROWS)]
    rank = (
        np.floor(
            (rng.random(count) * ((rows + 1) ** (1 - ALPHA) - 1) + 1) ** (1 / (1 - ALPHA))
        ).astype(np.uint64)
        - np.uint64(1)
    )
    age = (
        np.floor(NEW_KEYS * time + unit(rank, 5)).astype(np.uint64) if rows >= 5_000
        else np.zeros(count, np.uint64)
    )
    return mixed((np.uint64(feature + 1) << np.uint64(48)) + (age << np.uint64(32)) + rank)


def samples_at(rng, count, time):
    """Returns samples of one moment."""
    # Shape [count, 26].
    keys = np.stack([draw(rng, feature, count, time) for feature in range(CATEGORIES)], axis=1)
    dense = rng.normal(size=(count, len(DENSE))).round(3)
    logit = weight(keys, time).sum(axis=1) * 0.8 + dense[:, :3].sum(axis=1) * 0.3 - 0.8
    labels = rng.random(count) < 1 / (1 + np.exp(-logit))
    rows = zip(dense.tolist(), keys.tolist(), labels.tolist())
    return [
        Sample(one, {f"c{at + 1}": [key] for at, key in enumerate(some)}, int(label))
        for one, some, label in rows
    ]


def criteo_stream(seed=1):
    """Returns the stream: a base, in ten steps up to time 0, and the windows after it."""
    rng = np.random.default_rng(seed)
    base = [sample for step in range(10) for sample in samples_at(rng, BASE // 10, step - 10)]
    windows = [samples_at(rng, WINDOW, time) for time in range(WINDOWS)]
    return Stream(
        "criteo-stream", tuple(f"c{number + 1}" for number in range(CATEGORIES)), DENSE, base,
        windows
    )

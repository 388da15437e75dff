#!/usr/bin/env python3
"""Writes `cross.json`: buckets, the values of the columns, and the bucket that Keras returns.

It needs keras 3.15.1 and tensorflow 2.21.0, which made the file of the tree.
"""

import json
import pathlib

import keras
import tensorflow as tf

TEXTS = ["", "a", "Rome", "Köln", "user 17", "x" * 40]
INTEGERS = [0, 1, -1, 17, 2**40, -(2**63)]


def tensor(value):
    return tf.constant([value], tf.string if isinstance(value, str) else tf.int64)


def rows():
    pairs = [(a, b) for a in TEXTS for b in ("", "b", "Ulm")]
    pairs += [(a, b) for a in INTEGERS for b in ("", "Rome", 3, -4)]
    for buckets in (7, 1000, 2**31 - 1):
        layer = keras.layers.HashedCrossing(num_bins=buckets)
        for values in [*pairs, ("a", "b", 5)]:
            yield [buckets, list(values), int(layer(tuple(map(tensor, values)))[0])]


path = pathlib.Path(__file__).with_suffix(".json")
lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows())
path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")

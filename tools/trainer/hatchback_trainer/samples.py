"""Requests as lines of JSON, each with its label and PyTorch's score.

`{"dense": [0.5, -1.0], "sparse": {"visits": [1, 7, 7]}, "label": 1, "score": 0.4375123}`; a feature
that is missing from "sparse" is an empty bag. Nothing here knows what a key or a dense value means.
"""

import json
import struct
from dataclasses import dataclass, field


@dataclass
class Sample:
    dense: list  # nd floats, in the order of Schema.dense_features
    sparse: dict = field(default_factory=dict)  # feature name -> list of keys
    label: float | dict | None = None  # with several outputs a dict: output name -> label
    score: float | dict | None = None
    # Name of a weighted feature -> list of a weight for each key.
    weights: dict = field(default_factory=dict)


def shortest(value):
    """`value` rounded to float32, as the float whose decimal form is the shortest that reads
    back as that float32."""
    single = struct.pack("<f", value)
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if struct.pack("<f", float(text)) == single:
            break
    return float(text)


def to_line(sample):
    fields = {"dense": sample.dense, "sparse": sample.sparse}
    if sample.weights:
        fields["weights"] = {
            name: [shortest(weight) for weight in bag] for name, bag in sample.weights.items()
        }
    if sample.label is not None:
        fields["label"] = sample.label
    if isinstance(sample.score, dict):
        fields["score"] = {name: shortest(score) for name, score in sample.score.items()}
    elif sample.score is not None:
        fields["score"] = shortest(sample.score)
    return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"


def write_lines(path, samples):
    with open(path, "w", encoding="ascii", newline="\n") as file:
        file.writelines(map(to_line, samples))

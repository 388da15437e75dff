"""The models of FuxiCTR's zoo, from a checkout of its repository or its unpacked source archive.

The archive of the package index has the models of long histories alone, the repository all of them.
"""

import importlib.util
import inspect
import sys
from pathlib import Path

import torch

from data import DIM, LENGTH, ROWS, Case
from packages import stand_in

SOURCES = {"user": "user", "item": "item", "city": "context"}
# What a class needs beside its defaults.
OPTIONS = {
    "APG_DCNv2": {"stacked_dnn_hidden_units": [16], "parallel_dnn_hidden_units": [16], "rank_k": 4},
    "APG_DeepFM": {"hidden_units": [16], "rank_k": 4},
    "BST": {"bst_target_field": "item", "bst_sequence_field": "history"},
    "DCNv2": {"stacked_dnn_hidden_units": [16], "parallel_dnn_hidden_units": [16]},
    "DIEN": {"dien_target_field": "item", "dien_sequence_field": "history",
             "dien_neg_seq_field": []},
    "DIN": {"din_target_field": "item", "din_sequence_field": "history"},
    "DMIN": {"target_field": "item", "sequence_field": "history", "neg_seq_field": None},
    "DMR": {"target_field": "item", "sequence_field": "history", "neg_seq_field": None,
            "context_field": None},
    "EDCN": {"num_cross_layers": 1},  # random ones of several layers flatten the scores
    "FGCNN": {"channels": [3, 3], "kernel_heights": [3, 3], "pooling_sizes": [2, 2],
              "recombined_channels": [2, 2], "dnn_hidden_units": [16]},
    "GDCN": {"dnn_hidden_units": [16]}, "GDCNP": {"dnn_hidden_units": [16]},
    "FinalMLP": {"fs1_context": ["user"], "fs2_context": ["item"]},
    "MMoE": {"task": ["binary_classification"] * 2, "num_tasks": 2},
    "PLE": {"task": ["binary_classification"] * 2, "num_tasks": 2},
    "PPNet": {"gate_priors": ["user"]},
    "ShareBottom": {"task": ["binary_classification"] * 2, "num_tasks": 2},
    "TransAct": {"target_item_field": "item", "sequence_item_field": "history"},
}
GIVEN = {
    "optimizer": "adam", "loss": "binary_crossentropy", "verbose": 0, "model_root": "/tmp",
    "metrics": [], "embedding_dim": DIM,
}
SEQUENCES = ("BST", "DIEN", "DIN", "DMIN", "DMR", "TransAct")


def feature_map(sequence, labels):
    """Returns the columns of the batch as the package describes them."""
    from fuxictr.features import FeatureMap

    made = FeatureMap("field", "/tmp")
    made.labels, made.default_emb_dim = labels, DIM
    for name, source in SOURCES.items():
        made.features[name] = {
            "source": source, "type": "categorical", "vocab_size": ROWS[name], "padding_idx": 0}
    if sequence:
        made.features["history"] = {
            "source": "user", "type": "sequence", "vocab_size": ROWS["item"], "padding_idx": 0,
            "max_len": LENGTH["history"], "share_embedding": "item"}
    else:
        made.features["genres"] = {
            "source": "item", "type": "sequence", "vocab_size": ROWS["genres"], "padding_idx": 0,
            "max_len": LENGTH["genres"], "feature_encoder": "layers.MaskedAveragePooling()"}
    made.num_fields = made.get_num_fields()
    made.total_features = sum(one["vocab_size"] for one in made.features.values())
    made.set_column_index()
    return made


def imported(folder, name):
    """Imports the package of a folder, each of which the zoo calls `src`, under its own name."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def classes(folder, name):
    from fuxictr.pytorch.models import BaseModel

    found = vars(imported(folder, name)).values()
    return [
        one for one in found if inspect.isclass(one) and issubclass(one, BaseModel)
        and one.__module__.startswith(f"{name}.")
    ]


def short_cases(root):
    """Returns the models whose batch is a dict of columns."""
    folders = sorted(one for one in root.glob("**/src") if not one.parent.name.endswith("_tf"))
    for place, folder in enumerate(folders):
        for kind in classes(folder, f"zoo{place}"):
            sequence, options = kind.__name__ in SEQUENCES, OPTIONS.get(kind.__name__, {})
            labels = ["label", "other"] if options.get("num_tasks") else ["label"]
            names = [*SOURCES, "history" if sequence else "genres"]
            build = lambda kind=kind, sequence=sequence, labels=labels, options=options: (
                kind(feature_map(sequence, labels), **GIVEN | options))
            batch = lambda rows, names=names: {name: rows[name] for name in names}
            outputs = {} if "num_tasks" in options else {"outputs": ["y_pred"]}
            yield Case("fuxictr", kind.__name__, build, batch, outputs, sequence)


def long_cases(root):
    """Returns the models of long histories. Their batch is a dict of the columns of the sample, one
    of the columns of its items, of which the last is the one to score, and a mask."""
    from fuxictr.features import FeatureMap

    def columns():
        made = FeatureMap("field", "/tmp")
        made.labels, made.default_emb_dim = ["label"], DIM
        for name in ("user", "city", "item"):
            source = "item" if name == "item" else "user"
            made.features[name] = {
                "source": source, "type": "categorical", "vocab_size": ROWS[name], "padding_idx": 0}
        made.num_fields = made.get_num_fields()
        made.set_column_index()
        return made

    def batch(rows):
        items = torch.cat([rows["history"], rows["item"][:, None]], dim=1)
        sample = {name: rows[name] for name in ("user", "city")}
        return sample, {"item": items}, (rows["history"] > 0).float()

    given = {"short_seq_len": 4, "topk": 3, "max_len": LENGTH["history"]}
    for place, folder in enumerate(sorted((root / "LongCTR").glob("*/"))):
        for kind in classes(folder, f"long{place}") if (folder / "__init__.py").exists() else []:
            known = inspect.signature(kind.__init__).parameters
            options = {name: value for name, value in given.items() if name in known}
            options |= OPTIONS["DCNv2"] if kind.__name__ == "DCNv2" else {}
            build = lambda kind=kind, options=options: kind(columns(), **GIVEN | options)
            yield Case("fuxictr", f"Long{kind.__name__}", build, batch, {}, True)


def fuxictr(folder):
    stand_in("ray")
    root = Path(folder) / "model_zoo"
    if not root.is_dir():
        raise SystemExit(f"--fuxictr {folder}: no folder model_zoo in it")
    sys.path.append(str(folder))  # its package fuxictr, if that is not installed
    return [*short_cases(root), *long_cases(root)]

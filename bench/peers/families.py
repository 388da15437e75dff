"""Runs eight model families in ONNX Runtime on one core, for `hatchback-bench request --peers`.

`hatchback_trainer` writes each family as `hatchback pack` reads it. The weights are random, and
the sizes are those of the family's paper or of MLPerf. ONNX Runtime gets the same network with the
tables inside. Each input of embedding vectors has one `Gather` from one table, which holds all
rows of the input. The keys that ONNX Runtime gets are rows of that table.
"""

import sys
from pathlib import Path

import peer

peer.restart_tuned()

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

DENSE = 13
TABLES = 26


class Trainer:
    """The modules of `hatchback_trainer` that are used here, and the families made of them."""

    def __init__(self, folder, rows):
        sys.path.insert(0, folder)
        from hatchback_trainer import embeddings, model_files, models, samples, schema
        from hatchback_trainer import sequence_models
        from hatchback_trainer.experiments import families

        self.embeddings, self.families, self.files, self.models = (
            embeddings, families, model_files, models
        )
        self.samples, self.schema, self.sequences, self.rows = (
            samples, schema, sequence_models, rows
        )

    def described(self, inputs, stacked, outputs):
        """Returns a schema. `inputs` maps the name of a network input to its features.

        Each feature is `(name, dim, keys)`.
        """
        s, listed = self.schema, [feature for features in inputs.values() for feature in features]
        tables = [
            s.Table(name, self.rows, dim, codec="f32", placement="cached")
            for name, dim, _ in listed
        ]
        features = [
            s.Feature(name, name, "sum" if keys == 1 else "none", keys)
            for name, _, keys in listed
        ]
        vectors = []
        for one, of in inputs.items():
            vectors.append(s.Input(one, tuple(name for name, _, _ in of), stacked and of[0][1] > 1))
        dense = tuple(f"int_{n}" for n in range(DENSE))
        all_inputs = (s.Input("dense"), *vectors)
        return s.Schema(
            "family", dense, all_inputs, tuple(tables), tuple(features), outputs=outputs
        )

    def one_key_each(self, dims, stacked=True, outputs=("logit",)):
        """26 features with one key each. `dims` maps the name of an input to its tables' dim."""
        inputs = {one: [(f"{one}_{n}", dim, 1) for n in range(TABLES)] for one, dim in dims.items()}
        return self.described(inputs, stacked, outputs)

    def with_history(self, length, dim):
        """A target and a history of at most `length` keys."""
        inputs = {"target": [("target", dim, 1)], "history": [("history", dim, length)]}
        return self.described(inputs, False, ("logit",))

    def all(self):
        """Maps the name of each family to its schema and its network."""
        m, s, n = self.models, self.sequences, TABLES
        dcnv2 = m.DCNv2(
            DENSE, n, 128, bottom=[512, 256], crosses=3, rank=512, top=[1024, 1024, 512, 256]
        )
        wide = self.one_key_each({"wide": 1, "deep": 32}, stacked=False)
        mmoe = self.one_key_each({"emb": 16}, stacked=False, outputs=("ctr", "cvr"))
        return {
            "DCNv2": (self.one_key_each({"emb": 128}), dcnv2),
            "DeepFM": (
                self.one_key_each({"first": 1, "second": 10}),
                m.DeepFM(DENSE, n, 10, [400, 400, 400]),
            ),
            "Wide & Deep": (wide, m.WideDeep(DENSE, n * 32, [1024, 512, 256])),
            "MMoE": (mmoe, s.MMoE(DENSE, n * 16, experts=8, expert=[256, 128], tower=[64])),
            "DIN": (self.with_history(50, 64), s.DIN(DENSE, 50, 64, hidden=80, top=[200, 80])),
            "DIEN": (self.with_history(20, 36), s.DIEN(DENSE, 20, 36, hidden=80, top=[200, 80])),
            "BST": (
                self.with_history(20, 64),
                s.BST(DENSE, 20, 64, heads=8, hidden=256, top=[1024, 512, 256]),
            ),
            "HSTU": (self.with_history(50, 64), s.HSTU(DENSE, 50, 64, heads=4, top=[256, 128])),
        }


def whole(folder, schema, embeddings):
    """Returns the network of `folder` with the tables inside.

    Its inputs are `dense` and `<input>.rows`.
    """
    model = onnx.load(folder / "dense.onnx")
    graph, nodes, inputs = (
        model.graph, [], [one for one in model.graph.input if one.name == "dense"]
    )
    for one in schema.inputs:
        if not one.features:
            continue
        weights = [embeddings.weights[schema.feature(name).table].detach() for name in one.features]
        dim, keys = (
            weights[0].shape[1], sum(schema.feature(name).hotness_max for name in one.features)
        )
        # The last row is that of a missing position.
        table = torch.cat([*weights, torch.zeros(1, dim)]).numpy()
        shape = np.array([-1, keys, dim] if one.stacked else [-1, keys * dim])
        table_name, rows, vectors, shape_name = (
            f"{one.name}.{part}" for part in ("table", "rows", "vectors", "shape")
        )
        graph.initializer.append(numpy_helper.from_array(table, table_name))
        graph.initializer.append(numpy_helper.from_array(shape, shape_name))
        inputs.append(helper.make_tensor_value_info(rows, TensorProto.INT64, ["batch", keys]))
        nodes.append(helper.make_node("Gather", [table_name, rows], [vectors], axis=0))
        nodes.append(helper.make_node("Reshape", [vectors, shape_name], [one.name]))

    nodes += graph.node
    scores = [f"{output}.score" for output in schema.outputs]
    nodes += [
        helper.make_node("Sigmoid", [output], [score])
        for output, score in zip(schema.outputs, scores)
    ]
    for part, values in (("node", nodes), ("input", inputs)):
        values = list(values)
        del getattr(graph, part)[:]
        getattr(graph, part).extend(values)
    del graph.output[:]
    graph.output.extend(
        helper.make_tensor_value_info(s, TensorProto.FLOAT, ["batch", 1]) for s in scores
    )
    return model.SerializeToString()


class Family:
    """One family: its files in `folder`, and its session in ONNX Runtime."""

    def __init__(self, trainer, schema, network, samples, folder):
        trainer.families.init_xavier(network)
        embeddings = trainer.embeddings.Embeddings(schema, std=0.5)
        rng = np.random.default_rng(1)
        self.feeds = {"dense": rng.standard_normal((samples, DENSE), np.float32)}
        keys = {}
        for one in schema.inputs:
            absent, columns = trainer.rows * len(one.features), []
            for number, feature in enumerate(map(schema.feature, one.features)):
                drawn = rng.integers(0, trainer.rows, (samples, feature.hotness_max))
                counts = rng.integers(1, feature.hotness_max + 1, samples)
                missing = np.arange(feature.hotness_max) >= counts[:, None]
                columns.append(np.where(missing, absent, drawn + number * trainer.rows))
                keys[feature.name] = [row[:count].tolist() for row, count in zip(drawn, counts)]
            if columns:
                self.feeds[f"{one.name}.rows"] = np.concatenate(columns, axis=1)

        lines = []
        for n in range(samples):
            bags = {name: bags[n] for name, bags in keys.items()}
            lines.append(trainer.samples.Sample(self.feeds["dense"][n].tolist(), bags))
        probe = lines[:32]
        for sample, score in zip(probe, trainer.embeddings.scores(embeddings, network, probe)):
            sample.score = score
        trainer.files.export_model(embeddings, network, probe, folder)
        trainer.samples.write_lines(folder / "requests.jsonl", lines)

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        model = whole(folder, schema, embeddings)
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, samples):
        """Returns the scores of a slice of the samples: `[samples, outputs]`."""
        scores = self.session.run(
            None, {name: values[samples] for name, values in self.feeds.items()}
        )
        return scores[0] if len(scores) == 1 else np.concatenate(scores, axis=1)


class Families:
    def setup(self, folder, trainer, rows, samples):
        torch.set_num_threads(1)
        torch.manual_seed(1)
        trainer, self.samples, self.families = Trainer(trainer, rows), samples, {}
        for number, (name, (schema, network)) in enumerate(trainer.all().items()):
            self.families[name] = Family(
                trainer, schema, network, samples, Path(folder) / str(number)
            )
        return {
            "engines": list(self.families),
            "about": f"onnxruntime {ort.__version__}, torch {torch.__version__}",
        }

    def round(self, engine, batch, calls, first):
        family = self.families[engine]

        def call(i):
            at = (first + i) * batch % (self.samples - batch + 1)
            family.run(slice(at, at + batch))

        return {"times_us": peer.times_us(call, calls)}

    def scores(self, engine, samples):
        return {"scores": self.families[engine].run(slice(0, samples)).ravel().tolist()}


peer.serve(Families())

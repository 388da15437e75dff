"""The package on the coupon model: the bits of `hatchback run`, every mistake, and updates."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import hatchback

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "tools/demo/coupon"


def columns(model, samples):
    """Returns the samples as the arrays of a request."""
    dense = np.array([s["dense"] for s in samples], np.float32)
    bags = [s.get("sparse", {}).get(f, []) for f in model.features for s in samples]
    keys = np.array([key for bag in bags for key in bag], np.uint64)
    return dense, keys, np.cumsum([0] + [len(bag) for bag in bags])


def answers_of_run(bundle, samples):
    """Returns the answers of `hatchback run`."""
    lines = "\n".join(
        json.dumps({k: v for k, v in s.items() if k in ("dense", "sparse")}) for s in samples
    )
    program = [sys.executable, "-m", "hatchback", "run", os.fspath(bundle)]
    done = subprocess.run(program, input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def tanh_network(width=1):
    """Returns an ONNX file whose output `score` is the tanh of its input `dense`, `[n, width]`."""

    def field(number, value):
        if isinstance(value, int):
            return bytes([number << 3, value])
        value = value.encode() if isinstance(value, str) else value
        return bytes([number << 3 | 2, len(value)]) + value

    shape = field(1, field(2, "n")) + field(1, field(1, width))
    float32 = field(2, field(1, field(1, 1) + field(2, shape)))
    node = field(1, "dense") + field(2, "score") + field(4, "Tanh")
    dense, score = field(1, "dense") + float32, field(1, "score") + float32
    graph = field(1, node) + field(2, "tanh") + field(11, dense) + field(12, score)
    return field(1, 8) + field(7, graph) + field(8, field(2, 17))


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.bundle = cls.folder / "coupon.hatch"
        cls.report = hatchback.pack(DEMO / "model.toml", cls.bundle)
        cls.samples = [json.loads(line) for line in (DEMO / "probe.jsonl").read_text().splitlines()]

    def open(self):
        model = hatchback.Model.open(self.bundle)
        self.addCleanup(model.close)
        return model

    def test_scores_are_those_of_the_program_to_the_bit(self):
        model = self.open()
        run = answers_of_run(self.bundle, self.samples)
        for some in (1, 7, len(self.samples)):
            answer = model.score(*columns(model, self.samples[:some]))
            self.assertEqual(answer.generation, 1)
            self.assertEqual(
                (answer.scores.shape, answer.scores.dtype), ((some, model.outputs), np.float32)
            )
            for score, status, expected in zip(answer.scores, answer.statuses, run):
                bits = [struct.pack("f", value) for value in expected["score"]]
                self.assertEqual([struct.pack("f", value) for value in score], bits)
                names = ("fresh", "defaulted", "absent", "damaged", "late")
                self.assertEqual(status.tolist(), [int(expected["status"][name]) for name in names])

    def test_the_best_samples_have_positions_and_scores(self):
        model = self.open()
        request = columns(model, self.samples)
        whole = model.score(*request)
        self.assertIsNone(whole.positions)
        order = np.argsort(-whole.scores[:, 0], kind="stable")
        for k in (1, 10, len(self.samples) + 1):
            best = model.score(*request, top_k=k)
            np.testing.assert_array_equal(best.positions, order[:k])
            np.testing.assert_array_equal(best.scores, whole.scores[order[:k]])
            np.testing.assert_array_equal(best.statuses, whole.statuses.sum(0, keepdims=True))
        self.assertEqual(len(model.score(*request, top_k=1 << 70).positions), len(self.samples))
        for wrong in (0, -1, -(1 << 70)):
            with self.assertRaisesRegex(hatchback.RequestError, f"top_k is {wrong}, must be 1"):
                model.score(*request, top_k=wrong)
        with self.assertRaises(TypeError):
            model.score(*request, top_k="ten")

    def test_arrays_of_every_type_give_the_same(self):
        model = self.open()
        dense, keys, offsets = columns(model, self.samples[:5])
        expected = model.score(dense, keys, offsets).scores
        for key_type in (np.int64, np.uint64):
            for offset_type in (np.int64, np.int32, np.uint32):
                found = model.score(dense, keys.astype(key_type), offsets.astype(offset_type))
                np.testing.assert_array_equal(found.scores, expected)

    def test_mistakes_are_named(self):
        model = self.open()
        dense, keys, offsets = columns(model, self.samples[:3])
        wild = offsets.copy()
        wild[1] = 10_000
        negative = offsets.copy()
        negative[2] = -1
        late = offsets + 1
        request, width = hatchback.RequestError, dense.shape[1]
        self.assertTrue(issubclass(request, ValueError) and issubclass(request, hatchback.Error))
        sent, features = len(offsets), len(model.features)
        counts = f"values, must be {features} a sample and 1: {sent} for dense"
        for arguments, error, text in [
            ((dense.astype(np.float64), keys, offsets), TypeError, "dense: must be float32"),
            ((dense.astype(bool), keys, offsets), TypeError, "dense: must be float32"),
            ((dense.astype(object), keys, offsets), TypeError, "dense: must be float32"),
            ((np.asfortranarray(dense), keys, offsets), ValueError, "dense: is not C-contiguous"),
            ((dense, keys[::-1], offsets), ValueError, "keys: is not C-contiguous"),
            ((dense[:2], keys, offsets), request, rf"dense: has shape \[2, 7\], .* \[3, {width}\]"),
            ((dense.reshape(-1, 3), keys, offsets), request, r"dense: has shape \[7, 3\]"),
            ((dense.reshape(-1), keys, offsets), request, r"dense: has shape \[21\]"),
            ((dense[None], keys, offsets), request, r"dense: has shape \[1, 3, 7\]"),
            ((dense, keys.astype(np.float32), offsets), TypeError, "keys: must be int64 or uint64"),
            ((dense, keys.astype(np.int32), offsets), TypeError, "keys: must be int64 or uint64"),
            ((dense, keys.astype(bool), offsets), TypeError, "keys: must be int64 or uint64"),
            ((dense, keys[None], offsets), request, "keys: has shape .* must have one axis"),
            ((dense, keys[:-1], offsets), request, "offsets: end at .* keys"),
            ((dense, np.append(keys, keys[:1]), offsets), request, "offsets: end at .* keys"),
            ((dense, keys, offsets[:-1]), request, f"offsets: {sent - 1} {counts}"),
            ((dense, keys, offsets[:1]), request, f"offsets: 1 {counts}"),
            ((dense, keys, offsets[:0]), request, f"offsets: 0 {counts}"),
            ((dense, keys[: offsets[features]], offsets[: features + 1]), request,
             rf"dense: .* with {features + 1} offsets the model takes \[1, {width}\]"),
            ((dense, keys, late), ValueError, "offsets: start at 1, must start at 0"),
            ((dense, keys, offsets.astype(np.uint64)), TypeError, "offsets: must be int64"),
            ((dense, keys, wild), request, "offsets 0 to 10000 of sample 0"),
            ((dense, keys, negative), ValueError, "offsets: -1 is not an offset"),
            ((dense * np.nan, keys, offsets), request, "is NaN"),
            ((dense, keys, None), TypeError, "offsets: must be an array"),
            ((dense, list(keys), offsets), TypeError, "keys: must be an array"),
        ]:
            with self.assertRaisesRegex(error, text):
                model.score(*arguments)
        for weights in (np.ones(len(keys), np.float32), np.zeros(0, np.float32)):
            with self.assertRaisesRegex(request, "weights: the model has no feature with weights"):
                model.score(dense, keys, offsets, weights=weights)
        with self.assertRaisesRegex(hatchback.RequestError, "timeout: "):
            model.score(dense, keys, offsets, timeout=-1.0)
        with self.assertRaisesRegex(hatchback.RequestError, "no feature `nothing`"):
            model.prefetch("nothing", keys)
        with self.assertRaisesRegex(hatchback.OpenError, "nowhere"):
            hatchback.Model.open("/nowhere", flash="/nowhere.flash")
        with self.assertRaisesRegex(hatchback.Error, "model.toml"):
            hatchback.pack("/nowhere/model.toml", self.folder / "x.hatch")

    def test_arrays_of_another_byte_order_are_refused(self):
        model = self.open()
        arrays = columns(model, self.samples[:3])
        model.score(*arrays)
        for at, name in enumerate(("dense", "keys", "offsets")):
            foreign = list(arrays)
            foreign[at] = arrays[at].astype(arrays[at].dtype.newbyteorder())
            with self.assertRaisesRegex(TypeError, f"{name}: is big-endian; pass array.astype"):
                model.score(*foreign)
            own = foreign[at].astype(foreign[at].dtype.newbyteorder("="))
            self.assertEqual(own.tobytes(), arrays[at].tobytes())
        with self.assertRaisesRegex(TypeError, "weights: is big-endian"):
            model.score(*arrays, weights=np.ones(3, ">f4"))
        with self.assertRaisesRegex(TypeError, "keys: is big-endian"):
            model.prefetch("age", np.array([1], ">i8"))

    def test_masked_values_are_refused(self):
        model = self.open()
        arrays = columns(model, self.samples[:3])
        for at, name in enumerate(("dense", "keys", "offsets")):
            masked = list(arrays)
            masked[at] = np.ma.array(arrays[at])
            model.score(*masked)
            masked[at][-1] = np.ma.masked
            with self.assertRaisesRegex(TypeError, f"{name}: has masked values; pass array.filled"):
                model.score(*masked)

    def test_a_model_without_sparse_features_takes_empty_offsets(self):
        folder = self.folder / "dense"
        folder.mkdir()
        (folder / "dense.onnx").write_bytes(tanh_network())
        (folder / "model.toml").write_text(
            'format = 1\nname = "dense"\nsequence = 1\ndense_features = ["speed"]\n'
            "table = []\nfeature = []\n"
            '[network]\nonnx = "dense.onnx"\noutput = "score"\nactivation = "none"\n'
            '[[network.input]]\nname = "dense"\ndense = true\n'
        )
        hatchback.pack(folder / "model.toml", folder / "dense.hatch")
        with hatchback.Model.open(folder / "dense.hatch") as model:
            dense, no_keys = np.array([[0.5], [-1]], np.float32), np.zeros(0, np.int64)
            for offsets in (np.zeros(0, np.int64), np.zeros(0, np.uint32), np.array([0])):
                scores = model.score(dense, no_keys, offsets).scores
                np.testing.assert_allclose(scores, np.tanh(dense), rtol=1e-5)
            for keys, offsets in (([], [1]), ([], [0, 0]), ([5], []), ([5], [0])):
                with self.assertRaisesRegex(hatchback.RequestError, "offsets: "):
                    model.score(dense, np.array(keys, np.int64), np.array(offsets, np.int64))

    def test_a_single_axis_of_dense_features_is_one_sample(self):
        model = self.open()
        dense, keys, offsets = columns(model, self.samples[:1])
        np.testing.assert_array_equal(
            model.score(dense[0], keys, offsets).scores, model.score(dense, keys, offsets).scores
        )
        with self.assertRaisesRegex(hatchback.RequestError, r"dense: has shape \[6\]"):
            model.score(dense[0, :-1].copy(), keys, offsets)

    def test_shared_dense_features_have_one_row_or_one_a_sample(self):
        folder = self.folder / "shared"
        shutil.copytree(DEMO, folder)
        names = self.open().dense_features
        text = (folder / "model.toml").read_text()
        for name in names[1:3]:
            text = text.replace(f'"{name}"', f'{{ name = "{name}", shared = true }}', 1)
        (folder / "model.toml").write_text(text)
        hatchback.pack(folder / "model.toml", folder / "shared.hatch")
        model = hatchback.Model.open(folder / "shared.hatch")
        self.addCleanup(model.close)
        self.assertEqual(model.shared_dense_features, names[1:3])
        self.assertEqual(model.dense_features, names[:1] + names[3:])

        dense, keys, offsets = columns(self.open(), self.samples[:5])
        dense[:, 1:3] = dense[0, 1:3]
        expected = self.open().score(dense, keys, offsets).scores
        own = np.ascontiguousarray(np.delete(dense, [1, 2], axis=1))
        shared = dense[0, 1:3].copy()
        for rows in (shared, shared[None], np.tile(shared, (5, 1))):
            found = model.score(own, keys, offsets, shared_dense=rows).scores
            np.testing.assert_allclose(found, expected, rtol=1e-5)
        other = np.tile(shared, (5, 1))
        other[3, 1] += 1
        with self.assertRaisesRegex(
                hatchback.RequestError, f"`{names[2]}` is shared: sample 3 differs"):
            model.score(own, keys, offsets, shared_dense=other)
        for wrong in (None, shared[:1], np.tile(shared, (4, 1))):
            with self.assertRaisesRegex(hatchback.RequestError, r"shared_dense: has shape .*\[2\]"):
                model.score(own, keys, offsets, shared_dense=wrong)

    def test_a_negative_key_is_the_u64_of_the_same_bits(self):
        folder = self.folder / "negative"
        folder.mkdir()
        held = [-1, -5, 7, -(2**63)]
        (folder / "tanh.onnx").write_bytes(tanh_network())
        np.save(folder / "values.npy", np.array([[0.25], [0.5], [0.75], [1]], np.float32))
        np.save(folder / "keys.npy", np.array(held, np.int64))
        (folder / "model.toml").write_text("""format = 1
name = "negative"
sequence = 1
dense_features = []

[network]
onnx = "tanh.onnx"
output = "score"
activation = "none"

[[network.input]]
name = "dense"
features = ["user"]

[[table]]
name = "users"
dim = 1
keys = "sparse"
codec = "f32"
source = { format = "npy", path = "values.npy", keys = "keys.npy" }

[[feature]]
name = "user"
table = "users"
pooling = "sum"
hotness_max = 1
""")
        bundle = self.folder / "negative.hatch"
        hatchback.pack(folder / "model.toml", bundle)
        asked = [*held, -6]
        run = answers_of_run(bundle, [{"sparse": {"user": [key]}} for key in asked])
        self.assertEqual([answer["status"]["absent"] for answer in run], [0, 0, 0, 0, 1])
        expected = np.array([answer["score"][0] for answer in run], np.float32)
        self.assertEqual(len(set(expected)), len(asked))
        dense, keys = np.zeros((len(asked), 0), np.float32), np.array(asked, np.int64)
        with hatchback.Model.open(bundle) as model:
            for form in (keys, keys.view(np.uint64)):
                scores = model.score(dense, form, np.arange(len(asked) + 1)).scores[:, 0]
                self.assertEqual(scores.tolist(), expected.tolist())
            self.assertEqual([model.key("user", key) for key in held], [k % 2**64 for k in held])
            # All rows are in memory, so nothing is queued; the form is accepted.
            self.assertEqual(model.prefetch("user", keys), 0)

    def test_weights_are_one_for_each_key(self):
        folder, bundle = self.folder / "weighted", self.folder / "weighted.hatch"
        shutil.copytree(DEMO, folder)
        text = (folder / "model.toml").read_text()
        text = text.replace('[probe]\nsamples = "probe.jsonl"\n', "")
        head, features = text.split("[[feature]]", 1)
        features = features.replace("\n[[feature]]", "weights = true\n\n[[feature]]", 1)
        (folder / "model.toml").write_text(f"{head}[[feature]]{features}")
        hatchback.pack(folder / "model.toml", bundle)
        with hatchback.Model.open(bundle) as model:
            dense, keys, offsets = columns(model, self.samples[:3])
            weights = np.ones(len(keys), np.float32)
            plain = model.score(dense, keys, offsets, weights=weights).scores
            weights[offsets[3]:] = 7  # of features without weights
            np.testing.assert_array_equal(
                plain, model.score(dense, keys, offsets, weights=weights).scores
            )
            for wrong in (None, weights[:-1], np.append(weights, weights[:1])):
                with self.assertRaisesRegex(hatchback.RequestError, "weights"):
                    model.score(dense, keys, offsets, weights=wrong)
            with self.assertRaisesRegex(hatchback.RequestError, "weights: 1 values for"):
                model.score(dense, keys, offsets, weights=weights[:1])
            weights[0] = np.inf
            with self.assertRaisesRegex(hatchback.RequestError, "the weight of key 0"):
                model.score(dense, keys, offsets, weights=weights)

    def test_a_child_of_fork_is_refused(self):
        model = self.open()
        arrays = columns(model, self.samples[:1])
        child = os.fork()
        if child == 0:
            ended = 1
            try:
                model.score(*arrays)
            except hatchback.Closed:
                model.close()
                ended = 0
            finally:
                os._exit(ended)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        model.score(*arrays)

    def test_a_closed_model_is_known(self):
        with self.open() as model:
            arguments = columns(model, self.samples[:1])
            self.assertGreaterEqual(model.prefetch(model.features[0], np.array([1, 2])), 0)
            model.score(*arguments)
            self.assertEqual(model.statistics()["failed"], 0)
            self.assertTrue(all(size >= 0 for _, size in model.memory()))
        for call in (
            lambda: model.score(*arguments), model.statistics, model.memory,
            lambda: model.generation
        ):
            with self.assertRaises(hatchback.Closed):
                call()
        model.close()

    def test_raw_values_become_keys(self):
        model = self.open()
        self.assertEqual(
            [model.key("age", value) for value in (0, 7, 2**64 - 1)], [0, 7, 2**64 - 1]
        )
        for value in ("seven", 0.5, None):
            with self.assertRaisesRegex(hatchback.RequestError, "feature `age`: .*of 64 bits"):
                model.key("age", value)
        with self.assertRaises(TypeError):
            model.key("age", {})
        with self.assertRaisesRegex(hatchback.RequestError, "a list of 0 is not one value for"):
            model.key("age", [])

    def test_keys_of_a_cross_are_those_of_a_request_of_its_columns(self):
        folder = self.folder / "crossed"
        folder.mkdir()
        (folder / "tanh.onnx").write_bytes(tanh_network(3))
        np.save(folder / "values.npy", np.linspace(-1, 1, 50, dtype=np.float32)[:, None])
        feature = """
[[feature]]
name = "{}"
table = "users"
pooling = "sum"
hotness_max = 1
key = {{ {} }}
"""
        columns = 'function = "cross", columns = ["city", "age"], buckets = 50'
        (folder / "model.toml").write_text("""format = 1
name = "crossed"
sequence = 1

[network]
onnx = "tanh.onnx"
output = "score"
activation = "none"

[[network.input]]
name = "dense"
features = ["city", "age", "cross"]

[[table]]
name = "users"
dim = 1
keys = "index"
codec = "f32"
source = { format = "npy", path = "values.npy" }
""" + feature.format("city", 'function = "farmhash64", buckets = 50')
            + feature.format("age", 'function = "modulo", divisor = 50')
            + feature.format("cross", columns))
        bundle = self.folder / "crossed.hatch"
        hatchback.pack(folder / "model.toml", bundle)
        asked = [("Rome", 3), ("Köln", -7), ("", 2**40)]
        run = answers_of_run(
            bundle, [{"sparse": {"city": [city], "age": [age]}} for city, age in asked])
        with hatchback.Model.open(bundle) as model:
            keys = np.array([
                [model.key("city", city), model.key("age", age), model.key("cross", (city, age))]
                for city, age in asked], np.int64)
            scores = model.score(
                np.zeros((3, 0), np.float32), keys.T.ravel(), np.arange(10)).scores
        expected = np.array([answer["score"] for answer in run], np.float32)
        self.assertEqual(scores.tolist(), expected.tolist())
        self.assertEqual(len(set(expected[:, 2].tolist())), 3)

    def test_outputs_have_names(self):
        family = ROOT / "tests/data/families/mmoe"
        bundle = self.folder / "mmoe.hatch"
        hatchback.pack(family / "model.toml", bundle, codec="f32")
        with hatchback.Model.open(bundle) as model:
            self.assertEqual((model.outputs, model.output_names), (2, ["ctr", "cvr"]))
            samples = [
                json.loads(line) for line in (family / "probe.jsonl").read_text().splitlines()
            ]
            scores = model.score(*columns(model, samples)).scores
        for row, answer in zip(scores, answers_of_run(bundle, samples), strict=True):
            expected = [answer["score"][name] for name in model.output_names]
            self.assertEqual(
                [struct.pack("f", value) for value in row],
                [struct.pack("f", value) for value in expected]
            )

    def test_reports(self):
        self.assertEqual(self.report, hatchback.inspect(self.bundle))
        self.assertGreater(hatchback.evaluate(self.bundle)["auc"], 0.6)
        sample = json.loads((DEMO / "heldout.jsonl").read_text().splitlines()[0])
        explained = hatchback.explain(self.bundle, sample)
        added = (feature["contribution"][0] for feature in explained["features"])
        self.assertAlmostEqual(
            sum(added, explained["base"][0]), explained["score"][0], delta=1e-5
        )

    def test_the_program_ends_as_the_other_one(self):
        def status(arguments):
            program = [sys.executable, "-m", "hatchback", *arguments]
            done = subprocess.run(program, capture_output=True, text=True, check=False)
            return done.returncode, done.stderr[:6]
        self.assertEqual(status(["--version"]), (0, ""))
        self.assertEqual(status(["inspect", "nothing"]), (1, "error:"))
        self.assertEqual(status(["nothing"]), (2, "error:"))

    def generation(self, sequence):
        """Packs the demo's model as `sequence`, with rows of its own, and returns the bundle."""
        spec, bundle = self.folder / "updates", self.folder / f"update{sequence}.hatch"
        shutil.copytree(DEMO, spec, dirs_exist_ok=True)
        text = (spec / "model.toml").read_text().replace(
            "sequence = 1\n", f"sequence = {sequence}\n"
        )
        (spec / "model.toml").write_text(text.replace('[probe]\nsamples = "probe.jsonl"\n', ""))
        stored = bytearray((spec / "tables.safetensors").read_bytes())
        size = struct.unpack_from("<Q", stored)[0]
        for name, tensor in json.loads(stored[8 : 8 + size]).items():
            if name != "__metadata__" and tensor["dtype"] == "F32":
                begin, end = (8 + size + at for at in tensor["data_offsets"])
                rows = (
                    np.frombuffer(stored[begin:end], np.float32) * (1 + np.float32(sequence) / 512)
                )
                stored[begin:end] = rows.tobytes()
        (spec / "tables.safetensors").write_bytes(stored)
        hatchback.pack(spec / "model.toml", bundle)
        return bundle

    def test_threads_score_through_live_updates(self):
        updates = int(os.environ.get("HATCHBACK_UPDATES", "2"))
        flash, bundles, expected = self.folder / "live.flash", {}, {}
        for sequence in range(1, updates + 2):
            bundles[sequence] = self.generation(sequence)
        arguments = columns(self.open(), self.samples[:4])
        for sequence, bundle in bundles.items():
            with hatchback.Model.open(bundle) as model:
                expected[sequence] = model.score(*arguments).scores
        for sequence in range(2, updates + 2):
            self.assertFalse(np.array_equal(expected[sequence - 1], expected[sequence]))

        model = hatchback.Model.open(bundles[1], flash=flash)
        self.addCleanup(model.close)
        seen, wrong, stop = set(), [], threading.Event()

        def score():
            while not stop.is_set():
                try:
                    answer = model.score(*arguments)
                except hatchback.Busy:
                    continue
                except hatchback.Error as error:
                    wrong.append(error)
                    return
                seen.add(answer.generation)
                if not np.array_equal(answer.scores, expected[answer.generation]):
                    wrong.append(answer.generation)

        threads = [threading.Thread(target=score) for _ in range(3)]
        for thread in threads:
            thread.start()
        for sequence in range(2, updates + 2):
            # Opening a bundle installs it into the directory that the model follows.
            while True:
                try:
                    hatchback.Model.open(bundles[sequence], flash=flash).close()
                    break
                except hatchback.OpenError as error:
                    self.assertIn("another process", str(error))
            while sequence not in seen and not wrong:
                stop.wait(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        self.assertEqual((seen, wrong), (set(range(1, updates + 2)), []))

    def test_a_model_keeps_its_shape_while_a_release_changes_the_schema(self):
        folder, flash = self.folder / "changing", self.folder / "changing.flash"
        folder.mkdir()
        (folder / "tanh.onnx").write_bytes(tanh_network(width=2))
        np.save(folder / "values.npy", np.arange(8, dtype=np.float32).reshape(-1, 1) / 8)

        def release(sequence):
            """Release 2 retires the feature `old`, and has `new` in its place."""
            last = "new" if sequence > 1 else "old"
            text = f"""format = 1
name = "changing"
sequence = {sequence}
dense_features = []

[network]
onnx = "tanh.onnx"
output = "score"
activation = "none"

[[network.input]]
name = "dense"
features = ["user", "{last}"]

[[table]]
name = "rows"
dim = 1
keys = "index"
codec = "f32"
source = {{ format = "npy", path = "values.npy" }}
"""
            names = ["user", "old", "new"][: sequence + 1]
            for name in names:
                text += f'\n[[feature]]\nname = "{name}"\ntable = "rows"\n'
                text += 'pooling = "sum"\nhotness_max = 1\n'
                text += "retired = true\n" if name != last and name == "old" else ""
            (folder / "model.toml").write_text(text)
            bundle = self.folder / f"changing{sequence}.hatch"
            hatchback.pack(folder / "model.toml", bundle)
            return bundle

        with hatchback.Model.open(release(1), flash=flash) as model:
            self.assertEqual(list(model.features), ["user", "old"])
            arguments = np.zeros((1, 0), np.float32), np.array([3, 5]), np.array([0, 1, 2])
            first = model.score(*arguments)
            expected = np.tanh(np.array([[3, 5]], np.float32) / 8)
            np.testing.assert_allclose(first.scores, expected, rtol=1e-5)
            with hatchback.Model.open(release(2), flash=flash) as newer:
                self.assertEqual(list(newer.features), ["user", "old", "new"])
            while (second := model.score(*arguments)).generation == 1:
                np.testing.assert_array_equal(second.scores, first.scores)
            # The shape is that of release 1: `old` is not read, and `new` has no keys.
            self.assertEqual((list(model.features), second.generation), (["user", "old"], 2))
            expected = np.tanh(np.array([[3, 0]], np.float32) / 8)
            np.testing.assert_allclose(second.scores, expected, rtol=1e-5)

    def test_the_code_of_the_pages_runs(self):
        samples = self.samples[:3]
        dense, keys, offsets = columns(self.open(), samples)
        # Stand-ins for the tensors of a KeyedJaggedTensor.
        tensor = lambda array: SimpleNamespace(numpy=lambda: array)
        features = SimpleNamespace(
            keys=lambda: self.open().features, values=lambda: tensor(keys),
            offsets=lambda: tensor(offsets)
        )
        torchrec = {"dense": tensor(dense), "features": features}
        here = os.getcwd()
        os.chdir(self.generation(1).parent / "updates")
        self.addCleanup(os.chdir, here)
        for page, start, names in [
            ("languages.md", "", {"dense": dense, "keys": keys, "offsets": offsets}),
            ("migrating.md", "<!-- torchrec -->\n", torchrec),
        ]:
            text = (ROOT / "docs" / page).read_text()
            code = text.split(start + "```python\n")[1].split("```")[0]
            # A busy machine may miss the page's deadline.
            code = code.replace("timeout=0.005", "timeout=3600")
            exec(compile(code, page, "exec"), names)
            self.assertEqual((names["answer"].generation, len(names["answer"].scores)), (1, 3))

    def test_the_notebook_runs(self):
        notebook = json.loads((ROOT / "python/examples/score.ipynb").read_text())
        code = [
            "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
        ]
        self.assertGreater(len(code), 5)
        here, names = os.getcwd(), {}
        os.chdir(ROOT / "python/examples")
        self.addCleanup(os.chdir, here)
        for number, cell in enumerate(code):
            cell = cell.replace("timeout=1.0", "timeout=3600")
            exec(compile(cell, f"cell {number}", "exec"), names)


if __name__ == "__main__":
    unittest.main()

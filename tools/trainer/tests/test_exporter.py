"""Exports models that were not written for Hatchback, and scores other rows of them with the
`hatchback` program.

Each model is of a kind that the field uses. The program scores rows that the export did not see.
Without torch 2.7, onnxscript or the program the tests are skipped, and say so.
"""

import json
import os
import re
import sys
import tempfile
import traceback
import unittest
from collections import namedtuple
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/trainer"))
os.environ.setdefault("HATCHBACK", str(ROOT / "target/release/hatchback"))
os.environ["KERAS_BACKEND"] = "torch"

from field_models import (  # noqa: E402
    B, KEYS, LONG, Model, cases, history, ids, mean_of_keys, net, scaled_bags, unlike_zeros
)

import hatchback_trainer  # noqa: E402
from hatchback_trainer.capture import SIZES, OfTwoSizes, last_own  # noqa: E402
from hatchback_trainer.checks import differ  # noqa: E402
from hatchback_trainer.columns import (  # noqa: E402
    Buckets, Dense, Vocabulary, columns_from_fuxictr, columns_from_keras, columns_from_sklearn
)
from hatchback_trainer.deploy import run  # noqa: E402

CLOSE = 3e-6


def lacks():
    """Returns why the tests cannot run here; None if they can."""
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 7):
        return f"export needs torch 2.7, and this is {torch.__version__}"
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        return "onnxscript is not installed"
    program = os.environ["HATCHBACK"]
    return None if Path(program).exists() else f"{program} is not built"


LACKS = lacks()
if LACKS:
    print(f"SKIPPED: the exports of other models: {LACKS}")


@unittest.skipIf(LACKS, LACKS)
class Exports(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)
        torch.manual_seed(5)
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def export(self, model, batch, **options):
        return hatchback_trainer.export(model, batch, self.folder / "exported", **options)

    def assert_same(self, done, model, batch, call):
        """Compares the program's scores of a batch with the model's own."""
        with torch.no_grad():
            want = call(model.eval(), batch)
        want = (want[0] if isinstance(want, tuple) else want).reshape(B, -1)[:, 0]
        want = torch.sigmoid(want) if done.schema.activation == "sigmoid" else want
        self.assertLess((torch.tensor(done.score(batch)) - want).abs().max().item(), CLOSE)

    def test_models_of_the_field_score_other_rows_as_pytorch_does(self):
        for name, (model, batch, features, dense) in cases().items():
            with self.subTest(name):
                before = {key: value.clone() for key, value in model.state_dict().items()}
                done = self.export(model, batch())
                self.assertTrue(all(
                    (value == before[key]).all() for key, value in model.state_dict().items()))
                self.assertEqual(sorted(one.name for one in done.schema.features), features)
                self.assertEqual(list(done.schema.dense_features), dense)
                done.pack(codec="f32")
                by_name = lambda m, b: m(**b) if name != "a dict as the only argument" else m(b)
                call = lambda m, b: by_name(m, b) if isinstance(b, dict) else m(b)
                self.assert_same(done, model, batch(), call)

    def test_a_history_without_its_padding_scores_the_same(self):
        model = Model(lambda m, history: mean_of_keys(m, history, KEYS - 1), 4)
        full = {"history": ids(B, LONG, high=KEYS - 1)}
        done = self.export(model, full)
        done.pack(codec="f32")
        short = {"history": full["history"].clone()}
        short["history"][:, 3:] = KEYS - 1
        self.assert_same(done, model, short, lambda m, b: m(**b))
        front = {"history": full["history"].clone()}
        front["history"][:, :3] = KEYS - 1
        self.assert_same(done, model, front, lambda m, b: m(**b))

    def test_a_delta_of_a_model_that_learned_scores_as_the_model(self):
        model, batch, _, _ = cases()["a filter of frequencies"]
        flash, optimizer = self.folder / "flash", torch.optim.SGD(model.parameters(), 0.5)
        self.export(model, batch()).pack(self.folder / "1.hatch", codec="f32")
        run("install", self.folder / "1.hatch", "--flash", flash)
        few = {name: rows[:3] for name, rows in batch().items()}
        loss = functional.binary_cross_entropy_with_logits(model(**few)[:, 0], torch.ones(3))
        loss.backward()
        optimizer.step()
        done = self.export(model, batch(), sequence=2)
        done.pack(self.folder / "2.hatch", parent=flash, codec="f32")
        run("install", self.folder / "2.hatch", "--flash", flash)
        done.bundle = flash
        self.assert_same(done, model, batch(), lambda m, b: m(**b))

    def test_several_outputs_have_names_labels_and_scores(self):
        model = Model(lambda m, item: {
            "ctr": m.n(m.e(item)), "cvr": m.o(m.e(item)), "hidden": m.e(item)}, 4, o=net(4))
        batch, labels = {"item": ids(B)}, {"ctr": torch.ones(B), "cvr": torch.zeros(B)}
        done = self.export(model, batch, labels=labels)
        self.assertEqual(done.schema.outputs, ("ctr", "cvr"))
        done.pack(codec="f32")
        other = {"item": ids(B)}
        with torch.no_grad():
            want = torch.sigmoid(model(**other)["cvr"])[:, 0]
        found = torch.tensor([one["cvr"] for one in done.score(other)])
        self.assertLess((found - want).abs().max().item(), CLOSE)

    def assert_exports(self, model, batch):
        """Exports a model and compares the program's scores of another batch with its own."""
        done = self.export(model, batch())
        done.pack(codec="f32")
        self.assert_same(done, model, batch(), lambda m, b: m(**b))
        return done

    def test_packed_sequences_give_states_and_cells_of_both_directions(self):
        def forward(m, history, length):
            rows, last = m.g(nn.utils.rnn.pack_padded_sequence(
                m.e(history), length, batch_first=True, enforce_sorted=False))
            rows, _ = nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)
            last = last if isinstance(last, tuple) else (last,)
            return m.n(torch.cat([rows.sum(1), *(one for state in last for one in state)], 1))

        for kind, layers, ways, has_bias in ((nn.LSTM, 2, 2, True), (nn.LSTM, 1, 1, False),
                                             (nn.GRU, 2, 2, False)):
            gates = kind(4, 4, layers, has_bias, batch_first=True, bidirectional=ways == 2)
            states = ways * layers * (1 + (kind is nn.LSTM))
            with self.subTest(kind.__name__, layers=layers):
                self.assert_exports(Model(forward, 4 * (ways + states), g=gates),
                                    lambda: dict(zip(("history", "length"), history())))

    def test_samples_that_a_model_sorts_keep_their_places(self):
        def forward(m, history, length):
            length, order = length.sort(descending=True)
            rows = nn.utils.rnn.pack_padded_sequence(m.e(history)[order], length, batch_first=True)
            rows, last = m.g(rows)
            rows = nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0].sum(1)
            back = torch.argsort(order)
            return m.n(rows.index_select(0, back) + last[:, torch.sort(order)[1]][0])

        def by_topk(m, item, length):
            order = torch.topk(length, k=len(length))[1]
            return m.n(m.e(item)[order][torch.topk(order, len(length), largest=False)[1]])

        for model, name in ((Model(forward, 4, g=nn.GRU(4, 4, batch_first=True)), "history"),
                            (Model(by_topk, 4), "item")):
            self.assert_exports(model, lambda: {
                name: ids(B, LONG) if name == "history" else ids(B),
                "length": torch.randint(1, LONG + 1, (B,))})
        with self.assertRaisesRegex(ValueError, "differs from the model's by .* on the sample bat"):
            self.export(Model(lambda m, item, age: m.n(m.e(item[age.argsort()])), 4),
                        {"item": ids(B), "age": torch.rand(B)})

    def test_a_transformer_takes_a_causal_mask(self):
        def forward(m, history):
            later = nn.Transformer.generate_square_subsequent_mask(LONG)
            return m.n(m.t(m.e(history), mask=later, src_key_padding_mask=history == 0)[:, 0])

        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.assert_exports(Model(forward, 4, t=nn.TransformerEncoder(layer, 2)),
                            lambda: {"history": history()[0]})

    def test_the_keys_of_a_bag_have_weights(self):
        for options in ({}, {"padding_idx": 0}):
            bag = unlike_zeros(nn.EmbeddingBag(KEYS, 4, mode="sum", **options))
            model = Model(lambda m, x, w: m.n(m.bag(x, per_sample_weights=w)), 4, bag=bag)
            self.assert_exports(
                model, lambda: {"x": ids(B, LONG, high=4), "w": torch.rand(B, LONG)})

    def test_rows_have_a_greatest_norm(self):
        for norm_type in (2.0, 1.0, float("inf")):
            table = unlike_zeros(nn.Embedding(KEYS, 4, max_norm=0.5, norm_type=norm_type))
            model = Model(lambda m, x: m.n(m.t(x).sum(1)), 4, t=table)
            rows = table.weight.clone()
            self.export(model, {"x": ids(B, LONG)})
            self.assertTrue(table.weight.equal(rows))
            self.assert_exports(model, lambda: {"x": ids(B, LONG)})
        bag = Model(lambda m, x: m.n(m.t(x)), 4, t=nn.EmbeddingBag(KEYS, 4, max_norm=0.5))
        with self.assertRaisesRegex(ValueError, "sum the rows of nn.Embedding"):
            self.export(bag, {"x": ids(B, LONG)})

    def test_numbers_fall_into_buckets(self):
        def forward(m, item, x):
            return m.n(m.e(item) + m.i(torch.cat([
                torch.bucketize(x, m.ends), torch.searchsorted(m.ends, x, right=True)], 1)).sum(1))

        model = Model(forward, 4, i=nn.Embedding(4, 4))
        model.register_buffer("ends", torch.tensor([1.0, 2.0, 4.0]))
        self.assert_exports(model, lambda: {
            "item": ids(B), "x": torch.cat([torch.rand(B, 2) * 6, ids(B, 1, high=6) * 1.0], 1)})

    def test_a_named_tuple_names_its_columns_and_scores(self):
        inputs = namedtuple("Inputs", "item age")
        scores = namedtuple("Scores", "click buy")
        model = Model(lambda m, x: scores(
            m.n(m.e(x.item)), m.o(torch.cat([m.e(x.item), x.age[:, None]], 1))), 4, o=net(5))
        listed = Model(lambda m, item, ages: m.n(torch.cat([m.e(item), ages[0][:, None]], 1)), 5)
        done = self.export(listed, {"item": ids(B), "ages": [torch.rand(B)]})
        self.assertEqual(list(done.schema.dense_features), ["ages.0"])
        done = self.export(model, inputs(ids(B), torch.rand(B)))
        self.assertEqual([one.name for one in done.schema.features], ["item"])
        self.assertEqual(list(done.schema.dense_features), ["age"])
        self.assertEqual(done.schema.outputs, ("click", "buy"))

    def test_a_method_is_exported_like_forward(self):
        model = Model(lambda m, item: None, 4)
        type(model).predict = lambda m, item: m.n(m.e(item))
        self.addCleanup(lambda: delattr(Model, "predict"))
        done = self.export(model.predict, {"item": ids(B)})
        done.pack(codec="f32")
        self.assert_same(done, model, {"item": ids(B)}, lambda m, b: m.predict(**b))

    def test_a_column_takes_its_raw_values(self):
        cities = [f"city {n}" for n in range(KEYS - 1)]
        model = Model(lambda m, city, age: m.n(torch.cat([m.e(city), m.i(age)], 1)), 8,
                      i=nn.Embedding(4, 4))
        columns = {"city": Vocabulary(cities, first=1, unknown=0), "age": Buckets((18, 30, 65))}
        batch = lambda: {"city": ids(B), "age": ids(B, high=4)}
        done = self.export(model, batch(), columns=columns)
        line = (self.folder / "exported/probe.jsonl").read_text(encoding="utf-8").splitlines()[0]
        self.assertRegex(line, r'"city":\["city \d+"\]')
        done.pack(codec="f32")
        self.assert_same(done, model, batch(), lambda m, b: m(**b))
        with self.assertRaisesRegex(ValueError, r"of 40 values of `city` are not in its vocab"):
            self.export(model, batch(), columns={"city": Vocabulary(cities[:9])})
        with self.assertRaisesRegex(ValueError, r"columns\['town'\]: no sparse feature"):
            self.export(model, batch(), columns={"town": Vocabulary(cities)})

    def scored(self, done, *lines):
        """Returns the program's scores of lines of JSON."""
        path = self.folder / "lines.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        answers = map(json.loads, run("run", done.bundle, "--samples", path).splitlines())
        return [answer["score"][0] for answer in answers]

    def test_a_missing_category_has_the_key_of_null(self):
        columns = {"city": Vocabulary([f"city {n}" for n in range(9)], first=1, null=0)}
        model = Model(lambda m, city: m.n(m.e(city)), 4)
        done = self.export(model, {"city": ids(B, high=10)}, columns=columns)
        self.assertIn('"city":[null]', (self.folder / "exported/probe.jsonl").read_text())
        done.pack(codec="f32")
        batch = {"city": ids(B, high=10)}
        self.assert_same(done, model, batch, lambda m, b: m(**b))
        null, text = self.scored(done, *({"sparse": {"city": [one]}} for one in (None, "")))
        with torch.no_grad():
            want = torch.sigmoid(model(torch.tensor([0]))).item()
        self.assertAlmostEqual(null, want, delta=CLOSE)
        self.assertEqual(null, text)

    def test_a_dense_column_takes_its_raw_values(self):
        model = Model(lambda m, item, age, income, rate: m.n(torch.cat(
            [m.e(item), torch.stack([age, income, rate], 1)], 1)), 7)
        columns = {
            "age": Dense(mean=40.0, scale=12.5, missing=38.0),
            "income": Dense(9.0, 1.5, clip=(0, 200_000), log1p=True),
        }
        raw = lambda: {"age": torch.rand(B) * 70 + 10, "income": torch.rand(B) ** 4 * 200_000}
        scaled = lambda raw: {"item": ids(B), "rate": torch.randn(B)} | {
            name: torch.tensor([columns[name].value(one) for one in values.tolist()])
            for name, values in raw.items()}
        done = self.export(model, scaled(raw()), columns=columns)
        self.assertIn('{ name = "age", missing = 38.0 }',
                      (self.folder / "exported/model.toml").read_text())
        done.pack(codec="f32")
        self.assert_same(done, model, scaled(raw()), lambda m, b: m(**b))
        line = lambda **dense: {"dense": dense, "sparse": {"item": [3]}}
        fill, omitted, null, high, most = self.scored(
            done, line(age=38, income=5e4, rate=0.5), line(income=5e4, rate=0.5),
            line(age=None, income=5e4, rate=0.5), line(age=38, income=9e9, rate=0.5),
            line(age=38, income=200_000, rate=0.5))
        self.assertEqual((fill, fill, most), (omitted, null, high))
        with self.assertRaisesRegex(RuntimeError, "1 line was not a sample"):  # `rate` is missing
            self.scored(done, line(income=5e4))
        with self.assertRaisesRegex(ValueError, r"columns\['income'\]: no raw value becomes"):
            self.export(model, scaled(raw()) | {"income": torch.full((B,), 9.0)}, columns=columns)
        with self.assertRaisesRegex(ValueError, r"columns\['item'\]: no dense feature .* `age`"):
            self.export(model, scaled(raw()), columns={"item": Dense()})

    def test_transformers_of_sklearn_run_in_the_car(self):
        try:
            import numpy as np
            from sklearn.impute import SimpleImputer
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import (
                FunctionTransformer, MinMaxScaler, OrdinalEncoder, StandardScaler
            )
        except ImportError:
            self.skipTest("scikit-learn is not installed")
        random = np.random.default_rng(3)
        raw = np.exp(random.normal(2, 1, (300, 2)))
        raw[random.random(raw.shape) < 0.2] = np.nan
        names = ["age", "income"]
        numbers = lambda: (SimpleImputer(strategy="median"), MinMaxScaler((-1, 2), clip=True))
        model = Model(lambda m, city, dense: m.n(torch.cat([m.e(city), dense], 1)), 6)
        cities = np.array([["Rome", "Ulm", None][n % 3] for n in range(300)], object)[:, None]
        encoder = OrdinalEncoder(encoded_missing_value=2).fit(cities)
        for steps in (
            numbers(), (StandardScaler(), SimpleImputer(), StandardScaler()),
            (SimpleImputer(), FunctionTransformer(np.log1p), StandardScaler()),
        ):
            pipeline = make_pipeline(*steps).fit(raw)
            columns = columns_from_sklearn(pipeline, names)
            columns |= columns_from_sklearn(encoder, ["city"]) | {"dense": names}
            batch = lambda rows: {
                "city": torch.from_numpy(encoder.transform(cities[rows])[:, 0]).long(),
                "dense": torch.from_numpy(pipeline.transform(raw[rows])).float()}
            done = self.export(model, batch(slice(B)), columns=columns)
            done.pack(codec="f32")
            rows = slice(B, 300)
            with torch.no_grad():
                want = torch.sigmoid(model(**batch(rows)))[:, 0].tolist()
            value = lambda one: None if one is None or one != one else one
            found = self.scored(done, *(
                {"dense": dict(zip(names, map(value, dense))), "sparse": {"city": [city]}}
                for dense, city in zip(raw[rows].tolist(), cities[rows][:, 0])))
            self.assertLess(max(abs(a - b) for a, b in zip(found, want, strict=True)), 1e-5)
        with self.assertRaisesRegex(ValueError, "Binarizer: the car has no such step"):
            columns_from_sklearn(type("Binarizer", (), {})(), names)

    def test_columns_of_fuxictr_run_in_the_car(self):
        try:
            import numpy as np
            from fuxictr.preprocess.normalizer import Normalizer
            from fuxictr.preprocess.tokenizer import Tokenizer
        except ImportError:
            self.skipTest("fuxictr is not installed")
        tokenizer, normalizer = Tokenizer(min_freq=2), Normalizer("StandardScaler")
        tokenizer.build_vocab({"Rome": 9, "Ulm": 5, "Kiel": 1, "": 7})
        normalizer.fit_from_stats(mean=40.0, std=12.5, count=9)
        processor = SimpleNamespace(
            feature_cols=[{"name": "city", "dtype": "str"},
                          {"name": "age", "dtype": "float", "fill_na": 38.0}],
            feature_map=SimpleNamespace(features={
                "city": {"type": "categorical"}, "age": {"type": "numeric"}}),
            processor_dict={"city::tokenizer": tokenizer, "age::normalizer": normalizer})
        cities = [["Rome", "Ulm", "Kiel", ""][n % 4] for n in range(2 * B)]
        ages = np.linspace(10, 90, 2 * B)
        keys = torch.tensor(tokenizer.encode_category(cities))
        scaled = torch.from_numpy(normalizer.transform(ages)).float()
        model = Model(lambda m, city, age: m.n(torch.cat([m.e(city), age[:, None]], 1)), 5)
        columns = columns_from_fuxictr(processor)
        done = self.export(model, {"city": keys[:B], "age": scaled[:B]}, columns=columns)
        done.pack(codec="f32")
        with torch.no_grad():
            want = torch.sigmoid(model(keys, scaled))[:, 0].tolist()
        found = self.scored(done, *(
            {"dense": {"age": age}, "sparse": {"city": [city or None]}}
            for city, age in zip(cities, ages.tolist())))
        self.assertLess(max(abs(a - b) for a, b in zip(found, want)), 1e-5)
        fill, null = self.scored(done, *(
            {"dense": {"age": age}, "sparse": {"city": ["Ulm"]}} for age in (38.0, None)))
        self.assertEqual(fill, null)
        processor.feature_map.features["age"]["category_processor"] = "quantile_bucket"
        with self.assertRaisesRegex(ValueError, "`age`: the car does not run FuxiCTR's"):
            columns_from_fuxictr(processor)

    def test_preprocessing_layers_of_keras_run_in_the_car(self):
        try:
            import keras
            import numpy as np
            import tensorflow  # the layers of texts call it
        except ImportError:
            self.skipTest("keras or tensorflow is not installed")
        layer, random = keras.layers, np.random.default_rng(4)
        known = ["Rome", "Ulm", "Köln", "Aÿ"]
        layers = {
            "city": layer.StringLookup(vocabulary=known, mask_token=""),
            "town": layer.StringLookup(vocabulary=known, num_oov_indices=3),
            "code": layer.IntegerLookup(vocabulary=[5, 7, -11], mask_token=4),
            "user": layer.Hashing(30), "salted": layer.Hashing(20, salt=(98765, 132)),
            "masked": layer.Hashing(15, mask_value=""),
            "both": (layer.HashedCrossing(40), ("user", "age")),
            "age": layer.Discretization(bin_boundaries=[18.0, 30.0, 65.0]),
            ("income", "rate"): layer.Normalization(mean=[40.0, 0.5], variance=[9.0, 0.25]),
        }
        pick = lambda words: random.choice(words, 3 * B)
        raw = {
            "city": pick([*known, "Oslo", ""]), "town": pick([*known, "Oslo", "Bonn", "Kiel"]),
            "code": pick([5, 7, -11, 4, 99]), "user": pick([f"user {n}" for n in range(90)]),
            "salted": pick([f"{n} é" for n in range(90)]), "masked": pick(["", "a", "b", "c"]),
            "age": pick([17.5, 18.0, 29.0, 30.0, 66.0]),
        }
        raw["town"][:B] = "Ulm"  # no key of several for unknown words can be turned back
        dense = np.stack([pick([20.0, 44.0, 61.5]), pick([0.25, 0.75])], 1).astype(np.float32)
        array = lambda one: torch.as_tensor(keras.ops.convert_to_numpy(one))
        batch = {name: array(layers[name](column)).long() for name, column in raw.items()}
        batch["both"] = array(layers["both"][0](
            (tensorflow.constant(raw["user"]), tensorflow.constant(batch["age"].numpy()))))
        batch["dense"] = array(layers["income", "rate"](dense)).float()
        hashed = {name: raw[name][:B].tolist() for name in ("user", "salted", "masked")}
        columns = columns_from_keras(layers, hashed) | {"dense": ["income", "rate"]}
        model = Model(
            lambda m, city, town, code, user, salted, masked, both, age, dense: m.n(torch.cat(
                [m.e(torch.stack([city, town, code, user, salted, masked, both, age], 1))
                 .flatten(1), dense], 1)), 34)
        done = self.export(
            model, {name: one[:B] for name, one in batch.items()}, columns=columns)
        done.pack(codec="f32")
        with torch.no_grad():
            want = torch.sigmoid(model(**batch))[:, 0].tolist()
        found = self.scored(done, *(
            {"dense": dict(zip(("income", "rate"), dense[n].tolist())),
             "sparse": {name: [column[n].item()] for name, column in raw.items()}}
            for n in range(3 * B)))
        self.assertLess(max(abs(a - b) for a, b in zip(found, want, strict=True)), 1e-5)
        with self.assertRaisesRegex(ValueError, "CategoryEncoding of 'x': the car has no such"):
            columns_from_keras({"x": layer.CategoryEncoding(3)})

    def test_a_functional_model_of_keras_is_cut_at_its_embeddings(self):
        try:
            import keras
            import numpy as np
        except ImportError:
            self.skipTest("keras is not installed")
        from hatchback_trainer.keras_models import export_keras

        layer = keras.layers
        item = keras.Input((), name="item", dtype="int64")
        past = keras.Input((LONG,), name="history", dtype="int64")
        numbers = keras.Input((2,), name="numbers")
        items = layer.Embedding(KEYS, 4, name="items", mask_zero=True)
        joined = layer.Concatenate()(
            [items(item), layer.GlobalAveragePooling1D()(items(past)), numbers])
        score = layer.Dense(1, activation="sigmoid")(layer.Dense(8, activation="relu")(joined))
        model = keras.Model({"item": item, "history": past, "numbers": numbers}, score)
        batch = lambda: {
            "item": np.random.randint(0, KEYS, B), "history": history()[0].numpy(),
            "numbers": np.random.randn(B, 2).astype(np.float32)}
        call = layer.Embedding.call
        done = export_keras(model, batch(), self.folder / "exported")
        self.assertIs(layer.Embedding.call, call)
        # The layer's mask is one of the feature: its keys are not sent as dense values too.
        self.assertEqual(
            {one.name: one.padding for one in done.schema.features}, {"item": None, "history": 0})
        self.assertEqual(list(done.schema.dense_features), ["numbers0", "numbers1"])
        done.pack(codec="f32")
        other = {name: torch.from_numpy(one) for name, one in batch().items()}
        want = model(other).detach()[:, 0]
        found = torch.tensor(done.score((other,)))
        self.assertLess((found - want).abs().max().item(), CLOSE)

    def test_features_that_a_request_shares_are_marked(self):
        model = Model(lambda m, user, item: m.n(torch.cat([m.e(user), m.e(item)], 1)), 8)
        batch = {"user": ids(B), "item": ids(B)}
        done = self.export(model, batch, shared=["user"])
        self.assertEqual(
            [(one.name, one.shared) for one in done.schema.features],
            [("user", True), ("item", False)])
        text = (self.folder / "exported/model.toml").read_text()
        self.assertEqual(text.count("shared = true"), 1)
        other = {"user": ids(B), "item": ids(B)}
        done.pack(codec="f32")
        self.assert_same(done, model, other, lambda model, batch: model(**batch))
        with self.assertRaisesRegex(ValueError, "no feature `driver`, only user, item"):
            self.export(model, batch, shared=["driver"])

    def test_dense_columns_that_a_request_shares_are_marked(self):
        class Mixed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.e, self.n = torch.nn.Embedding(KEYS, 4), torch.nn.Linear(8, 1)

            def forward(self, item, numbers, age):
                return self.n(torch.cat([self.e(item), numbers, age[:, None]], 1))

        batch = lambda: {"item": ids(B), "numbers": torch.randn(B, 3), "age": torch.rand(B)}
        names = ["hour", "price", "speed"]
        model = Mixed()
        done = self.export(
            model, batch(), shared=["hour", "speed", "age"],
            columns={"numbers": names, "speed": Dense(mean=1.0, scale=2.0)})
        self.assertEqual(done.schema.dense_features, (*names, "age"))
        text = (self.folder / "exported/model.toml").read_text()
        self.assertIn('"price", { name = "speed", shared = true }', text)
        done.pack(codec="f32")
        self.assert_same(done, model, batch(), lambda model, batch: model(**batch))

    def test_a_collection_of_torchrec_is_found_by_its_interface(self):
        """TorchRec's own classes are tested by tools/trainer/extras; these have their interface."""
        done = self.export(Collected(), (torch.randn(3, 2), Jagged(
            {"a": [[1, 2], [], [3]], "b": [[4], [4, 4], [49]]})))
        self.assertEqual(
            [(one.name, one.table) for one in done.schema.features],
            [("a", "ebc.t"), ("b", "ebc.t")])
        done.pack(codec="f32")

    def test_a_sequence_collection_of_torchrec_gives_rows_and_lengths(self):
        batch = Jagged({"a": [[1, 2], [], [3]], "b": [[4], [4, 4, 7], [49]]})
        model = Sequences()
        done = self.export(model, batch)
        found = {one.name: (one.pooling, one.hotness_max) for one in done.schema.features}
        self.assertEqual(found, {"a": ("none", 2), "b": ("none", LONG)})
        self.assertIn(("b",), [one.lengths for one in done.schema.inputs])
        done.pack(codec="f32")
        other = Jagged({"a": [[], [7, 7], [3], [49]], "b": [[], [1], list(range(LONG)), [2, 0]]})
        want = torch.sigmoid(model(other).detach())[:, 0]
        self.assertLess((torch.tensor(done.score(other)) - want).abs().max().item(), CLOSE)

    def test_a_sequence_without_one_length_is_refused(self):
        batch = Jagged({"a": [[1, 2], [], [3]], "b": [[4], [4, 4, 7], [49]]})
        for length in (None, 2):
            with self.assertRaisesRegex(ValueError, "a bag of 3 keys: the car needs one length"):
                self.export(Sequences(length), batch)

    def test_unnamed_outputs_leave_the_number_of_samples_open(self):
        done = self.export(Model(lambda m, item: {
            "score": m.n(m.e(item).view(item.shape[0], -1)), "vector": m.e(item)}, 4),
            {"item": ids(B)})
        self.assertEqual(done.schema.outputs, ("logit",))

    def test_a_score_that_is_no_number_differs_from_one_that_is(self):
        nan, half = torch.tensor([torch.nan]), torch.tensor([0.5])
        endless = torch.tensor([torch.inf])
        pairs = ((nan, half), (half, nan), (nan, nan), (half, endless), (half, -endless),
                 (endless, -endless), (endless, endless))
        expected = [True, True, False, True, True, True, False]
        self.assertEqual([differ(*both) for both in pairs], expected)

    def test_the_lines_of_a_package_that_begins_like_torch_are_the_users(self):
        path = f"{Path(torch.__file__).parent}_rechub/narm.py"
        frames = [traceback.FrameSummary(path, 3, "forward", line="if x:"),
                  traceback.FrameSummary(torch.__file__, 9, "cat", line="y")]
        self.assertEqual(last_own(frames), f"{path}:3, `if x:`")

    def test_scores_that_hardly_differ_are_noted(self):
        said = "output `logit`: the scores of all 120 compared rows are within .* train the model"
        for scale, count in ((1, 0), (1e-4, 1)):
            model = Model(lambda m, item: m.n(m.e(item)), 4)
            with torch.no_grad():
                model.n[2].weight *= scale
            notes = self.export(model, {"item": ids(B)}).notes
            self.assertEqual(len([note for note in notes if re.search(said, note)]), count)

    def test_what_is_changed_in_a_choice_reaches_its_samples_alone(self):
        def forward(m, item, x):
            out, keep = m.e(item).clone(), x[:, 0] > 0.2
            out[keep] += 1.0
            chosen = m.e(item)[keep]
            chosen *= 3
            more = torch.zeros_like(out)
            more[keep] = chosen
            return m.n(torch.cat([out, more, m.e(item)], 1))

        self.export(Model(forward, 12), {"item": ids(B), "x": torch.rand(B, 2)})

    def test_a_mask_that_leaves_no_sample_out_is_refused(self):
        def forward(m, item, x):
            keep, out = x[:, 0] > -5, torch.zeros(item.shape[0], 4)
            out[keep] = m.e(item)[keep]  # all
            return m.n(out)

        line = r"test_exporter.py:\d+.*no compared batch has a sample that this mask leaves out"
        with self.assertRaisesRegex(ValueError, line):
            self.export(Model(forward, 4), {"item": ids(B), "x": torch.rand(B, 2)})

    def test_a_branch_on_the_number_of_samples_is_refused(self):
        for branch in (lambda count: count % 3 == 0, lambda count: count < 2):
            def forward(m, item):
                rows = m.e(item)
                return m.n(rows * 3 if branch(int(item.shape[0])) else rows)

            with self.assertRaisesRegex(ValueError, "the model follows another path for"):
                self.export(Model(forward, 4), {"item": ids(B)})

    def test_a_refusal_of_an_operation_has_the_line_of_its_forward(self):
        for kind, what in (("mixing", "samples of a batch reach each other"),
                           ("large", r"makes \d+, and the car computes whole numbers up to 2"),
                           ("remainder", "this cast changes large numbers"),
                           ("half", "`_to_copy` computes in float16, and the car in float32"),
                           ("sizes", "how many values `nonzero_numpy` gives follows from")):
            line = rf"^\S*test_exporter.py:\d+, `.*# {kind}`: .*{what}"
            with self.assertRaisesRegex(ValueError, line):
                self.export(Lines(kind), (ids(B, 40), 2.0 ** 23 + torch.rand(B, 40) * 2 ** 24))

    def test_equal_values_that_the_sample_batch_lacks_are_noted_by_line(self):
        x, keep = ids(B, 40), torch.ones(B, 40)
        x[0, :38], keep[0, :38] = 7, 0  # equal values of equal keys: each choice gives one score
        done = self.export(Lines("choice"), (x, keep))
        line = r"test_exporter.py:\d+, `.*# choice`: the scores depend on which of equal values"
        self.assertRegex(done.notes[-1], line)
        x[0, :38] = torch.arange(38)
        with self.assertRaisesRegex(ValueError, f"{line}.* on the sample batch"):
            self.export(Lines("choice"), (x, keep))

    def test_what_cannot_run_in_the_car_is_refused_by_name_and_line(self):
        def refused(pattern, forward, batch, width=4, columns=None, **modules):
            with self.assertRaisesRegex(ValueError, pattern):
                self.export(Model(forward, width, **modules), batch, columns=columns)

        def branch(m, item):
            if int(item.max()) > 9:
                return m.n(m.e(item))
            return m.n(m.e(item)) * 2

        item = {"item": ids(B)}
        refused(r"test_exporter.py:\d+, `if int\(item.max\(\)\) > 9:`", branch, item)
        refused("two calls of the model", lambda m, item: m.n(m.e(item)) + torch.rand(1), item)
        refused("samples of a batch reach each other", lambda m, item: m.n(
            m.e(item) - m.e(item).mean(0)), item)
        both = {"item": ids(B), "x": torch.randn(B, 5)}
        for mixed in (lambda x: x - x.t().mean(1), lambda x: x[0, 0].expand(len(x), 5)):
            refused("samples", lambda m, item, x: m.n(torch.cat([m.e(item), mixed(x)], 1)), both, 9)
        refused(r"its batch at .*test_exporter.py:\d+, .* no loop over the samples",
                lambda m, x: m.n(torch.stack([m.e(one) for one in x]).flatten(1)), ids(B, 2), 8)
        # All values are equal, and PyTorch takes the last ones.
        refused("which of equal values `topk` takes", lambda m, x: m.n(m.e(x).gather(1, torch.topk(
            x[:, :, None] * 0.0, 3, dim=1).indices.expand(-1, -1, 4)).flatten(1)), ids(B, 40), 12)
        refused(r"network has the shape \[40, 1\], and the model's \[", lambda m, history: m.n(
            (m.e(history) * (history > 0)[..., None])[(history > 0).any(1)].sum(1)),
            {"history": ids(B, LONG, low=1)})
        refused("depend on no table", lambda m, x: m.n(x), torch.randn(B, 4))
        # All keys are 0, and what is computed of them then looks like the keys.
        zeros = {"words": torch.zeros(B, dtype=torch.int64), "offsets": torch.arange(B)}
        for changed in (scaled_bags, lambda m, words, offsets: m.n(m.bag(words % 7, offsets))):
            refused("the keys of a bag must be an argument", changed, zeros, bag=nn.EmbeddingBag(
                KEYS, 4))
        refused("how many values `masked_select` gives follows from values", lambda m, item, x: m.n(
            torch.masked_select(m.e(item), x > 0).view(-1, 4)),
            {"item": ids(B), "x": torch.rand(B, 4) + 0.1})  # the batch has no other mask
        refused("the row numbers of this lookup are computed",
                lambda m, item: m.n(m.e(item.bool().long())), {"item": ids(B, high=2)})
        refused("computed from `item`", lambda m, item: m.n(m.big(item * item % 7)), item,
                big=nn.Embedding(300_000, 4))
        refused(r"columns\['x'\] has 2 names", lambda m, x: m.n(m.e(x).sum(1)), ids(B, 3),
                columns={"x": ["a", "b"]})


    def test_a_key_outside_of_its_table_is_named_by_column_sample_and_value(self):
        def refused(pattern, forward, x):
            with self.assertRaisesRegex(ValueError, pattern):
                self.export(Model(forward, 4, bag=nn.EmbeddingBag(KEYS, 4)), {"x": x})

        for wrong in (-1, KEYS):
            x = ids(B, LONG)
            x[3, 2] = wrong
            what = rf"test_exporter.py:\d+, .*`x`, sample 3: row number {wrong} of a table of 50"
            refused(what, lambda m, x: m.n(m.e(x).sum(1)), x)
            refused(what, lambda m, x: m.n(m.bag(x)), x)
            refused(r"`x`, column 2, sample 3: row", lambda m, x: m.n(m.e(x[:, 2])), x)
        refused(r"`x`, sample 1: row number 50", lambda m, x: m.n(m.e(x + 1)), ids(B).where(
            torch.arange(B) != 1, KEYS - 1))
        x[3, 2] = -1
        refused("`x`, sample 3: the key -1, and its keys are 0 to 49", lambda m, x: m.n(
            m.e.weight[x].sum(1)), x)
        offsets = torch.tensor([0, 10])
        refused("`x0`, sample 3: the key 12, and its keys are 0 to 9", lambda m, x: m.n(
            m.e(x + offsets).sum(1)), ids(B, 2, high=10).where(torch.arange(B)[:, None] != 3, 12))

    def test_a_conversion_that_changes_nothing_is_no_copy(self):
        same = (lambda x: x.long(), lambda x: x.to(torch.int64), lambda x: x.contiguous(),
                lambda x: x.view(-1).long(), lambda x: torch.reshape(input=x, shape=(-1,)))
        wrong = ids(B).where(torch.arange(B) != 4, 60)
        for change in same:
            with self.assertRaisesRegex(ValueError, "`user`, sample 4: row number 60 of a table"):
                self.export(Model(lambda m, user: m.n(m.e(change(user))), 4), {"user": wrong})
        for change in same[:3]:
            model = Model(lambda m, words, offsets: m.n(m.bag(change(words), change(offsets))), 4,
                          bag=nn.EmbeddingBag(KEYS, 4))
            batch = lambda: {"words": ids(B * 2), "offsets": torch.arange(B) * 2}
            done = self.export(model, batch())
            done.pack(codec="f32")
            self.assert_same(done, model, batch(), lambda m, b: m(**b))

    def test_a_column_stays_one_in_bags_whose_offsets_the_model_makes(self):
        forward = lambda m, user: m.n(m.bag(user, torch.arange(len(user))))
        model = Model(forward, 4, bag=nn.EmbeddingBag(KEYS, 4))
        done = self.export(model, {"user": ids(B)})
        done.pack(codec="f32")
        self.assert_same(done, model, {"user": ids(B)}, lambda m, b: m(**b))

    def test_a_model_of_another_precision_runs_in_float32(self):
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            model = Model(lambda m, item, x: m.n(torch.cat([m.e(item), x], 1)), 6).to(dtype)
            batch = lambda: {"item": ids(B), "x": torch.rand(B, 2, dtype=dtype)}
            done = self.export(model, batch())
            self.assertTrue(all(one.dtype == dtype for one in model.parameters()))
            name = str(dtype).removeprefix("torch.")
            self.assertTrue(any(f"the model has values in {name}" in one for one in done.notes))
            done.pack(codec="f32")
            other = batch()
            with torch.no_grad():
                want = torch.sigmoid(model(**other))[:, 0].float()
            self.assertLess((torch.tensor(done.score(other)) - want).abs().max().item(), 1e-2)
        with self.assertRaisesRegex(ValueError, r"test_exporter.py:\d+, .*computes in bfloat16"):
            self.export(Lines("autocast"), (ids(B, 40), torch.ones(B, 40)))

    def test_half_precision_is_refused_only_where_the_scores_follow_from_the_batch(self):
        def with_another(m, item):
            with torch.autocast("cpu", torch.bfloat16):
                other = m.n(m.e(item)) * 2
            return {"ctr": m.n(m.e(item)), "other": other.float()}

        item = {"item": ids(B)}
        done = self.export(Model(with_another, 4), item, outputs=["ctr"])
        self.assertEqual(done.schema.outputs, ("ctr",))
        with self.assertRaisesRegex(ValueError, r"test_exporter.py:\d+, .*computes in bfloat16"):
            self.export(Model(with_another, 4), item, outputs=["other"])
        for forward in (lambda m, item: m.n((m.q.half() * 0.01).float()[item]),
                        lambda m, item: m.n((m.q.half() * 0.01)[item].view(-1, 4).float())):
            model = Model(forward, 4)
            model.register_buffer("q", torch.randint(-100, 100, (KEYS, 4), dtype=torch.int8))
            done = self.export(model, item)
            done.pack(codec="f32")
            self.assert_same(done, model, {"item": ids(B)}, lambda m, b: m(**b))
        with self.assertRaisesRegex(ValueError, "`mul` computes in float16"):
            self.export(Model(lambda m, item: m.n((m.e.weight.half()[item] * 2).float()), 4), item)

    def test_a_remainder_of_a_cast_that_changes_large_keys_is_refused(self):
        def refused(forward, x, by=KEYS):
            with self.assertRaisesRegex(ValueError, f"this cast changes .* remainder by {by}:"):
                self.export(Model(forward, 4), (x,))

        refused(lambda m, item: m.n(m.e(item.int() % KEYS)), ids(B))
        refused(lambda m, item: m.n(m.e((item.float() % KEYS).long())), ids(B))
        refused(lambda m, item: m.n(m.e(item.int() % KEYS)), ids(B).float())
        refused(lambda m, x: m.n(m.e(torch.cat(
            [x.int()[:, None], x[:, None]], 1) % 7).sum(1)), ids(B), 7)
        # 3,000,000,000 is -1,294,967,296 in 32 bits.
        large = 3_000_000_000 + ids(B)
        for forward, item in ((lambda m, item: m.n(m.e((item % KEYS).int())), large),
                              (lambda m, item: m.n(m.e(item.long() % KEYS)), ids(B).int()),
                              (lambda m, item: m.n(m.e(item.long() % KEYS)), ids(B).float())):
            model = Model(forward, 4)
            done = self.export(model, {"item": item})
            done.pack(codec="f32")
            self.assert_same(done, model, {"item": item}, lambda m, b: m(**b))

    def test_a_number_that_is_not_finite_is_named(self):
        def refused(pattern, forward, **batch):
            with self.assertRaisesRegex(ValueError, pattern):
                self.export(Model(forward, 4), batch)

        x = torch.randn(B, 2)
        added = lambda m, item, x: m.n(m.e(item)) + x.sum(1, keepdim=True)
        for wrong in (torch.nan, torch.inf):
            x[7, 1] = wrong
            refused(r"`x1`, sample 7: (nan|inf) is no finite number", added, item=ids(B), x=x)
        x = x.nan_to_num(posinf=0).abs()
        x[7, 1] = -1
        refused(r"output `logit` of the model, sample 7: nan is", lambda m, item, x: (
            added(m, item, x) + torch.log(x[:, 1:] + 0.5)), item=ids(B), x=x)
        done = self.export(Model(added, 4), {"item": ids(B), "x": x})
        x[2, 0] = torch.nan
        with self.assertRaisesRegex(ValueError, "`x0`, sample 2: nan is no finite number"):
            done.score({"item": ids(B), "x": x})

    def test_a_score_without_a_sigmoid_is_a_logit_unless_the_caller_says_otherwise(self):
        model, batch = Model(lambda m, item: m.n(m.e(item)) + 3.5, 4), {"item": ids(B)}
        said = "the model ends in no sigmoid, so its outputs are taken as logits"
        noted = lambda **more: any(said in one for one in self.export(model, batch, **more).notes)
        self.assertTrue(noted())
        self.assertFalse(noted(labels=torch.ones(B)) or noted(output="logit"))
        self.assertFalse(noted(output="score", labels=torch.full((B,), 4.0)))
        done = self.export(model, batch, output="score")
        self.assertEqual(done.schema.activation, "none")
        done.pack(codec="f32")
        self.assert_same(done, model, {"item": ids(B)}, lambda m, b: m(**b))
        with self.assertRaisesRegex(ValueError, 'a label is 4, and the model ends in no sigmoid'):
            self.export(model, batch, labels=torch.full((B,), 4.0))
        with self.assertRaisesRegex(ValueError, "output='rating': only"):
            self.export(model, batch, output="rating")

    def test_values_and_products_of_sigmoids_and_softmaxes_are_probabilities(self):
        def both(m, item):
            click, buy = torch.sigmoid(m.p(m.e(item))).unbind(1)
            return {"click": click, "bought": click * buy}

        softmax = lambda m, item: torch.softmax(m.p(m.e(item)), 1)[:, 1]
        for forward in (softmax, both, lambda m, item: torch.sigmoid(m.p(m.e(item)))[:, 0]):
            done = self.export(Model(forward, 4, p=nn.Linear(4, 2)), {"item": ids(B)})
            self.assertFalse(any("ends in no sigmoid" in one for one in done.notes))
        half = Model(lambda m, item: torch.sigmoid(m.n(m.e(item))) * 0.5, 4)
        self.assertIn("ends in no sigmoid", self.export(half, {"item": ids(B)}).notes[-1])

    def test_a_label_is_a_rating_a_share_or_unknown(self):
        model, batch = Model(lambda m, item: m.n(m.e(item)), 4), {"item": ids(B)}

        def recorded(values, model=model, **options):
            done = self.export(model, batch, labels=values, **options)
            done.pack(codec="f32")
            lines = (self.folder / "exported/probe.jsonl").read_text().splitlines()
            return [json.loads(line).get("label") for line in lines[:4]]

        labels = torch.tensor([0.7, 1.0, 0.0, 1.0]).repeat(B // 4)
        self.assertEqual(recorded(labels), [0.7, 1, 0, 1])
        self.assertEqual(recorded(labels.numpy()), [0.7, 1, 0, 1])
        self.assertEqual(recorded(labels * 5, output="score"), [3.5, 5, 0, 5])
        self.assertEqual(recorded(-labels.round(), output="score"), [-1, -1, 0, -1])
        for unknown in (-1, torch.nan):
            labels[1] = unknown
            self.assertEqual(recorded(labels), [0.7, None, 0, 1])
        both = Model(lambda m, item: {"ctr": m.n(m.e(item)), "cvr": m.n(-m.e(item))}, 4)
        self.assertEqual(recorded({"ctr": labels, "cvr": labels.flip(0), "more": None}, both), [
            {"ctr": 0.7, "cvr": 1}, {"cvr": 0}, {"ctr": 0, "cvr": 1}, {"ctr": 1, "cvr": 0.7}])
        for wrong in (1.5, -0.5, torch.inf):
            with self.assertRaisesRegex(ValueError, f"a label is {wrong:g}, and the model ends"):
                recorded(labels.where(labels != 0.7, wrong))

    def test_a_single_number_that_follows_from_the_samples_is_named(self):
        own, other = (SimpleNamespace(c=torch.tensor(size)) for size in SIZES)
        with self.assertRaisesRegex(ValueError, "`c` follows from the number of samples"):
            OfTwoSizes.same_constant(
                SimpleNamespace(module=own), SimpleNamespace(users=[None], target="c"), other)


class Lines(nn.Module):
    """A model whose `forward` has a line that a message names."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.e, self.n = kind, nn.Embedding(KEYS, 4), nn.Linear(4, 1)

    def forward(self, x, keep):
        rows, sums = self.e(x), self.e(x).sum(2)
        if self.kind == "mixing":
            rows = rows - rows.mean(0)  # mixing
        elif self.kind == "large":
            odd = 2 * keep.long() + 1  # large
            most = torch.zeros_like(odd).scatter_reduce(1, odd % 3, odd, "amax")
            rows = rows * (most % 5)[..., None]
        elif self.kind == "remainder":
            rows = self.e(x.int() % KEYS)  # remainder
        elif self.kind == "half":
            rows = self.e(x.half().long())  # half
        elif self.kind == "sizes":
            places = torch.nonzero(sums.flatten() > 0, as_tuple=True)[0]  # sizes
            ends = (sums > 0).sum(1).cumsum(0)
            return self.n(functional.embedding_bag(places, rows.flatten(0, 1), torch.cat(
                [ends[:1] * 0, ends]), mode="sum", include_last_offset=True))
        elif self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.n(rows.sum(1)).float()
        else:
            chosen = torch.topk(sums.exp() * keep, 3, dim=1).indices  # choice
            rows = rows.gather(1, chosen[..., None].expand(-1, -1, 4))
        return self.n(rows.sum(1))


class Jagged:
    """The interface of a `KeyedJaggedTensor`."""

    def __init__(self, bags):
        self.bags = bags

    def __getitem__(self, key):
        bags = self.bags[key]
        values = torch.tensor([k for bag in bags for k in bag])
        ends = torch.tensor([0] + [len(bag) for bag in bags]).cumsum(0)
        return SimpleNamespace(
            values=lambda: values, offsets=lambda: ends, lengths=lambda: ends.diff())

    def keys(self):
        return list(self.bags)

    values = lengths = to_dict = None


class Collection(nn.Module):
    """The interface of an `EmbeddingBagCollection`."""

    def __init__(self):
        super().__init__()
        self.embedding_bags = nn.ModuleDict({"t": nn.EmbeddingBag(KEYS, 4, mode="sum")})

    def embedding_bag_configs(self):
        pooling = SimpleNamespace(name="SUM")
        return [SimpleNamespace(name="t", feature_names=["a", "b"], pooling=pooling)]

    def forward(self, features):
        from hatchback_trainer.torchrec_calls import Pooled

        bag = self.embedding_bags["t"]
        pooled = lambda jagged: bag(jagged.values(), jagged.offsets()[:-1])
        return Pooled({one: pooled(features[one]) for one in "ab"})


class Collected(nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc, self.top = Collection(), nn.Linear(10, 1)

    def forward(self, dense, features):
        return self.top(torch.cat([dense, self.ebc(features).values()], dim=1))


class SequenceCollection(nn.Module):
    """The interface of an `EmbeddingCollection`."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({"t": nn.Embedding(KEYS, 4)})

    def embedding_configs(self):
        return [SimpleNamespace(name="t", feature_names=["a", "b"])]

    def forward(self, features):
        def rows(jagged):
            def padded(length, padding_value=0.0):
                ends = jagged.offsets().tolist()
                made = torch.full((len(ends) - 1, length, 4), padding_value)
                for place, (a, b) in enumerate(zip(ends, ends[1:])):
                    made[place, :b - a] = self.embeddings["t"](jagged.values()[a:b].long())
                return made
            return SimpleNamespace(to_padded_dense=padded, lengths=jagged.lengths)

        return {one: rows(features[one]) for one in "ab"}


class Sequences(nn.Module):
    def __init__(self, length=LONG):
        super().__init__()
        self.length = length
        self.ec, self.top = SequenceCollection(), nn.Linear(9, 1)

    def forward(self, features):
        rows = self.ec(features)
        mean = rows["b"].to_padded_dense(self.length, padding_value=-1.0).mean(1)
        lengths = rows["b"].lengths().unsqueeze(1).float()
        return self.top(torch.cat([rows["a"].to_padded_dense(2).sum(1), mean, lengths], dim=1))


if __name__ == "__main__":
    unittest.main()

"""Exports models whose columns have raw values: vocabularies, buckets, scalers and the
preprocessing of other packages, and columns that the samples of a request share.
"""

import unittest
from types import SimpleNamespace

import torch
from torch import nn

from export_case import CLOSE, ExportCase
from field_models import B, KEYS, LONG, Model, history, ids

import hatchback_trainer
from hatchback_trainer.columns import (
    Buckets, Dense, Vocabulary, columns_from_fuxictr, columns_from_keras, columns_from_sklearn
)
from hatchback_trainer.deploy import run


class Columns(ExportCase):
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

    def test_all_features_of_a_column_take_its_raw_values(self):
        words = [f"city {n}" for n in range(KEYS)]
        model = Model(lambda m, history: m.n(torch.cat([m.e(history).amax(1), m.i(history)], 1)), 8,
                      i=nn.EmbeddingBag(KEYS, 4, mode="mean"))
        done = self.export(
            model, {"history": ids(B, LONG)}, columns={"history": Vocabulary(words)},
            shared=["history"], hotness_max={"history": LONG})
        self.assertIn("the model takes `history` a second time", done.notes[0])
        self.assertIn("a request sends `history_2` too", done.notes[0])
        found = [(one.name, one.hotness_max, one.shared) for one in done.schema.features]
        self.assertEqual(found, [("history", LONG, True), ("history_2", LONG, True)])
        done.pack(codec="f32")
        rows = ids(2, LONG)
        with torch.no_grad():
            want = torch.sigmoid(model.eval()(rows))[:, 0].tolist()
        said = [[words[key] for key in row] for row in rows.tolist()]
        lines = [{"sparse": {"history": one, "history_2": one}} for one in said]
        found = self.scored(done, *lines)
        self.assertLess(max(abs(a - b) for a, b in zip(found, want)), CLOSE)

    def test_a_remainder_of_a_column_with_raw_values_takes_its_row_numbers(self):
        words = [f"city {n}" for n in range(KEYS)]
        model = Model(lambda m, city: m.n(torch.cat([m.e(city), m.i(city % 7)], 1)), 8,
                      i=nn.Embedding(7, 4))
        done = self.export(model, {"city": ids(B)}, columns={"city": Vocabulary(words)})
        functions = {one.name: one.key["function"] for one in done.schema.features}
        self.assertEqual(functions, {"city": "vocabulary", "city_2": "modulo"})

    def test_a_name_with_a_path_in_it_writes_no_file(self):
        with self.assertRaisesRegex(ValueError, "feature `../city`: names a file of words"):
            Vocabulary(("a",)).fields("../city", 0, self.folder)
        self.assertFalse((self.folder / "../city.words.txt").exists())

    def test_a_word_that_is_not_one_line_is_refused(self):
        for words in (("a", "b\nc"), ("a", "b\r"), ("\ufeffa", "b")):
            with self.assertRaisesRegex(ValueError, "of the vocabulary is not one line"):
                Vocabulary(words)
        self.assertEqual(Vocabulary(("a\rb", "\ufeffa")).words, ("a\rb", "\ufeffa"))

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
            (SimpleImputer(), StandardScaler(with_mean=False)),
            (SimpleImputer(), StandardScaler(with_std=False)),
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
        clipped = make_pipeline(
            MinMaxScaler(clip=True), SimpleImputer(strategy="constant", fill_value=-1.0)).fit(raw)
        with self.assertRaisesRegex(ValueError, "-1.0 replaces missing .*: put the imputer first"):
            columns_from_sklearn(clipped, names)
        one = MinMaxScaler(clip=True).fit([[4.0], [4.0]])
        step = columns_from_sklearn(one, ["age"])["age"]
        self.assertEqual([step.value(x) for x in (3.5, 4.5, 9.0)],
                         one.transform([[3.5], [4.5], [9.0]])[:, 0].tolist())
        rare = OrdinalEncoder(max_categories=2).fit(cities)
        with self.assertRaisesRegex(ValueError, "column 0: its infrequent categories, such as"):
            columns_from_sklearn(rare, ["city"])
        codes = OrdinalEncoder().fit([[5.0], [7.0], [9.5], [np.nan]])
        self.assertEqual(columns_from_sklearn(codes, ["code"])["code"].words, ("5", "7", "9.5"))

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


if __name__ == "__main__":
    unittest.main()

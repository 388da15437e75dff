"""Exports models that were not written for Hatchback, and scores other rows of them with the
`hatchback` program.

Each model is of a kind that the field uses. The program scores rows that the export did not see.
Without torch 2.7, onnxscript or the program the tests are skipped, and say so.
"""

import json
import unittest
from collections import namedtuple

import torch
from torch import nn
from torch.nn import functional

from export_case import CLOSE, ExportCase
from field_models import B, KEYS, LONG, Model, cases, history, ids, mean_of_keys, net, unlike_zeros
from torchrec_models import Collected, Jagged, Sequences, TwoCollected

from hatchback_trainer import window
from hatchback_trainer.columns import Vocabulary
from hatchback_trainer.deploy import run
from hatchback_trainer.tap import Tap


class Exports(ExportCase):
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
        self.assertRegex(" ".join(done.notes), "`history`: its padding takes row 49 of a table")
        done.pack(codec="f32")
        short = {"history": full["history"].clone()}
        short["history"][:, 3:] = KEYS - 1
        self.assert_same(done, model, short, lambda m, b: m(**b))
        front = {"history": full["history"].clone()}
        front["history"][:, :3] = KEYS - 1
        self.assert_same(done, model, front, lambda m, b: m(**b))

    def test_a_bag_may_come_with_the_padding_that_its_model_skips(self):
        for mode, modulus in (("mean", None), ("mean", 10), ("sum", None), ("max", 10)):
            bag = unlike_zeros(nn.EmbeddingBag(KEYS, 4, mode=mode, padding_idx=0))
            keys_of = lambda x, modulus=modulus: x if modulus is None else x % modulus
            model = Model(lambda m, x: m.n(m.bag(keys_of(x))), 4, bag=bag)
            done = self.export(model, {"x": ids(B, LONG, high=40)})
            self.assertEqual(done.schema.features[0].padding, 0)
            done.pack(codec="f32")
            rows = torch.tensor([[3, 5] + [0] * (LONG - 2), [20, 3] + [30] * (LONG - 2)])
            with torch.no_grad():
                want = torch.sigmoid(model.eval()(rows))[:, 0].tolist()
            found = self.scored(done, *({"sparse": {"x": row}} for row in rows.tolist()))
            self.assertLess(max(abs(a - b) for a, b in zip(found, want)), CLOSE)

    def test_a_mask_beside_a_bag_that_keeps_its_padding_reads_the_values(self):
        bag = nn.EmbeddingBag(KEYS, 4, mode="mean")
        count = lambda x: (x != 0).sum(1, keepdim=True)
        model = Model(lambda m, x: m.n(torch.cat([m.bag(x), count(x)], 1)), 5, bag=bag)
        batch = lambda: {"x": ids(B, LONG, high=4)}
        done = self.export(model, batch())
        self.assertIn("computes with the values of `x` themselves", done.notes[0])
        done.pack(codec="f32")
        self.assert_same(done, model, batch(), lambda m, b: m(**b))

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

    def test_a_collection_without_weights_ignores_those_of_its_features(self):
        bags = {"a": [[1, 2], [], [3]], "b": [[4], [4, 4, 7], [49]]}
        dense, model = torch.randn(3, 2), Collected()
        done = self.export(model, (dense, Jagged(bags, weight=2.0)))
        self.assertFalse(any(one.weighted for one in done.schema.features))
        done.pack(codec="f32")
        with torch.no_grad():
            want = torch.sigmoid(model(dense, Jagged(bags)))[:, 0].tolist()
        found = done.score((dense, Jagged(bags, weight=3.0)))
        self.assertLess(max(abs(a - b) for a, b in zip(found, want)), CLOSE)

    def test_two_collections_have_features_of_one_name_with_other_bags(self):
        users = {"a": [[1, 2], [], [3]], "b": [[4], [4, 4, 7], [49]]}
        items = {"a": [[9], [8, 8], []], "b": [[1, 2, 3], [2], [3, 4]]}
        model, batch = TwoCollected(), (Jagged(users), Jagged(items))
        done = self.export(model, batch)
        done.pack(codec="f32")
        with torch.no_grad():
            want = torch.sigmoid(model(*batch[::-1]))[:, 0].tolist()
        found = done.score(batch[::-1])
        self.assertLess(max(abs(a - b) for a, b in zip(found, want)), CLOSE)

    def test_a_method_is_exported_like_forward(self):
        model = Model(lambda m, item: None, 4)
        type(model).predict = lambda m, item: m.n(m.e(item))
        self.addCleanup(lambda: delattr(Model, "predict"))
        done = self.export(model.predict, {"item": ids(B)})
        done.pack(codec="f32")
        self.assert_same(done, model, {"item": ids(B)}, lambda m, b: m.predict(**b))

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

    def test_unnamed_outputs_leave_the_number_of_samples_open(self):
        done = self.export(Model(lambda m, item: {
            "score": m.n(m.e(item).view(item.shape[0], -1)), "vector": m.e(item)}, 4),
            {"item": ids(B)})
        self.assertEqual(done.schema.outputs, ("logit",))

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

    def test_scores_that_may_be_probabilities_get_no_sigmoid_in_silence(self):
        batch, labels = {"item": ids(B)}, torch.ones(B)
        click = lambda m, item: torch.sigmoid(m.n(m.e(item)))
        for forward in (lambda m, item: click(m, item).clamp(1e-6, 1 - 1e-6),
                        lambda m, item: 1 - click(m, item)):
            model = Model(forward, 4)
            with self.assertRaisesRegex(ValueError, "output `logit`: .* all 120 scores are in"):
                self.export(model, batch, labels=labels)
        done = self.export(model, batch, labels=labels, output="probability")
        self.assertEqual(done.schema.activation, "none")
        both = Model(lambda m, item: {"a": m.n(m.e(item)) + 9, "b": click(m, item)}, 4)
        with self.assertRaisesRegex(ValueError, "output `b`: not all outputs end in a sigmoid"):
            self.export(both, batch)

    def test_an_export_that_fails_leaves_its_folder_as_it_was(self):
        model, batch = Model(lambda m, item: m.n(m.e(item)), 4), {"item": ids(B)}
        self.export(model, batch)
        files = lambda: {
            path.name: path.read_bytes() for path in (self.folder / "exported").iterdir()}
        before = files()
        with torch.no_grad():
            model.e.weight += 1
        few = Vocabulary(("a", "b"))
        for said, wrong in (("the model has no feature `usr`", {"shared": ["usr"]}),
                            ("are not in its vocabulary", {"columns": {"item": few}}),
                            ("int32 is not one of", {"counts": {"e": torch.ones(KEYS).int()}}),
                            ("39 labels for a batch of 40", {"labels": torch.ones(B - 1)}),
                            ("80 labels for a batch of 40", {"labels": torch.ones(1, 2 * B)})):
            with self.assertRaisesRegex(ValueError, said):
                self.export(model, batch, **wrong)
            self.assertEqual(files(), before)
        self.export(model, batch)
        self.assertEqual(set(files()), set(before))
        self.assertNotEqual(files(), before)

    def test_a_batch_of_another_form_than_that_of_the_export_is_refused_by_name(self):
        model = Model(lambda m, history, item: m.n(m.e(history).sum(1) + m.e(item)), 4)
        batch = lambda long: {"history": ids(B, long), "item": ids(B)}
        done = self.export(model, batch(LONG))
        for long in (LONG - 2, LONG + 2):
            with self.assertRaisesRegex(ValueError, rf"`history`: a sample has shape \[{long}\]"):
                done.score(batch(long))
        with self.assertRaisesRegex(ValueError, "`item`: a sample has shape none"):
            done.score({"history": ids(B, LONG)})
        done.pack(codec="f32")
        other = dict(reversed(batch(LONG).items()))
        self.assert_same(done, model, other, lambda m, b: m(**b))

    def test_the_windows_of_an_exported_model_bring_the_fleet_to_its_scores(self):
        def forward(m, user, item, history):
            rows = m.twin(history) + m.position(torch.arange(LONG))
            return m.n(torch.cat([m.users[user], m.e.weight[item], rows.mean(1)], 1))

        twin = nn.Embedding(KEYS, 4)
        model = Model(forward, 12, twin=twin, position=nn.Embedding(LONG, 4),
                      users=nn.Parameter(torch.randn(KEYS, 4)))
        model.e.weight = twin.weight
        batch = lambda: {"user": ids(B), "item": ids(B), "history": ids(B, LONG)}
        done, flash = self.export(model, batch()), self.folder / "flash"
        done.pack(self.folder / "1.hatch", codec="f32")
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        tap = Tap(model, self.folder / "windows", "model", optimizer, exported=done)
        for _ in range(3):
            optimizer.zero_grad()
            model(**batch()).square().mean().backward()
            optimizer.step()
        found = window.read(tap.close(step=3))
        self.assertEqual(set(found.tables), {one.name for one in done.schema.tables})
        self.assertTrue(model.training)
        run("select", "--windows", self.folder / "windows", "--state", self.folder / "state",
            "--base", self.folder / "1.hatch", "--out", self.folder / "2.hatch")
        for bundle in ("1.hatch", "2.hatch"):
            run("install", self.folder / bundle, "--flash", flash)
        done.bundle = flash
        self.assert_same(done, model, batch(), lambda m, b: m(**b))

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


if __name__ == "__main__":
    unittest.main()

"""Refusals and notes of an export: each names the line, the column, the sample and the value."""

import re
import traceback
import unittest
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

from export_case import ExportCase
from field_models import B, KEYS, LONG, Model, history, ids, scaled_bags
from torchrec_models import Jagged, Sequences

from hatchback_trainer.capture import SIZES, OfTwoSizes, last_own
from hatchback_trainer.checks import differ


class Refusals(ExportCase):
    def test_a_sequence_without_one_length_is_refused(self):
        batch = Jagged({"a": [[1, 2], [], [3]], "b": [[4], [4, 4, 7], [49]]})
        for length in (None, 2):
            with self.assertRaisesRegex(ValueError, "a bag of 3 keys: the car needs one length"):
                self.export(Sequences(length), batch)

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

    def test_a_mask_that_leaves_no_sample_out_is_refused(self):
        def forward(m, item, x):
            keep, out = x[:, 0] > -5, torch.zeros(item.shape[0], 4)
            out[keep] = m.e(item)[keep]  # all
            return m.n(out)

        line = r"test_refusals.py:\d+.*no compared batch has a sample that this mask leaves out"
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
            line = rf"^\S*test_refusals.py:\d+, `.*# {kind}`: .*{what}"
            with self.assertRaisesRegex(ValueError, line):
                self.export(Lines(kind), (ids(B, 40), 2.0 ** 23 + torch.rand(B, 40) * 2 ** 24))

    def test_equal_values_that_the_sample_batch_lacks_are_noted_by_line(self):
        x, keep = ids(B, 40), torch.ones(B, 40)
        x[0, :38], keep[0, :38] = 7, 0  # equal values of equal keys: each choice gives one score
        done = self.export(Lines("choice"), (x, keep))
        line = r"test_refusals.py:\d+, `.*# choice`: the scores depend on which of equal values"
        self.assertRegex(" ".join(done.notes), line)
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
        refused(r"test_refusals.py:\d+, `if int\(item.max\(\)\) > 9:`", branch, item)
        refused("two calls of the model", lambda m, item: m.n(m.e(item)) + torch.rand(1), item)
        refused("samples of a batch reach each other", lambda m, item: m.n(
            m.e(item) - m.e(item).mean(0)), item)
        both = {"item": ids(B), "x": torch.randn(B, 5)}
        for mixed in (lambda x: x - x.t().mean(1), lambda x: x[0, 0].expand(len(x), 5)):
            refused("samples", lambda m, item, x: m.n(torch.cat([m.e(item), mixed(x)], 1)), both, 9)
        refused(r"its batch at .*test_refusals.py:\d+, .* no loop over the samples",
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
            what = rf"test_refusals.py:\d+, .*`x`, sample 3: row number {wrong} of a table of 50"
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
        with self.assertRaisesRegex(ValueError, r"test_refusals.py:\d+, .*computes in bfloat16"):
            self.export(Lines("autocast"), (ids(B, 40), torch.ones(B, 40)))

    def test_half_precision_is_refused_only_where_the_scores_follow_from_the_batch(self):
        def with_another(m, item):
            with torch.autocast("cpu", torch.bfloat16):
                other = m.n(m.e(item)) * 2
            return {"ctr": m.n(m.e(item)), "other": other.float()}

        item = {"item": ids(B)}
        done = self.export(Model(with_another, 4), item, outputs=["ctr"])
        self.assertEqual(done.schema.outputs, ("ctr",))
        with self.assertRaisesRegex(ValueError, r"test_refusals.py:\d+, .*computes in bfloat16"):
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


if __name__ == "__main__":
    unittest.main()

"""Compares operations in the car's forms with PyTorch's own, over random inputs."""

import random
import sys
import unittest
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hatchback_trainer.rewrites import (  # noqa: E402
    complex_to_complex, complex_to_real, each_part, pair_product, put_in_each, real_to_complex,
    row_of_each, scattered
)

SEED = random.randrange(1 << 30)
OLD = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 7)
said = f"SKIPPED: torch {torch.__version__}" if OLD else f"seed {SEED}"
print(f"test_rewrites: {said}")


def number(low, high):
    return int(torch.randint(low, high, ()))


@unittest.skipIf(OLD, "export needs torch 2.7")
class Rewrites(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(SEED)

    def assert_close(self, found, want):
        self.assertEqual(found.shape, want.shape)
        self.assertLess(((found - want).abs().max() / (1 + want.abs().max())).item(), 2e-6)

    def test_fourier_transforms_are_those_of_torch(self):
        real, aten = torch.view_as_real, torch.ops.aten
        for _ in range(60):
            shape = [number(1, 9) for _ in range(number(2, 4))]
            axes = torch.randperm(len(shape))[: number(1, len(shape) + 1)].tolist()
            mode, onesided = number(0, 3), bool(number(0, 2))
            values = torch.randn(shape)
            made = aten._fft_r2c(values, axes, mode, onesided)
            self.assert_close(real_to_complex(values, axes, mode, onesided), real(made))
            whole = torch.randn(shape, dtype=torch.complex64)
            forward = bool(number(0, 2))
            self.assert_close(
                complex_to_complex(real(whole), axes, mode, forward),
                real(aten._fft_c2c(whole, axes, mode, forward)))
            half = aten._fft_r2c(values, axes, 0, True)
            length = shape[axes[-1]]
            self.assert_close(
                complex_to_real(real(half), axes, mode, length),
                aten._fft_c2r(half, axes, mode, length))

    def test_pairs_compute_as_complex_numbers(self):
        real = torch.view_as_real
        for _ in range(20):
            shape = [number(1, 5) for _ in range(number(1, 4))]
            a, b = (torch.randn(shape, dtype=torch.complex64) for _ in range(2))
            plain = torch.randn(shape)
            two = ["pair", "pair"]
            made = pair_product("aten.mul.Tensor", two, real(a), real(b))
            self.assert_close(made, real(a * b))
            made = each_part("aten.mul.Tensor", ["", "pair"], plain, real(b))
            self.assert_close(made, real(plain * b))
            rows = a.reshape(shape[0], -1)
            words = "ab,cb->ca"
            made = pair_product("aten.einsum.default", ["", *two], words, [real(rows)] * 2)
            self.assert_close(made, real(torch.einsum(words, rows, rows)))
            self.assert_close(
                each_part("aten.sub.Tensor", ["summand", "pair"], plain, real(b)), real(plain - b))
            self.assert_close(
                each_part("aten.rsub.Tensor", ["pair", "summand"], real(b), plain), real(plain - b))
            both = each_part("aten.cat.default", ["pair", "pair", ""], [real(a), real(b)], -1)
            self.assert_close(both, real(torch.cat([a, b], -1)))

    def test_writes_at_computed_places_are_those_of_torch(self):
        for _ in range(60):
            shape = [number(1, 6) for _ in range(number(1, 4))]
            axis = number(-len(shape), len(shape))
            count = number(1, 7)
            given = list(shape)
            given[axis] = count
            values, updates = torch.randn(shape), torch.randn(given)
            places = torch.randint(shape[axis], given)
            self.assert_close(
                scattered(values, axis, places, updates), values.scatter(axis, places, updates))
            for how in ("sum", "amax", "amin"):
                self.assert_close(
                    scattered(values, axis, places, updates, how),
                    values.scatter_reduce(axis, places, updates, how))

    def test_rows_by_the_number_of_the_sample_are_those_of_torch(self):
        for _ in range(40):
            count, keys, long = number(1, 5), number(1, 6), number(1, 6)
            values = torch.randn(count, long, *[number(1, 4) for _ in range(number(0, 3))])
            places = torch.randint(-long, long, (count, keys))
            samples = torch.arange(count)
            self.assert_close(row_of_each(values, places), values[samples[:, None], places])
            self.assert_close(row_of_each(values, places[:, 0]), values[samples, places[:, 0]])
            flat, given = torch.randn(count, long), torch.randn(count, keys)
            self.assert_close(
                put_in_each(flat, places, given, True),
                flat.index_put((samples[:, None], places), given, accumulate=True))
            want = flat.clone()
            for place in range(keys):
                want[samples, places[:, place]] = given[:, place]
            self.assert_close(put_in_each(flat, places, given), want)


if __name__ == "__main__":
    unittest.main()

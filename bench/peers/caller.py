"""Calls the Python package as a program in Python does, and says how long each call took.

usage: caller.py TARGET FLASH REQUESTS

caller.c describes REQUESTS, what this program reads, and what it prints.
"""

import sys
from time import perf_counter_ns

import numpy as np

import hatchback


def read_requests(path, model):
    """Returns the requests as the arrays of calls."""
    with open(path) as file:
        count, samples = map(int, file.readline().split())
        lines = [file.readline().split() for _ in range(count * samples)]
    width, requests = len(model.dense_features), []
    for first in range(0, len(lines), samples):
        dense, bags = [], [[] for _ in model.features]
        for line in lines[first : first + samples]:
            dense.append([float(value) for value in line[:width]])
            at = width
            for bag in bags:
                end = at + 1 + int(line[at])
                bag.append([int(key) for key in line[at + 1 : end]])
                at = end
        keys = np.array([key for bag in bags for one in bag for key in one], np.uint64)
        offsets = np.cumsum([0] + [len(one) for bag in bags for one in bag], dtype=np.uint32)
        requests.append((np.array(dense, np.float32), keys, offsets))
    return requests


def main():
    target, flash, path = sys.argv[1:]
    model = hatchback.Model.open(flash, target)
    requests = read_requests(path, model)

    hashed = 14695981039346656037
    for request in requests:
        for byte in model.score(*request).scores.tobytes():
            hashed = (hashed ^ byte) * 1099511628211 % 2**64
    print(hashed, flush=True)

    number = 0
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            dense, keys, offsets = requests[number % len(requests)]
            start = perf_counter_ns()
            model.score(dense, keys, offsets).scores
            times.append(perf_counter_ns() - start)
            number += 1
        print(*times, flush=True)
    model.close()


main()

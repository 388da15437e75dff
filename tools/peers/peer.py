"""What the peers' programs share: lines of JSON in, lines of JSON out, and the CPU time of each call.

The bench sends {"setup": ...} once, then {"round": ...} as often as it likes, and gets {"times_us": [...]}, one time
a call: so it can run the rounds of all engines in turn. It has put this process on one core before it started it.
A program never judges a time and never tunes an engine down; on the contrary, see `settle`.
"""

import importlib.util
import json
import os
import sys
import time
import traceback

NEVER = 1 << 35


def settle():
    """Starts the program anew with what these libraries need to run as fast as they can."""
    if "HATCHBACK_PEER" in os.environ:
        return
    os.environ["HATCHBACK_PEER"] = "1"
    torch = importlib.util.find_spec("torch").submodule_search_locations[0]
    # libtorch.so and libc10.so both carry the processor's description; FBGEMM reads the one that nobody fills, and
    # then runs its scalar reference code, 20 times slower, unless the other comes first.
    os.environ["LD_PRELOAD"] = os.path.join(torch, "lib", "libc10.so")
    # torch asks for huge pages only when told to.
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    # Results of some megabytes would be given back to the system and taken anew in every call.
    os.environ["GLIBC_TUNABLES"] = f"glibc.malloc.mmap_threshold={NEVER}:glibc.malloc.trim_threshold={NEVER}"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])


def times_us(call, calls):
    """CPU time of the process for each of `call(0)`, `call(1)`, ..."""
    call(0)
    times = []
    for i in range(calls):
        start = time.process_time_ns()
        call(i)
        times.append((time.process_time_ns() - start) / 1000)
    return times


def serve(peer):
    """Answers on standard output until standard input ends. `peer` has a method for each kind of line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        try:
            ((kind, options),) = json.loads(line).items()
            answer = getattr(peer, kind)(**options)
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

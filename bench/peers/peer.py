"""The protocol with the bench and the CPU time of each call, for all programs of the peers.

The bench and the program exchange lines of JSON. The bench sends {"setup": ...} once, then any
number of {"round": ...}. The program answers each round with {"times_us": [...]}, one time for
each call. The bench can therefore run the rounds of all engines in turn. The bench pins this
process to one core before the program starts. A program never judges a time and never makes an
engine slower. `restart_tuned` gives the engines their best settings.
"""

import importlib.util
import json
import os
import sys
import time
import traceback

# A threshold in bytes that no allocation reaches.
UNREACHED_BYTES = 1 << 35


def restart_tuned():
    """Restarts the program once, with the environment in which these libraries run fastest."""
    if "HATCHBACK_PEER" in os.environ:
        return
    os.environ["HATCHBACK_PEER"] = "1"
    torch = importlib.util.find_spec("torch").submodule_search_locations[0]
    # libtorch.so and libc10.so both export the processor's description, but only libc10.so fills
    # its copy. FBGEMM reads the copy that is loaded first. With the empty copy it runs scalar code,
    # 20 times slower.
    os.environ["LD_PRELOAD"] = os.path.join(torch, "lib", "libc10.so")
    # torch requests huge pages only with this setting.
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    # By default malloc returns results of some megabytes to the system and requests them again in
    # every call.
    thresholds = [f"glibc.malloc.{name}_threshold={UNREACHED_BYTES}" for name in ("mmap", "trim")]
    os.environ["GLIBC_TUNABLES"] = ":".join(thresholds)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])


def times_us(call, calls, warm_up=0):
    """Returns the CPU time of the process for each of `call(0)`, `call(1)`, ...

    Before them it runs `call(warm_up)`.
    """
    call(warm_up)
    times = []
    for i in range(calls):
        start = time.process_time_ns()
        call(i)
        times.append((time.process_time_ns() - start) / 1000)
    return times


def serve(peer):
    """Answers each line of standard input on standard output, until the input ends.

    `peer` has a method for each kind of line.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output that a library prints goes to standard error
    for line in sys.stdin:
        try:
            ((kind, options),) = json.loads(line).items()
            answer = getattr(peer, kind)(**options)
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

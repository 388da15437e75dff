#!/bin/sh
# Proves and measures the GPU path on this machine, which needs a CUDA driver of 11.4 or later and nothing else:
#   ./run.sh [--quick]
# What the machine is; every kernel against its CPU twin; whole requests on the demo model; lookups and requests timed.
# TensorRT runs the dense network where its libraries and headers are. Leaves report/report.json, report/report.txt and the
# log of each part. Exit status 1: something failed. With HATCHBACK_STANDIN=.../libcuda.so it runs on that stand-in, with
# HATCHBACK_RUN=... its programs are run by that one, such as an emulator.
set -u
cd "$(dirname "$0")" || exit 1
here=$PWD
quick=
[ "${1:-}" = --quick ] && quick=--quick
rm -rf report
mkdir report
for program in bin/*.gz; do [ ! -f "$program" ] || gunzip -f "$program"; done
export HATCHBACK_REPOSITORY="$here/tree" HATCHBACK_GPU=real
if [ -n "${HATCHBACK_STANDIN:-}" ]; then
    unset HATCHBACK_GPU
    export LD_LIBRARY_PATH="$(dirname "$HATCHBACK_STANDIN"):${LD_LIBRARY_PATH:-}"
fi

# Where the system's C library is older than the programs need, they run on the one in lib/.
loader=$(echo "$here"/lib/ld-linux-*.so.*)
run() {
    program=$here/bin/$1
    shift
    if [ -z "${own_libc:-}" ]; then ${HATCHBACK_RUN:-} "$program" "$@"; else "$loader" --library-path "$here/lib:${LD_LIBRARY_PATH:-}:/usr/local/nvidia/lib64:/usr/lib/$(uname -m)-linux-gnu:/usr/lib64:/usr/local/cuda/lib64" "$program" "$@"; fi
}
own_libc=
if [ -e "$loader" ] && ! run hatchback --version >/dev/null 2>&1; then own_libc=yes; fi
if ! run hatchback --version; then echo "the programs do not run here"; exit 1; fi

failed=0 parts=
say() { echo "$@" | tee -a report/report.txt; }
part() { # part NAME COMMAND...: its output to a log; whether it passed to the report
    name=$1
    shift
    if "$@" >"report/$name.log" 2>&1; then outcome=passed; else outcome=FAILED failed=1; fi
    skips=$(grep -c SKIPPED "report/$name.log")
    say "$(printf '%-28s %s' "$name" "$outcome")$([ "$skips" = 0 ] || echo ", $skips skipped")"
    [ "$outcome" = passed ] || tail -n 15 "report/$name.log"
    parts="$parts${parts:+, }{\"name\": \"$name\", \"result\": \"$outcome\"}"
}

machine() {
    uname -srm
    (. /etc/os-release && echo "$PRETTY_NAME") 2>/dev/null
    [ -z "$own_libc" ] || echo "the system's C library is older than the programs need: they run on the bundle's"
    cat /proc/driver/nvidia/version 2>/dev/null
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.memory,clocks.max.sm --format=csv 2>/dev/null || echo "no nvidia-smi"
}
say "== the machine"
machine | tee -a report/report.txt

# What is to be known first, above all whether the driver takes the kernels' machine code.
say "== the driver and the GPU"
if ! (export CUDA_CACHE_DISABLE=1 && run hatchback bench gpu --facts) >report/facts.log 2>&1; then
    say "nothing can be proven here: $(tail -n 1 report/facts.log)"
    echo '{"parts": [{"name": "facts", "result": "FAILED"}]}' >report/report.json
    exit 1
fi
tee -a report/report.txt <report/facts.log

say "== TensorRT"
tensorrt=
if shim=$(tree/kernels/tensorrt/make "$here/report" 2>report/tensorrt.log); then
    say "its headers are here: $shim"
    tensorrt="--tensorrt $shim"
else
    say "not used: $(tail -n 1 report/tensorrt.log)"
fi

say "== every kernel against its CPU twin, and requests on models"
for suite in bin/*; do
    [ "$suite" = bin/hatchback ] || part "$(basename "$suite")" run "$(basename "$suite")" --nocapture
done

# The demo model's scores, here and on the CPU, to the bit.
demo_requests() {
    demo=tree/tools/demo/coupon samples=heldout
    [ -z "$quick" ] || samples=probe
    run hatchback pack $demo/model.toml -o report/demo.bundle || return 1
    for device in cpu cuda; do
        run hatchback run report/demo.bundle --samples $demo/$samples.jsonl --batch 32 --device $device >report/$device.scores || return 1
    done
    [ -s report/cpu.scores ] && cmp report/cpu.scores report/cuda.scores && echo "$(wc -l <report/cpu.scores) scores, the same to the bit"
    result=$?
    rm -f report/demo.bundle report/*.scores
    return $result
}
say "== the demo model"
part demo demo_requests

say "== measured"
[ -z "${HATCHBACK_STANDIN:-}" ] || say "(on the stand-in: no time says anything)"
part bench run hatchback bench gpu $quick $tensorrt --plans report --json report/bench.json
part bench_exact run hatchback bench gpu $quick --exact --json report/bench_exact.json
cat report/bench.log | tee -a report/report.txt
json() { if [ -s "$1" ]; then cat "$1"; else echo null; fi; }
{
    printf '{"parts": [%s],\n"tensorrt": %s,\n"bench":\n' "$parts" "$([ -n "$tensorrt" ] && echo true || echo false)"
    json report/bench.json
    printf ',\n"bench_exact":\n'
    json report/bench_exact.json
    echo '}'
} >report/report.json
echo "report/report.json and report/report.txt tell all; report/*.log the rest"
exit $failed

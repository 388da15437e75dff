#!/bin/sh
# Tests and measures the GPU path on this machine, which needs only a CUDA driver of 11.4 or later:
#   ./run.sh [--quick] [--only PART,...] [FOLDER]
# It prints the machine, compares every kernel with its CPU twin, runs requests of the demo model, and
# times lookups and requests. TensorRT runs the dense network where its libraries and headers are
# installed. FOLDER (default: `report` next to this file, or a new folder under TMPDIR if that cannot be
# written) receives report.json, report.txt and the log of each part. A failed part does not stop the
# others; each part reports its result. Exit status 1: a part failed.
# PART is `suites`, the name of one suite, `demo`, `bench`, `bench_exact`, `shapes` or `peers`; each takes
# less than 4 minutes on a GPU. Without --only all of them run. `peers` needs python3 with torch; other
# libraries are described in tree/tools/peers/gpu.py.
# HATCHBACK_STANDIN=.../libcuda.so runs on that stand-in. HATCHBACK_RUN=... runs the programs through
# another, such as an emulator. HATCHBACK_BENCH="--batch 4" measures only that.
set -u
here=$(cd "$(dirname "$0")" && pwd)
quick= to= only= next=
for argument; do
    if [ -n "$next" ]; then only=$argument next=; continue; fi
    case $argument in
    --quick) quick=--quick ;;
    --only) next=only ;;
    -*) sed -n '2,14s/^# \?//p' "$0" >&2; exit 2 ;;
    *) to=$argument ;;
    esac
done
if [ -z "$to" ]; then
    to=$here/report
    { rm -rf "$to" && mkdir "$to"; } 2>/dev/null || to=$(mktemp -d) || exit 1
fi
mkdir -p "$to/bin" && to=$(cd "$to" && pwd) || exit 1
cd "$to" || exit 1
rm -f ./*.log report.json report.txt bench.json bench_exact.json shapes.json peers.json
for program in "$here"/bin/*.gz; do
    name=$(basename "$program" .gz)
    { gzip -dc "$program" >"bin/$name" && chmod +x "bin/$name"; } || exit 1
done
export HATCHBACK_REPOSITORY="$here/tree" HATCHBACK_GPU=real
if [ -n "${HATCHBACK_STANDIN:-}" ]; then
    unset HATCHBACK_GPU
    export LD_LIBRARY_PATH="$(dirname "$HATCHBACK_STANDIN"):${LD_LIBRARY_PATH:-}"
fi

# If the system's C library is older than the programs need, they run on the one in lib/.
loader=$(echo "$here"/lib/ld-linux-*.so.*)
run() {
    program=$to/bin/$1
    shift
    if [ -z "${own_libc:-}" ]; then ${HATCHBACK_RUN:-} "$program" "$@"; else "$loader" --library-path "$here/lib:${LD_LIBRARY_PATH:-}:/usr/local/nvidia/lib64:/usr/lib/$(uname -m)-linux-gnu:/usr/lib64:/usr/local/cuda/lib64" "$program" "$@"; fi
}
own_libc=
if [ -e "$loader" ] && ! run hatchback --version >/dev/null 2>&1; then own_libc=yes; fi

failed=0 parts=
say() { echo "$@" | tee -a report.txt; }
# Prints a text as a JSON string.
quoted() { printf '"%s"' "$(printf %s "$1" | tr '\n\t' '  ' | tr -d '\000-\037' | sed 's/[\\"]/\\&/g')"; }
outcome() { # outcome NAME passed|FAILED|"not run" WHY
    say "$(printf '%-28s %s' "$1" "$2")${3:+: $3}"
    parts="$parts${parts:+,
}{\"name\": \"$1\", \"result\": \"$2\", \"why\": $(quoted "${3:-}")}"
}
# Whether --only names a part, or there is no --only.
chosen() { case ,$only, in ,, | *,"$1",*) ;; *) return 1 ;; esac; }
part() { # part NAME COMMAND...: writes its output to a log and its result to the report
    name=$1
    shift
    "$@" >"$name.log" 2>&1
    status=$?
    skips=$(grep -c SKIPPED "$name.log")
    if [ "$status" = 0 ]; then
        outcome "$name" passed "$([ "$skips" = 0 ] || echo "$skips skipped")"
    else
        failed=1
        outcome "$name" FAILED "status $status: $(grep -v '^ *$' "$name.log" | grep -m 1 -iE 'error|panicked|refused|fail' || tail -n 1 "$name.log")"
        tail -n 15 "$name.log"
    fi
    return "$status"
}
not_run() { # not_run WHY NAME...
    why=$1
    shift
    for name; do outcome "$name" "not run" "$why"; done
}

machine() {
    uname -srm
    (. /etc/os-release && echo "$PRETTY_NAME") 2>/dev/null
    [ -z "$own_libc" ] || echo "the system's C library is older than the programs need; they run on the bundle's"
    cat /proc/driver/nvidia/version 2>/dev/null
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.memory,clocks.max.sm --format=csv 2>/dev/null || echo "no nvidia-smi"
}
say "== the machine"
machine | tee -a report.txt

# Compares the demo model's scores on the GPU and on the CPU, to the bit.
demo_requests() {
    demo=$here/tree/tools/demo/coupon samples=heldout
    [ -z "$quick" ] || samples=probe
    run hatchback pack "$demo/model.toml" -o demo.bundle || return 1
    for device in cpu cuda; do
        run hatchback run demo.bundle --samples "$demo/$samples.jsonl" --batch 32 --device $device >$device.scores || return 1
    done
    [ -s cpu.scores ] && cmp cpu.scores cuda.scores && echo "$(wc -l <cpu.scores) scores, equal to the bit"
}

suites=$(for suite in bin/*; do [ "$suite" = bin/hatchback ] || basename "$suite"; done)
# Times other libraries on the keys of some shapes. On the stand-in only torch runs, on the CPU.
peers() {
    command -v python3 >/dev/null || { echo "SKIPPED: all peers: no python3"; return 0; }
    size=8192 device=cuda
    [ -z "${HATCHBACK_STANDIN:-}" ] || size=4 device=cpu
    run hatchback bench gpu --shapes $quick --batch "$size" --keys keys --json peer_shapes.json &&
        python3 "$here/tree/tools/peers/gpu.py" peer_shapes.json keys --device "$device" --json peers.json
    outcome_of_peers=$?
    rm -rf keys peer_shapes.json
    return "$outcome_of_peers"
}

# Runs first, because every later part needs a driver that accepts the kernels' machine code.
facts() { CUDA_CACHE_DISABLE=1 run hatchback bench gpu --facts; }
say "== the driver and the GPU"
if part programs run hatchback --version && part gpu facts; then
    tee -a report.txt <gpu.log

    say "== TensorRT"
    tensorrt=
    if shim=$("$here/tree/kernels/tensorrt/make" "$to" 2>tensorrt.log); then
        say "headers found, shim built: $shim"
        tensorrt="--tensorrt $shim"
    else
        say "not used: $(tail -n 1 tensorrt.log)"
    fi

    say "== every kernel against its CPU twin, and requests on models"
    for suite in $suites; do
        if chosen suites || chosen "$suite"; then part "$suite" run "$suite" --nocapture; fi
    done

    say "== the demo model"
    chosen demo && part demo demo_requests
    rm -f demo.bundle ./*.scores

    say "== measured"
    [ -z "${HATCHBACK_STANDIN:-}" ] || say "(on the stand-in: times mean nothing)"
    chosen bench && part bench run hatchback bench gpu $quick ${HATCHBACK_BENCH:-} $tensorrt --plans "$to" --json bench.json
    chosen bench_exact && part bench_exact run hatchback bench gpu $quick ${HATCHBACK_BENCH:-} --precision exact --json bench_exact.json
    chosen shapes && part shapes run hatchback bench gpu --shapes $quick ${HATCHBACK_BENCH:-} --json shapes.json
    chosen peers && part peers peers
    cat bench.log shapes.log peers.log 2>/dev/null | tee -a report.txt
else
    tensorrt=
    why="nothing can be tested here: $(tail -n 1 gpu.log 2>/dev/null || tail -n 1 programs.log)"
    not_run "$why" $suites demo bench bench_exact shapes peers
fi
rm -rf bin

json() { if [ -s "$1" ]; then cat "$1"; else echo null; fi; }
{
    printf '{"parts": [%s],\n"tensorrt": %s,\n"bench":\n' "$parts" "$([ -n "$tensorrt" ] && echo true || echo false)"
    json bench.json
    printf ',\n"bench_exact":\n'
    json bench_exact.json
    printf ',\n"shapes":\n'
    json shapes.json
    printf ',\n"peers":\n'
    json peers.json
    echo '}'
} >report.json
say "$([ "$failed" = 0 ] && echo passed || echo FAILED): $to/report.json and report.txt have the results, the logs next to them the details"
exit $failed

#!/bin/sh
# Tests and measures the GPU path on this machine, which needs only a CUDA driver of 11.4 or later:
#   ./run.sh [--quick] [--only PART,...] [--pack FILE] [FOLDER]
# The parts, most valuable first; each is made for less than 4 minutes on a GPU, `first` for 5:
#   first     three suites, the litmus of changes and recorded queries, requests, lookups of f16 rows
#   suites    every kernel against its CPU twin, and requests on models
#   demo      the demo model's scores on the GPU and on the CPU
#   shapes    lookups of every codec and row size beside a plain gather
#   bench     requests of every batch size with cuBLAS or TensorRT, then on Hatchback's kernels alone
#   workers   four workers at once      swap      a model that is swapped while requests run
#   profile   ncu on four kernels       sanitize  compute-sanitizer on the suite of the kernels
#   peers     other libraries on the same keys: torch, and those of tree/bench/peers/gpu.py
# Without --only all of them run. PART may also be the name of one step, such as `litmus` or `cuda_swaps`.
# FOLDER (default: `report` next to this file, or a new folder under TMPDIR if that cannot be written)
# keeps the results of all calls: report.jsonl and report.txt grow by a line a step, NAME.log and NAME.json
# are those of the step's last run. After each step all of it is packed into FILE (default:
# FOLDER/results.tar.gz). A failed step does not stop the others. Exit status 1: a step failed.
# HATCHBACK_STANDIN=.../libcuda.so runs on that stand-in; --quick chooses sizes for it. HATCHBACK_RUN=...
# runs the programs through another, such as an emulator. HATCHBACK_BENCH="--batch 4" measures only that.
set -u
here=$(cd "$(dirname "$0")" && pwd)
quick='' to='' only='' packed='' value_of=''
for argument; do
    case $value_of:$argument in
    only:*) only=$argument value_of='' ;;
    packed:*) packed=$argument value_of='' ;;
    :--quick) quick=--quick ;;
    :--only) value_of=only ;;
    :--pack) value_of=packed ;;
    :-*) sed -n '2,22s/^# \?//p' "$0" >&2; exit 2 ;;
    *) to=$argument ;;
    esac
done
if [ -z "$to" ]; then
    to=$here/report
    { mkdir -p "$to" && [ -w "$to" ]; } 2>/dev/null || to=$(mktemp -d) || exit 1
fi
mkdir -p "$to" && to=$(realpath "$to") && packed=$(realpath "${packed:-$to/results.tar.gz}") || exit 1
[ -z "${CUEMBED:-}" ] || CUEMBED=$(realpath "$CUEMBED") || exit 1
[ -z "${GPU_CACHE:-}" ] || GPU_CACHE=$(realpath "$GPU_CACHE") || exit 1
cd "$to" || exit 1

# The unpacked programs are no result, so they lie elsewhere.
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 143' HUP INT TERM
unpack() {
    if [ -e "$here/programs.tar.gz" ]; then tar xzf "$here/programs.tar.gz" -C "$work"
    elif command -v xz >/dev/null; then tar xJf "$here/programs.tar.xz" -C "$work"
    else python3 -m tarfile -e "$here/programs.tar.xz" "$work"; fi
}
unpack || exit 1

# NVIDIA's tools are often installed beside the search path.
for folder in /usr/local/cuda/bin /opt/nvidia/nsight-compute/*; do PATH=$PATH:$folder; done
# `real`: the suites take this machine's GPU as it is. The stand-in then plays it too.
export HATCHBACK_REPOSITORY="$here/tree" HATCHBACK_GPU=real
if [ -n "${HATCHBACK_STANDIN:-}" ]; then
    STANDIN_DEVICE=desk LD_LIBRARY_PATH="$(dirname "$HATCHBACK_STANDIN")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export STANDIN_DEVICE LD_LIBRARY_PATH
fi

# cuBLAS of a Python environment lies outside the loader's path. These folders come before the loader's
# own; the report names the library that is taken.
add_cublas_of_python() {
    folders=$(python3 -c '
import glob, os, sys
libraries = [f for p in sys.path for f in glob.glob(os.path.join(p, "nvidia/*/lib/libcublas.so.*"))]
folders = {os.path.dirname(f) for f in libraries}
print(":".join(f for f in sorted(folders) if glob.glob(f + "/libcublasLt.so.*")))' 2>/dev/null) || return 0
    [ -z "$folders" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folders"
}
add_cublas_of_python

# Prints the cuBLAS that the loader finds under the names that Hatchback tries, in Hatchback's order.
cublas_taken() {
    command -v python3 >/dev/null || { echo "unknown, no python3; see bench_f32.log"; return; }
    python3 -c '
import ctypes
for name in ["libcublas.so"] + [f"libcublas.so.{release}" for release in (13, 12, 11)]:
    try:
        ctypes.CDLL(name)
    except OSError:
        continue
    paths = [line.split()[-1] for line in open("/proc/self/maps") if "libcublas.so" in line]
    print(paths[0])
    break
else:
    print("none")'
}

# The program has `seconds`, so that one that hangs leaves time for the others. It is stopped with all its
# children: under a tool of NVIDIA's it is a child itself.
limited() {
    if [ -n "$quick" ] || ! command -v timeout >/dev/null; then "$@"; else timeout -k 5 "$seconds" "$@"; fi
}
seconds=235
# If the system's C library is older than the programs need, they run on the one in lib/.
loader=$(echo "$here"/lib/ld-linux-*.so.*)
libraries=/usr/local/nvidia/lib64:/usr/lib/$(uname -m)-linux-gnu:/usr/lib64:/usr/local/cuda/lib64
own_libc=''
run() { # run PROGRAM ARGUMENT...
    program=$work/bin/$1
    shift
    set -- "$program" "$@"
    [ -z "$own_libc" ] || set -- "$loader" --library-path "$here/lib:${LD_LIBRARY_PATH:-}:$libraries" "$@"
    limited ${HATCHBACK_RUN:-} "$@"
}
if [ -e "$loader" ] && ! run hatchback --version >/dev/null 2>&1; then own_libc=yes; fi

failed=0 part='' known=, recorded=, summary=''
say() { printf '%s\n' "$*" | tee -a report.txt; }
# Prints a text as a JSON string.
quoted() { printf '"%s"' "$(printf %s "$1" | tr '\n\t' '  ' | tr -d '\000-\037' | sed 's/[\\"]/\\&/g')"; }
outcome() { # outcome STEP passed|SKIPPED|FAILED|"not run" SECONDS [WHY]
    line=$(printf '%-28s %s' "$1" "$2")${4:+: $4}
    say "$line"
    summary="$summary$line
"
    printf '{"at": "%s", "part": "%s", "step": "%s", "result": "%s", "seconds": %s, "why": %s}\n' \
        "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$part" "$1" "$2" "$3" "$(quoted "${4:-}")" >>report.jsonl
}
existing() { for file; do [ ! -e "$file" ] || echo "$file"; done; }
# Packs all results, the short ones first. The profiles of ncu are left out if the pack would be too large
# for a machine that returns 16 MiB a file. The rename keeps the earlier pack whole if this one is cut short.
pack() {
    for profiles in '*.ncu-rep' ''; do
        tar czf "$packed.new" $(existing report.jsonl report.txt ./*.json ./*.csv ./*.log $profiles) || return 1
        [ "$(wc -c <"$packed.new")" -gt 15000000 ] || break
    done
    mv -f "$packed.new" "$packed"
}
record() { # record STEP COMMAND...: runs it; its output becomes a log, its result a line of the report
    name=$1 recorded=$recorded$1, began=$(date +%s)
    shift
    rm -f "$name.json"
    "$@" >"$name.log" 2>&1
    status=$?
    took=$(($(date +%s) - began)) skips=$(grep -c SKIPPED "$name.log")
    case $status in
    0) outcome "$name" passed $took "$([ "$skips" = 0 ] || echo "$skips skipped")" ;;
    77) outcome "$name" SKIPPED $took "$(sed -n 's/^SKIPPED: //p' "$name.log" | tail -n 1)" ;;
    124 | 137) outcome "$name" FAILED $took "stopped, because it still ran after $took s" ;;
    *)
        why=$(grep -v '^ *$\| 0 failed' "$name.log" | grep -m 1 -iE 'error|panicked|refused|fail' || tail -n 1 "$name.log")
        outcome "$name" FAILED $took "status $status: $why"
        ;;
    esac
    case $status in 0 | 77) ;; *) failed=1; tail -n 15 "$name.log" ;; esac
    pack
    return $status
}
# Whether --only names a part or a step, or there is no --only.
chosen() {
    known=$known$1,
    case ,$only, in ,, | *,"$1",*) ;; *) return 1 ;; esac
}
step() { # step STEP COMMAND...: records it if --only names it or its part, once
    chosen "$1" || chosen "$part" || return 0
    case $recorded in *,"$1",*) return 0 ;; esac
    record "$@"
}
shown() { # shown STEP COMMAND...: a step whose output the report has too, with its figures and bars
    before=$recorded
    step "$@"
    [ "$recorded" = "$before" ] || tee -a report.txt <"$1.log"
}
bench() { # bench STEP ARGUMENT...: a step that runs `hatchback-bench gpu`
    bench_step=$1
    shift
    shown "$bench_step" run hatchback-bench gpu "$@" $quick ${HATCHBACK_BENCH:-} --json "$bench_step.json"
}
# A step that cannot run here ends with this status and reason.
skip() { echo "SKIPPED: $1"; return 77; }

machine() {
    uname -srm
    (. /etc/os-release && echo "$PRETTY_NAME") 2>/dev/null
    [ -z "$own_libc" ] || echo "the system's C library is older than the programs need; they run on the bundle's"
    cat /proc/driver/nvidia/version 2>/dev/null
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.memory,clocks.max.sm --format=csv 2>/dev/null ||
        echo "no nvidia-smi"
    echo "cuBLAS: $(cublas_taken)"
}
# Runs a suite. `allocations` is a program of its own, the others are parts of one.
suite() { # suite SUITE
    case $1 in
    allocations) run allocations --nocapture ;;
    *) run gpu "$1::" --nocapture ;;
    esac
}
# Runs tests by name. A program also passes if it has no test of that name, so they are counted.
tests() { # tests TEST...
    run gpu --exact "$@" --nocapture --test-threads 1 || return
    grep -q "^test result: ok. $# passed" "$name.log" || { echo "error: there are not all of the tests $*"; return 1; }
}
# Compares the demo model's scores on the GPU and on the CPU, to the bit. With int8 weights the CPU would
# compute other products than a GPU.
demo_requests() {
    model=$here/tree/tools/demo/coupon samples=heldout
    [ -z "$quick" ] || samples=probe
    run hatchback pack "$model/model.toml" --codec f32 -o "$work/demo.bundle" || return
    for device in cpu cuda; do
        run hatchback run "$work/demo.bundle" --samples "$model/$samples.jsonl" --batch 32 --device $device >"$work/$device" || return
    done
    [ -s "$work/cpu" ] && cmp "$work/cpu" "$work/cuda" && echo "$(wc -l <"$work/cpu") scores, equal to the bit"
}
# Builds TensorRT's shim if its headers are here.
tensorrt=''
find_tensorrt() {
    if shim=$("$here/tree/kernels/tensorrt/make" "$work" 2>tensorrt.log); then
        say "TensorRT: headers found, shim built"
        tensorrt="--tensorrt $shim --plans $work"
    else
        say "TensorRT: not used: $(tail -n 1 tensorrt.log)"
    fi
}
# Runs programs under a tool of NVIDIA's. A machine may keep such a tool from its GPU.
under() { # under TOOL OPTIONS COMMAND...
    command -v "$1" >/dev/null || { skip "no $1 on this machine"; return; }
    (HATCHBACK_RUN="$1 $2" && shift 2 && "$@") && return
    tool_status=$?
    refusal=$(grep -m 1 -E 'Device not supported|LibraryNotLoaded|ERR_NVGPUCTRPERM' "$name.log") || return $tool_status
    skip "$1 may not use the GPU here: $refusal"
}
sanitize() { # sanitize TOOL
    under compute-sanitizer "--tool=$1 --error-exitcode=99" \
        tests cuda_kernels::queries_pool_the_same_bits cuda_kernels::no_query_sees_a_torn_or_foreign_row
}
# ncu ends the program after the last launch, so its status says less than the report that it wrote.
profiled() { "$@"; [ -s "$name.ncu-rep" ] || { echo "error: ncu profiled no launch"; return 1; }; }
# Profiles a few launches of a kernel, and prints what ncu counted in all and at each line.
profile() { # profile KERNEL BATCH SKIP LAUNCHES
    images=''
    if [ -d "$work/lines" ] && grep -q '^compute capability *9\.0' gpu.log; then images="--kernels $work/lines"
    else echo "these images have no line numbers"; fi
    rm -f "$name.ncu-rep" "$name.csv"
    sizes="--rows 20000 --batch $2"
    [ -z "$quick" ] || sizes="--quick --batch 4"
    # By default ncu sets lower clocks. Its times would not compare with those of the other steps.
    options="--set=full --kernel-name=$1 --launch-skip=$3 --launch-count=$4 --clock-control=none --kill=yes"
    # The options are split at spaces, which the bundle's path may have.
    ln -sfn "$here/tree/kernels/cuda" sources
    options="$options --import-source=yes --source-folders=sources --export=$name"
    under ncu "$options" profiled run hatchback-bench gpu requests --precision exact $images $sizes || return
    ncu --import="$name.ncu-rep" --page=source --print-source=cuda,sass --csv >"$name.csv"
    ncu --import="$name.ncu-rep" --page=details
}
# Times other libraries on the keys of some shapes. On the stand-in only torch runs, on the CPU.
peers() { # peers CODEC
    command -v python3 >/dev/null || { skip "all peers, and the bar of gpu_cache: no python3"; return; }
    sizes=64,8192 device=cuda
    [ -z "${HATCHBACK_STANDIN:-}" ] || sizes=4 device=cpu
    run hatchback-bench gpu shapes --codec "$1" $quick --batch "$sizes" --keys "$work/keys" --json "$work/shapes.json" &&
        limited python3 "$here/tree/bench/peers/gpu.py" "$work/shapes.json" "$work/keys" --device $device --json "$name.json"
}

parts="first suites demo shapes bench workers swap profile sanitize peers"
run_part() {
    part=$1 seconds=235
    case $part in
    first)
        # Seven steps within the ten minutes that one command may take, also if each of them hangs.
        seconds=75
        for suite in cuda_kernels cuda_changes gpu_dense; do step $suite suite $suite; done
        step litmus tests cuda_changes::changes_wait_for_the_queries_of_recorded_graphs
        requests="--batch 1,64,256,1024,8192" lookups="--batch 64,8192"
        [ -z "$quick" ] || requests='' lookups=''
        for precision in exact f32; do bench requests_$precision requests --precision $precision $requests; done
        bench lookups_f16 shapes --codec f16 $lookups
        ;;
    suites) for suite in $suites; do step "$suite" suite "$suite"; done ;;
    demo) step demo demo_requests ;;
    # One step for each codec, because a step that is stopped leaves no figures.
    shapes) for codec in f32 f16 u8 u4; do bench shapes_$codec shapes --codec $codec; done ;;
    bench)
        if chosen bench || chosen bench_f32; then find_tensorrt; fi
        bench bench_f32 requests --precision f32 $tensorrt
        bench bench_exact requests --precision exact
        ;;
    workers) bench workers workers ;;
    swap) bench swap swap ;;
    profile)
        seconds=58
        # The kernels of the requests that `bench` measures. The launches that are skipped warm graphs of all batch sizes up. A request of the benchmark has
        # eight matrices, and they differ.
        step profile_matrix profile dense_matrix_few 64 200 8
        step profile_query profile query_tables 8192 100 2
        step profile_pairs profile dense_pairs 8192 40 2
        step profile_finish profile finish_bags 1024 50 2
        ;;
    sanitize)
        seconds=58
        for tool in memcheck racecheck synccheck initcheck; do step sanitize_$tool sanitize $tool; done
        ;;
    peers)
        seconds=115
        for codec in f32 f16; do shown peers_$codec peers $codec; done
        ;;
    esac
}

say "== the machine, $(date -u +%Y-%m-%dT%H:%M:%SZ)"
machine | tee -a report.txt
[ -z "${HATCHBACK_STANDIN:-}" ] || say "on the stand-in: times mean nothing"
# The suite `tensorrt` compiles a stand-in for TensorRT, and `cuda_build` is about machines without a GPU.
suites="allocations cuda_changes cuda_driver cuda_kernels cuda_requests cuda_swaps gpu_chain gpu_dense gpu_requests not_finite"

# Runs first, because every part needs a driver that accepts the kernels' machine code. A driver that keeps
# what it compiled would not show how long that takes.
facts() (
    export CUDA_CACHE_DISABLE=1
    run hatchback-bench gpu facts --json gpu.json
)
say "== the driver and the GPU"
if record programs run hatchback --version && record gpu facts; then
    tee -a report.txt <gpu.log
    for each in $parts; do
        ! chosen "$each" || say "== $each"
        run_part "$each"
    done
    for each in $(echo "$only" | tr , ' '); do
        case $known in *,"$each",*) ;; *) failed=1; say "no part and no step is called $each" ;; esac
    done
else
    why="nothing can be tested here: $(tail -n 1 gpu.log 2>/dev/null || tail -n 1 programs.log)"
    for part in $parts; do ! chosen "$part" || outcome "$part" "not run" 0 "$why"; done
fi
pack || { failed=1; say "FAILED: $packed cannot be written"; }
say "== $([ "$failed" = 0 ] && echo passed || echo FAILED)"
printf '%s%s\n' "$summary" "all results: $packed"
exit $failed

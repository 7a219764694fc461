#!/usr/bin/env bash
# Builds the package on a machine with CUDA GPUs, offline, into a throw-away folder, compiles all kernels that the GPU tests
# need, side by side, and runs the tests.
#
#   tools/gpu_check.sh FOLDER [pytest arguments]
#   tools/gpu_check.sh --sanitizer FOLDER    small cases under compute-sanitizer instead: memcheck, then racecheck
#
# FOLDER receives gpu_check.json (machine, versions, results), tests.log, kernels.log and build.log; the last thing printed
# is a short table. The status is 0 if something passed and nothing failed, hung or died.
#
# The C++ programs that need a GPU run last, where doctest's header is (Debian's doctest-dev, or on CPATH).
#
# The tests run in groups, each in a process of its own with a bound of its own. A test that hangs ends its process, is
# noted, and the group goes on in another one. With two GPUs, two groups run at a time, each on a GPU.
#
# Needs Python >= 3.10 with torch (CUDA), numpy, ml_dtypes, typer, rich, pytest, hypothesis, nanobind, scikit-build-core,
# cmake and ninja, a C++ compiler, and NVRTC, of the CUDA toolkit or the nvidia-cuda-nvrtc package.
#
#   PYTHON=python3   which Python
#   JOBS=            processes that compile kernels; none given: one for each core
#   LIMIT_S=700      bound of all tests together, seconds
#   ONLY="a b"       these groups alone, by the names in the table; for a second run of what the first had no time for
#   WORK=folder      keep the build there and use it again, instead of a temporary folder
set -euo pipefail

PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$(nproc)}
limit=${LIMIT_S:+LIMIT_S=$LIMIT_S }  # as asked for
LIMIT_S=${LIMIT_S:-700}
sanitizer=
if [[ ${1:-} == --sanitizer ]]; then
  sanitizer=yes
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on PATH"; exit 2; }
  shift
fi
if [[ $# -lt 1 || $1 == -* ]]; then
  sed -n '2,/^set/{/^#/{s/^# \{0,1\}//p}}' "$0" >&2
  exit 2
fi
command="${ONLY:+ONLY=\"$ONLY\" }${limit}tools/gpu_check.sh ${sanitizer:+--sanitizer }$*"
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."

if [[ -n ${WORK:-} ]]; then
  mkdir -p "$WORK"
  work=$(cd "$WORK" && pwd)
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
rm -rf "$work/results"
mkdir -p "$work/results"

say() { printf '=== %s (%d s)\n' "$1" "$SECONDS"; }

say "building"
if ! "$PYTHON" -m pip install --no-index --no-deps --no-build-isolation --disable-pip-version-check --upgrade \
  -C build-dir="$work/build" --target "$work/site" . >"$out/build.log" 2>&1; then
  tail -n 40 "$out/build.log"
  echo "the build failed: see build.log"
  exit 1
fi

# Hardware queues: without as many, kernels of virtual ranks that wait for each other stand in line.
export CUDA_DEVICE_MAX_CONNECTIONS=32
export EXPERTWIRE_CACHE_DIR=${EXPERTWIRE_CACHE_DIR:-$work/kernels}
export PYTHONPATH=$work/site:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
unset EXPERTWIRE_VALIDATE

# Settings of this check alone: those of pyproject.toml ask for pytest-timeout, which such a machine may lack.
cat >"$work/pytest.ini" <<'INI'
[pytest]
addopts = -ra -q -p no:cacheprovider -p no:faulthandler -p no:timeout -p gpu_suite --continue-on-collection-errors
xfail_strict = true
markers = timeout: seconds that the test may take
INI
pytest=("$PYTHON" -m pytest -c "$work/pytest.ini" --rootdir "$PWD")
files=(tests/test_cuda*.py)
phases=(tests/test_cuda_{two_phase,overlap,block_overlap,placement}.py)
mapfile -t rest < <(printf '%s\n' "${files[@]}" |
  grep -v -e test_cuda.py -e _graphs -e _losses -e _masking -e _deep_ep -e _two_phase -e _overlap -e _placement)
num_gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')

# run NAME SECONDS COMMAND...: a pytest command, and again after a test that has ended the process, until all tests are in
# the journal NAME.jsonl or the time is up.
run() {
  local name=$1 started=$SECONDS end=$((SECONDS + $2)) status journal=$work/results/$1.jsonl log=$work/results/$1.log
  [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
  shift 2
  ((end < deadline)) || end=$deadline
  while true; do
    status=0
    timeout --signal=INT --kill-after=10 $((end > SECONDS ? end - SECONDS : 1)) "$@" --maxfail=20 --journal="$journal" \
      >>"$log" 2>&1 || status=$?
    tail -n 1 "$journal" 2>/dev/null | grep -q '"status"' && break
    grep -q '"began"' "$journal" 2>/dev/null && ((SECONDS < end - 5)) || break
  done
  echo "$status $((SECONDS - started))" >"$work/results/$name.status"
  printf '%s: status %d, %d s (%d s)\n' "$name" "$status" $((SECONDS - started)) "$SECONDS"
}

# The C++ programs that need a GPU, by ctest, which ends those that take too long and tells of the others.
cpp_programs() {
  local name=cpp started=$SECONDS status=0 log=$work/results/cpp.log compiler nvrtc
  [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
  read -ra compiler <<<"${CXX:-c++}"
  if ! "${compiler[@]}" -x c++ -fsyntax-only - <<<'#include <doctest/doctest.h>' 2>/dev/null; then
    echo "$name: left out, for there is no doctest/doctest.h"
    return 0
  fi
  if ((SECONDS > deadline - 60)); then
    echo "$name: left out, for the time is up"
    return 0
  fi
  # They do not look for the compiler among Python's packages.
  nvrtc=${EXPERTWIRE_NVRTC_DIR:-$("$PYTHON" -c 'from expertwire.nvrtc import find_nvrtc_folders; print(*find_nvrtc_folders()[:1])')}
  {
    timeout $((deadline - SECONDS)) cmake -S . -B "$work/cpp" -G Ninja -DEXPERTWIRE_TESTS=ON -DCMAKE_BUILD_TYPE=Release &&
      timeout $((deadline - SECONDS)) cmake --build "$work/cpp" -j "$JOBS" --target test_cuda_{cases,memory,pairs} &&
      env ${nvrtc:+EXPERTWIRE_NVRTC_DIR="$nvrtc"} ctest --test-dir "$work/cpp" -R '^test_cuda_(cases|memory|pairs)$' \
        --stop-time "$(date -d "$((deadline - SECONDS)) seconds" +%T)" --output-on-failure \
        --output-junit "$work/results/cpp.xml"
  } >"$log" 2>&1 || status=$?
  echo "$status $((SECONDS - started))" >"$work/results/cpp.status"
  printf '%s: status %d, %d s (%d s)\n' "$name" "$status" $((SECONDS - started)) "$SECONDS"
}

if [[ -n $sanitizer ]]; then
  deadline=$((SECONDS + LIMIT_S))
  # Launches are not forced to end one by one, for ranks wait for each other. Where the tool makes them do so, the cases of
  # two ranks on one GPU fail with a time-out; those of one rank, and of a GPU for each of two, need nothing at once.
  alone=(tests/test_cuda.py::test_one_rank_with_the_whole_gpu)
  together=(tests/test_cuda.py::test_any_grid_gives_the_same_bits\[{expert,rank}-{reduce,direct}-2\]
    tests/test_cuda_faults.py::test_w{rong_ids_are_dropped_and_told,ithout_validate_wrong_ids_are_dropped_in_silence})
  graphs=(tests/test_cuda_two_phase.py::test_both_phases_in_a_graph)  # whose kernels racecheck lets run one by one only
  for tool in memcheck racecheck; do
    say "$tool"
    under=(compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 99 --launch-timeout 0 --print-limit 20)
    run "$tool" 60 "${under[@]}" "${pytest[@]}" "${alone[@]}" "${together[@]}" "${graphs[@]}"
    graphs=()
    if ((num_gpus > 1)); then
      run "$tool-devices" 60 "${under[@]}" "${pytest[@]}" -k process_for_each_gpu tests/test_cuda.py
    fi
  done
else
  say "which kernels the tests need"
  timeout 60 "${pytest[@]}" -m "gpu or multi_gpu" -k "not process and not killed" --list-kernels="$work/wanted" \
    --deselect=tests/test_cuda_arrays.py "${files[@]}" "$@" >"$out/kernels.log" 2>&1 || true
  tail -n 3 "$out/kernels.log"
  say "compiling them, by $JOBS processes"
  timeout 200 "$PYTHON" tests/compiling.py "$work/wanted" "$JOBS" >>"$out/kernels.log" 2>&1 ||
    echo "not all kernels were compiled: see kernels.log"
  deadline=$((SECONDS + LIMIT_S))
  one="gpu and not multi_gpu"
  say "tests"
  shapes() {
    run calls 150 "${pytest[@]}" -m "$one" "${rest[@]}" "$@"
    run cases 200 "${pytest[@]}" -m "$one" -k "not process" tests/test_cuda.py "$@"
    run graphs 100 "${pytest[@]}" -m "$one" tests/test_cuda_graphs.py "$@"
    run deep-ep 80 "${pytest[@]}" -m "$one" tests/test_cuda_deep_ep.py "$@"
    run phases 200 "${pytest[@]}" -m "$one" "${phases[@]}" "$@"
  }
  others() {
    run losses 80 "${pytest[@]}" -m "$one" tests/test_cuda_losses.py "$@"
    run processes 100 "${pytest[@]}" -m "$one" -k process tests/test_cuda.py "$@"
    run masking 160 "${pytest[@]}" -m "$one" tests/test_cuda_masking.py "$@"
  }
  if ((num_gpus > 1)); then
    CUDA_VISIBLE_DEVICES=0 shapes "$@" &
    first=$!
    CUDA_VISIBLE_DEVICES=1 others "$@" &
    wait "$first" $!
    run devices 120 "${pytest[@]}" -m multi_gpu "${files[@]}" "$@"
    run bench 160 "${pytest[@]}" -m multi_gpu tests/test_bench_gpu.py "$@"
  else
    shapes "$@"
    others "$@"
  fi
  cpp_programs
fi

say "report"
for log in "$work"/results/*.log; do
  printf '\n##### %s\n' "$(basename "$log" .log)"
  cat "$log"
done >"$out/tests.log"
"$PYTHON" tools/gpu_report.py "$work/results" "$out/gpu_check.json" "$command"

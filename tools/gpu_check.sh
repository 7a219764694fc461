#!/usr/bin/env bash
# Builds the package on a machine with CUDA GPUs, offline, into a throw-away folder, and runs the GPU tests.
#
#   tools/gpu_check.sh FOLDER [pytest arguments]
#
# FOLDER receives gpu_check.json (machine, versions, results), tests.log and build.log; the last thing printed is a short
# table. The status is 0 if something passed and nothing failed, hung or died.
#
# Needs Python >= 3.10 with torch (CUDA), numpy, ml_dtypes, typer, rich, pytest, hypothesis, nanobind, scikit-build-core,
# cmake and ninja, a C++ compiler, and NVRTC, of the CUDA toolkit or the nvidia-cuda-nvrtc package.
#
#   PYTHON=python3   which Python
#   JOBS=4           processes that share the case table; they share the GPU, too, but compile kernels side by side
#   LIMIT_S=900      bound of each process of the tests, seconds
#   WORK=folder      keep the build there and use it again, instead of a temporary folder
set -euo pipefail

PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-4}
LIMIT_S=${LIMIT_S:-900}

if [[ $# -lt 1 || $1 == -* ]]; then
  sed -n '2,/^set/{/^#/{s/^# \{0,1\}//p}}' "$0" >&2
  exit 2
fi
command="tools/gpu_check.sh $*"
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
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
unset EXPERTWIRE_VALIDATE

# Settings of this check alone: those of pyproject.toml ask for pytest-timeout, which such a machine may lack.
cat >"$work/pytest.ini" <<'INI'
[pytest]
addopts = -ra -q -p no:cacheprovider
xfail_strict = true
faulthandler_timeout = 200
INI

# run NAME arguments: one pytest process, bounded, with its log and results under $work/results.
run() {
  local name=$1 started=$SECONDS status=0
  shift
  timeout --signal=INT --kill-after=20 "$LIMIT_S" "$PYTHON" -m pytest -c "$work/pytest.ini" -m "gpu or multi_gpu" \
    --junitxml="$work/results/$name.xml" "$@" >"$work/results/$name.log" 2>&1 || status=$?
  echo "$status $((SECONDS - started))" >"$work/results/$name.status"
}

say "case table, by $JOBS processes"
pids=()
for ((k = 1; k <= JOBS; ++k)); do
  run "cases-$k" --shard="$k/$JOBS" tests/test_cuda.py "$@" &
  pids+=($!)
done
wait "${pids[@]}"
say "graphs, calls, losses and the rest, by one process"
run others --ignore=tests/test_cuda.py tests "$@"

say "report"
for log in "$work"/results/*.log; do
  printf '\n##### %s\n' "$(basename "$log" .log)"
  cat "$log"
done >"$out/tests.log"
"$PYTHON" tools/gpu_report.py "$work/results" "$out/gpu_check.json" "$command"

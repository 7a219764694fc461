#!/usr/bin/env bash
# Makes the files behind the GPU tables of docs/benchmarks.md: benchmarks/results/PREFIX*.json, one for each table.
#
#   benchmarks/measure_gpus.sh PREFIX RANKS [options of expertwire bench]
#
#   benchmarks/measure_gpus.sh h200-x2 2              two GPUs, about five minutes with kernels in the cache
#   benchmarks/measure_gpus.sh h200-x8 8              eight
#   benchmarks/measure_gpus.sh h200-x8 8 --dry-run    say what would be measured
#
# LIMIT_S=120   bound of each file, seconds; one that takes longer is left out, and the status is 1
#
# `expertwire compile --workload ... --ranks RANKS --architecture sm_90` before saves the compiling. After it:
# python benchmarks/render_tables.py
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ $# -lt 2 || $1 == -* ]]; then
  sed -n '2,/^set/{/^#/{s/^# \{0,1\}//p}}' "$0" >&2
  exit 2
fi
prefix=$1 ranks=$2
shift 2
options=(--ranks "$ranks" "$@")
[[ " $* " == *" --device "* ]] || options+=(--device cuda --no-kernel-rows)
all=mscclpp-latency,mscclpp-bench,deepseek-decode,single-token,nemotron-latent,kimi-k3
both=expert-major,rank-major
failed=0

# bench NAME OPTIONS...: one file.
bench() {
  local file=benchmarks/results/$prefix${1:+-$1}.json
  shift
  timeout "${LIMIT_S:-120}" expertwire bench "$@" "${options[@]}" --json "$file" || {
    echo "$file: not measured, or not all of it" >&2
    failed=1
  }
}

bench "" --ep-lib expertwire,floor --workload $all --layout expert-major --combine-mode rank-local-reduce,direct-send
bench rank-major --ep-lib expertwire,floor --workload $all --layout rank-major --combine-mode rank-local-reduce,direct-send
bench fp8 --ep-lib expertwire,floor --workload $all --layout $both --dispatch-dtype fp8-e4m3
bench torch --ep-lib expertwire,torch-a2a --workload $all --iters 20 --rounds 3
bench blocks --workload mscclpp-latency,mscclpp-bench --layout $both --num-blocks 16,32,64,all --iters 50 --rounds 3
bench tokens --ep-lib expertwire,floor -t 1,8,32,64,128,256,512 --layout $both --iters 50 --rounds 3
bench many --ep-lib expertwire,floor -t 2048 --layout $both --iters 20 --rounds 3
bench hidden --ep-lib expertwire,floor -d 1024,3584,4096 --layout $both --iters 50 --rounds 3
bench topk --ep-lib expertwire,floor -k 1,16,22 --layout $both --iters 50 --rounds 3
bench routing --ep-lib expertwire,floor --workload mscclpp-bench --layout $both --routing zipf:1.2,one-hot,empty-experts --iters 50 --rounds 3
bench overlap --ep-lib expertwire --workload mscclpp-latency,deepseek-decode --layout $both --overlap gemm --num-blocks 8,16,32,all --iters 50 --rounds 3
exit $failed

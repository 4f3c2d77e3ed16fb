#!/usr/bin/env bash
# Runs the GPU tests and benchmarks on a machine with a GPU and keeps their logs.
#
#   tests/gpu/run-on-gpu.sh [--bin DIR] [--out DIR] [--trace FILE] [STAGE...]
#
#   --bin    built programs (hicached, hicache-bench, gpu_test); left out: builds into build-gpu first
#   --out    where logs and JSON go (gpu-results)
#   --trace  what the replays replay, JSON lines with hash_ids; left out: generated conversations
#
# Stages: tests, kills, transfer, methods, silent, checksums, layerwise, replay, kernel, memcheck; all but kills by
# default.
# With two GPUs or more also group_tests (ranks killed in mid exchange, many times), group_transfer, group_layerwise
# and group_replay; with fewer they say that they are skipped. Each has a log STAGE.log; the last line of this script
# is "N stages passed, N failed", exit status 1 if one failed.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2

bin=""
out="gpu-results"
replayed=()
stages=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --bin) bin="$2"; shift 2 ;;
    --out) out="$2"; shift 2 ;;
    --trace) replayed=(--trace "$(realpath "$2")"); shift 2 ;;
    -*) echo "run-on-gpu.sh: unknown option $1" >&2; exit 2 ;;
    *) stages+=("$1"); shift ;;
  esac
done
[[ ${#stages[@]} -gt 0 ]] || stages=(tests transfer methods silent checksums layerwise replay kernel memcheck
  group_tests group_transfer group_layerwise group_replay)
mkdir -p "$out"
out="$(realpath "$out")"

if [[ -z "$bin" ]]; then
  if ! { cmake -S . -B build-gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DHICACHE_CUDA=ON &&
    ninja -C build-gpu hicached hicache-bench hicache-dump gpu_test; } >"$out/build.log" 2>&1; then
    tail -n 30 "$out/build.log"
    exit 1
  fi
  bin="build-gpu/bin"
fi
bin="$(realpath "$bin")"
export HICACHE_BIN="$bin"
# cuBLAS makes the matrix products that transfers run beside.
for directory in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib; do
  [[ -d "$directory" ]] && export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$directory"
done
bench="$bin/hicache-bench"
# hicached for the replays: a pool that one group fills, pinned at start.
config="$out/replay-config.json"
cat >"$config" <<'JSON'
{"name": "gpu-replay", "pool": {"bytes": "4GiB", "segment_bytes": "16MiB"}, "cuda": {"mode": "at_start"},
 "mla": {"load": "exchange"}, "log": {"level": "warn"}}
JSON

# No stage may hang the machine.
limited() { timeout -k 5 "${HICACHE_STAGE_SECONDS:-300}" "$@"; }

stage_tests() { limited "$bin/gpu_test" -d yes; }
stage_kills() {
  HICACHE_GPU_RANK_KILLS=50 HICACHE_GPU_DAEMON_KILLS=10 limited "$bin/gpu_test" -d yes "AC-36*,AC-38*"
}
# Scattered pages from one allocation, then single pages and runs from an allocation per layer, in one operation so
# that runs stay whole.
stage_transfer() {
  limited "$bench" transfer --layouts together --runs 1 --json "$out/transfer-together.json" &&
    limited "$bench" transfer --layouts separate --runs 1,4,16 --operations 1 --repeats 3 \
      --json "$out/transfer-separate.json"
}
stage_methods() {
  limited "$bench" transfer --methods page_major,layer_major,staged,contiguous,batched --page-tokens 16,64 --runs 1 \
    --layouts together --loads alone --repeats 3 --json "$out/methods.json"
}
# Beside a rank that never raises its write fence.
stage_silent() {
  limited "$bench" transfer --shapes 8B-tp1 --page-tokens 16 --runs 1 --layouts together --loads alone,silent \
    --json "$out/silent.json"
}
stage_checksums() {
  local threads
  for threads in 1 4 8; do
    limited "$bench" transfer --shapes 8B-tp1 --page-tokens 16 --runs 1 --layouts together --loads alone --repeats 3 \
      --daemon "{\"integrity\": {\"checksums\": \"always\"}, \"transfer\": {\"threads\": $threads}}" \
      --json "$out/checksums-$threads.json" || return 1
  done
}
stage_layerwise() {
  local shape
  for shape in 8B-tp1 70B-tp8 MLA; do
    limited "$bench" layerwise --shape "$shape" --json "$out/layerwise-$shape.json" || return 1
  done
}
stage_replay() {
  local attention
  for attention in mha mla; do
    limited "$bench" replay "${replayed[@]}" --config "$config" --device cuda --attention "$attention" --ranks 4 \
      --limit 400 --concurrency 4 --json "$out/replay-$attention.json" || return 1
  done
}
# The ranks' own kernels on the pool that they map.
stage_kernel() {
  limited "$bin/gpu_test" -d yes "io_backend kernel*" || return 1
  limited "$bench" transfer --methods kernel --page-tokens 64 --runs 1 --layouts together --repeats 3 \
    --json "$out/transfer-kernel.json" || return 1
  local attention
  for attention in mha mla; do
    limited "$bench" replay "${replayed[@]}" --config "$config" --device cuda --io-backend kernel \
      --attention "$attention" --ranks 4 --limit 400 --concurrency 4 --json "$out/replay-kernel-$attention.json" || return 1
  done
  command -v compute-sanitizer >/dev/null || { echo "SKIPPED: compute-sanitizer is not on the PATH"; return 0; }
  limited compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 "$bench" replay --config "$config" \
    --device cuda --io-backend kernel --attention mha --ranks 2 --limit 20 --json "$out/memcheck-kernel.json"
}
stage_memcheck() {
  command -v compute-sanitizer >/dev/null || { echo "SKIPPED: compute-sanitizer is not on the PATH"; return 0; }
  limited compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 "$bench" replay --config "$config" \
    --device cuda --attention mha --ranks 2 --limit 20 --json "$out/memcheck.json"
}

# --- Several GPUs.
gpus="$(nvidia-smi --list-gpus 2>/dev/null | wc -l)"
several_gpus() {
  [[ "$gpus" -ge 2 ]] && return 0
  echo "SKIPPED: this stage needs two GPUs, this machine has $gpus"
  return 1
}
stage_group_tests() {
  several_gpus || return 0
  HICACHE_GPU_RANK_KILLS="${HICACHE_GPU_RANK_KILLS:-24}" limited "$bin/gpu_test" -d yes "[gpus]"
}
# Scattered and contiguous pages, alone and beside matrix products on every GPU.
stage_group_transfer() {
  several_gpus || return 0
  limited "$bench" transfer --gpus "$gpus" --shapes 8B-tp1,MLA --page-tokens 64 --layouts together,blocks --runs 1 \
    --loads alone,gemm --repeats 5 --json "$out/group-transfer.json" &&
    limited "$bench" transfer --gpus "$gpus" --shapes MLA --page-tokens 64,16 --layouts separate --runs 16,64 \
      --operations 1 --loads alone --repeats 3 --json "$out/group-transfer-separate.json"
}
stage_group_layerwise() {
  several_gpus || return 0
  limited "$bench" layerwise --gpus "$gpus" --shape MLA --page-tokens 64 --pages 1,4,16,64,256 \
    --layouts together,separate --json "$out/group-layerwise.json"
}
stage_group_replay() {
  several_gpus || return 0
  local attention
  for attention in mha mla; do
    limited "$bench" replay "${replayed[@]}" --config "$config" --device cuda --gpus "$gpus" --attention "$attention" \
      --ranks "$((2 * gpus))" --limit 400 --concurrency 4 --json "$out/group-replay-$attention.json" || return 1
  done
}

passed=0
failed=0
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader 2>/dev/null
for stage in "${stages[@]}"; do
  start="$(date +%s)"
  "stage_$stage" >"$out/$stage.log" 2>&1
  status=$?
  if [[ $status == 0 ]]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
  echo "== $stage: exit status $status after $(($(date +%s) - start)) s"
  if [[ $status == 0 ]]; then tail -n 6 "$out/$stage.log"; else tail -n 40 "$out/$stage.log"; fi
done
echo "$passed stages passed, $failed failed"
[[ $failed == 0 ]]

#!/usr/bin/env bash
# Fuzzes every target for SECONDS each and fails on the first crash, leak, hang or broken property. Corpora grow in
# BUILD/corpus and are kept for the next run; what crashed is written to BUILD/crashes.
#
#   tests/fuzz/run.sh SECONDS [TARGET...]     targets: message config region coordinator resp restart session
#
# HICACHE_FUZZ_BUILD names the build directory (build-fuzz).
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds="${1:-}"
[[ "$seconds" =~ ^[1-9][0-9]*$ ]] || {
  echo "usage: tests/fuzz/run.sh SECONDS [TARGET...]   (SECONDS is '${seconds}', expected a number above 0)" >&2
  exit 2
}
shift
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=(message config region coordinator resp restart session)
build="${HICACHE_FUZZ_BUILD:-build-fuzz}"

if ! command -v clang++ >/dev/null; then
  echo "SKIPPED: fuzzing needs clang++ with its run-time libraries"
  exit 77
fi
cmake -S . -B "$build" -G Ninja -DHICACHE_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
ninja -C "$build" fuzz_seeds "${targets[@]/#/fuzz_}"

"$build/bin/fuzz_seeds" "$build/seeds"
mkdir -p "$build/crashes"
export ASAN_OPTIONS="detect_leaks=1:abort_on_error=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
export UBSAN_OPTIONS="print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"

# Longest input of a target: small enough that thousands fit into a second.
length_of() {
  case "$1" in
    message) echo 4096 ;;
    config) echo 2048 ;;
    region | resp) echo 1024 ;;
    *) echo 512 ;;
  esac
}

# Fuzzes one target and says how it went.
fuzz() {
  local target="$1" log="$build/fuzz-$1.log" runs extra=()
  mkdir -p "$build/corpus/$target"
  # Entries that wait for a deadline make an input slow, not wrong.
  [[ "$target" == coordinator || "$target" == session ]] && extra+=(-timeout=60)
  if ! "$build/bin/fuzz_$target" -max_total_time="$seconds" -max_len="$(length_of "$target")" -timeout=20 "${extra[@]}" \
    -print_final_stats=1 -artifact_prefix="$build/crashes/$target-" \
    "$build/corpus/$target" "$build/seeds/$target" >"$log" 2>&1; then
    tail -n 40 "$log"
    echo "$target: FAULT, see $log"
    return 1
  fi
  runs="$(sed -nE 's/^stat::number_of_executed_units: *//p' "$log")"
  [[ "${runs:-0}" -gt 0 ]] || { echo "$target: no input was run"; return 1; }
  echo "$target: $runs inputs in $seconds s, $(grep -oE 'cov: [0-9]+' "$log" | tail -1), no fault"
}

# Two at a time: most targets use one core.
failed=0
for ((i = 0; i < ${#targets[@]}; i += 2)); do
  running=()
  for target in "${targets[@]:i:2}"; do
    fuzz "$target" &
    running+=($!)
  done
  for job in "${running[@]}"; do wait "$job" || failed=$((failed + 1)); done
done
[[ "$failed" == 0 ]]

#!/usr/bin/env bash
# Checks the Promela models with spin, and that each check can fail: every named fault must be found.
# Exit status 77 without spin or a C compiler.
set -euo pipefail
cd "$(dirname "$0")"

for program in spin cc; do
  command -v "$program" >/dev/null || {
    echo "SKIPPED: $program is not installed (tools/install-dependencies.sh test)"
    exit 77
  }
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# Runs the exhaustive search over a model, with a fault or none. Prints spin's result line, or fails when the search
# was not complete.
search() {
  local model="$1" fault="$2" optimise="$3" directory="$work/$1-${2:-none}"
  mkdir "$directory"
  (
    cd "$directory"
    spin -a ${fault:+"-D$fault"} "$OLDPWD/$model.pml" >spin.log
    cc "$optimise" -DSAFETY -DCOLLAPSE -o pan pan.c 2>cc.log
    ./pan -m200000 >pan.log
    if grep -qE 'max search depth too small|out of memory|Search not completed' pan.log && ! grep -q '^pan:1' pan.log; then
      cat pan.log
      exit 1
    fi
  )
  grep -E '^pan:1: |errors: ' "$directory/pan.log" | head -n 1
}

failed=0
must_hold() {
  local result
  result="$(search "$1" "" -O2)"
  if [[ "$result" == *"errors: 0" ]]; then
    echo "$1: every property holds in $(grep -oE '[0-9]+ states, stored' "$work/$1-none/pan.log")"
  else
    echo "$1: FAILED: $result"
    failed=1
  fi
}

# must_find MODEL FAULT EXPECTED: the search over the model with this fault ends with that report.
must_find() {
  local result
  result="$(search "$1" "$2" -O0)"
  if [[ "$result" == "pan:1: $3"* ]]; then
    echo "$1 with $2: found (${result#pan:1: })"
  else
    echo "$1 with $2: FAILED: expected '$3', got '$result'"
    failed=1
  fi
}

must_hold ring
must_hold page

# no lost wake-up
must_find ring NO_SUBMITTER_FENCE "invalid end state"
must_find ring NO_SLEEPER_FENCE "invalid end state"
must_find ring NO_COMPLETER_FENCE "invalid end state"
must_find ring NO_WAITER_FENCE "invalid end state"
must_find ring NO_SECOND_LOOK "invalid end state"
must_find ring NO_KICK_AFTER_READ "invalid end state"
must_find ring NO_FUTEX_WAKE "invalid end state"
# entries arrive whole
must_find ring SEQUENCE_BEFORE_PAYLOAD "assertion violated"
# no page in two places
must_find page SLOT_BEFORE_STATE "assertion violated"
must_find page FREE_BEFORE_LANDED "assertion violated"
# a lease holds
must_find page EVICT_PINNED "assertion violated"
must_find page LEASE_OF_THE_DEAD "invalid end state"
# every operation ends
must_find page FORGET_SURVIVORS "invalid end state"

exit "$failed"

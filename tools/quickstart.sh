#!/usr/bin/env bash
# Installs what is missing, builds hicache, and shows it at work: a daemon, an MHA engine and an MLA engine of four rank
# processes each, multi-turn conversations through both, every byte checked. Leaves nothing running and nothing in
# /dev/shm. Exit status 0 only if every byte was right.
set -euo pipefail
cd "$(dirname "$0")/.."

config=config/quickstart.json
name=quickstart
bin=build/bin
log="$(mktemp)"
daemon=""

say() {
  printf '\n== %s\n' "$*"
}

die() {
  echo "quickstart: $*" >&2
  exit 1
}

leftovers() {
  compgen -G "/dev/shm/hicache.$name.*" || true
}

# Ends the daemon in order, or by force when it does not answer. Only what this script started is touched.
stop_daemon() {
  [[ -n "$daemon" ]] || return 0
  local pid="$daemon" status=0
  daemon=""
  kill -TERM "$pid" 2>/dev/null || true
  for _ in $(seq 300); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  if kill -KILL "$pid" 2>/dev/null; then
    echo "quickstart: the daemon did not stop within 30 seconds and was killed" >&2
  fi
  wait "$pid" 2>/dev/null || status=$?
  local left
  left="$(leftovers)"
  if [[ -n "$left" ]]; then
    echo "quickstart: the daemon left shared memory behind; removing it: $left" >&2
    rm -f "/dev/shm/hicache.$name".*
    status=1
  fi
  return "$status"
}

clean_up() {
  local status=$?
  stop_daemon || { [[ "$status" -ne 0 ]] || status=1; }
  rm -f "$log"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

build() {
  say "Building into build/ (Release)"
  # The options of tests/run.sh, so that it goes on from this build and does not compile everything anew.
  cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DHICACHE_WERROR=ON >"$log" 2>&1 || {
    cat "$log" >&2
    die "configuring failed"
  }
  cmake --build build --target hicached hicache hicache-bench hicache-ctl hicache-dump
}

start_daemon() {
  say "Starting the daemon ($bin/hicached --config $config)"
  if "$bin/hicache-ctl" "$name" status >/dev/null 2>&1; then
    die "a daemon called '$name' runs already: stop it first"
  fi
  # In a session of its own: Ctrl-C reaches the engines first, and the daemon only through this script.
  setsid "$bin/hicached" --config "$config" --foreground >"$log" 2>&1 &
  daemon=$!
  for _ in $(seq 600); do
    if "$bin/hicache-ctl" "$name" status >/dev/null 2>&1; then
      grep -m 1 ' ready ' "$log" || true
      return
    fi
    if ! kill -0 "$daemon" 2>/dev/null; then
      wait "$daemon" || true
      daemon=""
      cat "$log" >&2
      die "the daemon did not start"
    fi
    sleep 0.1
  done
  cat "$log" >&2
  die "the daemon did not answer within a minute"
}

run_engines() {
  say "Two engines of four ranks each: multi-turn conversations, every loaded byte compared"
  "$bin/hicache-bench" conversations --config "$config" --attach
}

look_inside() {
  say "Inside the shared memory (first lines of $bin/hicache-dump $name)"
  local text
  text="$("$bin/hicache-dump" "$name")"
  head -n 40 <<<"$text"
}

main() {
  bash tools/install-dependencies.sh build
  build
  start_daemon
  run_engines
  look_inside
  say "Stopping the daemon"
  stop_daemon || die "the daemon did not stop in order: $(tail -n 5 "$log")"
  say "Done: every byte was right, nothing was left behind"
}

main "$@"

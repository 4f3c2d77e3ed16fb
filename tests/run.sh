#!/usr/bin/env bash
# Builds hicache and runs every test that can run on this machine. The last line is "N passed, N failed, N skipped";
# exit status 1 if a test failed or the build did.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
usage: tests/run.sh [--label LABEL[,LABEL...]] [--build-dir DIR] [--sanitize address|thread] [--filter REGEX]
  --label      only the tests of these kinds: unit, multiprocess, crash, acceptance, ...
  --filter     only the test programs whose name matches
  --build-dir  where to build (build; build-asan or build-tsan with --sanitize)
  --sanitize   build with AddressSanitizer and UndefinedBehaviorSanitizer, or with ThreadSanitizer (clang)
TEXT
}

label=""
filter=""
build_dir=""
sanitize=""
log=""
broken=0  # 1 when CTest itself failed

parse_arguments() {
  while [[ $# -gt 0 ]]; do
    case "$1" in
      -h | --help)
        usage
        exit 0
        ;;
      --label | --filter | --build-dir | --sanitize)
        [[ $# -ge 2 ]] || bad_argument "$1 needs a value"
        case "$1" in
          --label) label="$2" ;;
          --filter) filter="$2" ;;
          --build-dir) build_dir="$2" ;;
          --sanitize) sanitize="$2" ;;
        esac
        shift 2
        ;;
      *) bad_argument "unknown argument '$1'" ;;
    esac
  done
  case "$sanitize" in
    "") build_dir="${build_dir:-build}" ;;
    address) build_dir="${build_dir:-build-asan}" ;;
    thread) build_dir="${build_dir:-build-tsan}" ;;
    *) bad_argument "--sanitize '$sanitize', expected address or thread" ;;
  esac
}

bad_argument() {
  echo "run.sh: $1" >&2
  usage >&2
  exit 2
}

# Programs that the chosen tests need: all, unless only some tests of C++ programs are wanted. Those name the programs
# that they start as their dependencies.
build_targets() {
  [[ "$label" =~ ^(unit|multiprocess|crash)(,(unit|multiprocess|crash))*$ && -n "$filter" ]] || return 0
  ctest --test-dir "$build_dir" -N -L "^(${label//,/|})\$" -R "$filter" | sed -nE 's/^ *Test +#[0-9]+: (.*)$/\1/p'
}

build() {
  local options=(-DHICACHE_BUILD_TESTS=ON "-DHICACHE_SANITIZE=$sanitize")
  case "$sanitize" in
    # Warnings are errors here only: instrumented code makes compilers warn of what is not there.
    "") options+=(-DCMAKE_BUILD_TYPE=Release -DHICACHE_WERROR=ON) ;;
    address) options+=(-DCMAKE_BUILD_TYPE=RelWithDebInfo) ;;
    # g++ 12 refuses atomic fences under ThreadSanitizer.
    thread) options+=(-DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++) ;;
  esac
  cmake -S . -B "$build_dir" -G Ninja "${options[@]}" >"$build_dir.configure.log" 2>&1 ||
    { cat "$build_dir.configure.log"; return 1; }
  rm -f "$build_dir.configure.log"
  local targets
  mapfile -t targets < <(build_targets)
  ninja -C "$build_dir" "${targets[@]}"
}

# The first report ends the program: a test must not pass on top of one. Reports are files, because a test may not look
# at how a daemon that it has started ends.
sanitizer_environment() {
  local log_path
  log_path="log_path=$(realpath "$build_dir")/sanitizer-report"
  rm -f "$build_dir"/sanitizer-report*
  export ASAN_OPTIONS="abort_on_error=0:halt_on_error=1:detect_leaks=1:$log_path${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
  export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:$log_path${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
  # Tests with several processes fork ranks that start threads.
  export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:die_after_fork=0:$log_path${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
}

show_reports() {
  local report
  for report in "$build_dir"/sanitizer-report*; do
    [[ -e "$report" ]] || continue
    echo
    echo "run.sh: a sanitizer's report:"
    head -n 100 "$report"
    broken=1
  done
}

# Runs CTest with the given arguments; its verbose output goes to the log, one line per test to the terminal.
# Failed tests are counted from the log; here only a CTest that could not do its work (status other than 0 and 8)
# is an error.
run_ctest() {
  local status
  set +e
  ctest --test-dir "$build_dir" --verbose ${filter:+-R "$filter"} "$@" 2>&1 |
    tee -a "$log" | grep --line-buffered -E '^ *[0-9]+/[0-9]+ Test'
  status="${PIPESTATUS[0]}"
  set -e
  [[ "$status" == 0 || "$status" == 8 ]] || { echo "run.sh: ctest ended with status $status" >&2; broken=1; }
}

# Unit tests are single processes and share the cores; the others start processes of their own and get the machine.
run_tests() {
  local wanted
  wanted="^(${label//,/|})\$"
  if [[ -z "$label" || ",$label," == *,unit,* ]]; then
    run_ctest -L '^unit$' -j2
  fi
  if [[ -z "$label" ]]; then
    run_ctest -LE '^unit$'
  elif [[ "$label" != unit ]]; then
    run_ctest -L "$wanted" -LE '^unit$'
  fi
}

# Output of the tests that failed, so that a log of this script is enough to see why.
show_failures() {
  local number
  while read -r number; do
    echo
    grep -E "^$number: " "$1" | tail -n 200 || true
  done < <(sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#([0-9]+): .*\*\*\*(Failed|Timeout|Exception|Not Run|Not Found).*/\1/p' "$1")
}

main() {
  parse_arguments "$@"
  bash tools/install-dependencies.sh test
  if ! build; then
    echo "run.sh: the build in $build_dir failed; no test was run"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
  fi
  log="$build_dir/tests.log"
  : >"$log"
  sanitizer_environment
  run_tests
  show_failures "$log"
  show_reports
  echo
  local summary
  summary="$(awk -v broken="$broken" -f tests/summarise.awk "$log")"
  case "$(tail -n 1 <<<"$summary")" in
    "0 passed, 0 failed, 0 skipped")
      echo "run.sh: no test matches${label:+ --label $label}${filter:+ --filter $filter}"
      summary="0 passed, 1 failed, 0 skipped"
      ;;
  esac
  echo "$summary"
  [[ "$(tail -n 1 <<<"$summary")" == *", 0 failed, "* ]]
}

main "$@"

# Reads the verbose log of one or more CTest runs and prints what failed, what was skipped and why, and the counts.
#
# A Catch2 program counts as its test cases, any other test as one. A program that failed without Catch2's summary
# (a crash, a time-out, a missing file) counts as one failure, whatever it had finished before.
#
# Log lines, N being the test's number in its run:
#   "N: text"                                       output of the test
#   " 3/17 Test  #N: name ....***Failed  0.02 sec"  its end
# `broken=1` on the command line adds a failure: CTest itself did not get through.
# A test gives the reason of a skip in a line "SKIPPED: reason"; inside a Catch2 program each such line is one skip.

function strip_prefix(line) { sub(/^[0-9]+: /, "", line); return line }
function number_before(text, pattern) { return match(text, pattern) ? substr(text, RSTART) + 0 : 0 }

/^[0-9]+: / {
  id = $1 + 0
  text = strip_prefix($0)
  if (text ~ /SKIPPED: / && text !~ /^Test command: /) {
    reason = text
    sub(/.*SKIPPED: /, "", reason)
    reasons[id] = reasons[id] reason "\n"
    skips[id]++
  }
  # "All tests passed (12 assertions in 3 test cases)", "test cases: 5 | 4 passed | 1 failed | 1 skipped"
  if (text ~ /^All tests passed \(/) { seen[id] = 1; good[id] += number_before(text, "[0-9]+ test cases?\\)") }
  if (text ~ /^test cases: /) {
    seen[id] = 1
    good[id] += number_before(text, "[0-9]+ passed")
    bad[id] += number_before(text, "[0-9]+ failed")
  }
}

/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: / {
  line = $0
  sub(/^ *[0-9]+\/[0-9]+ Test +#/, "", line)
  id = line + 0
  sub(/^[0-9]+: /, "", line)
  name = line
  sub(/ .*/, "", name)
  outcome = "failed"
  if (line ~ / Passed +[0-9.]+ sec/) outcome = "passed"
  if (line ~ /\*\*\*Skipped/) outcome = "skipped"
  finish(id, name, outcome, line)
}

function finish(id, name, outcome, line,    n, list, i, why) {
  n = split(reasons[id], list, "\n") - 1
  if (outcome == "skipped") {
    skipped++
    print "skipped: " name ": " (n > 0 ? list[1] : "it gave no reason")
  } else if (outcome == "passed" && !seen[id]) {
    passed++
  } else if (outcome == "passed") {
    # Catch2 counts a test case that left early as passed.
    passed += good[id] - skips[id]
    skipped += skips[id]
    for (i = 1; i <= n; i++) print "skipped: " name ": " list[i]
  } else {
    why = line
    sub(/^[^*]*\*\*\*/, "", why)
    sub(/ +[0-9.]+ sec.*/, "", why)
    passed += good[id]
    # A failure that Catch2 did not count (a crash after its summary, a sanitizer's report at exit) is one more.
    failed += bad[id] > 0 ? bad[id] : 1
    print "FAILED: " name ": " why (bad[id] > 0 ? " (" bad[id] " test cases)" : "")
  }
  delete reasons[id]; delete skips[id]; delete seen[id]; delete good[id]; delete bad[id]
}

END {
  if (broken) failed++
  printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
}

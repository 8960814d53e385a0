#!/usr/bin/env bash
# Plays a job of the workflow docs/ssdprof.yml from end to end: on the main branch, on a pull request that changes nothing,
# and on one whose fused kernel got worse.  The first two must pass; the third must fail and name the row.
#
# workflow.sh JOB FAULT METRIC: gpu slower "time:base+3%"; cpu inexact "rms:5%"
# PLAY_OPTIONS replaces the options of the run.  Without a GPU, FAKE_TIMES=1 makes times up.  Works in the current folder.
set -euo pipefail
job=$1 fault=$2 metric=$3
case $job in
  cpu) reports=ssdprof-reports baseline=ssdprof-baseline.json ;;
  gpu) reports=ssdprof-gpu baseline=ssdprof-gpu.json ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
row="layer 1, .* tokens, fused, exact, fp32 states"

export PATH="$here/bin:$PATH" STORE="$PWD/store" PLANTED=""
mkdir -p "$STORE"

play() {
  echo "#### $1"
  rm -rf $reports "$STORE/artifacts" "$STORE/summary.md"
  python "$here/play.py" "$here/../../docs/ssdprof.yml" "$job" ${PLAY_OPTIONS:+--options "$PLAY_OPTIONS"} > log 2>&1 && status=0 || status=$?
  cat log
}
must() { "$@" || { echo "does not hold: $*" >&2; exit 1; }; }

play "on main"
must [ "$status" -eq 0 ]
must grep -q "^::notice title=ssdprof::Nothing was compared. Commit $reports/baseline.json as $baseline." log
must [ -f "$STORE/artifacts/$reports/run/run.json" ]
for report in report.html junit.xml baseline.json; do
  must [ -s "$STORE/artifacts/$reports/$report" ]
done
must grep -q "^## ssdprof: demo" "$STORE/summary.md"
must [ "$(wc -l < "$STORE/summary.md")" -le 40 ]
cp $reports/baseline.json $baseline

play "a pull request that changes nothing"
must [ "$status" -eq 0 ]
must grep -q "PASSED: no case violates .*$metric" $reports/compare.txt
must [ "$(wc -l < "$STORE/summary.md")" -le 80 ]

PLANTED=$fault play "a pull request with a regression: $fault"
must [ "$status" -eq 1 ]
must grep -q "^FAILED: $metric: $row: " log
must grep -q "^::error title=ssdprof compare::${metric//%/%25}: $row: " log
must grep -q "^The comparison with the baseline did not pass" log
must grep -q "FAILED: $metric: $row" "$STORE/summary.md"
must [ -s "$STORE/artifacts/$reports/compare.txt" ]  # attached although the job failed
grep -q "^The run did not pass" log && run=failed || run=passed
must [ "$run" = "$([ "$fault" = inexact ] && echo failed || echo passed)" ]  # no verdict of a run is on speed alone
echo "#### as it should be"

#!/bin/bash
# What a decision costs (tests/tools/bench_sched.c), and how many requests a second baton-sim simulates.
# TRACE: a Mooncake trace; by default the small one of tests/sim, too short for more than an order of
# magnitude.
cd "$(dirname "$0")/../.." || exit 1
B=${BUILD:-build}
"$B/tests/tools/bench_sched" "$@" || exit 1
trace=${TRACE:-tests/sim/small.jsonl}
rate=$("$B/bin/baton-sim" run --cluster a800-70b --trace "$trace" 2>&1 >/dev/null |
    sed -n 's/.*: \([0-9]*\) requests a second/\1/p')
[ -n "$rate" ] || exit 1
echo "baton-sim, 16 nodes, $trace: $rate requests a second"
echo "bench,sim_16_nodes,$rate,requests/s,aim 50000,$(awk "BEGIN{printf \"%.2f\", $rate/50000}")"

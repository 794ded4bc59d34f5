#!/bin/bash
# What a decision costs (tests/tools/bench_sched.c, which takes 25 seconds at most), and how many requests a second baton-sim simulates.
# TRACE: a Mooncake trace; by default the small one of tests/sim, too short for more than an order of
# magnitude.
cd "$(dirname "$0")/../.." || exit 1
B=${BUILD:-build}
"$B/tests/tools/bench_sched" "$@" || exit 1
trace=${TRACE:-tests/sim/small.jsonl}
for nodes in 16 1000; do
    aim=$([ $nodes = 16 ] && echo 50000 || echo 5000)
    rate=$("$B/bin/baton-sim" run --cluster a800-70b --trace "$trace" --set prefill_nodes=$((nodes / 2)) \
        --set decode_nodes=$((nodes / 2)) --rate $((nodes / 16)) 2>&1 >/dev/null |
        sed -n 's/.*: \([0-9]*\) requests a second/\1/p')
    [ -n "$rate" ] || exit 1
    echo "baton-sim, $nodes nodes, $trace: $rate requests a second of CPU time"
    echo "bench,sim_${nodes}_nodes,$rate,requests/s,aim $aim,$(awk "BEGIN{printf \"%.2f\", $rate/$aim}")"
done

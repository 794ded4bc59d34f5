#!/bin/bash
# What the pool's bookkeeping costs: leases a second in process, memory a block, events (tests/tools/bench_pool.c).
# Argument: blocks (default 10 million; takes 2 GiB of memory).
cd "$(dirname "$0")/../.." || exit 1
B=${BUILD:-build}
[ -x "$B/tests/tools/bench_pool" ] || { echo "$0: no $B/tests/tools/bench_pool; run make tests"; exit 1; }
exec "$B/tests/tools/bench_pool" "$@"

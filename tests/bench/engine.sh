#!/bin/bash
# The CPU engine against the machine's own limits (tests/tools/bench_engine.c), with activations of
# two parts and of one; argument: rounds (10).
for parts in split bf16; do
    "${BUILD:-build}/tests/tools/bench_engine" "${1:-10}" 2 "$parts" || exit 1
done

#!/bin/bash
# The CPU engine against the machine's own limits (tests/tools/bench_engine.c), with activations of
# two parts and with one in the MLP (model.activations); argument: rounds (10).
for activations in split bf16-mlp; do
    "${BUILD:-build}/tests/tools/bench_engine" "${1:-10}" 2 "$activations" || exit 1
done

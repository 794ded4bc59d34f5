#!/bin/bash
# The CPU engine against the machine's own limits (tests/tools/bench_engine.c); argument: rounds (10).
exec "${BUILD:-build}/tests/tools/bench_engine" "${@:-10}"

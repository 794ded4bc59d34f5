#!/bin/bash
# docs/METRICS.md from the daemons' tables of metrics (make docs). BUILD: the build directory (build).
set -euo pipefail
cd "$(dirname "$0")/../.."
cat <<'T'
# Metrics

`make docs` prints this file from the daemons' tables; do not edit it. Every daemon serves its metrics at `/metrics` in
Prometheus' text format. [OPERATING](OPERATING.md#8-what-to-watch) says which to watch.

- Names that begin with `vllm:` have vLLM's name, type and meaning, so that its dashboards work. Each comes from one kind of
  daemon: a sum over all daemons counts nothing twice.
- A histogram has `_bucket`, `_sum` and `_count`. Counters begin at 0 when their daemon starts.
- No unit: a plain number (of requests, messages, processes). A ratio is between 0 and 1, except errors of predictions.

T
"${BUILD:-build}/bin/baton-conductor" --print-metrics

#!/bin/bash
# baton-bench serve on a two-node cluster of this machine: closed loop, then arrivals at half of what it did.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
local=$here/../../deploy/local/baton-local
state=$(mktemp -d)
trap '"$local" down --dir "$state"; rm -rf "$state"' EXIT
BATON_BIN=${BATON_BIN:-$(cd "$here/../.." && realpath "${BUILD:-build}/bin")}
export BATON_BIN
url=$("$local" up --dir "$state" --port 0 | tail -1)
out=$("$here/baton-bench" serve --url "$url" --concurrency 16 --requests 96 --input 256 --output 64)
echo "$out"
rate=$(sed -n 's/^bench,serve_requests,\([0-9.]*\),.*/\1/p' <<<"$out")
half=$(awk -v r="$rate" 'BEGIN {print r / 2}')
"$here/baton-bench" serve --url "$url" --rate "$half" --requests 64 --input 256 --output 64 --ttft 500 --tbt 100 |
    sed 's/^bench,serve_/bench,serve_half_/'

#!/bin/bash
# Goodput of baton against kvcache in simulation, for docs/SCHEDULING.md: requests of the second half of each
# trace within both objectives. The parameters (work price, bound of mixed steps) were chosen on the first halves.
# goodput.sh TRACE_DIR [CLUSTER]; HALF="--to 0.5" shows the first halves.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: goodput.sh TRACE_DIR [CLUSTER]" >&2; exit 2; }
sim=$(cd "$(dirname "$0")/../.." && realpath "${BUILD:-build}/bin/baton-sim")
cluster=${2:-a800-70b}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
good() { # policy admission [options]: requests within both objectives, mean TTFT
    "$sim" run --cluster "$cluster" --trace "$trace" ${HALF:---from 0.5} --rate "$rate" --ttft "$ttft" --tbt "$tbt" \
        --policy "$1" --admission "$2" "${@:3}" --brief 2>/dev/null |
        sed -n 's/.*ttft_mean_s=\([0-9.]*\).* good=\([0-9]*\).*/\2 \1/p'
}
for objectives in "30000 100" "1000 50"; do
    read -r ttft tbt <<<"$objectives"
    echo "TTFT $ttft ms, TBT $tbt ms, $cluster"
    echo "| trace | rate | kvcache, early | kvcache, predict | baton, no mixed steps | baton, predict | baton, priced | ratio | TTFT kvcache / baton |"
    echo "|---|---|---|---|---|---|---|---|---|"
    for trace in "$1"/*_trace.jsonl "$1"/azure_*.csv; do
        for rate in ${RATES:-0.5 1 2 3 6}; do
            read -r ke kt < <(good kvcache early)
            read -r kp _ < <(good kvcache predict)
            read -r b0 _ < <(good baton predict --mixed-step 0)
            read -r bm _ < <(good baton predict)
            read -r bp bt < <(good baton priced)
            ratio=$(awk "BEGIN{printf \"%.3f\", $bp/($kp > $ke ? $kp : $ke)}")
            name=$(basename "$trace" | sed 's/_trace.jsonl\|.csv//')
            echo "| $name | $rate | $ke | $kp | $b0 | $bm | $bp | $ratio | $kt / $bt s |"
            echo "bench,goodput_${name}_${ttft}_${rate},$bp,requests,kvcache,$ratio" >&3
        done
    done
done 3>"$lines"
cat "$lines"

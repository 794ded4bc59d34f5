#!/bin/bash
# make demo: starts a two-node cluster (prefill on one, decode on the other), streams the answer to a long
# prompt, asks again, prints what was measured as lines demo,<name>,<value>,<unit>, stops everything.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
state=$(mktemp -d "${TMPDIR:-/tmp}/baton-demo-XXXXXX")
cleanup() {
    "$here/baton-local" down --dir "$state" || true
    rm -rf "$state"
}
trap cleanup EXIT
trap 'exit 1' INT TERM

say() { printf 'demo: %s\n' "$*" >&2; }

json_string() { # text on stdin -> a JSON string
    sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/\t/\\t/g' -e 's/\r/\\r/g' | sed -e ':a' -e 'N' -e '$!ba' -e 's/\n/\\n/g' |
        sed -e '1s/^/"/' -e '$s/$/"/' | tr -d '\n'
}
field() { # name in the final chunk; empty if absent
    sed -n -E "s/.*\"$1\": ?(-?[0-9.eE+-]+|\"[^\"]*\").*/\1/p" "$state/last" | tail -1 | tr -d '"'
}

url=$("$here/baton-local" up --dir "$state" --port 0 | tail -1)
say "the cluster serves at $url (prefill on node 1, decode on node 2):"
"$here/baton-local" status --dir "$state" >&2

printf '{"prompt": %s, "max_tokens": 64, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}' \
    "$(json_string <"$here/demo-prompt.txt")" >"$state/body"

ask() { # label
    : >"$state/last"
    : >"$state/answer"
    say "$1"
    local line text
    while IFS= read -r line; do
        case $line in
        'data: [DONE]'*) : >"$state/done" ;;
        'data: '*)
            printf '%s\n' "$line" >>"$state/last"
            # Text of a chunk: JSON's escapes are printf's, but for \/ and surrogate pairs.
            text=$(sed -n -E 's/.*"text": ?"(([^"\\]|\\.)*)".*/\1/p' <<<"$line")
            if [ -n "$text" ]; then
                text=${text//\\\"/\"}
                text=${text//%/%%}
                # shellcheck disable=SC2059
                printf -- "$text" | tee -a "$state/answer" >&2
            fi
            ;;
        esac
    done < <(curl -sS -N -H 'Content-Type: application/json' -H 'x-baton-timings: 1' \
        --data-binary @"$state/body" "$url/v1/completions")
    printf '\n' >&2
    [ -f "$state/done" ] || { say "the stream ended early:"; tail -3 "$state/last" >&2; exit 1; }
    rm "$state/done"
}
number() { [ -n "$2" ] || { say "no $1 in the answer"; tail -2 "$state/last" >&2; exit 1; }; }

ask "first time, nothing is cached:"
mv "$state/answer" "$state/cold"
cold=$(field ttft_ms) bytes=$(field kv_bytes) segments=$(field kv_segments) hidden=$(field hidden_fraction)
tokens=$(field prompt_tokens) cold_cached=$(field cached_tokens)
ask "the same prompt again:"
warm=$(field ttft_ms) cached=$(field cached_tokens)
for n in cold bytes segments hidden tokens cold_cached warm cached; do number "$n" "${!n}"; done
cmp -s "$state/cold" "$state/answer" || { say "the second answer differs from the first"; exit 1; }
[ "${cached%.*}" -gt 0 ] || { say "nothing was cached"; exit 1; }
[ "${bytes%.*}" -gt 0 ] || { say "no KV moved between the nodes"; exit 1; }

say "both answers are equal; the KV cache went from node 1 to node 2 while prefill was computing"
echo "demo,prompt_tokens,$tokens,tokens"
echo "demo,cached_tokens_cold,$cold_cached,tokens"
echo "demo,cached_tokens,$cached,tokens"
echo "demo,ttft_cold,$cold,ms"
echo "demo,ttft_warm,$warm,ms"
echo "demo,kv_bytes,$bytes,bytes"
echo "demo,kv_segments,$segments,segments"
echo "demo,hidden_fraction,$hidden,ratio"

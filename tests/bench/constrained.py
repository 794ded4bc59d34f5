#!/usr/bin/python3
"""What a grammar costs on the CPU engine: tokens a second of constrained streams beside free ones, 1 and 16 at once, and the
time of the mask threads and of the engine's waits for them. constrained.py [ROUNDS [TOKENS]]

A cluster of one node, the 6M model, no drafts, so that every token is a step. In each round the kinds take turns: free; a
regular expression; one JSON schema for all; a schema for each. Times are medians over rounds."""
import os
import statistics
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "cluster"))
from local_cluster import Cluster  # noqa: E402

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
TOKENS = int(sys.argv[2]) if len(sys.argv) > 2 else 400
PERSON = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"},
          "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 4}}


def people(more):
    properties = dict(PERSON, **more)
    return {"guided_json": {"type": "array", "minItems": TOKENS, "items": {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}}}


KINDS = {
    "free": lambda i: {"ignore_eos": True},
    "regex": lambda i: {"guided_regex": f"([A-Za-z' ]{{3,30}}[,.;:!?\\n]){{{TOKENS}}}"},
    "schema": lambda i: people({}),
    "schemas": lambda i: people({f"k{i}": {"type": "string", "maxLength": 5 + i}}),
}


def answer(c, fields, seed, out):
    """Appends the ms from the first to the last token, as the conductor has seen them: the client shares its cores."""
    r = c.post("/v1/completions", {"prompt": "ROMEO:\n", "max_tokens": TOKENS, "temperature": 0.8, "seed": seed, **fields},
               headers={"x-baton-timings": "1"})
    assert r["usage"]["completion_tokens"] == TOKENS, r["usage"]
    out.append(r["timings"]["decode_ms"])


def masks(c):
    m = c.metrics("decode")
    return [m["baton_worker_mask_" + k] for k in ("seconds_sum", "seconds_count", "wait_seconds_sum")]


def run(c, kind, batch, seed):
    """(tokens a second, share of a core in masks, us of a mask, share of the time in waits)"""
    out, before = [], masks(c)
    threads = [threading.Thread(target=answer, args=(c, KINDS[kind](i), seed + i, out)) for i in range(batch)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(out) == batch
    span = max(out) / 1e3
    took, n, waited = (b - a for a, b in zip(before, masks(c)))
    return (batch * (TOKENS - 1)) / span, took / span, 1e6 * took / max(n, 1), waited / span


def main():
    c = Cluster("--nodes", "1", "--set", "decode.worker.speculate=off", "--set", "prefill.worker.speculate=off")
    lines = []
    try:
        for kind in KINDS:
            run(c, kind, 2, 1)
        for batch in 1, 16:
            got = {kind: [] for kind in KINDS}
            for r in range(ROUNDS):
                for kind in KINDS:
                    got[kind].append(run(c, kind, batch, 100 * r))
            rate = {kind: statistics.median(g[0] for g in v) for kind, v in got.items()}
            ratios = {kind: statistics.median(g[0] / f[0] for g, f in zip(v, got["free"])) for kind, v in got.items()}
            for kind, v in got.items():
                cpu, us, wait = (statistics.median(g[i] for g in v) for i in (1, 2, 3))
                print(f"{batch:2} streams, {kind:7}: {rate[kind]:6.0f} tokens/s ({min(g[0] for g in v):.0f} to "
                      f"{max(g[0] for g in v):.0f}), of free {ratios[kind]:.3f}; masks {us:.1f} us each, {100 * cpu:.2f} % of a "
                      f"core; the engine waits {100 * wait:.3f} % of the time", flush=True)
                if kind != "free":
                    lines.append(f"bench,constrained_{kind}_b{batch},{rate[kind]:.0f},tokens/s,free streams,{ratios[kind]:.3f}")
    finally:
        c.stop()
    print("\n".join(lines))


if __name__ == "__main__":
    main()

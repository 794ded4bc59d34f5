#!/usr/bin/python3
"""Writes tests/sim/small.jsonl: 240 requests of 40 conversations that share a system prompt.

Each turn repeats what was said before and adds to it; bursts every three seconds, as in Mooncake's
traces. Always the same bytes: the runs of tests/unit/test_sched_sim.c depend on them.
"""
import json
import os
import random

BLOCK = 512
rng = random.Random(20240707)
ids, unique = {}, 0
sessions = [dict(tokens=2 * BLOCK, name=i) for i in range(40)]
lines, at = [], 0
for _ in range(240):
    at += 0 if rng.random() < 0.8 else 3000
    s = rng.choice(sessions)
    s["tokens"] += int(rng.expovariate(1 / 3000)) + 40
    if s["tokens"] > 60000:
        s["tokens"], s["name"] = 2 * BLOCK + 100, (s["name"], at)
    n = (s["tokens"] + BLOCK - 1) // BLOCK
    chain = []
    for b in range(n):
        # the first block is everybody's; a partial last block is its own
        whole = (b + 1) * BLOCK <= s["tokens"]
        key = ("all", b) if b < 1 else (s["name"], b, whole or s["tokens"])
        if key not in ids:
            ids[key], unique = unique, unique + 1
        chain.append(ids[key])
    lines.append(json.dumps({"timestamp": at, "input_length": s["tokens"],
                             "output_length": rng.randint(1, 600), "hash_ids": chain}))
out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "small.jsonl")
with open(out, "w", encoding="ascii") as f:
    f.write("\n".join(lines) + "\n")

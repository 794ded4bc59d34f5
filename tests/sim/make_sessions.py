#!/usr/bin/python3
"""Writes a trace of sessions to standard output: make_sessions.py SEED SESSIONS FIRST GROWTH PAUSE_S SHARED

Each session begins with a prompt of FIRST tokens in the mean, of which SHARED are everybody's, and each turn adds GROWTH tokens
in the mean after a pause of PAUSE_S seconds in the mean. The same arguments give the same bytes.
"""
import json
import random
import sys

BLOCK = 512
seed, n, first, growth, pause, shared = (float(a) for a in sys.argv[1:7])
rng, ids, turns = random.Random(int(seed)), {}, []
for s in range(int(n)):
    at, tokens = rng.uniform(0, 1800), int(shared + rng.expovariate(1 / max(first - shared, 1))) + 40
    for _ in range(1 + int(rng.expovariate(1 / 25))):
        turns.append((at, s, min(tokens, 600000)))
        at, tokens = at + rng.expovariate(1 / pause), tokens + 40 + int(rng.expovariate(1 / growth))
for at, s, tokens in sorted(turns):
    chain = []
    for b in range((tokens + BLOCK - 1) // BLOCK):
        whole = (b + 1) * BLOCK <= tokens
        key = ("all", b) if (b + 1) * BLOCK <= shared else (s, b, whole or tokens)
        chain.append(ids.setdefault(key, len(ids)))
    print(json.dumps({"timestamp": int(1e3 * at), "input_length": tokens, "output_length": rng.randint(20, 600), "hash_ids": chain}))

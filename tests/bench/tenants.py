#!/usr/bin/python3
"""What one client can learn about another's prompts from response times. Client A sends a prompt; then client B sends the
same one, and prompts that nobody has sent, and compares times to the first token. Once without API keys (all clients
share one prefix cache) and once with a tenant for each client (kv.salt_file salts their block keys). B's advantage is the
share of pairs (repeated prompt, new prompt) in which the repeated one was faster: 0.5 is a guess, 1 is certainty.
Ends with bench,NAME,VALUE,UNIT,COMPARED WITH,RATIO."""
import os
import random
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
from local_cluster import Cluster  # noqa: E402

PROMPTS, TOKENS = int(os.environ.get("PROMPTS", "40")), 600


def prompt(rng):
    return [rng.randrange(10, 1900) for _ in range(TOKENS)]


def first_token_ms(c, ids, headers):
    start = time.monotonic()
    stream = c.stream("/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0}, headers=headers)
    next(stream)
    ms = (time.monotonic() - start) * 1e3
    list(stream)
    return ms


def measure(c, a, b):
    """Milliseconds of B: prompts that A has sent, new prompts, prompts that B itself has sent."""
    rng, theirs, new, own = random.Random(1), [], [], []
    for i in range(PROMPTS + 5):
        ids = prompt(rng)
        first_token_ms(c, ids, a)
        time.sleep(0.05)  # the conductor hears of the blocks
        order = [(theirs, ids), (new, prompt(rng))]
        rng.shuffle(order)
        for into, p in order:
            into.append(first_token_ms(c, p, b))
        time.sleep(0.05)
        own.append(first_token_ms(c, ids, b))
    return [x[5:] for x in (theirs, new, own)]  # the first ones warm up


def report(name, c, a, b):
    theirs, new, own = measure(c, a, b)
    advantage = sum((t < n) + (t == n) / 2 for t in theirs for n in new) / (len(theirs) * len(new))
    for what, v in (("of the other client", theirs), ("new", new), ("own", own)):
        q = statistics.quantiles(v, n=10)
        print(f"{name}, prompts {what}: median {statistics.median(v):.1f} ms ({q[0]:.1f} to {q[-1]:.1f})")
    print(f"bench,ttft_other_{name},{statistics.median(theirs):.2f},ms,new,{statistics.median(theirs) / statistics.median(new):.2f}")
    print(f"bench,advantage_{name},{advantage:.2f},1,,")


def main():
    c = Cluster()
    try:
        report("shared", c, {}, {})
    finally:
        c.stop()
    with tempfile.TemporaryDirectory() as folder:
        keys = os.path.join(folder, "keys")
        with open(os.open(keys, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
            f.write("bench-a tenant=a\nbench-b tenant=b\n")
        a, b = ({"Authorization": f"Bearer bench-{x}"} for x in "ab")
        c = Cluster("--set", f"conductor.conductor.api_keys_file={keys}", api_key="bench-a")
        try:
            report("tenants", c, a, b)
        finally:
            c.stop()


if __name__ == "__main__":
    main()

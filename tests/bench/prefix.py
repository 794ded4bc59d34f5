#!/usr/bin/python3
"""A prefix from another node against computing it, in a whole cluster on this machine: time to first token of prompts
that only differ in where their prefix is. And three policies under a load in which a few documents are asked about again
and again: one keeps to the node that has a document, two may have it fetched.

The model has random weights of a 124M-parameter Llama's shape, so that computing costs what it would; two prefill workers
with one thread each, on nodes n1 and n2, the decode worker on n3. n1 has an SSD tier.

    tests/bench/prefix.py [ROUNDS] [SECONDS]      (SECONDS: of load for each policy; 0: none. BUILD: the build directory)
"""
import http.client
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(HERE, "..", "cluster"))
from conftest import scrape, wait_for  # noqa: E402
from restarts import Restarts  # noqa: E402

TOKENS = 1536  # of a prompt
DOCS, DOC_TOKENS, QUESTION_TOKENS = 40, 1024, 128
RATE = 1.5  # requests a second of the load


def make_model(folder):
    """The demo model's tokenizer under a larger shape."""
    path = os.path.join(folder, "llama-124m")
    shutil.copytree(os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m"), path)
    for name in os.listdir(path):
        if name.endswith(".safetensors") or name.endswith(".index.json"):
            os.remove(os.path.join(path, name))
    with open(os.path.join(path, "config.json")) as f:
        c = json.load(f)
    c.update(hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=4, head_dim=64,
             num_hidden_layers=12)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(c, f)
    return path


def start(model, policy):
    return Restarts("--nodes", "3", "--prefill", "2", "--decode", "1", "--model", model, "--load-format", "dummy",
                    "--set", "prefill.engine.threads=1", "--set", "decode.engine.threads=1", "--set", "kvstore.kvstore.slab_bytes=768MiB",
                    "--set", f"conductor.sched.policy={policy}")


def ids(rng, n):
    return [rng.randrange(10, 1900) for _ in range(n)]


def first_token(r, prompt):
    """(ms until the first token, tokens that were cached)"""
    c = http.client.HTTPConnection(r.c.host, r.c.port, timeout=120)
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    t0 = time.monotonic()
    c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    resp = c.getresponse()
    ms, usage, buf = None, None, b""
    while piece := resp.read1(65536):
        ms = ms if ms is not None else (time.monotonic() - t0) * 1e3
        buf += piece
    c.close()
    for event in buf.decode().split("\n\n"):
        if event.startswith("data: {"):
            e = json.loads(event[6:])
            assert "error" not in e, e
            usage = e.get("usage") or usage
    return ms, usage["prompt_tokens_details"]["cached_tokens"]


def only_on(r, node):
    """Prefills go to this node."""
    for n in sorted(("n1", "n2"), key=lambda n: n != node):
        r.ctl(*(["undrain", n] if n == node else ["drain", n, "--force"]))
    time.sleep(0.3)


def with_ssd(r, folder):
    m = r.members("kvstore", "n1")[0]
    r.args["kvstore", m["name"]][0].extend(
        ["--set", f"kvstore.ssd.path={folder}/ssd", "--set", "kvstore.ssd.bytes=1GiB",
         "--set", "kvstore.ssd.write_policy=always", "--set", "kvstore.ssd.backlog=4096"])
    return restart(r, "n1")


def restart(r, node):
    m = r.members("kvstore", node)[0]
    os.kill(m["pid"], signal.SIGTERM)
    for p in r.children:  # who is ours has to be waited for
        if p.pid == m["pid"]:
            p.wait(20)
    wait_for(lambda: not os.path.exists(f"/proc/{m['pid']}"), 20, "it ends")
    m = r.start_again(m)
    wait_for(lambda: scrape(m["http"])["baton_kvstore_workers"] >= 1, 20, "its workers are back")
    return m


def places(model, folder, rounds):
    """Medians of time to first token by where the prefix is: computed, n1's slab, n1's SSD, own slab."""
    rng = random.Random(1)
    r = start(model, "baton")
    ms = {k: [] for k in ("computed", "slab", "own", "ssd")}
    try:
        ssd = with_ssd(r, folder)
        only_on(r, "n2")
        first_token(r, ids(rng, TOKENS))  # both have measured something
        only_on(r, "n1")
        first_token(r, ids(rng, TOKENS))
        hit = TOKENS - 16
        later = []
        for i in range(rounds):
            p, q = ids(rng, TOKENS), ids(rng, TOKENS)
            only_on(r, "n1")
            for prompt in (p, q):
                t, cached = first_token(r, prompt)
                assert cached == 0
                ms["computed"].append(t)
            later.append(q)
            only_on(r, "n2")
            for key in ("slab", "own"):
                t, cached = first_token(r, p)
                if cached != hit:
                    print(f"round {i}: only {cached} of {hit} tokens came ({key})")
                ms[key].append(t)
        wait_for(lambda: scrape(ssd["http"])["baton_ssd_backlog"] == 0, 60, "all is written")
        for node in ("n1", "n3"):  # nothing is left in their slabs
            restart(r, node)
        only_on(r, "n2")
        time.sleep(1.5)
        for i, q in enumerate(later):
            t, cached = first_token(r, q)
            if cached != hit:
                print(f"round {i}: only {cached} of {hit} tokens came (ssd)")
            ms["ssd"].append(t)
        m = scrape(r.members("kvstore", "n2")[0]["http"])
        for tier in ("slab", "ssd"):
            got = m['baton_kvstore_fetched_bytes_total{tier="%s"}' % tier]
            print(f"fetched from the {tier} of others: {got / 1e6:.0f} MB")
    finally:
        r.stop()
    return ms


def load(model, policy, seconds, seed):
    """Times to first token, ms, of a load over a few documents, some far more popular."""
    rng = random.Random(seed)
    docs = [ids(rng, DOC_TOKENS) for _ in range(DOCS)]
    weights = [1 / (k + 1) ** 0.8 for k in range(DOCS)]
    r = start(model, policy)
    out, cached, threads = [], [], []
    try:
        prompts = [d + ids(rng, QUESTION_TOKENS) for d in docs]  # each is known to one node then
        pair = [threading.Thread(target=lambda half=prompts[k::2]: [first_token(r, p) for p in half]) for k in range(2)]
        for t in pair:
            t.start()
        for t in pair:
            t.join()
        end = time.monotonic() + seconds

        def one(prompt):
            t, c = first_token(r, prompt)
            out.append(t)
            cached.append(c)

        while time.monotonic() < end:
            t = threading.Thread(target=one, args=(rng.choices(docs, weights)[0] + ids(rng, QUESTION_TOKENS),))
            t.start()
            threads.append(t)
            time.sleep(rng.expovariate(RATE))
        for t in threads:
            t.join()
        fetched = r.c.metrics("conductor")["baton_plan_fetches_total"]
        for m in r.members("kvstore"):
            v = scrape(m["http"])
            print(m["node"], ", ".join(f"{k.removeprefix('baton_kvstore_')} {x:.0f}" for k, x in v.items() if x and (
                k.startswith("baton_kvstore_fetches") or k.startswith("baton_kvstore_blocks_evicted"))))
    finally:
        r.stop()
    return out, sum(cached) / (len(cached) * (DOC_TOKENS + QUESTION_TOKENS)), fetched


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0
    folder = tempfile.mkdtemp(prefix="baton-prefix-")
    lines = []
    try:
        model = make_model(folder)
        ms = places(model, folder, rounds)
        base = statistics.median(ms["computed"])
        for key, what in (("computed", "computed"), ("slab", "from a peer's slab"), ("ssd", "from a peer's SSD"),
                          ("own", "in the own slab")):
            t = statistics.median(ms[key])
            print(f"{what}: median {t:.1f} ms, {min(ms[key]):.1f} to {max(ms[key]):.1f}, n={len(ms[key])}")
            lines.append(f"bench,prefix_ttft_{key},{t:.1f},ms,"
                         + ("-,-" if key == "computed" else f"computed {base:.1f} ms,{t / base:.3f}"))
        if seconds > 0:
            first = None
            for policy in ("cache-aware", "kvcache", "baton", "cache-aware"):
                out, hit, fetched = load(model, policy, seconds, 3)
                mean = statistics.mean(out)
                p90 = sorted(out)[int(0.9 * len(out))]
                print(f"{policy}: {len(out)} requests, mean {mean:.0f} ms, p90 {p90:.0f}, hit ratio {hit:.3f}, "
                      f"{fetched:.0f} fetches planned", flush=True)
                lines.append(f"bench,prefix_load_{policy}{'_again' if policy == 'cache-aware' and first else ''},"
                             f"{mean:.0f},ms," + (f"cache-aware {first:.0f} ms,{mean / first:.3f}" if first else "-,-"))
                first = first or mean
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""Many at once: 64 streams with the tokens each gets alone; 250 requests, many cancelled."""
import os
import random
import threading
import time

import pytest

import sanitizer
from conftest import ROOT, wait_for
from leftovers import assert_nothing_left, settled

DRAFT = os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m")
WORDS = "to be or not that is the question whether nobler in mind suffer slings arrows of".split()


def prompt(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 7, 40, 200, 700])))


def run_all(jobs, threads=64):
    """Runs callables on that many threads; returns their results in order."""
    out = [None] * len(jobs)
    errors = []
    it = iter(list(enumerate(jobs)))
    lock = threading.Lock()

    def worker():
        while True:
            with lock:
                i, job = next(it, (None, None))
            if i is None:
                return
            try:
                out[i] = job()
            except Exception as e:  # noqa: BLE001
                errors.append((i, repr(e)))

    ts = [threading.Thread(target=worker) for _ in range(threads)]
    for t in ts:
        t.start()
    for t in ts:
        t.join(300 * sanitizer.PATIENCE)
    assert not errors, errors[:3]
    return out


def streamed(c, body):
    text, ids, done = "", [], False
    for ev in c.stream("/v1/completions", body):
        if ev == "[DONE]":
            done = True
        elif ev.get("choices"):
            ch = ev["choices"][0]
            text += ch["text"]
            ids += ch["logprobs"]["tokens"]
    assert done
    return text, ids


@pytest.mark.parametrize("options", [["--prefill", "2", "--decode", "2"]])
def test_64_streams_of_mixed_lengths_equal_each_alone(make_cluster, options):
    c = make_cluster(*options)
    rng = random.Random(5)
    bodies = [{"prompt": prompt(rng), "max_tokens": rng.choice([1, 2, 17, 60, 150]), "logprobs": 0,
               "return_tokens_as_token_ids": True, "ignore_eos": True,
               "temperature": rng.choice([0, 0.8, 1.2]), "seed": i, "top_p": 0.95}
              for i in range(64)]
    alone = [streamed(c, b) for b in bodies]
    together = run_all([lambda b=b: streamed(c, b) for b in bodies])
    if "avx512_bf16" in open("/proc/cpuinfo").read():
        assert together == alone


def test_250_requests_with_random_cancellations_leave_nothing(make_cluster):
    # The small model: with the other one this test takes a minute more, in which only the engine does anything.
    c = make_cluster("--model", DRAFT, "--prefill", "1", "--decode", "2", "--nodes", "2")
    rng = random.Random(9)

    def warm():
        run_all([lambda p=prompt(rng): c.complete(p, 8) for _ in range(64)])
        return c.metrics("kvstore", 1)["baton_kv_received_bytes_total"] > 0

    wait_for(warm, 240, "both decode workers were used: the kvstores' connection exists")
    before = settled(c)

    def cancelled(p, after, n):
        s = c.stream("/v1/completions", {"prompt": p, "max_tokens": n, "temperature": 1,
                                         "ignore_eos": True})
        for _ in range(after):
            if next(s, None) is None:
                break
        s.close()

    def job(i):
        p, kind = prompt(rng), rng.random()
        if kind < 0.5:
            return lambda: c.complete(p, rng.choice([1, 5, 30]))
        return lambda: cancelled(p, rng.choice([1, 2, 10]), rng.choice([20, 2000]))

    def aborted():
        return sum(v for k, v in c.metrics("conductor").items()
                   if k.startswith("vllm:request_success_total") and 'finished_reason="abort"' in k)

    earlier = aborted()
    start = time.monotonic()
    run_all([job(i) for i in range(250)])
    print(f"250 requests in {time.monotonic() - start:.1f} s")

    assert_nothing_left(c, before, rss=64 << 20)
    print(f"{aborted() - earlier:.0f} were cancelled")
    assert aborted() - earlier > 25, "clients left before the answer's end"
    assert c.complete("alive?", 4)["usage"]["completion_tokens"] >= 1

"""A prefix on a disk that is about as slow as computing: its end is loaded while its beginning is computed, and the model
says the same as when all of it was computed."""
import os
import random
import signal

import pytest

import slow_disk
from conftest import scrape, wait_for
from local_cluster import start_time
from restarts import Restarts

BLOCK, PROMPT, PROMPTS = 16, 2000, 4  # tokens, tokens, warm-up included


@pytest.fixture
def r(tmp_path):
    x = Restarts("--nodes", "1", "--set", "kvstore.kvstore.slab_bytes=64MiB", "--set", f"all.kv.block_tokens={BLOCK}",
                 "--set", f"kvstore.kvstore.ssd.path={tmp_path / 'ssd'}", "--set", "kvstore.kvstore.ssd.bytes=128MiB",
                 "--set", "kvstore.kvstore.ssd.write_policy=always", "--set", "kvstore.kvstore.ssd.backlog=4096")
    yield x
    x.stop()


def ids(seed):
    rng = random.Random(seed)
    return [rng.randrange(10, 1900) for _ in range(PROMPT)]


def ask(r, i):
    a = r.c.post("/v1/completions", {"prompt": ids(i), "max_tokens": 6, "temperature": 0, "logprobs": 1})
    choice = a["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"], a["usage"]["prompt_tokens_details"]["cached_tokens"]


def kvstore(r):
    return scrape(r.members("kvstore")[0]["http"])


def all_written(r):
    """Few blocks may wait for the disk: the rest are written at their next use."""
    for i in range(PROMPTS):
        wait_for(lambda: kvstore(r)["baton_ssd_backlog"] == 0, 30, "the disk has taken what it was given")
        assert ask(r, i)[2] == PROMPT - PROMPT % BLOCK - (BLOCK if PROMPT % BLOCK == 0 else 0)
    wait_for(lambda: kvstore(r)["baton_ssd_backlog"] == 0, 30, "the disk has taken what it was given")


def restart(r, tmp_path, bytes_per_s):
    """The slab is empty then, and the disk slow."""
    m = r.members("kvstore")[0]
    key = "kvstore", m["name"]
    argv, env, cwd = r.args[key]
    r.args[key] = argv, slow_disk.environment(env, slow_disk.build(tmp_path), bytes_per_s), cwd
    os.kill(m["pid"], signal.SIGTERM)
    wait_for(lambda: start_time(m["pid"]) == "", 20, "it ends")
    r.start_again(m)
    wait_for(lambda: kvstore(r)["baton_kvstore_workers"] >= 2, 20, "its workers are back")


def test_the_head_is_computed_while_the_tail_loads(r, tmp_path):
    first = [ask(r, i) for i in range(PROMPTS)]
    assert [c for _, _, c in first] == [0] * PROMPTS
    all_written(r)
    load = [m for m in r.members("prefill") if m["session_up"]][0]["load"]
    v = kvstore(r)
    token_bytes = v["baton_ssd_written_bytes_total"] / v["baton_ssd_blocks"] / BLOCK
    # Somewhat faster than computing, by what the worker says of itself: if others keep the processor from us the first
    # chunk is computed all the same, and if they kept it from us before, a part still comes in time.
    restart(r, tmp_path, load["prefill_tokens_per_s"] * token_bytes / 0.6)
    cached = []
    for i in range(PROMPTS):
        text, logprobs, n = ask(r, i)
        assert text == first[i][0], i
        assert max(abs(a - b) for a, b in zip(logprobs, first[i][1])) < 0.1, i
        cached.append(n)
    v = kvstore(r)
    assert v["baton_kvstore_tails_total"] > 0 and v["baton_kvstore_tail_blocks_total"] > 0, cached
    assert any(0 < n < PROMPT - BLOCK for n in cached), cached  # what is cached was not computed, and the rest was
    assert all(n % BLOCK == 0 for n in cached)
    for i in range(PROMPTS):
        assert ask(r, i)[0] == first[i][0]  # what came and what was computed, together

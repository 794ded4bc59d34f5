"""Prompts ten times larger, together, than the shared memory of the node: they come back from the SSD, and the model
says the same as when they were computed."""
import random

from conftest import wait_for

BLOCK, PROMPT = 16, 250  # tokens


def ids(seed):
    rng = random.Random(seed)
    return [rng.randrange(10, 1900) for _ in range(PROMPT)]


def pool(c):
    m = c.metrics("kvstore")
    return m, int(sum(v for k, v in m.items() if k.startswith("baton_pool_slots{")))


def test_ten_slabs_of_prompts(make_cluster, tmp_path):
    c = make_cluster("--nodes", "1", "--set", "kvstore.kvstore.slab_bytes=4MiB", "--set",
                     f"kvstore.kvstore.ssd.path={tmp_path / 'ssd'}", "--set", "kvstore.kvstore.ssd.bytes=256MiB",
                     "--set", "kvstore.kvstore.ssd.write_policy=always", "--set", f"all.kv.block_tokens={BLOCK}",
                     "--set", "prefill.engine.mem=8MiB", "--set", "decode.engine.mem=8MiB")
    slots = pool(c)[1]
    blocks = PROMPT // BLOCK
    prompts = -(-10 * slots // blocks)

    def ask(i):
        r = c.post("/v1/completions", {"prompt": ids(i), "max_tokens": 6, "temperature": 0, "logprobs": 1})
        choice = r["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"], r["usage"]

    def written(i):
        """All of the prompts up to this one. Only a few blocks may wait for the disk: it takes the rest at the next use."""
        m = wait_for(lambda: (lambda m: m if m["baton_ssd_backlog"] == 0 else None)(pool(c)[0]), 60, "the disk has what it was given")
        if m["baton_ssd_blocks"] >= (i + 1) * blocks:
            return True
        ask(i)
        return False

    first = []
    for i in range(prompts):
        first.append(ask(i))
        wait_for(lambda: written(i), 60, "all of it is on the disk")  # noqa: B023 (called at once)
    before = pool(c)[0]['baton_kvstore_ssd_loads_total{result="ok"}']
    cached = 0
    for i in range(prompts):
        text, logprobs, usage = ask(i)
        assert text == first[i][0], i
        assert max(abs(a - b) for a, b in zip(logprobs, first[i][1])) < 0.1, i
        cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    m = pool(c)[0]
    assert m['baton_kvstore_ssd_loads_total{result="ok"}'] - before > 5 * slots
    assert cached > 0.8 * prompts * PROMPT, (cached, prompts * PROMPT)


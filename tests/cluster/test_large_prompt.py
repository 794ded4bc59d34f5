"""One prompt that is larger than any node's slab: a worker that has pages for it computes and decodes it, and says what it
says where slabs are large. One that is larger than any worker's pages gets a 400 that says so."""
import json
import random

from sanitizer import SHORT_STEPS

BLOCK = 16


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(10, 1900) for _ in range(n)]


def slots(c):
    return int(sum(v for k, v in c.metrics("kvstore").items() if k.startswith("baton_pool_slots{")))


def ask(c, prompt, **more):
    a = c.post("/v1/completions", dict({"prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 1}, **more))
    return [(x["text"], x["logprobs"]["token_logprobs"]) for x in a["choices"]], a["usage"]


def same(a, b):
    assert [text for text, _ in a] == [text for text, _ in b]
    for (_, x), (_, y) in zip(a, b):
        assert max(abs(p - q) for p, q in zip(x, y)) < 0.1


def quiet(c):
    """Nothing is held by anybody."""
    m = c.metrics("kvstore")
    return m["baton_kvstore_grants"] == 0 and m["baton_pool_leases"] == 0 and m['baton_pool_slots{state="writing"}'] == 0


def test_prompt_larger_than_the_slab(make_cluster):
    from conftest import wait_for
    large = make_cluster("--nodes", "1", *SHORT_STEPS, "--set", f"all.kv.block_tokens={BLOCK}")
    prompt, other = ids(1, 3000), ids(2, 3001)
    want = [ask(large, prompt)[0], ask(large, other, n=3, temperature=1, seed=5)[0]]
    c = make_cluster("--nodes", "1", *SHORT_STEPS, "--set", f"all.kv.block_tokens={BLOCK}", "--set", "kvstore.kvstore.slab_bytes=4MiB")
    n = slots(c)
    assert 3000 // BLOCK > 2 * n, n
    got, usage = ask(c, prompt)
    same(got, want[0])
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    # Its beginning is in the pool: half of what the slab has.
    wait_for(lambda: quiet(c), 30, "all is given back")
    got, usage = ask(c, prompt)
    same(got, want[0])
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert (n // 2 - 1) * BLOCK <= cached <= n // 2 * BLOCK, (cached, n)
    got, usage = ask(c, other, n=3, temperature=1, seed=5)
    same(got, want[1])
    assert c.metrics("conductor")['baton_plan_total{kind="local",reason="larger_than_slab"}'] == 3
    # Others go apart as before, and find room.
    text, _ = ask(c, ids(3, 300))
    same(text, ask(large, ids(3, 300))[0])
    wait_for(lambda: quiet(c), 30, "all is given back")


def test_prompt_larger_than_the_pages(make_cluster):
    c = make_cluster("--nodes", "1", *SHORT_STEPS, "--set", f"all.kv.block_tokens={BLOCK}", "--set", "decode.engine.pages=64",
                     "--set", "prefill.engine.pages=64")
    status, _, body = c.request("POST", "/v1/completions", {"prompt": ids(1, 64 * BLOCK + 1), "max_tokens": 1})
    error = json.loads(body)["error"]
    assert status == 400, error
    assert "engine.pages" in error["message"] and str(64 * BLOCK) in error["message"], error
    status, _, body = c.request("POST", "/v1/completions", {"prompt": ids(1, 64 * BLOCK - 8), "max_tokens": 100})
    error = json.loads(body)["error"]  # the prompt fits, with its answer it does not
    assert status == 400 and "64" in error["message"] and "engine.pages" in error["message"], error
    assert ask(c, ids(1, 64 * BLOCK - 30))[1]["completion_tokens"] == 20

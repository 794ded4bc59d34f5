"""DoLa, contrastive search, typical_p and XTC through the cluster: the same tokens from a cold and a warm cache, after a
hand-off, a killed decode worker and preemption, with grammars and beside other requests. That DoLa's and the searches' are
the papers' tokens is checked by tests/golden/test_engine_search.c."""
import json

import pytest

from restarts import Restarts
from test_faults import EXACT, run_streams, same

TOKENS = 120
DOLA = [{"dola_layers": "low"}, {"dola_layers": "high", "repetition_penalty": 1.2}, {"dola_layers": [1, 4, 5]},
        {"dola_layers": "high", "temperature": 0.8, "n": 2, "seed": 5},
        {"dola_layers": [2], "structured_outputs": {"regex": "([a-z]{1,8} ){30}"}},
        {"typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05, "temperature": 1, "seed": 3}]
SEARCH = [{"penalty_alpha": 0.6, "top_k": 4}, {"penalty_alpha": 0.3, "top_k": 8, "frequency_penalty": 0.2},
          {"penalty_alpha": 0.5, "top_k": 5, "structured_outputs": {"regex": "([a-z]{1,8} ){30}"}}]


# No text of the model's corpus: that it knows by heart, and then every search finds the same.
PROMPT = [37 * i * i % 1999 for i in range(420)]


def bodies():
    base = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    return [dict(base, **x) if "structured_outputs" not in x else {**base, **x, "ignore_eos": False} for x in DOLA + SEARCH]


def plans(metrics, reason):
    return sum(v for k, v in metrics.items() if k.startswith("baton_plan_total") and f'"{reason}"' in k)


@pytest.mark.skipif(not EXACT, reason="without AVX512 near ties may fall the other way")
def test_the_same_tokens_whatever_happens():
    r = Restarts("--nodes", "3", "--prefill", "1", "--decode", "2")
    try:
        at, all_of = (r.c.host, r.c.port), bodies()
        want = [run_streams(at, [b], when=1)[0] for b in all_of]  # one after the other
        plain = r.c.post("/v1/completions", {k: all_of[0][k] for k in ("prompt", "max_tokens", "temperature", "ignore_eos")})
        texts = [w.text[0] for w in want]
        assert all(len(w.lps[0]) == TOKENS for w in want if "structured_outputs" not in w.body)
        assert len({plain["choices"][0]["text"], *texts}) == len(texts) + 1  # each is another search
        assert want[3].text[0] != want[3].text[1]
        m = r.c.metrics("conductor")
        assert plans(m, "one_worker") == len(SEARCH) and plans(m, "apart") > 0
        # The prompt is cached now: a search reads no cache, DoLa does.
        for w in want:
            again = r.c.post("/v1/completions", dict(w.body, stream=False))
            cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached == 0) == ("penalty_alpha" in w.body), (w.body, cached)
            assert again["choices"][0]["text"] == w.text[0]
        same(run_streams(at, all_of), want)  # beside each other

        same(run_streams(at, all_of, lambda: r.kill_busiest("decode"), when=3, slow=r.c), want)
        assert r.total("baton_requests_replanned_total") > 0
    finally:
        r.stop()


@pytest.mark.skipif(not EXACT, reason="without AVX512 near ties may fall the other way")
def test_preempted_rows_have_the_same_tokens(make_cluster):
    c = make_cluster("--nodes", "2", "--prefill", "1", "--decode", "1", "--set", "decode.engine.pages=90")
    at, all_of = (c.host, c.port), bodies()
    want = [run_streams(at, [b], when=1)[0] for b in all_of]
    same(run_streams(at, all_of, when=2, slow=c), want)  # all have begun: that is more than there are pages
    m = c.metrics("decode")
    assert sum(v for k, v in m.items() if k.startswith("vllm:num_preemptions_total")) > 0


def test_refused_by_name(make_cluster):
    c = make_cluster("--nodes", "1", "--prefill", "0", "--decode", "1", "--set", "decode.engine.device=null")
    for body, param, text in (
            ({"penalty_alpha": 0.5}, "top_k", "2 to 16"), ({"penalty_alpha": 0.5, "top_k": 4, "n": 2}, "n", "only one answer"),
            ({"penalty_alpha": 0.5, "top_k": 4, "temperature": 1}, "temperature", "does not sample"),
            ({"penalty_alpha": 0.5, "top_k": 4, "dola_layers": "low"}, "dola_layers", "another search"),
            ({"dola_layers": [6]}, "dola_layers", "to 5"), ({"dola_layers": "mid"}, "dola_layers", "low"),
            ({"dola_layers": "low"}, None, "cpu and cuda engines"),
            ({"penalty_alpha": 0.5, "top_k": 4}, None, "cpu and cuda engines")):
        status, _, answer = c.request("POST", "/v1/completions", {"prompt": "a", **body})
        e = json.loads(answer)["error"]
        assert status == 400 and e["param"] == param and text in e["message"], (body, status, e)

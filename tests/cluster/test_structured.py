"""Constrained output on running clusters: every form of the API, with everything that may be asked for beside it. What comes
out always follows its schema, pattern or list; a killed worker changes no token of it."""
import concurrent.futures
import contextlib
import json
import os
import random
import re

import jsonschema
import pytest

from conftest import scrape, wait_for
from restarts import SLOW_MS, Restarts
from sanitizer import PATIENCE
from test_faults import EXACT, run_streams, same
from test_worker_runtime import GOLDEN, prompt, rid
from worker_node import INVALID, Conductor, Node, pack

C, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "ROMEO:\n"
ENDS = [2044, 2047]  # of the model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "house": {"enum": ["Montague", "Capulet", None]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "house", "friends"],
    "additionalProperties": False,
}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
CHOICES = ["yes, my lord", "no", "né €"]
GBNF = 'root ::= verse (", " verse)? "."\nverse ::= ("O " | "but ") [a-z]{3,5}\n'
GBNF_RE = r"(O |but )[a-z]{3,5}(, (O |but )[a-z]{3,5})?\."


def late_rows(cluster):
    return sum(scrape(d["http"])["baton_worker_masks_late_total"] for d in cluster.status()
               if d["daemon"] in ("prefill", "decode"))


def is_person(text):
    jsonschema.Draft202012Validator(PERSON).validate(json.loads(text))


def is_object(text):
    assert isinstance(json.loads(text), dict)


def is_tight(text):
    return is_person(text) and not re.search(r"\s\s|[\n\r\t]", re.sub('"([^"\\\\]|\\\\.)*"', '""', text))


def has_line_ends(text):
    return is_object(text) and text.lstrip("\n").startswith("{\n\n")


def has_no_space(text):
    return is_person(text) and not re.search(r"\s", re.sub('"([^"\\\\]|\\\\.)*"', '""', text))


def matches(pattern):
    def check(text):
        assert re.fullmatch(pattern, text), text
    return check


def is_choice(text):
    assert text in CHOICES


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": dict({"name": "x", "schema": schema}, **more)}


FORMS = {
    "openai-strict": ({"response_format": schema_format(PERSON, strict=True)}, is_person),
    "openai": ({"response_format": schema_format(PERSON)}, is_person),
    "openai-flat": ({"response_format": {"type": "json_schema", "name": "x", "schema": PERSON}}, is_person),
    "openai-object": ({"response_format": {"type": "json_object"}}, is_object),
    "llama-object": ({"response_format": {"type": "json_object", "schema": PERSON}}, is_person),
    "llama-schema": ({"json_schema": PERSON}, is_person),
    "llama-grammar": ({"grammar": GBNF}, matches(GBNF_RE)),
    "vllm-json": ({"structured_outputs": {"json": PERSON}}, is_person),
    "vllm-json-text": ({"structured_outputs": {"json": json.dumps(PERSON)}}, is_person),
    "vllm-object": ({"structured_outputs": {"json_object": True}}, is_object),
    "vllm-tight": ({"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, is_tight),
    "vllm-spaces": ({"structured_outputs": {"json_object": True, "whitespace_pattern": "\\n{2}"}}, has_line_ends),
    "guided-spaces": ({"guided_json": PERSON, "guided_whitespace_pattern": ""}, has_no_space),
    "vllm-regex": ({"structured_outputs": {"regex": DATE}}, matches(DATE)),
    "vllm-choice": ({"structured_outputs": {"choice": CHOICES}}, is_choice),
    "vllm-grammar": ({"structured_outputs": {"grammar": GBNF}}, matches(GBNF_RE)),
    "guided-json": ({"guided_json": json.dumps(PERSON)}, is_person),
    "guided-regex": ({"guided_regex": DATE}, matches(DATE)),
    "guided-choice": ({"guided_choice": CHOICES}, is_choice),
    "guided-grammar": ({"guided_grammar": GBNF}, matches(GBNF_RE)),
    "sglang-regex": ({"regex": DATE}, matches(DATE)),
    "sglang-ebnf": ({"ebnf": GBNF}, matches(GBNF_RE)),
}


@pytest.fixture(scope="module")
def calm(cluster):
    """Fields that keep the model, which knows no JSON, from endless white space and strings."""
    bias = {}
    for text, by in ("\n", -100), (" ", -100), ("\n\n", -100), ("\t", -100), ('"', 6), ("}", 12):
        got = cluster.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        if len(got) == 1:
            bias[str(got[0])] = by
    return {"logit_bias": bias, "max_tokens": 200}


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_forms(cluster, calm, form, sampled):
    fields, check = FORMS[form]
    how = {"temperature": 1, "seed": 5} if sampled else {"temperature": 0}
    for path, start in (C, {"prompt": PROMPT}), (CHAT, {"messages": [{"role": "user", "content": "Speak."}]}):
        (choice,) = cluster.post(path, {**calm, **start, **how, **fields})["choices"]
        assert choice["finish_reason"] == "stop", choice
        check(text_of(choice))


def test_other_apis(cluster, calm):
    """OpenAI's Responses and Anthropic's Messages."""
    common = {"temperature": 1, "seed": 5, "logit_bias": calm["logit_bias"]}
    for fmt, check in [({"type": "json_schema", "name": "x", "schema": PERSON, "strict": True}, is_person),
                       ({"type": "json_object"}, is_object)]:
        out = cluster.post("/v1/responses", {"input": "Speak.", "max_output_tokens": 200, "text": {"format": fmt}, **common})
        assert out["status"] == "completed", out
        check(out["output"][0]["content"][0]["text"])
    out = cluster.post("/v1/messages", {"max_tokens": 200, "messages": [{"role": "user", "content": "Speak."}], **common,
                                        "output_config": {"format": {"type": "json_schema", "schema": PERSON}}})
    assert out["stop_reason"] == "end_turn", out
    is_person(out["content"][0]["text"])
    wrong = {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}
    e = cluster.post("/v1/responses", {"input": "Speak.", "text": {"format": wrong}}, expect=400)["error"]
    assert e["param"].startswith("text.format") and "#/type" in e["message"], e


def test_text_is_free(cluster):
    free = cluster.complete(PROMPT, 12, ignore_eos=True)["choices"][0]
    for fields in ({"response_format": {"type": "text"}}, {"guided_json": None, "grammar": ""},
                   {"structured_outputs": {"json_object": False, "json": None}}):
        assert cluster.complete(PROMPT, 12, ignore_eos=True, **fields)["choices"][0] == free


@pytest.mark.parametrize("form", ["openai", "vllm-regex", "guided-choice"])
def test_streams_say_the_same(cluster, calm, form):
    fields, check = FORMS[form]
    body = {**calm, "prompt": PROMPT, "temperature": 1, "seed": 8, "n": 3, **fields}
    whole = cluster.post(C, body)
    got, ends = [""] * 3, [None] * 3
    for e in cluster.stream(C, body):
        for c in e["choices"] if e != "[DONE]" else []:
            got[c["index"]] += c["text"]
            ends[c["index"]] = c["finish_reason"]
    assert [c["text"] for c in whole["choices"]] == got and ends == ["stop"] * 3
    for text in got:
        check(text)


def test_choices_and_prompts(cluster, calm):
    """Every choice of every prompt follows the grammar; each is what it is alone."""
    body = {**calm, "temperature": 1.2, "seed": 21, **FORMS["openai"][0]}
    prompts = [PROMPT, "JULIET:\n"]
    out = cluster.post(C, dict(body, prompt=prompts, n=4, echo=True))
    assert len(out["choices"]) == 8
    texts = [c["text"] for c in out["choices"]]
    for i, text in enumerate(texts):
        assert text.startswith(prompts[i // 4])
        is_person(text[len(prompts[i // 4]):])
    assert len(set(texts)) > 4
    for i, p in enumerate(prompts):
        assert p + cluster.post(C, dict(body, prompt=p))["choices"][0]["text"] == texts[4 * i]


def test_logprobs(cluster, calm):
    body = {**calm, "prompt": PROMPT, "temperature": 0, **FORMS["guided-regex"][0]}
    plain = cluster.post(C, body)["choices"][0]
    c = cluster.post(C, dict(body, logprobs=3))["choices"][0]
    lp = c["logprobs"]
    assert c["text"] == plain["text"] == "".join(t for t in lp["tokens"] if not t.startswith("<|"))
    assert all(x <= 0 for x in lp["token_logprobs"])
    # They are the model's own, which would rather say something else than digits.
    assert any(x < max(top.values()) for x, top in zip(lp["token_logprobs"], lp["top_logprobs"]))


def test_stop_strings_cut(cluster):
    body = {"prompt": PROMPT, "temperature": 1, "seed": 8, "max_tokens": 80, "guided_regex": "[a-z]{4,9}, not [a-z]{4,9}[.!]"}
    whole = cluster.post(C, body)["choices"][0]
    text = whole["text"]
    assert re.fullmatch(body["guided_regex"], text) and whole["finish_reason"] == "stop" and whole["stop_reason"] is None
    c = cluster.post(C, dict(body, stop=[", not "]))["choices"][0]
    assert c["finish_reason"] == "stop" and c["text"] == text[:text.index(", not ")]
    c = cluster.post(C, dict(body, stop=["not", "never"], include_stop_str_in_output=True))["choices"][0]
    assert c["text"] == text[:text.index("not")] + "not" and c["stop_reason"] == "not"
    # A token of the client's that ends a choice does so within the text. It is no end of the grammar's: a special token is none.
    (comma,) = cluster.post("/tokenize", {"prompt": ",", "add_special_tokens": False})["tokens"]
    c = cluster.post(C, dict(body, stop_token_ids=[comma, 2045]))["choices"][0]
    assert c["finish_reason"] == "stop" and c["stop_reason"] == comma and text.startswith(c["text"] + ", not")


@pytest.mark.parametrize("more", [
    {"repetition_penalty": 1.5}, {"presence_penalty": 2, "frequency_penalty": 2}, {"top_k": 1}, {"min_p": 0.9},
    {"top_p": 0.01}, {"temperature": 100}, {"temperature": 0}], ids=lambda m: "-".join(m))
def test_sampling_stays_within(cluster, calm, more):
    body = {"prompt": PROMPT, "temperature": 1, "seed": 3, "n": 2, **calm, **FORMS["openai"][0], **more}
    for c in cluster.post(C, body)["choices"]:
        assert c["finish_reason"] == "stop" or more == {"temperature": 100}, c
        if c["finish_reason"] == "stop":
            is_person(c["text"])


def test_bias_cannot_force_what_is_forbidden(cluster):
    ids = cluster.post("/tokenize", {"prompt": "xyz", "add_special_tokens": False})["tokens"]
    c = cluster.complete(PROMPT, 64, logit_bias={str(i): 100 for i in ids + ENDS}, guided_regex="[a-c]{8}")["choices"][0]
    assert re.fullmatch("[a-c]{8}", c["text"]) and c["finish_reason"] == "stop"


def test_max_tokens_cuts(cluster, calm):
    body = {**calm, "prompt": PROMPT, "temperature": 0, **FORMS["openai"][0]}
    whole = cluster.post(C, body)
    for n in 1, 2, 7:
        c = cluster.post(C, dict(body, max_tokens=n))["choices"][0]
        assert c["finish_reason"] == "length" and whole["choices"][0]["text"].startswith(c["text"])
    n = whole["usage"]["completion_tokens"]  # with the token that ends the text
    assert cluster.post(C, dict(body, max_tokens=n))["choices"][0]["finish_reason"] == "stop"
    assert cluster.post(C, dict(body, max_tokens=n - 1))["choices"][0]["finish_reason"] == "length"


def test_min_tokens_holds_the_end_back(cluster):
    def ask(least, **fields):
        out = cluster.complete(PROMPT, 40, min_tokens=least, logit_bias={str(i): 100 for i in ENDS}, **fields)
        return out["choices"][0], out["usage"]["completion_tokens"]
    c, n = ask(0, guided_regex="a*")
    assert (c["text"], n) == ("", 1)
    c, n = ask(9, guided_regex="a*")
    assert c["finish_reason"] == "stop" and n >= 9 and re.fullmatch("a+", c["text"])
    c, n = ask(9, guided_regex="ab?")  # ends where nothing else is allowed
    assert c["finish_reason"] == "stop" and c["text"] == "ab"


def test_a_cached_prompt(cluster, calm):
    body = {**calm, "prompt": "KING HENRY V:\nWe few, we happy few; " * 12, "temperature": 0, **FORMS["openai"][0]}
    first = cluster.post(C, body)
    wait_for(lambda: cluster.post(C, body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, 30, "the prompt is cached")
    again = cluster.post(C, body)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    is_person(again["choices"][0]["text"])


def test_sixteen_schemas_at_once(cluster, calm):
    """Beside free requests; each answer is the one that comes alone."""
    def body(i):
        schema = {"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": 3 + i},
                                                   "n": {"type": "integer", "minimum": i, "maximum": 10 * i + 9}},
                  "required": [f"k{i}", "n"], "additionalProperties": False}
        return {**calm, "prompt": PROMPT, "temperature": 0, "response_format": schema_format(schema)}, schema
    free = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = [cluster.post(C, body(i)[0])["choices"][0]["text"] for i in range(16)] + [
        cluster.post(C, free)["choices"][0]["text"]] * 4
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        got = list(pool.map(lambda b: cluster.post(C, b)["choices"][0]["text"],
                            [body(i)[0] for i in range(16)] + [free] * 4))
    for i in range(16):
        jsonschema.validate(json.loads(got[i]), body(i)[1])
    if EXACT:
        assert got == alone


def test_many_at_once_from_one_client(cluster):
    """All are read in their turn: none is refused because others are being compiled."""
    def ask(i):
        schema = {"allOf": [{"type": "string", "pattern": f"[a-f]{{{k}}}.*{i}"} for k in range(1, 8)]}
        return cluster.request("POST", C, {"prompt": PROMPT, "max_tokens": 1, "guided_json": schema})[0]
    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        assert list(pool.map(ask, range(100))) == [200] * 100


def test_a_grammar_counts_as_memory_of_its_answer(cluster):
    """Until the answer ends: it is there for a worker that takes the request over."""
    def held():
        return cluster.metrics("conductor")['baton_http_answer_bytes{of="generations"}']
    grammar = "root ::= [a-z ]+\n" + "# a remark that means nothing\n" * 12000
    wait_for(lambda: held() == 0, 30, "earlier requests have ended")
    cluster.pace(SLOW_MS)
    try:
        events = cluster.stream(C, {"prompt": PROMPT, "max_tokens": 200, "grammar": grammar})
        next(events)
        assert held() > 300000
    finally:
        cluster.pace(0)
    assert len(list(events)) > 1
    wait_for(lambda: held() == 0, 30, "it is given back")


REFUSED = [
    ({"guided_json": PERSON, "guided_regex": "a"}, "guided_regex", "'guided_json' and 'guided_regex' both"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice",
     "'response_format' and 'structured_outputs.choice' both"),
    ({"structured_outputs": {"choice": ["a"], "json_object": True}}, "structured_outputs.json_object", "both"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "'guided_regex'"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "'json_object' and 'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema' is missing"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema", "type"),
    ({"response_format": schema_format({"properties": {"a": {"type": "string", "minLength": "x"}}})},
     "response_format.json_schema.schema", "#/properties/a"),
    ({"response_format": schema_format({"type": "array", "items": {"$ref": "#/$defs/b"}})},
     "response_format.json_schema.schema", "#/items"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": 5}, "guided_json", "JSON schema"),
    ({"guided_json": {"const": 10 ** 400}}, "guided_json", "64 bits"),
    ({"guided_regex": "(a"}, "guided_regex", ""),
    ({"guided_regex": ["a"]}, "guided_regex", "string"),
    ({"guided_choice": []}, "guided_choice", "strings"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "strings"),
    ({"guided_grammar": "root ::= missing"}, "guided_grammar", "missing"),
    ({"guided_grammar": 'a ::= "b"'}, "guided_grammar", "root"),
    ({"grammar": "x" * 600000}, "grammar", "at most 524288"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean 'structured_outputs.json'"),
    ({"structured_outputs": []}, "structured_outputs", "object"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "in JSON"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "a?"}}, "structured_outputs.json", "whitespace_pattern: the pattern must"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace", "in JSON"),
    ({"guided_json": {}, "guided_whitespace_pattern": 1}, "guided_whitespace_pattern", "a string"),
]


@pytest.mark.parametrize("body,param,says", REFUSED, ids=[f"{i}-{list(r[0])[0]}" for i, r in enumerate(REFUSED)])
def test_refused(cluster, body, param, says):
    e = cluster.post(C, dict({"prompt": PROMPT}, **body), expect=400)["error"]
    assert e["param"] == param and says in e["message"], e


def cpu_s(cluster):
    """CPU time that all daemons have used: what neighbours on the machine do does not count."""
    ticks = 0
    for d in cluster.status():
        with open(f"/proc/{d['pid']}/stat") as f:
            ticks += sum(map(int, f.read().rsplit(")", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def test_hostile_grammars(cluster):
    """Each ends in an answer or in a 400 and costs little, and others are served meanwhile."""
    deep = {"type": "integer"}
    for _ in range(900):
        deep = {"items": deep}
    wide = {"anyOf": [{"properties": {f"p{i}": {"type": "string", "pattern": f"^(a|b{i}){{1,50}}$"}}} for i in range(3000)]}
    rules = range(50)  # each letter leaves two threads for each rule and length so far
    nested = "root ::= " + " | ".join(f"r{i}" for i in rules) + "".join(
        f'\nr{i} ::= [a-z] r{i}? "{i}" | [a-z] r{i}' for i in rules)
    hub = "root ::= hub\nhub ::= " + " | ".join(f"r{i}" for i in range(1500)) + "".join(
        f'\nr{i} ::= [a-z] hub | "{i}"' for i in range(1500))
    hostile = [
        {"grammar": nested}, {"grammar": hub}, {"guided_json": deep}, {"guided_json": wide}, {"guided_json": {"$ref": "#"}},
        {"guided_json": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}},
        {"guided_json": {"minLength": 10 ** 9, "type": "string"}},
        {"guided_regex": "(((((a{1,1000}){1,1000}){1,1000}){1,1000})b?){7}"}, {"guided_regex": "(a*)*(a*)*(a*)*$" * 500},
        {"guided_regex": "(?=" * 5000}, {"guided_regex": "[" + "a-z" * 100000 + "]"},
        {"guided_grammar": "root ::= " + "(" * 20000}, {"guided_grammar": "root ::= root root | "},
        {"guided_grammar": 'root ::= (root "a")* '}, {"guided_choice": ["a" * i for i in range(1, 900)]},
    ]
    c = cluster
    for fields in hostile:
        before = cpu_s(c)
        status, _, data = c.request("POST", C, {"prompt": PROMPT, "max_tokens": 4, **fields})
        assert status in (200, 400), (status, data[:300])
        took = cpu_s(c) - before  # 0.1 s of compiling, three times
        assert took < 3 * PATIENCE, (list(fields), took)
        assert len(data) < 4096
    assert c.complete(PROMPT, 4)["usage"]["completion_tokens"] == 4


@pytest.mark.skipif(not EXACT, reason="without AVX512 near ties may fall the other way")
@pytest.mark.parametrize("more", [{}, {"n": 3, "logprobs": 2}, {"speculation": "off"}])
def test_rows_that_sit_out_draw_the_same(cluster, more):
    """The first answer meets masks that need more than a step gives, the second finds them made."""
    tag = len(json.dumps(more))  # a grammar of this case's own
    body = {"prompt": PROMPT, "max_tokens": 120, "temperature": 1.0, "seed": 4, **more,
            "guided_regex": f"[a-z ]{{0,{tag}}}[a-z .]*[aeiou][a-z .]{{60}}x[a-z .]*"}
    before = late_rows(cluster)
    first = cluster.post(C, body)["choices"]
    assert late_rows(cluster) > before
    assert cluster.post(C, body)["choices"] == first


def test_metrics(cluster, calm):
    def of(kind, name):
        return sum(v for k, v in cluster.metrics(kind).items() if k.split("{")[0] == name)
    wait_for(lambda: cluster.metrics("conductor")["baton_http_generations_open"] == 0, 30, "earlier requests have ended")
    before = of("decode", "baton_worker_mask_seconds_count"), of("conductor", "baton_http_constrained_total")
    out = cluster.post(C, {**calm, "prompt": PROMPT, "temperature": 0, **FORMS["openai"][0]})
    n = out["usage"]["completion_tokens"]
    after = of("decode", "baton_worker_mask_seconds_count"), of("conductor", "baton_http_constrained_total")
    # The first token's was made by the prefill worker; a step with accepted drafts gives several.
    assert 0 < after[0] - before[0] <= n - 1 and after[1] - before[1] == 1
    assert of("decode", "baton_worker_grammars_failed_total") == 0


# ---- killed workers ----

@pytest.fixture(scope="module")
def setting():
    """Prefill on n1, decode on n2 and n3."""
    r = Restarts("--nodes", "3", "--prefill", "1", "--decode", "2")
    yield r
    r.stop()


def test_a_killed_decode_worker_changes_no_token(setting):
    """In the middle of constrained streams: the next one makes the same masks from the tokens alone."""
    at = setting.c.host, setting.c.port
    long = {"type": "array", "items": PERSON, "minItems": 12, "maxItems": 12}
    base = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "logprobs": 0, "stream_options": {"include_usage": True},
            "guided_json": long}
    bodies = [dict(base, guided_regex="([a-z]{2,9}[ ,] ?){80}", guided_json=None), base,
              dict(base, temperature=0.9, seed=4), dict(base, temperature=0.8, seed=5, n=2),
              dict(base, repetition_penalty=1.2, logit_bias={"100": 5})]
    want = run_streams(at, bodies)
    got = run_streams(at, bodies, lambda: setting.kill_busiest("decode"), slow=setting.c)
    same(got, want)
    assert re.fullmatch("([a-z]{2,9}[ ,] ?){80}", got[0].text[0])
    for s in got[1:]:
        for i, text in s.text.items():
            if s.reason[i] == "stop":
                jsonschema.validate(json.loads(text), long)


# ---- workers without a conductor ----

@pytest.fixture(scope="module")
def node():
    """The null engine's tokens stand for the whole history, on any machine."""
    n = Node("null", decode={"engine.pages": 40})
    yield n
    codes = n.stop()
    assert codes["prefill"] == 0 and codes["decode"] == 0, codes


@contextlib.contextmanager
def slow(node):
    """Steps take long meanwhile, so that requests meet."""
    node.pace(SLOW_MS)
    try:
        yield
    finally:
        node.pace(0)


@pytest.fixture
def c(node):
    con = Conductor(node)
    yield con
    try:
        con.idle()
    finally:
        con.close()


REGEX = 3


def constrained(c, worker, r, ids, phases, max_new, regex, epoch=1, n_prompt=None, n=0, stop=ENDS, kind=REGEX, speculation=0, thoughts=None,
                **more):
    s = dict(temperature=0.7, top_p=1, repetition_penalty=1, seed=9, logprobs=-1, max_new=max_new, stop_ids=stop)
    s.update(more)
    worker.send(submit=c.pb.Submit(request=r, epoch=epoch, phases=phases, tokens=pack(ids),
                                   n_prompt=n_prompt or len(ids), sampling=c.pb.Sampling(**s), n=n, speculation=speculation,
                                   root_key=c.node.settings.root_key, grammar_kind=kind, grammar=regex.encode(),
                                   thoughts=thoughts))


def both(c, worker, ids, max_new, regex, **more):
    r = rid()
    c.reserve(r, ids, wait=False)
    constrained(c, worker, r, ids, c.pb.BOTH, max_new, regex, **more)
    if more.get("n"):
        return c.choices(r, more["n"], 0, [worker])
    return c.result(r, max_new, [worker])


def apart(c, ids, max_new, regex, **more):
    r = rid()
    c.reserve(r, ids, wait=False)
    constrained(c, c.d, r, ids, c.pb.DECODE, max_new, regex, **more)
    constrained(c, c.p, r, ids, c.pb.PREFILL, max_new, regex, **more)
    if more.get("n"):
        return c.choices(r, more["n"], 0, [c.p, c.d])
    return c.result(r, max_new, [c.p, c.d])


WORDS = "([a-z]{3,8} ){20,30}"


def test_two_workers_say_what_one_says(c):
    ids = prompt(50, 3)
    one = both(c, c.d, ids, 200, WORDS)
    assert len(one) > 20 and one[-1] in ENDS
    assert apart(c, ids, 200, WORDS) == one
    assert both(c, c.p, ids, 200, WORDS) == one
    free = both(c, c.d, ids, 40, "", kind=0)
    assert free[:5] != one[:5]
    many = both(c, c.d, ids, 200, WORDS, n=5)
    assert apart(c, ids, 200, WORDS, n=5) == many
    assert many[0] == one and len({tuple(m) for m in many}) == 5


def test_drafts_change_no_token():
    """A list repeats itself, so that drafts are accepted: the masks behind them are those of single steps."""
    n = Node("cpu")
    try:
        if not n.exact:
            pytest.skip("on this processor rows depend on their neighbours' number")
        c = Conductor(n)
        schema = json.dumps({"type": "array", "minItems": 8, "maxItems": 12, "items": {
            "type": "object", "properties": {"kind": {"enum": ["king", "queen"]}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["kind", "n"], "additionalProperties": False}})
        for seed in 1, 2, 3:
            free = both(c, c.d, prompt(40, seed), 400, schema, kind=1, seed=seed, speculation=1)
            for speculation in 2, 3:
                assert both(c, c.d, prompt(40, seed), 400, schema, kind=1, seed=seed, speculation=speculation) == free
            assert apart(c, prompt(40, seed), 400, schema, kind=1, seed=seed, speculation=2) == free
        # Text that a grammar forces needs fewer steps than tokens, though nothing like it came before.
        g = GOLDEN[0]
        steps = []
        for speculation in 1, 2:
            before = n.metric("decode", "baton_worker_steps_total")
            steps.append((both(c, c.d, g["prompt_ids"], 100, json.dumps([g["greedy_text"]]), kind=4, temperature=0,
                               speculation=speculation),
                          n.metric("decode", "baton_worker_steps_total") - before))
        assert steps[0][0] == steps[1][0] and steps[0][0][:40] == g["greedy_ids"][:40]
        assert steps[1][1] < steps[0][1] / 2, steps
        assert n.metric("decode", "vllm:spec_decode_num_accepted_tokens_total") > 20
        assert n.metric("decode", "vllm:spec_decode_num_draft_tokens_total") > n.metric(
            "decode", "vllm:spec_decode_num_accepted_tokens_total")
        c.idle()
        c.close()
    finally:
        n.stop()


def test_a_later_epoch_goes_on(c):
    """Its tokens behind the prompt are those of the answer so far."""
    ids = prompt(50, 4)
    whole = both(c, c.d, ids, 200, WORDS)
    for cut in 1, 7, len(whole) - 1:
        r = rid()
        more = ids + whole[:cut]
        c.reserve(r, more, wait=False)
        constrained(c, c.d, r, more, c.pb.BOTH, 200 - cut, WORDS, n_prompt=len(ids))
        assert c.result(r, 200, [c.d]) == whole[cut:]


def test_preempted_rows_go_on(c, node):
    jobs = [prompt(30 + i, 50 + i) for i in range(8)]
    regex = "([a-z]{3,8} ){90,120}"
    alone = [both(c, c.p, ids, 300, regex) for ids in jobs]
    assert max(map(len, alone)) > 100
    before = node.metric("decode", "vllm:num_preemptions_total")
    sent = [(rid(), ids) for ids in jobs]
    with slow(node):
        for r, ids in sent:
            c.reserve(r, ids, wait=False)
            constrained(c, c.d, r, ids, c.pb.BOTH, 300, regex)
        for r, _ in sent:
            c.d.wait(lambda r=r: c.d.tokens(r), "all have begun")
    assert [c.result(r, 300, [c.d]) for r, _ in sent] == alone
    assert node.metric("decode", "vllm:num_preemptions_total") > before


def refused(c, ids, regex, **more):
    r = rid()
    c.reserve(r, ids, wait=False)
    constrained(c, c.d, r, ids, c.pb.BOTH, 20, regex, **more)
    e = c.d.ended(r)
    c.release(r)
    return e


END = [201, 13, 201]  # of a reasoning: tokens that the model would hardly draw in a row


def budget_of(c, n, **more):
    args = dict(budget=n, begun=True, ends=[c.pb.Marker(text="</think>")], force=END)
    return c.pb.Thoughts(**dict(args, **more))


def test_a_budget_follows_from_the_tokens(c):
    """The end of the reasoning is forced at its place: by two workers, after an epoch that ended anywhere, for each choice,
    with drafts, and at the first token, which the prefill worker draws."""
    ids = prompt(50, 3)
    for budget in (0, 1, 20):
        one = both(c, c.d, ids, 40, "", kind=0, thoughts=budget_of(c, budget))
        assert one[budget:budget + 3] == END and len(one) == 40
        assert apart(c, ids, 40, "", kind=0, thoughts=budget_of(c, budget)) == one
        assert both(c, c.d, ids, 40, "", kind=0, speculation=2, thoughts=budget_of(c, budget)) == one
        many = both(c, c.d, ids, 40, "", kind=0, n=3, thoughts=budget_of(c, budget))
        assert many[0] == one and all(m[budget:budget + 3] == END for m in many)
        assert apart(c, ids, 40, "", kind=0, n=3, thoughts=budget_of(c, budget)) == many
        for at in (budget, budget + 1, budget + 2, budget + 3):
            if at > 0:
                for run in (both, lambda c, w, *a, **k: apart(c, *a, **k)):
                    got = run(c, c.d, ids + one[:at], 40 - at, "", kind=0, n_prompt=len(ids), thoughts=budget_of(c, budget))
                    assert one[:at] + got == one, (budget, at)
    free = both(c, c.d, ids, 40, "", kind=0)
    assert both(c, c.d, ids, 40, "", kind=0, thoughts=budget_of(c, 100)) == free
    later = budget_of(c, 1, begun=False, open=c.pb.Marker(text="<think>"))  # the answer begins with other text
    assert both(c, c.d, ids, 40, "", kind=0, thoughts=later) == free
    for bad in (dict(force=[]), dict(force=[2048]), dict(force=[1] * 33), dict(ends=[]), dict(begun=False),
                dict(ends=[c.pb.Marker(text="")]), dict(ends=[c.pb.Marker(text="x" * 49)]),
                dict(ends=[c.pb.Marker(text="x")] * 5), dict(ends=[c.pb.Marker(text="x", is_token=True, id=2048)])):
        e = refused(c, ids, "", kind=0, thoughts=budget_of(c, 5, **bad))
        assert e.status == INVALID and "thoughts" in e.detail, (bad, e)


def test_hostile_conductors(c, node):
    """A worker answers what it cannot follow, and goes on."""
    ids = prompt(40, 6)
    wanted = both(c, c.d, ids, 60, WORDS)
    for regex, more, status, says in [
            ("a", {"kind": 77}, INVALID, "grammar_kind 77"), ("(a", {}, INVALID, ""), ("a" * 600000, {}, INVALID, "at most"),
            ("a", {"stop": []}, INVALID, "end-of-text token"),
            ("a", {"stop": [5]}, INVALID, "end-of-text token"), ("\xff\0(", {}, INVALID, ""), ("{", {"kind": 1}, INVALID, ""),
            ("[1", {"kind": 4}, INVALID, ""), ("x", {"kind": 5}, INVALID, ""), ("x", {"kind": 6}, INVALID, "")]:
        e = refused(c, ids, regex, **more)
        assert e.status == status and says in e.detail, (regex[:20], more, e)
    # The tokens behind the prompt do not follow the grammar: an engine row that ends in an error, beside rows that go on.
    long = "([a-z]{3,8} ){40,60}"
    alone = both(c, c.p, ids, 400, long)
    r = rid()
    c.reserve(r, ids, wait=False)
    with slow(node):
        constrained(c, c.d, r, ids, c.pb.BOTH, 400, long)
        c.d.wait(lambda: c.d.tokens(r), "a first token")
        for _ in range(4):
            e = refused(c, ids + wanted[:3] + [ids[0]] * 2, "[0-9]+", n_prompt=len(ids))
            assert e.status == INVALID and "do not follow the grammar" in e.detail, e
        assert not c.d.find("ended", r)
    assert c.result(r, 400, [c.d]) == alone
    assert both(c, c.d, ids, 60, WORDS) == wanted


def odd_submit(rng, pb, ids):
    """Fields that constrain an answer, each with odd values; some are right."""
    texts = [b"", b"[a-z]+", b"(a|b)*c", b"{", b'{"type":"object"}', b'["a","b"]', b'root ::= "a" root | "b"', b'root ::= root "x"', b"\0" * 9,
             b"\xff\xfe(", b'{"tags":[{"begin":"<","schema":{},"end":">"}]}', b'{"tags":' + b"[" * 3000, b"(" * 70000, b"a{1,999999}" * 40,
             b'{"$ref":"#"}', b'{"allOf":[{"$ref":"#"}]}']
    number = lambda *usual: rng.choice([*usual, 0, 1, rng.randrange(2 ** 31), 2 ** 31 - 1])  # noqa: E731
    text = bytearray(rng.choice(texts))
    for _ in range(rng.choice([0, 0, 1, 3])):
        at = rng.randrange(len(text) + 1)
        text[at:at] = bytes([rng.randrange(256)])
    marker = lambda: pb.Marker(is_token=rng.random() < 0.5, id=number(5), text=rng.choice(["", "<t>", "x" * 47, "x" * 48, "é" * 100]))  # noqa: E731
    thoughts = pb.Thoughts(budget=number(7), begun=rng.random() < 0.5, open=rng.choice([None, marker()]),
                           ends=[marker() for _ in range(rng.choice([0, 1, 2, 4, 5, 60]))],
                           force=[number(9, 20) for _ in range(rng.choice([0, 1, 2, 32, 33, 1000]))])
    return dict(n_prompt=number(len(ids), 3), n=rng.choice([0, 1, 2, 16, 17, number()]), choice=number(),
                speculation=number(2, 3, 4, 5), grammar_kind=number(*range(8)), grammar=bytes(text), thoughts=rng.choice([None, thoughts]),
                sampling=dict(temperature=1, top_p=1, repetition_penalty=1, seed=number(), logprobs=rng.choice([-1, 0, 20, 21]),
                              max_new=number(5, 30), min_new=number(3), stop_ids=rng.choice([ENDS, ENDS, [], [number()], ENDS * 8])))


def test_odd_constraints(c, node):
    """Whatever a conductor asks for, a worker answers it, keeps nothing of it and goes on."""
    rng = random.Random(int(os.environ.get("BATON_TEST_SEED", "5")))
    ids = prompt(40, 8)
    wanted = both(c, c.d, ids, 60, WORDS)
    seen = {}
    for _ in range(int(os.environ.get("BATON_TEST_SUBMITS", "150"))):
        r, worker = rid(), rng.choice([c.p, c.d])
        fields = odd_submit(rng, c.pb, ids)
        c.reserve(r, ids, wait=False)
        worker.send(submit=c.pb.Submit(request=r, epoch=1, phases=c.pb.BOTH, tokens=pack(ids), root_key=node.settings.root_key,
                                       **dict(fields, sampling=c.pb.Sampling(**fields["sampling"]))))
        if rng.random() < 0.3:
            worker.send(cancel=c.pb.Cancel(request=r, epoch=1))
        e = worker.ended(r)
        seen[e.status] = seen.get(e.status, 0) + 1
        assert e.status == 0 or e.detail, (fields, e)
        c.release(r)
    print(seen)
    assert seen[0] > 2 and seen[INVALID] > 20
    assert both(c, c.p, ids, 60, WORDS) == wanted == both(c, c.d, ids, 60, WORDS)


def test_requests_that_end_while_they_are_compiled(c):
    """Cancelled at once, or with their session: nothing stays, and others go on."""
    ids = prompt(40, 7)
    gone = [rid() for _ in range(20)]
    for i, r in enumerate(gone):
        c.reserve(r, ids, wait=False)
        constrained(c, c.d, r, ids, c.pb.BOTH, 300, f"([a-z]{{1,{20 + i}}} ){{100}}")
        c.d.send(cancel=c.pb.Cancel(request=r, epoch=1))
    wanted = both(c, c.d, ids, 60, WORDS)
    for r in gone:
        assert c.d.ended(r).status == 0
        c.release(r)
    assert both(c, c.p, ids, 60, WORDS) == wanted

"""Tools and reasoning on running clusters, with a model directory whose chat template has them: calls are forced, because
the small models do not choose any. The openai package of npm is used unchanged."""
import json
import os
import shutil

import jsonschema
import pytest

from conftest import ROOT, Cluster, wait_for
from restarts import Restarts
from test_openai_client import client, run  # noqa: F401 (a fixture)

CHAT = "/v1/chat/completions"
# The constructs of the templates of Hermes and Qwen 3.
TEMPLATE = """{%- if tools %}{{- 'system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'call: <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
{%- else %}{{- message.role + '\\n' }}{%- if message.content %}{{- message.content + '\\n' }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>\\n' }}{%- endfor %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant\\n' }}{{- '<think>\\n' if thinking else '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
"""
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
           "required": ["city", "days"], "additionalProperties": False}
FLAGS = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER, "strict": True}},
         {"type": "function", "function": {"name": "flags", "parameters": FLAGS}}]
SCHEMAS = {"weather": WEATHER, "flags": FLAGS}
BLANKS = {str(i): -30 for i in (197, 198, 201, 220, 272)}  # JSON may have any number between its tokens, and this model likes them
BASE = {"messages": [{"role": "user", "content": "Speak."}], "tools": TOOLS, "temperature": 0.9, "max_tokens": 300,
        "logit_bias": BLANKS}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tools-6m"
    shutil.copytree(os.path.join(ROOT, "deploy/models/shakespeare-llama-6m"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture(scope="module")
def tools(model):
    c = Cluster("--model", model)
    yield c
    c.stop()


def check(calls):
    assert len(calls) > 0
    for c in calls:
        assert c["type"] == "function" and c["id"].startswith("call_")
        jsonschema.validate(json.loads(c["function"]["arguments"]), SCHEMAS[c["function"]["name"]])
    assert len({c["id"] for c in calls}) == len(calls)


def gather(events):
    """The messages of a stream by choice, put together as clients do; finish reasons."""
    out, finish = {}, {}
    for e in events:
        for c in e["choices"] if e != "[DONE]" else []:
            m = out.setdefault(c["index"], {"content": "", "reasoning": "", "calls": []})
            d = c["delta"]
            m["content"] += d.get("content") or ""
            m["reasoning"] += d.get("reasoning") or ""
            assert d.get("reasoning") == d.get("reasoning_content")
            for t in d.get("tool_calls", []):
                if t["index"] == len(m["calls"]):
                    m["calls"].append({"id": t["id"], "type": t["type"], "function": {"name": t["function"]["name"], "arguments": ""}})
                m["calls"][t["index"]]["function"]["arguments"] += t["function"]["arguments"]
            finish[c["index"]] = c["finish_reason"] or finish.get(c["index"])
    return out, finish


def names_and_arguments(calls):
    return [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


@pytest.mark.parametrize("more", [{"tool_choice": "required", "parallel_tool_calls": False},
                                  {"tool_choice": "required", "n": 3},
                                  {"tool_choice": {"type": "function", "function": {"name": "flags"}}}])
def test_forced_calls(tools, more):
    for seed in range(3):
        body = dict(BASE, seed=seed, logprobs=True, **more)
        whole = tools.post(CHAT, body)
        streamed, finish = gather(tools.stream(CHAT, body))
        assert len(whole["choices"]) == len(streamed) == more.get("n", 1)
        for c in whole["choices"]:
            m, s = c["message"], streamed[c["index"]]
            assert c["finish_reason"] == finish[c["index"]]
            assert names_and_arguments(m["tool_calls"]) == names_and_arguments(s["calls"])
            assert len(c["logprobs"]["content"]) > 5
            if c["finish_reason"] == "tool_calls":
                check(m["tool_calls"])
                check(s["calls"])
                assert m["content"] is None and s["content"] == ""
            if more.get("parallel_tool_calls") is False or "n" not in more:
                assert c["finish_reason"] == "tool_calls" and len(m["tool_calls"]) == 1
            if isinstance(more["tool_choice"], dict):
                assert m["tool_calls"][0]["function"]["name"] == "flags"


def test_free_answers(tools):
    """With auto the model may write anything; none and a model's text without calls are content."""
    for choice in ("auto", "none"):
        out = tools.post(CHAT, dict(BASE, tool_choice=choice, max_tokens=20, seed=1))["choices"][0]
        assert out["message"]["content"] and "tool_calls" not in out["message"]
        assert out["finish_reason"] in ("stop", "length")
    more = tools.post("/tokenize", dict(messages=BASE["messages"], tools=TOOLS))["count"]
    assert more > tools.post("/tokenize", dict(messages=BASE["messages"], tools=TOOLS, tool_choice="none"))["count"]


def test_the_next_turn(tools):
    """Calls and their results go back into the prompt; the ids are ours or a client's."""
    first = tools.post(CHAT, dict(BASE, tool_choice="required", parallel_tool_calls=False, seed=2))["choices"][0]["message"]
    call = first["tool_calls"][0]
    messages = BASE["messages"] + [first, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    ids = tools.post("/tokenize", dict(messages=messages, tools=TOOLS))["tokens"]
    text = tools.post("/detokenize", {"tokens": ids})["prompt"]
    assert f'"name": "{call["function"]["name"]}", "arguments": {json.dumps(json.loads(call["function"]["arguments"]))}' in text
    assert "<tool_response>\nsunny\n" in text
    again = tools.post(CHAT, dict(BASE, messages=messages, tool_choice="required", parallel_tool_calls=False))
    check(again["choices"][0]["message"]["tool_calls"])


def test_reasoning_comes_first(tools):
    """A call, and a structured answer, behind the reasoning that the prompt has begun."""
    think = {"chat_template_kwargs": {"thinking": True}, "max_tokens": 60, "seed": 3}
    out = tools.post(CHAT, dict(BASE, tool_choice="required", **think))
    m = out["choices"][0]["message"]
    assert m["reasoning"] == m["reasoning_content"] != ""
    assert m["content"] is None and out["choices"][0]["finish_reason"] == "length"  # the model never ends to think
    assert out["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60
    streamed, _ = gather(tools.stream(CHAT, dict(BASE, tool_choice="required", **think)))
    assert streamed[0]["reasoning"] == m["reasoning"] and streamed[0]["calls"] == []
    # with a bias it ends at once, and the grammar begins
    ids = tools.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False})["tokens"]
    bias = dict(BLANKS, **{str(i): 60 for i in set(ids)})
    body = dict(BASE, tool_choice="required", parallel_tool_calls=False, logit_bias=bias, temperature=0,
                chat_template_kwargs={"thinking": True}, max_tokens=400)
    out = tools.post(CHAT, body)["choices"][0]
    if out["finish_reason"] == "tool_calls":
        check(out["message"]["tool_calls"])


BUDGETS = [{"thinking": {"type": "enabled", "budget_tokens": 12}}, {"enable_thinking": True, "thinking_token_budget": 12},
           {"chat_template_kwargs": {"thinking": True, "thinking_budget": 12}}, {"reasoning": {"enabled": True, "max_tokens": 12}}]


@pytest.mark.parametrize("more", [{}, {"tool_choice": "required", "parallel_tool_calls": False}, {"n": 3},
                                  {"speculation": "suffix"}, {"speculation": "off", "logprobs": True}])
def test_a_budget_of_reasoning(tools, more):
    """Behind 12 tokens the end of the reasoning is forced, whatever field says so, and the answer or the call follows."""
    body = dict(BASE, seed=3, max_tokens=300 if "tool_choice" in more else 50, **more)
    end = tools.post("/tokenize", {"prompt": "\n</think>\n\n", "add_special_tokens": False})["count"]
    first = None
    for budget in BUDGETS:
        out = tools.post(CHAT, dict(body, **budget))
        for c in out["choices"]:
            m = c["message"]
            assert m["reasoning"] and "</think>" not in m["reasoning"] + (m["content"] or "")
            if "tool_choice" in more:
                check(m["tool_calls"])
            else:
                assert m["content"] and c["finish_reason"] in ("length", "stop")
        n = more.get("n", 1)
        assert 12 * n < out["usage"]["completion_tokens_details"]["reasoning_tokens"] <= (12 + end) * n
        answers = [(c["message"]["reasoning"], c["message"]["content"]) for c in out["choices"]]
        first = first or answers
        assert answers == first
    streamed, _ = gather(tools.stream(CHAT, dict(body, **BUDGETS[0])))
    assert [(streamed[i]["reasoning"], streamed[i]["content"] or None) for i in range(n)] == first
    free = tools.post(CHAT, dict(body, chat_template_kwargs={"thinking": True}))["choices"][0]["message"]
    assert free["reasoning"].startswith(first[0][0][:20]) and len(free["reasoning"]) > len(first[0][0])


def test_a_budget_of_messages(tools):
    """Anthropic's form, whole and streamed: a thinking block, then text."""
    body = {"max_tokens": 40, "messages": [{"role": "user", "content": "Speak."}], "temperature": 0,
            "thinking": {"type": "enabled", "budget_tokens": 10}}
    blocks = tools.post("/v1/messages", body)["content"]
    assert [b["type"] for b in blocks] == ["thinking", "text"] and blocks[0]["thinking"] and blocks[1]["text"]
    texts = {"thinking_delta": "", "text_delta": ""}
    status, _, data = tools.request("POST", "/v1/messages", dict(body, stream=True))
    assert status == 200
    for e in (json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")):
        if e["type"] == "content_block_delta" and e["delta"]["type"] in texts:
            texts[e["delta"]["type"]] += e["delta"].get("thinking") or e["delta"].get("text") or ""
    assert texts == {"thinking_delta": blocks[0]["thinking"], "text_delta": blocks[1]["text"]}
    out = tools.post("/v1/responses", {"input": "Speak.", "max_output_tokens": 40, "temperature": 0,
                                       "reasoning": {"enabled": True, "max_tokens": 10}})
    assert [o["type"] for o in out["output"]] == ["reasoning", "message"]
    assert out["output"][0]["content"][0]["text"] == blocks[0]["thinking"]


def test_markers_that_are_tokens(model, tmp_path):
    """A vocabulary with a token for the end of the reasoning: it ends there, and the text that spells it is reasoning. One
    more token has most of that text, so that drawing the rest behind it takes few draws."""
    folder = tmp_path / "marked"
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for t in tokenizer["added_tokens"]:
        t["content"] = {2045: "<think>", 2046: "</think>", 2047: "</think"}.get(t["id"], t["content"])
        t["special"] = t["special"] and t["id"] != 2047
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    c = Cluster("--model", str(folder))
    try:
        assert c.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False})["tokens"] == [2046]
        bracket = c.post("/tokenize", {"prompt": ">", "add_special_tokens": False})["tokens"]
        body = dict(BASE, enable_thinking=True, thinking_token_budget=8, max_tokens=30, temperature=0, tool_choice="none")
        for stream in False, True:
            if stream:
                m = gather(c.stream(CHAT, body))[0][0]
            else:
                out = c.post(CHAT, dict(body, logprobs=True))["choices"][0]
                m = out["message"]
                assert sum(t["token"] == "</think>" for t in out["logprobs"]["content"]) == 1
            assert m["reasoning"] and m["content"] and "think>" not in m["reasoning"] + m["content"]
        # Nothing but the parts of the marker's text is drawn: they are no marker.
        only = {str(i): 100 for i in [2047] + bracket}
        out = c.post(CHAT, dict(body, logit_bias=only, thinking_token_budget=None, temperature=9, max_tokens=100, ignore_eos=True,
                                n=2, seed=1))
        messages = [x["message"] for x in out["choices"]]
        assert not any(m["content"] for m in messages)
        assert any("</think>" in m["reasoning"] for m in messages)
    finally:
        c.stop()


ELEMENTS = {
    "qwen": "{%- if tools %}{{- tools | tojson }}{{- '<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}{%- endif %}",
    "glm": "{%- if tools %}{{- tools | tojson }}{{- '<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>' }}{%- endif %}",
}


@pytest.mark.parametrize("form", sorted(ELEMENTS))
def test_calls_as_elements(model, tmp_path, form):
    """Models that write arguments as elements: forced calls follow their schemas, whole and streamed."""
    folder = tmp_path / form
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(
        ELEMENTS[form] + "{%- for m in messages %}{{- m.role + '\\n' + (m.content or '') + '\\n' }}{%- endfor %}{{- 'assistant\\n' }}")
    order = {"type": "object", "properties": {"size": {"enum": ["small", "large"]},
                                              "count": {"type": "integer", "minimum": 1, "maximum": 99},
                                              "gift": {"type": "boolean"}},
             "required": ["size", "count", "gift"], "additionalProperties": False}
    c = Cluster("--model", str(folder), "--nodes", "1", "--prefill", "0", "--decode", "1")
    try:
        complete = 0
        for seed in range(5):
            body = dict(BASE, seed=seed, tools=[{"type": "function", "function": {"name": "order", "parameters": order}}],
                        tool_choice="required", parallel_tool_calls=False)
            out = c.post(CHAT, body)["choices"][0]
            call = out["message"]["tool_calls"][0]["function"]
            streamed, finish = gather(c.stream(CHAT, body))
            assert names_and_arguments(streamed[0]["calls"]) == [("order", call["arguments"])]
            assert out["finish_reason"] == finish[0]
            if finish[0] == "tool_calls":  # this model also writes numbers with hundreds of zeros
                jsonschema.validate(json.loads(call["arguments"]), order)
                complete += 1
        assert complete > 1
    finally:
        c.stop()


@pytest.fixture(scope="module")
def setting(model):
    r = Restarts("--nodes", "3", "--prefill", "1", "--decode", "2", "--model", model)
    yield r
    r.stop()


def test_a_killed_worker_changes_no_budget(setting):
    """Before the end of the reasoning, and about where it is forced: the next worker goes on from the tokens."""
    body = dict(BASE, max_tokens=200, temperature=0.7, seed=11, tool_choice="none", ignore_eos=True,
                thinking={"type": "enabled", "budget_tokens": 60})
    want, ended = gather(setting.c.stream(CHAT, body))
    assert want[0]["reasoning"] and want[0]["content"]
    for at in (20, 58):
        before = setting.total("baton_requests_replanned_total")
        got, finish = gather(setting.with_a_kill(CHAT, body, at))
        assert got == want and finish == ended
        assert setting.total("baton_requests_replanned_total") > before
        setting.start_again(setting.killed)


def test_a_killed_worker_changes_no_call(setting):
    """In the middle of a streamed call: the conductor's parser and the next worker's grammar go on from the tokens."""
    numbers = {"type": "object", "properties": {"v": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99999},
                                                      "minItems": 60, "maxItems": 60}}, "required": ["v"]}
    body = dict(BASE, tools=[{"type": "function", "function": {"name": "f", "parameters": numbers}}], tool_choice="required",
                parallel_tool_calls=False, max_tokens=1500, temperature=0.7, seed=11)
    want, ended = gather(setting.c.stream(CHAT, body))
    before = setting.total("baton_requests_replanned_total")
    got, finish = gather(setting.with_a_kill(CHAT, body, 40))
    assert names_and_arguments(got[0]["calls"]) == names_and_arguments(want[0]["calls"])
    assert finish == ended and len(got[0]["calls"][0]["function"]["arguments"]) > 300
    assert setting.total("baton_requests_replanned_total") > before


@pytest.mark.parametrize("scenario", ["tools", "tools_stream", "tools_run"])
def test_openai_package(tools, client, scenario):  # noqa: F811
    run(client, tools.url, tools.model, scenario)
    wait_for(lambda: tools.metrics("conductor")["baton_http_generations_open"] == 0, 30, "nothing is generated for nobody")

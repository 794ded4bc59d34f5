"""The table of bad inputs of the HTTP API against a running cluster: the right status, an OpenAI
error object, and a cluster that goes on."""
import json

import pytest

J = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "a"}]
C, CHAT = "/v1/completions", "/v1/chat/completions"

RAW = [  # name, path, body bytes, headers, status
    ("empty body", C, b"", J, 400),
    ("truncated", C, b'{"prompt": "a"', J, 400),
    ("nesting 10^4", C, b'{"prompt":' + b"[" * 10000, J, 400),
    ("closed nesting 10^4", C, b'{"x":' + b"[" * 10000 + b"]" * 10000 + b"}", J, 400),
    ("many containers", C, b'{"x":[' + b"{}," * 100000 + b"1]}", J, 400),
    ("duplicate keys", C, b'{"prompt":"a","prompt":"b"}', J, 400),
    ("invalid UTF-8", C, b'{"prompt":"\xff\xfe"}', J, 400),
    ("overlong UTF-8", C, b'{"prompt":"\xc0\xaf"}', J, 400),
    ("lone surrogate", C, b'{"prompt":"\\ud800"}', J, 400),
    ("NaN", C, b'{"prompt":"a","temperature":NaN}', J, 400),
    ("1e999", C, b'{"prompt":"a","temperature":1e999}', J, 400),
    ("not an object", C, b'["prompt"]', J, 400),
    ("trailing garbage", C, b'{"prompt":"a"}}', J, 400),
    ("text/plain", C, b'{"prompt":"a"}', {"Content-Type": "text/plain"}, 415),
    ("form", C, b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ("unknown route", "/v1/complete", b"{}", J, 404),
    ("5 MiB", C, b'{"prompt":"' + b"a" * (5 << 20) + b'"}', J, 413),
]


@pytest.mark.parametrize("name,path,body,headers,status", RAW, ids=[r[0] for r in RAW])
def test_raw_bodies(cluster, name, path, body, headers, status):
    got, h, data = cluster.request("POST", path, body, headers)
    assert got == status, data
    e = json.loads(data)["error"]
    assert e["type"] == "invalid_request_error" and 0 < len(e["message"]) <= 512
    assert set(e) == {"message", "type", "param", "code"}


FIELDS = [  # path, what is added to a good body, status, param
    (C, {"model": "gpt-4"}, 404, "model"), (CHAT, {"model": "gpt-4"}, 404, "model"),
    (C, {"model": 5}, 400, "model"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "messages"),
    (C, {"max_tokens": 0}, 400, "max_tokens"), (C, {"max_tokens": -1}, 400, "max_tokens"),
    (C, {"max_tokens": 2 ** 32}, 400, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (C, {"n": 0}, 400, "n"), (C, {"n": 10 ** 9}, 400, "n"), (C, {"n": 17}, 400, "n"),
    (CHAT, {"n": 0}, 400, "n"), (C, {"n": 4, "best_of": 2}, 400, "best_of"),
    (C, {"temperature": -1}, 400, "temperature"), (C, {"temperature": "1"}, 400, "temperature"),
    (C, {"top_p": 0}, 400, "top_p"), (C, {"top_p": 1.1}, 400, "top_p"),
    (C, {"top_k": -2}, 400, "top_k"), (C, {"min_p": -0.1}, 400, "min_p"),
    (C, {"stop": ["a"] * 17}, 400, "stop"), (C, {"stop": ""}, 400, "stop"),
    (C, {"stop": ["a", ""]}, 400, "stop"), (C, {"stop": 5}, 400, "stop"),
    (C, {"prompt": [2048]}, 400, "prompt"), (C, {"prompt": [-1]}, 400, "prompt"),
    (C, {"prompt": [2 ** 40]}, 400, "prompt"), (C, {"prompt": []}, 400, "prompt"),
    (C, {"prompt": None}, 400, "prompt"), (C, {"prompt": {}}, 400, "prompt"),
    (C, {"prompt": ["a", 5]}, 400, "prompt"), (C, {"prompt": ["a", []]}, 400, "prompt"),
    (C, {"prompt": [[1], [2048]]}, 400, "prompt"), (C, {"prompt": ["a"] * 1025}, 400, "prompt"),
    (C, {"prompt": ["a"] * 65, "n": 16}, 400, "n"),
    (C, {"prompt": ["a", "a " * 20000]}, 400, "prompt"),
    (C, {"prompt": [1] * 8192}, 400, "prompt"), (C, {"prompt": "a " * 20000}, 400, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 20000}]}, 400, "messages"),
    (C, {"logprobs": 21}, 400, "logprobs"), (C, {"logprobs": -1}, 400, "logprobs"),
    (CHAT, {"top_logprobs": 5}, 400, "top_logprobs"),
    (C, {"seed": 2 ** 70}, 400, "seed"), (C, {"seed": 0.5}, 400, "seed"),
    (C, {"logit_bias": {"2048": 1}}, 400, "logit_bias"),
    (C, {"logit_bias": {"1": 101}}, 400, "logit_bias"),
    (C, {"logit_bias": {"x": 1}}, 400, "logit_bias"),
    (C, {"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
    (C, {"seed": 2 ** 63}, 400, "seed"), (C, {"seed": "1"}, 400, "seed"),
    (C, {"echo": 1}, 400, "echo"), (CHAT, {"echo": True}, 400, "echo"),
    (C, {"best_of": 3, "stream": True}, 400, "best_of"), (C, {"prompt_logprobs": -1}, 400, "prompt_logprobs"),
    (C, {"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    (C, {"max_tokens": 0, "logprobs": 1}, 400, "max_tokens"),
    (C, {"min_tokens": 17}, 400, "min_tokens"),
    (C, {"repetition_penalty": 0}, 400, "repetition_penalty"),
    (C, {"presence_penalty": 2.5}, 400, "presence_penalty"),
    (C, {"frequency_penalty": -3}, 400, "frequency_penalty"),
    (C, {"stop_token_ids": [2048]}, 400, "stop_token_ids"),
    (C, {"stop_token_ids": list(range(17))}, 400, "stop_token_ids"),
    (C, {"cache_salt": ""}, 400, "cache_salt"), (C, {"cache_salt": "s" * 257}, 400, "cache_salt"),
    (C, {"stream_options": []}, 400, "stream_options"),
    (C, {"guided_regex": "(a+"}, 400, "guided_regex"),
    (C, {"guided_choice": ["x"] * 2 * 10 ** 5}, 400, "guided_choice"),
    (C, {"structured_outputs": {"json": {"$ref": "#"}}}, 400, "structured_outputs.json"),
    (C, {"suffix": "b"}, 400, "suffix"), (C, {"use_beam_search": True, "top_k": 3}, 400, "top_k"),
    (C, {"resume": "req/0:9"}, 400, "resume"),
    (CHAT, {"functions": [{"name": "f"}]}, 400, "functions"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
     400, "response_format.json_schema.schema"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, 400,
     "continue_final_message"),
    (C, {"response_format": {"type": "json"}}, 400, "response_format"),
    (C, {"guided_json": {"type": "objekt"}}, 400, "guided_json"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
]


@pytest.mark.parametrize("path,more,status,param", FIELDS,
                         ids=[f"{list(f[1])[0]}-{i}" for i, f in enumerate(FIELDS)])
@pytest.mark.parametrize("stream", [False, True])
def test_fields(cluster, path, more, status, param, stream):
    body = dict({"messages": USER} if path == CHAT else {"prompt": "a"}, stream=stream, **{})
    body.update(more)
    got, _, data = cluster.request("POST", path, body)
    assert got == status, data
    e = json.loads(data)["error"]
    assert e["param"] == param and e["type"] == "invalid_request_error"
    assert len(e["message"]) <= 512


def test_the_context_is_named_in_numbers(cluster):
    _, _, data = cluster.request("POST", C, {"prompt": [1] * 9000})
    e = json.loads(data)["error"]
    assert e["code"] == "context_length_exceeded"
    assert "8192" in e["message"] and "9000" in e["message"]


@pytest.mark.parametrize("method,path,allow", [("GET", C, "POST"), ("PUT", CHAT, "POST"),
                                               ("DELETE", "/v1/models", "GET, HEAD"),
                                               ("POST", "/health", "GET, HEAD")])
def test_wrong_method(cluster, method, path, allow):
    status, headers, data = cluster.request(method, path)
    assert status == 405 and headers["allow"] == allow
    assert "error" in json.loads(data)


def test_the_cluster_goes_on(cluster):
    status, _, _ = cluster.request("GET", "/health")
    assert status == 200
    assert cluster.complete("ROMEO:\n", 4)["usage"]["completion_tokens"] == 4

"""The reference of the API against the server that prints it: /openapi.json is valid, and what its schemas say of a
field is what the parsers do; 404, 405 and the pages."""
import html.parser
import json
import re

import pytest
from jsonschema import Draft202012Validator

BASES = {
    "Completion": ("/v1/completions", {"prompt": "O", "max_tokens": 1}),
    "Chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "O"}], "max_tokens": 1}),
    "Responses": ("/v1/responses", {"input": "O", "max_output_tokens": 1}),
    "Messages": ("/v1/messages", {"messages": [{"role": "user", "content": "O"}], "max_tokens": 1}),
}
# What a value needs beside it to be accepted, by field.
BESIDE = {"max_tokens": {"echo": True, "max_tokens": None}, "max_completion_tokens": {"echo": True, "max_tokens": None},
          "best_of": {"n": 1}, "length_penalty": {"use_beam_search": True}, "early_stopping": {"use_beam_search": True},
          "penalty_alpha": {"top_k": 4, "temperature": 0}, "top_logprobs": {"logprobs": True},
          "min_tokens": {"max_tokens": 2147483647, "max_output_tokens": None}}


@pytest.fixture(scope="module")
def api(cluster):
    status, headers, body = cluster.request("GET", "/openapi.json")
    assert status == 200 and headers["content-type"] == "application/json"
    return json.loads(body)


def refs(node):
    if isinstance(node, dict):
        for k, v in node.items():
            if k == "$ref":
                yield v
            else:
                yield from refs(v)
    elif isinstance(node, list):
        for v in node:
            yield from refs(v)


def test_valid(cluster, api):
    assert api["openapi"] == "3.1.0" and api["info"]["title"] and api["info"]["version"]
    schemas = api["components"]["schemas"]
    for name, schema in schemas.items():
        Draft202012Validator.check_schema(schema)
        assert name == "Error" or set(schema.get("required", [])) <= set(schema["properties"]), name
    for ref in refs(api):
        assert ref.startswith("#/components/schemas/") and ref.split("/")[-1] in schemas, ref
    for path, item in api["paths"].items():
        (method, op), = item.items()
        assert set(op["responses"]) == {"200", "default"} and op["summary"], path
        names = re.findall(r"\{(\w+)\}", path)
        assert [p["name"] for p in op.get("parameters", [])] == names, path
        real = path.replace("{model}", cluster.model).replace("{file}", "reference.css").replace("{id}", "none")
        status, _, body = cluster.request(method.upper(), real, {} if method == "post" else None)
        assert status == (400 if method == "post" else 404 if "{id}" in path else 200), (path, status, body)


def wrong_and_right(schema):
    """Values that the schema refuses, and values that it takes."""
    if "minimum" in schema or "exclusiveMinimum" in schema:
        low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
        step = 1 if schema["type"] == "integer" else 0.125
        wrong = ["1", True, [low], high + step]
        if abs(low) < 1 << 53:  # below a 64-bit integer there is no number of JSON that means itself
            wrong.append(low - step)
        return wrong + ([low] if "exclusiveMinimum" in schema else []), [high] + ([] if "exclusiveMinimum" in schema else [low])
    if "enum" in schema:
        return ["no such word", 1, []], schema["enum"]
    if schema.get("type") == "boolean":
        return ["true", 1], [True, False]
    if "maxLength" in schema:
        return ["x" * (schema["maxLength"] + 1), 1], ["x" * schema["maxLength"]]
    if "maxItems" in schema and schema["items"].get("type") == "string":
        return [["x"] * (schema["maxItems"] + 1), [1]], [["x"] * schema["maxItems"]]
    if schema.get("type") == "string":
        return [1], []
    return [], []


def ask(cluster, kind, field, value):
    path, base = BASES[kind]
    body = dict(base, **{k: v for k, v in BESIDE.get(field, {}).items() if kind in ("Completion", "Chat") or k in base})
    if kind == "Chat":
        body.pop("echo", None)
    body[field] = value
    status, _, data = cluster.request("POST", path, {k: v for k, v in body.items() if v is not None or k == field})
    return status, json.loads(data)["error"] if status != 200 else {}


@pytest.mark.parametrize("kind", BASES)
def test_limits(cluster, api, kind):
    """Each limit of each field holds: one step beyond it is refused by name, and the limit itself is not."""
    tried = 0
    for field, prop in api["components"]["schemas"][kind]["properties"].items():
        if "anyOf" not in prop:
            continue  # no effect with any value
        schema, null = prop["anyOf"]
        assert null == {"type": "null"}
        for one in [schema] + schema.get("anyOf", []):
            wrong, right = wrong_and_right(one)
            for value in wrong:
                if len(schema.get("anyOf", [])) and not isinstance(value, (int, float)):
                    continue  # it may be right for another one of the types
                status, e = ask(cluster, kind, field, value)
                assert status == 400, (field, value, status, e)
                if kind != "Messages":  # Anthropic's errors name the field in their text
                    assert e["param"].split(".")[0].split("[")[0] == field, (field, value, e)
                else:
                    assert field in e["message"], (field, value, e)
            for value in right:
                if kind == "Chat" and value == 0 and field in ("max_tokens", "max_completion_tokens"):
                    continue  # needs `echo`
                status, e = ask(cluster, kind, field, value)
                mine = status == 400 and (e.get("param") == field or f"'{field}'" in e["message"])
                assert not mine or "context" in e["message"] or "send the tools" in e["message"], (field, value, e)
                tried += 1
    assert tried > 10


def test_required_and_unknown(cluster, api):
    for kind, (path, base) in BASES.items():
        schema = api["components"]["schemas"][kind]
        for field in schema["required"]:
            status, _, data = cluster.request("POST", path, {k: v for k, v in base.items() if k != field})
            assert status == 400 and field in json.loads(data)["error"]["message"], (kind, field, data)
        assert schema["additionalProperties"] is False
        for field in schema["x-refused"]:
            status, e = ask(cluster, kind, field, "something")
            assert status == 400 and field in e["message"] and "not supported" in e["message"], (kind, field, e)
        status, e = ask(cluster, kind, "no_such_field", 1)
        assert status == 400 and "no_such_field" in e["message"], e


def test_other_paths(cluster):
    status, headers, body = cluster.request("GET", "/v2/nothing")
    e = json.loads(body)["error"]
    assert status == 404 and "'/v2/nothing'" in e["message"]
    assert all(p in e["message"] for p in ("/v1/chat/completions", "/health", "/openapi.json", "/v1/models/{model}")), e
    assert not e["message"].endswith("..."), e
    status, _, body = cluster.request("GET", "/" + "x" * 4000)
    assert status == 404 and len(json.loads(body)["error"]["message"]) < 600
    status, headers, body = cluster.request("DELETE", "/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST") and "use POST" in json.loads(body)["error"]["message"]
    status, headers, body = cluster.request("POST", "/docs", {})
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    for path in ("/ui/nothing.js", "/ui/../docs", "/ui/%2e%2e/docs", "/ui/home.html/"):
        assert cluster.request("GET", path)[0] == 404, path


class Links(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.inline = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.found += [attrs[k] for k in ("href", "src") if k in attrs]
        self.inline += [k for k in attrs if k.startswith("on") or k == "style"]
        if tag == "style" or (tag == "script" and "src" not in attrs):
            self.inline.append(tag)


def test_pages(cluster, api):
    """Pages load nothing from elsewhere, nothing in them needs a weaker policy, and their links lead somewhere."""
    for path in ("/", "/docs"):
        status, headers, body = cluster.request("GET", path)
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        page = Links(body.decode())
        assert page.inline == []
        for link in page.found:
            assert link.startswith("/") and cluster.request("GET", link)[0] == 200, (path, link)
    text = body.decode()
    for kind in api["components"]["schemas"].values():
        for field in list(kind["properties"]) + list(kind.get("x-refused", {})):
            assert field == "error" or f"<code>{field}</code>" in text, field

"""Makes a small corpus for each fuzz target from what lies in the tree, and dictionaries that are tables of the product."""
import glob
import json
import os
import random
import re
import shutil
import subprocess
import tempfile


def read(path):
    with open(path, "rb") as f:
        return f.read()


def conf(root):
    """Every daemon's keys with their defaults, as a file; and the files in deploy/config."""
    kinds = ["conductor", "kvstore", "prefill", "decode"]
    seeds = [bytes([kinds.index(k)]) + read(f"{root}/deploy/config/{k}.yaml") for k in kinds]
    text = read(f"{root}/docs/CONFIG.md").decode()
    common = text.split("\n## All daemons\n")[1].split("\n## ")[0]
    for i, k in enumerate(kinds):
        same = "prefill" if k == "decode" else k
        part = common + text.split(f"\n## baton-{same}\n")[1].split("\n## ")[0]
        lines = []
        for key, default in re.findall(r"^- \*\*`([^`]+)`\*\* \((`[^`]*`|\w+)", part, re.M):
            value = default.strip("`")
            lines.append((key, "x" if value in ("none", "required") and default[0] != "`" else value))
        tree = {}
        for key, value in lines:
            at = tree
            for word in key.split(".")[:-1]:
                at = at.setdefault(word, {})
            at[key.split(".")[-1]] = value
        first = json.dumps(tree).encode()
        small = json.dumps({"node": {"id": "n"}, "model": {"path": "/m"}}).encode()
        seeds += [bytes([i]) + first, bytes([i]) + small + b"\n---8<---\n" + small,
                  bytes([i]) + b"node:\n  id: n1\nmodel:\n  path: /m\n"]
    return seeds


def conf_dict(root):
    text = read(f"{root}/docs/CONFIG.md").decode()
    words = {w for key in re.findall(r"^- \*\*`([^`]+)`\*\*", text, re.M) for w in key.split(".")}
    words |= {"---8<---\n", "true", "false", "1GiB", "500ms", "127.0.0.1:1", "[::1]:7", "https://", "0.5", "&a", "*a", "!!str",
              "? ", "- ", "|\n", ">-\n", "%YAML 1.2\n", "---\n", "...\n", "18446744073709551615", "-1", "1e308", ".inf", ".nan"}
    return sorted(words)


def keys(_root):
    return [b"# keys\nsk-one\nsk-two tenant=a rps=2 tokens_per_s=1000 concurrency=4 weight=2 priority=-1\n\0Bearer sk-two",
            b"sha256:" + b"9f" * 32 + b" id=ci scopes=inference,metrics,admin expires=2027-01-31T00:00:00Z\nsk-old revoked=2026-01-01\n\0Bearer sk-old",
            b"\xef\xbb\xbfsk-a slo_ttft_ms=500 slo_tbt_ms=50.5\r\nsk-b\ttenant=t.1\nsk-c tenant=t.1\n\0Bearer sk-c",
            b"k rps=1e-6\n\0t", b"a\nb rps=1e9 tokens_per_s=1e12\n\0Bearer b"]


def cert(_root):
    out = [b"\x02serial:2a\nsha256:" + b"a1" * 32 + b" # gone\n", b"\x02serial:00:2A\n",
           b"\x03baton://c/kvstore/n1\0c\0kvstore\0n1", b"\x03baton://c//n1\0c\0\0n1"]
    with tempfile.TemporaryDirectory() as d:
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650",
               "-subj", "/CN=fuzz", "-keyout", f"{d}/key", "-out", f"{d}/crt", "-addext"]
        for names in ["subjectAltName=URI:baton://c/kvstore/n1,URI:baton://c/prefill/n1",
                      "subjectAltName=DNS:localhost,IP:127.0.0.1,URI:x,URI:baton://" + "c" * 180 + "/a/b",
                      "subjectAltName=" + ",".join(f"URI:baton://c/r/{i}" for i in range(34))]:
            subprocess.run(new + [names], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            der = subprocess.run(["openssl", "x509", "-in", f"{d}/crt", "-outform", "DER"], check=True, stdout=subprocess.PIPE).stdout
            out += [b"\0" + der, b"\1" + read(f"{d}/crt") + read(f"{d}/key")]
    return out


def model(root):
    out = []
    for path in glob.glob(f"{root}/deploy/models/*") + glob.glob(f"{root}/tests/golden/models/*/") + glob.glob(f"{root}/deploy/shapes/*"):
        generation = os.path.join(path, "generation_config.json")
        out.append(read(os.path.join(path, "config.json")) + b"\0" + (read(generation) if os.path.exists(generation) else b""))
    base = json.loads(read(f"{root}/deploy/models/shakespeare-llama-6m/config.json"))
    base.pop("rope_scaling", None)
    for rope in [{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 64}, {"type": "linear", "factor": 2.0}, {"rope_type": "default"}]:
        out += [json.dumps({**base, "rope_scaling": rope}).encode(),
                json.dumps({**base, "rope_parameters": {**rope, "rope_theta": 10000.0}}).encode()]
    common = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "num_experts_per_tok": 2}
    yarn = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False}
    latent = {**common, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
              "n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4,
              "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_scaling": yarn}
    for name, config in [
            ("DeepseekV3ForCausalLM", {**latent, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
            ("DeepseekV2ForCausalLM", {**latent, "topk_method": "group_limited_greedy"}),
            ("Qwen3MoeForCausalLM", {**common, "num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True,
                                     "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
            ("MixtralForCausalLM", {**common, "num_local_experts": 8, "rope_theta": 1e6, "rope_scaling": {**yarn, "attention_factor": 1.5}}),
            ("GPT2LMHeadModel", {"vocab_size": 256, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 1024, "n_inner": None,
                                 "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5})]:
        out.append(json.dumps({"architectures": [name], **config}).encode())
    return out


def weights(_root):
    def tensor(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    one = json.dumps({"a": tensor("F32", [2, 2], 0, 16), "__metadata__": {"format": "pt"}}).encode()
    two = json.dumps({"model.norm.weight": tensor("BF16", [4], 0, 8),
                      "model.embed_tokens.weight": tensor("F16", [2, 4], 8, 24)}).encode()
    index = json.dumps({"metadata": {}, "weight_map": {"a": "s"}}).encode()
    return [b"\0" + one + b"\0" + bytes(16), b"\0" + two + b"\0" + bytes(24), b"\2" + len(two).to_bytes(8, "little") + two + b"\0" + bytes(24),
            b"\3" + index + b"\0" + one + b"\0" + bytes(16)]


def small_tokenizer(path, merges):
    """The same file with single characters, a few merges and its added tokens, numbered anew."""
    t = json.loads(read(path))
    m = t["model"]
    keep = [w for w in m["vocab"] if len(w) == 1 or re.fullmatch(r"<0x[0-9A-F]{2}>", w) or w.startswith("<")][:300]
    known = set(keep)
    m["merges"] = [p for p in m["merges"] if set(p) <= known and not known.add("".join(p))][:merges]
    old = m["vocab"]
    m["vocab"] = {w: i for i, w in enumerate(keep + sorted({"".join(p) for p in m["merges"]} - set(keep)))}
    for a in t["added_tokens"]:
        in_vocab = old.get(a["content"]) == a["id"]
        a["id"] = m["vocab"][a["content"]] if in_vocab and a["content"] in m["vocab"] else len(m["vocab"]) + a["id"] - len(old)
    return json.dumps(t, ensure_ascii=False, separators=(",", ":")).encode()


def tokenizer(root):
    out = [small_tokenizer(p, 24) for p in sorted(glob.glob(f"{root}/tests/golden/tokenizers/*/tokenizer.json"))]
    out.append(out[0] + b'\0{"tokenizer_class":"LlamaTokenizerFast","add_bos_token":true,"bos_token":"<s>"}')
    out.append(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
                           "decoder": None, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}).encode())
    return out


def templates(root):
    return [read(p) for p in sorted(glob.glob(f"{root}/tests/golden/chat-templates/*.jinja"))]


def chat_file(root):
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    out = [json.dumps({**tokens, "chat_template": t.decode()}).encode() for t in templates(root)]
    out += [json.dumps(tokens).encode() + b"\0" + t for t in templates(root)[:3]]
    return out + [json.dumps({"chat_template": [{"name": "default", "template": "{{ bos_token }}"}, {"name": "x", "template": "x"}]}).encode()]


def template(root):
    return templates(root) + [t + b'\0{"enable_thinking":false,"x":[1,2]}' for t in templates(root)[:2]]


def token(_root):
    return [bytes([k]) + "Hello, w\u00f6rld! 12345\n  it's \U0001f600 <s> <|eot_id|>".encode() for k in range(7)]


def grammar(_root):
    """The kind of the spec, the tokens of the walk, the spec."""
    pair = {"type": "object", "properties": {"a": {"enum": [0, 1]}, "b": {"enum": [[], {}]}}, "required": ["a"],
            "additionalProperties": False}
    schemas = [True, {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "minProperties": 1},
               {"type": "array", "uniqueItems": True}, {"type": "array", "uniqueItems": True, "items": pair, "minItems": 2},
               {"type": "array", "uniqueItems": True, "prefixItems": [{"enum": [1, 2]}, {"const": 1}], "minItems": 2},
               {"type": "array", "uniqueItems": True, "items": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}},
               {"anyOf": [{"type": "string", "pattern": "^(?!a)[a-f]*$", "maxLength": 9}, {"type": "number", "multipleOf": 0.5}]},
               {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
               {"x-guidance": {"whitespace_pattern": " ?"}, "type": "array", "contains": {"const": 1}, "maxItems": 3},
               {"type": "string", "format": "date-time"}, {"type": "integer", "minimum": -7, "maximum": 12}]
    tags = {"tags": [{"begin": "<tool_call>", "schema": {"type": "object"}, "end": "</tool_call>"}, {"begin": "<t", "regex": "a*"}]}
    specs = [(1, json.dumps(x)) for x in schemas] + [(2, ""), (4, '["a","ab","b"]'), (6, json.dumps(tags))]
    specs += [(3, x) for x in (r"\d{3}-[a-z]+(?<!b)", "a(?=b)b|c{2,5}", "[^x]*x$")]
    specs += [(5, x) for x in ('root ::= "a" b\nb ::= [a-z]* | "(" root ")"', 'root ::= ("x" | [0-9])+ "y"?', "root ::= <tool_call> .*")]
    return [bytes([kind - 1, walk]) + text.encode() for kind, text in specs for walk in (0, 77)]


def http_parse(_root):
    return [b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n0\r\nT: v\r\n\r\n"]


def reply(_root):
    """A call of each form behind a reasoning, and two calls."""
    calls = [b"plain", b'<tool_call>\n{"name": "f", "arguments": {"a": [1, "x\\u00e9"]}}\n</tool_call>', b'{"name": "f", "parameters": {"a": 1}}',
             b'[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": "{}"}]', b'[TOOL_CALLS]f[ARGS]{"a": 1}',
             "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>f\n```json\n{\"a\": 1}\n```"
             "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>".encode(),
             "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>{\"a\": 1}"
             "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>".encode(),
             b"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
             b"<|tool_calls_section_end|>",
             b"<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
             b"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"]
    thoughts = [(b"", b""), (b"<think>\n", b"\n</think>\n\n"), (b"[THINK]", b"[/THINK]"), ("\u25c1think\u25b7".encode(), "\u25c1/think\u25b7".encode()),
                (b"<seed:think>", b"</seed:think>")]
    out = [bytes([i, 1, 3]) + thoughts[1][0] + b"hm" + thoughts[1][1] + c + b"\n" + c for i, c in enumerate(calls)]
    return out + [bytes([1, k, 5]) + a + b"hm" + b + b"yes" for k, (a, b) in enumerate(thoughts)]


def front_parse(_root):
    body = {"model": "m", "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["a", "b"], "stream": True,
            "stream_options": {"include_usage": True}, "seed": 1, "logit_bias": {"5": 1.5}, "min_p": 0.1, "top_k": 5}
    chat = {**body, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"a": 1},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    text = {**body, "prompt": ["To be", "or"], "echo": True, "logprobs": 1}
    turns = [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
             {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                                               {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": "x"}]}]
    messages = {"max_tokens": 5, "system": [{"type": "text", "text": "s"}], "messages": turns, "stop_sequences": ["a"],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"},
                "thinking": {"type": "disabled"}, "output_config": {"format": {"type": "json_schema", "schema": {}}}}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
             {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
             {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c", "output": "x"}]
    responses = {"input": items, "instructions": "s", "max_output_tokens": 5, "metadata": {"a": "b"}, "reasoning": {"effort": "low"},
                 "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": {"type": "function", "name": "f"},
                 "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "include": ["message.output_text.logprobs"]}
    out = [bytes([r]) + json.dumps(b).encode()
           for r, b in [(4, messages), (4, {"max_tokens": 5, "messages": turns[:1]}), (5, responses), (5, {"input": "hi"}),
                        (6, {"messages": turns[:1]})]]
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0.5}, "b": {"enum": ["c", None]}}, "required": ["a"]}
    forms = [{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}},
             {"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": json.dumps(schema)}}, {"guided_regex": "[a-c]{2}(d|e)*"},
             {"structured_outputs": {"choice": ["a", "b"], "json_object": False}}, {"grammar": 'root ::= "a" [b-c]+\n'}]
    out += [bytes([i % 2]) + json.dumps({**(chat if i % 2 else text), **f}).encode() for i, f in enumerate(forms)]
    for route, b in [(0, text), (1, chat), (0, {**body, "prompt": [1, 2]}), (2, {"model": "m", "prompt": "x"}), (2, {"messages": chat["messages"]}),
                     (3, {"tokens": [1, 2, 3]})]:
        out += [bytes([r]) + json.dumps(b).encode() for r in {route, 1 - route if route < 2 else route}]
    return out


def tapes(name):
    r = random.Random(name)
    return [r.randbytes(n) for n in (64, 100, 150, 200, 300, 400, 500)]


MADE = {f.__name__: f for f in (conf, keys, cert, model, weights, tokenizer, chat_file, template, token, http_parse, front_parse, grammar,
                                reply)}


def make(root, name, out):
    """Writes the corpus of a target to the folder out."""
    os.makedirs(out, exist_ok=True)
    for i, data in enumerate(MADE[name](root) if name in MADE else tapes(name)):
        with open(f"{out}/seed-{i:02d}", "wb") as f:
            f.write(data)
    for path in glob.glob(f"{root}/tests/fuzz/found/{name}/*"):  # what once failed
        shutil.copy(path, f"{out}/found-{os.path.basename(path)}")


def dictionary(root, name, path):
    """Writes the dictionary of a target to path; False: it has none."""
    given = f"{root}/tests/fuzz/{name}.dict"
    if os.path.exists(given):
        text = read(given)
    elif name == "conf":
        text = b"".join(b'"' + re.sub(rb'[\\"\n]', lambda m: b"\\x%02x" % m[0][0], w.encode()) + b'"\n' for w in conf_dict(root))
    else:
        return False
    with open(path, "wb") as f:
        f.write(text)
    return True

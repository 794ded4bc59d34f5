"""A model with more embedding rows than the tokenizer has tokens, as many have: an id without a token is never
drawn, though its logits are the largest, and is never among the most likely ones."""
import json
import os
import random
import shutil
import struct

import pytest

from conftest import ROOT, Cluster

MODEL = os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m")
TOKENS, ROWS, FAR = 2048, 2112, 2100  # one token stands behind a hole


def padded(folder):
    """The model with rows of both signs behind the tokenizer's, so that one of them has the largest logit."""
    shutil.copytree(MODEL, folder)
    with open(folder / "config.json") as f:
        config = json.load(f)
    config["vocab_size"] = ROWS
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "tokenizer.json") as f:
        tokenizer = json.load(f)
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][-1], id=FAR, content="<|far|>"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    raw = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    head, data = json.loads(raw[8:8 + size]), raw[8 + size:]
    name = "model.embed_tokens.weight"
    rng, width, extra = random.Random(1), config["hidden_size"], []
    for _ in range((ROWS - TOKENS) // 2):
        row = [rng.gauss(0, 20) for _ in range(width)]
        for sign in (1, -1):
            extra += [struct.pack("<f", sign * x)[2:] for x in row]  # bf16: the upper half of a float
    out, parts = {}, b""
    for key, t in head.items():
        if key == "__metadata__":
            continue
        begin, end = t["data_offsets"]
        part = data[begin:end] + (b"".join(extra) if key == name else b"")
        shape = [ROWS, width] if key == name else t["shape"]
        out[key] = {"dtype": t["dtype"], "shape": shape, "data_offsets": [len(parts), len(parts) + len(part)]}
        parts += part
    text = json.dumps(out).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + parts)
    return folder


@pytest.mark.parametrize("device", ["cpu", "null"])
def test_ids_without_a_token_are_not_drawn(tmp_path, device):
    c = Cluster("--model", str(padded(tmp_path / "padded")), "--set", f"prefill.engine.device={device}",
                "--set", f"decode.engine.device={device}")
    try:
        for seed in range(4):
            body = {"prompt": [2043, 5, FAR, 7], "max_tokens": 40, "n": 2, "temperature": 1.5 * (seed > 0),
                    "seed": seed, "ignore_eos": True, "logprobs": 5, "prompt_logprobs": 5,
                    "return_tokens_as_token_ids": True, "skip_special_tokens": False}
            a = c.post("/v1/completions", body)
            for choice in a["choices"]:
                lp = choice["logprobs"]
                ids = [int(x.split(":")[1]) for top in lp["top_logprobs"] for x in top] + \
                      [int(x.split(":")[1]) for x in lp["tokens"]] + \
                      [int(x) for top in choice["prompt_logprobs"][1:] for x in top]
                assert len(lp["tokens"]) == 40 and all(x < TOKENS or x == FAR for x in ids), ids
        if device == "cpu":  # the sum is over all rows: what the tokenizer had before is unlikely
            assert max(v for top in lp["top_logprobs"] for k, v in top.items() if int(k[9:]) < TOKENS) < -1
    finally:
        c.stop()

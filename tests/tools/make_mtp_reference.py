#!/usr/bin/env python3
"""Makes the small random checkpoint tests/golden/models/tiny-mtp, a DeepSeek-V3 with an MTP layer, and what the layer predicts,
computed in float32 with numpy from the formulas of the paper (DeepSeek-V3, 2.1 and 2.2). The model's blocks add little to the
residual stream and the MTP layer passes the token's embedding on, so that its drafts are often right.

usage: make_mtp_reference.py OUT        (writes OUT/tiny-mtp and OUT/tiny-mtp.json)
       make_mtp_reference.py OUT large  (writes OUT/large-mtp, 63 M parameters, to measure with: tests/bench/speculate.py)
"""
import json
import os
import struct
import sys

import numpy as np

C = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 704, "hidden_size": 64,
     "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4,
     "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
     "scoring_func": "sigmoid", "topk_method": "noaux_tc", "kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 32,
     "qk_rope_head_dim": 16, "v_head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
     "rope_interleave": True, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 700,
     "eos_token_id": 701, "torch_dtype": "bfloat16"}
H, HEADS, NOPE, ROPE, V, RANK, QRANK = 64, 4, 32, 16, 32, 64, 48
LAYERS, EXPERTS, INTER, DENSE = 2, 8, 32, 96
DRAFTS = 3
BLOCKS, NOISE = 0.012, 0.02  # what a block adds, and what the MTP layer adds to the embedding

if sys.argv[2:] == ["large"]:  # no layer but the MTP layer has experts, so that a second token in a step costs little
    H, HEADS, NOPE, ROPE, V, RANK, QRANK = 512, 8, 64, 32, 64, 256, 192
    LAYERS, INTER, DENSE = 10, 256, 3072
    BLOCKS, NOISE = 0.0003, 0.003
    C.update(hidden_size=H, num_attention_heads=HEADS, num_key_value_heads=HEADS, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
             v_head_dim=V, kv_lora_rank=RANK, q_lora_rank=QRANK, num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS,
             intermediate_size=DENSE, moe_intermediate_size=INTER)


def bf16(x):
    """Rounds to the nearest bf16, ties to even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def make(rng):
    w = {}

    def put(name, *shape, scale=None):
        x = rng.standard_normal(shape)
        x = x * 0.3 + 1 if len(shape) == 1 and scale is None else x * (shape[-1] ** -0.5 if scale is None else scale)
        w[name] = bf16(x.astype(np.float32))

    def layer(i, moe):
        p = f"model.layers.{i}."
        put(p + "input_layernorm.weight", H)
        put(p + "post_attention_layernorm.weight", H)
        put(p + "self_attn.q_a_proj.weight", QRANK, H)
        put(p + "self_attn.q_a_layernorm.weight", QRANK)
        put(p + "self_attn.q_b_proj.weight", HEADS * (NOPE + ROPE), QRANK)
        put(p + "self_attn.kv_a_proj_with_mqa.weight", RANK + ROPE, H)
        put(p + "self_attn.kv_a_layernorm.weight", RANK)
        put(p + "self_attn.kv_b_proj.weight", HEADS * (NOPE + V), RANK)
        put(p + "self_attn.o_proj.weight", H, HEADS * V, scale=BLOCKS)
        if not moe:
            sizes = {"": DENSE}
        else:
            put(p + "mlp.gate.weight", EXPERTS, H)
            put(p + "mlp.gate.e_score_correction_bias", EXPERTS, scale=0.2)
            sizes = {**{f"experts.{x}.": INTER for x in range(EXPERTS)}, "shared_experts.": INTER}
        for name, n in sizes.items():
            put(p + f"mlp.{name}gate_proj.weight", n, H)
            put(p + f"mlp.{name}up_proj.weight", n, H)
            put(p + f"mlp.{name}down_proj.weight", H, n, scale=BLOCKS)

    put("model.embed_tokens.weight", C["vocab_size"], H, scale=0.5)
    for i in range(LAYERS + 1):
        layer(i, i >= C["first_k_dense_replace"])
    m = f"model.layers.{LAYERS}."
    for name in "enorm", "hnorm", "shared_head.norm":
        put(m + name + ".weight", H)
    join = np.concatenate([np.eye(H) * 1.2, np.zeros((H, H))], 1) + rng.standard_normal((H, 2 * H)) * NOISE
    w[m + "eh_proj.weight"] = bf16(join.astype(np.float32))
    put("model.norm.weight", H)
    w[m + "shared_head.norm.weight"] = w["model.norm.weight"]
    w[m + "enorm.weight"] = bf16(np.ones(H, np.float32))
    put("lm_head.weight", C["vocab_size"], H, scale=0.4)
    w[m + "embed_tokens.weight"] = w["model.embed_tokens.weight"]  # as DeepSeek's checkpoints repeat them
    w[m + "shared_head.head.weight"] = w["lm_head.weight"]
    return w


def norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(C["rms_norm_eps"])) * w


def silu(x):
    return x / (1 + np.exp(-x))


def rope(x, pos):
    """Turns the pairs (2i, 2i + 1) of the last axis; x [tokens, ..., ROPE]."""
    angle = pos[:, None] * C["rope_theta"] ** (-np.arange(0, ROPE, 2) / ROPE)
    angle = angle.reshape(angle.shape[:1] + (1,) * (x.ndim - 2) + angle.shape[1:])
    c, s, a, b = np.cos(angle), np.sin(angle), x[..., ::2], x[..., 1::2]
    return np.stack([a * c - b * s, b * c + a * s], -1).reshape(x.shape).astype(np.float32)


def attention(w, p, x, pos):
    n = len(x)
    q = (norm(x @ w[p + "q_a_proj.weight"].T, w[p + "q_a_layernorm.weight"]) @ w[p + "q_b_proj.weight"].T).reshape(n, HEADS, -1)
    latent = x @ w[p + "kv_a_proj_with_mqa.weight"].T
    kv = (norm(latent[:, :RANK], w[p + "kv_a_layernorm.weight"]) @ w[p + "kv_b_proj.weight"].T).reshape(n, HEADS, -1)
    shared = rope(latent[:, RANK:], pos)
    scores = np.einsum("qhd,khd->hqk", q[..., :NOPE], kv[..., :NOPE]) + np.einsum("qhd,kd->hqk", rope(q[..., NOPE:], pos), shared)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores * (NOPE + ROPE) ** -0.5, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), kv[..., NOPE:])
    return out.reshape(n, -1).astype(np.float32) @ w[p + "o_proj.weight"].T


def mlp(w, p, x):
    return (silu(x @ w[p + "gate_proj.weight"].T) * (x @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T


def experts(w, p, x):
    score = 1 / (1 + np.exp(-(x @ w[p + "gate.weight"].T)))
    choice = score + w[p + "gate.e_score_correction_bias"]
    size = EXPERTS // C["n_group"]
    best = np.sort(choice.reshape(len(x), -1, size), -1)[..., -2:].sum(-1)
    out = mlp(w, p + "shared_experts.", x)
    for t in range(len(x)):
        groups = np.argsort(-best[t], kind="stable")[:C["topk_group"]]
        open_ = [i for i in range(EXPERTS) if i // size in groups]
        used = sorted(open_, key=lambda i: -choice[t, i])[:C["num_experts_per_tok"]]
        total = sum(score[t, i] for i in used) + 1e-20
        for i in used:
            out[t] += score[t, i] / total * C["routed_scaling_factor"] * mlp(w, p + f"experts.{i}.", x[t:t + 1])[0]
    return out


def block(w, i, x, pos):
    p = f"model.layers.{i}."
    x = x + attention(w, p + "self_attn.", norm(x, w[p + "input_layernorm.weight"]), pos)
    y = norm(x, w[p + "post_attention_layernorm.weight"])
    return x + (experts if i >= C["first_k_dense_replace"] else mlp)(w, p + "mlp.", y)


def logprobs(w, state):
    x = state @ w["lm_head.weight"].T
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def drafts(w, ids):
    """Logprobs of DRAFTS greedy drafts behind ids, one after the other, and those of the model itself."""
    m = f"model.layers.{LAYERS}."
    x = w["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        x = block(w, i, x, np.arange(len(ids)))
    states = list(norm(x, w["model.norm.weight"]))  # of all tokens; the last one's draws the next token
    own, out, more = logprobs(w, states[-1]), [], list(ids)
    states = states[:-1]
    for _ in range(DRAFTS):  # pairs of a token and the hidden state before it, from the second token on
        e = norm(w["model.embed_tokens.weight"][more[1:]], w[m + "enorm.weight"])
        h = norm(np.array(states), w[m + "hnorm.weight"])
        x = np.concatenate([e, h], 1) @ w[m + "eh_proj.weight"].T
        state = norm(block(w, LAYERS, x, np.arange(len(x)))[-1], w[m + "shared_head.norm.weight"])
        out.append(logprobs(w, state))
        more.append(int(out[-1].argmax()))
        states.append(state)
    return own, out


def top(lp):
    ids = np.argsort(-lp, kind="stable")[:10]
    return {"ids": [int(i) for i in ids], "logprobs": [round(float(lp[i]), 5) for i in ids]}


def write_safetensors(path, w):
    head, at = {}, 0
    for name, x in w.items():
        head[name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": [at, at + 2 * x.size]}
        at += 2 * x.size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for x in w.values():
            f.write((x.view(np.uint32) >> 16).astype("<u2").tobytes())


def main():
    rng = np.random.default_rng(20261128)
    w = make(rng)
    path = os.path.join(sys.argv[1], "large-mtp" if LAYERS > 2 else "tiny-mtp")
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(C, f, indent=1)
    write_safetensors(os.path.join(path, "model.safetensors"), w)
    if LAYERS > 2:
        return
    cases, right = [], 0
    for n in 2, 3, 17, 40, 70, 130:
        ids = [int(i) for i in rng.integers(3, C["vocab_size"], n)]
        own, lps = drafts(w, ids)
        cases.append({"ids": ids, "next": top(own), "drafts": [top(lp) for lp in lps]})
    for _ in range(40):
        ids = [int(i) for i in rng.integers(3, C["vocab_size"], 20)]
        own, lps = drafts(w, ids)
        right += int(own.argmax()) == int(lps[0].argmax())
    print(f"first drafts that are the model's own tokens: {right} of 40", file=sys.stderr)
    with open(path + ".json", "w") as f:
        json.dump(cases, f)


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""Float32 reference tokens of DoLa and contrastive search, from the papers' formulas with numpy: no code of the engines.

usage: make_search_references.py > tests/golden/search.json        (in the repository's root; needs numpy)

Every token is computed from the whole sequence, without a KV cache. A token's `gap` says how far the decision was from
a tie: of the scores of the two best tokens, and for DoLa also of the divergences of the two furthest layers.
DoLa: Chuang et al. 2023, with the divergence and the filter of its authors' code. Contrastive: Su et al. 2022.
"""
import json
import struct
import sys

import numpy as np

F = np.float32


def tensors(path):
    with open(path + "/model.safetensors", "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        body = f.read()
    out = {}
    for name, t in head.items():
        if name == "__metadata__":
            continue
        raw = body[t["data_offsets"][0]:t["data_offsets"][1]]
        if t["dtype"] == "BF16":
            a = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(F)
        else:
            a = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[t["dtype"]]).astype(F)
        out[name] = a.reshape(t["shape"])
    return out


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).astype(F)


def log_softmax(x):
    m = x.max(-1, keepdims=True)
    return (x - m - np.log(np.exp(x - m).sum(-1, keepdims=True))).astype(F)


def attend(q, k, v, scale):
    """[tokens][heads][d] each, k and v with fewer heads."""
    n, heads = q.shape[:2]
    k, v = (np.repeat(a, heads // a.shape[1], 1) for a in (k, v))
    s = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) * F(scale)
    s = np.where(np.tril(np.ones((n, n), bool)), s, -np.inf)
    return (softmax(s) @ v.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(n, -1)


class Llama:
    """Llama and Qwen3."""

    def __init__(self, path):
        self.c, self.w = json.load(open(path + "/config.json")), tensors(path)
        self.layers, self.tied = self.c["num_hidden_layers"], self.c["tie_word_embeddings"]
        self.head = self.w["model.embed_tokens.weight" if self.tied else "lm_head.weight"]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + F(self.c["rms_norm_eps"])) * self.w[name]

    def rope(self, x):
        d = self.c["head_dim"]
        theta = self.c.get("rope_parameters", self.c)["rope_theta"]
        a = np.arange(len(x))[:, None] * (1.0 / theta ** (np.arange(0, d, 2) / d))[None]
        cos, sin = np.cos(a).astype(F)[:, None], np.sin(a).astype(F)[:, None]
        lo, hi = x[..., :d // 2], x[..., d // 2:]
        return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], -1)

    def hidden(self, ids):
        """What enters each layer, and the last layer's normed result: [layers + 1][tokens][hidden]."""
        c, w, d = self.c, self.w, self.c["head_dim"]
        x, out = w["model.embed_tokens.weight"][ids], []
        for i in range(self.layers):
            out.append(x)
            p = f"model.layers.{i}."
            a = self.norm(x, p + "input_layernorm.weight")
            q, k, v = ((a @ w[f"{p}self_attn.{m}_proj.weight"].T).reshape(len(ids), -1, d) for m in "qkv")
            if p + "self_attn.q_norm.weight" in w:
                q, k = self.norm(q, p + "self_attn.q_norm.weight"), self.norm(k, p + "self_attn.k_norm.weight")
            x = x + attend(self.rope(q), self.rope(k), v, d ** -0.5) @ w[p + "self_attn.o_proj.weight"].T
            a = self.norm(x, p + "post_attention_layernorm.weight")
            g, u = a @ w[p + "mlp.gate_proj.weight"].T, a @ w[p + "mlp.up_proj.weight"].T
            x = x + (g / (1 + np.exp(-g)) * u) @ w[p + "mlp.down_proj.weight"].T
        return out + [self.norm(x, "model.norm.weight")]


class Gpt2:
    def __init__(self, path):
        self.c, self.w = json.load(open(path + "/config.json")), tensors(path)
        self.layers, self.tied, self.head = self.c["n_layer"], True, self.w["transformer.wte.weight"]

    def norm(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + F(self.c["layer_norm_epsilon"]))
        return x * self.w[name + ".weight"] + self.w[name + ".bias"]

    def hidden(self, ids):
        w, n, h = self.w, len(ids), self.c["n_head"]
        x, out = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:n], []
        for i in range(self.layers):
            out.append(x)
            p = f"transformer.h.{i}."
            a = self.norm(x, p + "ln_1") @ w[p + "attn.c_attn.weight"] + w[p + "attn.c_attn.bias"]
            q, k, v = (m.reshape(n, h, -1) for m in np.split(a, 3, -1))
            x = x + attend(q, k, v, q.shape[-1] ** -0.5) @ w[p + "attn.c_proj.weight"] + w[p + "attn.c_proj.bias"]
            a = self.norm(x, p + "ln_2") @ w[p + "mlp.c_fc.weight"] + w[p + "mlp.c_fc.bias"]
            a = 0.5 * a * (1 + np.tanh(F(np.sqrt(2 / np.pi)) * (a + F(0.044715) * a ** 3)))
            x = x + a @ w[p + "mlp.c_proj.weight"] + w[p + "mlp.c_proj.bias"]
        return out + [self.norm(x, "transformer.ln_f")]


def buckets(layers, tied, what):
    """The candidate layers of "low" and "high"."""
    first = 0 if not tied else 2 if layers > 2 else 1 if layers == 2 else 0
    if what == "low":
        return list(range(first, layers // 2 if layers <= 40 else 20, 2)) or [min(first, layers - 1)]
    if what == "high":
        return list(range(layers // 2 if layers <= 40 else layers - 20, layers, 2))
    return what


def penalize(score, ids, r):
    for t in set(ids):
        score[t] = score[t] / r if score[t] > 0 else score[t] * r
    return score


def dola(m, ids, n, layers, repetition=1.0):
    ids, out, gaps, chosen = list(ids), [], [], []
    for _ in range(n):
        h = m.hidden(ids)
        last = log_softmax(h[-1][-1] @ m.head.T)
        early = [log_softmax(h[i][-1] @ m.head.T) for i in layers]
        far = []
        for e in early:
            mean = F(0.5) * (np.exp(last) + np.exp(e))
            far.append(float((mean * (np.log(mean) - last)).mean() + (mean * (np.log(mean) - e)).mean()) / 2)
        best = int(np.argmax(far))
        score = np.where(last >= last.max() + F(np.log(0.1)), last - early[best], -np.inf).astype(F)
        score = penalize(score, ids, F(repetition))
        near = np.abs(last - last.max() - np.log(0.1)).min()  # a token that is nearly left out, or nearly not
        top = np.sort(score)[::-1]
        rest = sorted(far)[::-1]
        apart = (rest[0] - rest[1]) / max(rest[0], 1e-12) if len(far) > 1 else 1.0
        out.append(int(np.argmax(score)))
        gaps.append(round(float(min(top[0] - top[1], 9.0, near, 0.0 if apart < 0.01 else 9.0)), 5))
        chosen.append(layers[best])
        ids.append(out[-1])
    return {"ids": out, "gaps": gaps, "layers": chosen}


def contrastive(m, ids, n, alpha, k, repetition=1.0):
    ids, out, gaps = list(ids), [], []
    for _ in range(n):
        logits = penalize((m.hidden(ids)[-1][-1] @ m.head.T).astype(F), ids, F(repetition))
        p = softmax(logits)
        order = np.argsort(-p, kind="stable")
        score = []
        for t in order[:k]:
            h = m.hidden(ids + [int(t)])[-1]
            h = h / np.linalg.norm(h, axis=-1, keepdims=True)
            score.append(float((1 - alpha) * p[t] - alpha * (h[:-1] @ h[-1]).max()))
        best, rest = int(np.argmax(score)), sorted(score)[::-1]
        near = float(np.log(p[order[k - 1]] / p[order[k]]))  # the last candidate is nearly not one
        out.append(int(order[best]))
        gaps.append(round(min(rest[0] - rest[1], near), 6))
        ids.append(out[-1])
    return {"ids": out, "gaps": gaps}


def main():
    llama, qwen, gpt2 = "deploy/models/shakespeare-llama-6m", "../shared/models/shakespeare-qwen3-4m", "tests/golden/models/tiny-gpt2"
    refs = {llama: "tests/golden/shakespeare-llama-6m.json", qwen: "tests/golden/shakespeare-llama-6m.json",
            gpt2: "tests/golden/models/tiny-gpt2.json"}
    print("[", end="")
    before = ""
    for path, cls in ((llama, Llama), (qwen, Llama), (gpt2, Gpt2)):
        m, cases = cls(path), []
        prompts = [r["prompt_ids"][:60] for r in json.load(open(refs[path]))][:3]
        for i, ids in enumerate(prompts):
            for what in ["low", "high", list(range(m.layers))][:3 if i < 2 else 2]:
                for r in (1.0, 1.2)[:1 if i else 2]:
                    cases.append({"model": path, "dola": buckets(m.layers, m.tied, what), "repetition": r, "prompt_ids": ids,
                                  **dola(m, ids, 24, buckets(m.layers, m.tied, what), r)})
            for alpha, k, r in ((0.6, 4, 1.0), (0.3, 8, 1.0), (0.9, 16, 1.1))[:2 if i else 3]:
                cases.append({"model": path, "alpha": alpha, "k": k, "repetition": r, "prompt_ids": ids,
                              **contrastive(m, ids, 24, F(alpha), k, r)})
        for c in cases:
            print(before + json.dumps(c, separators=(",", ":")), end="", flush=True)
            before = ",\n"
    print("]")


main()

#!/usr/bin/python3
"""Float32 reference answers of beam search: numpy and the rules of transformers' generate(num_beams=...), no code of ours.

usage: make_beam_references.py > tests/golden/beams.json           (in the repository's root; needs numpy)

Every search is a case with `gap`: how far its closest decision was from a tie, in logprobs of whole answers: of two
candidates for a beam, of two answers, of an answer and the best beam when it was asked whether to stop. An engine that
rounds otherwise may go on with other tokens behind a near tie, so only cases with a gap above GAP are written.
"""
import itertools
import json
import struct

import numpy as np

F = np.float32
MODEL = "deploy/models/shakespeare-llama-6m"
GAP = 0.012
EARLY = [False, True, "never"]


def tensors(path):
    with open(path, "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        body = f.read()
    out = {}
    for name, t in head.items():
        if name != "__metadata__":
            raw = np.frombuffer(body[t["data_offsets"][0]:t["data_offsets"][1]], np.uint16)
            out[name] = (raw.astype(np.uint32) << 16).view(F).reshape(t["shape"])
    return out


class Llama:
    def __init__(self, path):
        self.c = json.load(open(path + "/config.json"))
        self.w = tensors(path + "/model.safetensors")
        self.d = self.c["head_dim"]
        self.freq = 1.0 / self.c["rope_parameters"]["rope_theta"] ** (np.arange(0, self.d, 2) / self.d)

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + F(self.c["rms_norm_eps"])) * self.w[name]

    def rope(self, x, at):
        a = at[:, None] * self.freq[None]
        cos, sin = np.cos(a).astype(F)[:, None], np.sin(a).astype(F)[:, None]
        lo, hi = x[..., :self.d // 2], x[..., self.d // 2:]
        return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], -1)

    def run(self, ids, kv):
        """ids [rows][tokens] behind kv (a list of [k, v] a layer, or empty); logprobs of what follows each row."""
        c, w, (rows, n) = self.c, self.w, ids.shape
        heads, kvh = c["num_attention_heads"], c["num_key_value_heads"]
        before = kv[0][0].shape[1] if kv else 0
        at = np.arange(before, before + n)
        x = w["model.embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            y = self.norm(x, p + "input_layernorm.weight")
            q, k, v = (y @ w[p + f"self_attn.{m}_proj.weight"].T for m in "qkv")
            q = self.rope(q.reshape(rows, n, heads, self.d), at)
            k = self.rope(k.reshape(rows, n, kvh, self.d), at)
            v = v.reshape(rows, n, kvh, self.d)
            if before:
                k, v = np.concatenate([kv[i][0], k], 1), np.concatenate([kv[i][1], v], 1)
            if len(kv) <= i:
                kv.append(None)
            kv[i] = [k, v]
            k, v = (np.repeat(a, heads // kvh, 2).transpose(0, 2, 1, 3) for a in (k, v))
            s = q.transpose(0, 2, 1, 3) @ k.transpose(0, 1, 3, 2) / F(self.d ** 0.5)
            s = np.where(np.arange(before + n)[None] <= at[:, None], s, -np.inf)
            s = np.exp(s - s.max(-1, keepdims=True))
            y = (s / s.sum(-1, keepdims=True)).astype(F) @ v
            x = x + y.transpose(0, 2, 1, 3).reshape(rows, n, -1) @ w[p + "self_attn.o_proj.weight"].T
            y = self.norm(x, p + "post_attention_layernorm.weight")
            g = y @ w[p + "mlp.gate_proj.weight"].T
            x = x + (g / (1 + np.exp(-g)) * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
        y = self.norm(x[:, -1], "model.norm.weight") @ w["model.embed_tokens.weight"].T
        m = y.max(-1, keepdims=True)
        return y - m - np.log(np.exp(y - m).sum(-1, keepdims=True))


def search(model, prompt, width, max_new, eos, penalty, early, min_new=0):
    """The answers by falling score, and the gap."""
    kv = []
    lp = model.run(np.array([prompt]), kv)
    beams, done, gap = [((), (), 0.0)], [], np.inf
    for length in itertools.count(1):
        cand = [(sums + float(lp[b, t]), b, int(t)) for b, (_, _, sums) in enumerate(beams)
                for t in np.argsort(-lp[b])[:4 * width + len(eos)] if not (t in eos and length <= min_new)]
        cand.sort(reverse=True)
        last = length == max_new
        goes_on, finished = [], []
        for rank, (s, b, t) in enumerate(cand[:max(2, 1 + len(eos)) * width]):
            one = (beams[b][0] + (t,), beams[b][1] + (float(lp[b, t]),), s)
            if (t in eos or last) and rank < width:
                finished.append((s / length ** penalty, one))
            if t not in eos and not last and len(goes_on) < width:
                goes_on.append((s, b, one))
        # Decisions: the last candidate that is in against the first that is out.
        ranks = [s for s, _, t in cand if t not in eos]
        gap = min(gap, ranks[width - 1] - ranks[width])
        if last or any(t in eos for _, _, t in cand[:width + 1]):
            gap = min(gap, cand[width - 1][0] - cand[width][0])
        done = sorted(done + finished, key=lambda d: -d[0])
        for a, b in zip(done[:width], done[1:]):
            gap = min(gap, (a[0] - b[0]) * length ** min(penalty, 1))
        done = done[:width]
        if last:
            break
        if len(done) == width:
            if early is True:
                break
            longest = max_new if early == "never" and penalty > 0 else length
            best = goes_on[0][0] / longest ** penalty
            gap = min(gap, abs(best - done[-1][0]) * length ** min(penalty, 1))
            if not best > done[-1][0]:
                break
        of = [b for _, b, _ in goes_on]
        kv = [[k[of], v[of]] for k, v in kv]
        beams = [one for _, _, one in goes_on]
        lp = model.run(np.array([[one[0][-1]] for one in beams]), kv)
    return done, float(gap)


def main():
    model = Llama(MODEL)
    golden = json.load(open("tests/golden/shakespeare-llama-6m.json"))
    vocab = json.load(open(MODEL + "/tokenizer.json"))["model"]["vocab"]
    ends = [2044, 2047]
    stops = [[], [vocab["."], vocab["Ċ"]], [vocab[","]]]
    text = [i for g in golden for i in g["prompt_ids"][1:] + g["greedy_ids"]]
    rng, cases = np.random.default_rng(3), []
    plan = list(itertools.product(range(2, 9), (1.0, 0.0, 2.0, -0.5), EARLY, range(len(stops))))
    for width, penalty, early, stop in plan:
        max_new, min_new = int(rng.integers(6, 25)), int(rng.integers(0, 4)) * (stop > 0)
        at = int(rng.integers(0, len(text) - 70))
        prompt = [2043] + text[at:at + int(rng.integers(2, 60))]
        eos = ends + stops[stop]
        done, gap = search(model, prompt, width, max_new, eos, penalty, early, min_new)
        if gap > GAP:
            cases.append({"prompt_ids": prompt, "beams": width, "max_new": max_new, "stop_ids": eos, "min_new": min_new,
                          "length_penalty": penalty, "early_stopping": early, "gap": round(gap, 4),
                          "answers": [{"ids": list(ids), "logprobs": [round(v, 4) for v in lps], "score": round(score, 5)}
                                      for score, (ids, lps, _) in done]})
    print("[" + ",\n".join(json.dumps(c) for c in cases) + "]")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Makes small random checkpoints of the architectures that Baton serves, tokenizers of the kinds that
they come with, and float32 reference outputs, with transformers and tokenizers (a machine that has them).

usage: make_references.py OUT   (writes OUT/models.tar and OUT/tokenizers.tar, to unpack in tests/golden)
The corpus of the tokenizers is deploy/local/demo-prompt.txt and the texts below.
"""
import json
import os
import shutil
import sys
import tarfile

import torch
import transformers
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)
from transformers import AutoModelForCausalLM

torch.manual_seed(20261120)
TEXTS = ["", " ", "Hello world", "  leading and trailing  ", "ROMEO:\nO, speak again, bright angel!",
         "I'll we've DON'T can't it's", "1234567 89 0.5 1,000 ½ Ⅷ ٣", "tabs\tand\r\nnewlines\n\n\n end",
         "caf\u00e9 na\u00efve \u00fcber Ångström", "cafe\u0301 A\u030angstro\u0308m", "日本語のテキスト 中文",
         "emoji 👩‍👩‍👧 🙂 and ﬁ ligature", "x = {'a': [1, 2]};  // code\n\tif (x != y) return;",
         "\u00a0nbsp\u2003em\u3000ideographic", "a\u0000b", "<s>special</s> <|im_start|>user<|im_end|>", "▁under▁score _",
         "mixed العربية עברית ไทย हिन्दी", "....!!!???---", "www.example.com/path?q=1&r=2", "A" * 70, "\n" * 5 + " " * 9]


def save(model, path, cfg, dtype, **kw):
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.dim() == 1:  # norms and biases: not the identity that they are initialised to
                p.copy_(torch.randn_like(p) * 0.3 + (1.0 if "norm" in n else 0.0))
            elif "embed" in n or "lm_head" in n:
                p.copy_(torch.randn_like(p) * 0.5)
            else:
                p.copy_(torch.randn_like(p) / p.shape[1] ** 0.5)
    model.to(dtype)
    model.save_pretrained(path, **kw)
    # One spelling of RoPE in some, the other in others, as checkpoints in the field have them.
    with open(os.path.join(path, "config.json")) as f:
        c = json.load(f)
    c.update(cfg)
    for k in [k for k, v in c.items() if v == "DROP"]:
        del c[k]
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(c, f, indent=1)


def references(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    vocab = model.config.vocab_size
    g = torch.Generator().manual_seed(7)
    rows = []
    for n in (1, 5, 17, 64, 129, 300):
        ids = torch.randint(0, vocab, (1, n), generator=g)
        with torch.no_grad():
            lp = torch.log_softmax(model(ids).logits[0, -1], -1)
            top = lp.topk(10)
            seq, out, olp, gap = ids, [], [], []
            for _ in range(24):
                q = torch.log_softmax(model(seq).logits[0, -1], -1)
                t = q.topk(2)
                out.append(int(t.indices[0]))
                olp.append(round(float(t.values[0]), 5))
                gap.append(round(float(t.values[0] - t.values[1]), 5))
                seq = torch.cat([seq, t.indices[:1].view(1, 1)], 1)
        rows.append({"prompt_ids": ids[0].tolist(), "next_top10_ids": top.indices.tolist(),
                     "next_top10_logprobs": [round(float(v), 5) for v in top.values], "greedy_ids": out,
                     "greedy_logprobs": olp, "greedy_top2_gap": gap})
    return rows


def checkpoints(out):
    base = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)
    T = transformers
    rope31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    todo = {
        "tiny-mistral": (T.MistralForCausalLM, T.MistralConfig(**base, head_dim=32, sliding_window=48,
                         tie_word_embeddings=False), torch.bfloat16, {}, {}),
        "tiny-llama31": (T.LlamaForCausalLM, T.LlamaConfig(**base, rope_parameters=rope31, tie_word_embeddings=False),
                         torch.float16, {"rope_parameters": "DROP", "rope_theta": 10000.0,
                                         "rope_scaling": {k: v for k, v in rope31.items() if k != "rope_theta"}}, {}),
        "tiny-qwen2": (T.Qwen2ForCausalLM, T.Qwen2Config(**base, tie_word_embeddings=True), torch.float32, {},
                       {"max_shard_size": "500KB"}),
        "tiny-qwen3": (T.Qwen3ForCausalLM, T.Qwen3Config(**base, head_dim=64, tie_word_embeddings=False), torch.bfloat16,
                       {}, {"max_shard_size": "300KB"}),
    }
    for name, (cls, cfg, dtype, edit, kw) in todo.items():
        path = os.path.join(out, name)
        save(cls(cfg), path, edit, dtype, **kw)
        with open(os.path.join(out, name + ".json"), "w") as f:
            json.dump(references(path), f)
        print(name, sorted(os.listdir(path)), sum(os.path.getsize(os.path.join(path, x)) for x in os.listdir(path)))
        print("  config", json.load(open(os.path.join(path, "config.json"))))
        rows = json.load(open(os.path.join(out, name + ".json")))
        print("  smallest gaps", [min(r["greedy_top2_gap"]) for r in rows])


QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def tokenizers(out, corpus):
    lines = corpus + TEXTS
    made = {}

    def byte_level(name, pre, norm=None, post=None, specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
        t = Tokenizer(models.BPE())
        if norm:
            t.normalizer = norm
        t.pre_tokenizer = pre
        t.decoder = decoders.ByteLevel()
        t.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                              special_tokens=[], show_progress=False))
        t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
        if post:
            t.post_processor = post(t)
        made[name] = t

    byte_level("gpt2", pre_tokenizers.ByteLevel(add_prefix_space=False), post=lambda t: processors.ByteLevel(trim_offsets=False))
    byte_level("qwen", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"),
               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), norm=normalizers.NFC())
    byte_level("llama3", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
               specials=("<|begin_of_text|>", "<|eot_id|>"),
               post=lambda t: processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
                   single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", t.token_to_id("<|begin_of_text|>"))])]))
    byte_level("deepseek", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
               pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
               pre_tokenizers.Split(Regex(r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
    byte_level("digits", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
               pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)]), norm=normalizers.NFKC())

    def sentencepiece(name, legacy):
        t = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        train_norm = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        t.normalizer = train_norm
        t.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "merged_with_next")
        byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
        t.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"] + byte_tokens,
                              limit_alphabet=80, show_progress=False))
        j = json.loads(t.to_str())
        # The special list was only for the ids: byte tokens are plain vocabulary entries.
        j["added_tokens"] = [a for a in j["added_tokens"] if a["content"] in ("<unk>", "<s>", "</s>")]
        t = Tokenizer.from_str(json.dumps(j))
        if legacy:  # Llama 2, Mistral 7B v0.1
            t.normalizer = train_norm
            t.pre_tokenizer = None
        else:  # the newer spelling
            t.normalizer = None
            t.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", t.token_to_id("<s>"))])
        made[name] = t

    sentencepiece("spm-legacy", True)
    sentencepiece("spm-metaspace", False)
    for name, t in made.items():
        d = os.path.join(out, name)
        os.makedirs(d)
        t.save(os.path.join(d, "tokenizer.json"))
        rows = []
        for text in TEXTS + corpus[:6]:
            e, p = t.encode(text), t.encode(text, add_special_tokens=False)
            rows.append({"text": text, "ids": e.ids, "ids_no_special": p.ids, "decoded": t.decode(e.ids),
                         "decoded_special": t.decode(e.ids, skip_special_tokens=False)})
        with open(os.path.join(d, "vectors.json"), "w") as f:
            json.dump(rows, f, ensure_ascii=True)
        print(name, t.get_vocab_size(), os.path.getsize(os.path.join(d, "tokenizer.json")), rows[2])


def main():
    out = sys.argv[1]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    corpus = open(os.path.join(root, "deploy", "local", "demo-prompt.txt")).read().split("\n\n")
    tmp = os.path.join("/tmp", "refs")
    shutil.rmtree(tmp, ignore_errors=True)
    for kind, make in (("models", lambda d: checkpoints(d)), ("tokenizers", lambda d: tokenizers(d, corpus))):
        d = os.path.join(tmp, kind)
        os.makedirs(d)
        try:
            make(d)
        finally:
            with tarfile.open(os.path.join(out, kind + ".tar.gz"), "w:gz") as t:
                t.add(d, arcname=kind)


main()

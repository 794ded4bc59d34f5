#!/usr/bin/env python3
"""Makes small random checkpoints of the architectures that Baton serves, tokenizers of the kinds that
they come with, and float32 reference outputs, with transformers and tokenizers (a machine that has them).

usage: make_references.py OUT          (writes OUT/models.tar.gz and OUT/tokenizers.tar.gz, to unpack in tests/golden)
       make_references.py OUT NAME...  (writes these checkpoints to OUT; wide-... are too large for the repository)
The corpus of the tokenizers is deploy/local/demo-prompt.txt and the texts below.
"""
import json
import os
import shutil
import sys
import tarfile
import zlib

import safetensors.torch
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
    # Checkpoints for GPUs amplify roundings less: smaller scores of attention and smaller logits.
    calm = os.path.basename(path).startswith(("gpu-", "wide-"))
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.dim() == 1:  # norms and biases: not the identity that they are initialised to
                scale = ("norm" in n or ".ln_" in n) and n.endswith("weight")
                p.copy_(torch.randn_like(p) * 0.3 + (1.0 if scale else 0.0))
                if calm and ("q_norm" in n or "k_norm" in n):
                    p.mul_(0.5)
            elif "embed" in n or "lm_head" in n or "wte" in n or "wpe" in n:
                p.copy_(torch.randn_like(p) * (min(0.5, 2.0 / p.shape[-1] ** 0.5) if calm else 0.5))
            else:  # GPT-2's matrices are [in, out], all others [out, in] or [experts, out, in]
                p.copy_(torch.randn_like(p) / p.shape[0 if "transformer.h." in n else -1] ** 0.5)
        for n, b in model.named_buffers():
            if "e_score_correction_bias" in n:
                b.copy_(torch.randn_like(b) * 0.2)
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


def opened(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model, ids):
    """24 tokens: the sequence with them, logprobs and gaps to the second best."""
    seq, lps, gaps = ids, [], []
    for _ in range(24):
        q = torch.log_softmax(model(seq).logits[0, -1], -1)
        t = q.topk(2)
        lps.append(round(float(t.values[0]), 5))
        gaps.append(round(float(t.values[0] - t.values[1]), 5))
        seq = torch.cat([seq, t.indices[:1].view(1, 1)], 1)
    return seq, lps, gaps


def steady(model, seq):
    """False if a router is near a tie somewhere: then the last bits of a sum decide between experts, and another
    implementation may go on with other numbers."""
    x = model.get_input_embeddings()(seq)
    a = torch.log_softmax(model(seq).logits[0], -1)
    for _ in range(8):
        noise = 1 + 3e-3 * torch.randn_like(x)
        if float((a - torch.log_softmax(model(inputs_embeds=x * noise).logits[0], -1)).abs().max()) >= 0.1:
            return False
    return True


def references(model, lengths=(1, 5, 17, 64, 129, 300)):
    vocab = model.config.vocab_size
    g = torch.Generator().manual_seed(7)
    rows = []
    for n in lengths:
        with torch.no_grad():
            for _ in range(1000):
                ids = torch.randint(0, vocab, (1, n), generator=g)
                if not steady(model, ids):
                    continue
                seq, lps, gaps = greedy(model, ids)
                if steady(model, seq):
                    break
            else:
                raise RuntimeError("no prompt without a tie of experts")
            lp = torch.log_softmax(model(ids).logits[0, -1], -1)
            top = lp.topk(10)
        rows.append({"prompt_ids": ids[0].tolist(), "next_top10_ids": top.indices.tolist(),
                     "next_top10_logprobs": [round(float(v), 5) for v in top.values], "greedy_ids": seq[0, n:].tolist(),
                     "greedy_logprobs": lps, "greedy_top2_gap": gaps})
    return rows


def checkpoints(out, names=()):
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
    moe = dict(vocab_size=256, hidden_size=64, num_hidden_layers=3, max_position_embeddings=1024, bos_token_id=1,
               eos_token_id=2, tie_word_embeddings=False)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
    mla = dict(num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
               v_head_dim=48, intermediate_size=128, moe_intermediate_size=48, rms_norm_eps=1e-5)
    todo |= {
        "tiny-deepseek-v2": (T.DeepseekV2ForCausalLM, T.DeepseekV2Config(
            **moe, **mla, q_lora_rank=None, n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2, n_group=1,
            topk_group=1, topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0, first_k_dense_replace=1),
            torch.bfloat16, {}, {}),
        "tiny-deepseek-v2-groups": (T.DeepseekV2ForCausalLM, T.DeepseekV2Config(
            **moe, **mla, q_lora_rank=40, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, n_group=4,
            topk_group=2, topk_method="group_limited_greedy", norm_topk_prob=False, routed_scaling_factor=4.0,
            first_k_dense_replace=0), torch.bfloat16, {}, {}),
        "tiny-deepseek-v3": (T.DeepseekV3ForCausalLM, T.DeepseekV3Config(
            **moe, **mla, q_lora_rank=48, n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, n_group=4,
            topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=1, rope_parameters=yarn),
            torch.bfloat16, {}, {}),
        "tiny-qwen3-moe": (T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig(
            **moe, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=192,
            moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=1,
            mlp_only_layers=[1], rms_norm_eps=1e-6), torch.bfloat16, {}, {"max_shard_size": "300KB"}),
        "tiny-mixtral": (T.MixtralForCausalLM, T.MixtralConfig(
            **moe, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=96, num_local_experts=5,
            num_experts_per_tok=2, rms_norm_eps=1e-5, sliding_window=None), torch.bfloat16, {}, {}),
        "tiny-gpt2": (T.GPT2LMHeadModel, T.GPT2Config(vocab_size=251, n_positions=1024, n_embd=64, n_layer=3, n_head=1,
                      bos_token_id=1, eos_token_id=2), torch.float32, {}, {}),
        "tiny-qwen3-yarn": (T.Qwen3ForCausalLM, T.Qwen3Config(
            **{**base, "vocab_size": 256, "hidden_size": 64, "head_dim": 32}, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 128}, tie_word_embeddings=True), torch.bfloat16, {}, {}),
    }
    # Shapes that GPUs run, too. A GPU rounds more, so that ties of experts are more: short prompts, or all experts.
    small = {**moe, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    wide = {**moe, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    todo |= {
        "gpu-qwen3-moe": (T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig(
            **small, intermediate_size=192, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1], rms_norm_eps=1e-6), torch.bfloat16, {}, {}),
        "gpu-mixtral": (T.MixtralForCausalLM, T.MixtralConfig(
            **small, intermediate_size=96, num_local_experts=5, num_experts_per_tok=2, rms_norm_eps=1e-5,
            sliding_window=None), torch.bfloat16, {}, {}),
        "gpu-deepseek-v2": (T.DeepseekV2ForCausalLM, T.DeepseekV2Config(
            **{**small, "num_key_value_heads": 2, "max_position_embeddings": 4096, "head_dim": 64}, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=64, intermediate_size=128,
            moe_intermediate_size=48, rms_norm_eps=1e-6, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3,
            n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0,
            first_k_dense_replace=1), torch.bfloat16, {}, {}),
        "gpu-yarn": (T.Qwen2ForCausalLM, T.Qwen2Config(
            **{**small, "intermediate_size": 128, "tie_word_embeddings": True},
            rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                             "original_max_position_embeddings": 128}), torch.bfloat16, {}, {}),
        "wide-qwen3-moe": (T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig(
            **wide, intermediate_size=768, moe_intermediate_size=384, num_experts=8, num_experts_per_tok=8,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], rms_norm_eps=1e-6), torch.bfloat16, {}, {}),
        "wide-mixtral": (T.MixtralForCausalLM, T.MixtralConfig(
            **wide, intermediate_size=768, num_local_experts=4, num_experts_per_tok=4, rms_norm_eps=1e-5,
            sliding_window=None), torch.bfloat16, {}, {}),
        "wide-gpt2": (T.GPT2LMHeadModel, T.GPT2Config(vocab_size=1003, n_positions=1024, n_embd=256, n_layer=4, n_head=4,
                      bos_token_id=1, eos_token_id=2), torch.float32, {}, {}),
    }
    short = (1, 5, 17, 40)
    for name, (cls, cfg, dtype, edit, kw) in todo.items():
        if name not in names if names else name.startswith("wide-"):
            continue
        torch.manual_seed(zlib.crc32(name.encode()))
        path = os.path.join(out, name)
        save(cls(cfg), path, edit, dtype, **kw)
        with open(os.path.join(out, name + ".json"), "w") as f:
            json.dump(references(opened(path), *([short] if name in ("gpu-qwen3-moe", "gpu-mixtral", "gpu-deepseek-v2") else [])), f)
        print(name, sorted(os.listdir(path)), sum(os.path.getsize(os.path.join(path, x)) for x in os.listdir(path)))
        print("  config", json.load(open(os.path.join(path, "config.json"))))
        rows = json.load(open(os.path.join(out, name + ".json")))
        print("  smallest gaps", [min(r["greedy_top2_gap"]) for r in rows])
    for name, like, scheme in (("tiny-fp8-blocks", "tiny-deepseek-v3", "blocks"), ("tiny-fp8-tensor", "tiny-qwen3-yarn", "tensor"),
                               ("tiny-fp8-channel", "tiny-qwen3", "channel")):
        if names and name not in names:
            continue
        fp8(out, name, like, scheme)


# Kept in 16 bits by those who publish fp8 checkpoints: everything that is no matrix of a layer, and routers.
def is_fp8(name, w):
    return w.dim() == 2 and ".layers." in name and "norm" not in name and not name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))


def fp8(out, name, like, scheme):
    """A checkpoint of fp8 weights, made of another one, and the reference outputs of their f32 values: activations are
    not rounded to fp8."""
    src, path = os.path.join(out, like), os.path.join(out, name)
    shutil.copytree(src, path)
    tensors, values = {}, {}
    for f in sorted(os.listdir(src)):
        if f.endswith(".safetensors"):
            tensors |= safetensors.torch.load_file(os.path.join(src, f))
            os.remove(os.path.join(path, f))
        if f.endswith(".index.json"):
            os.remove(os.path.join(path, f))
    for n, w in list(tensors.items()):
        if not is_fp8(n, w):
            continue
        w, (rows, cols) = w.float(), w.shape
        block = {"blocks": (128, 128), "tensor": (rows, cols), "channel": (1, cols)}[scheme]
        padded = torch.zeros(-(-rows // block[0]) * block[0], -(-cols // block[1]) * block[1])
        padded[:rows, :cols] = w
        tiles = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
        scale = tiles.abs().amax((1, 3)).clamp(min=1e-12) / 448.0
        if scheme == "channel":
            scale = scale.bfloat16().float()
        q = (tiles / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        back = (q.float() * scale[:, None, :, None]).reshape(padded.shape)[:rows, :cols]
        tensors[n] = q.reshape(padded.shape)[:rows, :cols].contiguous()
        values[n] = back.contiguous()
        base = n[:-len(".weight")]
        if scheme == "blocks":
            tensors[base + ".weight_scale_inv"] = scale.contiguous()
        elif scheme == "tensor":
            tensors[base + ".weight_scale"] = scale.reshape(())
            tensors[base + ".input_scale"] = torch.tensor(1.0)
        else:
            tensors[base + ".weight_scale"] = scale.bfloat16().contiguous()
    safetensors.torch.save_file(tensors, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    plain = os.path.join(out, ".plain")
    shutil.copytree(src, plain)
    for f in os.listdir(plain):
        if "safetensors" in f:
            os.remove(os.path.join(plain, f))
    safetensors.torch.save_file({n: values.get(n, t).float() for n, t in tensors.items() if "_scale" not in n},
                                os.path.join(plain, "model.safetensors"), metadata={"format": "pt"})
    rows = references(opened(plain))
    shutil.rmtree(plain)
    with open(os.path.join(out, name + ".json"), "w") as f:
        json.dump(rows, f)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
    quant = {"blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                        "weight_block_size": [128, 128], "modules_to_not_convert": None},
             "tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
             "channel": {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*block_sparse_moe.gate$"],
                         "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {
                             "num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}}},
                         "kv_cache_scheme": None, "quantization_status": "compressed"}}[scheme]
    config = os.path.join(path, "config.json")
    c = json.load(open(config))
    c["quantization_config"] = quant
    with open(config, "w") as f:
        json.dump(c, f, indent=1)
    print(name, "smallest gaps", [min(r["greedy_top2_gap"]) for r in rows])


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
    if len(sys.argv) > 2:
        return checkpoints(out, sys.argv[2:])
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

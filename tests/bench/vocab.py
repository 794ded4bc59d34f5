#!/usr/bin/python3
"""Trains a tokenizer of the size and shape of Llama 3's, for benchmarks of structured output.

Byte-level BPE of 128,256 tokens: 256 bytes, merges in the order of the most frequent pair, and 256
special tokens; Llama 3's pre-tokenizer (digits by three, words with the space before them). No such
vocabulary is available as a file here, so it is trained when it is needed, on texts that Debian
installs: documents, translations in about a hundred languages, sources in Python and C, JSON. JSON
files and their compact and indented spellings weigh more, because a real vocabulary has many pieces
like `":"`, `{"` and `",`. The result depends on the packages of the machine; the tool prints its
length distribution. About two minutes.

Usage: vocab.py DIR [--size N] [--megabytes N]    writes DIR/tokenizer.json
"""
import argparse
import collections
import gzip
import heapq
import json
import os
import random
import re
import struct
import sys

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# The same for Python's re, which has no properties: marks and unknown letters count as letters.
L, N = r"[^\W\d_]", r"\d"
WORDS = re.compile(rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:(?![\r\n])(?:[\W_]))?{L}+|{N}{{1,3}}"
                   r"| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>",
           "</think>"]


def alphabet():
    """GPT-2's character for each byte."""
    keep = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    table, extra = {b: chr(b) for b in keep}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def translations(path):
    """The texts of a .mo file."""
    with open(path, "rb") as f:
        data = f.read()
    if len(data) < 28 or struct.unpack("<I", data[:4])[0] != 0x950412de:
        return ""
    n, _, at = struct.unpack("<III", data[8:20])
    parts = [data[o:o + size] for size, o in struct.iter_unpack("<II", data[at:at + 8 * n])]
    return b"\n".join(parts[1:]).decode("utf-8", "ignore")


def read(path):
    try:
        if path.endswith(".mo"):
            return translations(path)
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            return f.read(400_000).decode("utf-8", "ignore")
    except (OSError, EOFError, struct.error):
        return ""


def json_spellings(text):
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return "\n".join([json.dumps(value), json.dumps(value, separators=(",", ":")),
                      json.dumps(value, indent=2, ensure_ascii=False)])


def corpus(megabytes):
    """Texts, with a share of the megabytes for each kind of file."""
    kinds = [(25, "/usr/share/locale", (".mo",)),
             (25, "/usr/share/doc", (".gz", ".txt", ".md", "copyright")),
             (15, "/usr/lib/python3", (".py",)),
             (5, "/usr/include", (".h",)),
             (5, "/usr/share/perl", (".pm", ".pod")),
             (25, "/usr", (".json",))]
    rng = random.Random(1)
    for share, folder, ends in kinds:
        paths = sorted(os.path.join(d, f) for d, _, files in os.walk(folder) for f in files
                       if f.endswith(ends))
        rng.shuffle(paths)
        left = megabytes * 1_000_000 * share // 100
        for path in paths:
            text = read(path)
            if path.endswith(".json"):
                text = json_spellings(text)
            text = text[:left]
            left -= len(text)
            yield text
            if left <= 0:
                break


def count_words(megabytes, most):
    counts = collections.Counter()
    for text in corpus(megabytes):
        counts.update(w for w in WORDS.findall(text) if len(w) <= 64)
    return counts.most_common(most)


def train(words, merges):
    """BPE over [(word, count)]: the merges as pairs of bytes."""
    symbols = [[bytes([b]) for b in w.encode()] for w, _ in words]
    weights = [c for _, c in words]
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for i, word in enumerate(symbols):
        for pair in zip(word, word[1:]):
            pairs[pair] += weights[i]
            where[pair].add(i)
    heap = [(-c, p) for p, c in pairs.items()]
    heapq.heapify(heap)
    out, known = [], {bytes([b]) for b in range(256)}
    while heap and len(out) < merges:
        c, pair = heapq.heappop(heap)
        if pairs[pair] != -c:  # outdated
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
            continue
        joined, changed = pair[0] + pair[1], set()
        if joined not in known:  # the same text may come from two pairs
            known.add(joined)
            out.append(pair)
        for i in where.pop(pair):
            word, weight, new, k = symbols[i], weights[i], [], 0
            while k < len(word):
                if k + 1 < len(word) and word[k] == pair[0] and word[k + 1] == pair[1]:
                    new.append(joined)
                    k += 2
                else:
                    new.append(word[k])
                    k += 1
            if len(new) == len(word):
                continue
            for p in zip(word, word[1:]):
                pairs[p] -= weight
            for p in zip(new, new[1:]):
                if p[0] is joined or p[1] is joined:
                    where[p].add(i)
                    changed.add(p)
                pairs[p] += weight
            symbols[i] = new
        pairs.pop(pair, None)
        for p in changed:
            heapq.heappush(heap, (-pairs[p], p))
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("dir")
    ap.add_argument("--size", type=int, default=128_256)
    ap.add_argument("--megabytes", type=int, default=60)
    a = ap.parse_args()
    merges = train(count_words(a.megabytes, 500_000), a.size - 512)
    table = alphabet()
    spell = lambda b: "".join(table[x] for x in b)  # noqa: E731
    tokens = [bytes([b]) for b in range(256)] + [x + y for x, y in merges]
    specials = SPECIAL + [f"<|reserved_special_token_{i}|>" for i in range(256 - len(SPECIAL))]
    added = [{"id": len(tokens) + i, "content": s, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": True}
             for i, s in enumerate(specials)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "ignore_merges": True, "vocab": {spell(t): i for i, t in enumerate(tokens)},
             "merges": [[spell(x), spell(y)] for x, y in merges]}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
             "normalizer": None,
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
             "post_processor": None,
             "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                         "use_regex": True},
             "model": model}
    os.makedirs(a.dir, exist_ok=True)
    with open(os.path.join(a.dir, "tokenizer.json"), "w", encoding="utf-8") as f:
        json.dump(whole, f, ensure_ascii=False)
    lengths = collections.Counter(min(len(t), 17) for t in tokens)
    print(f"{len(tokens) + len(added)} tokens; with a leading space "
          f"{sum(t[:1] == b' ' for t in tokens)}, not ASCII {sum(max(t) > 127 for t in tokens)}, "
          f"with a quote {sum(b'%c' % 34 in t for t in tokens)}")
    print("length " + ", ".join(f"{k}{'+' if k == 17 else ''}: {lengths[k]}" for k in sorted(lengths)))
    return 0 if len(tokens) + len(added) == a.size else "vocab.py: there was too little text"


if __name__ == "__main__":
    sys.exit(main())

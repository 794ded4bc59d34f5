"""Traces of requests for baton-bench serve: Mooncake's JSONL (timestamp ms, input_length, output_length, hash_ids of
512 tokens, equal for equal prefixes) and Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens; nothing is shared).

A prompt is made of its blocks: each block's text, or token ids, is drawn from the block's hash, so that two prompts
are alike exactly as far as the trace says.
"""
import csv
import datetime
import itertools
import json
import math
import random
import re
import sys

BLOCK = 512  # tokens of a hash id
SPAN_MAX_MS = 1e12  # thirty years
# Date, time, fraction of a second (seven digits in Azure's), offset from UTC (in those of 2024).
TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")

NUMBER = re.compile(r"[0-9.eE+-]+")
COLUMNS = ("timestamp", "context", "generated")  # as their names begin
NEITHER = ("neither TIMESTAMP,ContextTokens,GeneratedTokens of an Azure trace, as in 2023-11-16 18:15:46.68,374,44, nor a "
           "JSON object of a Mooncake trace")
TOKENS_MAX = 100_000_000
LINE_MAX = 16 << 20


class Bad(Exception):
    """Says file, line, what is wrong there and what to do."""


class Request:
    def __init__(self, at_ms, input_tokens, output_tokens, blocks):
        self.at_ms, self.input, self.output, self.blocks = at_ms, input_tokens, output_tokens, blocks


def whole(value, low, name):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or \
            value != int(value) or not low <= value <= TOKENS_MAX:
        raise ValueError(f"{name} is {value!r}, not a whole number from {low} to {TOKENS_MAX:,}")
    return int(value)


def hash_id(value):
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ValueError(f"a hash id is {value!r}, not a whole number below 2^64")
    return value


def read_json_line(line):
    d = json.loads(line)
    if not isinstance(d, dict):
        raise ValueError("not an object")
    missing = [k for k in ("timestamp", "input_length", "output_length", "hash_ids") if k not in d]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if isinstance(d["timestamp"], bool) or not isinstance(d["timestamp"], (int, float)) or math.isnan(d["timestamp"]):
        raise ValueError("timestamp is not a number of milliseconds")
    n, ids = whole(d["input_length"], 1, "input_length"), d["hash_ids"]
    if not isinstance(ids, list) or len(ids) != -(-n // BLOCK):
        raise ValueError(f"hash_ids has not one id for each {BLOCK} tokens of input_length")
    return Request(float(d["timestamp"]), n, whole(d["output_length"], 0, "output_length"),
                   [hash_id(h) for h in ids])


def csv_number(text, name):
    if not NUMBER.fullmatch(text):
        raise ValueError(f"{name} is '{text}', no number")
    return float(text)


class Rows:
    """Lines of CSV, their columns as a header says, without one as Azure's."""

    def __init__(self):
        self.columns, self.n = (0, 1, 2), 3

    def read_header(self, fields):
        found = [[i for i, f in enumerate(fields) if f.lower().startswith(name)] for name in COLUMNS]
        if not all(found):
            raise ValueError("its columns are not TIMESTAMP, ContextTokens, GeneratedTokens and others; rename them")
        self.columns = tuple(f[0] for f in found)
        self.n = len(fields)

    def read(self, line, number):
        """A request, or None: it was a header."""
        fields = [f.strip() for f in next(csv.reader([line], skipinitialspace=True, strict=True))]
        if any(f.lower().startswith(COLUMNS[0]) for f in fields):
            return self.read_header(fields)
        time, n, out = (fields[i] for i in self.columns) if len(fields) == self.n else ("", "", "")
        m = TIME.fullmatch(time)
        if m is None:
            raise ValueError(NEITHER)
        zone = "+00:00" if m[4] in (None, "Z") else m[4]
        at = (datetime.datetime.fromisoformat(f"{m[1]}T{m[2]}{zone}").timestamp() + float(m[3] or 0)) * 1e3
        n, out = whole(csv_number(n, "ContextTokens"), 1, "ContextTokens"), whole(csv_number(out, "GeneratedTokens"), 0, "GeneratedTokens")
        return Request(at, n, out, [(number << 32) + k for k in range(-(-n // BLOCK))])


def lines_of(f, path):
    """(number, line); none is longer than 16 MiB: a device has no end of a line."""
    for number in itertools.count(1):
        line = f.readline(LINE_MAX + 1)
        if len(line) > LINE_MAX:
            raise Bad(f"{path}:{number}: a line is longer than 16 MiB, so this is not text")
        if not line:
            return
        yield number, line


def load(path):
    """All requests, by time from 0 on. Raises Bad."""
    out = []
    rows = Rows()
    try:
        f = open(sys.stdin.fileno() if path == "-" else path, encoding="utf-8-sig", errors="replace", newline="\n",
                 closefd=path != "-")
    except OSError as e:
        raise Bad(f"{path}: {e.strerror}; give a Mooncake .jsonl or an Azure .csv trace") from None
    with f:
        for number, line in lines_of(f, path):
            if number == 1 and line.startswith("\x1f"):
                raise Bad(f"{path}:1: it is compressed; gunzip it")
            line = line.strip()
            if not line:
                continue
            try:
                if "\0" in line:
                    raise ValueError("it contains a zero byte, so it is not text; was the file cut off?")
                q = read_json_line(line) if line.startswith("{") else rows.read(line, number)
                if q is None:
                    continue
                if out and q.at_ms < out[-1].at_ms:
                    raise ValueError("its time is before the line above; sort the trace by time")
                if not math.isfinite(q.at_ms) or q.at_ms - (out or [q])[0].at_ms > SPAN_MAX_MS:
                    raise ValueError("its time is more than thirty years behind the first line's; timestamp is in "
                                     "milliseconds")
            except (ValueError, OverflowError, RecursionError, csv.Error) as e:
                what = "not JSON" if isinstance(e, (json.JSONDecodeError, RecursionError)) else NEITHER if isinstance(e, csv.Error) else e
                raise Bad(f"{path}:{number}: {what}") from None
            out.append(q)
    if not out:
        raise Bad(f"{path}: no requests in it")
    first = out[0].at_ms
    for q in out:
        q.at_ms -= first
    return out


def shared_tokens(requests):
    """Of all prompt tokens those in full blocks that an earlier prompt had as its prefix: what a cache can find."""
    seen, shared = set(), 0
    for q in requests:
        for k, h in enumerate(q.blocks[:q.input // BLOCK]):
            if h not in seen:
                break
            shared += BLOCK
        seen.update(q.blocks[:q.input // BLOCK])
    return shared


class Prompts:
    """Prompts of a trace's requests. scale: tokens of a prompt for each of the trace's. ids: (low, high) of the token
    ids that prompts are sent as, or None: words, of which each takes per_word tokens; fixed ones stand before them."""

    def __init__(self, scale, seed, ids, words):
        self.block, self.scale, self.seed, self.ids, self.words = max(1, round(BLOCK * scale)), scale, seed, ids, words
        self.per_word, self.fixed = 1.0, 0.0

    def tokens(self, q):
        return max(1, min(round(q.input * self.scale), self.block * len(q.blocks)))

    def output(self, q, scale):
        return max(1, round(q.output * scale))

    def piece(self, h, n):
        """The first n of a block's ids or words."""
        r = random.Random(self.seed << 64 | h)
        return r.choices(range(*self.ids) if self.ids else self.words, k=n)

    def of(self, q):
        out, left = [], self.tokens(q) - (0 if self.ids else self.fixed)
        per = self.block if self.ids else max(1, round(self.block / self.per_word))
        left = left if self.ids else max(1, round(left / self.per_word))
        for h in q.blocks:
            out += self.piece(h, per)[:max(0, int(left) - len(out))]
        return out if self.ids else " ".join(out)

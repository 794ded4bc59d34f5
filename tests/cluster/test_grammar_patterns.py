"""Patterns of JSON schemas against node's RegExp with the u flag: random patterns and texts, each text in a random spelling
of its JSON string. BATON_TEST_PATTERNS=N tries N patterns, BATON_TEST_SEED another seed."""
import json
import os
import random
import subprocess
import sys

from conftest import BUILD, ROOT

sys.path.insert(0, os.path.join(ROOT, "tests", "bench"))
import grammar  # noqa: E402

PATTERNS = int(os.environ.get("BATON_TEST_PATTERNS", "400"))
SEED = int(os.environ.get("BATON_TEST_SEED", "1"))
TOKENIZER = os.path.join(ROOT, "deploy", "models", "shakespeare-llama-6m", "tokenizer.json")
LETTERS = ["a", "b", "c", "-", ",", "A", "1", "_", "\u00e4"]
CLASSES = ["[ab]", "[^a]", r"\w", r"\d", ".", "[a-c-]", r"\W", r"[^\w]", r"\s", r"[\s\S]", r"\p{Lu}", r"\u{61}", r"\-"]
NODE = """
const lines = require('fs').readFileSync(0, 'utf8').trim().split('\\n').map(JSON.parse);
for (const [pattern, texts] of lines) {
  let re = null;
  try { re = new RegExp(pattern, 'u'); } catch (e) { }
  console.log(JSON.stringify(re && texts.map(t => re.test(t))));
}
"""


class Patterns:
    def __init__(self, rng):
        self.rng = rng

    def some(self, n):
        return self.rng.randrange(n)

    def atom(self, depth, in_look):
        kind = self.some(12)
        if kind < 5 or depth == 0:
            return self.rng.choice(LETTERS).replace("-", r"\-")
        if kind < 7 or (kind == 11 and self.some(3)):
            return self.rng.choice(CLASSES)
        if kind < 10:
            return self.rng.choice(["(?:", "(", "(?<n>" if not in_look and depth == 3 else "("]) + self.alt(depth - 1, in_look) + ")"
        if kind == 10:
            return self.rng.choice(["^", "$", r"\b", r"\B"])
        return self.rng.choice(["(?=", "(?!", "(?<=", "(?<!"][:2 if in_look else 4]) + self.alt(depth - 1, True) + ")"

    def term(self, depth, in_look):
        a = self.atom(depth, in_look)
        if a in ("^", "$", r"\b", r"\B") or a.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            return f"(?:{a})" + self.rng.choice(["*", "?", "{1,2}"]) if self.some(8) == 0 else a
        return a + self.rng.choice(["*", "+", "?", "{1,2}", "{2,}", "*?", "", "", "", "", ""])

    def alt(self, depth, in_look=False):
        parts = ["".join(self.term(depth, in_look) for _ in range(1 + self.some(4)))]
        while self.some(3) == 0:
            parts.append("".join(self.term(depth, in_look) for _ in range(1 + self.some(3))))
        return "|".join(parts)

    def guarded(self):
        """Characters, each guarded by a look-ahead: ((?!X)C)*Y."""
        look = lambda: "".join(self.rng.choice(["a", "b", "[ab]", r"\-"]) for _ in range(1 + self.some(3)))  # noqa: E731
        return (f"^{self.rng.choice(['', 'a', 'b?'])}(?:(?!{look()}){self.rng.choice(['.', '[ab]', '[a-]'])})"
                f"{self.rng.choice('*+')}{self.rng.choice(['', 'x', r'(?:ab|-)?'])}{look()}$")

    def whole(self):
        if self.some(6) == 0:
            return self.guarded()
        return ("^" if self.some(4) == 0 else "") + self.alt(3) + ("$" if self.some(4) == 0 else "")

    def text(self):
        letters = LETTERS + [" ", "\n", '"', "\\", "\u00e9", "x"]
        return "".join(self.rng.choice(letters[:4] if self.some(2) else letters) for _ in range(self.some(7)))

    def spelled(self, text):
        out = ""
        for c in text:
            out += f"\\u{ord(c):04x}" if self.some(5) == 0 else json.dumps(c, ensure_ascii=bool(self.some(2)))[1:-1]
        return f'"{out}"'


def test_random_patterns():
    rng = random.Random(SEED)
    make = Patterns(rng)
    cases = [(make.whole(), [make.text() for _ in range(20)] + [""]) for _ in range(PATTERNS)]
    node = subprocess.run(["node", "-e", NODE], input="\n".join(map(json.dumps, cases)), stdout=subprocess.PIPE, check=True, text=True)
    os.environ["BUILD"] = BUILD
    helper = grammar.Helper(TOKENIZER)
    done, seen = 0, [0, 0]
    for (pattern, texts), line in zip(cases, node.stdout.splitlines(), strict=True):
        expected = json.loads(line)
        if expected is None:  # no pattern to node
            continue
        answer = helper.ask(grammar.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern}), map(make.spelled, texts))
        if answer["status"] in ("ERR_UNSUPPORTED", "ERR_EXHAUSTED"):
            continue
        assert answer["status"] == "OK" or not any(expected), (pattern, answer["error"])
        done += 1
        for text, want, got in zip(texts, expected, answer["docs"]):
            assert got["ok"] == want, (pattern, text, want, got)
            seen[want] += 1
    assert helper.close() == 0
    print(f"{done} of {PATTERNS} patterns; texts that do not match, and that do: {seen}")
    assert done > PATTERNS / 4 and min(seen) > PATTERNS, seen

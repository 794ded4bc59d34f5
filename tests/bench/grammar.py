"""baton-bench grammar: structured output against schemas with tests, as MaskBench has them.

Each file of the folder (and of those below it) is {"schema": ..., "tests": [{"valid": bool, "data": ...}, ...]}.
The schema is compiled, and each data, spelled as json.dumps does, is forced through it token by token: a mask for
each token and for the end. Valid data must pass, invalid ones must not; a schema that is refused has not passed. Times
are CPU times of one thread: of a mask with the token's acceptance, and of a compilation.
"""
import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile

JSON_SCHEMA = 1  # enum bt_grammar_kind
SPELLINGS = {"default": {}, "compact": {"separators": (",", ":")}, "indent": {"indent": 2}, "utf8": {"ensure_ascii": False}}
SLOW_US = 5000  # of a mask that --verbose names
HERE = os.path.dirname(os.path.realpath(__file__))


class Helper:
    """The C program that compiles and matches; one job at a time."""

    def __init__(self, tokenizer):
        folder = tokenizer
        if not os.path.isdir(tokenizer):
            if not os.path.isfile(tokenizer):
                sys.exit(f"baton-bench: {tokenizer}: no such file")
            self.folder = tempfile.TemporaryDirectory()  # the library wants a model's folder
            folder = self.folder.name
            os.symlink(os.path.abspath(tokenizer), os.path.join(folder, "tokenizer.json"))
        build = os.environ.get("BUILD", "build")
        paths = [os.path.join(HERE, "baton-bench-grammar"),  # installed
                 os.path.join(HERE, "..", "..", build, "bin", "baton-bench-grammar")]
        path = next((p for p in paths if os.access(p, os.X_OK)), None)
        if path is None:
            sys.exit("baton-bench: there is no baton-bench-grammar; run make")
        self.p = subprocess.Popen([path, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, kind, text, docs=(), walks=0, walk_tokens=60, seed=1):
        job = {"kind": kind, "text": text, "docs": list(docs), "walks": walks, "walk_tokens": walk_tokens, "seed": seed}
        try:
            self.p.stdin.write(json.dumps(job) + "\n")
            self.p.stdin.flush()
            line = self.p.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"baton-bench: baton-bench-grammar ended with status {self.p.wait()}, at: {text[:80]}")
        return json.loads(line)

    def close(self):
        self.p.stdin.close()
        return self.p.wait()


def percentile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def docs_of(case, spellings):
    return [json.dumps(t["data"], **SPELLINGS[s]) for t in case.get("tests", []) for s in spellings]


def judge(helper, case, spellings):
    """What is wrong with a schema: (reasons, valid data refused, invalid data accepted), and the helper's answer."""
    tests, docs = case.get("tests", []), docs_of(case, spellings)
    answer = helper.ask(JSON_SCHEMA, json.dumps(case["schema"]), docs)
    if answer["status"] != "OK":
        return [f"{answer['status']}: {answer['error']}"], 0, 0, answer
    reasons, refused, accepted = [], 0, 0
    for i, test in enumerate(tests):
        results = answer["docs"][i * len(spellings):(i + 1) * len(spellings)]
        bad = [(r, d) for r, d in zip(results, docs[i * len(spellings):]) if r["ok"] != bool(test["valid"])]
        if not bad:
            continue
        r, doc = bad[0]
        what = test.get("description", f"test {i}")
        if test["valid"]:
            refused += 1
            at = len(doc.encode()[:r["at"]].decode(errors="ignore"))
            reasons.append(f"valid data refused ({what}): {r['why']} at byte {r['at']}: "
                           f"{doc[max(0, at - 60):at]}<HERE>{doc[at:at + 40]}")
        else:
            accepted += 1
            reasons.append(f"invalid data accepted ({what}): {doc[:300]}")
    return reasons, refused, accepted, answer


def main(args):
    ap = argparse.ArgumentParser(prog="baton-bench grammar", description=__doc__.split("\n")[0])
    ap.add_argument("--tokenizer", required=True, metavar="FILE", help="a model's tokenizer.json")
    ap.add_argument("--schemas", required=True, metavar="DIR", help="files {schema, tests: [{valid, data}]}")
    ap.add_argument("--limit", type=int, metavar="N", help="only the first N schemas")
    ap.add_argument("--spelling", choices=[*SPELLINGS, "all"], default="default",
                    help="of the data: default (json.dumps), compact, indent (by 2), utf8 (not ASCII only), all")
    ap.add_argument("--verbose", action="store_true", help="each wrong schema with its reasons, and masks of over 5 ms")
    a = ap.parse_args(args)
    paths = sorted(p for p in glob.glob(os.path.join(a.schemas, "**", "*.json"), recursive=True) if os.path.isfile(p))
    paths = paths[:a.limit]
    if not paths:
        sys.exit(f"baton-bench: {a.schemas}: there is no .json file in it")
    spellings = list(SPELLINGS) if a.spelling == "all" else [a.spelling]
    helper = Helper(a.tokenizer)
    passed = refused = accepted = unsupported = 0
    masks, compiles = [], []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            try:
                case = json.load(f)
                case["schema"]
            except (ValueError, KeyError, TypeError) as e:
                sys.exit(f"baton-bench: {path}: no object with a schema: {e}")
        reasons, r, i, answer = judge(helper, case, spellings)
        passed += not reasons
        refused += r
        accepted += i
        unsupported += answer["status"] != "OK"
        masks += answer["masks"]
        compiles.append(answer["compile_us"])
        if a.verbose and reasons:
            print(f"{os.path.relpath(path, a.schemas)}: {'; '.join(reasons)}")
        slow = max(answer["docs"], key=lambda d: d["slowest_us"], default=None)
        if a.verbose and slow and slow["slowest_us"] > SLOW_US:
            doc = docs_of(case, spellings)[answer["docs"].index(slow)].encode()
            at = slow["slowest"]
            print(f"{os.path.relpath(path, a.schemas)}: a mask took {slow['slowest_us']:.0f} us at byte {at}: "
                  f"{doc[max(0, at - 60):at].decode(errors='replace')}<HERE>{doc[at:at + 40].decode(errors='replace')}")
    if helper.close() != 0:
        sys.exit("baton-bench: bench_grammar failed at its end")
    n = len(paths)
    print(f"bench,grammar_schemas,{n},schemas,refused {unsupported},{unsupported / n:.4f}")
    print(f"bench,grammar_passed,{passed},schemas,target 85 %,{passed / n / 0.85:.3f}")
    print(f"bench,grammar_invalid_accepted,{accepted},documents,target 0,{accepted}")
    print(f"bench,grammar_valid_refused,{refused},documents,target 0,{refused}")
    mean = sum(masks) / max(1, len(masks))
    for name, v, target in (("mean", mean, 50), ("p50", percentile(masks, 0.5), None), ("p99", percentile(masks, 0.99), 500),
                            ("max", max(masks, default=0), None)):
        print(f"bench,grammar_mask_{name},{v:.1f},us,{f'target {target},{v / target:.3f}' if target else f'{len(masks)} masks,-'}")
    for name, q, target in (("p50", 0.5, 1000), ("p99", 0.99, 20000), ("max", 1, 100_000)):
        v = percentile(compiles, q)
        print(f"bench,grammar_compile_{name},{v:.0f},us,target {target},{v / target:.3f}")
    return 0

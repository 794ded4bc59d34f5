#!/usr/bin/python3
"""Tokens per second with drafts (worker.speculate: suffix) against none, of the same requests on the same worker, which
take turns. CPU engine: real text of the 6M model, text of one token, in which every draft is right, and drafts of the 1M model;
drafts of the MTP layer of a model of 63 M that was made so that most of them are right (needs numpy). Null engine, with
the time of a step given: an edited document (BATON_NULL_EDIT: one token of 12 is another than in the prompt), and a text
in which half of what seems to repeat does not. Arguments: rounds (5), tokens of an answer (200), cases (cpu_text,
cpu_all_right, cpu_draft, cpu_mtp, edit, misleading; all), streams (1, 4, 16, 64).

Of the CPU engine the CPU time of the worker is compared: it does not depend on what else the machine does."""
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from local_cluster import ROOT, Cluster  # noqa: E402

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
TOKENS = int(sys.argv[2]) if len(sys.argv) > 2 else 200
CASES = sys.argv[3].split(",") if len(sys.argv) > 3 else ["cpu_text", "cpu_all_right", "cpu_draft", "cpu_mtp", "edit", "misleading"]
STREAMS = [int(n) for n in sys.argv[4].split(",")] if len(sys.argv) > 4 else [1, 4, 16, 64]
NULL = "--set", "decode.engine.device=null"
H200_8B = "5000,25"  # us of a step, and of each of its tokens: a Llama-3-8B on an H200


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(c, bodies):
    """(wall, CPU of the decode worker) in seconds for all bodies at once."""
    pid = c.daemon("decode")["pid"]
    ts = [threading.Thread(target=c.post, args=("/v1/completions", b)) for b in bodies]
    cpu, start = cpu_s(pid), time.monotonic()
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    return time.monotonic() - start, cpu_s(pid) - cpu


def compare(c, name, make, batch, by_cpu):
    times = {"off": [], "auto": []}
    tokens = TOKENS if batch < 64 or not by_cpu else TOKENS // 2
    for i in range(ROUNDS + 1):
        run(c, [dict(make(i, k), max_tokens=1) for k in range(batch)])  # the prompts are cached from here on
        for kind in ("off", "auto") if i % 2 else ("auto", "off"):
            took = run(c, [dict(make(i, k), max_tokens=tokens, ignore_eos=True, speculation=kind) for k in range(batch)])
            if i > 0:  # the first round learns
                times[kind].append(took[by_cpu])
    off, on = (statistics.median(times[k]) for k in ("off", "auto"))
    if by_cpu:
        off, on = sum(times["off"]), sum(times["auto"])
    n = batch * tokens * (ROUNDS if by_cpu else 1)
    unit = "tokens per CPU second" if by_cpu else "tokens/s"
    print(f"{name}, {batch} streams: {n / off:.0f} without drafts, {n / on:.0f} with them ({unit})", flush=True)
    return f"bench,speculate_{name}_{batch},{n / on:.0f},{unit},no drafts,{off / on:.3f}"


def accepted(c):
    m = c.metrics("decode")
    tried, good = (sum(v for k, v in m.items() if k.startswith(f"vllm:spec_decode_num_{w}_tokens_total"))
                   for w in ("draft", "accepted"))
    print(f"  {good:.0f} of {tried:.0f} drafts accepted", flush=True)


def mtp_model(path):
    """Options of a cluster with the model that is written to path."""
    subprocess.run([sys.executable, os.path.join(ROOT, "tests", "tools", "make_mtp_reference.py"), path, "large"], check=True)
    model = os.path.join(path, "large-mtp")
    shutil.copy(os.path.join(ROOT, "tests", "golden", "tokenizers", "deepseek", "tokenizer.json"), model)
    return "--model", model, "--set", "all.model.mtp=true", "--set", "decode.worker.speculate=mtp"


def main():
    with open(os.path.join(ROOT, "deploy", "local", "demo-prompt.txt")) as f:
        text = f.read()
    lines = []
    one = ("--nodes", "1", "--prefill", "0", "--decode", "1", "--set", "decode.engine.threads=1")

    def document(i, k):
        return {"prompt": f"{i} {k}\n" + text[700 * (k % 5):][:1200], "temperature": 0.8, "seed": 64 * i + k}

    def short(i, k):  # the small model follows short texts best
        return {"prompt": ("ROMEO:\n", "JULIET:\n", "First Citizen:\n", "KING HENRY V:\n")[i % 4], "temperature": 0, "seed": k}

    def repeated(i, k):
        return dict(document(i, k), logit_bias={"300": 100}, temperature=0)

    def ids(i, k):
        return {"prompt": [3 + (7919 * (64 * i + k) + 31 * j * j) % 690 for j in range(60)], "temperature": 0}

    os.environ.pop("BATON_NULL_EDIT", None)
    draft = "--set", "decode.worker.speculate=" + os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m")
    for name, by_cpu, make, environ in (
            ("cpu_text", True, document, None), ("cpu_all_right", True, repeated, None), ("cpu_draft", True, short, None),
            ("cpu_mtp", True, ids, None),
            ("edit", False, document, {"BATON_NULL_PACE": H200_8B, "BATON_NULL_EDIT": "12"}),
            ("misleading", False, document, {"BATON_NULL_PACE": "1000,500", "BATON_NULL_EDIT": "2"})):
        if name not in CASES:
            continue
        os.environ.update(environ or {})
        made = tempfile.TemporaryDirectory()
        more = NULL if environ else draft if name == "cpu_draft" else mtp_model(made.name) if name == "cpu_mtp" else ()
        c = Cluster(*one, *more)
        try:
            for batch in STREAMS:
                lines.append(compare(c, name, make, batch, by_cpu))
            accepted(c)
        finally:
            c.stop()
            made.cleanup()
    print("\n".join(lines))


main()

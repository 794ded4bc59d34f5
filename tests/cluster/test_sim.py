"""baton-sim as its user meets it: options, files, and its figures against a plain computation from its own CSV."""
import csv
import gzip
import json
import math
import os
import re
import subprocess
import xml.etree.ElementTree

import pytest

from conftest import BUILD, ROOT

SIM = os.path.join(BUILD, "bin", "baton-sim")
SMALL = os.path.join(ROOT, "tests", "sim", "small.jsonl")


def sim(*args, timeout=120):
    p = subprocess.run([SIM, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, timeout=timeout)
    return p.returncode, p.stdout.decode(), p.stderr.decode()


@pytest.mark.parametrize("args, says", [
    ((), "baton-sim run --cluster"),
    (("walk",), "the first argument is run, plan, cache, size, clusters or help"),
    (("run",), "--trace FILE is missing"),
    (("run", "--trace", SMALL), "--cluster is missing"),
    (("run", "--polcy", "lru", "--trace", SMALL), "there is no option '--polcy'"),
    (("run", "--trace"), "--trace needs a value"),
    (("run", "--trace", SMALL, "more"), "'more' is not an option"),
    # What a command has no use for is not passed over in silence.
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--gpus", "4"), "--gpus is not an option of run"),
    (("plan", "--config", "h200-8b", "--trace", SMALL, "--gpus", "4", "--policy", "lru"), "--policy is not an option of plan"),
    (("plan", "--config", "h200-8b", "--trace", SMALL, "--gpus", "4", "--set", "layers=3"), "--set is not an option of plan"),
    (("cache", "--trace", SMALL, "--blocks", "500", "--rate", "2"), "--rate is not an option of cache"),
    # A number that would be rounded to another meaning.
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--ttft", "0.5"), "--ttft: '0.5' is not a whole number"),
    (("plan", "--config", "h200-8b", "--trace", SMALL, "--gpus", "2.5"), "--gpus: '2.5' is not a whole number"),
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--rate", "nan"), "--rate: 'nan' is not a number from 0.001"),
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--set", "cache_tokens=100"), "less than a block"),
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--fail", "p1@10m"), "--fail 'p1@10m' is not NODE@S or NODE@S+S"),
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--fail", "p1@10+"), "--fail 'p1@10+' is not NODE@S or NODE@S+S"),
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--fail", "p4294967297@5"), "--fail 'p4294967297@5' is not NODE@S"),
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--fail", "p9@10"), "--fail 'p9@10': the cluster has p1 to p8"),
    (("run", "--cluster", "h200-8b", "--trace", SMALL, "--fail", "p1@10+5s"), "--fail 'p1@10+5s' is not NODE@S or NODE@S+S"),
])
def test_usage_errors(args, says):
    rc, out, err = sim(*args)
    assert rc == 2 and says in err and not out, (rc, out, err)


@pytest.mark.parametrize("command", ["run", "plan", "cache"])
def test_help_wherever_it_is_asked_for(command):
    rc, out, err = sim(command, "--help")
    assert rc == 0 and not err and f"baton-sim {command}" in out


def percentile(values, p):
    return sorted(values)[math.ceil(len(values) * p / 100) - 1]


@pytest.mark.parametrize("requests", [1, 2, 7, 1000000])
def test_figures_are_those_of_the_csv(requests, tmp_path):
    part = tmp_path / "part.jsonl"
    with open(SMALL) as f:
        part.write_text("".join(f.readlines()[:requests]))
    rc, out, err = sim("run", "--cluster", "h200-8b", "--set", "prefill_nodes=2", "--trace", part, "--ttft", 600,
                       "--tbt", 6, "--csv", tmp_path / "o.csv", "--plot", tmp_path / "plots")
    assert rc == 0, err
    with open(tmp_path / "o.csv") as f:
        rows = list(csv.DictReader(f))
    served = [r for r in rows if r["outcome"] == "served"]
    for name, column in (("TTFT", "ttft_ms"), ("TBT", "tbt_ms")):
        line = re.search(rf"^{name} +mean (\S+)  p50 (\S+)  p90 (\S+)  p99 (\S+)  max (\S+) ms", out, re.M)
        v = [float(r[column]) for r in served if name == "TTFT" or float(r[column]) > 0]
        want = [sum(v) / len(v), percentile(v, 50), percentile(v, 90), percentile(v, 99), max(v)]
        assert [float(x) for x in line.groups()] == pytest.approx(want, abs=0.0051), name
    good = sum(float(r["ttft_ms"]) <= 600 and float(r["tbt_ms"]) <= 6 for r in served)
    assert re.search(r"goodput +(\d+) within", out).group(1) == str(good)
    for name in ("ttft", "tbt", "load", "replicas"):
        xml.etree.ElementTree.parse(tmp_path / "plots" / f"{name}.svg")


def line(at, n, blocks):
    return json.dumps({"timestamp": at, "input_length": n, "output_length": 5, "hash_ids": blocks}) + "\n"


def test_a_long_and_sparse_trace_is_no_burden(tmp_path):
    """Ids are names and a series has so many points, whatever the numbers: a second and some MiB, not hours and GiB."""
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(line(i * 1e9, 1024, [0, 1 << 60 | i % 3]) for i in range(100)))
    rc, out, err = sim("run", "--cluster", "h200-8b", "--rate", 0.001, "--trace", trace, "--plot", tmp_path / "p")
    assert rc == 0 and "served 100" in out, err
    with open(tmp_path / "p" / "series.csv") as f:
        assert sum(1 for _ in f) <= 100002


def test_a_short_trace_has_a_series(tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text(line(0, 4096, list(range(8))))
    rc, out, err = sim("run", "--cluster", "h200-8b", "--trace", trace, "--plot", tmp_path / "p")
    assert rc == 0 and "goodput        1 within the objectives; no" in out, out + err
    for name in ("ttft", "tbt"):  # one request alone: a line upwards, and no dot that nobody sees
        svg = (tmp_path / "p" / f"{name}.svg").read_text()
        assert len(re.search("points='([^']*)'", svg).group(1).split()) == 2
    trace.write_text("".join(line(i * 100, 4096, list(range(8 * i, 8 * i + 8))) for i in range(20)))
    assert sim("run", "--cluster", "h200-8b", "--trace", trace, "--plot", tmp_path / "p")[0] == 0
    with open(tmp_path / "p" / "series.csv") as f:
        assert sum(float(r["decode_load"]) > 0 for r in csv.DictReader(f)) >= 10


def test_what_cannot_be_written(tmp_path):
    """Said before the work, where that can be known; what is not whole is not left; and never a success."""
    run = ("run", "--cluster", "h200-8b", "--trace", SMALL)
    file = tmp_path / "file"
    file.write_text("")
    for what, says in ((("--csv", tmp_path / "none" / "o.csv"), "none/o.csv: No such file"),
                       (("--csv", tmp_path), "Is a directory"), (("--csv", ""), "'': No such file"),
                       (("--plot", file), "Not a directory"), (("--plot", tmp_path / "none" / "p"), "none/p: No such file")):
        rc, out, err = sim(*run, *what)
        assert rc == 1 and says in err and "simulated" not in err and not out, (what, out, err)
    for command in (run, ("plan", "--config", "h200-8b", "--gpus", 2, "--trace", SMALL), ("cache", "--blocks", 9, "--trace", SMALL)):
        rc, out, err = sim(*command, "--plot", file)
        assert rc == 1 and "Not a directory" in err and not out, (command, out, err)
    rc, _, err = sim(*run, "--plot", tmp_path / "new", "--policy", "none")
    assert rc == 2 and not (tmp_path / "new").exists()
    rc, _, err = sim(*run, "--csv", "/dev/full")
    assert rc == 1 and "/dev/full: No space left" in err
    for args in ((*run, "--csv", "-"), (*run, "--brief"), ("clusters",), ("help",)):
        with open("/dev/full", "wb") as full:
            p = subprocess.run([SIM, *map(str, args)], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=120)
        # the second message where all was written before the end, and only an earlier write failed
        assert p.returncode == 1 and re.search(b"standard output: (No space left|.* is the disk full)", p.stderr), (args, p)
    # A limit on files' sizes is as good as a full disk.
    limit = f"ulimit -f 1; trap '' XFSZ; exec {SIM} run --cluster h200-8b --trace {SMALL} "
    for what in (f"--csv {tmp_path}/o.csv", f"--plot {tmp_path}/p"):
        p = subprocess.run(["bash", "-c", limit + what], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, timeout=120)
        assert p.returncode == 1 and b"File too large" in p.stderr, p
    assert not (tmp_path / "o.csv").exists()
    for f in (tmp_path / "p").glob("*.svg"):
        xml.etree.ElementTree.parse(f)


def test_csv_on_standard_output_is_csv_alone():
    for brief in ((), ("--brief",)):
        rc, out, err = sim("run", "--cluster", "h200-8b", "--trace", SMALL, "--csv", "-", *brief)
        assert rc == 0 and out.startswith("request,") and "ttft" in err.lower()


def test_a_cache_table_is_whole_and_has_numbers(tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text(line(0, 600, [1, 2]) + line(1, 2000, [1, 3, 4, 5]))
    rc, out, err = sim("cache", "--trace", trace, "--blocks", "9,3")
    assert rc == 2 and "--blocks 3: the longest request of the trace has 4 blocks" in err and not out, (out, err)
    trace.write_text(line(0, 100, [1]))  # not one full block
    rc, out, err = sim("cache", "--trace", trace, "--blocks", 9, "--replay", "request")
    assert rc == 0 and "nan" not in out and len(list(csv.DictReader(out.splitlines()))) == 5, out + err


def test_a_trace_from_a_pipe(tmp_path):
    args = ("run", "--cluster", "h200-8b", "--csv", "-", "--trace")
    with open(SMALL, "rb") as f:
        p = subprocess.run([SIM, *args, "-"], stdin=f, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    assert p.returncode == 0 and p.stdout.decode() == sim(*args, SMALL)[1]


def test_what_no_text_is(tmp_path):
    """A device has no last line: it is not read until the memory is full."""
    for args, where in ((("--cluster", "h200-8b", "--trace", "/dev/zero"), "/dev/zero:1: "),
                        (("--cluster", "/dev/zero", "--trace", SMALL), "/dev/zero:1: ")):
        rc, out, err = sim("run", *args)
        assert rc == 2 and where + "a line is longer than 16 MiB" in err and not out, err
    trace = tmp_path / "t.jsonl"
    trace.write_text(line(0, 600, [1, 2]) + "\0" + line(1, 600, [1, 2]))
    rc, out, err = sim("run", "--cluster", "h200-8b", "--trace", trace)
    assert rc == 2 and ":2: it contains a zero byte" in err and not out, err


def test_what_no_trace_is(tmp_path):
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(line(0, 600, [1, 2]).encode()))
    for path, says in ((packed, ":1: it is compressed; gunzip it"), (tmp_path, "Is a directory"),
                       (tmp_path / "none", "No such file"), ("/dev/null", "no requests in it")):
        rc, out, err = sim("cache", "--trace", path, "--blocks", 10)
        assert rc == 2 and says in err and not out, (path, err)


@pytest.mark.parametrize("options, says, not_says", [
    ((SMALL, "--gpus", 16, "--ttft", 1000, "--tbt", 50), "answer         disaggregate: ", "inf"),
    # Where there is nothing to compare, that is the answer.
    ((SMALL, "--gpus", 2, "--ttft", 1, "--tbt", 1), "answer         none: even at the lowest rate", "how sure"),
    ((SMALL, "--gpus", 20, "--ttft", 600000, "--tbt", 1000), "answer         unknown: with and without a split, the instances carry more than",
     "little difference"),
    ((SMALL, "--gpus", 2, "--ttft", 600000, "--tbt", 15), "but            at that rate the whole trace comes within", "inf"),
])
def test_a_plan_says_what_it_cannot_tell(options, says, not_says):
    rc, out, err = sim("plan", "--config", "h200-8b", "--trace", *options)
    assert rc == 0 and says in out and not_says not in out, out + err


def test_a_plan_looks_beside_the_best_split(tmp_path):
    """With many instances not every split is tried, but those next to the answer are."""
    rc, out, err = sim("plan", "--config", "h200-8b", "--trace", SMALL, "--gpus", 20, "--rate", 40, "--ttft", 1000, "--tbt", 50)
    assert rc == 0, err
    tried = {(int(p), bool(m)): float(x) for p, m, x in re.findall(r"^(\d+):\d+( mixed)? +([\d.]+)/s", out, re.M)}
    assert tried, out
    for mixed in (False, True):
        best = max((x, p) for (p, m), x in tried.items() if m == mixed)[1]
        assert {(best - 1, mixed), (best + 1, mixed)} <= set(tried) | {(0, mixed), (20, mixed)}, out


def test_a_plan_says_what_the_model_cannot_hold():
    rc, out, err = sim("plan", "--config", os.path.join(ROOT, "tests", "golden", "models", "tiny-qwen2"), "--trace", SMALL,
                       "--gpus", 2)
    assert rc == 0 and re.search(r"^but +\d+ of the \d+ requests are longer than the model's \d+ tokens", out, re.M), out + err


@pytest.mark.parametrize("model, window", [("tiny-mistral", True), ("tiny-llama31", False)])
def test_a_plan_says_that_it_knows_no_window(model, window):
    rc, out, err = sim("plan", "--config", os.path.join(ROOT, "tests", "golden", "models", model), "--trace", SMALL, "--gpus", 2)
    assert rc == 0 and ("a token of this model attends to 48 tokens, and this plan assumes all before it" in out) == window, out + err


def test_what_cannot_be_planned(tmp_path):
    at_once = tmp_path / "t.jsonl"
    at_once.write_text(line(5, 600, [1, 2]))
    for options, says in (((SMALL, "--gpus", 1), "--gpus: 1 make 1 instance of 1; at least two"),
                          ((at_once, "--gpus", 4), "all its requests come at the same time"),
                          ((SMALL, "--gpus", 4, "--tbt", 0), "a plan needs both objectives"),
                          ((SMALL, "--gpus", 1000000), "1000000 make 1000000 instances; at most 10000"),
                          ((SMALL, "--gpus", 4, "--gpu", "h100"), "--gpu: 'h100' is of no use with --config h200-8b")):
        rc, out, err = sim("plan", "--config", "h200-8b", "--trace", *options)
        assert rc == 2 and says in err and not out, out + err


def test_sizes_of_models():
    rc, out, err = sim("size", "deploy/shapes/DeepSeek-V3/", "deploy/shapes/GPT-2")
    assert rc == 0 and err == ""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in out.splitlines()]
    assert rows[2][:7] == ["DeepSeek-V3", "671 B", "37 B", "1342 GB", "673 GB", "70272", "40016"]
    assert rows[2][7:10] == ["–; –"] * 3  # neither fits eight GPUs of 80 GB
    assert rows[2][10].startswith("–; ") and rows[2][10].endswith(" M")
    assert rows[3][:2] == ["GPT-2", "0.12 B"]
    rc, out, err = sim("size", "deploy/nothing")
    assert rc == 1 and "deploy/nothing/config.json: No such file" in err
    rc, out, err = sim("size")
    assert rc == 2 and "name one or more model directories" in err


def test_a_plan_says_how_large(tmp_path):
    """Ten conversations of many turns: a slab that holds them saves most of each prompt, a small one less, and the list of slabs
    ends where a larger one would save no more."""
    trace = tmp_path / "turns.jsonl"
    with open(trace, "w") as f:
        for turn in range(30):
            for who in range(10):
                ids = [who * 1000 + k for k in range(4 * (turn + 1))]
                print(json.dumps({"timestamp": turn * 20000 + who * 1500, "input_length": 512 * len(ids), "output_length": 50,
                                  "hash_ids": ids}), file=f)
    rc, out, err = sim("plan", "--config", os.path.join(ROOT, "deploy/shapes/Llama-3.1-8B"), "--trace", trace, "--gpus", 3, "--ttft", 5000,
                       "--tbt", 100)
    assert (rc, err) == (0, ""), err
    slabs = [(float(g), float(s)) for g, s in re.findall(r"^ +(\d+) GiB +([\d.]+) %$", out, re.M)]
    most = float(re.search(r"no limit +([\d.]+) %", out)[1])
    assert len(slabs) >= 3 and [s for _, s in slabs] == sorted(s for _, s in slabs)
    assert slabs[-1][1] >= 0.95 * most > slabs[-2][1] and most > 80
    assert re.search(r"^workers +\d+ instances carry", out, re.M) and re.search(r"^engine.mem +\d+ GiB a GPU", out, re.M)
    assert float(re.search(r"^ssd .*: ([\d.]+) %$", out, re.M)[1]) > slabs[0][1]

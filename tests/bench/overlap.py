#!/usr/bin/python3
"""A prefix on an SSD about as slow as computing, in a whole cluster on this machine: time to first token when it is computed,
when it is waited for (or, if that would be slower, computed: what the kvstore does with kvstore.overlap off), and when its
end is loaded while its beginning is computed.

The model has random weights of a 124M-parameter Llama's shape, one thread computes. The disk is slowed down to shares of
the speed of computing: tests/cluster/slow_disk.py.

    tests/bench/overlap.py [PROMPTS]      (of each kind, default 4. BUILD: the build directory)
"""
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(HERE, "..", "cluster"))
import prefix  # noqa: E402
import slow_disk  # noqa: E402
from conftest import scrape, wait_for  # noqa: E402
from restarts import Restarts  # noqa: E402

TOKENS, TOKEN_BYTES = 1536, 12 * 2 * 4 * 64 * 2
RATIOS = (0.5, 1, 2, 4)  # time of loading by that of computing, as fast as it was seen


def start(model, folder):
    return Restarts("--nodes", "1", "--model", model, "--load-format", "dummy", "--set", "prefill.engine.threads=1",
                    "--set", "decode.engine.threads=1", "--set", "kvstore.kvstore.slab_bytes=1GiB",
                    "--set", f"kvstore.kvstore.ssd.path={folder}/ssd", "--set", "kvstore.kvstore.ssd.bytes=1GiB",
                    "--set", "kvstore.kvstore.ssd.write_policy=always", "--set", "kvstore.kvstore.ssd.backlog=8192",
                    "--set", "kvstore.kvstore.ssd.load_ms=1800ms", "--set", "conductor.sched.policy=cache-aware")


class Bench:
    def __init__(self, folder, prompts):
        self.folder = folder
        self.r = start(prefix.make_model(folder), folder)
        self.lib = slow_disk.build(folder)
        self.m = self.r.members("kvstore")[0]
        self.plain = self.r.args["kvstore", self.m["name"]]
        rng = random.Random(2)
        self.prompts = [prefix.ids(rng, TOKENS) for _ in range(prompts + 2)]

    def restart(self, bytes_per_s, overlap):
        """An empty slab over a disk of that speed."""
        argv, env, cwd = self.plain
        self.r.args["kvstore", self.m["name"]] = (
            [*argv, "--set", f"kvstore.overlap={'true' if overlap else 'false'}"],
            slow_disk.environment(env, self.lib, bytes_per_s), cwd)
        os.kill(self.m["pid"], signal.SIGTERM)
        for p in self.r.children:
            if p.pid == self.m["pid"]:
                p.wait(30)
        wait_for(lambda: not os.path.exists(f"/proc/{self.m['pid']}"), 30, "it ends")
        self.m = self.r.start_again(self.m)
        wait_for(lambda: scrape(self.m["http"])["baton_kvstore_workers"] >= 2, 20, "its workers are back")

    def ask(self, first=0):
        """[(ms until the first token, tokens cached)] of the prompts from `first` on."""
        return [prefix.first_token(self.r, p) for p in self.prompts[first:]]

    def written(self):
        for p in self.prompts:  # few blocks may wait at once: the rest go at the next use
            wait_for(lambda: scrape(self.m["http"])["baton_ssd_backlog"] == 0, 60, "all is written")
            prefix.first_token(self.r, p)
        wait_for(lambda: scrape(self.m["http"])["baton_ssd_backlog"] == 0, 60, "all is written")


def median(times):
    return statistics.median(t for t, _ in times)


def main():
    prompts = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    folder = tempfile.mkdtemp(prefix="baton-overlap-")
    b, lines = None, []
    try:
        b = Bench(folder, prompts)
        b.ask()  # what the engine allocates and what the conductor learns, once
        rng = random.Random(3)
        computed = min(prefix.first_token(b.r, prefix.ids(rng, TOKENS))[0] for _ in range(prompts))
        b.written()
        print(f"computed: {computed:.0f} ms for {TOKENS} tokens, {TOKENS * TOKEN_BYTES / 1e6:.1f} MB of KV", flush=True)
        lines.append(f"bench,overlap_ttft_computed,{computed:.0f},ms,-,-")
        for ratio in RATIOS:
            speed = TOKENS * TOKEN_BYTES / (computed / 1e3 * ratio)
            ms, anew = {}, []
            for overlap in (False, True):
                b.restart(speed, overlap)
                b.ask(first=len(b.prompts) - 2)  # the disk's speed is measured
                got = []
                for p in b.prompts[:-2]:  # by turns with computing: what else runs on the machine meets both
                    got.append(prefix.first_token(b.r, p))
                    anew.append(prefix.first_token(b.r, prefix.ids(rng, TOKENS)))
                ms[overlap] = median(got)
                print(f"disk {speed / 1e6:.1f} MB/s, overlap {'on' if overlap else 'off'}: {ms[overlap]:.0f} ms, "
                      f"cached {[c for _, c in got]}; computed beside it {median(anew[-prompts:]):.0f} ms", flush=True)
            best = min(ms[False], median(anew))
            lines.append(f"bench,overlap_ttft_at_{ratio},{ms[True]:.0f},ms,without overlap {ms[False]:.0f} computed {median(anew):.0f},"
                         f"{ms[True] / best:.2f}")
    finally:
        if b is not None:
            b.r.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(lines))


main()

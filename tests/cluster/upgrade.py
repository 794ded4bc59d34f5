#!/usr/bin/python3
"""make check-upgrade: a cluster of the previous release is upgraded daemon by daemon under streams, and back.

usage: upgrade.py PREVIOUS_BIN   (BUILD/bin has the new programs)

Two nodes with a prefill and a decode worker each. Every answer must be the one that the old cluster gave, to the last
token, whichever of the two releases its daemons have. Workers first, then kvstores, then the conductor, as
docs/UPGRADING.md says; then one worker of each kind goes back to the previous release. The conductor's own restart ends
its streams, so none runs then."""
import os
import signal
import subprocess
import sys
import threading

from conftest import BUILD, wait_for
from restarts import Restarts
from test_pins import start_conductor_again

NEW = os.path.join(BUILD, "bin")
PROMPTS = ["ROMEO:\n", "JULIET:\nO gentle", "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 12]


class Streams:
    """Four threads that ask for long greedy answers and compare them, token by token, with the first ones."""

    def __init__(self, c):
        self.c, self.ending, self.done, self.wrong = c, False, 0, []
        self.expected = {p: self.answer(p) for p in PROMPTS}
        self.threads = []

    def answer(self, prompt):
        body = {"prompt": prompt, "max_tokens": 160, "temperature": 0, "ignore_eos": True}
        return "".join(e["choices"][0]["text"] for e in self.c.stream("/v1/completions", body) if e != "[DONE]")

    def run(self, i):
        while not self.ending:
            prompt = PROMPTS[i % len(PROMPTS)]
            try:
                got = self.answer(prompt)
            except Exception as e:  # pylint: disable=broad-except
                got = repr(e)
            if got != self.expected[prompt]:
                self.wrong.append((prompt[:20], got))
            self.done += 1
            i += 1

    def start(self):
        self.ending = False
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(4)]
        for t in self.threads:
            t.start()

    def stop(self):
        self.ending = True
        for t in self.threads:
            t.join()


def releases(r):
    return sorted(m["version"] for m in r.members())


def change(r, m, folder):
    """Ends a member as systemd does and starts the program of `folder` in its place."""
    key = m["kind"], m["name"]
    argv, env, cwd = r.args[key]
    r.args[key] = [os.path.join(folder, os.path.basename(argv[0])), *argv[1:]], env, cwd
    os.kill(m["pid"], signal.SIGTERM)
    wait_for(lambda: not os.path.exists(f"/proc/{m['pid']}") or ended(m["pid"]), 60, f"the end of {m['name']}")
    (start_conductor_again if m["kind"] == "conductor" else type(r).start_again)(r, m)
    print(f"upgrade: {m['kind']} {m['name']} is of {folder}; the cluster has {releases(r)}", flush=True)


def ended(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rsplit(")", 1)[1].split()[0] == "Z"


def version(folder):
    return subprocess.run([os.path.join(folder, "baton-kvstore"), "--version"], stdout=subprocess.PIPE, check=True,
                          text=True).stdout.split(" ", 1)[1].strip()


def main(old):
    print(f"upgrade: {version(old)} to {version(NEW)}", flush=True)
    r = Restarts("--nodes", "2", "--prefill", "2", "--decode", "2", bin=old)
    try:
        s = Streams(r.c)
        s.start()
        for kind in ("prefill", "decode", "kvstore"):
            for m in r.members(kind):
                before = s.done
                change(r, m, NEW)
                wait_for(lambda n=before: s.done >= n + 8, 120, "answers of the mixed cluster")
        s.stop()
        replans = r.c.metrics("conductor").get("baton_requests_replanned_total", 0)
        change(r, r.members("conductor")[0], NEW)
        s.start()
        for kind in ("prefill", "decode"):  # back again
            change(r, r.members(kind)[0], old)
            before = s.done
            wait_for(lambda n=before: s.done >= n + 8, 120, "answers after the way back")
        s.stop()
        print(f"upgrade: {s.done} answers, {len(s.wrong)} wrong; {replans:.0f} plans made again before the conductor changed")
        for w in s.wrong[:5]:
            print("upgrade: wrong:", w)
        return 1 if s.wrong else 0
    finally:
        r.stop()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(os.path.abspath(sys.argv[1])))

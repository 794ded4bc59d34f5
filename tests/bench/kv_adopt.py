#!/usr/bin/python3
"""How long a kvstore takes over the slab of one that was killed: headers, after which it serves, then the
bytes of every block, after which all can be found again (tests/tools/adopt_bench.c).

    tests/bench/kv_adopt.py [BLOCKS]      (4 KiB each, in /dev/shm)
"""
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOL = os.path.join(ROOT, os.environ.get("BUILD", "build"), "tests", "tools", "adopt_bench")
TARGET = 1_000_000  # headers a minute


def main():
    blocks = sys.argv[1] if len(sys.argv) > 1 else "1000000"
    best = {}
    for _ in range(3):
        out = subprocess.run([TOOL, blocks], check=True, stdout=subprocess.PIPE, text=True).stdout
        for what, n, seconds in (line.split() for line in out.splitlines()):
            print(f"{what}: {n} blocks in {seconds} s", flush=True)
            best[what] = max(best.get(what, 0), int(n) / max(1e-3, float(seconds)) * 60)
    for what, rate in best.items():
        print(f"bench,kv_adopt_{what},{rate:.0f},blocks/min,target of {TARGET},{rate / TARGET:.1f}")


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/python3
"""10,000 bits turned over in each of: the slab (blocks, header records, CRCs; then state words), the SSD's
slots and its index (tests/unit/test_flips.c), and flows between kvstores (tests/cluster/wire_flips.py).
Anything wrong that is served ends the run.

    tests/bench/kv_flips.py [BITS] [SEED]      (BUILD: the build directory)
"""
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
sys.path.insert(0, os.path.join(ROOT, "tests", "cluster"))
import wire_flips  # noqa: E402


def main():
    bits = int(sys.argv[1]) if len(sys.argv) > 1 else 10000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    p = subprocess.run([os.path.join(BUILD, "tests", "unit", "test_flips"), str(bits)],
                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    print(p.stdout)
    if p.returncode != 0:
        return 1
    lines = []
    for what, n in re.findall(r"^(slab|ssd slots|ssd index): (\d+) bits", p.stdout, re.M):
        lines.append(f"bench,kv_flips_{what.replace(' ', '_')},{n},bits,served wrong 0,0")
    for name, opts in (("eager", wire_flips.SMALL), ("rendezvous", wire_flips.LARGE)):
        for what, n in (("payload", bits // 2), ("header", bits // 50)):
            flips, failed, crc = wire_flips.run(opts, what, n, seed)
            print(f"wire {name} {what}: {flips} bits, {failed} flows failed, {crc:.0f} wrong CRCs", flush=True)
            lines.append(f"bench,kv_flips_wire_{name}_{what},{flips},bits,noticed {failed} served wrong 0,0")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Allocations and writes that fail, in each daemon: it goes on, or it ends and says why; answers stay right, and all
recovers. These are some; tests/fuzz/nth.py does every n."""
import pytest

import sanitizer
from nth_rounds import Nth

pytestmark = pytest.mark.skipif(bool(sanitizer.KIND), reason="a sanitizer has an allocator of its own")

SERVING = [("conductor", "memory", 1, False), ("conductor", "memory", 2000, False), ("conductor", "memory", 300, True),
           ("kvstore", "memory", 40, False), ("kvstore", "memory", 200, True), ("kvstore", "disk", 1, False),
           ("kvstore", "disk", 9, True), ("kvstore", "disk", 30, False), ("prefill", "memory", 90, False),
           ("decode", "memory", 700, True)]
STARTING = [("conductor", "memory", 188), ("conductor", "memory", 9000), ("kvstore", "memory", 187), ("kvstore", "memory", 5000),
            ("kvstore", "disk", 4), ("prefill", "memory", 35), ("decode", "memory", 188)]


def test_nth_fails():
    run = Nth()
    try:
        results = [run.trial(*t, seconds=20) for t in SERVING] + [run.start_trial(*t, on) for t, on in zip(STARTING, [False, True] * 4)]
        run.adopted()
        assert results.count("unreached") < len(results) / 3, results
        assert "ended" in results and "went on" in results, results
    finally:
        run.stop()

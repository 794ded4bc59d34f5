"""A daemon that is killed and started again on its machine: it has its name back at once, not when its lease has run out."""
import os
import time

from conftest import wait_for
from restarts import Restarts


def log(r, name):
    with open(os.path.join(r.c.state_dir, "logs", name + ".log"), errors="replace") as f:
        return f.read()


def test_a_killed_daemon_takes_its_name_over():
    r = Restarts("--nodes", "1")
    try:
        text = r.c.complete("To be", max_tokens=4)["choices"]
        for kind in ("kvstore", "prefill", "decode"):
            old = r.kill(kind, "n1")
            t0 = time.monotonic()
            new = r.start_again(old)
            print(f"{kind}: back after {time.monotonic() - t0:.2f} s")
            assert new["incarnation"] != old["incarnation"]
            said = log(r, old["name"])
            assert "ev=member_name_taken_over" in said, said[-2000:]
            assert "wait_ms=" not in said, said[-2000:]
        wait_for(lambda: len([m for m in r.members() if m["session_up"]]) >= 3, 20, "all are met again")
        assert r.c.complete("To be", max_tokens=4)["choices"] == text
    finally:
        r.stop()

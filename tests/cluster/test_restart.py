"""A daemon that is killed and started again on its machine: it has its name back at once, not when its lease has run out."""
import os
import subprocess
import time

from conftest import CTL, wait_for
from restarts import Restarts
from sanitizer import PATIENCE


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
        wait_for(lambda: len([m for m in r.members() if m["session_up"]]) >= 3, 30, "all are met again")
        assert r.c.complete("To be", max_tokens=4)["choices"] == text
    finally:
        r.stop()


def test_another_served_name_is_told():
    """A daemon with another model.served_name serves; an operator finds it in log, status and metrics."""
    r = Restarts("--nodes", "1")
    try:
        assert r.total("baton_members_misnamed") == 0
        argv, env, cwd = r.args["decode", r.members("decode")[0]["name"]]
        r.args["decode", r.members("decode")[0]["name"]] = [*argv, "--set", "model.served_name=Shop"], env, cwd
        m = r.start_again(r.kill("decode", "n1"))
        assert m["model"] == "Shop" != r.c.model
        assert r.total("baton_members_misnamed") == 1
        said = [x for x in log(r, "conductor").splitlines() if "ev=served_name_differs" in x]
        assert len(said) == 1 and f"served_name=Shop ours={r.c.model} remedy=" in said[0], said
        assert r.c.complete("To be", max_tokens=4)["usage"]["completion_tokens"] == 4
        status = r.ctl("status")["misnamed"]
        assert [(x["kind"], x["model"]) for x in status] == [("decode", "Shop")]
        p = subprocess.run([CTL, "--addr", r.addr, "status"], stdout=subprocess.PIPE, text=True, timeout=60 * PATIENCE, check=True)
        assert "1 member has another name for the model; give all the same model.served_name" in p.stdout
        assert f"decode {m['name']} on n1: Shop" in p.stdout
    finally:
        r.stop()

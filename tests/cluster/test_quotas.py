"""Quotas through real daemons: the flood of one tenant leaves another's cached prefix where it is, in shared memory and
on the SSD, through a kill -9 as well; and what nobody wants may be borrowed."""
import os
import random
import signal
import subprocess

import pytest

from conftest import CTL, wait_for
from restarts import Restarts

BLOCK, PROMPT = 16, 250  # tokens
WHOLE = PROMPT // BLOCK * BLOCK
KEYS = {"acme": "key-of-acme", "globex": "key-of-globex", "other": "key-of-somebody"}


def ids(seed):
    rng = random.Random(seed)
    return [rng.randrange(10, 1900) for _ in range(PROMPT)]


class Pool:
    def __init__(self, tmp_path, *more):
        keys = tmp_path / "keys"
        keys.write_text("".join(f"{KEYS[t]} tenant={t} scopes=inference,metrics,admin\n" for t in ("acme", "globex")) +
                        KEYS["other"] + "\n")
        keys.chmod(0o600)
        self.r = Restarts("--nodes", "1", "--set", "kvstore.kvstore.slab_bytes=4MiB", "--set",
                          "kvstore.kvstore.eviction=lru", "--set",  # without quotas a flood takes everything
                          f"all.kv.block_tokens={BLOCK}", "--set", "prefill.engine.mem=8MiB", "--set",
                          "decode.engine.mem=8MiB", "--set", f"conductor.conductor.api_keys_file={keys}", "--set",
                          "kvstore.kvstore.quota.tenants=acme=0.4,globex=0.4,*=0.2", *more, api_key=KEYS["acme"])
        self.c = self.r.c
        self.floods = 0
        m = self.metrics()
        self.slots = int(sum(v for k, v in m.items() if k.startswith("baton_pool_slots{")))

    def metrics(self):
        return self.c.metrics("kvstore")

    def has(self, tenant, tier="slab"):
        return self.metrics()[f'baton_pool_tenant_blocks{{tenant="{tenant}",tier="{tier}"}}']

    def ask(self, tenant, prompt):
        r = self.c.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0},
                        headers={"Authorization": "Bearer " + KEYS[tenant]})
        return r["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)

    def flood(self, tenant, slots):
        self.floods += 1
        for i in range(int(slots / (PROMPT // BLOCK)) + 1):
            self.ask(tenant, ids(f"flood {self.floods} {i}"))
            # What a request still holds cannot make room: on a busy machine its successor would take others' share.
            wait_for(lambda: self.metrics()["baton_kvstore_grants"] == self.metrics()["baton_pool_leases"] == 0, 30, "it is given back",
                     every_s=0.005)


@pytest.fixture
def make(tmp_path):
    made = []

    def one(*more):
        made.append(Pool(tmp_path, *more))
        return made[-1]

    yield one
    for p in made:
        p.r.stop()




def test_a_flood_leaves_what_others_have(make, tmp_path):
    p = make()
    mine = ids("of acme")
    p.ask("acme", mine)
    p.flood("globex", 3 * p.slots)  # nobody else wants the room: more than its share ...
    assert p.has("globex") > 0.45 * p.slots
    assert p.ask("acme", mine) == WHOLE
    p.flood("other", 3 * p.slots)  # ... which goes first when others come
    assert p.ask("acme", mine) == WHOLE
    assert p.has("globex") >= 0.4 * p.slots - 1
    m = p.metrics()
    assert m['baton_pool_tenant_quota_blocks{tenant="acme",tier="slab"}'] == int(0.4 * p.slots)
    assert len([k for k in m if k.startswith("baton_pool_tenant_blocks")]) == 6  # two tenants, (others); two tiers
    assert p.has("(others)") > 0
    # Whose blocks they are outlives the kvstore.
    before = p.has("acme")
    p.r.start_again(p.r.kill("kvstore", "n1"))
    wait_for(lambda: p.has("acme") == before, 30, "its blocks are its own again")
    p.flood("globex", 2 * p.slots)
    assert p.ask("acme", mine) == WHOLE


def test_pins_know_tenants(make, tmp_path):
    p = make()
    mine = ids("pinned by acme")
    p.ask("acme", mine)
    (tmp_path / "tokens").write_text(" ".join(map(str, mine)))
    (tmp_path / "key").write_text(KEYS["acme"] + "\n")
    what = ("pin", "--tokens-file", str(tmp_path / "tokens"), "--ttl", "1h")
    pin = p.r.ctl(*what, "--tenant", "acme")
    assert p.r.ctl(*what, "--api-key-file", str(tmp_path / "key"))["id"] == pin["id"]
    assert pin["tenant"] == "acme"
    wait_for(lambda: p.metrics()['baton_pool_pinned_blocks{tier="slab"}'] == pin["blocks"], 30, "it is protected")
    (tmp_path / "key").write_text(KEYS["other"])  # without tenant= a key is a tenant of its own, and another cache
    other = p.r.ctl(*what, "--api-key-file", str(tmp_path / "key"))
    assert other["id"] != pin["id"] and len(other["tenant"]) == 32
    for bad in ((), ("--tenant", "nobody")):
        run = subprocess.run([CTL, "--addr", p.r.addr, *what, *bad], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=dict(os.environ, BATON_API_KEY=KEYS["acme"]))
        assert run.returncode == 1 and b"api_keys_file" in run.stderr, run


def test_on_the_ssd(make, tmp_path):
    p = make("--set", f"kvstore.kvstore.ssd.path={tmp_path / 'ssd'}", "--set", "kvstore.kvstore.ssd.bytes=8MiB", "--set",
             "kvstore.kvstore.ssd.write_policy=always")
    mine = ids("of acme")
    for _ in range(3):  # a busy disk takes at the next use what it has left out
        p.ask("acme", mine)
        wait_for(lambda: p.metrics()["baton_ssd_backlog"] == 0, 30, "the disk has taken what it was given")
    wait_for(lambda: p.has("acme", "ssd") >= WHOLE // BLOCK, 30, "all of it is on the SSD")
    gone = p.metrics()["baton_ssd_blocks_evicted_total"]
    while p.metrics()["baton_ssd_blocks_evicted_total"] - gone < 2 * p.metrics()["baton_ssd_slots"]:
        p.flood("globex", p.slots)
    assert p.has("acme", "ssd") >= WHOLE // BLOCK
    m = p.r.members("kvstore", "n1")[0]
    os.kill(m["pid"], signal.SIGTERM)  # the slab goes with it
    p.r.start_again(m)
    assert p.has("acme", "ssd") >= WHOLE // BLOCK
    assert p.ask("acme", mine) == WHOLE

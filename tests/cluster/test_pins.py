"""Pins through real daemons and a real etcd: a pinned prefix outlives a flood that evicts everything else, a kvstore and
a conductor that are killed; unpinned or expired it goes like any other."""
import json
import os
import random
import re
import signal
import subprocess
import time

import pytest

from conftest import CTL, PATIENCE, ROOT, wait_for
from restarts import Restarts, args_of
from wall_clock import WallClock

BLOCK, PROMPT = 16, 250  # tokens
WHOLE = PROMPT // BLOCK * BLOCK


def ids(seed, n=PROMPT):
    rng = random.Random(seed)
    return [rng.randrange(10, 1900) for _ in range(n)]


class Pool:
    def __init__(self, r):
        self.r, self.c = r, r.c
        m = self.c.metrics("kvstore")
        self.slots = int(sum(v for k, v in m.items() if k.startswith("baton_pool_slots{")))
        self.floods = 0

    def metric(self, name):
        return self.c.metrics("kvstore")[name]

    def cached(self, prompt, **more):
        r = self.c.post("/v1/completions", dict({"prompt": prompt, "max_tokens": 1, "temperature": 0}, **more))
        return r["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0), r["id"]

    def flood(self, slabs=2.0):
        """Other prompts, so many that the slab turns over."""
        self.floods += 1
        for i in range(int(slabs * self.slots / (PROMPT // BLOCK)) + 1):
            self.cached(ids(f"flood {self.floods} {i}"))

    def pin(self, *args):
        return self.r.ctl("pin", *args)

    def pins(self):
        return {p["id"]: p for p in self.r.ctl("pins")}

    def held(self, pin):
        """Blocks protected in the slab, as the kvstore has told the conductor."""
        p = self.pins().get(pin["id"])
        return p["at"][0]["slab_blocks"] if p and p["at"] else 0

    def unpin_all(self):
        for i in self.pins():
            self.r.ctl("unpin", i)


def tokens_file(tmp_path, tokens):
    path = tmp_path / f"{abs(hash(tuple(tokens)))}.txt"
    path.write_text(" ".join(map(str, tokens)))
    return str(path)


# lru: a flood of new prompts evicts whatever is not protected. Floods are most of the work: a small model does for them.
OPTIONS = ("--nodes", "1", "--model", os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m"),
           "--set", "kvstore.kvstore.slab_bytes=700KiB", "--set", "kvstore.kvstore.eviction=lru",
           "--set", f"all.kv.block_tokens={BLOCK}", "--set", "prefill.engine.mem=8MiB", "--set", "decode.engine.mem=8MiB")


@pytest.fixture(scope="module")
def running():
    r = Restarts(*OPTIONS)
    yield r
    r.stop()


@pytest.fixture
def pool(running):
    p = Pool(running)
    yield p
    p.unpin_all()


def test_a_pinned_prefix_outlives_a_flood_until_it_is_unpinned(pool, tmp_path):
    mine, other = ids("mine"), ids("other")
    pool.cached(mine)
    pool.cached(other)
    pin = pool.pin("--tokens-file", tokens_file(tmp_path, mine), "--ttl", "1h", "--label", "system prompt")
    assert (pin["blocks"], pin["tokens"], pin["renewed"]) == (WHOLE // BLOCK, PROMPT, False)
    wait_for(lambda: pool.held(pin) == WHOLE // BLOCK, 60, "all of it is protected")
    assert pool.metric('baton_pool_pinned_blocks{tier="slab"}') == WHOLE // BLOCK
    pool.flood()
    assert pool.cached(other)[0] == 0
    assert pool.cached(mine)[0] == WHOLE
    listed = pool.pins()[pin["id"]]
    assert listed["label"] == "system prompt" and 3500 < listed["seconds_left"] <= 3600
    again = pool.pin("--tokens-file", tokens_file(tmp_path, mine), "--ttl", "2h")  # the same prefix: the same pin
    assert again["id"] == pin["id"] and again["renewed"] is True
    wait_for(lambda: pool.pins()[pin["id"]]["seconds_left"] > 3600, 60, "it has its new time")
    pool.r.ctl("unpin", pin["id"])
    wait_for(lambda: pool.metric('baton_pool_pinned_blocks{tier="slab"}') == 0, 60, "nothing is protected")
    assert pool.pins() == {}
    pool.flood()
    assert pool.cached(mine)[0] == 0


def test_what_is_pinned_first_and_computed_later_is_protected_as_well(pool, tmp_path):
    mine = ids("later")
    pin = pool.pin("--tokens-file", tokens_file(tmp_path, mine), "--ttl", "1h")
    wait_for(lambda: pool.metric("baton_pool_pins") == 1, 60, "the kvstore knows of it")
    assert pool.held(pin) == 0
    pool.cached(mine)
    pool.flood()
    assert pool.cached(mine)[0] == WHOLE


def test_time_ends_a_pin(pool, tmp_path):
    mine = ids("short")
    pool.cached(mine)
    pool.pin("--tokens-file", tokens_file(tmp_path, mine), "--ttl", "1h")
    wait_for(lambda: pool.metric('baton_pool_pinned_blocks{tier="slab"}') == WHOLE // BLOCK, 60, "it is protected")
    pin = pool.pin("--tokens-file", tokens_file(tmp_path, mine), "--ttl", "2s")  # renewed: it has less time now
    wait_for(lambda: pool.metric('baton_pool_pinned_blocks{tier="slab"}') == 0, 60, "its time has ended it")
    assert pin["id"] not in pool.pins()
    pool.flood()
    assert pool.cached(mine)[0] == 0


def test_beyond_pin_max_the_older_pin_and_its_head_are_protected(pool, tmp_path):
    most = pool.slots // 4  # kvstore.pin_max
    first, second = ids("first", BLOCK * (most // 2)), ids("second", BLOCK * most)
    a = pool.pin("--tokens-file", tokens_file(tmp_path, first), "--ttl", "1h")
    b = pool.pin("--tokens-file", tokens_file(tmp_path, second), "--ttl", "1h")
    wait_for(lambda: pool.metric("baton_pool_pins") == 2, 60, "the kvstore knows of both")
    pool.cached(second + [5])  # the younger one first: it gives way
    pool.cached(first + [5])
    wait_for(lambda: pool.held(a) == most // 2, 60, "all of the older one")
    wait_for(lambda: pool.held(b) == most - most // 2, 60, "the rest for the younger one")
    assert pool.metric('baton_pool_pinned_blocks{tier="slab"}') == most
    assert pool.pins()[b["id"]]["at"][0]["slab_beyond"] == most // 2
    assert pool.metric('baton_pool_pin_beyond_blocks{tier="slab"}') == most // 2
    pool.flood()
    assert pool.cached(first + [5])[0] == BLOCK * (most // 2)
    assert pool.cached(second + [5])[0] == BLOCK * (most - most // 2)
    pool.r.ctl("unpin", a["id"])  # there is room: the younger one's tail, which is cached again, gets it
    wait_for(lambda: pool.held(b) == most, 60, "all of the younger one")


def test_prompts_chats_and_requests_can_be_named(pool, tmp_path):
    text = "What is past is prologue. " * 12
    _, request = pool.cached(text)
    by_text = pool.pin("--prompt", text, "--ttl", "1h")
    (tmp_path / "prompt.txt").write_text(text)
    assert pool.pin("--prompt-file", str(tmp_path / "prompt.txt"), "--ttl", "1h")["id"] == by_text["id"]
    assert pool.pin("--request", request, "--ttl", "1h")["id"] == by_text["id"]
    salted = pool.pin("--prompt", text, "--ttl", "1h", "--cache-salt", "mine")
    assert salted["id"] != by_text["id"]
    # A system prompt: whatever the users say next.
    system = [{"role": "system", "content": "You speak as the Chorus does. " * 12}]
    (tmp_path / "chat.json").write_text(json.dumps(system))
    chat = pool.pin("--chat-file", str(tmp_path / "chat.json"), "--ttl", "1h")
    (tmp_path / "body.json").write_text(json.dumps({"messages": system, "temperature": 0.5, "max_tokens": 9, "stream": True}))
    assert pool.pin("--chat-file", str(tmp_path / "body.json"), "--ttl", "1h")["id"] == chat["id"]

    def ask(content):
        r = pool.c.post("/v1/chat/completions", {"messages": system + [{"role": "user", "content": content}],
                                                 "max_tokens": 1, "temperature": 0})
        return r["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)

    ask("What news on the Rialto?")
    assert wait_for(lambda: pool.held(chat), 60, "its blocks are cached") == chat["blocks"] > 3
    pool.flood()
    assert ask("Who goes there?") >= chat["blocks"] * BLOCK


def ctl_fails(pool, *args):
    p = subprocess.run([CTL, "--addr", pool.r.addr, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                       timeout=20 * PATIENCE)
    assert p.stdout == b"" and p.returncode in (1, 2), p
    return p.returncode, p.stderr.decode()


def test_bad_pins(pool, tmp_path):
    def fails(*args):
        return ctl_fails(pool, "pin", *args)

    assert fails("--ttl", "1h")[0] == 2
    assert fails("--prompt", "a", "--request", "b", "--ttl", "1h")[0] == 2
    for ttl in ("1", "h", "-1h", "0s", "1w", "1h30"):
        assert "--ttl" in fails("--prompt", "a", "--ttl", ttl)[1]
    assert "less than one block" in fails("--prompt", "To be", "--ttl", "1h")[1]
    assert "366d" in fails("--prompt", "To be", "--ttl", "999d")[1]
    assert "cmpl-nobody" in fails("--request", "cmpl-nobody", "--ttl", "1h")[1]
    assert "no/such" in fails("--prompt-file", "no/such", "--ttl", "1h")[1]
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    assert "UTF-8" in fails("--prompt-file", str(tmp_path / "bad"), "--ttl", "1h")[1]
    (tmp_path / "bad").write_text("12 x")
    assert "'x'" in fails("--tokens-file", str(tmp_path / "bad"), "--ttl", "1h")[1]
    (tmp_path / "bad").write_text("99999999")
    assert "token ids of this model" in fails("--tokens-file", str(tmp_path / "bad"), "--ttl", "1h")[1]
    (tmp_path / "bad").write_text('{"no": "messages"}')
    assert "messages" in fails("--chat-file", str(tmp_path / "bad"), "--ttl", "1h")[1]
    assert "control character" in fails("--prompt", "To be", "--ttl", "1h", "--label", "a\n\x1b[31m")[1]
    for salt, why in (("s" * 256, "less than one block"), ("s" * 257, "the cache salt is longer than 256 bytes")):  # as of requests
        assert why in fails("--prompt", "To be", "--ttl", "1h", "--cache-salt", salt)[1]
    assert "batonctl pins" in ctl_fails(pool, "unpin", "0123456789abcdef")[1]
    assert "16 hex digits" in ctl_fails(pool, "unpin", "mine")[1]
    assert ctl_fails(pool, "unpin")[0] == 2
    assert "--label" in ctl_fails(pool, "pins", "--label", "x")[1]
    assert pool.pins() == {}


def start_conductor_again(r, m):
    """It gets other ports; its name is not free before the old lease has ended."""
    log = os.path.join(r.c.state_dir, "logs", "conductor-again.log")
    p, before = None, os.path.getsize(log) if os.path.exists(log) else 0

    def ready():
        nonlocal p
        if p is None or p.poll() is not None:
            p = r.spawn(*r.args[m["kind"], m["name"]], "conductor-again.log")
        with open(log) as f:
            f.seek(before)
            found = re.search(r"ev=ready .*?rpc=(\S+) http=(\S+):(\d+)", f.read())
        if found:
            r.addr, r.c.host, r.c.port = found[1], found[2], int(found[3])
        return found and r.ctl("status")["serving"]

    wait_for(ready, 60, "the next conductor serves")


def test_a_killed_kvstore_and_a_killed_conductor_keep_the_pins(pool, tmp_path):
    mine = ids("through crashes")
    pool.cached(mine)
    pin = pool.pin("--tokens-file", tokens_file(tmp_path, mine), "--ttl", "1h", "--label", "kept")
    wait_for(lambda: pool.held(pin) == WHOLE // BLOCK, 60, "all of it is protected")
    pool.r.start_again(pool.r.kill("kvstore", "n1"))
    wait_for(lambda: pool.held(pin) == WHOLE // BLOCK, 60, "the next kvstore protects it")
    pool.flood()
    assert pool.cached(mine)[0] == WHOLE
    conductor = pool.r.kill("conductor", "n1")
    start_conductor_again(pool.r, conductor)
    wait_for(lambda: pool.held(pin) == WHOLE // BLOCK, 60, "it knows what is pinned, and where")
    assert pool.pins()[pin["id"]]["label"] == "kept"
    pool.flood()
    assert pool.cached(mine)[0] == WHOLE


def test_a_wall_clock_that_is_set_neither_ends_a_pin_nor_lets_it_last(tmp_path):
    """A pin's time is elapsed time, in those that saw it made and in those that come later. Nor does a request's limit
    end it where the clocks of two hosts differ: those of the workers are not set here."""
    day, r = 86400, Restarts(*OPTIONS, "--set", "conductor.conductor.request_timeout_ms=60000")
    try:
        pool, clock, mine = Pool(r), WallClock(str(tmp_path)), ids("clock")

        def start_again(kind):
            key = (kind, next(m["name"] for m in r.members(kind)))
            argv, env, cwd = r.args[key]
            r.args[key] = argv, clock.environment(env), cwd
            m = r.kill(kind, "n1")
            if kind == "kvstore":
                r.start_again(m)
            else:
                start_conductor_again(r, m)

        def holds():
            wait_for(lambda: pool.held(pin) == WHOLE // BLOCK, 60, "all of it is protected")
            assert 3400 < pool.pins()[pin["id"]]["seconds_left"] <= 3600

        start_again("kvstore")
        start_again("conductor")
        pool.cached(mine)
        pin = pool.pin("--tokens-file", tokens_file(tmp_path, mine), "--ttl", "1h")
        holds()
        for ahead in (day, -day):
            clock.jump(ahead)
            time.sleep(1.5)  # kvstores look every second
            holds()
            pool.flood(1.5)
            assert pool.cached(mine)[0] == WHOLE
        clock.jump(day)
        start_again("kvstore")
        start_again("conductor")
        holds()
        short = pool.pin("--tokens-file", tokens_file(tmp_path, ids("short, set back")), "--ttl", "10s")
        clock.jump(-day)
        time.sleep(1.5)  # kvstores look every second
        assert short["id"] in pool.pins()
        start_again("kvstore")
        wait_for(lambda: pool.metric("baton_pool_pins") == 1 and short["id"] not in pool.pins(), 60, "its time has ended it")
        holds()
    finally:
        r.stop()


def answers_while(pool, pin, down, up, tmp_path):
    """With etcd gone pins can be listed, and hold; none can be made, renewed or ended, which is said, and what was said
    is so when etcd is back."""
    at = [a for p in pool.pins().values() for a in p["at"]]
    prompt, other = tokens_file(tmp_path, ids("etcd")), tokens_file(tmp_path, ids("etcd, other"))
    down()
    try:
        for args in (("pin", "--tokens-file", other, "--ttl", "1h"), ("pin", "--tokens-file", prompt, "--ttl", "9h"),
                     ("unpin", pin["id"])):
            code, says = ctl_fails(pool, *args)
            assert code == 1 and "etcd" in says and "check that the conductor runs" not in says, says
        now = pool.pins()
        assert list(now) == [pin["id"]] and now[pin["id"]]["at"] == at and now[pin["id"]]["seconds_left"] <= 3600
        pool.flood()
        assert pool.cached(ids("etcd"))[0] == WHOLE  # serving and protection go on
    finally:
        up()
    # What had been sent to it when it stood still it may do now, or not: both are told apart by looking.
    made = wait_for(lambda: ctl_works(pool, "pin", "--tokens-file", other, "--ttl", "1h"), 60, "pins can be made again")
    wait_for(lambda: made["id"] in pool.pins(), 60, "it is listed")
    pool.r.ctl("unpin", made["id"])
    wait_for(lambda: made["id"] not in pool.pins(), 60, "it is gone")
    again = pool.pin("--tokens-file", prompt, "--ttl", "1h")
    assert again["id"] == pin["id"]
    wait_for(lambda: list(pool.pins()) == [pin["id"]] and pool.held(pin) == WHOLE // BLOCK, 60, "one pin, protected")
    pool.flood()
    assert pool.cached(ids("etcd"))[0] == WHOLE


def ctl_works(pool, *args):
    p = subprocess.run([CTL, "--addr", pool.r.addr, *args, "-o", "json"], stdout=subprocess.PIPE, timeout=20 * PATIENCE)
    return json.loads(p.stdout) if p.returncode == 0 else None


@pytest.mark.parametrize("how", ["stands still", "is killed"])
def test_pins_while_etcd_is_away(pool, tmp_path, how):
    pool.cached(ids("etcd"))
    pin = pool.pin("--tokens-file", tokens_file(tmp_path, ids("etcd")), "--ttl", "1h")
    wait_for(lambda: pool.held(pin) == WHOLE // BLOCK, 60, "all of it is protected")
    pid = ETCD["pid"] = ETCD.get("pid") or pool.c.daemon("etcd")["pid"]
    if how == "stands still":
        answers_while(pool, pin, lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT), tmp_path)
        return
    args = args_of(pid)

    def up():
        ETCD["pid"] = pool.r.spawn(*args, "etcd-again.log").pid

    answers_while(pool, pin, lambda: os.kill(pid, signal.SIGKILL), up, tmp_path)


ETCD = {}


def test_every_kvstore_that_has_it_protects_it(cluster, tmp_path):
    """Prefill on one node, decode on the other: the blocks are on both."""
    with open(os.path.join(cluster.state_dir, "conductor.addr")) as f:
        addr = f.read().strip()

    def ctl(*args):
        p = subprocess.run([CTL, "--addr", addr, *args, "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           timeout=20 * PATIENCE)
        assert p.returncode == 0, p.stderr
        return json.loads(p.stdout)

    mine = ids("on both nodes", 600)
    pin = ctl("pin", "--tokens-file", tokens_file(tmp_path, mine), "--ttl", "1h")
    try:
        cluster.post("/v1/completions", {"prompt": mine, "max_tokens": 2, "temperature": 0})

        def at():
            return {a["kvstore"]: a["slab_blocks"] for p in ctl("pins") if p["id"] == pin["id"] for a in p["at"]}

        both = {"kvstore-" + d["node"]: pin["blocks"] for d in cluster.status() if d["daemon"] == "kvstore"}
        assert len(both) == 2
        wait_for(lambda: at() == both, 60, "both protect all of it")
    finally:
        ctl("unpin", pin["id"])

    def held():
        return [cluster.metrics("kvstore", i)['baton_pool_pinned_blocks{tier="slab"}'] for i in range(2)]

    wait_for(lambda: held() == [0, 0], 60, "neither protects anything")


def test_on_the_ssd(tmp_path):
    """More than the slab may protect is protected on the SSD, which turns over, too; written there by the pin alone."""
    r = Restarts(*OPTIONS, "--set", f"kvstore.kvstore.ssd.path={tmp_path / 'ssd'}", "--set",
                 "kvstore.kvstore.ssd.bytes=2MiB", "--set", "kvstore.kvstore.ssd.write_policy=evict")
    try:
        pool = Pool(r)
        most = pool.slots // 4
        mine = ids("mine", BLOCK * (most + most // 2))
        pool.cached(mine + [5])
        pin = pool.pin("--tokens-file", tokens_file(tmp_path, mine), "--ttl", "1h")

        def at():
            p = pool.pins()[pin["id"]]["at"]
            return (p[0]["slab_blocks"], p[0]["ssd_blocks"]) if p else None

        wait_for(lambda: at() == (most, pin["blocks"]), 60, "the SSD has what the slab does not protect")
        gone = pool.metric("baton_ssd_blocks_evicted_total")
        while pool.metric("baton_ssd_blocks_evicted_total") - gone < 2 * pool.metric("baton_ssd_slots"):
            pool.flood()
        assert at() == (most, pin["blocks"])
        assert pool.cached(mine + [5])[0] == BLOCK * pin["blocks"]
        m = r.members("kvstore", "n1")[0]
        os.kill(m["pid"], signal.SIGTERM)  # the slab goes with it
        r.start_again(m)
        wait_for(lambda: at() == (0, pin["blocks"]), 60, "it is found on the SSD, and protected")
        assert pool.cached(mine + [5])[0] == BLOCK * pin["blocks"]
        r.ctl("unpin", pin["id"])
        wait_for(lambda: pool.metric('baton_pool_pinned_blocks{tier="ssd"}') == 0, 60, "nothing is protected")
    finally:
        r.stop()

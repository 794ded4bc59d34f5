"""One prompt ten times larger than all slabs together: it is written through them to the SSD while it is computed, and
comes back piece by piece, with the tokens of the run without any cache; whatever breaks in the middle."""
import os
import random
import signal
import threading
import time

import pytest

import slow_disk
from conftest import CALIBRATED, ROOT, scrape, wait_for
from leftovers import assert_nothing_left, settled
from local_cluster import start_time
from restarts import Restarts
from sanitizer import SHORT_STEPS

BLOCK = 8  # tokens
DRAFT = os.path.join(ROOT, "deploy", "models", "shakespeare-draft-1m")
EXACT = "avx512_bf16" in open("/proc/cpuinfo").read()


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(10, 1900) for _ in range(n)]


class Streams(Restarts):
    """A cluster whose slabs hold a tenth of one prompt. The larger model is for disks that are slow and yet faster than
    computing."""

    def __init__(self, folder, policy, *more, nodes=1, large=False):
        self.folder = folder
        self.prompt = 5000 if large else 6000
        self.blocks = (self.prompt - 1) // BLOCK  # that can be cached: the last token is computed in any case
        self.block_bytes = BLOCK * (3072 if large else 512)
        slab = f"{1100 if large else 300 // nodes}KiB"
        model = () if large else ("--model", DRAFT)
        super().__init__(*model, *SHORT_STEPS, *CALIBRATED, "--nodes", str(nodes), "--decode", str(nodes),
                         "--set", f"all.kv.block_tokens={BLOCK}",
                         "--set", f"kvstore.kvstore.slab_bytes={slab}",
                         "--set", f"kvstore.kvstore.ssd.path={folder}/ssd-{{node}}",
                         "--set", "kvstore.kvstore.ssd.bytes=128MiB",
                         "--set", f"kvstore.kvstore.ssd.write_policy={policy}",
                         "--set", "prefill.engine.mem=64MiB", "--set", "decode.engine.mem=64MiB", *more)
        self.slots = int(self.kv("baton_pool_slots{"))

    def kv(self, name, node=None):
        """Summed over labels and kvstores."""
        return sum(v for m in self.members("kvstore", node) for k, v in scrape(m["http"]).items() if k.startswith(name))

    def ask(self, seed, n=None, new=12):
        a = self.c.post("/v1/completions", {"prompt": ids(seed, n or self.prompt), "max_tokens": new, "temperature": 0, "logprobs": 1})
        choice = a["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"], a["usage"]["prompt_tokens_details"]["cached_tokens"]

    def timed(self, seed):
        """And how much of the time of computing it loading may take and be worth it, whoever else uses the machine by then."""
        start = time.monotonic()
        return self.ask(seed), 0.15 * (time.monotonic() - start)

    def written(self):
        """Blocks on the SSDs, once nothing is on its way there."""
        def quiet():
            return not any(self.kv(k) for k in ("baton_ssd_backlog", "baton_kvstore_stream_slots", "baton_pool_leases",
                                                'baton_pool_slots{state="writing"}'))
        wait_for(lambda: quiet() and (time.sleep(0.3), quiet())[1], 60, "all is written")
        return int(self.kv("baton_ssd_blocks{") or self.kv("baton_ssd_blocks"))

    def store(self, seed):
        """Asks again until the SSD has the whole prompt: on a busy machine a worker gives writing up in the middle, and the
        next request writes the rest. That an idle one writes all at once is test_first_use's."""
        for _ in range(5):
            if self.written() >= self.blocks:
                return
            self.ask(seed)
        assert self.written() >= self.blocks

    def slow(self, prompt_s):
        """Node 1's kvstore anew, with an empty slab and a disk that moves the prompt in so many seconds; returns the file
        that makes the disk fail."""
        m = self.members("kvstore", "n1")[0]
        key, fails = ("kvstore", m["name"]), os.path.join(self.folder, "fails")
        argv, env, cwd = self.args[key]
        self.args[key] = argv, slow_disk.environment(env, slow_disk.build(self.folder),
                                                          self.blocks * self.block_bytes / prompt_s, fails), cwd
        os.kill(m["pid"], signal.SIGTERM)
        wait_for(lambda: start_time(m["pid"]) == "", 20, "it ends")
        self.start_again(m)
        wait_for(lambda: self.kv("baton_kvstore_workers") >= 2, 20, "its workers are back")
        return fails

    def beside(self, seed):
        """Asks in a thread; the answer comes into the list that is returned."""
        got = []
        t = threading.Thread(target=lambda: got.append(self.ask(seed)))
        t.start()
        return t, got


@pytest.fixture
def streams(tmp_path):
    made = []

    def make(policy, *options, **more):
        s = Streams(str(tmp_path), policy, *options, **more)
        made.append(s)
        assert s.blocks >= 10 * s.slots, s.slots
        return s

    yield make
    for s in made:
        s.stop()


def no_failures(s):
    assert s.kv("baton_kvstore_grants_failed_total") == 0
    assert s.total("baton_requests_replanned_total") == 0


def same(got, want):
    assert got[0] == want[0]
    if EXACT:
        assert got[1] == want[1]
    else:
        assert max(abs(a - b) for a, b in zip(got[1], want[1])) < 0.1


def test_second_use(streams):
    """The default policy: used once it wears no disk, the second request writes it, the third has all of it; and nobody
    else's cache is gone for it."""
    s = streams("second_use")
    before = settled(s.c)
    other = s.ask(7, 100)
    assert s.ask(7, 100)[2] == 96
    on_disk = s.written()
    first = s.ask(1)
    assert first[2] == 0
    assert s.written() - on_disk < s.slots / 4, "what is used once is not written"
    second = s.ask(1)
    same(second, first)
    assert 0 < second[2] <= s.slots // 2 * BLOCK
    assert s.written() >= s.blocks
    third = s.ask(1)
    same(third, first)
    assert third[2] == s.blocks * BLOCK
    again = s.ask(7, 100)
    same(again, other)
    assert again[2] == 96
    assert_nothing_left(s.c, before, 64 << 20)


@pytest.mark.parametrize("policy", ["always", "evict"])
def test_first_use(streams, policy):
    s = streams(policy)
    first = s.ask(1)
    assert first[2] == 0
    assert s.written() >= s.blocks
    assert s.kv('baton_kvstore_stream_blocks_total{way="out"}') >= s.blocks - s.slots / 2
    got = s.ask(1)
    same(got, first)
    assert got[2] == s.blocks * BLOCK
    assert s.kv('baton_kvstore_stream_blocks_total{way="in"}') >= s.blocks - s.slots / 2
    no_failures(s)
    # One that goes on where it ended has all of it as well, and is computed from there on.
    more = s.c.post("/v1/completions", {"prompt": ids(1, s.prompt) + ids(2, 100), "max_tokens": 4, "temperature": 0})
    assert more["usage"]["prompt_tokens_details"]["cached_tokens"] >= s.blocks * BLOCK
    s.written()


def test_from_another_node(streams):
    """Written on one node, used on the other: the pieces come through both slabs."""
    s = streams("always", "--set", "conductor.sched.policy=baton", nodes=2)
    first = s.ask(1)
    assert s.written() >= s.blocks
    holder = max(("n1", "n2"), key=lambda n: s.kv("baton_ssd_blocks", n))
    s.ctl("drain", holder, "--force")
    got = s.ask(1)
    same(got, first)
    assert s.kv('baton_kvstore_fetched_bytes_total{tier="ssd"}') > 0.8 * s.blocks * s.block_bytes
    assert got[2] == s.blocks * BLOCK
    s.written()


def test_several_at_once(streams):
    """Prompts that are each ten times larger than the slab, at the same time: every one is written, and every one comes
    back, with the tokens that it has alone; a short one beside them finds its place."""
    s = streams("always")
    before = settled(s.c)
    alone = {seed: s.ask(seed) for seed in (1, 2)}
    s.written()
    short = s.ask(7, 100)
    passed = s.kv('baton_kvstore_stream_blocks_total{way="out"}')
    # Neither 4 nor 5 is known yet: they are computed and written beside each other. 1 and 2 come back meanwhile.
    jobs = {seed: s.beside(seed) for seed in (4, 5, 1, 2)}
    same(s.ask(7, 100), short)
    for t, _ in jobs.values():
        t.join()
    assert all(got for _, got in jobs.values()), "all are answered"
    for seed, want in alone.items():
        same(jobs[seed][1][0], want)
    s.written()
    assert s.kv('baton_kvstore_stream_blocks_total{way="out"}') - passed >= 2 * (s.blocks - s.slots / 2)
    for seed in (4, 5):  # and again, one by one: all that was written beside the others is right, and all is there
        got = s.ask(seed)
        same(got, jobs[seed][1][0])
        assert got[2] == s.blocks * BLOCK
    no_failures(s)
    assert_nothing_left(s.c, before, 64 << 20)


def under_way(s, way, seeds):
    """Asks for the first of these prompts and waits until it has come so far, in or out, that it has not ended: (its seed, the
    thread, the answer to come). The next one if a busy worker gave its writing up so early that the answer came before."""
    name, at = f'baton_kvstore_stream_blocks_total{{way="{way}"}}', s.members("kvstore", "n1")[0]["http"]
    for seed in seeds:
        was = scrape(at)[name]
        t, got = s.beside(seed)
        if wait_for(lambda: scrape(at)[name] > was + s.blocks / 20 and "begun" or not t.is_alive() and "over", 120, way) == "begun":
            return seed, t, got
        print(f"prompt {seed} was answered before it had gone {way}: {scrape(at)[name] - was:.0f} of {s.blocks} blocks")
    raise AssertionError(f"none of {len(seeds)} prompts went {way}")


def test_disk_fails_in_the_middle(streams):
    """The blocks of the small model: a read of as many as there is room for is too short to measure the disk's speed by. So
    the kvstore never finds computing faster, whatever else uses the machine."""
    s = streams("always")
    first = s.ask(1)
    s.store(1)
    fails = s.slow(0.1)
    with open(fails, "w") as f:
        f.write(str(s.blocks // 3))
    got = s.ask(1)
    same(got, first)
    assert s.blocks / 4 * BLOCK < got[2] < s.blocks * BLOCK, "what had come counts, the rest was computed"
    wait_for(lambda: s.kv("baton_ssd_up") == 0, 10, "the kvstore says that its disk is down")
    os.unlink(fails)
    wait_for(lambda: s.kv("baton_ssd_up") == 1, 30, "the disk is used again")
    # A block whose read failed is forgotten: the hole is computed and written again.
    same(s.ask(1), first)
    s.written()
    got = s.ask(1)
    same(got, first)
    assert got[2] == s.blocks * BLOCK
    s.written()


def test_others_go_on(streams):
    """Short requests beside one that comes slowly from the disk, and beside one that goes there slowly."""
    s = streams("always", large=True)
    short = s.ask(7, 40)
    first, load_s = s.timed(1)
    s.store(1)
    s.slow(load_s)
    for seeds, way in (((1,), "in"), (range(3, 8), "out")):
        start = time.monotonic()
        _, t, got = under_way(s, way, seeds)
        for i in range(5):
            since = time.monotonic()
            same(s.ask(7, 40), short)
            took = time.monotonic() - since
        t.join()
        assert took < time.monotonic() - start, "nobody waits for a stream"
        if way == "in":
            same(got[0], first)
            assert got[0][2] == s.blocks * BLOCK
    s.written()


@pytest.mark.parametrize("way", ["in", "out"])
def test_kvstore_killed_in_the_middle(streams, way):
    s = streams("always", large=True)
    want, load_s = s.timed(1)
    s.store(1)
    s.slow(load_s)
    seed, t, got = under_way(s, way, (1,) if way == "in" else range(2, 7))
    s.start_again(s.kill("kvstore", "n1"))
    t.join()
    assert got, "it was answered"
    if way == "in":
        same(got[0], want)
    wait_for(lambda: s.kv("baton_kvstore_workers") >= 2, 20, "its workers are back")
    same(s.ask(seed), got[0])
    s.written()

"""Flows over a network that turns one bit of each over (tests/tools/flip_recv.h): every one must be
noticed, and no flow may end well with wrong bytes."""
from wire_peers import Peer

SMALL = dict(seg=8192, layers=4, slots=600)   # messages of 16 and 32 KiB: eager
LARGE = dict(seg=131072, layers=4, slots=600)  # of 256 KiB: rendezvous


def run(opts, what, n, seed):
    """One bit in each of n flows, in their payload or header; (flips, flows that failed, wrong CRCs counted)."""
    tokens, chunk = 64, 32
    a, b = Peer("a", **opts), Peer("b", **opts)
    try:
        a.ask(f"auto {tokens} {chunk} {seed}", "auto")
        b.say(f"flipseed {seed}")
        flips, failed, fell, free = 0, 0, False, b.usage()["free"]
        for i in range(n):
            b.say(f"flip {what}")
            m = b.ask(f"storm a {a.addr} {a.inc} {10 + i} 1 {tokens} {chunk} {seed} 1",
                      r"storm done=(\d) failed=(\d)", 30)
            now = int(b.ask("flips", r"flips (\d+)")[1])
            # A flow that ended well was compared byte by byte (the 1 at the storm's end). If a bit was turned
            # over and it ended well all the same, that was in what still came of the failed one before.
            assert m[2] == "0" or now > flips, f"{what} {i}: failed without a flip: {b.lines[-5:]}"
            assert m[2] == "1" or now == flips or fell, f"{what} {i}: a flip was not noticed"
            fell = m[2] == "1"
            failed += fell
            flips = now
            with b.cond:
                b.lines.clear()
        assert b.usage()["free"] == free  # nothing of all these is held
        return flips, failed, b.metrics()["baton_kv_crc_errors_total"]
    finally:
        a.stop()
        b.stop()

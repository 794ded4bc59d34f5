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
        flips, failed, free = 0, 0, b.usage()["free"]

        def storm(first):
            """Whether one flow came whole: it was compared byte by byte (the 1 at the storm's end)."""
            m = b.ask(f"storm a {a.addr} {a.inc} {first} 1 {tokens} {chunk} {seed} 1",
                      r"storm done=(\d) failed=(\d)", 30)
            return m[1] == "1"
        for i in range(n):
            b.say(f"flip {what}")
            whole = storm(10 + i)
            now = int(b.ask("flips", r"flips (\d+)")[1])
            assert whole == (now == flips), f"{what} {i}: {now - flips} flips, whole: {whole}: {b.lines[-5:]}"
            failed += not whole
            flips = now
            # What still came of it is through when the next, left alone, is: else the next bit may be one of that.
            assert whole or storm(10 + n + i), f"{what} {i}: fails without a flip: {b.lines[-5:]}"
            with b.cond:
                b.lines.clear()
        assert b.usage()["free"] == free  # nothing of all these is held
        return flips, failed, b.metrics()["baton_kv_crc_errors_total"]
    finally:
        a.stop()
        b.stop()

"""Why a block that was there before a kvstore's kill is not there after it: told by what the kvstore logged (ev=block_gone,
level debug, before the kill and since the start), and by what its slab's headers say at the moment of death."""
import datetime
import re
import struct

HEADERS_OFF, HEADER_BYTES, SEALED = 48, 128, 2  # of common/slab/slab.h
AGES_S = 0.01, 0.05, 0.2, 0.5, 2.0  # of removals: the youngest have not reached whoever listens


def gone(log):
    """First 8 bytes of a key, hex -> (when, seconds of the real clock; tier; why), of the last time that it left."""
    out = {}
    for m in re.finditer(r'ts=(\S+) .*ev=block_gone tier=(\w+) key=(\w+) why="?([^"\n]*)', log):
        at = datetime.datetime.fromisoformat(m[1].replace("Z", "+00:00")).timestamp()
        out[m[3]] = at, m[2], m[4]
    return out


def sealed(path):
    """The same keys, of the blocks that are sealed in a slab's file."""
    with open(path, "rb") as f:
        n, = struct.unpack("<I", f.read(HEADERS_OFF)[12:16])
        off, = struct.unpack("<Q", f.read(8))
        f.seek(off)
        data = f.read(n * HEADER_BYTES)
    return {data[i + 8:i + 16].hex() for i in range(0, len(data), HEADER_BYTES) if data[i] == SEALED}


def reason(key, died, before, in_slab, since):
    """died: when, real clock; before, since: gone() of the logs before and after; in_slab: sealed() at the death."""
    k = key[:8].hex()
    was = f"then {since[k][1]}: {since[k][2]}" if k in since else "then nothing"
    if k in in_slab:
        return f"in the slab at the kill, {was}"
    if k not in before:
        return f"not in the slab at the kill, {was}"
    at, tier, why = before[k]
    age = next((f"at most {a * 1e3:.0f} ms" for a in AGES_S if died - at <= a), f"{died - at:.0f} s")
    return f"{tier}: {why} {age} before the kill, {was}"


def untold(why):
    """Of a reason: the block was given up so shortly before the kill that nobody was told."""
    return ("evicted" in why or "copy" in why) and " ms before the kill" in why

#!/usr/bin/python3
"""Takes DT_RUNPATH and DT_RPATH out of 64-bit little-endian ELF files, in place.

A library with a search path of its own (Debian's UCX modules have one) would look for its dependencies in
the machine's folders and not in the bundle, because the loader then ignores the executable's RPATH. The
entry of the dynamic table goes, those behind it move up, and DT_NULL fills the end: nothing else moves.
"""
import struct
import sys

PT_DYNAMIC, DT_NULL, DT_RPATH, DT_RUNPATH, ENTRY = 2, 0, 15, 29, 16


def drop(path):
    with open(path, "r+b") as f:
        head = f.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            sys.exit(f"{path}: no 64-bit little-endian ELF file")
        table, = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        for i in range(count):
            f.seek(table + i * size)
            kind, _, offset, _, _, length = struct.unpack("<IIQQQQ", f.read(40))
            if kind != PT_DYNAMIC:
                continue
            f.seek(offset)
            old = f.read(length)
            kept = b"".join(old[k:k + ENTRY] for k in range(0, length, ENTRY)
                            if struct.unpack_from("<q", old, k)[0] not in (DT_RPATH, DT_RUNPATH))
            f.seek(offset)
            f.write(kept.ljust(length, b"\0"))


for name in sys.argv[1:]:
    drop(name)

#!/usr/bin/python3
"""Prints nfc_data.def: canonical decompositions and combining classes, from Python's unicodedata.

Usage: nfc_gen.py > nfc_data.def. DECOMP(cp, first, second or 0, whether the pair composes again),
CLASS(first cp, last cp, combining class). Hangul is computed, not listed.
"""
import sys
import unicodedata

decomp, classes = [], []
for cp in range(sys.maxunicode + 1):
    c = chr(cp)
    d = unicodedata.decomposition(c)
    if d and not d.startswith("<") and not 0xAC00 <= cp <= 0xD7A3:
        parts = [int(x, 16) for x in d.split()] + [0]
        again = parts[1] != 0 and unicodedata.normalize("NFC", c) == c
        decomp.append(f"DECOMP(0x{cp:x}, 0x{parts[0]:x}, 0x{parts[1]:x}, {int(again)})")
    k = unicodedata.combining(c)
    if k and classes and classes[-1][1] == cp - 1 and classes[-1][2] == k:
        classes[-1][1] = cp
    elif k:
        classes.append([cp, cp, k])
print(f"/* Made by nfc_gen.py from Unicode {unicodedata.unidata_version}; sorted by code point. */")
for kind, rows in (("DECOMP", decomp), ("CLASS", [f"CLASS(0x{a:x}, 0x{b:x}, {k})"
                                                   for a, b, k in classes])):
    print(f"#ifdef {kind}")
    for i in range(0, len(rows), 3):
        print(" ".join(rows[i:i + 3]))
    print("#endif")

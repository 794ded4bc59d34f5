#!/usr/bin/python3
"""Prints categories.def: general categories and simple case folding of all code points, from
Python's unicodedata. The Makefile runs it; any Python 3.6 or newer will do.

Usage: categories_gen.py > categories.def. CATEGORY(first cp, last cp, name): sorted, complete.
FOLD(cp, what it folds to): characters that fold to another one.
"""
import sys
import unicodedata

ranges, folds = [], []
for cp in range(sys.maxunicode + 1):
    c = chr(cp)
    name = unicodedata.category(c)
    if ranges and ranges[-1][2] == name:
        ranges[-1][1] = cp
    else:
        ranges.append([cp, cp, name])
    f = c.casefold()
    f = f if len(f) == 1 else c.lower()
    if len(f) == 1 and f != c:
        folds.append((cp, ord(f)))
print(f"/* Made by categories_gen.py from Unicode {unicodedata.unidata_version}. */")
for kind, rows in (("CATEGORY", [f"CATEGORY(0x{a:x}, 0x{b:x}, {k})" for a, b, k in ranges]),
                   ("FOLD", [f"FOLD(0x{a:x}, 0x{b:x})" for a, b in folds])):
    print(f"#ifdef {kind}")
    for i in range(0, len(rows), 3):
        print(" ".join(rows[i:i + 3]))
    print("#endif")

#!/usr/bin/python3
"""Prints normal_form.def: the tables of Unicode's normalization forms, from Python's unicodedata.

The Makefile runs it. Any Python 3.6 or newer will do: Unicode never changes the normal form of an
assigned character, so another version only adds new characters.

Usage: normal_form_gen.py > normal_form.def. DECOMP(cp, first, second or 0): canonical, one level.
COMPAT(cp, text): the whole decomposition under form KD, where it is another than under form D.
PAIR(first, second, cp): what composes, sorted. CLASS(first cp, last cp, combining class). Hangul is
computed, not listed.
"""
import sys
import unicodedata


def octal(s):
    return '"' + "".join("\\%03o" % b for b in s.encode()) + '"'


decomp, pairs, compat, classes = [], [], [], []
for cp in range(sys.maxunicode + 1):
    if 0xD800 <= cp <= 0xDFFF or 0xAC00 <= cp <= 0xD7A3:
        continue
    c = chr(cp)
    d = unicodedata.decomposition(c)
    if d and not d.startswith("<"):
        first, second = ([int(x, 16) for x in d.split()] + [0])[:2]
        decomp.append(f"DECOMP(0x{cp:x}, 0x{first:x}, 0x{second:x})")
        if second != 0 and unicodedata.normalize("NFC", c) == c:
            pairs.append((first, second, cp))
    k = unicodedata.normalize("NFKD", c)
    if k != unicodedata.normalize("NFD", c):
        compat.append(f"COMPAT(0x{cp:x}, {octal(k)})")
    k = unicodedata.combining(c)
    if k and classes and classes[-1][1] == cp - 1 and classes[-1][2] == k:
        classes[-1][1] = cp
    elif k:
        classes.append([cp, cp, k])
print(f"/* Made by normal_form_gen.py from Unicode {unicodedata.unidata_version}; rows are sorted. */")
for kind, rows in (("DECOMP", decomp), ("COMPAT", compat),
                   ("PAIR", [f"PAIR(0x{a:x}, 0x{b:x}, 0x{c:x})" for a, b, c in sorted(pairs)]),
                   ("CLASS", [f"CLASS(0x{a:x}, 0x{b:x}, {k})" for a, b, k in classes])):
    print(f"#ifdef {kind}")
    for i in range(0, len(rows), 3):
        print(" ".join(rows[i:i + 3]))
    print("#endif")

#!/usr/bin/python3
"""Prints ui_files.def: the files of the web pages, as rows FILE_ROW(name, media type, text) for
conductor/front/front_pages.c. The Makefile runs it; any Python 3.6 or newer will do.

Usage: embed.py FILE... > ui_files.def
"""
import os
import sys

TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
         ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "?": "\\?"}

for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as f:
        lines = f.read().splitlines(True)
    text = "\n".join('    "' + "".join(ESCAPES.get(c, c) for c in line) + '"' for line in lines)
    print(f'FILE_ROW("{os.path.basename(path)}", "{TYPES[os.path.splitext(path)[1]]}",\n{text})')

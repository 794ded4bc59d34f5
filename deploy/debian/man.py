#!/usr/bin/python3
"""Makes a manual page of what a program says about itself (--help, --version), so that both say the same.

usage: man.py PROGRAM SECTION [COMMAND_FILE] > PAGE   COMMAND_FILE: what to start, if it is not PROGRAM itself
"""
import os
import re
import subprocess
import sys

# For NAME, of those whose --help does not begin with a sentence about them.
SUMMARY = {
    "batonctl": "look at a Baton cluster and administer it",
    "baton-sim": "simulate a Baton cluster: scheduling, cache and sizing",
    "baton-bench": "measure a server of the OpenAI API, an engine or kvstores",
    "baton-local": "run a whole Baton cluster on this machine",
    "baton-certs": "a private CA for one Baton cluster",
}
SEE_ALSO = "The documents of the package baton-doc, in /usr/share/doc/baton; OPERATING.md is the operator's."


def ask(path, *args):
    env = dict(os.environ, COLUMNS="80", LC_ALL="C.UTF-8")
    p = subprocess.run([path, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, env=env, timeout=60)
    return p.stdout.decode().rstrip("\n").split("\n")


def esc(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def entry(line):
    """A line that begins an entry of a list: (term, beginning of its text)."""
    m = re.match(r" {2,4}(\S.*?)(?: {2,}(\S.*))?$", line)
    return (m[1], m[2]) if m else None


def body(lines, heading):
    """Paragraphs, lists and sections, as help texts have them, in roff."""
    out = []
    for i, line in enumerate(lines):
        if not line.strip():
            out.append(".PP")
        elif re.match(r"\S.*:$", line) and (i + 1 < len(lines) and lines[i + 1].startswith(" ")):
            out.append(f'.{heading} "{esc(line[:-1].upper() if heading == "SH" else line[:-1])}"')
        elif re.match(r"[Ee]xit status: ", line):
            out += [f'.{heading} "EXIT STATUS"', esc(line.split(": ", 1)[1])]
        elif re.match(r" {2,4}\S", line):
            term, text = entry(line)
            out += [".TP", ".B " + esc(term)]
            out += [esc(text)] if text else []
        else:
            out.append(esc(line.strip()))
    return out


def usage(lines):
    """The first paragraph, as it is."""
    return [".nf"] + [esc(re.sub(r"^(usage: |       )", "", li)) for li in lines] + [".fi"]


def main(name, section, path=None):
    path = path or name
    lines, version = ask(path, "--help"), ask(path, "--version")[0].split(" ")[1]
    summary = SUMMARY.get(name)
    if summary is None:  # "NAME: sentences", then an empty line
        end = lines.index("")
        said = " ".join(li.strip() for li in lines[:end]).split(": ", 1)[1]
        summary = re.split(r"(?<=\w)[.:;] ", said)[0].rstrip(".")
        summary = summary[0].lower() + summary[1:]
        after = lines.index("", end + 1)
        lines = lines[end + 1:after] + ["", said[0].upper() + said[1:]] + lines[after:]
    out = [f'.TH {name.upper()} {section} "" "Baton {version}" "Baton"', ".SH NAME", f"{name} \\- {esc(summary)}",
           ".SH SYNOPSIS"]
    end = next((i for i, li in enumerate(lines) if not li.strip()), len(lines))
    out += usage(lines[:end]) + [".SH DESCRIPTION"] + body(lines[end + 1:], "SH")
    if name == "batonctl":
        commands = lines[lines.index("Commands:") + 1:]
        words = [entry(li)[0].split(" ")[0] for li in commands[:commands.index("")] if entry(li)]
        for word in [w for w in words if w != "help"]:
            said = ask(path, "help", word)
            said = said[:said.index("Options of every command:")] if "Options of every command:" in said else said
            end = said.index("")
            out += [f'.SH "COMMAND {word.upper()}"'] + usage(said[:end]) + body(said[end:], "SS")
    out += [".SH SEE ALSO", esc(SEE_ALSO)]
    text = "\n".join(out) + "\n"
    text = re.sub(r"(\.PP\n)+(?=\.(SH|SS|TP|PP)\b)", "", text)
    sys.stdout.write(re.sub(r"(\.SH [^\n]*\n)(\.PP\n)+", r"\1", text).replace(".SH DESCRIPTION\n.SH", ".SH"))


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])

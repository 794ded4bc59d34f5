#!/usr/bin/python3
"""Makes batonctl's completions from its tables of commands and options (conductor/ctl/*.def).

usage: completions.py bash|zsh|fish > FILE   in the root of the source tree
"""
import ast
import subprocess
import sys

MACROS = """
#define NULL None
#define BT_CTL_COMMAND(name, run, arg, arg2, summary, details) (name, arg, arg2, summary),
#define BT_CTL_OPTION(id, name, value, commands, text) (name, value, commands, text),
"""
FILES = ("FILE", "DIR", "STATE")  # values that are paths


def table(path):
    """The rows of a .def: C's string literals side by side are one in Python, too."""
    text = subprocess.run(["cc", "-E", "-P", "-x", "c", "-"], input=f'{MACROS}[\n#include "{path}"\n]', text=True,
                          stdout=subprocess.PIPE, check=True).stdout
    return ast.literal_eval(text.strip())


def words(arg):
    """An argument that is one of several words."""
    return arg.split("|") if arg and "|" in arg else []


def bash(commands, options):
    takes = {c[0]: [o[0] for o in options if o[2] is None or f" {c[0]} " in o[2]] for c in commands}
    of_all = [o[0] for o in options if o[2] is None] + ["--help", "--version"]
    paths = "|".join(o[0] for o in options if o[1] in FILES)
    values = "".join(f"    {o[0]}) COMPREPLY=($(compgen -W '{' '.join(words(o[1]))}' -- \"$cur\")); return ;;\n"
                     for o in options if words(o[1]))
    others = "|".join(o[0] for o in options if o[1] and o[1] not in FILES and not words(o[1]) and o[1][0] != "[")
    cases = "".join(f"    {c}) words='{' '.join(o)} --help{''.join(' ' + w for k in commands if k[0] == c for w in words(k[1]))}' ;;\n"
                    for c, o in takes.items())
    return f"""# bash completion for batonctl
_batonctl() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} command='' words i
    case $prev in
    {paths}) COMPREPLY=($(compgen -f -- "$cur")); return ;;
{values}    {others}) COMPREPLY=(); return ;;
    esac
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i - 1]}} in
        {paths}|{others}) continue ;;
        esac
        [[ ${{COMP_WORDS[i]}} == -* ]] || {{ command=${{COMP_WORDS[i]}}; break; }}
    done
    case $command in
    '') words='{' '.join(takes)} help {' '.join(of_all)}' ;;
    help) words='{' '.join(takes)}' ;;
{cases}    *) words= ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o filenames -F _batonctl batonctl
"""


def quoted(text):
    return text.replace("'", "'\\''")


def zsh(commands, options):
    def spec(o):
        about = quoted(o[3]).replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
        if not o[1] or o[1][0] == "[":
            return f"'{o[0]}[{about}]'"
        value = o[1].lower().replace(":", " ")
        action = "_files" if o[1] in FILES else f"({' '.join(words(o[1]))})" if words(o[1]) else ""
        return f"'{o[0]}[{about}]:{value}:{action}'"
    listed = "".join(f"    '{c[0]}:{quoted(c[3])}'\n" for c in commands)
    cases = ""
    for c in commands:
        mine = [spec(o) for o in options if o[2] is None or f" {c[0]} " in o[2]]
        args = "".join(f" '{i}:{a.strip('[]').lower()}:({' '.join(words(a))})'" for i, a in ((1, c[1]), (2, c[2])) if a)
        cases += f"    {c[0]}) _arguments {' '.join(mine)} '--help[help for this command]'{args} ;;\n"
    of_all = " ".join(spec(o) for o in options if o[2] is None)
    return f"""#compdef batonctl
local -a commands
commands=(
{listed}    'help:what a command does, and its options'
)
local context state state_descr line
typeset -A opt_args
_arguments -C {of_all} '--help[help]' '--version[version]' '1:command:->command' '*::argument:->argument'
case $state in
command) _describe command commands ;;
argument)
    case $line[1] in
    help) _describe command commands ;;
{cases}    esac
    ;;
esac
"""


def fish(commands, options):
    names = " ".join(c[0] for c in commands)
    out = ["# fish completion for batonctl", "complete -c batonctl -f"]
    none = f"not __fish_seen_subcommand_from {names} help"
    for c in commands + [("help", None, None, "what a command does, and its options")]:
        out.append(f"complete -c batonctl -n '{none}' -a {c[0]} -d '{quoted(c[3])}'")
        for w in words(c[1]):
            out.append(f"complete -c batonctl -n '__fish_seen_subcommand_from {c[0]}' -a {w}")
    out.append(f"complete -c batonctl -n '__fish_seen_subcommand_from help' -a '{names}'")
    for name, value, of, text in options:
        when = f" -n '__fish_seen_subcommand_from {of.strip()}'" if of else ""
        kind = "" if not value or value[0] == "[" else " -r -F" if value in FILES else \
            f" -x -a '{' '.join(words(value))}'" if words(value) else " -x"
        out.append(f"complete -c batonctl{when} -l {name[2:]}{kind} -d '{quoted(text)}'")
    return "\n".join(out + ["complete -c batonctl -l help", "complete -c batonctl -l version"]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("bash", "zsh", "fish"):
        sys.exit(__doc__)
    sys.stdout.write({"bash": bash, "zsh": zsh, "fish": fish}[sys.argv[1]](
        table("conductor/ctl/commands.def"), table("conductor/ctl/options.def")))

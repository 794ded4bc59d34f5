"""docs/FAULTS.md and tests/chaos/faults.py are about the same cases, and the tests that the table names are there. The
run itself takes longer than a test may: make chaos."""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "chaos"))
from faults import FAULTS  # noqa: E402


def rows():
    """case -> (names of chaos functions, whether it says why none)"""
    out = {}
    with open(os.path.join(ROOT, "docs", "FAULTS.md")) as f:
        for line in f:
            cells = [c.strip() for c in line.strip().strip("|").split("|")]
            if len(cells) == 5 and cells[0].isdigit():
                assert int(cells[0]) not in out, f"case {cells[0]} is there twice"
                out[int(cells[0])] = set(re.findall(r"`(\w+)`", cells[3])), cells[3]
    return out


def test_all_48_cases_are_there():
    assert sorted(rows()) == list(range(1, 49))


def test_each_case_has_its_faults():
    by_case = {n: {f.name for f in FAULTS if n in f.cases} for n in rows()}
    for case, (named, cell) in rows().items():
        assert named <= {f.name for f in FAULTS}, f"case {case} names {named}"
        if case == 48:
            continue
        missing = {f for f in named if case not in next(x for x in FAULTS if x.name == f).cases}
        assert not missing, f"{missing} do not say that they are of case {case}"
        assert by_case[case] <= named, f"case {case} does not name {by_case[case] - named}"
        assert named or cell.startswith("not injected: "), f"case {case} has neither a fault nor a reason"


def test_names_are_unique():
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    for f in FAULTS:
        assert f.cases and f.uses and f.needs in ("", "net", "disk"), f.name

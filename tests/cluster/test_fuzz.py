"""The fuzz targets: nothing else builds them. Here each runs for a moment; looking for long is by hand (tests/fuzz/README.md)."""
import os
import re
import shutil
import subprocess

import pytest

import sanitizer
from conftest import ROOT

pytestmark = [pytest.mark.skipif(shutil.which("clang") is None, reason="no clang"),
              pytest.mark.skipif(os.cpu_count() < 4 and not os.environ.get("BATON_TEST_FUZZ"),
                                 reason="builds the product once more, for which two cores take minutes: BATON_TEST_FUZZ=1"),
              pytest.mark.skipif(bool(sanitizer.KIND), reason="they are instrumented anyway")]
FOLDER = os.path.join(ROOT, "tests", "fuzz")
TARGETS = sorted(m[1] for m in (re.fullmatch(r"fuzz_(\w+)\.c", f) for f in os.listdir(FOLDER)) if m)


def fuzz(tmp_path, *args, **env):
    p = subprocess.run([os.path.join(FOLDER, "run"), "--out", tmp_path, *args], cwd=ROOT, env={**os.environ, **env}, timeout=1200,
                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return p.returncode, p.stdout.decode(errors="replace")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_builds_and_runs(target, tmp_path):
    rc, text = fuzz(tmp_path, "--runs", "500", target)
    assert rc == 0 and re.search(r"\n\d{3,} executions, 0 findings", text), text[-3000:]


def test_a_finding_is_noticed_and_counts_once(tmp_path):
    sums = tmp_path / "sums.csv"
    rc, text = fuzz(tmp_path, "--seconds", "4", "--append", str(sums), "keys", BATON_FUZZ_FAIL="1")
    assert rc == 1 and ", 1 findings in " in text, text[-3000:]
    found = os.listdir(tmp_path / "findings" / "keys")
    assert sorted(f[-4:] == ".txt" for f in found) == [False, True], found
    p = subprocess.run([os.path.join(FOLDER, "run"), "--sum", sums, sums], stdout=subprocess.PIPE, check=True, timeout=60)
    assert re.search(rb"\| keys \| [\d,]+ \| [\d,]+ \| 2 \|", p.stdout), p.stdout

"""What an instrumented build (make SANITIZE=...) needs from those who run it: options, patience, reports.

Every report goes to a file of its own, whoever started the process and wherever its output goes.
tests/run and conftest.py look there after every test. Plain builds are not affected.
"""
import glob
import os
import re
import shutil

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
REPORTS = os.path.join(BUILD, "tests", "reports")
# What a report, or a failed assertion of our own, looks like in a log.
REPORT = re.compile(r'ERROR: \w+Sanitizer|WARNING: \w+Sanitizer|runtime error:|'
                    r'\bev"?[=:]"?(assert_failed|out_of_memory|ended_by_signal)\b')
# Said at the first use of a fiber (tests/cuda_host runs a block's threads as such); not a finding.
FIBERS = re.compile(r"^.*WARNING: ASan doesn't fully support makecontext.*\n", re.M)
EXITCODE = 86  # no daemon and no tool ends with it otherwise


def kind():
    """'address', 'thread', or '' for a plain build."""
    try:
        with open(os.path.join(BUILD, "bin", "baton-kvstore"), "rb") as f:
            found = re.search(rb"\blib([at])san\.so", f.read())
    except OSError:
        return ""
    return {b"a": "address", b"t": "thread"}[found.group(1)] if found else ""


KIND = kind()
# By how much longer tests wait for what takes an instrumented process longer. Limits that a test is
# about are not stretched by it.
PATIENCE = float(os.environ.get("BATON_TEST_PATIENCE") or {"": 1, "address": 4, "thread": 10}[KIND])
# For clusters that compute thousands of tokens: a step of 2,048 rows takes an instrumented engine longer than
# a worker may take before it counts as hung (kvstore.reclaim_ms, the conductor's wait for any result).
SHORT_STEPS = ("--set", "prefill.engine.max_rows=256", "--set", "decode.engine.max_rows=256") if KIND else ()


def set_options(env=os.environ):
    """The sanitizers' options, into env. What the caller had set there goes last, and so wins."""
    os.makedirs(REPORTS, exist_ok=True)
    common = {"log_path": os.path.join(REPORTS, "report"), "log_exe_name": 1, "exitcode": EXITCODE}
    here = os.path.join(ROOT, "tests", "cluster")
    options = {
        # The leak checker of GCC 12 crashes on thread-local memory of libraries that were loaded
        # later (oneDNN, libgomp) unless it is told not to look for it.
        "ASAN_OPTIONS": {**common, "detect_leaks": 1, "intercept_tls_get_addr": 0, "strict_string_checks": 1},
        "UBSAN_OPTIONS": {**common, "print_stacktrace": 1},
        # Only what is instrumented is watched: gRPC, UCX, RocksDB, oneDNN and libgomp are not.
        "TSAN_OPTIONS": {**common, "ignore_noninstrumented_modules": 1, "second_deadlock_stack": 1,
                         "history_size": 4, "suppressions": os.path.join(here, "tsan.supp")},
    }
    if KIND == "thread":
        env.setdefault("UCX_MEM_EVENTS", "n")  # UCX's own hooks in malloc and mmap fight with TSan's
    for name, values in options.items():
        mine = ":".join(f"{k}={v}" for k, v in values.items())
        before = env.get(name, "")
        env[name] = before if before.startswith(mine) else mine + (":" + before if before else "")


def start():
    """Options for this process and all that it starts; forgets the reports of earlier runs."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    set_options()


def take_reports(limit=12000):
    """Text of the reports that nobody has taken yet, or ''. They are kept as *.seen."""
    out = []
    for path in sorted(glob.glob(os.path.join(REPORTS, "report.*"))):
        if path.endswith(".seen"):
            continue
        try:
            with open(path, errors="replace") as f:
                text = FIBERS.sub("", f.read())
            os.rename(path, path + ".seen")
        except OSError:
            continue
        if text.strip():
            out.append(f"== {os.path.basename(path)}\n{text[:limit]}")
    return "\n".join(out)


def in_log(text, killed=False):
    """Lines of a log around the first report in it, or ''. killed: the test has sent signals of which a process says
    that it ended by them."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if REPORT.search(line) and not (killed and "ended_by_signal" in line):
            return "\n".join(lines[max(0, i - 3):i + 60])
    return ""

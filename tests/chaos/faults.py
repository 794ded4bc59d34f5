"""The faults of a chaos run, one function a kind; docs/FAULTS.md lists all 48 cases and what is expected of each.

A function injects its fault, waits a moment that its random numbers say, heals it, and looks at what only it can see.
What holds for all (answers, hangs, usage, leaks, daemons that end by themselves) is watched by others meanwhile."""
import faults_around  # noqa: F401
import faults_stores  # noqa: F401
import faults_workers  # noqa: F401
from fault import FAULTS, Background, fault  # noqa: F401

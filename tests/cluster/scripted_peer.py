"""A peer in Python has two seconds to say a word, as any daemon, but one interpreter lock for all that it does beside
programs that compute on every core. So its process goes before them, where it may (as root)."""
import os

NICER = 10
# What starts a program at the usual priority.
USUAL = []
try:
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - NICER)
    USUAL = ["nice", "-n", str(NICER)]
except PermissionError:
    pass

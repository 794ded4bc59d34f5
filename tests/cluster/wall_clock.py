"""A wall clock that a test sets: a library loaded into daemons, whose clock is ahead by the seconds in a file. It also
counts for the waits of abseil and gRPC that last until a wall-clock time (tests/unit/wall_clock.h says how)."""
import os
import struct
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCE = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "tests/unit/wall_clock.h"

static int64_t wall_ahead_s(void)
{
    static const volatile int64_t *ahead_s;
    if (ahead_s == NULL) {
        int fd = open(getenv("WALL_CLOCK_FILE"), O_RDONLY | O_CLOEXEC);
        void *p = mmap(NULL, sizeof(*ahead_s), PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        if (p == MAP_FAILED) {
            abort();
        }
        ahead_s = p;
    }
    return *ahead_s;
}
"""


class WallClock:
    def __init__(self, folder):
        self.lib, self.file = os.path.join(folder, "wall_clock.so"), os.path.join(folder, "ahead")
        source = os.path.join(folder, "wall_clock.c")
        with open(source, "w") as f:
            f.write(SOURCE)
        subprocess.run(["gcc", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-I", ROOT, "-o", self.lib, source], check=True,
                       timeout=60)
        with open(self.file, "wb") as f:
            f.write(bytes(8))

    def jump(self, ahead_s):
        """The daemons' wall clock is so far ahead of this machine's from now on."""
        with open(self.file, "r+b") as f:
            f.write(struct.pack("<q", ahead_s))

    def environment(self, env):
        """A daemon's environment in which its wall clock is this one."""
        return {**env, "LD_PRELOAD": self.lib, "WALL_CLOCK_FILE": self.file,
                "ASAN_OPTIONS": env.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}

/* Faults that a test asks a tool for and that happen in the tool's wire process (flip_recv.h,
 * break_send.h): a page that both map. The wire process finds it by a descriptor of its parent's.
 */
#ifndef TESTS_TOOLS_WIRE_FAULTS_H
#define TESTS_TOOLS_WIRE_FAULTS_H

#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/base.h"

#define WIRE_FAULTS_FD 200

typedef enum { SNAP_NOT, SNAP_HALF_SENT, SNAP_NEXT } snap_what_t;

struct wire_faults {
    struct {
        _Atomic int armed;
        _Atomic uint32_t flips;
        _Atomic uint64_t state; /* of the generator; any value to begin with */
    } flip_;
    struct {
        _Atomic snap_what_t armed;
        _Atomic uint32_t breaks;
        int half_sent; /* a socket; of the transfer thread alone */
    } snap_;
};

static struct wire_faults wire_faults_none; /* before wire_faults_open */
static struct wire_faults *wire_faults = &wire_faults_none;

/* Before bt_wx_child_main_if_asked. */
static inline void wire_faults_open(int argc, char **argv)
{
    char path[64];
    int fd;
    if (argc > 2 && strcmp(argv[1], "--wire-process") == 0) {
        snprintf(path, sizeof(path), "/proc/%s/fd/%d", argv[2], WIRE_FAULTS_FD);
        fd = open(path, O_RDWR | O_CLOEXEC);
    } else {
        fd = memfd_create("wire-faults", MFD_CLOEXEC);
        BT_ASSERT(fd >= 0 && ftruncate(fd, sizeof(*wire_faults)) == 0 &&
                  dup3(fd, WIRE_FAULTS_FD, O_CLOEXEC) == WIRE_FAULTS_FD);
    }
    void *p = mmap(NULL, sizeof(*wire_faults), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    BT_ASSERT(fd >= 0 && p != MAP_FAILED);
    close(fd);
    wire_faults = p;
    wire_faults->snap_.half_sent = -1;
}

#endif

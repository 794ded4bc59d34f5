/* A network that turns bits over: this program's recv() instead of libc's, also for the libraries
 * it is linked with. UCX over TCP reads with recv(), gRPC does not. When told, one bit of what
 * comes next is turned over: in the payload (recognised by wire_peer's pattern, words that differ
 * by FLIP_STEP) or in the header of a message of ours. UCX's own headers are left alone: UCX
 * believes its peer and would not survive. */
#ifndef TESTS_TOOLS_FLIP_RECV_H
#define TESTS_TOOLS_FLIP_RECV_H

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kvstore/wire/msg.h"
#include "tests/tools/wire_faults.h"

#define FLIP_STEP 0x9e3779b97f4a7c15ull

enum { FLIP_NOTHING = 0, FLIP_PAYLOAD = 1, FLIP_HEADER = 2 };

#define flip (wire_faults->flip_)

static inline uint64_t flip_random(void)
{
    uint64_t x = atomic_fetch_add(&flip.state, FLIP_STEP) + FLIP_STEP;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static inline uint64_t flip_word(const uint8_t *p)
{
    uint64_t w;
    memcpy(&w, p, sizeof(w));
    return w;
}

static inline void flip_bit(uint8_t *p, size_t n)
{
    uint64_t bit = flip_random() % (8 * n);
    p[bit / 8] ^= (uint8_t)(1u << bit % 8);
    atomic_fetch_add(&flip.flips, 1);
    atomic_store(&flip.armed, FLIP_NOTHING);
}

static inline void flip_payload(uint8_t *p, size_t n)
{
    for (int tries = 0; n >= 32 && tries < 16; tries++) {
        uint8_t *at = p + flip_random() % (n - 31);
        for (int i = 0; i < 8; i++) { /* the pattern's words begin at one of these */
            if (flip_word(at + i + 8) - flip_word(at + i) == FLIP_STEP) {
                flip_bit(at + i, 16);
                return;
            }
        }
    }
}

static inline void flip_header(uint8_t *p, size_t n)
{
    const uint32_t magic = BT_WIRE_SEG_MAGIC;
    uint8_t *at = memmem(p, n, &magic, sizeof(magic));
    struct bt_wire_seg_hdr h;
    if (at == NULL || at + sizeof(h) > p + n) {
        return;
    }
    memcpy(&h, at, sizeof(h));
    size_t len = sizeof(h) + 4u * h.n_segs;
    if (h.version == BT_WIRE_VERSION && at + len <= p + n) {
        flip_bit(at, len);
    }
}

ssize_t recv(int fd, void *buf, size_t len, int flags)
{
    ssize_t n = syscall(SYS_recvfrom, fd, buf, len, flags, NULL, NULL); /* sets errno */
    int armed = atomic_load(&flip.armed);
    if (n > 0 && armed == FLIP_PAYLOAD) {
        flip_payload(buf, (size_t)n);
    } else if (n > 0 && armed == FLIP_HEADER) {
        flip_header(buf, (size_t)n);
    }
    return n;
}

#endif

/* An input of libFuzzer read as a tape of choices: numbers, lengths and bytes. Behind its end every
 * choice is zero, so that a short input is a short run and never an error. */
#ifndef TESTS_FUZZ_TAPE_H
#define TESTS_FUZZ_TAPE_H

#include <stdint.h>
#include <string.h>

#include "common/base/base.h"

struct tape {
    const uint8_t *at, *end;
};

static inline struct tape tape_of(const uint8_t *data, size_t size)
{
    return (struct tape){.at = data, .end = data + size};
}

static inline size_t tape_left(const struct tape *t)
{
    return (size_t)(t->end - t->at);
}

static inline uint8_t tape_u8(struct tape *t)
{
    return t->at < t->end ? *t->at++ : 0;
}

static inline bool tape_bool(struct tape *t)
{
    return (tape_u8(t) & 1) != 0;
}

/* Below n; n > 0. */
static inline uint32_t tape_below(struct tape *t, uint32_t n)
{
    uint32_t v = tape_u8(t);
    if (n > 256) {
        v |= (uint32_t)tape_u8(t) << 8;
    }
    if (n > 65536) {
        v |= (uint32_t)tape_u8(t) << 16;
    }
    return v % n;
}

/* Once in n; never behind the end of the tape. */
static inline bool tape_one_in(struct tape *t, uint32_t n)
{
    return tape_left(t) > 0 && tape_below(t, n) == n - 1;
}

static inline uint64_t tape_raw64(struct tape *t)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) {
        v |= (uint64_t)tape_u8(t) << 8 * i;
    }
    return v;
}

/* Mostly small, or an end of a type or beside it, or any 64 bits. */
static inline uint64_t tape_u64(struct tape *t)
{
    uint8_t how = tape_u8(t);
    switch (how % 8) {
    case 0:
    case 1:
    case 2:
    case 3: return how / 8;
    case 4: return tape_u8(t);
    case 5: return (1ull << tape_u8(t) % 64) - 1 + how / 8 % 3;
    case 6: return UINT64_MAX - how / 8;
    default: return tape_raw64(t);
    }
}

static inline int64_t tape_i64(struct tape *t)
{
    return (int64_t)tape_u64(t);
}

/* The next n bytes, or as many as there are. */
static inline const uint8_t *tape_bytes(struct tape *t, size_t n, size_t *n_p)
{
    const uint8_t *p = t->at;
    *n_p = BT_MIN(n, tape_left(t));
    t->at += *n_p;
    return p;
}

/* A length and so many bytes, at most max. */
static inline const uint8_t *tape_blob(struct tape *t, size_t max, size_t *n_p)
{
    size_t n = tape_below(t, (uint32_t)BT_MIN(max, (size_t)65535) + 1);
    return tape_bytes(t, n, n_p);
}

#endif

/* CRC32C: SSE4.2's instruction in three interleaved lanes for long runs, a table elsewhere. The
 * lanes are joined by multiplying by x^(8n) mod P, precomputed for one lane length. Any thread. */
#include "common/base/crc32c.h"

#include <stdbool.h>
#include <string.h>

#define POLY 0x82f63b78u
#define LANE 1024u /* bytes a lane; three lanes a round hide the instruction's latency of three */

static uint32_t table[256];
static uint32_t shift1[4][256], shift2[4][256]; /* crc -> crc * x^(8*LANE), crc * x^(16*LANE) */
static bool have_sse42;

static uint32_t shift_by_zeros(uint32_t crc, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        crc = table[crc & 0xff] ^ (crc >> 8);
    }
    return crc;
}

/* Shifting is linear over GF(2): tabulate it for each byte of the register. */
static void fill_shift(uint32_t t[4][256], size_t n)
{
    uint32_t bit[32];
    for (int i = 0; i < 32; i++) {
        bit[i] = shift_by_zeros(1u << i, n);
    }
    for (int k = 0; k < 4; k++) {
        for (uint32_t v = 0; v < 256; v++) {
            uint32_t r = 0;
            for (int i = 0; i < 8; i++) {
                if (v >> i & 1) {
                    r ^= bit[8 * k + i];
                }
            }
            t[k][v] = r;
        }
    }
}

__attribute__((constructor)) static void crc32c_init(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) {
            c = c & 1 ? POLY ^ (c >> 1) : c >> 1;
        }
        table[i] = c;
    }
    fill_shift(shift1, LANE);
    fill_shift(shift2, 2 * LANE);
#if defined(__x86_64__)
    __builtin_cpu_init();
    have_sse42 = __builtin_cpu_supports("sse4.2");
#endif
}

#if defined(__x86_64__)
static uint32_t shift(const uint32_t t[4][256], uint32_t c)
{
    return t[0][c & 0xff] ^ t[1][c >> 8 & 0xff] ^ t[2][c >> 16 & 0xff] ^ t[3][c >> 24];
}

static uint64_t load64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

__attribute__((target("sse4.2"))) static uint32_t crc_hw(uint32_t crc, const uint8_t *p, size_t n)
{
    while (n >= 3 * LANE) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            a = __builtin_ia32_crc32di(a, load64(p + i));
            b = __builtin_ia32_crc32di(b, load64(p + LANE + i));
            c = __builtin_ia32_crc32di(c, load64(p + 2 * LANE + i));
        }
        crc = shift(shift2, (uint32_t)a) ^ shift(shift1, (uint32_t)b) ^ (uint32_t)c;
        p += 3 * LANE;
        n -= 3 * LANE;
    }
    uint64_t r = crc;
    for (; n >= 8; p += 8, n -= 8) {
        r = __builtin_ia32_crc32di(r, load64(p));
    }
    for (; n > 0; p++, n--) {
        r = __builtin_ia32_crc32qi((uint32_t)r, *p);
    }
    return (uint32_t)r;
}
#endif

uint32_t bt_crc32c(uint32_t crc, const void *data, size_t n)
{
    const uint8_t *p = data;
    crc = ~crc;
#if defined(__x86_64__)
    if (have_sse42) {
        return ~crc_hw(crc, p, n);
    }
#endif
    for (; n > 0; p++, n--) {
        crc = table[(crc ^ *p) & 0xff] ^ (crc >> 8);
    }
    return ~crc;
}

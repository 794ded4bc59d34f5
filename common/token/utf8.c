/* UTF-8: strict decoding (no surrogates, no overlong forms), lossy output with U+FFFD for each
 * maximal subpart of an ill-formed sequence (Unicode 15, section 3.9), white space. Pure. */
#include "common/token/token_priv.h"

/* The character's length by its first byte, and the range of its second byte; 0 = not a first
 * byte. */
static size_t lead_info(uint8_t c, uint8_t *lo_p, uint8_t *hi_p)
{
    *lo_p = 0x80;
    *hi_p = 0xbf;
    if (c < 0x80) {
        return 1;
    }
    if (c >= 0xc2 && c <= 0xdf) {
        return 2;
    }
    if (c >= 0xe0 && c <= 0xef) {
        if (c == 0xe0) {
            *lo_p = 0xa0;
        } else if (c == 0xed) {
            *hi_p = 0x9f;
        }
        return 3;
    }
    if (c >= 0xf0 && c <= 0xf4) {
        if (c == 0xf0) {
            *lo_p = 0x90;
        } else if (c == 0xf4) {
            *hi_p = 0x8f;
        }
        return 4;
    }
    return 0;
}

/* Length of the longest prefix of [p, p+n) that begins a well-formed character; *need_p is the
 * length of the whole character (0: the first byte cannot begin one, the prefix is 1). */
static size_t subpart(const uint8_t *p, size_t n, size_t *need_p)
{
    uint8_t lo, hi;
    size_t need = lead_info(p[0], &lo, &hi), got = 1;
    *need_p = need;
    while (got < need && got < n && p[got] >= lo && p[got] <= hi) {
        got++;
        lo = 0x80;
        hi = 0xbf;
    }
    return got;
}

size_t bt_utf8_decode(const char *p, const char *end, uint32_t *cp_p)
{
    if (p >= end) {
        return 0;
    }
    const uint8_t *u = (const uint8_t *)p;
    size_t need, got = subpart(u, (size_t)(end - p), &need);
    if (need == 0 || got != need) {
        return 0;
    }
    static const uint8_t mask[5] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t cp = u[0] & mask[need];
    for (size_t i = 1; i < need; i++) {
        cp = cp << 6 | (u[i] & 0x3f);
    }
    *cp_p = cp;
    return need;
}

size_t bt_utf8_encode(uint32_t cp, char out[4])
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

bool bt_utf8_valid(const char *p, size_t n)
{
    const char *end = p + n;
    uint32_t cp;
    while (p < end) {
        size_t k = (uint8_t)*p < 0x80 ? 1 : bt_utf8_decode(p, end, &cp);
        if (k == 0) {
            return false;
        }
        p += k;
    }
    return true;
}

bool bt_utf8_is_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || cp == 32 || cp == 0x85 || cp == 0xa0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029 || cp == 0x202f ||
           cp == 0x205f || cp == 0x3000;
}

size_t bt_utf8_append_lossy(struct bt_buf *out, const char *p, size_t n, bool final)
{
    size_t i = 0, clean = 0; /* [clean, i) is well formed and not appended yet */
    if (n == 0) {
        return 0; /* p may be NULL */
    }
    while (i < n) {
        if ((uint8_t)p[i] < 0x80) {
            i++;
            continue;
        }
        size_t need, got = subpart((const uint8_t *)p + i, n - i, &need);
        if (need != 0 && got == need) {
            i += need;
            continue;
        }
        bt_buf_append(out, p + clean, i - clean);
        if (need != 0 && i + got == n && !final) {
            return n - i;
        }
        bt_buf_append(out, "\xef\xbf\xbd", 3);
        i += got;
        clean = i;
    }
    bt_buf_append(out, p + clean, n - clean);
    return 0;
}

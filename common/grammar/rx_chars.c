/* From characters to bytes: ranges of code points in UTF-8, or spelled as in a JSON string (RFC
 * 8259, section 7). A range is cut into ranges in which each digit has a range of its own. UTF-8
 * has digits of 6 bits, \uXXXX has hexadecimal digits. */
#include "common/grammar/rx_priv.h"

/* Adds bytes lo..hi to a class. */
static void add_bytes(uint64_t bits[4], uint32_t lo, uint32_t hi)
{
    for (uint32_t b = lo; b <= hi; b++) {
        bits[b >> 6] |= 1ull << (b & 63);
    }
}

static bt_rx_t bytes_range(struct bt_rx_set *s, uint32_t lo, uint32_t hi)
{
    uint64_t bits[4] = {0};
    add_bytes(bits, lo, hi);
    return bt_rx_class(s, bits);
}

/* Hexadecimal digits lo..hi, in either case. */
static bt_rx_t hex_range(struct bt_rx_set *s, uint32_t lo, uint32_t hi)
{
    uint64_t bits[4] = {0};
    for (uint32_t d = lo; d <= hi; d++) {
        if (d < 10) {
            add_bytes(bits, '0' + d, '0' + d);
        } else {
            add_bytes(bits, 'a' + d - 10, 'a' + d - 10);
            add_bytes(bits, 'A' + d - 10, 'A' + d - 10);
        }
    }
    return bt_rx_class(s, bits);
}

/* The numbers lo..hi, written with `digits` digits of `shift` bits each. utf8: the digits are bytes
 * of UTF-8; `lead` is added to the first one, and 0x80 to the others. Otherwise they are
 * hexadecimal digits. */
static bt_rx_t digits_range(struct bt_rx_set *s, uint32_t lo, uint32_t hi, uint32_t digits,
                            uint32_t shift, uint32_t lead, bool utf8)
{
    uint32_t low = (digits - 1) * shift, rest = (1u << low) - 1;
    uint32_t a = lo >> low, b = hi >> low;
    if (digits == 1) {
        return utf8 ? bytes_range(s, lead + lo, lead + hi) : hex_range(s, lo, hi);
    }
    bt_rx_t part[3];
    uint32_t n = 0;
    if (a < b && (lo & rest) != 0) { /* numbers of the first digit that begin above 0...0 */
        part[n++] = digits_range(s, lo, lo | rest, digits, shift, lead, utf8);
        lo = (lo | rest) + 1;
        a++;
    }
    if (a < b && (hi & rest) != rest) { /* numbers of the last digit that end below its greatest */
        part[n++] = digits_range(s, hi & ~rest, hi, digits, shift, lead, utf8);
        hi = (hi & ~rest) - 1;
        b--;
    }
    bt_rx_t head = utf8 ? bytes_range(s, lead + a, lead + b) : hex_range(s, a, b);
    bt_rx_t tail = digits_range(s, lo & rest, hi & rest, digits - 1, shift, 0x80, utf8);
    part[n++] = bt_rx_concat(s, head, tail);
    return n == 1 ? part[0] : bt_rx_or_list(s, part, n);
}

static bool push_digits(struct bt_rx_set *s, uint32_t lo, uint32_t hi, uint32_t digits,
                        uint32_t shift, uint32_t lead, bool utf8)
{
    return lo > hi || bt_rx_push(s, digits_range(s, lo, hi, digits, shift, lead, utf8));
}

/* Pushes the code points lo..hi in UTF-8 onto the scratch stack. */
static bool push_utf8(struct bt_rx_set *s, uint32_t lo, uint32_t hi)
{
    static const struct {
        uint32_t first, last, digits, lead;
    } forms[] = {{0, 0x7F, 1, 0},
                 {0x80, 0x7FF, 2, 0xC0},
                 {0x800, 0xD7FF, 3, 0xE0},
                 {0xE000, 0xFFFF, 3, 0xE0},
                 {0x10000, 0x10FFFF, 4, 0xF0}};
    for (size_t i = 0; i < BT_ARRAY_LEN(forms); i++) {
        if (!push_digits(s, BT_MAX(lo, forms[i].first), BT_MIN(hi, forms[i].last), forms[i].digits,
                         6, forms[i].lead, true)) {
            return false;
        }
    }
    return true;
}

static bt_rx_t prefixed(struct bt_rx_set *s, const char *prefix, bt_rx_t a)
{
    return bt_rx_concat(s, bt_rx_text(s, prefix, strlen(prefix)), a);
}

/* \uXXXX for the code units lo..hi. */
static bt_rx_t unit(struct bt_rx_set *s, uint32_t lo, uint32_t hi)
{
    return prefixed(s, "\\u", digits_range(s, lo, hi, 4, 4, 0, false));
}

static bool push_units(struct bt_rx_set *s, uint32_t lo, uint32_t hi)
{
    return lo > hi || bt_rx_push(s, unit(s, lo, hi));
}

/* Pushes code points beyond U+FFFF as surrogate pairs. */
static bool push_pairs(struct bt_rx_set *s, uint32_t lo, uint32_t hi)
{
    while (lo <= hi) {
        uint32_t a = (lo - 0x10000) >> 10, b = (hi - 0x10000) >> 10;
        uint32_t from = lo & 0x3FF, to = hi & 0x3FF;
        if (a < b && from != 0) { /* the first high unit is not complete */
            b = a;
            to = 0x3FF;
        } else if (a < b && to != 0x3FF) {
            b--;
            to = 0x3FF;
        }
        if (!bt_rx_push(s, bt_rx_concat(s, unit(s, 0xD800 + a, 0xD800 + b),
                                        unit(s, 0xDC00 + from, 0xDC00 + to)))) {
            return false;
        }
        lo = 0x10000 + (b << 10) + to + 1;
    }
    return true;
}

/* Pushes the code points lo..hi, spelled as in a JSON string, onto the scratch stack. */
static bool push_json(struct bt_rx_set *s, uint32_t lo, uint32_t hi)
{
    static const struct {
        char letter;
        uint8_t c;
    } escapes[] = {{'"', '"'},  {'\\', '\\'}, {'/', '/'},  {'b', '\b'},
                   {'f', '\f'}, {'n', '\n'},  {'r', '\r'}, {'t', '\t'}};
    static const uint32_t plain[][2] = {{0x20, '"' - 1}, {'"' + 1, '\\' - 1}, {'\\' + 1, 0x10FFFF}};
    for (size_t i = 0; i < BT_ARRAY_LEN(plain); i++) {
        if (!push_utf8(s, BT_MAX(lo, plain[i][0]), BT_MIN(hi, plain[i][1]))) {
            return false;
        }
    }
    uint64_t letters[4] = {0};
    for (size_t i = 0; i < BT_ARRAY_LEN(escapes); i++) {
        if (escapes[i].c >= lo && escapes[i].c <= hi) {
            add_bytes(letters, (uint8_t)escapes[i].letter, (uint8_t)escapes[i].letter);
        }
    }
    return bt_rx_push(s, prefixed(s, "\\", bt_rx_class(s, letters))) &&
           push_units(s, lo, BT_MIN(hi, 0xD7FF)) &&
           push_units(s, BT_MAX(lo, 0xE000), BT_MIN(hi, 0xFFFF)) &&
           push_pairs(s, BT_MAX(lo, 0x10000), hi);
}

static bt_rx_t make_chars(struct bt_rx_set *s, enum bt_rx_encoding enc, const struct bt_rx_range *r,
                          size_t n)
{
    uint32_t base = s->n_scratch;
    bool ok = true;
    for (size_t i = 0; i < n && ok; i++) {
        uint32_t last = BT_MIN(r[i].last, 0x10FFFF);
        if (r[i].first > last) {
            continue;
        }
        ok = enc == BT_RX_UTF8 ? push_utf8(s, r[i].first, last) : push_json(s, r[i].first, last);
    }
    if (!ok) {
        s->n_scratch = base;
        return BT_RX_FAILED;
    }
    bt_rx_t a = bt_rx_or_scratch(s, base);
    if (a != BT_RX_FAILED) {
        s->nodes[a].flags |= BT_RX_F_CHARS << enc;
        if (n == 1 && r[0].first == 0 && r[0].last >= 0x10FFFF) {
            s->all_chars[enc] = a;
        }
    }
    return a;
}

bt_rx_t bt_rx_chars(struct bt_rx_set *s, enum bt_rx_encoding enc, const struct bt_rx_range *r,
                    size_t n)
{
    bool kept = n == 1 && r->first == r->last && r->first < 128 && enc == BT_RX_JSON_STRING;
    if (kept && s->json_char[r->first] != BT_RX_NONE) {
        return s->json_char[r->first];
    }
    bt_rx_t a = make_chars(s, enc, r, n);
    if (kept && a != BT_RX_FAILED) {
        s->json_char[r->first] = a;
    }
    return a;
}

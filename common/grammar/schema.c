/* The JSON Schema front end: entry, memory and errors. */
#include "common/grammar/front_end.h"
#include "common/grammar/schema_priv.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES ((size_t)64 << 10)
struct bt_schema_chunk {
    struct bt_schema_chunk *next;
    size_t size;
    _Alignas(16) char data[];
};

void *bt_schema_alloc(struct bt_schema *c, size_t n)
{
    n = (n + 15) & ~(size_t)15;
    if (n > c->chunk_left) {
        size_t size = n > CHUNK_BYTES ? n : CHUNK_BYTES;
        struct bt_schema_chunk *k = NULL;
        if (c->bytes + size <= BT_SCHEMA_ARENA_MAX)
            k = calloc(1, sizeof(*k) + size);
        if (!k)
            bt_schema_fail(c, BT_ERR_EXHAUSTED, NULL,
                           "the schema needs more than %u MiB of memory; make it smaller",
                           BT_SCHEMA_ARENA_MAX >> 20);
        k->size = size;
        k->next = c->chunks;
        c->chunks = k;
        c->bytes += size;
        c->chunk_left = size;
    }
    struct bt_schema_chunk *k = c->chunks;
    void *p = k->data + (k->size - c->chunk_left);
    c->chunk_left -= n;
    return p;
}

void *bt_schema_grow(struct bt_schema *c, void *p, uint32_t n, uint32_t *cap, size_t size)
{
    if (n < *cap)
        return p;
    uint32_t more = *cap ? *cap * 2 : 16;
    void *q = bt_schema_alloc(c, more * size);
    if (n)
        memcpy(q, p, n * size);
    *cap = more;
    return q;
}

void bt_schema_throw(struct bt_schema *c, bt_status_t status)
{
    c->status = status;
    longjmp(*c->jump, 1);
}

void bt_schema_fail(struct bt_schema *c, bt_status_t status, const struct bt_sj *at,
                    const char *fmt, ...)
{
    char where[512] = "#", text[512];
    if (at)
        bt_sj_pointer(at, where, sizeof(where));
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    /* replaces control characters, because the schema comes from a client */
    for (char *p = text; *p; p++)
        if ((uint8_t)*p < 0x20 || *p == 0x7F)
            *p = '?';
    if (c->err_cap)
        snprintf(c->err, c->err_cap, "%s: %s", where, text);
    bt_schema_throw(c, status);
}

void bt_schema_work(struct bt_schema *c, uint32_t n)
{
    c->work += n < BT_SCHEMA_WORK_MAX ? n : BT_SCHEMA_WORK_MAX;
    if (c->work > BT_SCHEMA_WORK_MAX)
        bt_schema_fail(c, BT_ERR_EXHAUSTED, NULL,
                       "the combinations of allOf, anyOf, oneOf, not and if are too many; "
                       "use fewer alternatives");
}

bt_rx_t bt_schema_rx(struct bt_schema *c, bt_rx_t rx)
{
    if (rx == BT_RX_FAILED)
        bt_schema_fail(c, BT_ERR_EXHAUSTED, NULL,
                       "the patterns, enums and bounds of the schema are too large together; "
                       "make them smaller");
    return rx;
}

const struct bt_why *bt_schema_why(struct bt_schema *c, const struct bt_sj *at, const char *text)
{
    struct bt_why *w = bt_schema_alloc(c, sizeof(*w));
    *w = (struct bt_why){.at = at, .text = text};
    return w;
}

static void free_arena(struct bt_schema *c)
{
    while (c->chunks) {
        struct bt_schema_chunk *k = c->chunks;
        c->chunks = k->next;
        free(k);
    }
}

static uint32_t draft_of(const struct bt_sj *root)
{
    const struct bt_sj *v = root->type == BT_SJ_OBJECT ? bt_sj_get(root, "$schema") : NULL;
    static const struct {
        const char *text;
        uint32_t draft;
    } drafts[] = {{"draft-03", 4}, {"draft-04", 4}, {"draft-05", 4},
                  {"draft-06", 6}, {"draft-07", 7}, {"draft/2019-09", 2019}};
    for (size_t i = 0; v && v->type == BT_SJ_STRING && i < BT_ARRAY_LEN(drafts); i++)
        if (memmem(v->text.s, v->text.n, drafts[i].text, strlen(drafts[i].text)))
            return drafts[i].draft;
    return 2020;
}

/* Reads "x-guidance" of the root (llguidance's extension of JSON Schema), which says what white
 * space is allowed. Without it the answer may have one space, or, where a line may begin, a line
 * end followed by spaces or tabs. */
static void white_space(struct bt_schema *c)
{
    uint64_t ws[4] = {(1ull << ' ') | (1ull << '\t') | (1ull << '\n') | (1ull << '\r')};
    struct bt_rx_set *s = c->rx;
    bt_rx_t any = bt_rx_class(s, ws), space = bt_rx_text(s, " ", 1);
    bt_rx_t in_line = bt_rx_repeat(s, space, 0, 1), line = bt_rx_text(s, "\n", 1);
    bt_rx_t indent = bt_rx_or(s, bt_rx_repeat(s, space, 0, BT_SCHEMA_INDENT_MAX),
                              bt_rx_repeat(s, bt_rx_text(s, "\t", 1), 0, BT_SCHEMA_INDENT_MAX / 4));
    line = bt_rx_concat(s, bt_rx_or(s, line, bt_rx_text(s, "\r\n", 2)), indent);
    c->kept.blank = bt_schema_rx(c, in_line);
    c->kept.space = bt_schema_rx(c, bt_rx_or(s, in_line, line));
    const struct bt_sj *x = c->root->type == BT_SJ_OBJECT ? bt_sj_get(c->root, "x-guidance") : NULL;
    if (!x)
        return;
    if (x->type != BT_SJ_OBJECT)
        bt_schema_fail(c, BT_ERR_INVALID, x, "x-guidance must be an object");
    for (uint32_t i = 0; i < x->n; i++) {
        const struct bt_sj *v = x->items[i];
        bool flexible = bt_sj_get(x, "whitespace_flexible") == v;
        if (!flexible && bt_sj_get(x, "whitespace_pattern") != v)
            bt_schema_fail(
                c, BT_ERR_UNSUPPORTED, v,
                "only whitespace_pattern and whitespace_flexible are known; leave it out");
        if (flexible ? v->type != BT_SJ_TRUE && v->type != BT_SJ_FALSE : v->type != BT_SJ_STRING)
            bt_schema_fail(c, BT_ERR_INVALID, v,
                           flexible ? "whitespace_flexible must be true or false"
                                    : "whitespace_pattern must be a string");
    }
    const struct bt_sj *pattern = bt_sj_get(x, "whitespace_pattern");
    const struct bt_sj *flexible = bt_sj_get(x, "whitespace_flexible");
    if (pattern) {
        char why[200] = "";
        bt_rx_t rx = BT_RX_NONE;
        bt_status_t st = bt_rx_parse(s, pattern->text.s, pattern->text.n, false, BT_RX_UTF8, &rx,
                                     why, sizeof(why));
        if (st != BT_OK)
            bt_schema_fail(c, st, pattern, "%s", why);
        bt_rx_t others = bt_rx_not(s, bt_rx_repeat(s, any, 0, BT_RX_NO_MAX));
        if (bt_str_none(c, rx) || !bt_str_none(c, bt_schema_rx(c, bt_rx_and(s, rx, others))))
            bt_schema_fail(c, BT_ERR_INVALID, pattern,
                           "the pattern must match spaces, tabs and line ends, and nothing else");
        c->kept.space = c->kept.blank = bt_schema_rx(c, rx);
    } else if (flexible && flexible->type == BT_SJ_TRUE) {
        c->kept.space = c->kept.blank =
            bt_schema_rx(c, bt_rx_repeat(s, any, 0, BT_SCHEMA_SPACE_MAX));
    } else if (flexible) {
        c->kept.space = c->kept.blank;
    }
}

static bt_node_t build(struct bt_schema *c, const char *text, size_t len)
{
    c->str_all = bt_str_any(c);
    c->num_all = bt_schema_rx(c, bt_num_rx_all(c->rx));
    c->num_plain = bt_schema_rx(c, bt_num_rx_plain(c->rx));
    struct bt_nf *all = bt_schema_alloc(c, sizeof(*all));
    all->bits = BT_NF_NULL | BT_NF_FALSE | BT_NF_TRUE;
    all->str = bt_strset_rx(c->str_all);
    all->num = bt_num_all(c);
    all->arr = bt_schema_alloc(c, sizeof(*all->arr));
    all->obj = bt_schema_alloc(c, sizeof(*all->obj));
    all->arr[0] = bt_arr_new(c);
    all->obj[0] = bt_obj_new(c);
    all->n_arr = all->n_obj = 1;
    c->all = all;
    c->sets = bt_schema_grow(c, NULL, 0, &c->cap_sets, sizeof(*c->sets));
    c->sets[BT_SET_TRUE] = (struct bt_schema_set){.nf = all, .node = BT_NODE_FAILED};
    c->sets[BT_SET_NONE] = (struct bt_schema_set){.nf = bt_schema_alloc(c, sizeof(struct bt_nf)),
                                                  .node = BT_NODE_NONE};
    c->n_sets = 2;
    c->root = bt_sj_parse(c, text, len);
    c->draft = draft_of(c->root);
    white_space(c);
    bt_schema_names(c);
    bt_node_t parts[3];
    parts[1] = bt_schema_emit(c, bt_set_of(c, c->root));
    if (parts[1] == BT_NODE_NONE)
        bt_schema_fail(c, BT_ERR_INVALID, c->root,
                       "nothing satisfies this schema; remove what contradicts itself");
    parts[0] = parts[2] = bt_program_regex(c->p, bt_rx_or(c->rx, c->kept.space, BT_RX_EMPTY));
    bt_node_t node = bt_program_seq(c->p, parts, 3);
    if (node == BT_NODE_FAILED)
        bt_schema_fail(c, BT_ERR_EXHAUSTED, NULL, "the schema is too large; make it smaller");
    return node;
}

/* A function of its own, because locals of a function that calls setjmp may be lost after a jump.
 * *c belongs to the caller and stays intact. Returns normally also after an error. */
static void build_or_fail(struct bt_schema *c, const char *text, size_t len, bt_node_t *start)
{
    jmp_buf jump;
    c->jump = &jump;
    if (setjmp(jump) == 0)
        *start = build(c, text, len);
}

bt_status_t bt_grammar_build_schema(struct bt_program *p, const char *text, size_t len,
                                    bt_node_t *start, char *err, size_t err_cap)
{
    struct bt_schema c = {
        .p = p, .rx = bt_program_rx(p), .err = err, .err_cap = err_cap, .status = BT_OK};
    build_or_fail(&c, text, len, start);
    free_arena(&c);
    return c.status;
}

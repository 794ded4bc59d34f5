/* The memory of a set of expressions. Each node is kept once, by its content, so that equal
 * expressions have equal numbers. A node's flags and bounds are computed when it is made. */
#include "common/grammar/rx_priv.h"

#include <stdlib.h>

#include "common/grammar/room.h"

#define FIRST_WORK 20000000u /* about 100 ms */
#define CHUNK      (16u * 1024)

/* ---- memory ---- */

bool bt_rx_take(struct bt_rx_set *s, size_t n)
{
    return bt_room_take(&s->full, s->max_bytes, &s->bytes, n);
}

bool bt_rx_grow(struct bt_rx_set *s, void *array_p, uint32_t n, uint32_t *cap, size_t size)
{
    if (n < *cap) {
        return true;
    }
    uint32_t want = *cap ? *cap * 2 : 64;
    if (want > BT_RX_ID_MAX || !bt_rx_take(s, (want - *cap) * size)) {
        s->full = true;
        return false;
    }
    bt_room_enlarge(array_p, cap, want, size);
    return true;
}

void *bt_rx_alloc(struct bt_rx_set *s, size_t n)
{
    n = BT_ALIGN_UP(n, 8);
    if (n > s->chunk_left) {
        size_t size = BT_MAX((size_t)CHUNK, n);
        if (!bt_rx_grow(s, &s->chunks, s->n_chunks, &s->chunks_cap, sizeof(void *)) ||
            !bt_rx_take(s, size)) {
            return NULL;
        }
        s->chunk = s->chunks[s->n_chunks++] = bt_malloc(size);
        s->chunk_left = size;
        s->chunk_bytes += size;
    }
    void *p = s->chunk;
    s->chunk += n;
    s->chunk_left -= n;
    return p;
}

bool bt_rx_push(struct bt_rx_set *s, bt_rx_t a)
{
    if (a == BT_RX_FAILED ||
        !bt_rx_grow(s, &s->scratch, s->n_scratch, &s->scratch_cap, sizeof(uint32_t))) {
        return false;
    }
    s->scratch[s->n_scratch++] = a;
    return true;
}

bt_rx_t bt_rx_fail(struct bt_rx_set *s, uint32_t base)
{
    s->full = true;
    s->n_scratch = base;
    return BT_RX_FAILED;
}

struct bt_rx_set *bt_rx_set_create(size_t max_bytes)
{
    struct bt_rx_set *s = bt_calloc(1, sizeof(*s));
    s->max_bytes = BT_MAX(max_bytes, (size_t)64 * 1024);
    s->work = FIRST_WORK;
    s->bytes = sizeof(*s);
    s->n_heads = 256;
    s->heads = bt_malloc(s->n_heads * sizeof(uint32_t));
    memset(s->heads, 0xFF, s->n_heads * sizeof(uint32_t));
    memset(s->part_heads, 0xFF, sizeof(s->part_heads));
    s->bytes += s->n_heads * sizeof(uint32_t);
    s->nodes_cap = 64;
    s->nodes = bt_calloc(s->nodes_cap, sizeof(*s->nodes));
    s->bytes += s->nodes_cap * sizeof(*s->nodes);
    s->nodes[BT_RX_NONE] = (struct bt_rx_node){.kind = BT_RX_K_NONE,
                                               .flags = BT_RX_F_POSITIVE | BT_RX_F_DEAD |
                                                        BT_RX_F_CHARS_ALL | BT_RX_F_FINITE,
                                               .next = UINT32_MAX};
    s->nodes[BT_RX_EMPTY] = (struct bt_rx_node){.kind = BT_RX_K_EMPTY,
                                                .flags = BT_RX_F_POSITIVE | BT_RX_F_ALIVE |
                                                         BT_RX_F_NULLABLE | BT_RX_F_CHARS_ALL,
                                                .next = UINT32_MAX};
    s->n_nodes = 3;
    static const uint64_t all[4] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    bt_rx_t any = bt_rx_class(s, all);
    s->nodes[BT_RX_ANY] =
        (struct bt_rx_node){.kind = BT_RX_K_REPEAT,
                            .flags = BT_RX_F_POSITIVE | BT_RX_F_ALIVE | BT_RX_F_NULLABLE,
                            .a = any,
                            .c = BT_RX_NO_MAX,
                            .next = UINT32_MAX};
    return s;
}

void bt_rx_set_destroy(struct bt_rx_set *s)
{
    if (!s) {
        return;
    }
    for (uint32_t i = 0; i < s->n_chunks; i++) {
        free(s->chunks[i]);
    }
    free(s->chunks);
    free(s->parts);
    free(s->search.state);
    free(s->search.parent);
    free(s->search.bound);
    free(s->search.heap);
    free(s->scratch);
    free(s->classes);
    free(s->lists);
    free(s->heads);
    free(s->nodes);
    free(s);
}

bool bt_rx_set_full(const struct bt_rx_set *s)
{
    return s->full;
}

size_t bt_rx_set_bytes(const struct bt_rx_set *s)
{
    return s->bytes;
}

void bt_rx_set_budget(struct bt_rx_set *s, uint64_t work)
{
    s->work = work;
    s->full = false;
}

/* ---- hash-consing ---- */

static uint32_t hash3(uint32_t kind, uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t h = (a + 0x9E3779B97F4A7C15u * kind) * 0xD6E8FEB86659FD93u;
    h = (h ^ (h >> 32) ^ b) * 0xD6E8FEB86659FD93u;
    h = (h ^ (h >> 32) ^ c) * 0xD6E8FEB86659FD93u;
    return (uint32_t)(h ^ (h >> 32));
}

static uint32_t hash_list(uint32_t kind, const uint32_t *list, uint32_t n)
{
    uint64_t h = kind + n;
    for (uint32_t i = 0; i < n; i++) {
        h = (h ^ list[i]) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    return (uint32_t)h;
}

static uint32_t node_hash(const struct bt_rx_set *s, const struct bt_rx_node *n)
{
    if (n->kind == BT_RX_K_OR || n->kind == BT_RX_K_AND) {
        return hash_list(n->kind, s->lists + n->a, n->b);
    }
    if (n->kind == BT_RX_K_CLASS) {
        const uint64_t *c = s->classes[n->a];
        return hash3(n->kind, c[0] ^ (c[3] << 1), c[1], c[2]);
    }
    return hash3(n->kind, n->a, n->b, n->c);
}

/* Makes all hash chains anew. */
static void chain_all(struct bt_rx_set *s)
{
    memset(s->heads, 0xFF, s->n_heads * sizeof(uint32_t));
    for (uint32_t i = BT_RX_ANY + 1; i < s->n_nodes; i++) {
        uint32_t *head = &s->heads[node_hash(s, &s->nodes[i]) & (s->n_heads - 1)];
        s->nodes[i].next = *head;
        *head = i;
    }
}

void bt_rx_mark(const struct bt_rx_set *s, struct bt_rx_mark *mark)
{
    *mark = (struct bt_rx_mark){.n_nodes = s->n_nodes,
                                .n_lists = s->n_lists,
                                .n_classes = s->n_classes,
                                .n_chunks = s->n_chunks,
                                .chunk = s->chunk,
                                .chunk_left = s->chunk_left,
                                .chunk_bytes = s->chunk_bytes};
}

void bt_rx_rewind(struct bt_rx_set *s, const struct bt_rx_mark *mark)
{
    while (s->n_chunks > mark->n_chunks) {
        free(s->chunks[--s->n_chunks]);
    }
    s->bytes -= s->chunk_bytes - mark->chunk_bytes;
    s->chunk_bytes = mark->chunk_bytes;
    s->chunk = mark->chunk;
    s->chunk_left = mark->chunk_left;
    s->n_nodes = mark->n_nodes;
    s->n_lists = mark->n_lists;
    s->n_classes = mark->n_classes;
    s->n_scratch = 0;
    s->full = false;
    for (int e = 0; e < 2; e++) {
        s->all_chars[e] = s->all_chars[e] < s->n_nodes ? s->all_chars[e] : BT_RX_NONE;
    }
    for (uint32_t i = 0; i < s->n_nodes; i++) { /* kept nodes may have newer rows and partitions */
        s->nodes[i].row = NULL;
        s->nodes[i].part = NULL;
    }
    memset(s->part_heads, 0xFF, sizeof(s->part_heads));
    s->n_parts = 0;
    chain_all(s);
}

static bool rehash(struct bt_rx_set *s)
{
    uint32_t want = s->n_heads * 2;
    if (!bt_rx_take(s, (want - s->n_heads) * sizeof(uint32_t))) {
        return false;
    }
    s->heads = bt_realloc(s->heads, want * sizeof(uint32_t));
    s->n_heads = want;
    chain_all(s);
    return true;
}

uint32_t bt_rx_add_counts(uint32_t a, uint32_t b)
{
    return a == BT_RX_NO_MAX || b == BT_RX_NO_MAX || a > BT_RX_NO_MAX - 1 - b ? BT_RX_NO_MAX
                                                                              : a + b;
}

/* A lower bound of the bytes of a text that the node matches. */
static uint32_t min_len(const struct bt_rx_set *s, const struct bt_rx_node *n)
{
    uint32_t len = 0;
    switch ((enum bt_rx_kind)n->kind) {
    case BT_RX_K_CLASS: return 1;
    case BT_RX_K_CONCAT: return bt_rx_add_counts(s->nodes[n->a].min_len, s->nodes[n->b].min_len);
    case BT_RX_K_REPEAT: {
        uint64_t product = (uint64_t)s->nodes[n->a].min_len * n->b;
        return (uint32_t)BT_MIN(product, (uint64_t)BT_RX_NO_MAX);
    }
    case BT_RX_K_OR:
        len = UINT32_MAX;
        for (uint32_t i = 0; i < n->b; i++) {
            len = BT_MIN(len, s->nodes[s->lists[n->a + i]].min_len);
        }
        return len;
    case BT_RX_K_AND:
        for (uint32_t i = 0; i < n->b; i++) {
            len = BT_MAX(len, s->nodes[s->lists[n->a + i]].min_len);
        }
        return len;
    case BT_RX_K_MULTIPLE: return n->b != 0;
    case BT_RX_K_NOT: return !(n->flags & BT_RX_F_NULLABLE);
    case BT_RX_K_NONE:
    case BT_RX_K_EMPTY: break;
    }
    return 0;
}

/* An upper bound of the bytes of the shortest text of any derivative of the node. */
static uint32_t need(const struct bt_rx_set *s, const struct bt_rx_node *n)
{
    uint32_t len = 0;
    switch ((enum bt_rx_kind)n->kind) {
    case BT_RX_K_CLASS: return 1;
    case BT_RX_K_CONCAT: return bt_rx_add_counts(s->nodes[n->a].need, s->nodes[n->b].need);
    case BT_RX_K_REPEAT: {
        uint64_t product = (uint64_t)s->nodes[n->a].need * BT_MAX(n->b, 1u);
        return (uint32_t)BT_MIN(product, (uint64_t)BT_RX_NO_MAX);
    }
    case BT_RX_K_OR:
        for (uint32_t i = 0; i < n->b; i++) {
            len = BT_MAX(len, s->nodes[s->lists[n->a + i]].need);
        }
        return len;
    case BT_RX_K_MULTIPLE: return 10; /* digits of 2^32 */
    case BT_RX_K_AND:
    case BT_RX_K_NOT: return BT_RX_NO_MAX;
    case BT_RX_K_NONE:
    case BT_RX_K_EMPTY: break;
    }
    return 0;
}

/* Adds a node whose hash is known and which is not there yet. */
static bt_rx_t add_node(struct bt_rx_set *s, struct bt_rx_node n, uint32_t hash)
{
    n.min_len = min_len(s, &n);
    n.need = need(s, &n);
    if ((s->n_nodes >= s->n_heads && !rehash(s)) ||
        !bt_rx_grow(s, &s->nodes, s->n_nodes, &s->nodes_cap, sizeof(*s->nodes))) {
        return BT_RX_FAILED;
    }
    uint32_t *head = &s->heads[hash & (s->n_heads - 1)];
    n.next = *head;
    *head = s->n_nodes;
    s->nodes[s->n_nodes] = n;
    return s->n_nodes++;
}

bt_rx_t bt_rx_intern(struct bt_rx_set *s, struct bt_rx_node n)
{
    if (!bt_rx_work(s, 1)) {
        return BT_RX_FAILED;
    }
    uint32_t hash = hash3(n.kind, n.a, n.b, n.c);
    for (uint32_t i = s->heads[hash & (s->n_heads - 1)]; i != UINT32_MAX; i = s->nodes[i].next) {
        const struct bt_rx_node *o = &s->nodes[i];
        if (o->kind == n.kind && o->a == n.a && o->b == n.b && o->c == n.c) {
            return i;
        }
    }
    return add_node(s, n, hash);
}

/* Or and And nodes of scratch[base..), sorted and without doubles. */
bt_rx_t bt_rx_intern_list(struct bt_rx_set *s, uint8_t kind, uint32_t base)
{
    uint32_t n = s->n_scratch - base;
    uint32_t *list = s->scratch + base;
    if (!bt_rx_work(s, 1 + n / 4)) {
        return bt_rx_fail(s, base);
    }
    uint32_t hash = hash_list(kind, list, n);
    for (uint32_t i = s->heads[hash & (s->n_heads - 1)]; i != UINT32_MAX; i = s->nodes[i].next) {
        const struct bt_rx_node *o = &s->nodes[i];
        if (o->kind == kind && o->b == n && memcmp(s->lists + o->a, list, n * 4) == 0) {
            s->n_scratch = base;
            return i;
        }
    }
    while (s->n_lists + n > s->lists_cap) {
        if (!bt_rx_grow(s, &s->lists, s->lists_cap, &s->lists_cap, sizeof(uint32_t))) {
            return bt_rx_fail(s, base);
        }
    }
    uint16_t flags = kind == BT_RX_K_OR ? BT_RX_F_POSITIVE | BT_RX_F_FINITE : BT_RX_F_NULLABLE;
    for (uint32_t i = 0; i < n; i++) {
        uint16_t f = s->nodes[list[i]].flags;
        if (kind == BT_RX_K_AND) {
            flags &= f | ~BT_RX_F_NULLABLE;
            flags |= f & BT_RX_F_FINITE;
        } else {
            flags = (flags & (f | ~(BT_RX_F_POSITIVE | BT_RX_F_FINITE))) | (f & BT_RX_F_NULLABLE);
        }
    }
    memcpy(s->lists + s->n_lists, list, n * sizeof(uint32_t));
    struct bt_rx_node node = {.kind = kind, .flags = flags, .a = s->n_lists, .b = n};
    s->n_lists += n;
    s->n_scratch = base;
    return add_node(s, node, hash);
}

bt_rx_t bt_rx_class(struct bt_rx_set *s, const uint64_t bits[4])
{
    if (!(bits[0] | bits[1] | bits[2] | bits[3])) {
        return BT_RX_NONE;
    }
    if (!bt_rx_work(s, 1)) {
        return BT_RX_FAILED;
    }
    uint32_t hash = hash3(BT_RX_K_CLASS, bits[0] ^ (bits[3] << 1), bits[1], bits[2]);
    for (uint32_t i = s->heads[hash & (s->n_heads - 1)]; i != UINT32_MAX; i = s->nodes[i].next) {
        if (s->nodes[i].kind == BT_RX_K_CLASS &&
            memcmp(s->classes[s->nodes[i].a], bits, sizeof(s->classes[0])) == 0) {
            return i;
        }
    }
    if (!bt_rx_grow(s, &s->classes, s->n_classes, &s->classes_cap, sizeof(s->classes[0]))) {
        return BT_RX_FAILED;
    }
    memcpy(s->classes[s->n_classes], bits, sizeof(s->classes[0]));
    return add_node(s,
                    (struct bt_rx_node){.kind = BT_RX_K_CLASS,
                                        .flags = BT_RX_F_POSITIVE | BT_RX_F_FINITE,
                                        .a = s->n_classes++},
                    hash);
}

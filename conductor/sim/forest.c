/* A dynamic program over the tree of shared prefixes. See forest.h.
 *
 * Inner nodes are where prompts branch, leaves are the requests. The program chooses a set of
 * requests. The cost of a request in the set depends on the deepest node above it that has an
 * earlier request of the set under it. So for each node v and each request k under v, best(v, k) is
 * the most that the other requests under v are worth if k is the first of the set there. It is a
 * sum over v's children. The child that has k adds best(child, k). Any other child adds the maximum
 * over its own first request j > k of best(child, j) plus what j is worth with v's tokens cached,
 * or 0 if that is negative. The sweep takes k from the last request to the first. So more and more
 * j count, and each child needs only its best value so far. A node takes time and memory in
 * proportion to the requests under it. */
#include "conductor/sim/forest.h"

#include <stdlib.h>

#define NONE     UINT32_MAX
#define ROUND_MS 1e-6 /* this late still counts as in time: rounding of sums */

struct entry { /* a request under a node */
    uint32_t id;
    uint32_t child; /* the child that has the request: a request, or n + node */
    uint32_t inner; /* its entry in the child; NONE: the child is the request */
};

struct limit { /* the entry can be good if the first request has arrived by ms */
    double ms;
    uint32_t entry;
};

struct bt_sim_node {
    uint32_t depth, parent; /* blocks; NONE: the root */
    uint32_t first, n;      /* entries, by arrival, and limits, by falling ms */
};

struct bt_sim_forest {
    const struct bt_sim_want *wants;
    const double *prefix_ms;
    double due_ms;
    uint32_t n, n_nodes;
    struct bt_sim_node *nodes; /* [0]: the root */
    uint32_t *order;           /* of nodes, children before their parents */
    struct entry *entries;
    struct limit *limits;
    double *best;   /* of entries: best(v, k) */
    double *worth;  /* of children: the most so far */
    uint32_t *leaf; /* of requests: the parent */
};

struct sorted {
    const struct bt_sim_want *want;
    uint32_t id;
};

static uint32_t shared(const struct bt_sim_want *a, const struct bt_sim_want *b)
{
    uint32_t k = 0, most = BT_MIN(a->n_blocks, b->n_blocks);
    while (k < most && a->blocks[k] == b->blocks[k]) {
        k++;
    }
    return k;
}

static int by_blocks(const void *x, const void *y)
{
    const struct sorted *a = x, *b = y;
    uint32_t k = shared(a->want, b->want), n = a->want->n_blocks, m = b->want->n_blocks;
    if (k < n && k < m) {
        return a->want->blocks[k] < b->want->blocks[k] ? -1 : 1;
    }
    return n != m ? (n < m ? -1 : 1) : (a->id > b->id) - (a->id < b->id);
}

/* Builds the tree: requests are sorted by their blocks, and neighbours share their longest common
 * prefix. */
static void build(struct bt_sim_forest *f, const struct sorted *by)
{
    uint32_t *open = bt_malloc((f->n + 1) * sizeof(*open)); /* a stack, the deepest node on top */
    uint32_t n_open = 1, closed = 0;
    open[0] = 0;
    f->nodes[0].parent = NONE;
    f->n_nodes = 1;
    for (uint32_t i = 0; i < f->n; i++) {
        uint32_t next = i + 1 < f->n ? shared(by[i].want, by[i + 1].want) : 0;
        uint32_t *parent = &f->leaf[by[i].id]; /* where the parent of the last closed child goes */
        for (uint32_t top; f->nodes[top = open[n_open - 1]].depth > next; n_open--) {
            *parent = top;
            parent = &f->nodes[top].parent;
            f->order[closed++] = top;
        }
        if (f->nodes[open[n_open - 1]].depth < next) {
            f->nodes[f->n_nodes].depth = next;
            open[n_open++] = f->n_nodes++;
        }
        *parent = open[n_open - 1];
    }
    f->order[closed] = 0;
    free(open);
}

/* Enters each request, in order of arrival, at every node above it. So each node's entries are in
 * order of arrival. */
static void enter(struct bt_sim_forest *f)
{
    uint32_t total = 0;
    for (uint32_t i = 0; i < f->n; i++) {
        for (uint32_t v = f->leaf[i]; v != NONE; v = f->nodes[v].parent) {
            f->nodes[v].n++;
            total++;
        }
    }
    f->entries = bt_malloc(BT_MAX(total, 1u) * sizeof(*f->entries));
    f->limits = bt_malloc(BT_MAX(total, 1u) * sizeof(*f->limits));
    f->best = bt_malloc(BT_MAX(total, 1u) * sizeof(*f->best));
    total = 0;
    for (uint32_t v = 0; v < f->n_nodes; v++) {
        f->nodes[v].first = total;
        total += f->nodes[v].n;
        f->nodes[v].n = 0;
    }
    for (uint32_t i = 0; i < f->n; i++) {
        struct entry e = {i, i, NONE};
        for (uint32_t v = f->leaf[i]; v != NONE; v = f->nodes[v].parent) {
            uint32_t at = f->nodes[v].first + f->nodes[v].n++;
            f->entries[at] = e;
            e = (struct entry){i, f->n + v, at};
        }
    }
}

static int later_first(const void *x, const void *y)
{
    const struct limit *a = x, *b = y;
    return a->ms != b->ms ? (a->ms < b->ms ? 1 : -1)
                          : (a->entry < b->entry) - (a->entry > b->entry);
}

/* For each request j under v: by when v's first request must have arrived if j can be good. j gets
 * v's tokens from others and computes the rest after its own arrival. No one began the tokens
 * between v's parent and v before v's first request arrived. */
static void limit(struct bt_sim_forest *f, const struct bt_sim_node *v)
{
    double due_ms = f->due_ms + ROUND_MS;
    for (uint32_t e = v->first; e < v->first + v->n; e++) {
        const struct bt_sim_want *j = &f->wants[f->entries[e].id];
        double ms = j->at_ms;
        if (j->hopeless || j->prompt_ms - f->prefix_ms[v->depth] > due_ms) {
            ms = -1e300;
        } else if (v->parent != NONE) {
            double before = f->prefix_ms[f->nodes[v->parent].depth];
            ms = BT_MIN(ms, j->at_ms + due_ms - (j->prompt_ms - before));
        }
        f->limits[e] = (struct limit){ms, e};
    }
    qsort(f->limits + v->first, v->n, sizeof(*f->limits), later_first);
}

struct bt_sim_forest *bt_sim_forest_create(const struct bt_sim_want *wants, uint32_t n,
                                           const double *prefix_ms, double due_ms)
{
    struct bt_sim_forest *f = bt_calloc(1, sizeof(*f));
    struct sorted *by = bt_malloc(BT_MAX(n, 1u) * sizeof(*by));
    f->wants = wants;
    f->prefix_ms = prefix_ms;
    f->due_ms = due_ms;
    f->n = n;
    f->nodes = bt_calloc(n + 1, sizeof(*f->nodes)); /* each but the root branches */
    f->order = bt_malloc((n + 1) * sizeof(*f->order));
    f->leaf = bt_malloc(BT_MAX(n, 1u) * sizeof(*f->leaf));
    for (uint32_t i = 0; i < n; i++) {
        by[i] = (struct sorted){&wants[i], i};
    }
    qsort(by, n, sizeof(*by), by_blocks);
    build(f, by);
    free(by);
    enter(f);
    f->worth = bt_malloc((n + f->n_nodes) * sizeof(*f->worth));
    for (uint32_t v = 0; v < f->n_nodes; v++) {
        limit(f, &f->nodes[v]);
    }
    return f;
}

void bt_sim_forest_destroy(struct bt_sim_forest *f)
{
    if (f != NULL) {
        free(f->nodes);
        free(f->order);
        free(f->entries);
        free(f->limits);
        free(f->best);
        free(f->worth);
        free(f->leaf);
        free(f);
    }
}

/* Offers e as the first request of its child. Returns by how much the child's worth rises. */
static double offer(struct bt_sim_forest *f, const struct entry *e, double worth)
{
    worth += e->inner != NONE ? f->best[e->inner] : 0;
    double more = worth - f->worth[e->child];
    if (more <= 0) {
        return 0;
    }
    f->worth[e->child] = worth;
    return more;
}

/* Returns what all children are worth together. */
static double sweep(struct bt_sim_forest *f, const struct bt_sim_node *v, double prompt_price,
                    double row_price)
{
    double all = 0, cached = f->prefix_ms[v->depth];
    const struct limit *good = f->limits + v->first, *end = good + v->n;
    for (uint32_t e = v->first; e < v->first + v->n; e++) {
        f->worth[f->entries[e].child] = 0;
    }
    for (uint32_t e = v->first + v->n; e-- > v->first;) {
        const struct entry *k = &f->entries[e];
        for (; good < end && good->entry > e && good->ms >= f->wants[k->id].at_ms; good++) {
            const struct entry *j = &f->entries[good->entry];
            const struct bt_sim_want *w = &f->wants[j->id];
            all += offer(f, j, 1 - prompt_price * (w->prompt_ms - cached) - row_price * w->rows_ms);
        }
        double others = all - f->worth[k->child];
        f->best[e] = others + (k->inner != NONE ? f->best[k->inner] : 0);
        all += offer(f, k, -prompt_price * (f->wants[k->id].prompt_ms - cached));
    }
    for (; good < end && good->ms > -1e300;
         good++) { /* of use at the root only: these may be the first of all */
        const struct entry *j = &f->entries[good->entry];
        const struct bt_sim_want *w = &f->wants[j->id];
        all += offer(f, j, 1 - prompt_price * (w->prompt_ms - cached) - row_price * w->rows_ms);
    }
    return all;
}

double bt_sim_forest_best(struct bt_sim_forest *f, double prompt_price, double row_price)
{
    double all = 0;
    for (uint32_t v = 0; v < f->n_nodes; v++) { /* the root is the last one */
        all = sweep(f, &f->nodes[f->order[v]], prompt_price, row_price);
    }
    return all;
}

/* Beam search (beam.h). Pure. The generated tokens are a tree: each turn adds `width` nodes to it.
 * So a beam is the index of its last node, and beams with a common beginning share nodes. */
#include "common/search/beam.h"

#include <math.h>
#include <string.h>

struct node {
    uint32_t parent; /* index of the node + 1; 0: none */
    uint32_t token;
    float logprob;
};

struct answer { /* a complete answer; its last token is in `ends`, not in the tree */
    double score;
    uint32_t parent; /* the node before the last token, as in struct node */
    uint32_t len;
    bool by_eos;
    uint32_t last; /* index of its last token in `ends` */
};

/* The alternatives of all tokens of an array: n_top ids and logprobs for each. */
struct tops {
    uint32_t *id;
    float *logprob;
};

struct row {
    bool there;
    uint32_t n, next; /* next: the first token that next_pick has not returned */
    uint32_t id[BT_ENGINE_MAX_TOP];
    float logprob[BT_ENGINE_MAX_TOP];
};

struct bt_beam_search {
    const struct bt_beam_conf *conf;
    const uint32_t *eos;
    uint32_t n_eos, max_new;
    uint32_t len, live; /* live: number of places that have a beam */
    bool over;
    double sum[BT_BEAM_WIDTH_MAX];            /* sum of the logprobs of each place's beam */
    struct row rows[BT_BEAM_WIDTH_MAX];       /* rows of this turn */
    struct answer answers[BT_BEAM_WIDTH_MAX]; /* sorted by score, the best first */
    uint32_t n_answers;
    struct node ends[BT_BEAM_WIDTH_MAX]; /* last tokens of the answers */
    uint32_t *path;                      /* [max_new] nodes of the open answer */
    uint32_t open;
    struct node *nodes; /* [max_new * width] the node of turn t at place p is t * width + p */
    struct tops tops, end_tops; /* alternatives of `nodes` and of `ends` */
};

struct pick {           /* a candidate for a beam of the next turn */
    uint32_t place, at; /* token number `at` in the row of this place */
    double sum;
};

uint32_t bt_beam_tops(uint32_t width, uint32_t n_eos)
{
    /* The next beams take at most `width` tokens of one row, none of which ends the answer. At most
     * n_eos tokens of the row that do end it are more likely. */
    return width + n_eos;
}

/* ---- memory ---- */

static size_t part(size_t *at, size_t bytes)
{
    size_t begin = *at;
    *at = BT_ALIGN_UP(begin + bytes, sizeof(uint64_t));
    return begin;
}

/* Lays out the arrays behind the struct. Returns the total size. */
static size_t layout(const struct bt_beam_conf *c, uint32_t max_new, size_t at[6])
{
    size_t end = 0, nodes = (size_t)max_new * c->width;
    (void)part(&end, sizeof(struct bt_beam_search));
    at[0] = part(&end, nodes * sizeof(struct node));
    at[1] = part(&end, max_new * sizeof(uint32_t));
    at[2] = part(&end, nodes * c->n_top * sizeof(uint32_t));
    at[3] = part(&end, nodes * c->n_top * sizeof(float));
    at[4] = part(&end, (size_t)c->width * c->n_top * sizeof(uint32_t));
    at[5] = part(&end, (size_t)c->width * c->n_top * sizeof(float));
    return end;
}

size_t bt_beam_bytes(const struct bt_beam_conf *conf, uint32_t max_new)
{
    size_t at[6];
    return layout(conf, max_new, at);
}

struct bt_beam_search *bt_beam_init(void *mem, const struct bt_beam_conf *conf, uint32_t max_new,
                                    const uint32_t *eos, uint32_t n_eos)
{
    struct bt_beam_search *s = mem;
    char *base = mem;
    size_t at[6];
    (void)layout(conf, max_new, at);
    BT_ASSERT(conf->width > 0 && conf->width <= BT_BEAM_WIDTH_MAX && max_new > 0);
    s->conf = conf;
    s->eos = eos;
    s->n_eos = n_eos;
    s->max_new = max_new;
    s->live = 1;
    s->nodes = (struct node *)(base + at[0]);
    s->path = (uint32_t *)(base + at[1]);
    s->tops = (struct tops){(uint32_t *)(base + at[2]), (float *)(base + at[3])};
    s->end_tops = (struct tops){(uint32_t *)(base + at[4]), (float *)(base + at[5])};
    return s;
}

/* ---- rows ---- */

bool bt_beam_wants(const struct bt_beam_search *s, uint32_t place)
{
    return !s->over && place < s->live && !s->rows[place].there;
}

bool bt_beam_put(struct bt_beam_search *s, uint32_t place, const uint32_t *ids,
                 const float *logprobs, uint32_t n)
{
    struct row *r = &s->rows[place];
    BT_ASSERT(bt_beam_wants(s, place));
    if (n < BT_MAX(bt_beam_tops(s->conf->width, s->n_eos), s->conf->n_top)) {
        return false;
    }
    r->there = true;
    r->next = 0;
    r->n = BT_MIN(n, (uint32_t)BT_ENGINE_MAX_TOP);
    memcpy(r->id, ids, r->n * sizeof(r->id[0]));
    memcpy(r->logprob, logprobs, r->n * sizeof(r->logprob[0]));
    return true;
}

bool bt_beam_ready(const struct bt_beam_search *s)
{
    for (uint32_t i = 0; i < s->live; i++) {
        if (!s->rows[i].there) {
            return false;
        }
    }
    return !s->over;
}

/* ---- a choice ---- */

static bool is_eos(const struct bt_beam_search *s, uint32_t token)
{
    for (uint32_t i = 0; i < s->n_eos; i++) {
        if (s->eos[i] == token) {
            return true;
        }
    }
    return false;
}

/* Takes the candidate with the highest sum; of equal ones, that of the lowest place. Returns false
 * if there is none. */
static bool next_pick(struct bt_beam_search *s, struct pick *best)
{
    bool any = false;
    for (uint32_t p = 0; p < s->live; p++) {
        struct row *r = &s->rows[p];
        while (r->next < r->n && s->len < s->conf->min_new && is_eos(s, r->id[r->next])) {
            r->next++;
        }
        double sum = r->next < r->n ? s->sum[p] + r->logprob[r->next] : 0;
        if (r->next < r->n && (!any || sum > best->sum)) {
            *best = (struct pick){.place = p, .at = r->next, .sum = sum};
            any = true;
        }
    }
    if (any) {
        s->rows[best->place].next++;
    }
    return any;
}

static uint32_t parent_of(const struct bt_beam_search *s, uint32_t place)
{
    return s->len == 0 ? 0 : (s->len - 1) * s->conf->width + place + 1;
}

static void keep_tops(const struct bt_beam_search *s, const struct tops *to, uint32_t at,
                      const struct row *r)
{
    uint32_t n = s->conf->n_top;
    if (n > 0) { /* bt_beam_put has checked that the row has n tokens */
        memcpy(to->id + (size_t)at * n, r->id, n * sizeof(r->id[0]));
        memcpy(to->logprob + (size_t)at * n, r->logprob, n * sizeof(r->logprob[0]));
    }
}

/* Keeps a complete answer if it is one of the best `width`. */
static void add_answer(struct bt_beam_search *s, const struct pick *p, bool by_eos)
{
    const struct row *r = &s->rows[p->place];
    uint32_t at = s->n_answers, width = s->conf->width;
    double score = p->sum / pow(s->len + 1, s->conf->length_penalty);
    uint32_t end = at < width ? at : s->answers[width - 1].last;
    if (at == width && !(score > s->answers[width - 1].score)) {
        return;
    }
    at = BT_MIN(at, width - 1);
    s->n_answers = at + 1;
    for (; at > 0 && score > s->answers[at - 1].score; at--) {
        s->answers[at] = s->answers[at - 1];
    }
    s->answers[at] = (struct answer){.score = score,
                                     .parent = parent_of(s, p->place),
                                     .len = s->len + 1,
                                     .by_eos = by_eos,
                                     .last = end};
    s->ends[end] = (struct node){s->answers[at].parent, r->id[p->at], r->logprob[p->at]};
    keep_tops(s, &s->end_tops, end, r);
}

/* Returns whether a beam may still become one of the best answers. best_sum: the sum of the best
 * beam. */
static bool may_improve(const struct bt_beam_search *s, double best_sum)
{
    const struct bt_beam_conf *c = s->conf;
    if (s->n_answers < c->width) {
        return true;
    }
    if (c->stop == BT_BEAM_FULL) {
        return false;
    }
    bool longest = c->stop == BT_BEAM_NEVER && c->length_penalty > 0;
    double score = best_sum / pow(longest ? s->max_new : s->len, c->length_penalty);
    return score > s->answers[c->width - 1].score;
}

/* Gives each pick a place: the place of its parent, unless another pick has it already. */
static void place_picks(struct bt_beam_search *s, const struct pick *picks, uint32_t *from)
{
    uint32_t width = s->conf->width, of[BT_BEAM_WIDTH_MAX];
    bool placed[BT_BEAM_WIDTH_MAX] = {false}, taken[BT_BEAM_WIDTH_MAX] = {false};
    for (uint32_t i = 0; i < width; i++) {
        if (!taken[picks[i].place]) {
            placed[i] = taken[picks[i].place] = true;
            of[picks[i].place] = i;
        }
    }
    for (uint32_t i = 0, free = 0; i < width; i++) {
        if (!placed[i]) {
            while (taken[free]) {
                free++;
            }
            taken[free] = true;
            of[free] = i;
        }
    }
    for (uint32_t p = 0; p < width; p++) {
        const struct pick *k = &picks[of[p]];
        const struct row *r = &s->rows[k->place];
        uint32_t node = s->len * width + p;
        from[p] = k->place;
        s->sum[p] = k->sum;
        s->nodes[node] = (struct node){parent_of(s, k->place), r->id[k->at], r->logprob[k->at]};
        keep_tops(s, &s->tops, node, r);
    }
}

bool bt_beam_choose(struct bt_beam_search *s, uint32_t *from)
{
    uint32_t width = s->conf->width, n = 0, rank = 0;
    bool last = s->len + 1 == s->max_new;
    struct pick picks[BT_BEAM_WIDTH_MAX], p;
    BT_ASSERT(bt_beam_ready(s));
    /* Only the first `width` candidates may end an answer. Further candidates only fill up the
     * beams, so that as many go on as before. */
    for (; n < width && (!last || rank < width) && next_pick(s, &p); rank++) {
        bool eos = is_eos(s, s->rows[p.place].id[p.at]);
        if ((eos || last) && rank < width) {
            add_answer(s, &p, eos);
        }
        if (!eos && !last) {
            picks[n++] = p;
        }
    }
    BT_ASSERT(last || n == width); /* bt_beam_tops asks for so many tokens that this holds */
    if (!last) {
        place_picks(s, picks, from);
    }
    s->len++;
    s->live = width;
    for (uint32_t i = 0; i < width; i++) {
        s->rows[i].there = false;
    }
    s->over = last || !may_improve(s, picks[0].sum);
    return !s->over;
}

/* ---- results ---- */

uint32_t bt_beam_len(const struct bt_beam_search *s)
{
    return s->len;
}

const uint32_t *bt_beam_last(const struct bt_beam_search *s, uint32_t place)
{
    return &s->nodes[(s->len - 1) * s->conf->width + place].token;
}

void bt_beam_path(const struct bt_beam_search *s, uint32_t place, uint32_t *tokens)
{
    uint32_t at = parent_of(s, place);
    for (uint32_t i = s->len; i > 0; i--) {
        tokens[i - 1] = s->nodes[at - 1].token;
        at = s->nodes[at - 1].parent;
    }
}

uint32_t bt_beam_answer(struct bt_beam_search *s, uint32_t i, bool *by_eos_p)
{
    const struct answer *a = &s->answers[i];
    BT_ASSERT(s->over && i < s->n_answers);
    s->open = i;
    uint32_t at = a->parent;
    for (uint32_t k = a->len - 1; k > 0; k--) {
        s->path[k - 1] = at - 1;
        at = s->nodes[at - 1].parent;
    }
    *by_eos_p = a->by_eos;
    return a->len;
}

void bt_beam_answer_token(const struct bt_beam_search *s, uint32_t at, struct bt_beam_token *out)
{
    const struct answer *a = &s->answers[s->open];
    bool end = at + 1 == a->len;
    uint32_t i = end ? a->last : s->path[at];
    const struct node *n = end ? &s->ends[i] : &s->nodes[i];
    const struct tops *t = end ? &s->end_tops : &s->tops;
    *out = (struct bt_beam_token){.token = n->token,
                                  .logprob = n->logprob,
                                  .n_top = s->conf->n_top,
                                  .top_id = t->id + (size_t)i * s->conf->n_top,
                                  .top_logprob = t->logprob + (size_t)i * s->conf->n_top};
}

/* The sampler of sampler.h. Pure: no clock, no lock, no I/O; all memory is allocated at
 * creation. */
#include "common/engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/philox.h"
#include "common/engine/ids.h"

/* No Gumbel variate exceeds -log(-log(1 - 2^-24)) = 16.635...; so no variate is drawn for tokens
 * that cannot win even with this one. */
#define GUMBEL_MAX 16.64

#define TEXT_OF(x) #x
#define TEXT(x)    TEXT_OF(x) /* of a limit in sampling.h */

struct ranked { /* by rising value, then by id */
    float value;
    uint32_t id;
};

struct bt_sampler {
    uint32_t vocab;
    uint32_t *count; /* generated tokens per id, only during a row with penalties */
    uint8_t *seen;   /* id occurs in prompt or generated */
    float *scaled;   /* logits / temperature */
    uint32_t *heap;  /* ids in a heap, ordered by falling scaled value, then by rising id */
    uint32_t *kept;
    struct ranked *ranked;
    float *raw; /* the row as the model computed it, kept for logprobs */
};

struct bt_sampler *bt_sampler_create(uint32_t vocab)
{
    struct bt_sampler *s = bt_calloc(1, sizeof(*s));
    s->vocab = vocab;
    s->count = bt_calloc(vocab, sizeof(*s->count));
    s->seen = bt_calloc(vocab, 1);
    s->scaled = bt_calloc(vocab, sizeof(*s->scaled));
    s->heap = bt_calloc(vocab, sizeof(*s->heap));
    s->kept = bt_calloc(vocab, sizeof(*s->kept));
    s->ranked = bt_calloc(vocab, sizeof(*s->ranked));
    s->raw = bt_calloc(vocab, sizeof(*s->raw));
    return s;
}

void bt_sampler_destroy(struct bt_sampler *s)
{
    if (s) {
        free(s->count);
        free(s->seen);
        free(s->scaled);
        free(s->heap);
        free(s->kept);
        free(s->ranked);
        free(s->raw);
        free(s);
    }
}

bt_status_t bt_sampler_check(const struct bt_engine_params *p, uint32_t vocab, const char **what_p)
{
    const char *what = NULL;
    if (!(p->temperature >= 0.0f && p->temperature <= BT_ENGINE_MAX_TEMPERATURE)) {
        what = "temperature: 0 to " TEXT(BT_ENGINE_MAX_TEMPERATURE);
    } else if (!(p->top_p > 0.0f && p->top_p <= 1.0f)) {
        what = "top_p: above 0, at most 1";
    } else if (!(p->min_p >= 0.0f && p->min_p <= 1.0f)) {
        what = "min_p: 0 to 1";
    } else if (!(p->repetition_penalty > 0.0f &&
                 p->repetition_penalty <= BT_ENGINE_MAX_REPETITION)) {
        what = "repetition_penalty: above 0, at most " TEXT(BT_ENGINE_MAX_REPETITION);
    } else if (!(fabsf(p->frequency_penalty) <= BT_ENGINE_MAX_PENALTY) ||
               !(fabsf(p->presence_penalty) <= BT_ENGINE_MAX_PENALTY)) {
        what = "frequency_penalty, presence_penalty: at most " TEXT(
            BT_ENGINE_MAX_PENALTY) " of either sign";
    } else if (p->logprobs < -1 || p->logprobs > BT_ENGINE_MAX_TOP) {
        what = "logprobs: -1 to " TEXT(BT_ENGINE_MAX_TOP);
    } else if (p->n_eos > BT_ENGINE_MAX_EOS) {
        what = "n_eos: at most " TEXT(BT_ENGINE_MAX_EOS);
    } else if (!(p->typical_p >= 0.0f && p->typical_p <= 1.0f)) {
        what = "typical_p: 0 to 1";
    } else if (!(p->xtc_probability >= 0.0f && p->xtc_probability <= 1.0f) ||
               !(p->xtc_threshold >= 0.0f && p->xtc_threshold <= 1.0f)) {
        what = "xtc_probability, xtc_threshold: 0 to 1";
    } else if (p->n_dola > BT_ENGINE_DOLA_MAX) {
        what = "dola: at most " TEXT(BT_ENGINE_DOLA_MAX) " layers";
    } else if (!(p->penalty_alpha >= 0.0f && p->penalty_alpha <= 1.0f)) {
        what = "penalty_alpha: 0 to 1";
    } else if (p->penalty_alpha > 0.0f && (p->top_k < 2 || p->top_k > BT_ENGINE_CANDIDATES)) {
        what = "penalty_alpha: with top_k 2 to " TEXT(BT_ENGINE_CANDIDATES);
    } else if (p->penalty_alpha > 0.0f && (p->temperature > 0.0f || p->n_dola > 0)) {
        what = "penalty_alpha: with temperature 0 and without dola";
    } else if (p->n_bias && (!p->bias_ids || !p->bias)) {
        what = "bias: ids and values";
    }
    for (uint32_t i = 0; !what && i < p->n_bias; i++) {
        if (p->bias_ids[i] >= vocab || !isfinite(p->bias[i])) {
            what = "bias: ids below the vocabulary size, finite values";
        }
    }
    if (what) {
        *what_p = what;
        return BT_ERR_INVALID;
    }
    return BT_OK;
}

/* Maximum of the row; false if a value is NaN or +inf. */
static bool row_max(const float *l, uint32_t n, float *max_p)
{
    float max = -INFINITY;
    bool ok = true;
    for (uint32_t i = 0; i < n; i++) {
        ok &= l[i] < INFINITY; /* false for NaN too */
        max = l[i] > max ? l[i] : max;
    }
    *max_p = max;
    return ok;
}

static double log_sum_exp(const float *l, uint32_t n, float max)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += expf(l[i] - max);
    }
    return max + log(sum);
}

/* The n largest that have a token, by insertion into a short sorted list; among equal ones the
 * lower id is first. */
static void top_n(const float *l, uint32_t vocab, const uint32_t *known, double lse,
                  struct bt_engine_out *out, uint32_t n)
{
    uint32_t have = 0;
    n = BT_MIN(n, vocab);
    for (uint32_t i = 0; i < vocab; i++) {
        if ((have == n && !(l[i] > out->top_logprob[n - 1])) || !bt_ids_bit(known, i)) {
            continue;
        }
        uint32_t at = have < n ? have++ : n - 1;
        for (; at > 0 && l[i] > out->top_logprob[at - 1]; at--) {
            out->top_logprob[at] = out->top_logprob[at - 1];
            out->top_id[at] = out->top_id[at - 1];
        }
        out->top_logprob[at] = l[i];
        out->top_id[at] = i;
    }
    for (uint32_t i = 0; i < have; i++) {
        out->top_logprob[i] = (float)(out->top_logprob[i] - lse);
    }
    out->n_top = have;
}

static void apply_penalties(struct bt_sampler *s, const struct bt_sampler_row *r)
{
    const struct bt_engine_params *p = r->params;
    if (p->repetition_penalty == 1.0f && p->frequency_penalty == 0.0f &&
        p->presence_penalty == 0.0f) {
        return;
    }
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        if (r->tokens[i] < s->vocab) {
            s->seen[r->tokens[i]] = 1;
            s->count[r->tokens[i]] += i >= r->n_prompt;
        }
    }
    /* Handles each id once: clears `seen` on the way. */
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        uint32_t t = r->tokens[i];
        if (t >= s->vocab || !s->seen[t]) {
            continue;
        }
        float l = r->logits[t];
        l = l > 0 ? l / p->repetition_penalty : l * p->repetition_penalty;
        if (s->count[t] > 0) {
            l -= p->frequency_penalty * (float)s->count[t] + p->presence_penalty;
        }
        r->logits[t] = l;
        s->seen[t] = 0;
        s->count[t] = 0;
    }
}

/* Sets ids whose bit is 0 to -inf. Tests 32 bits at a time, since nearly all bits of known are
 * 1. */
static void mask_row(float *l, uint32_t vocab, const uint32_t *bits)
{
    for (uint32_t w = 0; bits != NULL && w * 32 < vocab; w++) {
        for (uint32_t i = w * 32; bits[w] != UINT32_MAX && i < BT_MIN(w * 32 + 32, vocab); i++) {
            if (!bt_ids_bit(bits, i)) {
                l[i] = -INFINITY;
            }
        }
    }
}

double bt_sampler_divergence(const float *last, const float *early, uint32_t vocab)
{
    float max, early_max;
    if (!row_max(last, vocab, &max) || !row_max(early, vocab, &early_max)) {
        return -INFINITY; /* not to be chosen */
    }
    float lse = (float)log_sum_exp(last, vocab, max);
    float early_lse = (float)log_sum_exp(early, vocab, early_max);
    double sum = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        float p = last[i] - lse, q = early[i] - early_lse;
        float m = 0.5f * (expf(p) + expf(q));
        sum += m > 0 ? m * (2 * logf(m) - p - q) : 0;
    }
    return sum;
}

/* r's logits are masked by now; lse: of the row before. */
static void contrast(const struct bt_sampler *s, const struct bt_sampler_row *r, double lse)
{
    float *l = r->logits, max, early_max;
    row_max(l, s->vocab, &max);
    float floor = (float)(max - lse) + logf(BT_SAMPLER_DOLA_TOP);
    bool good = row_max(r->early, s->vocab, &early_max);
    double early_lse = log_sum_exp(r->early, s->vocab, early_max);
    for (uint32_t i = 0; i < s->vocab; i++) {
        float p = (float)(l[i] - lse);
        l[i] = !good        ? NAN /* the row is bad */
               : p >= floor ? p - (float)(r->early[i] - early_lse)
                            : -INFINITY;
    }
}

static void adjust(struct bt_sampler *s, const struct bt_sampler_row *r, double lse)
{
    const struct bt_engine_params *p = r->params;
    mask_row(r->logits, s->vocab, r->mask);
    mask_row(r->logits, s->vocab, r->known);
    uint32_t generated = r->n_tokens > r->n_prompt ? r->n_tokens - r->n_prompt : 0;
    if (generated < p->min_new) {
        for (uint32_t i = 0; i < p->n_eos; i++) {
            if (p->eos[i] < s->vocab) {
                r->logits[p->eos[i]] = -INFINITY;
            }
        }
    }
    if (r->early) {
        contrast(s, r, lse);
    }
    for (uint32_t i = 0; i < p->n_bias; i++) {
        r->logits[p->bias_ids[i]] += p->bias[i];
    }
    apply_penalties(s, r);
}

static bool before(const float *v, uint32_t a, uint32_t b)
{
    return v[a] > v[b] || (v[a] == v[b] && a < b);
}

static void sift_down(uint32_t *h, uint32_t n, uint32_t i, const float *v)
{
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= n) {
            return;
        }
        if (c + 1 < n && before(v, h[c + 1], h[c])) {
            c++;
        }
        if (!before(v, h[c], h[i])) {
            return;
        }
        uint32_t t = h[i];
        h[i] = h[c];
        h[c] = t;
        i = c;
    }
}

/* Writes those of the n ids in heap that top_k and top_p keep to `kept`, returns their number. */
static uint32_t truncate_row(struct bt_sampler *s, const struct bt_engine_params *p, uint32_t n,
                             float max)
{
    const float *v = s->scaled;
    uint32_t k = p->top_k && p->top_k < n ? p->top_k : n;
    double total = 0;
    if (k == n) {
        for (uint32_t i = 0; i < n; i++) {
            total += exp((double)v[s->heap[i]] - max);
        }
    }
    for (uint32_t i = n / 2; i-- > 0;) {
        sift_down(s->heap, n, i, v);
    }
    uint32_t kept = 0, left = n;
    double mass = 0;
    /* With top_k the total is known only after k ids have been taken. */
    while (kept < k && (k < n || mass < p->top_p * total || kept == 0)) {
        s->kept[kept] = s->heap[0];
        mass += exp((double)v[s->heap[0]] - max);
        kept++;
        s->heap[0] = s->heap[--left];
        sift_down(s->heap, left, 0, v);
    }
    if (k < n && p->top_p < 1.0f) {
        double part = 0;
        uint32_t m = 0;
        while (m < kept && (m == 0 || part < p->top_p * mass)) {
            part += exp((double)v[s->kept[m++]] - max);
        }
        kept = m;
    }
    return kept;
}

/* The argmax of scaled[id] + Gumbel(id) over n ids in any order; among equal ones the lower id
 * wins. */
static uint32_t gumbel_argmax(const struct bt_sampler *s, const struct bt_sampler_row *r,
                              const uint32_t *ids, uint32_t n)
{
    const uint32_t key[2] = {(uint32_t)r->params->seed, (uint32_t)(r->params->seed >> 32)};
    uint32_t words[4] = {0}, group = UINT32_MAX, best = UINT32_MAX;
    double best_v = -INFINITY;
    for (uint32_t j = 0; j < n; j++) {
        uint32_t i = ids ? ids[j] : j;
        double v = s->scaled[i];
        if (!(v > -INFINITY) || v + GUMBEL_MAX < best_v) {
            continue;
        }
        if (i / 4 != group) {
            group = i / 4;
            const uint32_t counter[4] = {r->position, r->params->choice, group, 0};
            bt_philox4x32(key, counter, words);
        }
        double u = ((double)(words[i % 4] >> 9) + 0.5) * 0x1p-23;
        v -= log(-log(u));
        if (v > best_v || (v == best_v && i < best)) {
            best_v = v;
            best = i;
        }
    }
    return best;
}

static int by_value(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return x->value != y->value ? (x->value > y->value) - (x->value < y->value)
                                : (x->id > y->id) - (x->id < y->id);
}

/* Keeps the typical ones of n ids; returns their number. Surprise is counted from the most likely
 * token's, which changes no difference. */
static uint32_t typical(struct bt_sampler *s, float share, uint32_t *ids, uint32_t n)
{
    double mass = 0, mean = 0, part = 0;
    struct ranked *all = s->ranked;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        double w = exp((double)s->scaled[ids[i]]);
        mass += w;
        mean += w > 0 ? w * -s->scaled[ids[i]] : 0;
    }
    float center = (float)(mean / mass);
    for (uint32_t i = 0; i < n; i++) {
        all[i] = (struct ranked){fabsf(s->scaled[ids[i]] + center), ids[i]};
    }
    qsort(all, n, sizeof(*all), by_value);
    while (kept < n && (kept == 0 || part < share * mass)) {
        part += exp((double)s->scaled[all[kept].id]);
        ids[kept] = all[kept].id;
        kept++;
    }
    return kept;
}

/* Leaves out the top choices among n ids, if this position is one where they are; returns how many
 * are left. */
static uint32_t exclude_top(const struct bt_sampler *s, const struct bt_sampler_row *r,
                            uint32_t *ids, uint32_t n)
{
    const struct bt_engine_params *p = r->params;
    const uint32_t key[2] = {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)};
    const uint32_t counter[4] = {r->position, p->choice, 0, 1};
    uint32_t words[4], last = UINT32_MAX, top = 0, left = 0;
    double mass = 0;
    bt_philox4x32(key, counter, words);
    if (((float)(words[0] >> 9) + 0.5f) * 0x1p-23f > p->xtc_probability) {
        return n;
    }
    for (uint32_t i = 0; i < n; i++) {
        mass += exp((double)s->scaled[ids[i]]);
    }
    float floor = (float)((double)(float)log((double)p->xtc_threshold) + log(mass));
    for (uint32_t i = 0; i < n; i++) {
        if (s->scaled[ids[i]] >= floor) {
            top++;
            last = last == UINT32_MAX || before(s->scaled, last, ids[i]) ? ids[i] : last;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        if (top < 2 || !before(s->scaled, ids[i], last)) {
            ids[left++] = ids[i];
        }
    }
    return left;
}

static uint32_t draw(struct bt_sampler *s, const struct bt_sampler_row *r, float max)
{
    const struct bt_engine_params *p = r->params;
    float inv_t = 1.0f / p->temperature;
    for (uint32_t i = 0; i < s->vocab; i++) {
        s->scaled[i] = (r->logits[i] - max) * inv_t; /* the largest becomes 0 at any temperature */
    }
    bool truncate = p->top_p < 1.0f || (p->top_k && p->top_k < s->vocab);
    bool is_typical = p->typical_p > 0.0f && p->typical_p < 1.0f;
    if (!truncate && !is_typical && p->xtc_probability <= 0.0f && p->min_p <= 0.0f) {
        return gumbel_argmax(s, r, NULL, s->vocab);
    }
    float floor = p->min_p > 0.0f ? logf(p->min_p) : -INFINITY;
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->vocab; i++) {
        if (s->scaled[i] >= floor && s->scaled[i] > -INFINITY) {
            s->heap[n++] = i;
        }
    }
    uint32_t *ids = s->heap;
    if (truncate && n > 0) {
        n = truncate_row(s, p, n, 0.0f);
        ids = s->kept;
    }
    if (is_typical && n > 0) {
        n = typical(s, p->typical_p, ids, n);
    }
    if (p->xtc_probability > 0.0f && n > 1) {
        n = exclude_top(s, r, ids, n);
    }
    return gumbel_argmax(s, r, ids, n);
}

/* The token's rank in the order of top_n, from 1. */
static uint32_t rank_of(const float *l, uint32_t vocab, const uint32_t *known, uint32_t token)
{
    uint32_t rank = 1;
    for (uint32_t i = 0; i < vocab; i++) {
        bool before_it = l[i] > l[token] || (l[i] == l[token] && i < token);
        rank += before_it && bt_ids_bit(known, i);
    }
    return rank;
}

void bt_sampler_logprob(const float *logits, uint32_t vocab, const uint32_t *known, uint32_t token,
                        uint32_t n_top, struct bt_engine_out *out)
{
    float max;
    out->token = token;
    out->logprob = 0;
    out->rank = out->n_top = 0;
    out->bad = !row_max(logits, vocab, &max) || !(max > -INFINITY);
    if (out->bad) {
        return;
    }
    double lse = log_sum_exp(logits, vocab, max);
    out->logprob = (float)(logits[token] - lse);
    out->rank = rank_of(logits, vocab, known, token);
    if (n_top > 0) {
        top_n(logits, vocab, known, lse, out, BT_MIN(n_top, (uint32_t)BT_ENGINE_MAX_TOP));
    }
}

/* Raw logprobs into *out and *lse_p, then r's logits are adjusted; *max_p: the largest of them.
 * False: the row is bad. */
static bool prepare(struct bt_sampler *s, const struct bt_sampler_row *r, struct bt_engine_out *out,
                    double *lse_p, float *max_p)
{
    const struct bt_engine_params *p = r->params;
    *out = (struct bt_engine_out){.slot = out->slot, .pos = r->position};
    if (!row_max(r->logits, s->vocab, max_p) || !(*max_p > -INFINITY)) {
        return false;
    }
    if (p->logprobs >= 0 || r->early) {
        *lse_p = log_sum_exp(r->logits, s->vocab, *max_p);
    }
    if (p->logprobs >= 0) {
        if (p->logprobs > 0) {
            top_n(r->logits, s->vocab, r->known, *lse_p, out,
                  BT_MIN((uint32_t)p->logprobs, (uint32_t)BT_ENGINE_MAX_TOP));
        }
        memcpy(s->raw, r->logits, s->vocab * sizeof(*s->raw));
    }
    adjust(s, r, *lse_p);
    return row_max(r->logits, s->vocab, max_p) && *max_p > -INFINITY;
}

static void set_bad(struct bt_engine_out *out)
{
    out->n_top = 0;
    out->bad = true;
}

void bt_sampler_run(struct bt_sampler *s, const struct bt_sampler_row *r, struct bt_engine_out *out)
{
    const struct bt_engine_params *p = r->params;
    float max;
    double lse = 0;
    uint32_t token = UINT32_MAX;
    if (prepare(s, r, out, &lse, &max)) {
        if (p->temperature > 0.0f) {
            token = draw(s, r, max);
        } else {
            for (token = 0; r->logits[token] != max; token++) {
            }
        }
    }
    if (token >= s->vocab) {
        set_bad(out);
        return;
    }
    out->token = token;
    if (p->logprobs >= 0) {
        out->logprob = (float)(s->raw[token] - lse);
    }
}

void bt_sampler_candidates(struct bt_sampler *s, const struct bt_sampler_row *r,
                           struct bt_sampler_candidates *c, struct bt_engine_out *out)
{
    float max;
    double lse = 0;
    struct bt_engine_out top = {0}; /* its list is long enough: BT_ENGINE_MAX_TOP */
    c->n = 0;
    if (!prepare(s, r, out, &lse, &max)) {
        set_bad(out);
        return;
    }
    double sum = log_sum_exp(r->logits, s->vocab, max);
    top_n(r->logits, s->vocab, NULL, sum, &top,
          BT_MIN(r->params->top_k, (uint32_t)BT_ENGINE_CANDIDATES));
    for (uint32_t i = 0; i < top.n_top && top.top_logprob[i] > -INFINITY; i++) {
        c->id[i] = top.top_id[i];
        c->p[i] = expf(top.top_logprob[i]);
        c->logprob[i] = r->params->logprobs >= 0 ? (float)(s->raw[c->id[i]] - lse) : 0;
        c->n = i + 1;
    }
}

void bt_sampler_contrast(const struct bt_sampler_candidates *c, const float *cosine, float alpha,
                         struct bt_engine_out *out)
{
    float best = -INFINITY;
    out->bad = true; /* as long as all scores are NaN */
    for (uint32_t i = 0; i < c->n; i++) {
        float score = (1 - alpha) * c->p[i] - alpha * cosine[i];
        if (score > best) {
            best = score;
            out->token = c->id[i];
            out->logprob = c->logprob[i];
            out->bad = false;
        }
    }
    out->n_top = out->bad ? 0 : out->n_top;
}

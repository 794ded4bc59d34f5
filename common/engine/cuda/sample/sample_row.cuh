/* Chooses one row's token in one block of BT_CU_SAMPLE_THREADS threads: common/engine/sampler.h on
 * the device. It uses only what C and CUDA have in common, so that tests/unit/test_cuda_sample.c
 * can run this file on a CPU and compare it with the host's sampler. Sums are integers (units of
 * 2^-44), so they do not depend on the order in which threads add, and the same row always gives
 * the same token. */
#ifndef BT_CUDA_SAMPLE_ROW_CUH
#define BT_CUDA_SAMPLE_ROW_CUH

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/engine/cuda/sample/sample_args.h"

typedef unsigned long long sample_u64;

#define SAMPLE_BINS     2048
#define SAMPLE_GATHER   BT_CU_SAMPLE_THREADS /* candidates that are ranked one by one */
#define SAMPLE_ALL      (~0ull)
#define SAMPLE_DOLA_TOP 0.1f /* BT_SAMPLER_DOLA_TOP */
/* The largest Gumbel variate of 23 random bits. */
#define SAMPLE_GUMBEL_MAX 16.64f

/* ---- blocks ---- */

static __device__ sample_u64 sample_max(sample_u64 a, sample_u64 b)
{
    return a > b ? a : b;
}

static __device__ sample_u64 block_max64(sample_u64 v)
{
    __shared__ sample_u64 part[32];
    for (int d = 16; d > 0; d /= 2) {
        v = sample_max(v, __shfl_xor_sync(~0u, v, d));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = part[threadIdx.x % 32];
    for (int d = 16; d > 0; d /= 2) {
        v = sample_max(v, __shfl_xor_sync(~0u, v, d));
    }
    return v;
}

/* The sum over all threads up to and including this one; *total_p: over all threads. */
static __device__ sample_u64 block_scan64(sample_u64 v, sample_u64 *total_p)
{
    __shared__ sample_u64 part[32];
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (uint32_t d = 1; d < 32; d *= 2) {
        sample_u64 left = __shfl_up_sync(~0u, v, d);
        v += lane >= d ? left : 0;
    }
    __syncthreads();
    if (lane == 31) {
        part[warp] = v;
    }
    __syncthreads();
    sample_u64 total = 0, before = 0;
    for (uint32_t i = 0; i < 32; i++) {
        before += i < warp ? part[i] : 0;
        total += part[i];
    }
    *total_p = total;
    return before + v;
}

/* ---- orders ---- */

/* A key that rises with the value and, for equal values, falls with the id. Never 0. */
static __device__ sample_u64 sample_key(float v, uint32_t id)
{
    uint32_t u = __float_as_uint(v);
    u = u == 0x80000000u ? 0 : u; /* -0 counts as 0 */
    u = u >> 31 ? ~u : u | 0x80000000u;
    return (sample_u64)u << 32 | (0xffffffffu - id);
}
static __device__ uint32_t sample_key_id(sample_u64 key)
{
    return 0xffffffffu - (uint32_t)key;
}

/* exp(s) in units of 2^-44, s <= 0. */
static __device__ sample_u64 sample_weight(float s)
{
    return (sample_u64)(expf(s) * 0x1p44f);
}

/* A row of scaled logits s <= 0, the largest of them 0. The order of tokens is by |s|, then by id;
 * a token's place is this number. Tokens below the floor, or with s = -inf, have no place, nor have
 * those outside first and last. With `typical` the order of the others is by |s + center|, then by
 * id. */
struct sample_row {
    const float *l;
    uint32_t vocab;
    float max, inv_t, floor, center;
    bool typical;
    sample_u64 first, last;
};
static __device__ float sample_scaled(const struct sample_row *r, uint32_t i)
{
    return __fmul_rn(__fsub_rn(r->l[i], r->max), r->inv_t);
}
static __device__ bool sample_place(const struct sample_row *r, uint32_t i, float *s_p,
                                    sample_u64 *place_p)
{
    float s = sample_scaled(r, i);
    *s_p = s;
    sample_u64 place = (sample_u64)(__float_as_uint(s) & 0x7fffffffu) << 32 | i;
    bool has = s >= r->floor && s > -INFINITY && place >= r->first && place <= r->last;
    if (r->typical) {
        float far = __fadd_rn(s, r->center);
        place = (sample_u64)(__float_as_uint(far) & 0x7fffffffu) << 32 | i;
    }
    *place_p = place;
    return has;
}

/* The first level's bins are 1/64 of s wide, which distributes a model's tokens well. */
static __device__ uint32_t sample_first_bin(sample_u64 place)
{
    float b = __uint_as_float((uint32_t)(place >> 32)) * 64.0f;
    return b < (float)(SAMPLE_BINS - 1) ? (uint32_t)b : SAMPLE_BINS - 1;
}

/* ---- top_k and top_p ---- */

struct sample_hist {
    uint32_t n[SAMPLE_BINS];
    uint32_t lo[SAMPLE_BINS], hi[SAMPLE_BINS]; /* mass of a bin; later of each listed candidate */
    sample_u64 list[SAMPLE_GATHER];
    uint32_t n_list, bin;
    sample_u64 before, answer;
};

/* Adds 64-bit numbers with 32-bit atomics, as 64-bit atomics on shared memory are slow. */
static __device__ void sample_add(struct sample_hist *h, uint32_t bin, sample_u64 mass)
{
    uint32_t low = (uint32_t)mass, old = atomicAdd(&h->lo[bin], low);
    uint32_t high = (uint32_t)(mass >> 32) + (old + low < old);
    if (high) {
        atomicAdd(&h->hi[bin], high);
    }
}

/* The places that a level looks at, and how they map to bins. */
struct sample_level {
    sample_u64 from, to;
    uint32_t shift;
    bool first;
};

static __device__ void sample_count(const struct sample_row *r, const struct sample_level *v,
                                    bool mass, struct sample_hist *h)
{
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < SAMPLE_BINS; i += BT_CU_SAMPLE_THREADS) {
        h->n[i] = h->lo[i] = h->hi[i] = 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < r->vocab; i += BT_CU_SAMPLE_THREADS) {
        float s;
        sample_u64 place;
        if (sample_place(r, i, &s, &place) && place >= v->from && place <= v->to) {
            uint32_t bin =
                v->first ? sample_first_bin(place) : (uint32_t)((place - v->from) >> v->shift);
            atomicAdd(&h->n[bin], 1u);
            if (mass) {
                sample_add(h, bin, sample_weight(s));
            }
        }
    }
    __syncthreads();
}

static __device__ sample_u64 sample_bin(const struct sample_hist *h, uint32_t bin, bool mass)
{
    return mass ? (sample_u64)h->hi[bin] << 32 | h->lo[bin] : h->n[bin];
}

/* Finds the bin in which the sum reaches want: sets h->bin, and h->before to the sum before that
 * bin. On the first level it computes want from the total: count k, or share p of the mass. False:
 * all tokens are kept. */
static __device__ bool sample_find(struct sample_hist *h, bool mass, bool first, uint32_t k,
                                   float p, sample_u64 base, sample_u64 *want_p)
{
    enum { EACH = SAMPLE_BINS / BT_CU_SAMPLE_THREADS };
    sample_u64 own = 0, total;
    for (uint32_t i = 0; i < EACH; i++) {
        own += sample_bin(h, threadIdx.x * EACH + i, mass);
    }
    sample_u64 up_to = block_scan64(own, &total) + base;
    if (first) {
        if (!mass && k >= total) {
            return false;
        }
        *want_p = mass ? sample_max(1, (sample_u64)ceil((double)p * (double)total)) : k;
    }
    sample_u64 at = up_to - own;
    if (at < *want_p && *want_p <= up_to) { /* true in exactly one thread */
        uint32_t i = threadIdx.x * EACH;
        while (at + sample_bin(h, i, mass) < *want_p) {
            at += sample_bin(h, i++, mass);
        }
        h->bin = i;
        h->before = at;
        h->n_list = 0;
    }
    __syncthreads();
    return true;
}

/* Limits the next level to the bin's places. */
static __device__ void sample_narrow(struct sample_level *v, uint32_t bin)
{
    if (v->first) {
        sample_u64 limit = v->to;
        v->from = (sample_u64)__float_as_uint((float)bin / 64.0f) << 32;
        v->to = bin == SAMPLE_BINS - 1
                    ? limit
                    : ((sample_u64)__float_as_uint((float)(bin + 1) / 64.0f) << 32) - 1;
        v->to = v->to < limit ? v->to : limit;
    } else {
        sample_u64 limit = v->to;
        v->from += (sample_u64)bin << v->shift;
        v->to = v->from + ((1ull << v->shift) - 1);
        v->to = v->to < limit ? v->to : limit;
    }
    v->first = false;
    for (v->shift = 0; (v->to - v->from) >> v->shift >= SAMPLE_BINS;) {
        v->shift++;
    }
}

/* Used when few candidates are left: each thread ranks one of them among all. */
static __device__ sample_u64 sample_rank(const struct sample_row *r, const struct sample_level *v,
                                         bool mass, sample_u64 want, struct sample_hist *h)
{
    for (uint32_t i = threadIdx.x; i < r->vocab; i += BT_CU_SAMPLE_THREADS) {
        float s;
        sample_u64 place;
        if (sample_place(r, i, &s, &place) && place >= v->from && place <= v->to) {
            uint32_t at = atomicAdd(&h->n_list, 1u);
            sample_u64 own = mass ? sample_weight(s) : 1;
            h->list[at] = place;
            h->lo[at] = (uint32_t)own;
            h->hi[at] = (uint32_t)(own >> 32);
        }
    }
    __syncthreads();
    if (threadIdx.x < h->n_list) {
        sample_u64 mine = h->list[threadIdx.x], at = h->before;
        for (uint32_t j = 0; j < h->n_list; j++) {
            at += h->list[j] < mine ? sample_bin(h, j, true) : 0;
        }
        /* True in exactly one thread. */
        if (at < want && want <= at + sample_bin(h, threadIdx.x, true)) {
            h->answer = mine;
        }
    }
    __syncthreads();
    return h->answer;
}

/* The last place that is kept of those up to limit: the k-th (mass false), or the one at which the
 * sum reaches the share p of their mass. */
static __device__ sample_u64 sample_cut(const struct sample_row *r, sample_u64 limit, bool mass,
                                        uint32_t k, float p)
{
    __shared__ struct sample_hist h;
    struct sample_level v = {0, limit, 0, true};
    sample_u64 want = 0, base = 0;
    for (;;) {
        sample_count(r, &v, mass, &h);
        if (!sample_find(&h, mass, v.first, k, p, base, &want)) {
            return limit;
        }
        base = h.before;
        uint32_t n = h.n[h.bin];
        sample_narrow(&v, h.bin);
        if (n <= SAMPLE_GATHER) {
            return sample_rank(r, &v, mass, want, &h);
        }
    }
}

/* ---- drawing ---- */

/* bt_philox4x32 of common/base/philox.h. */
static __device__ void sample_philox(uint64_t seed, uint32_t position, uint32_t choice,
                                     uint32_t group, uint32_t what, uint32_t *out)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = position, c1 = choice, c2 = group, c3 = what;
    for (int round = 0; round < 10; round++) {
        uint32_t n0 = __umulhi(0xCD9E8D57u, c2) ^ c1 ^ k0, n2 = __umulhi(0xD2511F53u, c0) ^ c3 ^ k1;
        c1 = 0xCD9E8D57u * c2;
        c3 = 0xD2511F53u * c0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* The key of the largest s + Gumbel among places up to `last`; 0: none. */
static __device__ sample_u64 sample_gumbel(const struct sample_row *r, const struct bt_cu_draw *w,
                                           sample_u64 last)
{
    sample_u64 best = 0;
    float best_v = -INFINITY;
    for (uint32_t g = threadIdx.x; g * 4 < r->vocab; g += BT_CU_SAMPLE_THREADS) {
        uint32_t words[4];
        bool drawn = false;
        for (uint32_t i = 0; i < 4 && g * 4 + i < r->vocab; i++) {
            float s;
            sample_u64 place;
            if (!sample_place(r, g * 4 + i, &s, &place) || place > last ||
                s + SAMPLE_GUMBEL_MAX < best_v) {
                continue;
            }
            if (!drawn) {
                sample_philox(w->seed, w->position, w->choice, g, 0, words);
                drawn = true;
            }
            uint32_t word = i == 0 ? words[0] : i == 1 ? words[1] : i == 2 ? words[2] : words[3];
            float u = __fmul_rn((float)(word >> 9) + 0.5f, 0x1p-23f);
            float value = __fsub_rn(s, logf(-logf(u)));
            best_v = value > best_v ? value : best_v;
            best = sample_max(best, sample_key(value, g * 4 + i));
        }
    }
    return block_max64(best);
}

/* ---- typical_p and XTC ---- */

/* The mass of places up to `last`, and *mean_p: of their |s|. */
static __device__ double sample_mass(const struct sample_row *r, sample_u64 last, double *mean_p)
{
    sample_u64 mass = 0, sum = 0, masses, sums;
    for (uint32_t i = threadIdx.x; i < r->vocab; i += BT_CU_SAMPLE_THREADS) {
        float s;
        sample_u64 place;
        if (sample_place(r, i, &s, &place) && place <= last) {
            mass += sample_weight(s);
            sum += (sample_u64)(expf(s) * -s * 0x1p44f);
        }
    }
    block_scan64(mass, &masses);
    block_scan64(sum, &sums);
    *mean_p = (double)sums / (double)masses;
    return (double)masses * 0x1p-44;
}

/* If at least two of the places up to `last` reach XTC's threshold, r->first becomes that of the
 * least likely of them; and only where a draw of the row says so. */
static __device__ void sample_exclude_top(struct sample_row *r, const struct bt_cu_draw *w,
                                          sample_u64 last)
{
    uint32_t words[4];
    double mean;
    sample_philox(w->seed, w->position, w->choice, 0, 1, words);
    if (__fmul_rn((float)(words[0] >> 9) + 0.5f, 0x1p-23f) > w->xtc_probability) {
        return;
    }
    double mass = sample_mass(r, last, &mean);
    float floor = (float)((double)w->xtc_floor + log(mass));
    sample_u64 own = 0, n = 0, all;
    for (uint32_t i = threadIdx.x; i < r->vocab; i += BT_CU_SAMPLE_THREADS) {
        float s;
        sample_u64 place;
        if (sample_place(r, i, &s, &place) && place <= last && s >= floor) {
            own = sample_max(own, (sample_u64)(__float_as_uint(s) & 0x7fffffffu) << 32 | i);
            n++;
        }
    }
    own = block_max64(own);
    block_scan64(n, &all);
    r->first = all > 1 ? own : 0;
}

/* ---- a row ---- */

/* The key of the largest value; false: a value is NaN or +inf, or all are -inf. Has many loads in
 * flight at once, since one block reads the whole row. */
static __device__ bool sample_row_top(const float *l, uint32_t vocab, sample_u64 *top_p)
{
    enum { AHEAD = 16 };
    float top = -INFINITY;
    uint32_t id = threadIdx.x;
    bool bad = false;
    for (uint32_t at = threadIdx.x; at < vocab; at += AHEAD * BT_CU_SAMPLE_THREADS) {
        float v[AHEAD];
        for (uint32_t k = 0; k < AHEAD; k++) {
            uint32_t i = at + k * BT_CU_SAMPLE_THREADS;
            v[k] = i < vocab ? l[i] : -INFINITY;
        }
        for (uint32_t k = 0; k < AHEAD; k++) { /* of equal values the first wins */
            bad |= !(v[k] < INFINITY);         /* NaN too */
            id = v[k] > top ? at + k * BT_CU_SAMPLE_THREADS : id;
            top = v[k] > top ? v[k] : top;
        }
    }
    bad = __syncthreads_or(bad);
    *top_p = block_max64(threadIdx.x < vocab ? sample_key(top, id) : 0);
    return !bad && l[sample_key_id(*top_p)] > -INFINITY;
}

/* Which ids may be drawn. Ids without a token are mostly the last ones; `end` excludes these at no
 * cost. Only ids below `end` are looked up in `known`. */
struct sample_ids {
    const uint32_t *known; /* bits; NULL: all ids below `end` have a token */
    uint32_t n, end;
};
static __device__ struct sample_ids sample_ids_of(const struct bt_cu_sampling *a)
{
    struct sample_ids ids = {0, a->vocab, a->vocab};
    if (a->known) {
        ids.n = a->n_known;
        ids.end = a->end_known;
        ids.known = ids.n < ids.end ? a->known : 0;
    }
    return ids;
}
static __device__ bool sample_bit(const uint32_t *bits, uint32_t i)
{
    return !bits || (bits[i / 32] >> i % 32 & 1);
}

/* This thread's largest key below `below`; 0: none. */
static __device__ sample_u64 sample_next(const float *l, const struct sample_ids *ids,
                                         sample_u64 below)
{
    sample_u64 best = 0;
    for (uint32_t i = threadIdx.x; i < ids->end; i += BT_CU_SAMPLE_THREADS) {
        sample_u64 key = sample_key(l[i], i);
        best = key < below && sample_bit(ids->known, i) ? sample_max(best, key) : best;
    }
    return best;
}

/* Writes the n most likely tokens. After each one only the thread that had it searches again. */
static __device__ void sample_top_n(const float *l, const struct sample_ids *ids, double lse,
                                    uint32_t n, struct bt_cu_drawn *out)
{
    sample_u64 mine = sample_next(l, ids, SAMPLE_ALL);
    n = n < ids->n ? n : ids->n;
    for (uint32_t i = 0; i < n; i++) {
        sample_u64 top = block_max64(mine);
        if (mine == top) {
            uint32_t id = sample_key_id(top);
            out->top_id[i] = id;
            out->top_logprob[i] = (float)(l[id] - lse);
            mine = sample_next(l, ids, top);
        }
    }
}

static __device__ double sample_log_sum(const float *l, uint32_t vocab, float max)
{
    sample_u64 sum = 0, total;
    for (uint32_t i = threadIdx.x; i < vocab; i += BT_CU_SAMPLE_THREADS) {
        sum += sample_weight(l[i] - max);
    }
    block_scan64(sum, &total);
    return max + log((double)total * 0x1p-44);
}

/* DoLa: v, masked logits of a row whose log sum is lse, become differences from early's logprobs;
 * those below `end`, as the others cannot be drawn. */
static __device__ void sample_contrast(const float *early, uint32_t vocab, uint32_t end, double lse,
                                       float *v)
{
    sample_u64 top;
    bool some = sample_row_top(v, end, &top);
    float floor = some ? (float)(v[sample_key_id(top)] - lse) + logf(SAMPLE_DOLA_TOP) : INFINITY;
    bool good = sample_row_top(early, vocab, &top);
    double early_lse = good ? sample_log_sum(early, vocab, early[sample_key_id(top)]) : 0;
    for (uint32_t i = threadIdx.x; i < end; i += BT_CU_SAMPLE_THREADS) {
        float p = (float)(v[i] - lse);
        v[i] = !good ? NAN : p >= floor ? p - (float)(early[i] - early_lse) : -INFINITY;
    }
    __syncthreads();
}

/* Applies mask, minimum length, DoLa, bias and penalties: reads l, whose log sum is lse, writes the
 * row's v. before: the drafts of the n_before draws before this one. */
static __device__ void sample_adjust(const struct bt_cu_sampling *a, const struct bt_cu_draw *w,
                                     const uint32_t *before, const struct sample_ids *ids,
                                     const float *l, double lse, float *v)
{
    enum { AHEAD = 8 };
    uint32_t words = (a->vocab + 31) / 32;
    const uint32_t *mask = a->mask ? a->mask + (size_t)w->row * words : NULL;
    for (uint32_t at = threadIdx.x; at < a->vocab; at += AHEAD * BT_CU_SAMPLE_THREADS) {
        float x[AHEAD];
        bool in[AHEAD];
        for (uint32_t k = 0; k < AHEAD; k++) { /* loads that do not wait for each other */
            uint32_t i = at + k * BT_CU_SAMPLE_THREADS;
            x[k] = i < a->vocab ? l[i] : 0;
            in[k] = i < a->vocab && sample_bit(mask, i) && sample_bit(ids->known, i);
        }
        for (uint32_t k = 0; k < AHEAD; k++) {
            uint32_t i = at + k * BT_CU_SAMPLE_THREADS;
            if (i < a->vocab) {
                v[i] = in[k] ? x[k] : -INFINITY;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < w->n_banned && w->banned[threadIdx.x] < a->vocab) {
        v[w->banned[threadIdx.x]] = -INFINITY;
    }
    __syncthreads();
    if (w->early) {
        sample_contrast(a->early + (size_t)(w->early - 1) * a->vocab, a->vocab, ids->end, lse, v);
    }
    const struct bt_cu_bias *bias = a->bias + (size_t)w->slot * BT_CU_BIAS_MAX;
    for (uint32_t i = threadIdx.x; i < w->n_bias; i += BT_CU_SAMPLE_THREADS) {
        atomicAdd(&v[bias[i].id], bias[i].value); /* an id may come twice */
    }
    __syncthreads();
    const uint32_t *counts = a->counts + (size_t)w->slot * a->vocab;
    for (uint32_t i = threadIdx.x; w->penalties && i < a->vocab; i += BT_CU_SAMPLE_THREADS) {
        uint32_t c = counts[i], n;
        for (uint32_t k = 0; k < w->n_before; k++) { /* it counts only if these are accepted */
            c += before[k] == i;
        }
        n = c & ~BT_CU_COUNT_PROMPT;
        if (c) {
            float x = v[i];
            x = x > 0 ? x / w->repetition : __fmul_rn(x, w->repetition);
            if (n) {
                x = __fsub_rn(x, __fadd_rn(__fmul_rn(w->frequency, (float)n), w->presence));
            }
            v[i] = x;
        }
    }
    __syncthreads();
}

/* The token of an adjusted row, below `end`; a's vocab: no token can be chosen. */
static __device__ uint32_t sample_choose(const struct bt_cu_sampling *a, const struct bt_cu_draw *w,
                                         uint32_t end, const float *v, sample_u64 top)
{
    struct sample_row r = {
        v, end, v[sample_key_id(top)], w->inv_temperature, w->floor, 0, false, 0, SAMPLE_ALL};
    sample_u64 last = SAMPLE_ALL;
    if (w->inv_temperature <= 0) {
        return sample_key_id(top);
    }
    if (w->top_k && w->top_k < end) {
        last = sample_cut(&r, last, false, w->top_k, 0);
    }
    if (w->top_p < 1) {
        last = sample_cut(&r, last, true, 0, w->top_p);
    }
    if (w->typical_p < 1) {
        double mean;
        sample_mass(&r, last, &mean);
        r.last = last;
        r.center = (float)mean;
        r.typical = true;
        last = sample_cut(&r, SAMPLE_ALL, true, 0, w->typical_p);
    }
    if (w->xtc_probability > 0) {
        sample_exclude_top(&r, w, last);
    }
    sample_u64 best = sample_gumbel(&r, w, last);
    return best ? sample_key_id(best) : a->vocab;
}

/* Does draw `n` of a, with all threads of a block. */
static __device__ void sample_draw(const struct bt_cu_sampling *a, uint32_t n)
{
    __shared__ struct bt_cu_draw draw; /* a copy, as reading host memory is slow */
    __shared__ uint32_t before[BT_CU_DRAFTS_MAX];
    if (threadIdx.x == 0) {
        draw = a->draws[n];
    }
    __syncthreads();
    const struct bt_cu_draw *w = &draw;
    if (w->penalties && threadIdx.x < w->n_before) { /* sample_adjust begins with a barrier */
        before[threadIdx.x] = a->draws[n - w->n_before + threadIdx.x].draft;
    }
    struct bt_cu_drawn *out = &a->out[n];
    const float *l = a->logits + (size_t)w->row * a->vocab, *raw = l;
    const struct sample_ids ids = sample_ids_of(a);
    sample_u64 top;
    double lse = 0;
    uint32_t token = a->vocab;
    bool good = sample_row_top(l, a->vocab, &top);
    if (good && (w->logprobs >= 0 || w->early)) {
        lse = sample_log_sum(l, a->vocab, l[sample_key_id(top)]);
    }
    if (good && w->logprobs >= 0) {
        sample_top_n(l, &ids, lse, (uint32_t)w->logprobs, out);
    }
    if (good && (a->mask || ids.known || w->n_bias || w->n_banned || w->penalties || w->early)) {
        float *v = a->adjusted + (size_t)n * a->vocab;
        sample_adjust(a, w, before, &ids, l, lse, v);
        l = v;
        good = sample_row_top(l, ids.end, &top);
    } else if (good && sample_key_id(top) >= ids.end) {
        good = sample_row_top(l, ids.end, &top);
    }
    if (good) {
        token = sample_choose(a, w, ids.end, l, top);
    }
    if (threadIdx.x == 0) {
        good = token < a->vocab;
        token = good ? token : 0;
        out->token = token;
        out->bad = !good;
        out->logprob = good && w->logprobs >= 0 ? (float)(raw[token] - lse) : 0;
        uint32_t n_top = w->logprobs > 0 ? (uint32_t)w->logprobs : 0;
        out->n_top = !good ? 0 : n_top < ids.n ? n_top : ids.n;
        if (a->chosen) {
            const struct bt_cu_chosen c = {token,     !good,   w->draft,    w->n_before,
                                           w->drafts, w->slot, w->penalties};
            a->chosen[n] = c;
        }
        if (!w->drafts) {
            a->last_token[w->slot] = (int32_t)token;
            if (good && w->penalties) {
                a->counts[(size_t)w->slot * a->vocab + token]++;
            }
        }
    }
}

/* After all draws, with one thread for each draw n: counts the tokens of rows with drafts that
 * became part of their sequence, and keeps the last one. */
static __device__ void sample_accept(const struct bt_cu_sampling *a, uint32_t n)
{
    const struct bt_cu_chosen *c = &a->chosen[n];
    bool part = c->drafts != 0;
    for (uint32_t k = 1; part && k <= c->n_before; k++) {
        part = !c[-(int)k].bad && c[-(int)k].token == c[-(int)k].draft;
    }
    if (part && !c->bad && c->penalties) {
        atomicAdd(&a->counts[(size_t)c->slot * a->vocab + c->token], 1u);
    }
    if (part && (c->bad || c->token != c->draft)) {
        a->last_token[c->slot] = (int32_t)c->token;
    }
}

#endif

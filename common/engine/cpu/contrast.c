/* Contrastive search (Su et al. 2022) on the CPU. The hidden state of a token is the last layer's
 * with the final norm; a slot keeps them with length 1, so that a cosine is a product. Candidates
 * for the next token run at its place in spare slots, which share all pages but the last one. Owner
 * thread: the engine's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/engine/cpu/cpu_priv.h"

#define LANES 16 /* sums that run beside each other, so that they can be vectors */

static float product(const float *a, const float *b, uint32_t n)
{
    float lane[LANES] = {0}, sum = 0;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (uint32_t k = 0; k < LANES; k++) {
            lane[k] += a[i + k] * b[i + k];
        }
    }
    for (uint32_t k = 0; k < LANES; k++) {
        sum += lane[k];
    }
    for (; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

/* out = norm(x + add) / its length. The scale of RMSNorm has no part in that. */
static void unit_state(const struct bt_cpu_model *m, const float *x, const float *add, float *out)
{
    uint32_t n = m->config.hidden;
    float mean = 0, scale = 1;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = x[i] + (add ? add[i] : 0.0f);
    }
    if (m->norm_bias) {
        for (uint32_t i = 0; i < n; i++) {
            mean += out[i] / (float)n;
        }
        for (uint32_t i = 0; i < n; i++) {
            out[i] -= mean;
        }
        scale = 1 / sqrtf(product(out, out, n) / (float)n + m->config.norm_eps);
    }
    for (uint32_t i = 0; i < n; i++) {
        out[i] = out[i] * scale * m->norm[i] + (m->norm_bias ? m->norm_bias[i] : 0.0f);
    }
    scale = 1 / sqrtf(product(out, out, n));
    for (uint32_t i = 0; i < n; i++) {
        out[i] *= scale;
    }
}

/* Where the state of a row of the step goes. */
static float *place_of(const struct bt_cpu_step *s, uint32_t row)
{
    const struct bt_cpu_kept *k = &s->e->kept[row];
    size_t hidden = s->e->model.config.hidden;
    return s->states ? s->states + row * hidden
                     : s->e->host.slots[k->slot].hidden + (size_t)(k->pos - 1) * hidden;
}

void bt_cpu_contrast_keep(struct bt_cpu_step *s)
{
    struct bt_engine *e = s->e;
    size_t hidden = e->model.config.hidden;
    float *add = (float *)bt_cpu_last_residual(s);
    uint32_t out = 0;
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)s->n *hidden)) schedule(static)
    for (uint32_t i = 0; i < s->n; i++) {
        if (e->kept[i].hidden) {
            unit_state(&e->model, e->x + i * hidden, add ? add + i * hidden : NULL, place_of(s, i));
        }
    }
    for (uint32_t i = 0; i < s->n; i++) { /* only rows with logits go on */
        const struct bt_cpu_kept k = e->kept[i];
        if (k.hidden && !s->states) {
            struct bt_host_slot *slot = &e->host.slots[k.slot];
            slot->n_hidden = BT_MAX(slot->n_hidden, k.pos);
        }
        if (!k.prompt && !k.sample) {
            continue;
        }
        if (out < i) {
            memcpy(e->x + out * hidden, e->x + i * hidden, hidden * sizeof(*e->x));
            e->kept[out] = k;
        }
        if (out < i && add) {
            memcpy(add + out * hidden, add + i * hidden, hidden * sizeof(*add));
        }
        out++;
    }
    s->n = out;
}

bt_status_t bt_cpu_contrast_cosines(void *arg, uint32_t slot, uint32_t pos, const uint32_t *tokens,
                                    uint32_t n, float *cosines)
{
    struct bt_engine *e = arg;
    const struct bt_host_slot *s = &e->host.slots[slot];
    uint32_t hidden = e->model.config.hidden, max = e->host.info.max_slots;
    float *states = bt_malloc((size_t)n * hidden * sizeof(*states));
    bt_status_t st = pos > s->n_hidden ? BT_ERR_INVALID : BT_OK;
    uint32_t some = BT_MIN(n, e->host.info.max_rows);
    for (uint32_t at = 0; st == BT_OK && at < n; at += some) {
        struct bt_engine_row rows[BT_HOST_SPARE] = {0};
        uint32_t m = BT_MIN(some, n - at);
        for (uint32_t i = 0; i < m; i++) {
            bt_host_spare(&e->host, i, slot, pos);
            rows[i] = (struct bt_engine_row){
                .slot = max + i, .pos = pos, .n = 1, .tokens = &tokens[at + i]};
        }
        const struct bt_engine_batch b = {.n_rows = m, .rows = rows};
        st = bt_cpu_states(e, &b, m, states + (size_t)at * hidden);
    }
    for (uint32_t i = 0; st == BT_OK && i < n; i++) {
        float most = -INFINITY;
#pragma omp parallel for num_threads(bt_cpu_threads(e, (uint64_t)pos *hidden)) reduction(max : most)
        for (uint32_t t = 0; t < pos; t++) {
            float c = product(states + (size_t)i * hidden, s->hidden + (size_t)t * hidden, hidden);
            most = c > most ? c : most;
        }
        cosines[i] = most;
    }
    free(states);
    return st;
}

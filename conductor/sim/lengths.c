/* The simulator's knowledge of the lengths of answers and of the time that rows go on, for the
 * forecast and for requests. */
#include <math.h>
#include <stdlib.h>

#include "conductor/sim/sim_priv.h"

#define LIVES_GUESS 20    /* weight of the first guess, in ended rows */
#define LIVES_MS    60000 /* time over which ended rows fade, if all rows are alike */
#define LENGTHS_MS  500   /* between two looks at the progress of rows */

void bt_sim_lengths_init(struct bt_sim *s)
{
    s->lengths = (struct bt_sim_lengths){.ms = LIVES_GUESS * s->o->life_ms, .ended = LIVES_GUESS};
    if (s->o->lengths) {
        s->lengths.survival = bt_calloc(1, sizeof(*s->lengths.survival));
        bt_survival_init(s->lengths.survival);
    }
}

void bt_sim_lengths_cleanup(struct bt_sim *s)
{
    free(s->lengths.survival);
}

static struct bt_survival_key key_of(const struct bt_sim *s, uint32_t id)
{
    return bt_survival_key(0, s->req[id].input);
}

double bt_sim_lengths_mean(const struct bt_sim *s, uint32_t id)
{
    return s->lengths.survival != NULL ? bt_survival_mean(s->lengths.survival, key_of(s, id),
                                                          s->live[id].given, BT_SIM_MAX_NEW)
                                       : 0;
}

void bt_sim_lengths_served(struct bt_sim *s, uint32_t id)
{
    if (s->lengths.survival != NULL) {
        bt_survival_note(s->lengths.survival, key_of(s, id), s->live[id].told,
                         bt_sim_output_of(s, id), true);
    }
}

/* ---- by class ---- */

struct rows { /* sums over the rows of a look */
    struct bt_sim *s;
    double n, kv;                    /* rows, tokens of their context */
    double rest, kv_rest;            /* sums of tokens to come, and of tokens to come * context */
    bool known[BT_SURVIVAL_CLASSES]; /* whether `of` is filled in */
    double of[BT_SURVIVAL_CLASSES][BT_SURVIVAL_BUCKETS]; /* tokens to come, bt_survival_rest */
};

static void reached(void *arg, uint32_t id, uint32_t generated)
{
    struct rows *r = arg;
    struct bt_sim *s = r->s;
    struct bt_sim_live *l = &s->live[id];
    struct bt_survival_key k = key_of(s, id);
    uint32_t n = l->given + generated;
    bt_survival_reach(s->lengths.survival, k, l->told, n);
    l->told = n;
    if (!r->known[k.prompt_class]) {
        bt_survival_rest(s->lengths.survival, k, BT_SIM_MAX_NEW, r->of[k.prompt_class]);
        r->known[k.prompt_class] = true;
    }
    double rest = r->of[k.prompt_class][bt_survival_bucket(n)], kv = s->req[id].input + n;
    r->n++;
    r->kv += kv;
    r->rest += rest;
    r->kv_rest += rest * kv;
}

void bt_sim_lengths_look(struct bt_sim *s)
{
    if (s->lengths.survival == NULL || s->now_ms - s->lengths.looked_ms < LENGTHS_MS) {
        return;
    }
    s->lengths.looked_ms = s->now_ms;
    struct rows r = {.s = s};
    struct bt_sched_request one = {.n_tokens = 1, .block_tokens = BT_SIM_BLOCK_TOKENS};
    double step = 0, n = 0;
    for (uint32_t i = 0; i < s->n; i++) {
        if (s->workers[i].decode) {
            bt_sim_decode_each(s->d[i].d, reached, &r);
            step += bt_sched_full_step_ms(&s->params, &s->workers[i], &one);
            n++;
        }
    }
    if (r.n > 0) {
        s->stages.forecast.life_ms = step / n * r.rest / r.n;
        s->stages.forecast.kv_life_ms = step / n * r.kv_rest / r.kv;
    }
}

/* ---- all alike ---- */

/* A row that still runs counts with the time that it has run. Otherwise only short answers would
 * count at the start. */
void bt_sim_lengths_look_alike(struct bt_sim *s, double rows)
{
    struct bt_sim_lengths *l = &s->lengths;
    if (l->survival != NULL) {
        return;
    }
    double took = s->now_ms - l->at_ms, old = exp(-took / LIVES_MS);
    l->ms = l->ms * old + rows * took;
    l->ended *= old;
    l->at_ms = s->now_ms;
    s->stages.forecast.life_ms = l->ended > 0 ? l->ms / l->ended : 0;
}

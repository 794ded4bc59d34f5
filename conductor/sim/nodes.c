/* The nodes: their first roles, how load changes them, and their failures and returns. */
#include <stdlib.h>

#include "conductor/sim/sim_priv.h"

/* ---- roles ---- */

static void give_role(struct bt_sim *s, uint32_t i, bool prefill)
{
    const struct bt_sim_cluster *c = s->c;
    struct bt_sched_said *said = &s->nodes[i].said;
    s->workers[i].prefill = prefill;
    s->workers[i].decode = !prefill;
    *said = (struct bt_sched_said){.has_cost = true, .cost = prefill ? c->prefill : c->decode};
    said->chunk_tokens = prefill ? (uint32_t)c->chunk_tokens : BT_SIM_SHORT_CHUNK;
    said->max_rows = said->chunk_tokens;
    if (!prefill) {
        said->slots_total = (uint32_t)c->rows_max;
        said->pages_total = (uint32_t)(c->kv_tokens / BT_SIM_BLOCK_TOKENS);
    }
}

static bool has_nothing(const struct bt_sim *s, uint32_t i)
{
    const struct bt_sim_decode_node *d = &s->d[i];
    return bt_sim_prefill_idle(&s->p[i]) && s->nodes[i].own.rows == 0 &&
           !(bt_sim_decode_prompt_ms(d->d) > 0);
}

void bt_sim_nodes_look_at_roles(struct bt_sim *s)
{
    uint32_t node, changing = s->roles.changing;
    bt_sim_show(s);
    if (bt_sim_roles_look(&s->roles, &s->params, s->workers,
                          changing != BT_BALANCE_NONE && has_nothing(s, changing), s->now_ms,
                          &node)) {
        s->r->prefill_node_ms += s->roles.to_prefill ? -s->now_ms : s->now_ms;
        s->n_prefilling += s->roles.to_prefill ? 1 : -1u;
        give_role(s, node, s->roles.to_prefill);
    }
    if (s->finished < s->r->n) {
        bt_sim_push(s, s->now_ms + BT_SIM_ROLES_LOOK_MS, EV_LOOK, 0, 0);
    }
}

/* ---- failures ---- */

static void lose_prompt(void *arg, uint32_t id)
{
    struct bt_sim *s = arg;
    bt_sim_abandon(s, id, s->r->records[id].prefill, true);
}

static void lose_row(void *arg, uint32_t id, uint32_t generated, bool prompt)
{
    struct bt_sim *s = arg;
    const struct bt_sim_record *rec = &s->r->records[id];
    s->live[id].given += prompt ? 0 : 1 + generated;
    bt_sim_abandon(s, id, prompt ? rec->prefill : rec->decode, prompt);
}

void bt_sim_node_fail(struct bt_sim *s, const struct bt_sim_failure *f)
{
    uint32_t node = f->node;
    double back_ms = s->now_ms + f->down_ms;
    bool down = s->back_ms[node] > s->now_ms; /* of two that overlap, the later return counts */
    s->back_ms[node] = BT_MAX(s->back_ms[node], back_ms);
    bt_sim_push(s, back_ms, EV_BACK, node, 0);
    if (down) {
        return;
    }
    s->failed_ms[node] = s->now_ms;
    s->kvstores[node].avoid = true;
    s->links[node] = (struct bt_sim_link){0};
    s->r->prefill_busy_ms -= s->p[node].stepping ? s->p[node].end_ms - s->now_ms : 0;
    bt_sim_prefill_fail(&s->p[node], lose_prompt, s);
    if (s->d[node].d != NULL) {
        bt_sim_decode_fail(s->d[node].d, s->now_ms, lose_row, s);
        s->d[node].version++;
    }
    bt_sim_caches_clear(s->caches, node);
}

void bt_sim_node_back(struct bt_sim *s, uint32_t node)
{
    if (s->now_ms < s->back_ms[node]) {
        return;
    }
    s->kvstores[node].avoid = false;
}

/* ---- all of them ---- */

static struct bt_sim_caches *caches_create(const struct bt_sim *s)
{
    const struct bt_sim_cluster *c = s->c;
    struct bt_sim_disk_config disk = {.blocks = (uint32_t)(c->ssd_tokens / BT_SIM_BLOCK_TOKENS),
                                      .block_bytes = BT_SIM_BLOCK_TOKENS * c->token_bytes,
                                      .read_bytes_per_s = c->ssd_read_bytes_per_s,
                                      .write_bytes_per_s = c->ssd_write_bytes_per_s,
                                      .write = s->o->ssd_write};
    return bt_sim_caches_create(s->n, (uint32_t)(c->cache_tokens / BT_SIM_BLOCK_TOKENS),
                                s->t->n_unique,
                                s->o->eviction != NULL ? s->o->eviction : &bt_evict_density, &disk);
}

void bt_sim_nodes_init(struct bt_sim *s)
{
    const struct bt_sim_cluster *c = s->c;
    uint32_t n = s->n;
    s->n_prefilling = s->n_p;
    s->p = bt_calloc(n, sizeof(*s->p));
    s->d = bt_calloc(n, sizeof(*s->d));
    s->nodes = bt_calloc(n, sizeof(*s->nodes));
    s->workers = bt_calloc(n, sizeof(*s->workers));
    s->kvstores = bt_calloc(n, sizeof(*s->kvstores));
    s->match = bt_calloc(n, sizeof(*s->match));
    s->links = bt_calloc(n, sizeof(*s->links));
    s->failed_ms = bt_calloc(n, sizeof(*s->failed_ms));
    s->back_ms = bt_calloc(n, sizeof(*s->back_ms));
    /* A decode node's cache gets only the prompts that the node computes itself. */
    s->caches = caches_create(s);
    for (uint32_t i = 0; i < n; i++) {
        s->failed_ms[i] = -1;
        if (i >= s->n_p || s->o->roles_window_ms > 0) {
            s->d[i].d = bt_sim_decode_create(&c->decode, c->kv_tokens, (uint32_t)c->rows_max);
            bt_sim_decode_mix(s->d[i].d, &c->prefill, s->o->mixed_step_ms, s->o->mixed_gap_ms,
                              BT_SIM_SHORT_CHUNK);
        }
        bt_sched_own_init(&s->nodes[i].own);
        bt_sim_prefill_init(&s->p[i], &c->prefill, (uint32_t)c->chunk_tokens);
        give_role(s, i, i < s->n_p);
    }
    for (uint32_t i = 0; i < s->o->n_failures; i++) {
        bt_sim_push(s, s->o->failures[i].at_ms, EV_FAIL, i, 0);
    }
    if (s->o->roles_window_ms > 0) {
        bt_sim_roles_init(&s->roles, n, s->o->roles_window_ms);
        bt_sim_push(s, BT_SIM_ROLES_LOOK_MS, EV_LOOK, 0, 0);
    }
}

void bt_sim_nodes_cleanup(struct bt_sim *s)
{
    for (uint32_t i = 0; i < s->n; i++) {
        s->r->decode_steps += s->d[i].d != NULL ? bt_sim_decode_steps(s->d[i].d) : 0;
        bt_sim_decode_destroy(s->d[i].d);
    }
    s->r->prefill_node_ms += s->n_prefilling * s->r->end_ms;
    s->r->role_changes = s->roles.changes;
    bt_sim_roles_cleanup(&s->roles);
    s->r->bytes_written = bt_sim_caches_written(s->caches);
    bt_sim_caches_destroy(s->caches);
    free(s->p);
    free(s->d);
    free(s->nodes);
    free(s->links);
    free(s->failed_ms);
    free(s->back_ms);
    free(s->workers);
    free(s->kvstores);
    free(s->match);
}

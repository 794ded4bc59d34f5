/* The null back end, for benchmarks of everything but the engine, and for tests that need an exact
 * engine on any processor. It uses a model's shape without its weights. The KV of a position is, in
 * every layer, a hash of the KV before it and of its token. The next token is a function of the KV
 * of all layers at the last position. So a token depends on the whole history, and any mix-up of
 * pages, slots or flows changes the text.
 *
 * BATON_NULL_PACE=STEP_US,TOKEN_US makes a step take STEP_US plus TOKEN_US for each of its tokens
 * without using the CPU, as a GPU would. So a machine that could not compute the model can
 * load-test all other parts. BATON_NULL_EDIT=N makes an answer a copy of its prompt in which one
 * token of N, in the mean, is another: what an edited document looks like. Owner thread: the
 * engine's. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/conf/conf.h"
#include "common/engine/engine.h"
#include "common/engine/host.h"
#include "common/engine/model_config.h"

#define KV_BYTES_DEF (1ull << 30)

struct bt_engine {
    struct bt_host host;
    struct bt_model_config config;
    float log_vocab;
    uint32_t kv_bytes;        /* used bytes of a position's KV: 8, fewer in very narrow heads */
    double step_us, token_us; /* BATON_NULL_PACE; 0: no delay */
    uint32_t edit;            /* BATON_NULL_EDIT; 0: answers do not copy the prompt */
};

#include "common/base/clock.h"
#include "common/engine/host_calls.h" /* these functions use struct bt_engine */

/* False: the variable is set, but is not two numbers in range. */
static bool read_pace(struct bt_engine *e)
{
    const char *pace = bt_conf_env("BATON_NULL_PACE");
    char *comma, *end;
    if (pace == NULL || pace[0] == '\0') {
        return true;
    }
    e->step_us = strtod(pace, &comma);
    if (comma == pace || *comma != ',') {
        return false;
    }
    e->token_us = strtod(comma + 1, &end);
    return end != comma + 1 && *end == '\0' && e->step_us >= 0 && e->token_us >= 0 &&
           e->step_us <= 1e6 && e->token_us <= 1e6;
}

/* Likewise. */
static bool read_edit(struct bt_engine *e)
{
    const char *edit = bt_conf_env("BATON_NULL_EDIT");
    char *end;
    if (edit == NULL || edit[0] == '\0') {
        return true;
    }
    unsigned long n = strtoul(edit, &end, 10);
    e->edit = (uint32_t)n;
    return *end == '\0' && n >= 1 && n <= 1000000;
}

/* Sleeps until the step that began at begin_ns has taken its time. */
static void pace(const struct bt_engine *e, const struct bt_engine_batch *b, uint64_t begin_ns)
{
    double us = e->step_us;
    for (uint32_t i = 0; i < b->n_rows; i++) {
        us += e->token_us * b->rows[i].n;
    }
    uint64_t until = begin_ns + (uint64_t)(us * 1e3);
    struct timespec t = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
    while (us > 0 && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

static void null_close(struct bt_engine *e)
{
    if (e) {
        bt_host_cleanup(&e->host);
        free(e);
    }
}

static bt_status_t null_open(const struct bt_engine_config *c, struct bt_engine **e_p,
                             const struct bt_engine_info **info_p, char *err, size_t err_cap)
{
    if (c->size != sizeof(*c) || !c->model_dir || !c->max_slots || !c->max_rows ||
        !c->page_tokens) {
        snprintf(err, err_cap,
                 "engine: model.path, max_slots, max_rows and kv.block_tokens are "
                 "needed");
        return BT_ERR_CONFIG;
    }
    struct bt_engine *e = bt_calloc(1, sizeof(*e));
    bt_status_t st = bt_model_config_load(c->model_dir, &e->config, err, err_cap);
    if (st == BT_OK && c->mtp) {
        st = bt_model_take_mtp(&e->config, c->model_dir, err, err_cap);
    }
    if (st == BT_OK && !read_pace(e)) {
        snprintf(err, err_cap, "BATON_NULL_PACE must be STEP_US,TOKEN_US");
        st = BT_ERR_CONFIG;
    }
    if (st == BT_OK && !read_edit(e)) {
        snprintf(err, err_cap, "BATON_NULL_EDIT must be a number from 1 to 1000000");
        st = BT_ERR_CONFIG;
    }
    if (st != BT_OK) {
        free(e);
        return st;
    }
    struct bt_engine_info info = {.size = sizeof(info),
                                  .abi = BT_ENGINE_ABI,
                                  .caps = BT_ENGINE_CAP_EXACT | BT_ENGINE_CAP_MIXED |
                                          BT_ENGINE_CAP_DRAFTS,
                                  .vocab = e->config.vocab,
                                  .max_model_len = e->config.max_model_len,
                                  .pages = c->pages,
                                  .max_slots = c->max_slots,
                                  .max_rows = c->max_rows,
                                  .max_drafts = c->max_rows,
                                  .device = "null"};
    st = bt_model_kv_layout(&e->config, c->kv_dtype, c->page_tokens, &info.layout);
    if (st != BT_OK) {
        snprintf(err, err_cap,
                 "kv.block_tokens %u, model.kv_dtype %s: no KV layout for this model: %s",
                 c->page_tokens, c->kv_dtype ? c->kv_dtype : "f16", bt_status_text(st));
    } else {
        st =
            bt_host_init(&e->host, &info, c->mem_limit ? c->mem_limit : KV_BYTES_DEF, err, err_cap);
    }
    if (st == BT_OK) {
        st = bt_ids_load(c->model_dir, info.vocab, &e->host.ids, err, err_cap);
    }
    if (st != BT_OK) {
        null_close(e);
        return st;
    }
    e->kv_bytes = BT_MIN(8u, bt_kv_row_bytes(&info.layout.groups[0]));
    e->log_vocab = logf((float)e->config.vocab);
    *e_p = e;
    *info_p = &e->host.info;
    return BT_OK;
}

static uint32_t row_token(const struct bt_engine *e, const struct bt_engine_row *r, uint32_t i)
{
    const struct bt_host_slot *s = &e->host.slots[r->slot];
    return r->tokens ? r->tokens[i] : s->tokens[s->n_tokens - 1];
}

/* The KV of a position in one layer: its first kv_bytes. */
static uint8_t *kv_at(const struct bt_engine *e, uint32_t slot, uint32_t pos, uint32_t layer)
{
    const struct bt_kv_layout *l = &e->host.info.layout;
    uint32_t page = e->host.slots[slot].pages[pos / l->page_tokens] - 1;
    return bt_host_segment(&e->host, layer, page) +
           (size_t)(pos % l->page_tokens) * bt_kv_row_bytes(&l->groups[0]);
}

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 32) * 0x9e3779b97f4a7c15ull;
    return h ^ h >> 29;
}

/* KV(pos) = f(KV(pos - 1), token, layer). */
static void write_layer(struct bt_engine *e, const struct bt_engine_batch *b, uint32_t layer)
{
    for (uint32_t i = 0; i < b->n_rows; i++) {
        const struct bt_engine_row *r = &b->rows[i];
        uint32_t pos = bt_host_row_pos(&e->host, r);
        uint64_t kv = 0;
        if (pos > 0) {
            memcpy(&kv, kv_at(e, r->slot, pos - 1, layer), e->kv_bytes);
        }
        for (uint32_t t = 0; t < r->n; t++) {
            kv = mix(kv + row_token(e, r, t) + ((uint64_t)(layer + 1) << 32));
            memcpy(kv_at(e, r->slot, pos + t, layer), &kv, e->kv_bytes);
        }
    }
}

/* The hash of the KV of all layers at the position before `pos`. */
static uint64_t state_before(const struct bt_engine *e, uint32_t slot, uint32_t pos)
{
    uint64_t all = 0, kv = 0;
    for (uint32_t l = 0; l < e->config.layers; l++) {
        memcpy(&kv, kv_at(e, slot, pos - 1, l), e->kv_bytes);
        all = mix(all ^ kv);
    }
    return all;
}

/* The first id from `id` on that has a token. */
static uint32_t with_token(const struct bt_engine *e, uint32_t id)
{
    while (!bt_ids_bit(e->host.ids.known, id)) {
        id = (id + 1) % e->config.vocab;
    }
    return id;
}

static bool ends(const struct bt_engine *e, uint32_t id)
{
    bool eos = false;
    for (uint32_t i = 0; i < e->config.n_eos; i++) {
        eos |= e->config.eos[i] == id;
    }
    return eos;
}

/* Chooses a token that ends a sequence of this model only if the mask allows no other, so that
 * answers have the length that the caller asked for. Returns the vocabulary's size if the mask
 * allows no token. */
static uint32_t choose(const struct bt_engine *e, const struct bt_engine_params *p, uint64_t state,
                       const uint32_t *mask)
{
    if (p->temperature > 0) {
        state = mix(mix(state + p->seed) + p->choice);
    }
    uint32_t vocab = e->config.vocab, id = (uint32_t)((state >> 16) % vocab), end = vocab, n = 1;
    for (uint32_t seen = 0; seen < vocab; seen += n, id = id + n < vocab ? id + n : 0) {
        n = 1;
        if (mask && mask[id / 32] >> id % 32 == 0) { /* the rest of this word */
            n = BT_MIN(32 - id % 32, vocab - id);
            continue;
        }
        if (!bt_ids_bit(e->host.ids.known, id) || !bt_ids_bit(mask, id)) {
            continue;
        }
        if (!ends(e, id)) {
            return id;
        }
        end = BT_MIN(end, id);
    }
    return end;
}

/* Fills the result with the token as the only choice, because there is no distribution. */
static void fill_out(const struct bt_engine *e, uint32_t slot, uint32_t pos, uint32_t token,
                     struct bt_engine_out *o)
{
    int32_t want = e->host.slots[slot].params.logprobs;
    memset(o, 0, offsetof(struct bt_engine_out, top_id)); /* not the arrays: they are long */
    o->bad = false;
    o->slot = slot;
    o->pos = pos;
    o->token = token;
    o->logprob = -e->log_vocab;
    o->n_top = BT_MIN((uint32_t)BT_MAX(want, 0), (uint32_t)BT_ENGINE_MAX_TOP);
    o->n_top = BT_MIN(o->n_top, e->host.ids.n);
    for (uint32_t i = 0, id = token; i < o->n_top; i++) {
        o->top_id[i] = id = with_token(e, id);
        o->top_logprob[i] = -e->log_vocab;
        id = (id + 1) % e->config.vocab;
    }
}

static void prompt_outs(struct bt_engine *e, const struct bt_engine_batch *b,
                        struct bt_host_ticket *t)
{
    uint32_t n = 0, at = 0;
    for (uint32_t i = 0; i < b->n_rows; i++) {
        n += bt_host_row_prompt_outs(&e->host, &b->rows[i]);
    }
    bt_host_ticket_outs(t, n);
    for (uint32_t i = 0; i < b->n_rows && n > 0; i++) {
        const struct bt_engine_row *r = &b->rows[i];
        uint32_t m = bt_host_row_prompt_outs(&e->host, r), pos = bt_host_row_pos(&e->host, r) + 1;
        for (uint32_t k = 0; k < m; k++) {
            uint32_t token = e->host.slots[r->slot].tokens[pos + k];
            fill_out(e, r->slot, pos + k, token, &t->out[at]);
            t->out[at++].rank = 1;
        }
    }
}

static bt_status_t null_forward(struct bt_engine *e, const struct bt_engine_batch *b,
                                bt_engine_ticket_t *fwd_p)
{
    uint32_t n, n_sample;
    bt_status_t st = bt_host_check_batch(&e->host, b, &n, &n_sample);
    if (st != BT_OK) {
        return st;
    }
    uint64_t begin_ns = bt_mono_ns();
    struct bt_host_ticket *t = bt_host_ticket_new(&e->host, 0);
    t->forward = true;
    for (uint32_t l = 0; st == BT_OK && l < e->host.info.layout.n_layers; l++) {
        st = bt_host_layer_wait(&e->host, b, l);
        if (st == BT_OK) {
            write_layer(e, b, l);
            bt_host_layer_fire(&e->host, b, l);
        }
    }
    for (uint32_t i = 0; st == BT_OK && i < b->n_rows; i++) {
        if (b->rows[i].flags & BT_ROW_SAMPLE) {
            bt_host_ticket_sample_row(&e->host, t, &b->rows[i]);
        }
    }
    if (st == BT_OK) {
        prompt_outs(e, b, t);
        bt_host_step_end(&e->host, b);
    }
    pace(e, b, begin_ns);
    bt_pace_wait(&e->host.pace);
    *fwd_p = t->id;
    bt_host_ticket_done(&e->host, t, st);
    return BT_OK;
}

struct null_draw {
    const struct bt_engine *e;
    const uint32_t *mask; /* NULL: all tokens */
};

static void draw(void *arg, const struct bt_host_ticket *f, const struct bt_host_sample *want,
                 struct bt_engine_out *o)
{
    const struct null_draw *d = arg;
    const struct bt_engine *e = d->e;
    const struct bt_host_slot *s = &e->host.slots[want->slot];
    uint64_t state = state_before(e, want->slot, want->pos);
    size_t words = BT_DIV_UP(e->config.vocab, 32u);
    const uint32_t *allowed = d->mask ? d->mask + want->row * words : NULL;
    uint32_t token = choose(e, &s->params, state, allowed);
    (void)f;
    if (e->edit > 0 && s->n_prompt > 0 && mix(state) % e->edit != 0) {
        uint32_t copy = s->tokens[(want->pos - s->n_prompt) % s->n_prompt];
        token = bt_ids_bit(allowed, copy) ? copy : token;
    }
    fill_out(e, want->slot, want->pos, token, o);
    o->bad = token == e->config.vocab;
}

static bt_status_t null_sample(struct bt_engine *e, bt_engine_ticket_t fwd, const uint32_t *mask,
                               bt_engine_ticket_t *out_p)
{
    struct null_draw d = {.e = e, .mask = mask};
    return bt_host_sample_by(&e->host, fwd, draw, &d, out_p);
}

static const struct bt_engine_vtable vtable = {
    .abi = BT_ENGINE_ABI,
    .name = "null",
    .open = null_open,
    .close = null_close,
    BT_HOST_CALLS,
    .forward = null_forward,
    .sample = null_sample,
};

const struct bt_engine_vtable *bt_engine_plugin(uint32_t abi)
{
    return abi == BT_ENGINE_ABI ? &vtable : NULL;
}

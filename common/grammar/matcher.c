/* A matcher is a place in a grammar: the number of a state, and the bytes so far. After a reset
 * of the automaton the number is not valid any more, and the matcher runs its bytes again. */
#include <stdlib.h>

#include "common/grammar/grammar_priv.h"

struct step { /* after an accepted token */
    uint32_t state, generation;
    uint32_t n_bytes; /* length of the text up to here */
};
struct bt_matcher {
    struct bt_grammar *g;
    struct bt_grammar_vocab *v;
    uint32_t state; /* valid in this generation of the grammar */
    uint32_t generation;
    uint32_t n_steps, steps_cap;
    struct step *steps;
    uint32_t n_bytes, bytes_cap;
    uint8_t *bytes;
    uint32_t limit;  /* work that one call may do */
    uint64_t work;   /* of all calls */
    uint64_t budget; /* of this call: work that `work` does not include yet */
    bool over;       /* EOS was the last token */
};

#define NO_GENERATION 0u /* the state must be computed again */

/* ---- a call: the grammar is m's alone, and has a budget ---- */

static bool is_short(const struct bt_matcher *m)
{
    return m->limit < BT_GRAMMAR_CALL_WORK;
}

/* False: m's call should be short, and a call without a limit is under way. */
static bool begin(struct bt_matcher *m)
{
    return bt_grammar_enter(m->g, is_short(m));
}

static void end(struct bt_matcher *m)
{
    bt_grammar_leave(m->g);
}

/* A call without a limit may do more work for each byte that it runs. */
static void set_budget(struct bt_matcher *m, uint64_t bytes)
{
    bt_rx_set_budget(m->g->program->rx, m->limit + (is_short(m) ? 0 : bytes * 256));
    m->g->automaton.full = false;
    m->budget = m->g->program->rx->work;
}

static void count_work(struct bt_matcher *m)
{
    m->work += m->budget - m->g->program->rx->work;
    m->budget = m->g->program->rx->work;
}

/* The status of a call that has met a limit. */
static bt_status_t too_much(const struct bt_matcher *m)
{
    return is_short(m) ? BT_AGAIN : BT_ERR_EXHAUSTED;
}

void bt_matcher_limit(struct bt_matcher *m, uint32_t work)
{
    m->limit = BT_MIN(work, BT_GRAMMAR_CALL_WORK);
}

uint64_t bt_matcher_work(const struct bt_matcher *m)
{
    return m->work;
}

/* ---- states ---- */

/* The state after n bytes. DEAD and FAILED are returned as they are. */
static uint32_t run(struct bt_automaton *m, uint32_t state, const uint8_t *p, uint32_t n)
{
    if (state >= BT_STATE_DEAD || n == 0) {
        return state;
    }
    uint32_t at = bt_automaton_load(m, state), count = m->states[state].n, base = at;
    if (at == UINT32_MAX) {
        return BT_STATE_FAILED;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t next = bt_automaton_step(m, at, count, p[i]);
        if (next == UINT32_MAX || (next == 0 && (!m->final || i + 1 < n))) {
            m->n_arena = base;
            return next == UINT32_MAX ? BT_STATE_FAILED : BT_STATE_DEAD;
        }
        memmove(m->arena + base, m->arena + at + count, next * sizeof(*m->arena));
        m->n_arena = base + next;
        at = base;
        count = next;
    }
    return bt_automaton_intern(m, base, m->final);
}

/* Makes m->state valid. false: a limit was met. */
static bool current(struct bt_matcher *m)
{
    if (m->generation == m->g->generation) {
        return true;
    }
    if (!is_short(m)) {
        count_work(m);
        set_budget(m, m->n_bytes);
    }
    uint32_t start = bt_automaton_start(&m->g->automaton);
    m->state = run(&m->g->automaton, start, m->bytes, m->n_bytes);
    bool ok = m->state < BT_STATE_DEAD;
    m->generation = ok ? m->g->generation : NO_GENERATION;
    return ok;
}

/* After a failure, resets the automaton, once for each call. A reset does not help against too much
 * work. A short call leaves the reset to a long one. */
static bool again(struct bt_matcher *m, bool *tried)
{
    if (*tried || is_short(m) || m->g->program->rx->work < BT_GRAMMAR_CALL_WORK / 1000) {
        return false;
    }
    *tried = true;
    count_work(m);
    bt_grammar_reset(m->g);
    return true;
}

struct bt_matcher *bt_matcher_create(struct bt_grammar *g, const struct bt_grammar_vocab *v)
{
    struct bt_matcher *m = bt_calloc(1, sizeof(*m));
    m->g = bt_grammar_ref(g);
    m->v = bt_grammar_vocab_ref((struct bt_grammar_vocab *)v);
    m->generation = NO_GENERATION;
    m->limit = BT_GRAMMAR_CALL_WORK;
    return m;
}

void bt_matcher_destroy(struct bt_matcher *m)
{
    if (!m) {
        return;
    }
    bt_grammar_unref(m->g);
    bt_grammar_vocab_destroy(m->v);
    free(m->steps);
    free(m->bytes);
    free(m);
}

static void push_step(struct bt_matcher *m, const uint8_t *p, uint32_t n)
{
    if (m->n_steps == m->steps_cap) {
        m->steps_cap = m->steps_cap * 2 + 16;
        m->steps = bt_realloc(m->steps, m->steps_cap * sizeof(*m->steps));
    }
    if (m->n_bytes + n > m->bytes_cap) {
        m->bytes_cap = m->bytes_cap * 2 + n + 64;
        m->bytes = bt_realloc(m->bytes, m->bytes_cap);
    }
    if (n > 0) { /* otherwise there may be no room yet */
        memcpy(m->bytes + m->n_bytes, p, n);
    }
    m->n_bytes += n;
    m->steps[m->n_steps++] = (struct step){m->state, m->generation, m->n_bytes};
}

static bt_status_t accept(struct bt_matcher *m, const uint8_t *p, uint32_t n)
{
    bool tried = false;
    do {
        set_budget(m, n);
        uint32_t to = current(m) ? run(&m->g->automaton, m->state, p, n) : BT_STATE_FAILED;
        if (to == BT_STATE_DEAD) {
            return BT_ERR_INVALID;
        }
        if (to != BT_STATE_FAILED) {
            m->state = to;
            push_step(m, p, n);
            return BT_OK;
        }
    } while (again(m, &tried));
    return too_much(m);
}

bt_status_t bt_matcher_accept_bytes(struct bt_matcher *m, const void *bytes, size_t n)
{
    if (m->over || n > UINT32_MAX / 4 - m->n_bytes) {
        return m->over ? BT_ERR_INVALID : BT_ERR_EXHAUSTED;
    }
    if (!begin(m)) {
        return BT_AGAIN;
    }
    bt_status_t st = accept(m, bytes, (uint32_t)n);
    count_work(m);
    end(m);
    return st;
}

bt_status_t bt_matcher_may_end(struct bt_matcher *m, bool *may_p)
{
    bool tried = false, ok;
    *may_p = false;
    if (m->over) {
        return BT_OK;
    }
    if (!begin(m)) {
        return BT_AGAIN;
    }
    do {
        set_budget(m, 0);
        ok = current(m);
        *may_p = ok && m->g->automaton.states[m->state].final;
    } while (!ok && again(m, &tried));
    count_work(m);
    end(m);
    return ok ? BT_OK : too_much(m);
}

static bt_status_t accept_end(struct bt_matcher *m)
{
    bool may = false;
    bt_status_t st = bt_matcher_may_end(m, &may);
    if (st == BT_OK && may) {
        push_step(m, NULL, 0);
        m->over = true;
    }
    return st == BT_OK && !may ? BT_ERR_INVALID : st;
}

bt_status_t bt_matcher_accept(struct bt_matcher *m, uint32_t token)
{
    if (m->over || token >= m->v->vocab) {
        return BT_ERR_INVALID;
    }
    if (bt_vocab_is_eos(m->v, token)) {
        return accept_end(m);
    }
    uint32_t n;
    const uint8_t *p = bt_vocab_bytes(m->v, token, &n);
    return n == 0 ? BT_ERR_INVALID : bt_matcher_accept_bytes(m, p, n);
}

void bt_matcher_rollback(struct bt_matcher *m, uint32_t n)
{
    if (n == 0) {
        return;
    }
    m->over = false;
    m->n_steps -= BT_MIN(n, m->n_steps);
    if (m->n_steps == 0) {
        m->n_bytes = 0;
        m->generation = NO_GENERATION;
        return;
    }
    const struct step *s = &m->steps[m->n_steps - 1];
    m->state = s->state;
    m->generation = s->generation;
    m->n_bytes = s->n_bytes;
}

uint32_t bt_matcher_tokens(const struct bt_matcher *m)
{
    return m->n_steps;
}

bt_status_t bt_matcher_mask(struct bt_matcher *m, uint32_t *bits)
{
    if (m->over) {
        memset(bits, 0, m->v->words * sizeof(*bits));
        return BT_OK;
    }
    bool tried = false;
    bt_status_t st;
    if (!begin(m)) {
        return BT_AGAIN;
    }
    do {
        set_budget(m, 0);
        st = current(m) ? bt_mask_get(&m->g->masks, &m->g->automaton, m->v, m->state, bits)
                        : BT_ERR_EXHAUSTED;
    } while (st == BT_ERR_EXHAUSTED && again(m, &tried));
    count_work(m);
    end(m);
    return st == BT_ERR_EXHAUSTED ? too_much(m) : st;
}

/* The only byte that the threads arena[at..at+n) allow; 256: no byte, or more than one. */
static uint32_t only_byte(struct bt_automaton *m, uint32_t at, uint32_t n)
{
    uint32_t only = 256;
    for (uint32_t i = at; i < at + n; i++) {
        for (uint32_t b = 0; b < 256; b++) {
            if (b == BT_RX_MARK || b == only ||
                bt_rx_next(m->rx, m->arena[i].q, (uint8_t)b) == BT_RX_NONE) {
                continue;
            }
            if (only != 256) {
                return 256;
            }
            only = b;
        }
    }
    return only;
}

static size_t forced(struct bt_automaton *m, uint32_t state, uint8_t *out, size_t cap)
{
    uint32_t base = bt_automaton_load(m, state), at = base, n = m->states[state].n;
    bool final = m->states[state].final;
    size_t k = 0;
    while (base != UINT32_MAX && k < cap && !final && n > 0 && bt_rx_work(m->rx, n * 256)) {
        uint32_t b = only_byte(m, at, n);
        uint32_t next =
            b == 256 || b == BT_RX_SPECIAL ? UINT32_MAX : bt_automaton_step(m, at, n, (uint8_t)b);
        if (next == UINT32_MAX) {
            break;
        }
        out[k++] = (uint8_t)b;
        at += n;
        n = next;
        final = m->final;
    }
    m->n_arena = BT_MIN(base, m->n_arena);
    return k;
}

size_t bt_matcher_forced(struct bt_matcher *m, void *bytes, size_t cap)
{
    if (m->over) {
        return 0;
    }
    if (!begin(m)) {
        return 0;
    }
    set_budget(m, 0);
    size_t n = current(m) ? forced(&m->g->automaton, m->state, bytes, cap) : 0;
    count_work(m);
    end(m);
    return n;
}

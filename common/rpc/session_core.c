/* See session_core.h. Pure: no clock, no I/O, no memory of its own. */
#include "common/rpc/session_core.h"

#include <inttypes.h>
#include <stdio.h>

#include "common/base/clock.h"
#include "common/rpc/rpc.h"

/* ---- pauses between dials ---- */

uint32_t bt_rpc_backoff_next(struct bt_rpc_backoff *b)
{
    uint64_t ms = b->first_ms;
    for (uint32_t i = 0; i < b->failures && ms < b->max_ms; i++) {
        ms *= 2;
    }
    b->failures++;
    return (uint32_t)BT_MIN(ms, (uint64_t)b->max_ms);
}

void bt_rpc_backoff_longest(struct bt_rpc_backoff *b)
{
    /* Avoids an overflow of the shift; first_ms is at least 1. */
    b->failures = BT_MAX(b->failures, 32u);
}

/* ---- states ---- */

void bt_rpc_session_core_init(struct bt_rpc_session_core *c,
                              const struct bt_rpc_session_rules *rules, bool dialer)
{
    *c = (struct bt_rpc_session_core){
        .rules = rules,
        .dialer = dialer,
        .backoff = {.first_ms = rules->backoff_first_ms, .max_ms = rules->backoff_max_ms},
    };
}

static bool is_over(const struct bt_rpc_session_core *c)
{
    return c->state == BT_RPC_SESSION_IDLE || c->state == BT_RPC_SESSION_ENDING;
}

static uint64_t heartbeat_ns(const struct bt_rpc_session_core *c)
{
    uint32_t ms = c->rules->heartbeat_ms;
    return (ms != 0 ? ms : BT_RPC_SESSION_HEARTBEAT_MS) * 1000000ull;
}

static uint64_t silence_ns(const struct bt_rpc_session_core *c)
{
    uint32_t ms = c->rules->silence_ms;
    return (ms != 0 ? ms : BT_RPC_SESSION_SILENCE_MS) * 1000000ull;
}

/* Only the first fault counts: later ones are often its consequences. */
static void note_end(struct bt_rpc_session_core *c, bt_rpc_session_cause_t cause, int code,
                     const char *why)
{
    if (c->state != BT_RPC_SESSION_ENDING) {
        c->end.cause = cause;
        c->end.code = code;
        c->end.was_up = c->state == BT_RPC_SESSION_UP;
        snprintf(c->end.why, sizeof(c->end.why), "%s", why != NULL ? why : "");
    }
}

static uint32_t fail(struct bt_rpc_session_core *c, bt_rpc_session_cause_t cause, int code,
                     const char *why)
{
    note_end(c, cause, code, why);
    c->state = BT_RPC_SESSION_ENDING;
    return BT_RPC_SESSION_DO_TURN;
}

static uint32_t finish(struct bt_rpc_session_core *c, bt_rpc_session_cause_t cause, int code,
                       const char *why)
{
    note_end(c, cause, code, why);
    c->state = BT_RPC_SESSION_IDLE;
    if (c->backoff.first_ms == 0) {
        return BT_RPC_SESSION_DO_END;
    }
    c->wait_ms = bt_rpc_backoff_next(&c->backoff);
    return BT_RPC_SESSION_DO_END | BT_RPC_SESSION_DO_REDIAL;
}

/* Both hellos are good: checks whether anything else is missing. */
static uint32_t settle(struct bt_rpc_session_core *c)
{
    if (c->rules->joins && !c->joined) {
        c->state = BT_RPC_SESSION_JOINING;
        return 0;
    }
    c->state = BT_RPC_SESSION_UP;
    c->backoff.failures = 0;
    return BT_RPC_SESSION_DO_UP;
}

/* A dialer sends its hello first; a listener answers. */
static uint32_t say_hello(struct bt_rpc_session_core *c)
{
    if (!c->ready) {
        c->state = BT_RPC_SESSION_PREPARING;
        return 0;
    }
    c->said = true;
    if (c->dialer) {
        c->state = BT_RPC_SESSION_AWAITING;
        return BT_RPC_SESSION_DO_HELLO;
    }
    return BT_RPC_SESSION_DO_HELLO | settle(c);
}

/* ---- events ---- */

static uint32_t on_open(struct bt_rpc_session_core *c, uint64_t now_ns)
{
    BT_ASSERT(c->state == BT_RPC_SESSION_IDLE);
    c->ready = !c->dialer && !c->rules->prepares;
    c->said = c->heard = c->joined = false;
    c->heard_ns = c->sent_ns = c->looked_ns = now_ns;
    c->beat_ns = 0;
    c->state = c->dialer ? BT_RPC_SESSION_PREPARING : BT_RPC_SESSION_AWAITING;
    return 0;
}

static uint32_t on_ready(struct bt_rpc_session_core *c)
{
    if (c->said) {
        return 0;
    }
    c->ready = true;
    return c->dialer || c->heard ? say_hello(c) : 0;
}

static uint32_t on_message(struct bt_rpc_session_core *c, bool hello, uint64_t now_ns)
{
    c->heard_ns = now_ns;
    if (hello && (c->heard || c->state != BT_RPC_SESSION_AWAITING)) {
        return fail(c, BT_RPC_SESSION_VIOLATION, BT_GRPC_INVALID_ARGUMENT,
                    "a second hello, or a hello before the other side asked for it");
    }
    if (!hello && !c->heard) {
        return fail(c, BT_RPC_SESSION_VIOLATION, BT_GRPC_INVALID_ARGUMENT,
                    "a message before the hello");
    }
    return hello ? BT_RPC_SESSION_DO_CHECK : BT_RPC_SESSION_DO_DELIVER;
}

static uint32_t on_hello(struct bt_rpc_session_core *c, const char *why)
{
    BT_ASSERT(c->state == BT_RPC_SESSION_AWAITING && !c->heard);
    if (why != NULL) {
        bt_rpc_backoff_longest(&c->backoff);
        return fail(c, BT_RPC_SESSION_REFUSED, BT_GRPC_FAILED_PRECONDITION, why);
    }
    c->heard = true;
    return c->dialer ? settle(c) : say_hello(c);
}

static uint32_t on_joined(struct bt_rpc_session_core *c)
{
    c->joined = true;
    return c->state == BT_RPC_SESSION_JOINING ? settle(c) : 0;
}

static uint32_t beat(struct bt_rpc_session_core *c, uint64_t now_ns)
{
    if (!c->said || !c->heard) {
        return 0;
    }
    c->beat_ns = now_ns;
    c->seq++;
    return BT_RPC_SESSION_DO_BEAT;
}

static uint32_t on_tick(struct bt_rpc_session_core *c, uint64_t now_ns)
{
    if (bt_stood_still(&c->looked_ns, now_ns, silence_ns(c) / 2)) {
        c->heard_ns = now_ns; /* the peer's messages may be unread meanwhile */
    }
    if (now_ns > c->heard_ns && now_ns - c->heard_ns > silence_ns(c)) {
        char why[64];
        snprintf(why, sizeof(why), "nothing was heard for %" PRIu64 " ms", silence_ns(c) / 1000000);
        return finish(c, BT_RPC_SESSION_SILENT, BT_GRPC_DEADLINE, why);
    }
    uint64_t last = c->rules->beats_if_quiet ? c->sent_ns : c->beat_ns;
    uint64_t due = last + heartbeat_ns(c) - c->rules->tick_ms * 500000ull; /* ticks are not exact */
    return last == 0 || now_ns >= due ? beat(c, now_ns) : 0;
}

uint32_t bt_rpc_session_step(struct bt_rpc_session_core *c, const struct bt_rpc_session_event *e,
                             uint64_t now_ns)
{
    switch (e->kind) {
    case BT_RPC_SESSION_EV_OPEN: return on_open(c, now_ns);
    case BT_RPC_SESSION_EV_READY: return is_over(c) ? 0 : on_ready(c);
    case BT_RPC_SESSION_EV_MESSAGE: return is_over(c) ? 0 : on_message(c, e->hello, now_ns);
    case BT_RPC_SESSION_EV_HELLO: return is_over(c) ? 0 : on_hello(c, e->why);
    case BT_RPC_SESSION_EV_JOINED: return is_over(c) ? 0 : on_joined(c);
    case BT_RPC_SESSION_EV_SENT: c->sent_ns = now_ns; return 0;
    case BT_RPC_SESSION_EV_UNSENT:
        return is_over(c)
                   ? 0
                   : fail(c, BT_RPC_SESSION_FULL, BT_GRPC_EXHAUSTED,
                          "the queue to the peer is full, because the peer reads too slowly");
    case BT_RPC_SESSION_EV_BEAT: return is_over(c) ? 0 : beat(c, now_ns);
    case BT_RPC_SESSION_EV_TICK: return is_over(c) ? 0 : on_tick(c, now_ns);
    case BT_RPC_SESSION_EV_FAIL: return is_over(c) ? 0 : fail(c, e->cause, e->code, e->why);
    case BT_RPC_SESSION_EV_TURN:
        return c->state != BT_RPC_SESSION_ENDING ? 0
                                                 : finish(c, c->end.cause, c->end.code, c->end.why);
    case BT_RPC_SESSION_EV_CLOSED:
        return c->state == BT_RPC_SESSION_IDLE ? 0
                                               : finish(c, BT_RPC_SESSION_CLOSED, e->code, e->why);
    case BT_RPC_SESSION_EV_END:
        return c->state == BT_RPC_SESSION_IDLE ? 0 : finish(c, e->cause, e->code, e->why);
    }
    return 0;
}

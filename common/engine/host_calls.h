/* The calls of the vtable (engine.h, where they are described) that a back end with its KV pages in
 * host memory leaves to its bt_host as they are. Included once by the back end's own file, below
 * the definition of its struct bt_engine, whose member host is the bt_host. */
#ifndef BT_ENGINE_HOST_CALLS_H
#define BT_ENGINE_HOST_CALLS_H

#include "common/engine/host.h"

static bt_status_t host_slot_open(struct bt_engine *e, uint32_t slot,
                                  const struct bt_engine_params *p, const uint32_t *tokens,
                                  uint32_t n, uint32_t n_prompt)
{
    return bt_host_slot_open(&e->host, slot, p, tokens, n, n_prompt);
}
static bt_status_t host_slot_pages(struct bt_engine *e, uint32_t slot, uint32_t first,
                                   const uint32_t *pages, uint32_t n)
{
    return bt_host_slot_pages(&e->host, slot, first, pages, n);
}
static bt_status_t host_slot_fork(struct bt_engine *e, uint32_t from, uint32_t to, uint32_t choice)
{
    return bt_host_slot_fork(&e->host, from, to, choice);
}
static bt_status_t host_page_copy(struct bt_engine *e, uint32_t from, uint32_t to, uint32_t toks)
{
    return bt_host_page_copy(&e->host, from, to, toks);
}
static bt_status_t host_slot_accept(struct bt_engine *e, uint32_t slot, uint32_t token)
{
    return bt_host_slot_accept(&e->host, slot, token);
}
static bt_status_t host_slot_close(struct bt_engine *e, uint32_t slot, bt_engine_ticket_t *quiet_p)
{
    return bt_host_slot_close(&e->host, slot, quiet_p);
}
static bt_status_t host_flow_open(struct bt_engine *e, int dir, int prio, bt_flow_word_t *word,
                                  uint32_t epoch, void (*bell)(void *), void *bell_arg,
                                  uint32_t *flow_p)
{
    (void)prio; /* copies run inside the calls, in their order */
    return bt_host_flow_open(&e->host, dir, word, epoch, bell, bell_arg, flow_p);
}
static bt_status_t host_flow_add(struct bt_engine *e, uint32_t flow,
                                 const struct bt_engine_block *b, uint32_t n)
{
    return bt_host_flow_add(&e->host, flow, b, n);
}
static bt_status_t host_flow_release(struct bt_engine *e, uint32_t flow, uint32_t seq,
                                     bt_engine_ticket_t *done_p)
{
    return bt_host_flow_release(&e->host, flow, seq, done_p);
}
static bt_status_t host_flow_close(struct bt_engine *e, uint32_t flow, bool abort_,
                                   bt_engine_ticket_t *quiet_p)
{
    return bt_host_flow_close(&e->host, flow, abort_, quiet_p);
}
static uint32_t host_poll(struct bt_engine *e, struct bt_engine_event *ev, uint32_t max,
                          uint32_t timeout_us)
{
    return bt_host_poll(&e->host, ev, max, timeout_us);
}
static void host_release(struct bt_engine *e, bt_engine_ticket_t ticket)
{
    bt_host_release(&e->host, ticket);
}

/* All of them, in the initializer of a bt_engine_vtable. */
#define BT_HOST_CALLS                                                                              \
    .slot_open = host_slot_open, .slot_pages = host_slot_pages, .slot_fork = host_slot_fork,       \
    .page_copy = host_page_copy, .slot_accept = host_slot_accept, .slot_close = host_slot_close,   \
    .flow_open = host_flow_open, .flow_add = host_flow_add, .flow_release = host_flow_release,     \
    .flow_close = host_flow_close, .poll = host_poll, .release = host_release

#endif

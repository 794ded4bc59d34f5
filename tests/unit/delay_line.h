/* A line of messages that keeps their order and may hold each of them back for a random time, as a
 * busy machine or network would: BATON_TEST_JITTER_MS=N in the environment, up to N ms each;
 * without it messages pass at once. That time is the machine's, whatever the test's clock does: so
 * who waits while that one is stopped calls delay_lines_turn. BATON_TEST_SEED repeats a run's
 * choices (as far as threads allow). */
#ifndef BT_TESTS_DELAY_LINE_H
#define BT_TESTS_DELAY_LINE_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "common/base/list.h"
#include "common/loop/loop.h"
#include "tests/unit/virtual_clock.h"

struct delay_line { /* delay_line_init */
    struct bt_loop *loop;
    struct bt_timer timer;
    struct bt_list link; /* delay_lines(), while something is on it */
    struct bt_list items;
    void (*deliver)(void *arg, const void *data, size_t len);
    void *arg;
};

struct delayed {
    struct bt_list link;
    uint64_t due_ns;
    size_t len;
    uint8_t data[];
};

static inline struct bt_list *delay_lines(void)
{
    static struct bt_list lines;
    if (lines.next == NULL) {
        bt_list_init(&lines);
    }
    return &lines;
}

static inline uint64_t delay_random_ns(void)
{
    static uint64_t max_ns = UINT64_MAX, seed;
    if (max_ns == UINT64_MAX) {
        const char *ms = getenv("BATON_TEST_JITTER_MS"), *s = getenv("BATON_TEST_SEED");
        max_ns = ms != NULL ? strtoull(ms, NULL, 10) * 1000000 : 0;
        seed = s != NULL ? strtoull(s, NULL, 10) : bt_mono_ns() % 1000000;
        if (max_ns != 0) {
            fprintf(stderr, "# BATON_TEST_SEED=%" PRIu64 "\n", seed);
        }
        seed = seed * 2 + 1;
    }
    if (max_ns == 0) {
        return 0;
    }
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (seed >> 33) % max_ns;
}

static inline void delay_line_init(struct delay_line *l, struct bt_loop *loop,
                                   void (*deliver)(void *arg, const void *data, size_t len),
                                   void *arg)
{
    memset(l, 0, sizeof(*l));
    l->loop = loop;
    l->deliver = deliver;
    l->arg = arg;
    bt_list_init(&l->items);
    bt_list_init(&l->link);
}

/* What is on the line is lost. */
static inline void delay_line_clear(struct delay_line *l)
{
    bt_timer_stop(l->loop, &l->timer);
    bt_list_remove(&l->link);
    while (!bt_list_empty(&l->items)) {
        struct delayed *d = BT_CONTAINER_OF(l->items.next, struct delayed, link);
        bt_list_remove(&d->link);
        free(d);
    }
}

static inline void delay_line_run(void *arg)
{
    struct delay_line *l = arg;
    while (!bt_list_empty(&l->items)) {
        struct delayed *d = BT_CONTAINER_OF(l->items.next, struct delayed, link);
        uint64_t now = clock_machine_ns();
        if (now < d->due_ns) {
            bt_timer_start(l->loop, &l->timer, (d->due_ns - now + 999999) / 1000000, 0,
                           delay_line_run, l);
            return;
        }
        bt_list_remove(&d->link);
        l->deliver(l->arg, d->data, d->len);
        free(d);
    }
    bt_list_remove(&l->link);
}

/* Delivers what is due, also while the test's clock stands and no timer fires. */
static inline void delay_lines_turn(void)
{
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, delay_lines()) {
        delay_line_run(BT_CONTAINER_OF(l, struct delay_line, link));
    }
}

/* Copies data; delivers at once if nothing is held back. */
static inline void delay_line_put(struct delay_line *l, const void *data, size_t len)
{
    uint64_t delay_ns = delay_random_ns();
    if (delay_ns == 0 && bt_list_empty(&l->items)) {
        l->deliver(l->arg, data, len);
        return;
    }
    struct delayed *d = bt_malloc(sizeof(*d) + len);
    d->due_ns = clock_machine_ns() + delay_ns;
    d->len = len;
    memcpy(d->data, data, len);
    bool first = bt_list_empty(&l->items);
    bt_list_insert_tail(&l->items, &d->link);
    if (first) {
        bt_list_insert_tail(delay_lines(), &l->link);
        delay_line_run(l);
    }
}

#endif

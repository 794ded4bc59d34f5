/* The table of pins, filled by etcd's watch, and the calls that write to it. Loop thread. */
#include "conductor/pin_table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/etcd/pin.h"
#include "common/etcd/remain.h"
#include "common/log/log.h"

/* How much longer than the pin its record stays in etcd. Conductors and kvstores count a pin's time
 * themselves and end it (common/etcd/remain.h). etcd starts to count again when its leader changes,
 * so its lease only removes records of pins that have ended. */
#define LEASE_SLACK_S 10
/* More than BT_PIN_ALL: each conductor checks that limit alone, and several may pin at the same
 * time. */
#define LISTED_MAX (2 * BT_PIN_ALL)

struct entry {
    Baton__Pin *pin; /* without its keys */
    uint32_t blocks;
    int64_t lease;
    uint64_t ends_ns; /* bt_mono_ns */
};

struct bt_pin_table {
    struct bt_etcd *etcd;
    struct bt_etcd_watch *watch;
    struct bt_remain *remain;
    char *prefix;
    struct entry *list; /* oldest first */
    size_t n;
};

struct call { /* waits for etcd; may outlive the table, because etcd ends its calls later */
    struct bt_etcd *etcd;
    char *key;
    int64_t lease;
    Baton__Pin *pin;
    struct bt_pin_info info;
    bt_pin_table_done_fn done;
    void *arg;
};

static size_t find(const struct bt_pin_table *p, uint64_t id)
{
    size_t i = 0;
    while (i < p->n && p->list[i].pin->id != id) {
        i++;
    }
    return i;
}

static bool expired(const struct entry *e)
{
    return e->ends_ns <= bt_mono_ns();
}

static uint64_t left_ms(const struct entry *e)
{
    uint64_t now = bt_mono_ns();
    return (e->ends_ns - BT_MIN(e->ends_ns, now)) / 1000000;
}

/* ---- the table ---- */

static void take_out(struct bt_pin_table *p, size_t at)
{
    baton__pin__free_unpacked(p->list[at].pin, NULL);
    p->n--;
    memmove(&p->list[at], &p->list[at + 1], (p->n - at) * sizeof(p->list[0]));
}

static void on_put(void *arg, const struct bt_etcd_kv *kv)
{
    struct bt_pin_table *p = arg;
    char why[256];
    Baton__Pin *pin = bt_pin_read(p->prefix, kv, why, sizeof(why));
    if (pin == NULL) {
        BT_WARN("pin_malformed", "key=%s why=%s remedy=%s", kv->key, why,
                "this conductor ignores the pin: its entry in etcd is damaged or of another "
                "version; delete this key from etcd and pin the prompt again");
        return;
    }
    size_t at = find(p, pin->id);
    if (at == p->n && p->n >= LISTED_MAX) {
        BT_WARN("pin_refused", "id=%016" PRIx64 " pins=%zu why=%s", pin->id, p->n,
                "this conductor ignores the pin: etcd has more pins than conductors write; delete "
                "the keys that 'batonctl pin' did not write");
        baton__pin__free_unpacked(pin, NULL);
        return;
    }
    struct bt_remain_term term = {
        .ttl_ms = pin->ttl_ms, .expires_ns = pin->expires_ns, .raft_term = pin->raft_term};
    struct entry e = {.pin = pin,
                      .blocks = (uint32_t)(pin->keys.len / sizeof(struct bt_kv_key)),
                      .lease = kv->lease,
                      .ends_ns = bt_remain_follow(p->remain, pin->id, kv->lease, &term)};
    free(pin->keys.data);
    pin->keys.data = NULL;
    pin->keys.len = 0;
    if (at < p->n) {
        take_out(p, at);
    }
    p->list = bt_realloc(p->list, (p->n + 1) * sizeof(p->list[0]));
    for (at = p->n; at > 0 && p->list[at - 1].pin->created_ns > pin->created_ns; at--) {
        p->list[at] = p->list[at - 1];
    }
    p->list[at] = e;
    p->n++;
}

static void on_delete(void *arg, const char *key)
{
    struct bt_pin_table *p = arg;
    uint64_t id;
    size_t at = bt_pin_key_id(p->prefix, key, &id) ? find(p, id) : p->n;
    if (at < p->n) {
        bt_remain_forget(p->remain, p->list[at].pin->id);
        take_out(p, at);
    }
}

static void on_remain(void *arg, uint64_t id, uint64_t ends_ns)
{
    struct bt_pin_table *p = arg;
    size_t at = find(p, id);
    if (at < p->n) {
        p->list[at].ends_ns = ends_ns;
    }
}

struct bt_pin_table *bt_pin_table_create(struct bt_etcd *e, const char *cluster)
{
    static const struct bt_etcd_watch_ops ops = {.on_put = on_put, .on_delete = on_delete};
    struct bt_pin_table *p = bt_calloc(1, sizeof(*p));
    p->etcd = e;
    p->prefix = bt_pin_prefix(cluster);
    p->remain = bt_remain_create(e, on_remain, p);
    p->watch = bt_etcd_watch_start(e, p->prefix, &ops, p);
    return p;
}

void bt_pin_table_destroy(struct bt_pin_table *p)
{
    if (p == NULL) {
        return;
    }
    bt_etcd_watch_stop(p->watch);
    bt_remain_destroy(p->remain);
    while (p->n > 0) {
        take_out(p, p->n - 1);
    }
    free(p->list);
    free(p->prefix);
    free(p);
}

bool bt_pin_table_next(const struct bt_pin_table *p, size_t *it, struct bt_pin_info *out)
{
    while (*it < p->n) {
        const struct entry *e = &p->list[(*it)++];
        if (!expired(e)) {
            *out = (struct bt_pin_info){.pin = e->pin, .blocks = e->blocks, .left_ms = left_ms(e)};
            return true;
        }
    }
    return false;
}

/* ---- pin and unpin ---- */

static void finish(struct call *c, bt_status_t st, const char *why)
{
    c->info.pin = c->pin;
    c->done(c->arg, st, st == BT_OK ? &c->info : NULL, why);
    if (c->pin != NULL) {
        baton__pin__free_unpacked(c->pin, NULL);
    }
    free(c->key);
    free(c);
}

/* The session with etcd broke during the write: etcd may or may not have the record. */
static bool unknown(bt_status_t st)
{
    return st == BT_ERR_TIMEOUT || st == BT_ERR_UNAVAILABLE || st == BT_ERR_CANCELLED;
}

static void nothing_changed(struct call *c, bt_status_t st)
{
    char why[160];
    snprintf(why, sizeof(why),
             "etcd did not accept the change (%s), so nothing has changed; check that etcd runs",
             bt_status_name(st));
    finish(c, st, why);
}

static void not_written(struct call *c, bt_status_t st)
{
    char why[200];
    if (!unknown(st)) {
        nothing_changed(c, st);
        return;
    }
    snprintf(why, sizeof(why),
             "etcd did not answer (%s), so the change may or may not be stored; check that etcd "
             "runs, then look with 'batonctl pins'",
             bt_status_name(st));
    finish(c, st, why);
}

static void on_written(void *arg, bt_status_t st)
{
    struct call *c = arg;
    if (st == BT_OK) {
        finish(c, BT_OK, NULL);
        return;
    }
    /* Revoking the lease removes the record, if etcd has it. A renewed pin is an exception: its
     * record existed before and may belong to this lease now. The caller wanted to extend that pin,
     * not to end it. */
    if (!unknown(st) || !c->info.renewed) {
        bt_etcd_revoke(c->etcd, c->lease);
    }
    not_written(c, st);
}

static void on_granted(void *arg, bt_status_t st, int64_t lease, uint64_t raft_term)
{
    struct call *c = arg;
    if (st != BT_OK) {
        nothing_changed(c, st);
        return;
    }
    c->pin->raft_term = raft_term;
    size_t n = baton__pin__get_packed_size(c->pin);
    uint8_t *value = bt_malloc(n + 1);
    baton__pin__pack(c->pin, value);
    c->lease = lease;
    bt_etcd_put(c->etcd, c->key, value, n, lease, on_written, c);
    free(value);
}

/* NULL: there is room for the pin besides the existing ones. */
static const char *too_much(const struct bt_pin_table *p, uint64_t id, uint32_t n, char *why,
                            size_t cap)
{
    uint64_t blocks = 0, pins = 0;
    for (size_t i = 0; i < p->n; i++) {
        if (p->list[i].pin->id != id) {
            blocks += p->list[i].blocks;
            pins++;
        }
    }
    if (n > BT_PIN_BLOCKS_ONE) {
        snprintf(why, cap, "the prompt has %u blocks; one pin may have %u: pin a shorter prefix", n,
                 BT_PIN_BLOCKS_ONE);
    } else if (pins >= BT_PIN_ALL || blocks + n > BT_PIN_BLOCKS_ALL) {
        snprintf(why, cap,
                 "%llu pins have %llu blocks; at most %u pins and %u blocks can be pinned in a "
                 "cluster: unpin others first (batonctl pins)",
                 (unsigned long long)pins, (unsigned long long)blocks, BT_PIN_ALL,
                 BT_PIN_BLOCKS_ALL);
    } else {
        return NULL;
    }
    return why;
}

void bt_pin_table_pin(struct bt_pin_table *p, const struct bt_pin_spec *spec,
                      bt_pin_table_done_fn done, void *arg)
{
    struct call *c = bt_calloc(1, sizeof(*c));
    char why[256];
    uint64_t now = bt_real_ns();
    BT_ASSERT(spec->n > 0);
    uint64_t id = bt_pin_id(&spec->keys[spec->n - 1]);
    c->etcd = p->etcd;
    c->key = bt_pin_key(p->prefix, id);
    c->done = done;
    c->arg = arg;
    if (too_much(p, id, spec->n, why, sizeof(why)) != NULL) {
        finish(c, BT_ERR_EXHAUSTED, why);
        return;
    }
    size_t at = find(p, id);
    c->info.blocks = spec->n;
    c->info.renewed = at < p->n && !expired(&p->list[at]);
    c->pin = bt_calloc(1, sizeof(*c->pin));
    baton__pin__init(c->pin);
    c->pin->id = id;
    c->pin->label = bt_strdup(spec->label);
    c->pin->tenant = bt_strdup(spec->tenant);
    c->pin->tokens = spec->tokens;
    c->pin->created_ns = c->info.renewed ? p->list[at].pin->created_ns : now;
    c->pin->expires_ns = now + spec->ttl_ms * 1000000;
    c->pin->ttl_ms = spec->ttl_ms;
    c->info.left_ms = spec->ttl_ms;
    c->pin->keys.len = (size_t)spec->n * sizeof(*spec->keys);
    c->pin->keys.data = bt_malloc(c->pin->keys.len);
    memcpy(c->pin->keys.data, spec->keys, c->pin->keys.len);
    bt_etcd_grant(p->etcd, (int64_t)(spec->ttl_ms / 1000) + LEASE_SLACK_S, on_granted, c);
}

static void on_deleted(void *arg, bt_status_t st)
{
    struct call *c = arg;
    if (st != BT_OK) {
        not_written(c, st);
        return;
    }
    if (c->lease != 0) {
        bt_etcd_revoke(c->etcd, c->lease); /* the lease would last as long as the pin */
    }
    finish(c, BT_OK, NULL);
}

void bt_pin_table_unpin(struct bt_pin_table *p, uint64_t id, bt_pin_table_done_fn done, void *arg)
{
    struct call *c = bt_calloc(1, sizeof(*c));
    size_t at = find(p, id);
    c->etcd = p->etcd;
    c->key = bt_pin_key(p->prefix, id);
    c->done = done;
    c->arg = arg;
    if (at == p->n || expired(&p->list[at])) {
        char why[128];
        snprintf(why, sizeof(why), "there is no pin %016" PRIx64 "; 'batonctl pins' lists them",
                 id);
        finish(c, BT_ERR_NOT_FOUND, why);
        return;
    }
    const Baton__Pin *x = p->list[at].pin;
    c->lease = p->list[at].lease;
    c->info.blocks = p->list[at].blocks;
    c->info.left_ms = left_ms(&p->list[at]);
    c->pin = bt_calloc(1, sizeof(*c->pin));
    baton__pin__init(c->pin);
    c->pin->id = id;
    c->pin->label = bt_strdup(x->label);
    c->pin->tenant = bt_strdup(x->tenant);
    c->pin->tokens = x->tokens;
    c->pin->created_ns = x->created_ns;
    bt_etcd_delete(p->etcd, c->key, on_deleted, c);
}

/* Follows the keys of pins in etcd. Control thread. */
#include "kvstore/serve/pin_watch.h"

#include <stdlib.h>
#include <string.h>

#include "common/etcd/pin.h"
#include "common/etcd/remain.h"
#include "common/log/log.h"

struct bt_pin_watch {
    struct bt_pins *pins;
    char *prefix;
    struct bt_etcd_watch *watch;
    struct bt_remain *remain;
};

static void on_put(void *arg, const struct bt_etcd_kv *kv)
{
    struct bt_pin_watch *w = arg;
    char why[256];
    Baton__Pin *m = bt_pin_read(w->prefix, kv, why, sizeof(why));
    if (m == NULL) {
        BT_WARN("pin_malformed", "key=%s why=%s remedy=%s", kv->key, why,
                "the pin is ignored; it is damaged or of another version: delete this key from "
                "etcd and pin again");
        return;
    }
    struct bt_remain_term term = {
        .ttl_ms = m->ttl_ms, .expires_ns = m->expires_ns, .raft_term = m->raft_term};
    struct bt_pin pin = {.id = m->id,
                         .n = (uint32_t)(m->keys.len / sizeof(struct bt_kv_key)),
                         .created_ns = m->created_ns,
                         .ends_ns = bt_remain_follow(w->remain, m->id, kv->lease, &term)};
    /* A copy, because bytes in a message are not aligned. */
    struct bt_kv_key *keys = bt_malloc(m->keys.len);
    memcpy(keys, m->keys.data, m->keys.len);
    pin.keys = keys;
    if (bt_pins_put(w->pins, &pin) == BT_OK) {
        BT_INFO("pin", "id=%016llx blocks=%u label=%s", (unsigned long long)m->id, pin.n, m->label);
    } else {
        BT_WARN("pin_refused", "id=%016llx blocks=%u why=%s", (unsigned long long)m->id, pin.n,
                "this kvstore has the most pins that it can hold; unpin others");
    }
    free(keys);
    baton__pin__free_unpacked(m, NULL);
}

static void on_delete(void *arg, const char *key)
{
    struct bt_pin_watch *w = arg;
    uint64_t id;
    if (bt_pin_key_id(w->prefix, key, &id)) {
        BT_INFO("unpin", "id=%016llx", (unsigned long long)id);
        bt_remain_forget(w->remain, id);
        bt_pins_remove(w->pins, id);
    }
}

static void on_remain(void *arg, uint64_t id, uint64_t ends_ns)
{
    struct bt_pin_watch *w = arg;
    bt_pins_until(w->pins, id, ends_ns);
}

struct bt_pin_watch *bt_pin_watch_start(struct bt_etcd *e, const char *cluster,
                                        struct bt_pins *pins)
{
    static const struct bt_etcd_watch_ops ops = {.on_put = on_put, .on_delete = on_delete};
    struct bt_pin_watch *w = bt_calloc(1, sizeof(*w));
    w->pins = pins;
    w->prefix = bt_pin_prefix(cluster);
    w->remain = bt_remain_create(e, on_remain, w);
    w->watch = bt_etcd_watch_start(e, w->prefix, &ops, w);
    return w;
}

void bt_pin_watch_stop(struct bt_pin_watch *w)
{
    if (w != NULL) {
        bt_etcd_watch_stop(w->watch);
        bt_remain_destroy(w->remain);
        free(w->prefix);
        free(w);
    }
}

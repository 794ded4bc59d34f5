/* Slots: state words, generations, leases, free list, CRC cache. Control thread, except
 * bt_pool_segment_crc, which touches only a slot's data, its CRC row and its known-flags. */
#include "kvstore/cache/pool.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/crc32c.h"

#define USES_MAX 65535u /* the count does not rise above this */

struct slot_meta {
    uint32_t generation;
    uint32_t leases;
    uint32_t next_free;
    uint8_t state; /* bt_slot_state_t; copied to the slab's word, which is never read back */
};

struct bt_pool {
    struct bt_slab *slab;
    struct bt_kv_layout layout;
    uint32_t n, n_layers;
    struct slot_meta *meta;
    uint32_t free_head;
    uint32_t by_state[4];
    uint32_t leases, transit, transit_max;
    struct bt_slab_crcs *crcs;
};

struct bt_pool *bt_pool_create(struct bt_slab *slab, const struct bt_kv_layout *layout,
                               uint32_t transit_max)
{
    struct bt_pool *p = bt_calloc(1, sizeof(*p));
    p->slab = slab;
    p->layout = *layout;
    p->n = slab->super->n_slots;
    p->n_layers = slab->super->n_layers;
    p->transit_max = transit_max;
    p->meta = bt_calloc(p->n, sizeof(*p->meta));
    p->crcs = bt_slab_crcs_create(slab, layout);
    /* Last in, first out: the same pages stay in the CPU caches. */
    p->free_head = BT_POOL_NONE;
    for (uint32_t i = p->n; i-- > 0;) {
        p->meta[i].generation =
            bt_slot_generation(atomic_load_explicit(&slab->headers[i].state, memory_order_relaxed));
        p->meta[i].next_free = p->free_head;
        p->free_head = i;
    }
    p->by_state[BT_SLOT_FREE] = p->n;
    return p;
}

void bt_pool_destroy(struct bt_pool *p)
{
    if (p == NULL) {
        return;
    }
    free(p->meta);
    bt_slab_crcs_destroy(p->crcs);
    free(p);
}

void bt_pool_counts(const struct bt_pool *p, struct bt_pool_counts *c_p)
{
    *c_p = (struct bt_pool_counts){
        .total = p->n,
        .free = p->by_state[BT_SLOT_FREE],
        .writing = p->by_state[BT_SLOT_WRITING],
        .sealed = p->by_state[BT_SLOT_SEALED],
        .quarantine = p->by_state[BT_SLOT_QUARANTINE],
        .transit = p->transit,
        .leases = p->leases,
    };
}

static struct slot_meta *meta_of(const struct bt_pool *p, uint32_t slot)
{
    BT_ASSERT(slot < p->n);
    return &p->meta[slot];
}

/* Only this function writes state words. The release order makes data, CRCs and header visible
 * together with the state. */
static void set_state(struct bt_pool *p, uint32_t slot, bt_slot_state_t state)
{
    struct slot_meta *m = meta_of(p, slot);
    BT_ASSERT(p->by_state[m->state] > 0);
    p->by_state[m->state]--;
    p->by_state[state]++;
    m->state = (uint8_t)state;
    atomic_store_explicit(&p->slab->headers[slot].state, bt_slot_word(m->generation, state),
                          memory_order_release);
}

uint32_t bt_pool_take(struct bt_pool *p)
{
    uint32_t slot = p->free_head;
    if (slot == BT_POOL_NONE) {
        return BT_POOL_NONE;
    }
    struct slot_meta *m = meta_of(p, slot);
    BT_ASSERT(m->state == BT_SLOT_FREE && m->leases == 0);
    p->free_head = m->next_free;
    m->next_free = BT_POOL_NONE;
    m->generation++;
    p->slab->headers[slot].tenant = 0;
    m->leases = 1;
    p->leases++;
    bt_slab_crcs_forget(p->crcs, slot);
    set_state(p, slot, BT_SLOT_WRITING);
    return slot;
}

void bt_pool_lease(struct bt_pool *p, uint32_t slot)
{
    struct slot_meta *m = meta_of(p, slot);
    BT_ASSERT(m->state != BT_SLOT_FREE);
    m->leases++;
    p->leases++;
}

uint32_t bt_pool_unlease(struct bt_pool *p, uint32_t slot)
{
    struct slot_meta *m = meta_of(p, slot);
    BT_ASSERT(m->leases > 0 && p->leases > 0);
    p->leases--;
    return --m->leases;
}

/* CRC over the header's fields from the key on and the row of segment CRCs. */
static uint32_t header_crc(const struct bt_slot_header *h, const uint32_t *row, uint32_t n_layers)
{
    const size_t from = offsetof(struct bt_slot_header, key);
    uint32_t crc =
        bt_crc32c(0, (const uint8_t *)h + from, offsetof(struct bt_slot_header, crc) - from);
    return bt_crc32c(crc, row, n_layers * sizeof(*row));
}

void bt_pool_seal(struct bt_pool *p, uint32_t slot, const struct bt_kv_key *key, uint32_t n_tokens,
                  uint32_t depth, uint64_t now_ns)
{
    struct slot_meta *m = meta_of(p, slot);
    BT_ASSERT(m->state == BT_SLOT_WRITING);
    struct bt_slot_header *h = &p->slab->headers[slot];
    const uint32_t *row = p->slab->crcs + (size_t)slot * p->n_layers;
    for (uint32_t l = 0; l < p->n_layers; l++) {
        BT_ASSERT(bt_slab_crcs_known(p->crcs, slot, l));
    }
    h->key = *key;
    h->n_tokens = n_tokens;
    h->depth = depth;
    h->layout_id = p->layout.layout_id;
    h->sealed_ns = now_ns;
    h->crc = header_crc(h, row, p->n_layers);
    set_state(p, slot, BT_SLOT_SEALED);
}

void bt_pool_used(struct bt_pool *p, uint32_t slot, uint64_t now_ns, bool again)
{
    const struct slot_meta *m = meta_of(p, slot);
    struct bt_slot_header *h = &p->slab->headers[slot];
    BT_ASSERT(m->state == BT_SLOT_SEALED);
    if (h->use.generation != m->generation) { /* it belongs to an earlier block */
        h->use.count = 1;
        h->use.generation = m->generation;
    }
    h->use.used_ns = now_ns;
    h->use.count += again && h->use.count < USES_MAX;
}

uint64_t bt_pool_last_use(const struct bt_pool *p, uint32_t slot, uint32_t *count_p)
{
    const struct slot_meta *m = meta_of(p, slot);
    const struct bt_slot_header *h = &p->slab->headers[slot];
    BT_ASSERT(m->state == BT_SLOT_SEALED);
    bool known = h->use.generation == m->generation;
    *count_p = known ? BT_MIN(BT_MAX(h->use.count, 1u), USES_MAX) : 1;
    return known ? BT_MAX(h->use.used_ns, h->sealed_ns) : h->sealed_ns;
}

void bt_pool_set_tenant(struct bt_pool *p, uint32_t slot, uint32_t tag)
{
    BT_ASSERT(meta_of(p, slot)->state == BT_SLOT_WRITING);
    p->slab->headers[slot].tenant = tag;
}

bool bt_pool_header_ok(const struct bt_pool *p, uint32_t slot)
{
    BT_ASSERT(slot < p->n);
    const struct bt_slot_header *h = &p->slab->headers[slot];
    const uint32_t *row = p->slab->crcs + (size_t)slot * p->n_layers;
    return h->layout_id == p->layout.layout_id && h->crc == header_crc(h, row, p->n_layers);
}

void bt_pool_adopt(struct bt_pool *p, void (*fn)(void *arg, uint32_t slot, bool sealed), void *arg)
{
    BT_ASSERT(p->by_state[BT_SLOT_FREE] == p->n); /* no slot is taken yet */
    p->free_head = BT_POOL_NONE;
    for (uint32_t i = p->n; i-- > 0;) {
        uint64_t word = atomic_load_explicit(&p->slab->headers[i].state, memory_order_acquire);
        bt_slot_state_t was = bt_slot_state(word);
        bool sealed = was == BT_SLOT_SEALED && bt_pool_header_ok(p, i);
        bool held = sealed || was == BT_SLOT_WRITING || was == BT_SLOT_QUARANTINE;
        if (!held) {
            set_state(p, i, BT_SLOT_FREE);
            p->meta[i].next_free = p->free_head;
            p->free_head = i;
            continue;
        }
        set_state(p, i, sealed ? BT_SLOT_SEALED : BT_SLOT_QUARANTINE);
        p->meta[i].leases = 1;
        p->leases++;
        fn(arg, i, sealed);
    }
}

void bt_pool_quarantine(struct bt_pool *p, uint32_t slot)
{
    struct slot_meta *m = meta_of(p, slot);
    BT_ASSERT(m->state == BT_SLOT_WRITING || m->state == BT_SLOT_SEALED);
    set_state(p, slot, BT_SLOT_QUARANTINE);
}

void bt_pool_free(struct bt_pool *p, uint32_t slot)
{
    struct slot_meta *m = meta_of(p, slot);
    BT_ASSERT(m->state != BT_SLOT_FREE && m->leases == 0);
    set_state(p, slot, BT_SLOT_FREE);
    m->next_free = p->free_head;
    p->free_head = slot;
}

bt_slot_state_t bt_pool_state(const struct bt_pool *p, uint32_t slot)
{
    return (bt_slot_state_t)meta_of(p, slot)->state;
}

uint32_t bt_pool_generation(const struct bt_pool *p, uint32_t slot)
{
    return meta_of(p, slot)->generation;
}

uint32_t bt_pool_leases(const struct bt_pool *p, uint32_t slot)
{
    return meta_of(p, slot)->leases;
}

const struct bt_kv_key *bt_pool_key(const struct bt_pool *p, uint32_t slot)
{
    BT_ASSERT(meta_of(p, slot)->state == BT_SLOT_SEALED);
    return &p->slab->headers[slot].key;
}

const struct bt_slot_header *bt_pool_header(const struct bt_pool *p, uint32_t slot)
{
    BT_ASSERT(slot < p->n);
    return &p->slab->headers[slot];
}

uint32_t bt_pool_depth(const struct bt_pool *p, uint32_t slot)
{
    BT_ASSERT(slot < p->n);
    return p->slab->headers[slot].depth;
}

bt_status_t bt_pool_transit_get(struct bt_pool *p, uint32_t n)
{
    if (n > p->transit_max - BT_MIN(p->transit, p->transit_max)) {
        return BT_ERR_EXHAUSTED;
    }
    p->transit += n;
    return BT_OK;
}

void bt_pool_transit_put(struct bt_pool *p, uint32_t n)
{
    BT_ASSERT(n <= p->transit);
    p->transit -= n;
}

static uint32_t compute_crc(const struct bt_pool *p, uint32_t slot, uint32_t layer,
                            const struct bt_kv_key *name)
{
    uint32_t bytes;
    uint64_t off = bt_kv_segment(&p->layout, layer, &bytes);
    return bt_slab_segment_crc(name, layer, p->layout.layout_id,
                               (const uint8_t *)bt_slab_data(p->slab, slot) + off, bytes);
}

uint32_t bt_pool_segment_crc(struct bt_pool *p, uint32_t slot, uint32_t layer,
                             const struct bt_kv_key *name)
{
    return bt_slab_crcs_get(p->crcs, slot, layer, name);
}

struct bt_slab_crcs *bt_pool_crcs(struct bt_pool *p)
{
    return p->crcs;
}

void bt_pool_crcs_known(struct bt_pool *p, uint32_t slot)
{
    bt_slab_crcs_set_known(p->crcs, slot);
}

bt_status_t bt_pool_verify(const struct bt_pool *p, uint32_t slot)
{
    const struct bt_slot_header *h = &p->slab->headers[slot];
    const uint32_t *row = p->slab->crcs + (size_t)slot * p->n_layers;
    if (meta_of(p, slot)->state != BT_SLOT_SEALED) {
        return BT_ERR_NOT_FOUND;
    }
    if (h->crc != header_crc(h, row, p->n_layers)) {
        return BT_ERR_DATA_LOSS;
    }
    for (uint32_t l = 0; l < p->n_layers; l++) {
        if (compute_crc(p, slot, l, &h->key) != row[l]) {
            return BT_ERR_DATA_LOSS;
        }
    }
    return BT_OK;
}

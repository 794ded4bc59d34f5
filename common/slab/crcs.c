/* Marks of known segment CRCs, one byte for each segment, in a memfd. Any thread; see crcs.h. */
#include "common/slab/crcs.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* States of a segment. STORING: a thread of the kvstore has stored the CRC and not the mark yet;
 * STORING_OTHER: the same in another process, which may die at that point. */
enum { UNKNOWN = 0, KNOWN = 1, STORING = 2, STORING_OTHER = 3 };

struct bt_slab_crcs {
    const struct bt_slab *slab;
    struct bt_kv_layout layout;
    int fd; /* -1: the memory was made by another process */
    uint8_t storing;
    size_t n;
    _Atomic uint8_t *marks; /* [n_slots][n_layers] */
};

static bool map(struct bt_slab_crcs *c, int fd)
{
    void *p = mmap(NULL, c->n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    c->marks = p;
    return p != MAP_FAILED;
}

static struct bt_slab_crcs *crcs_new(const struct bt_slab *slab, const struct bt_kv_layout *layout)
{
    struct bt_slab_crcs *c = bt_calloc(1, sizeof(*c));
    c->slab = slab;
    c->layout = *layout;
    c->fd = -1;
    c->n = (size_t)slab->super->n_slots * slab->super->n_layers;
    return c;
}

struct bt_slab_crcs *bt_slab_crcs_create(const struct bt_slab *slab,
                                         const struct bt_kv_layout *layout)
{
    struct bt_slab_crcs *c = crcs_new(slab, layout);
    c->storing = STORING;
    c->fd = memfd_create("baton-crcs", MFD_CLOEXEC);
    BT_ASSERT(c->fd >= 0 && ftruncate(c->fd, (off_t)c->n) == 0 && map(c, c->fd));
    return c;
}

bt_status_t bt_slab_crcs_map(const struct bt_slab *slab, const struct bt_kv_layout *layout, int fd,
                             struct bt_slab_crcs **c_p)
{
    struct bt_slab_crcs *c = crcs_new(slab, layout);
    struct stat st;
    c->storing = STORING_OTHER;
    if (fstat(fd, &st) != 0 || (size_t)st.st_size != c->n || !map(c, fd)) {
        free(c);
        return BT_ERR_IO;
    }
    *c_p = c;
    return BT_OK;
}

void bt_slab_crcs_destroy(struct bt_slab_crcs *c)
{
    if (c == NULL) {
        return;
    }
    munmap((void *)c->marks, c->n);
    if (c->fd >= 0) {
        close(c->fd);
    }
    free(c);
}

int bt_slab_crcs_fd(const struct bt_slab_crcs *c)
{
    return c->fd;
}

static size_t at(const struct bt_slab_crcs *c, uint32_t slot, uint32_t layer)
{
    BT_ASSERT(slot < c->slab->super->n_slots && layer < c->layout.n_layers);
    return (size_t)slot * c->layout.n_layers + layer;
}

bool bt_slab_crcs_known(const struct bt_slab_crcs *c, uint32_t slot, uint32_t layer)
{
    return atomic_load_explicit(&c->marks[at(c, slot, layer)], memory_order_acquire) == KNOWN;
}

static void mark_all(struct bt_slab_crcs *c, uint32_t slot, uint8_t mark)
{
    size_t first = at(c, slot, 0);
    for (uint32_t l = 0; l < c->layout.n_layers; l++) {
        atomic_store_explicit(&c->marks[first + l], mark, memory_order_release);
    }
}

void bt_slab_crcs_set_known(struct bt_slab_crcs *c, uint32_t slot)
{
    mark_all(c, slot, KNOWN);
}

void bt_slab_crcs_forget(struct bt_slab_crcs *c, uint32_t slot)
{
    mark_all(c, slot, UNKNOWN);
}

uint32_t bt_slab_crcs_get(struct bt_slab_crcs *c, uint32_t slot, uint32_t layer,
                          const struct bt_kv_key *name)
{
    size_t i = at(c, slot, layer);
    _Atomic uint32_t *crc = (_Atomic uint32_t *)&c->slab->crcs[i];
    if (atomic_load_explicit(&c->marks[i], memory_order_acquire) == KNOWN) {
        return atomic_load_explicit(crc, memory_order_relaxed);
    }
    uint32_t bytes;
    uint64_t off = bt_kv_segment(&c->layout, layer, &bytes);
    uint32_t v = bt_slab_segment_crc(name, layer, c->layout.layout_id,
                                     (const uint8_t *)bt_slab_data(c->slab, slot) + off, bytes);
    /* Two threads may come here with the same number. One stores it; the other waits until it is
     * stored. No thread stores it later, when the row may already be in a header or be sent. */
    for (;;) {
        uint8_t was = UNKNOWN;
        if (atomic_compare_exchange_strong_explicit(&c->marks[i], &was, c->storing,
                                                    memory_order_acquire, memory_order_acquire)) {
            atomic_store_explicit(crc, v, memory_order_relaxed);
            atomic_store_explicit(&c->marks[i], KNOWN, memory_order_release);
            return v;
        }
        if (was == KNOWN) {
            return v;
        }
        sched_yield(); /* the other thread needs two more instructions, unless it was interrupted */
    }
}

void bt_slab_crcs_other_ended(struct bt_slab_crcs *c)
{
    for (size_t i = 0; i < c->n; i++) {
        uint8_t was = STORING_OTHER;
        if (atomic_load_explicit(&c->marks[i], memory_order_relaxed) == STORING_OTHER) {
            atomic_compare_exchange_strong(&c->marks[i], &was, UNKNOWN);
        }
    }
}

/* libFuzzer: what a kvstore finds in the slab of its predecessor. The file is a good slab with a
 * few sealed blocks; the tape changes bytes of its superblock, headers, checksums and data, sets
 * states, swaps and copies headers, and may make a header's checksum right again. Whatever it is,
 * the slab is refused in words or taken over, and then each block that can be found has the bytes
 * that its checksums say. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/crc32c.h"
#include "kvstore/cache/adopt.h"
#include "kvstore/cache/cache.h"
#include "tests/fuzz/rig.h"
#include "tests/fuzz/tape.h"
#include "tests/unit/kv_cache.h"

#define SLOTS  12u
#define BLOCKS 6u
#define TOKENS 16u
#define IMAGE  (1u << 20)

struct bt_sealer { /* in place of the thread */
    bt_sealer_done_fn done;
    void *arg;
    uint32_t n, slots[64];
    struct bt_kv_key names[64];
    bool busy;
};

static struct bt_loop *loop;
static struct bt_kv_layout layout;
static struct bt_kv_key root;
static struct bt_slab_spec spec;
static struct bt_slab_super super; /* of the good slab */
static char path[128];
static uint8_t image[IMAGE], work[IMAGE];
static size_t image_bytes;
static struct bt_sealer sealer;
static struct bt_pool *pool_now;

void bt_sealer_submit(struct bt_sealer *s, const uint32_t *slots, const struct bt_kv_key *names,
                      uint32_t n, bt_sealer_done_fn done, void *arg)
{
    BT_ASSERT(!s->busy && n > 0 && n <= BT_ARRAY_LEN(s->slots));
    s->busy = true;
    s->done = done;
    s->arg = arg;
    s->n = n;
    memcpy(s->slots, slots, n * sizeof(*slots));
    memcpy(s->names, names, n * sizeof(*names));
}

static void seal(void)
{
    for (uint32_t i = 0; i < sealer.n; i++) {
        for (uint32_t l = 0; l < layout.n_layers; l++) {
            (void)bt_pool_segment_crc(pool_now, sealer.slots[i], l, &sealer.names[i]);
        }
    }
    sealer.busy = false;
    sealer.done(sealer.arg); /* may submit the next */
}

static void key_of(uint32_t i, struct bt_kv_key *k)
{
    memset(k, 0, sizeof(*k));
    k->b[0] = (uint8_t)i;
    k->b[31] = 1;
}

/* Makes the good slab and remembers its bytes. */
static void first_start(void)
{
    char err[512];
    struct bt_slab *slab;
    BT_ASSERT(bt_loop_create(&loop) == BT_OK);
    BT_ASSERT(bt_kv_layout_gqa(TOKENS, 2, 1, 16, BT_DT_BF16, 0, &layout) == BT_OK);
    memset(root.b, 7, sizeof(root.b));
    snprintf(path, sizeof(path), "%s/slab", rig_dir());
    uint64_t slot = BT_ALIGN_UP(layout.block_bytes, 4096);
    spec = (struct bt_slab_spec){.path = path,
                                 .bytes = 5 * 4096 + SLOTS * (slot + 128 + 8),
                                 .layout = &layout,
                                 .root = &root,
                                 .incarnation = 99};
    BT_ASSERT(bt_slab_create(&spec, NULL, NULL, &slab, err, sizeof(err)) == BT_OK);
    struct bt_cache *c = bt_cache_create(slab, &layout, SLOTS, &bt_evict_slru);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint32_t at;
        struct bt_kv_key k;
        key_of(i, &k);
        BT_ASSERT(cache_take(c, 1, &at) == BT_OK);
        memset(bt_slab_data(slab, at), (int)i + 1, layout.block_bytes);
        for (uint32_t l = 0; l < layout.n_layers; l++) {
            (void)bt_pool_segment_crc(c->pool, at, l, &k);
        }
        if (i + 1 < BLOCKS) { /* the last one is being written */
            BT_ASSERT(cache_seal(c, at, &k, TOKENS, i));
        }
    }
    bt_cache_destroy(c);
    super = *slab->super;
    bt_slab_unmap(slab);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = read(fd, image, sizeof(image));
    BT_ASSERT(n > 0 && (size_t)n < sizeof(image) && (uint64_t)n == super.file_bytes);
    image_bytes = (size_t)n;
    close(fd);
}

static struct bt_slot_header *header(uint32_t slot)
{
    return (struct bt_slot_header *)(void *)(work + super.headers_off) + slot;
}

static void sign(uint32_t slot)
{
    struct bt_slot_header *h = header(slot);
    const size_t from = offsetof(struct bt_slot_header, key);
    uint32_t crc =
        bt_crc32c(0, (const uint8_t *)h + from, offsetof(struct bt_slot_header, crc) - from);
    const uint8_t *row = work + super.crcs_off + (size_t)slot * layout.n_layers * 4;
    h->crc = bt_crc32c(crc, row, layout.n_layers * 4);
}

static void damage(struct tape *t)
{
    uint32_t slot = tape_below(t, super.n_slots), other = tape_below(t, super.n_slots);
    size_t at, n;
    switch (tape_u8(t) % 8) {
    case 0: at = tape_below(t, sizeof(struct bt_slab_super)); break;
    case 1:
        at = super.headers_off + slot * sizeof(struct bt_slot_header) + tape_below(t, 128);
        break;
    case 2:
        at = super.crcs_off + slot * layout.n_layers * 4 + tape_below(t, layout.n_layers * 4);
        break;
    case 3:
        at = super.data_off + slot * super.slot_bytes + tape_below(t, (uint32_t)layout.block_bytes);
        break;
    case 4:
        atomic_store(&header(slot)->state,
                     tape_one_in(t, 4)
                         ? tape_u64(t)
                         : bt_slot_word(tape_u8(t), (bt_slot_state_t)(tape_u8(t) % 5)));
        return;
    case 5: memcpy(header(slot), header(other), sizeof(struct bt_slot_header)); return;
    case 6: sign(slot); return;
    default: /* a whole block twice */
        memcpy(header(slot), header(other), sizeof(struct bt_slot_header));
        memcpy(work + super.crcs_off + slot * layout.n_layers * 4,
               work + super.crcs_off + other * layout.n_layers * 4, layout.n_layers * 4);
        memcpy(work + super.data_off + slot * super.slot_bytes,
               work + super.data_off + other * super.slot_bytes, layout.block_bytes);
        return;
    }
    const uint8_t *p = tape_bytes(t, 1 + tape_below(t, 8), &n);
    memcpy(work + at, p, BT_MIN(n, image_bytes - at));
}

static void use(struct bt_slab *slab, struct tape *t)
{
    struct bt_pool_counts counts;
    struct bt_adopt_stats s;
    struct bt_cache *c = bt_cache_create(slab, &layout, SLOTS, &bt_evict_slru);
    pool_now = c->pool;
    sealer.busy = false;
    struct bt_adopt *a = bt_adopt_start(loop, c, &sealer);
    for (int i = 0; i < 8; i++) {
        uint32_t at;
        if (sealer.busy && !tape_one_in(t, 8)) {
            seal();
        }
        if (tape_one_in(t, 3) && cache_take(c, 1, &at) == BT_OK) {
            bt_cache_put(c, &at, 1);
        }
        rig_pass_ms(tape_u8(t) * 20u);
        bt_loop_poll(loop, 0);
    }
    bt_adopt_stats(a, &s);
    BT_ASSERT(s.blocks + s.bad + s.pending <= s.headers && s.headers <= super.n_slots);
    for (uint32_t i = 0; i < 256; i++) {
        struct bt_kv_key k;
        uint32_t at;
        key_of(i, &k);
        at = bt_cache_hold(c, &k);
        if (at != UINT32_MAX) {
            BT_ASSERT(at < super.n_slots && bt_pool_verify(c->pool, at) == BT_OK);
            bt_cache_put(c, &at, 1);
        }
    }
    bt_adopt_destroy(a);
    bt_pool_counts(c->pool, &counts);
    BT_ASSERT(counts.leases == 0);
    bt_cache_destroy(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tape t = tape_of(data, size);
    struct bt_slab *slab = NULL;
    char err[512] = "";
    rig_reset();
    if (loop == NULL) {
        first_start();
    }
    memcpy(work, image, image_bytes);
    for (uint32_t i = 0, n = tape_below(&t, 24); i < n && tape_left(&t) > 0; i++) {
        damage(&t);
    }
    size_t n = tape_one_in(&t, 16) ? tape_below(&t, (uint32_t)image_bytes) : image_bytes;
    (void)rig_file("slab", work, n);
    if (bt_slab_adopt(&spec, 0, &slab, err, sizeof(err)) == BT_OK) {
        BT_ASSERT(slab->super->n_slots == super.n_slots && slab->super->data_off == super.data_off);
        use(slab, &t);
        bt_slab_unmap(slab);
    } else {
        BT_ASSERT(err[0] != '\0' && slab == NULL);
    }
    return 0;
}

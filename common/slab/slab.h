/* The shared-memory slab of a node: one file in /dev/shm that baton-kvstore creates and workers
 * map. Its areas, each on a page of its own:
 *
 *   superblock     4 KiB
 *   headers        [slots] x 128 bytes
 *   CRCs           [slots][layers] u32
 *   flow words     [n_flow_words] u64
 *   data           [slots] x slot_bytes
 *
 * A worker maps superblock, headers and CRCs read-only, flow words and data read-write. A slot's
 * state word, generation << 32 | state, is written only by the kvstore, store-release after data
 * and CRCs; a reader loads it with acquire and CHECKS IT AGAIN AFTER USE. */
#ifndef BT_SLAB_SLAB_H
#define BT_SLAB_SLAB_H

#include <stdatomic.h>

#include "common/base/base.h"
#include "common/kv/flow.h"
#include "common/kv/key.h"
#include "common/kv/layout.h"

#define BT_SLAB_MAGIC   0x31424C534E544142ull /* "BATNSLB1" */
#define BT_SLAB_VERSION 4

typedef enum {
    BT_SLOT_FREE = 0,
    BT_SLOT_WRITING = 1,
    BT_SLOT_SEALED = 2,
    BT_SLOT_QUARANTINE = 3
} bt_slot_state_t;

struct bt_slab_super { /* first page of the file; header_crc written last */
    uint64_t magic;
    uint32_t version, n_slots;
    uint64_t slot_bytes; /* block_bytes rounded up to 4 KiB */
    uint64_t block_bytes, layout_id;
    uint32_t n_layers, n_flow_words;
    uint64_t headers_off, crcs_off, flows_off, data_off, file_bytes;
    uint8_t root_key[32];
    char boot_id[40], uuid[40];
    uint32_t header_crc;  /* over all above: nothing below it is needed to trust the file */
    uint64_t incarnation; /* of the kvstore that created or adopted it */
};

struct bt_slot_header {     /* 128 bytes */
    _Atomic uint64_t state; /* bt_slot_word */
    struct bt_kv_key key;
    uint32_t n_tokens;
    uint32_t depth; /* ordinal of the block in its chain */
    uint64_t layout_id;
    uint64_t sealed_ns; /* bt_mono_ns: a slab does not outlive its boot */
    uint32_t tenant;    /* bt_kv_tenant_tag of whose block it is */
    uint32_t crc; /* CRC32C over key to tenant and the slot's CRC row; written before the state */
    struct {
        uint64_t used_ns;    /* of the last one; bt_mono_ns */
        uint32_t count;      /* with the one that made it */
        uint32_t generation; /* of the block that `use` describes */
    } use; /* of the block so far, for the order after a restart: a hint, under no checksum */
    uint8_t pad[40];
};

static inline uint64_t bt_slot_word(uint32_t generation, bt_slot_state_t s)
{
    return (uint64_t)generation << 32 | (uint64_t)s;
}
static inline uint32_t bt_slot_generation(uint64_t word)
{
    return (uint32_t)(word >> 32);
}
static inline bt_slot_state_t bt_slot_state(uint64_t word)
{
    return (bt_slot_state_t)(word & 0xff);
}

struct bt_slab {
    const struct bt_slab_super *super;
    struct bt_slot_header *headers; /* read-only in a worker */
    uint32_t *crcs;                 /* [n_slots][n_layers] */
    bt_flow_word_t *flows;
    uint8_t *data;
    int fd;
    bool owner;
};

struct bt_slab_spec { /* a kvstore's slab, to be made or taken over; read during the call only */
    const char *path;
    uint64_t bytes; /* of the whole file: as many slots as fit */
    const struct bt_kv_layout *layout;
    const struct bt_kv_key *root;
    uint64_t incarnation; /* of the kvstore */
};
/* kvstore: creates the file (fallocate, then prefault). The caller has to call bt_slab_unlink.
 * ERR_EXHAUSTED: err says how much /dev/shm has and how much is needed. ERR_INVALID: the bytes are
 * not enough for two slots. progress may be NULL. */
bt_status_t bt_slab_create(const struct bt_slab_spec *spec,
                           void (*progress)(void *arg, double fraction), void *arg,
                           struct bt_slab **slab_p, char *err, size_t err_cap) BT_MUST_CHECK;
/* kvstore: takes over what a predecessor left at spec->path when it died. ERR_NOT_FOUND (err says
 * why): there is none that fits: of this boot, as large as create would make it, of this layout and
 * root, with nobody mapping it any more; workers get wait_ms to notice and let go. State words,
 * headers and data are as the predecessor left them; flow words are cleared. */
bt_status_t bt_slab_adopt(const struct bt_slab_spec *spec, uint32_t wait_ms,
                          struct bt_slab **slab_p, char *err, size_t err_cap) BT_MUST_CHECK;
/* worker: maps a slab by its fd (takes a dup). Holds a lock as long as it is mapped anywhere by
 * this description, which tells a later kvstore that it is. Checks magic, version, CRC, layout and
 * root: ERR_MISMATCH names what differs. */
bt_status_t bt_slab_map(int fd, const struct bt_kv_layout *layout, const struct bt_kv_key *root,
                        struct bt_slab **slab_p, char *err, size_t err_cap) BT_MUST_CHECK;
/* The same for the process that moves KV for the kvstore: it may write CRC rows as well. */
bt_status_t bt_slab_map_rows(int fd, const struct bt_kv_layout *layout,
                             const struct bt_kv_key *root, struct bt_slab **slab_p, char *err,
                             size_t err_cap) BT_MUST_CHECK;
/* kvstore: a descriptor for another process, without the owner's lock; -1: the system refuses. */
int bt_slab_open_again(const struct bt_slab *s);
void bt_slab_unmap(struct bt_slab *s); /* both sides; the owner unlinks the file itself, before */
/* kvstore: removes the slab's file, if it still is what path names. ERR_NOT_FOUND: there is nothing
 * of that name any more. ERR_EXISTS: something else is, and stays; err says so. ERR_IO: it cannot
 * be removed. If another process replaces the file at the same moment, its file is lost. */
bt_status_t bt_slab_unlink(const struct bt_slab *s, const char *path, char *err,
                           size_t err_cap) BT_MUST_CHECK;

static inline void *bt_slab_data(const struct bt_slab *s, uint32_t slot)
{
    return s->data + (uint64_t)slot * s->super->slot_bytes;
}
/* Segment CRC: CRC32C seeded with (key, layer, bytes, layout_id), over the segment's bytes. For
 * private blocks the key is the private name below. */
uint32_t bt_slab_segment_crc(const struct bt_kv_key *key, uint32_t layer, uint64_t layout_id,
                             const void *seg, uint32_t bytes);
/* The CRC's start value, for code that computes the rest while the bytes pass through it. */
uint32_t bt_slab_segment_seed(const struct bt_kv_key *key, uint32_t layer, uint64_t layout_id,
                              uint32_t bytes);
/* Name of a private (partial) block: derived from (request, epoch, index); never indexed. */
void bt_slab_private_key(uint64_t request, uint32_t epoch, uint32_t index, struct bt_kv_key *key_p);

#endif

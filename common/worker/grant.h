/* Grants: the slots that the node's kvstore has opened for a request in its slab, and the engine
 * thread's own mapping of the slab. Engine thread. */
#ifndef BT_WORKER_GRANT_H
#define BT_WORKER_GRANT_H

#include "common/slab/slab.h"

struct bt_engine;
struct bt_engine_vtable;
struct bt_wcmd;
struct bt_wcore;
struct bt_wreq;

/* Our own mapping of the node's slab. The kvstore's session may end at any moment; this mapping
 * lives until no copy of the engine can touch it. The control thread makes it and hands it over. */
struct bt_wslab {
    struct bt_slab *slab;
    const struct bt_engine_vtable *vt; /* of the engine that has it open */
    struct bt_engine *eng;
    uint64_t attach; /* number of the attachment */
    uint32_t refs;   /* requests and puts that use it */
    bool dead;       /* the kvstore has gone: unmap when refs is 0 */
};

/* The contents of the kvstore's LocalOpened. */
struct bt_wgrant {
    uint32_t n_tokens, resident_blocks, chunk_tokens, flow_word, n_slots;
    uint32_t slots[]; /* [n_slots], then generations [n_slots] */
};
static inline const uint32_t *bt_wgrant_gens(const struct bt_wgrant *g)
{
    return g->slots + g->n_slots;
}

/* A request's grant: written by grant.c. */
struct bt_wreq_grant {
    struct bt_wgrant *terms; /* NULL: it has none */
    struct bt_wslab *slab;   /* while it is open */
    bool open, trailer_due;
    uint32_t first_token; /* of the trailer */
};

/* Blocks behind the resident ones that the kvstore has brought meanwhile (LocalTail). */
struct bt_wtail {
    struct bt_wtail *next; /* of the request: the blocks behind these */
    uint32_t first, n;
    uint32_t slots[]; /* [n], then generations [n] */
};

/* The kvstore's answer to the open of cmd's request; takes its grant. */
void bt_wgrant_opened(struct bt_wcore *c, const struct bt_wcmd *cmd);
/* Tells the kvstore that r has no more use of its grant, or of one that is on its way. */
void bt_wgrant_emit_close(struct bt_wcore *c, const struct bt_wreq *r, bool abort);
/* Trailer (if due) and LocalClose: r has no more use of the slots of its grant. */
void bt_wgrant_close(struct bt_wcore *c, struct bt_wreq *r);
/* All KV of the grant is stored: closing it sends a trailer with the first token. */
void bt_wgrant_trailer(struct bt_wreq *r, uint32_t first_token);
/* Returns whether the slot still has the generation that the grant names. */
bool bt_wgrant_slot_valid(const struct bt_wreq *r, uint32_t slot, uint32_t generation);
/* Returns whether slots [first, end) of the grant still have the generations that the grant
 * names. */
bool bt_wgrant_valid(const struct bt_wreq *r, uint32_t first, uint32_t end);
/* A slab to work with; takes s's first reference. */
void bt_wcore_attached(struct bt_wcore *c, struct bt_wslab *s);
/* The kvstore is gone: requests that need its slots fail; the mapping lives until all copies are
 * quiet. */
void bt_wcore_detached(struct bt_wcore *c);
void bt_wslab_put(struct bt_wslab *s); /* drops a reference */

#endif

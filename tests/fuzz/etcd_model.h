/* A small etcd for the fuzz target: keys with revisions, leases, a history that can be compacted,
 * and answers as the real one would give them. */
#ifndef TESTS_FUZZ_ETCD_MODEL_H
#define TESTS_FUZZ_ETCD_MODEL_H

#include "etcd.pb-c.h"
#include "tests/fuzz/fake_rpc.h"

#define MODEL_KEYS    32
#define MODEL_HISTORY 48
#define MODEL_LEASES  16
#define MODEL_WATCHES 16
#define MODEL_TEXT    48
#define MODEL_VALUE   256

struct model_key {
    char key[MODEL_TEXT];
    uint8_t value[MODEL_VALUE];
    size_t len;
    int64_t created, mod, lease;
};

struct model_event {
    bool deleted;
    struct model_key k;
};

struct model {
    struct model_key keys[MODEL_KEYS];
    uint32_t n_keys;
    struct model_event history[MODEL_HISTORY]; /* in the order of their revisions */
    uint32_t n_history;
    int64_t revision, compacted;
    uint64_t term;
    struct {
        int64_t id, ttl;
    } leases[MODEL_LEASES];
    uint32_t n_leases;
    int64_t next_lease;
    struct model_watch {
        struct bt_rpc_stream *stream;
        char prefix[MODEL_TEXT];
        int64_t next;
    } watches[MODEL_WATCHES];
    uint32_t n_watches;
};

void model_init(struct model *m);
/* False: there is no room, or no such lease. */
bool model_put(struct model *m, const char *key, const void *value, size_t len, int64_t lease);
void model_delete(struct model *m, const char *key);
struct model_key *model_find(struct model *m, const char *key);
void model_revoke(struct model *m, int64_t lease); /* its keys go */
void model_compact(struct model *m);
/* Answers the oldest unary call of the client. */
void model_answer(struct model *m, struct bt_rpc *rpc);
/* Answers what was sent on the streams and sends at most max events on each. False: nothing was to
 * be done. */
bool model_serve(struct model *m, struct bt_rpc *rpc, uint32_t max);

#endif

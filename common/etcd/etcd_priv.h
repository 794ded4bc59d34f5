/* Inside common/etcd: the client's core, shared by etcd.c (unary calls), lease.c and watch.c.
 * Everything belongs to the loop's thread. */
#ifndef BT_ETCD_ETCD_PRIV_H
#define BT_ETCD_ETCD_PRIV_H

#include "common/base/list.h"
#include "common/etcd/etcd.h"
#include "common/rpc/pb.h"
#include "etcd.pb-c.h"

#define BT_ETCD_DEADLINE_MS    3000
#define BT_ETCD_BACKOFF_MIN_MS 100
#define BT_ETCD_BACKOFF_MAX_MS 2000
#define BT_ETCD_GOODBYES_MAX   4

struct bt_etcd_endpoint {
    char *target;       /* host:port */
    struct bt_tls *tls; /* NULL: plaintext */
    struct bt_rpc_channel *ch;
};

struct bt_etcd {
    struct bt_rpc *rpc;
    struct bt_loop *loop;
    struct bt_etcd_endpoint *eps;
    size_t n_eps, cur;
    bool dying, reachable;
    uint64_t lost_ns, said_ns; /* when etcd became unreachable, and when that was last logged */
    uint64_t dialed_ns;        /* when a pause of gRPC was last ended, or etcd became unreachable */
    struct bt_list leases, watches;
    /* Leases being revoked: bt_etcd_destroy waits a moment for these. */
    int64_t goodbyes[BT_ETCD_GOODBYES_MAX];
    size_t n_goodbyes;
};

/* The raw end of a unary call; data is the packed reply if st is OK. */
typedef void (*bt_etcd_raw_fn)(void *arg, bt_status_t st, const void *data, size_t len);
/* One call to the current endpoint. If that is not reachable the next one is tried, until all have
 * been tried. fn is called exactly once; by bt_etcd_destroy with ERR_CANCELLED. */
void bt_etcd_call(struct bt_etcd *e, const char *method, const ProtobufCMessage *req,
                  bt_etcd_raw_fn fn, void *arg);
/* Notes that endpoint `ep` failed (true) or answered, and moves on to the next one if it failed. */
void bt_etcd_note(struct bt_etcd *e, size_t ep, bool failed, const char *why);

/* Doubles *ms_p within the limits and returns the delay to use now. */
uint64_t bt_etcd_backoff(uint64_t *ms_p);

/* The next revision. The argument may be any number that etcd sends. */
static inline int64_t bt_etcd_after(int64_t revision)
{
    return revision < INT64_MAX ? revision + 1 : revision;
}

/* First key after all keys with the prefix, into a heap copy; *len_p 0 when the prefix is empty. */
uint8_t *bt_etcd_prefix_end(const char *prefix, size_t *len_p);
ProtobufCBinaryData bt_etcd_bytes(const void *data, size_t len);
/* Fills kv with copies of the key (heap: free kv->key); false if the key has a NUL inside. */
bool bt_etcd_kv_open(const Etcdserverpb__KeyValue *pb, struct bt_etcd_kv *kv);
void bt_etcd_kv_close(struct bt_etcd_kv *kv);

void bt_etcd_lease_end(struct bt_list *link); /* by bt_etcd_destroy: frees without a callback */
void bt_etcd_watch_end(struct bt_list *link);

#endif

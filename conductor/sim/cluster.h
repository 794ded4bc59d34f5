/* The simulated cluster: how many nodes of which role, how fast, how large. */
#ifndef BT_CONDUCTOR_SIM_CLUSTER_H
#define BT_CONDUCTOR_SIM_CLUSTER_H

#include "common/base/base.h"
#include "common/batch/batch.h"

struct bt_sim_cluster {
    double prefill_nodes, decode_nodes;
    struct bt_batch_cost prefill, decode;               /* of a node's step */
    double chunk_tokens;                                /* of a prefill step */
    double token_bytes;                                 /* KV of a token, over all layers */
    double layers;                                      /* the last one's hand-off is not hidden */
    double link_bytes_per_s;                            /* of a node, each direction */
    double load_bytes_per_s;                            /* slab to GPU */
    double cache_tokens;                                /* of a prefill node; 0: unlimited */
    double ssd_tokens;                                  /* of any node's SSD; 0: there is none */
    double ssd_read_bytes_per_s, ssd_write_bytes_per_s; /* 0: at once */
    double kv_tokens;                                   /* GPU pages of a decode node */
    double rows_max;                                    /* of a decode step */
};

/* A preset by name, or a file of "key: value" lines (first key `preset`, or all keys).
 * ERR_NOT_FOUND, ERR_INVALID; err says what and the remedy. */
bt_status_t bt_sim_cluster_load(const char *name, struct bt_sim_cluster *c, char *err,
                                size_t err_cap) BT_MUST_CHECK;
/* Changes one key: "decode_nodes=4". */
bt_status_t bt_sim_cluster_set(struct bt_sim_cluster *c, const char *assignment, char *err,
                               size_t err_cap) BT_MUST_CHECK;
extern const char bt_sim_cluster_names[];
/* The name of preset number i; NULL behind the last one. */
const char *bt_sim_cluster_preset(uint32_t i);
/* GPUs of a node of this preset; 1 for a file, whose costs may be of anything. */
uint32_t bt_sim_cluster_gpus(const char *name);
/* Key number i with its value and meaning; false behind the last one. */
bool bt_sim_cluster_key(const struct bt_sim_cluster *c, uint32_t i, const char **key_p,
                        double *value_p, const char **doc_p);

#endif

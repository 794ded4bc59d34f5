/* A pin as etcd stores it: /baton/<cluster>/pins/<id> -> proto baton.Pin. Conductors write pins;
 * conductors and kvstores follow them, and use only what these functions accept. Any thread. */
#ifndef BT_ETCD_PIN_H
#define BT_ETCD_PIN_H

#include "cluster.pb-c.h"
#include "common/etcd/etcd.h"
#include "common/kv/key.h"

char *bt_pin_prefix(const char *cluster); /* of all keys; the caller frees it */
char *bt_pin_key(const char *prefix, uint64_t id);
/* The id in a key; false: the key does not have the form that bt_pin_key writes. */
bool bt_pin_key_id(const char *prefix, const char *key, uint64_t *id_p);
/* The id of a chain of blocks, by its last block. */
uint64_t bt_pin_id(const struct bt_kv_key *last);
/* The record under a key; the caller frees it. NULL: it is damaged, or its id is not the one in its
 * key (it would then be listed, renewed and ended as another pin); why says what. */
Baton__Pin *bt_pin_read(const char *prefix, const struct bt_etcd_kv *kv, char *why, size_t cap);

#endif

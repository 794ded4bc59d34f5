/* A pin as etcd has it: /baton/<cluster>/pins/<id> -> proto baton.Pin. Conductors write it, they
 * and kvstores follow it, and both believe only what is read here. Any thread. */
#ifndef BT_ETCD_PIN_H
#define BT_ETCD_PIN_H

#include "cluster.pb-c.h"
#include "common/etcd/etcd.h"
#include "common/kv/key.h"

char *bt_pin_prefix(const char *cluster); /* of all keys; the caller frees it */
char *bt_pin_key(const char *prefix, uint64_t id);
/* The id that a key names; false: it is not written as bt_pin_key writes it. */
bool bt_pin_key_id(const char *prefix, const char *key, uint64_t *id_p);
/* The id of a chain of blocks, by its last block. */
uint64_t bt_pin_id(const struct bt_kv_key *last);
/* The record under a key, for the caller to free. NULL: it is damaged, or it is not the pin that
 * its key names, so that it would be listed, renewed and ended as another one; why says what. */
Baton__Pin *bt_pin_read(const char *prefix, const struct bt_etcd_kv *kv, char *why, size_t cap);

#endif

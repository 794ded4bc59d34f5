/* A file with the cluster's secret. Files are read during the call only. Any thread. */
#ifndef BT_CONF_SECRET_H
#define BT_CONF_SECRET_H

#include "common/base/base.h"
#include "common/base/sha256.h"

#define BT_SECRET_MAX 4096 /* bytes */

struct bt_secret { /* of kv.salt_file */
    uint8_t bytes[BT_SECRET_MAX];
    size_t len;                /* 0: there is none */
    uint8_t id[BT_SHA256_LEN]; /* SHA-256 of bytes: it is public and reveals nothing */
    size_t id_len;             /* 0 or BT_SHA256_LEN */
};

/* Reads the secret in the file, without white space at its end (which editors add). ERR_CONFIG: err
 * says which file and why: it cannot be read, does not hold 1 to BT_SECRET_MAX bytes, or is open to
 * everybody. The caller wipes it (explicit_bzero). */
bt_status_t bt_conf_secret_read(const char *path, struct bt_secret *s_p, char *err,
                                size_t err_cap) BT_MUST_CHECK;

#endif

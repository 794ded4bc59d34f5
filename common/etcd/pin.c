/* See pin.h. */
#include "common/etcd/pin.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/rpc/ranges.h"

#define DIGITS 16

char *bt_pin_prefix(const char *cluster)
{
    return bt_sprintf("/baton/%s/pins/", cluster);
}

char *bt_pin_key(const char *prefix, uint64_t id)
{
    return bt_sprintf("%s%016" PRIx64, prefix, id);
}

bool bt_pin_key_id(const char *prefix, const char *key, uint64_t *id_p)
{
    static const char digits[] = "0123456789abcdef";
    size_t n = strlen(prefix);
    if (strncmp(key, prefix, n) != 0 || strlen(key + n) != DIGITS ||
        strspn(key + n, digits) != DIGITS) {
        return false;
    }
    *id_p = strtoull(key + n, NULL, 16);
    return true;
}

uint64_t bt_pin_id(const struct bt_kv_key *last)
{
    uint64_t id = 0;
    for (int i = 0; i < 8; i++) {
        id = id << 8 | last->b[i];
    }
    return id;
}

static bool printable(const char *text)
{
    for (const char *c = text; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) { /* the text is shown on terminals */
            return false;
        }
    }
    return true;
}

static const char *fault(const char *prefix, const char *key, const Baton__Pin *m)
{
    uint64_t id;
    struct bt_kv_key last;
    memcpy(&last, m->keys.data + m->keys.len - sizeof(last), sizeof(last));
    if (!bt_pin_key_id(prefix, key, &id)) {
        return "its key is not an id of 16 hex digits";
    }
    if (m->id != id) {
        return "its id differs from that in its key";
    }
    if (bt_pin_id(&last) != id) {
        return "its blocks do not match its id";
    }
    return printable(m->label) && printable(m->tenant)
               ? NULL
               : "its label or tenant has control characters";
}

Baton__Pin *bt_pin_read(const char *prefix, const struct bt_etcd_kv *kv, char *why, size_t cap)
{
    Baton__Pin *m = bt_pin_unpack(kv->value, kv->value_len, why, cap);
    const char *text = m != NULL ? fault(prefix, kv->key, m) : NULL;
    if (text == NULL) {
        return m;
    }
    snprintf(why, cap, "%s", text);
    baton__pin__free_unpacked(m, NULL);
    return NULL;
}

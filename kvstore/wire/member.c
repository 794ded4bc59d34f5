/* Proves that a UCX address comes from a member of the cluster. UCX does not check addresses, and
 * some malformed ones crash the process. So an address must have a MAC that is made with the
 * cluster's secret for this session. Control thread. */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#include "common/base/sha256.h"
#include "kvstore/wire/wire_priv.h"

#define LABEL      "baton peer address 1"
#define SECRET_MIN 32

static bool is_loopback(const struct bt_nic *nic)
{
    static const uint8_t one[16] = {[15] = 1};
    return nic->family == 4 ? nic->addr[0] == 127 : memcmp(nic->addr, one, sizeof(one)) == 0;
}

bt_status_t bt_wire_member_init(struct bt_wire *w, const struct bt_wire_config *conf, char *err,
                                size_t err_cap)
{
    bool alone = true;
    for (uint32_t i = 0; i < w->n_cards; i++) {
        alone = alone && is_loopback(&w->cards[i].card.nic);
    }
    if (conf->secret_len != 0 && conf->secret_len < SECRET_MIN && !conf->over_grpc) {
        snprintf(err, err_cap,
                 "kv.salt_file: %zu bytes are too few to prove membership of the cluster; write a "
                 "new file with head -c 32 /dev/urandom | base64, the same on all hosts",
                 conf->secret_len);
        return BT_ERR_CONFIG;
    }
    if (conf->secret_len != 0) {
        w->has_secret = true;
        bt_hmac_sha256(conf->secret, conf->secret_len, LABEL, sizeof(LABEL), w->secret);
        return BT_OK;
    }
    if (alone || conf->over_grpc || conf->tls != NULL || conf->allow_routable) {
        return BT_OK;
    }
    snprintf(
        err, err_cap,
        "kvstore.wire.listen: on this address UCX needs proof that peers belong to the cluster, "
        "because a malformed address can end all transfers of this node. Give all daemons the same "
        "kv.salt_file (head -c 32 /dev/urandom | base64 > /etc/baton/salt), or cluster.tls.*, or "
        "set kvstore.wire.allow_routable: true if the network keeps strangers out");
    return BT_ERR_CONFIG;
}

static size_t put(uint8_t *to, size_t at, const void *from, size_t n)
{
    uint32_t len = (uint32_t)n; /* with the length, no two lists of inputs give the same bytes */
    memcpy(to + at, &len, sizeof(len));
    bt_copy(to + at + sizeof(len), from, n);
    return at + sizeof(len) + n;
}

void bt_wire_member_mac(const struct bt_wire_session *s, bool ours, const struct bt_wire_way *way,
                        uint8_t out[BT_WIRE_MAC_BYTES])
{
    const struct bt_wire *w = s->w;
    const char *from = ours ? w->name : s->name, *to = ours ? s->name : w->name;
    uint64_t numbers[5] = {ours ? w->incarnation : s->incarnation,
                           ours ? s->incarnation : w->incarnation, way->nonce,
                           (uint64_t)way->path << 32 | way->card,
                           (ours == s->dialer ? 1u : 2u)}; /* from dialer to listener, or back */
    uint8_t buf[2048 + BT_RANGE_ADDRESS_MAX];
    size_t n = put(buf, 0, w->cluster, strlen(w->cluster));
    n = put(buf, n, from, strlen(from));
    n = put(buf, n, to, strlen(to));
    n = put(buf, n, numbers, sizeof(numbers));
    n = put(buf, n, way->address, way->address_len);
    bt_hmac_sha256(w->secret, sizeof(w->secret), buf, n, out);
}

bool bt_wire_member_is(const struct bt_wire_session *s, const struct bt_wire_way *way,
                       const ProtobufCBinaryData *mac)
{
    uint8_t right[BT_WIRE_MAC_BYTES];
    if (!s->w->has_secret || way->address_len == 0) {
        return true;
    }
    bt_wire_member_mac(s, false, way, right);
    return mac->len == sizeof(right) && bt_hmac_equal(right, mac->data, sizeof(right));
}

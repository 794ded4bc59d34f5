/* Sets UCX up: transports, interface, sizes. Checks whether the transports that UCX found are
 * sufficient. Once for each card, before the first path over it. Transfer thread. */
#include <stdio.h>
#include <string.h>

#include "common/conf/conf.h"
#include "common/log/log.h"
#include "kvstore/wire/ucx_priv.h"

#define TCP_SEG_SIZE  "512K"
#define TCP_ZCOPY     "128K" /* BT_UCX_ZCOPY_MIN */
#define EAGER_MAX_TCP (64u * 1024)

/* A value from the environment (UCX_<env>) has precedence over ours. Here a key of UCT is given
 * without its transport's prefix. UCX warns about a key that no used transport has. */
static bool configure(ucp_config_t *c, const char *env, const char *key, const char *value,
                      char *err, size_t err_cap)
{
    ucs_status_t st;
    char name[64];
    snprintf(name, sizeof(name), "UCX_%s", env);
    if (bt_conf_env(name) != NULL || (st = ucp_config_modify(c, key, value)) == UCS_OK) {
        return true;
    }
    snprintf(err, err_cap, "UCX does not take %s=%s: %s", key, value, ucs_status_string(st));
    return false;
}

static bool configure_all(struct bt_wx *x, uint32_t card, ucp_config_t *c, char *err,
                          size_t err_cap)
{
    const char *tls = bt_conf_env("UCX_TLS");
    const struct bt_wx_card *k = &x->conf.cards[card];
    bool tcp = tls == NULL || strcmp(tls, "tcp") == 0;
    if (x->conf.n_cards > 1 && (!tcp || bt_conf_env("UCX_NET_DEVICES") != NULL)) {
        snprintf(
            err, err_cap,
            "kvstore.wire.listen names %u addresses, which is for TCP, and %s is set: give one "
            "address there, and RDMA devices in UCX_NET_DEVICES (UCX spreads over these by "
            "itself), or unset it",
            x->conf.n_cards, tcp ? "UCX_NET_DEVICES" : "UCX_TLS");
        return false;
    }
    bool ok = configure(c, "TLS", "TLS", "tcp", err, err_cap) &&
              configure(c, "RNDV_SCHEME", "RNDV_SCHEME", "get_zcopy", err, err_cap) &&
              configure(c, "PROTO_ENABLE", "PROTO_ENABLE", "n", err, err_cap);
    if (!ok || !tcp) {
        x->ucx->eager_max = 8192; /* RDMA: all messages but small ones are read by the receiver */
        return ok;
    }
    x->ucx->eager_max = EAGER_MAX_TCP;
    x->ucx->copies = true;
    if (bt_conf_env("UCX_NET_DEVICES") != NULL) {
        BT_WARN("wire_net_devices", "interface=%s detail=%s", k->ifname,
                "UCX_NET_DEVICES overrides the interface of kvstore.wire.listen");
    }
    bool may = bt_ucx_may_send_from_memory();
    if (!may) {
        BT_WARN("wire_copies", "interface=%s ucx=%s detail=%s", k->ifname, ucp_get_version_string(),
                "this version of UCX is not known to be safe without a copy of each "
                "segment: KV over TCP is slower");
    }
    return configure(c, "NET_DEVICES", "NET_DEVICES", k->ifname, err, err_cap) &&
           configure(c, "TCP_TX_SEG_SIZE", "TX_SEG_SIZE", TCP_SEG_SIZE, err, err_cap) &&
           configure(c, "TCP_RX_SEG_SIZE", "RX_SEG_SIZE", TCP_SEG_SIZE, err, err_cap) &&
           /* Otherwise connecting to a card that does not answer blocks the transfer thread for
            * minutes. */
           configure(c, "TCP_CONN_NB", "CONN_NB", "y", err, err_cap) &&
           /* Above EAGER_MAX_TCP, so that these messages go by rendezvous. An eager message that is
            * sent without a copy takes its header from a pool that UCX 1.13.1 never frees: each
            * session left 1.4 MB. */
           configure(c, "ZCOPY_THRESH", "ZCOPY_THRESH", may ? TCP_ZCOPY : "inf", err, err_cap) &&
           configure(c, "TCP_AF_PRIO", "AF_PRIO", k->ipv6 ? "inet6" : "inet", err, err_cap);
}

/* Can one kvstore connect to another with the transports that UCX found? Tests it with a connection
 * to this process itself. With shared memory alone (UCX_TLS=sm) UCX starts without an error, and
 * then every connection would fail: none of its transports within a host reports a peer's death. */
static bool can_connect(ucp_context_h context, char *err, size_t err_cap)
{
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_worker_h w;
    ucp_address_t *a = NULL;
    size_t len;
    ucp_ep_h ep = NULL;
    ucs_status_t st = ucp_worker_create(context, &wp, &w);
    if (st == UCS_OK) {
        st = ucp_worker_get_address(w, &a, &len);
        if (st == UCS_OK) {
            ucp_ep_params_t p = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                               UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                                 .address = a,
                                 .err_mode = UCP_ERR_HANDLING_MODE_PEER};
            st = ucp_ep_create(w, &p, &ep);
            ucp_worker_release_address(w, a);
        }
        if (st == UCS_OK) {
            ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                     .flags = UCP_EP_CLOSE_FLAG_FORCE};
            ucs_status_ptr_t r = ucp_ep_close_nbx(ep, &p);
            while (UCS_PTR_IS_PTR(r) && ucp_request_check_status(r) == UCS_INPROGRESS) {
                ucp_worker_progress(w);
            }
            if (UCS_PTR_IS_PTR(r)) {
                ucp_request_free(r);
            }
        }
        ucp_worker_destroy(w);
    }
    if (st == UCS_OK) {
        return true;
    }
    const char *tls = bt_conf_env("UCX_TLS");
    snprintf(err, err_cap,
             "UCX_TLS=%.80s has no transport between hosts that notices a peer's death (%s): add "
             "tcp, or rc for RDMA, or leave UCX_TLS unset",
             tls != NULL ? tls : "tcp", ucs_status_string(st));
    return false;
}

bt_status_t bt_ucx_card_start(struct bt_wx *x, uint32_t card, bool wait, char *err, size_t err_cap)
{
    (void)wait;
    ucp_config_t *c;
    ucp_context_h context;
    ucs_status_t st = ucp_config_read(NULL, NULL, &c);
    if (st != UCS_OK) {
        snprintf(err, err_cap, "UCX configuration (UCX_* environment): %s", ucs_status_string(st));
        return BT_ERR_CONFIG;
    }
    if (!configure_all(x, card, c, err, err_cap)) {
        ucp_config_release(c);
        return BT_ERR_CONFIG;
    }
    /* AM only: there is no handler for a peer's forged put or get. */
    ucp_params_t p = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
                      .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                      .name = "baton"};
    st = ucp_init(&p, c, &context);
    ucp_config_release(c);
    if (st != UCS_OK) {
        snprintf(err, err_cap,
                 "UCX finds no transport on interface %s (%s); check kvstore.wire.listen and the "
                 "UCX_* environment",
                 x->conf.cards[card].ifname, ucs_status_string(st));
        return BT_ERR_CONFIG;
    }
    if (!can_connect(context, err, err_cap)) {
        ucp_cleanup(context);
        return BT_ERR_CONFIG;
    }
    x->ucx->contexts[card] = context;
    return BT_OK;
}

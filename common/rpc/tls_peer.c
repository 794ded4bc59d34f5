/* Checks peers' certificates: in the handshake, and again by role for each call.
 *
 * gRPC could check the chain itself, but then it reports only "certificate verify failed", neither
 * whose certificate it is nor why it failed. So gRPC only requires a certificate, and `verify`
 * below checks it with the same CA and gives the reason. It runs inside every handshake, before any
 * byte of a call is read or sent. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/map.h"
#include "common/log/log.h"
#include "common/rpc/tls_priv.h"

struct verifier {
    grpc_tls_certificate_verifier_external ext;
    struct bt_tls *tls;
    bool server;
    char *who;
};

bool bt_tls_uri_is(const char *uri, const char *cluster, const char *role, const char *node)
{
    const char *want[] = {cluster, role, node};
    if (strncmp(uri, BT_TLS_SCHEME, sizeof(BT_TLS_SCHEME) - 1) != 0) {
        return false;
    }
    uri += sizeof(BT_TLS_SCHEME) - 1;
    for (size_t i = 0; i < BT_ARRAY_LEN(want); i++) {
        size_t len = strcspn(uri, "/");
        bool last = i + 1 == BT_ARRAY_LEN(want);
        if (len == 0 || (uri[len] == '\0') != last ||
            (want[i] != NULL && (strlen(want[i]) != len || memcmp(want[i], uri, len) != 0))) {
            return false;
        }
        uri += len + (last ? 0 : 1);
    }
    return true;
}

/* Counts a refusal. Returns true if it is to be logged: the same text at most once a minute,
 * because a refused peer tries again every second. */
static bool note_refusal(struct bt_tls *t, const char *text)
{
    uint64_t hash = bt_hash64(text, strlen(text), 0), now = bt_mono_ns();
    size_t oldest = 0;
    bool fresh = true;
    pthread_mutex_lock(&t->lock);
    if (t->m_refused != NULL) {
        bt_metric_add(t->m_refused, 1);
    }
    for (size_t i = 0; i < BT_TLS_REFUSALS; i++) {
        if (t->refusals[i].hash == hash && now - t->refusals[i].at_ns < BT_TLS_REPEAT_NS &&
            t->refusals[i].at_ns != 0) {
            fresh = false;
        }
        if (t->refusals[i].at_ns < t->refusals[oldest].at_ns) {
            oldest = i;
        }
    }
    if (fresh) {
        t->refusals[oldest].hash = hash;
        t->refusals[oldest].at_ns = now;
    }
    pthread_mutex_unlock(&t->lock);
    return fresh;
}

/* ---- in the handshake ---- */

/* Splits "role" or "role/node". */
static bool uri_is_who(const char *uri, const char *cluster, const char *who)
{
    char role[64];
    const char *slash = who != NULL ? strchr(who, '/') : NULL;
    if (slash == NULL) {
        return bt_tls_uri_is(uri, cluster, who, NULL);
    }
    snprintf(role, sizeof(role), "%.*s", (int)(slash - who), who);
    return bt_tls_uri_is(uri, cluster, role, slash + 1);
}

static bool check_peer(const struct verifier *v,
                       const grpc_tls_custom_verification_check_request *r, struct bt_cert *c,
                       char *why, size_t cap)
{
    const char *pem = r->peer_info.peer_cert;
    if (pem == NULL || pem[0] == '\0' || bt_cert_read(pem, c, why, cap) != BT_OK) {
        snprintf(why, cap, "it sent no certificate");
        return false;
    }
    pthread_mutex_lock(&v->tls->lock); /* the CA may be replaced meanwhile */
    bt_status_t st = bt_cert_verify(v->tls->ca, pem, r->peer_info.peer_cert_full_chain,
                                    v->server ? BT_CERT_CLIENT : BT_CERT_SERVER,
                                    bt_real_ns() / 1000000000, why, cap);
    bool revoked = bt_revoked_has(v->tls->revoked, c);
    pthread_mutex_unlock(&v->tls->lock);
    if (st != BT_OK) {
        return false;
    }
    if (revoked) {
        snprintf(why, cap, "its certificate was revoked");
        return false;
    }
    for (uint32_t i = 0; i < c->n_uris; i++) {
        if (uri_is_who(c->uris[i], v->tls->cluster, v->who)) {
            return true;
        }
    }
    snprintf(why, cap, "its certificate does not name " BT_TLS_SCHEME "%s/%s", v->tls->cluster,
             v->who != NULL ? v->who : "...");
    return false;
}

static int verify(void *arg, grpc_tls_custom_verification_check_request *r,
                  grpc_tls_on_custom_verification_check_done_cb done, void *done_arg,
                  grpc_status_code *status, char **details)
{
    const struct verifier *v = arg;
    struct bt_cert c = {.subject = "a peer without a certificate"};
    char why[300], text[700];
    (void)done;
    (void)done_arg; /* the result is given at once */
    if (check_peer(v, r, &c, why, sizeof(why))) {
        *status = GRPC_STATUS_OK;
        return 1;
    }
    const char *name = c.n_uris > 0 ? c.uris[0] : c.subject;
    snprintf(text, sizeof(text), "the connection of %s was refused: %s", name, why);
    if (note_refusal(v->tls, text)) {
        BT_WARN("tls_refused", "peer=%s dir=%s target=%s why=%s remedy=%s", name,
                v->server ? "in" : "out", r->target_name != NULL ? r->target_name : "-", why,
                "give that host a certificate of this cluster's CA that names its role and node "
                "(docs/OPERATING.md)");
    }
    *status = GRPC_STATUS_UNAUTHENTICATED;
    *details = gpr_malloc(strlen(text) + 1);
    memcpy(*details, text, strlen(text) + 1);
    return 1;
}

static void cancel(void *arg, grpc_tls_custom_verification_check_request *r)
{
    (void)arg;
    (void)r; /* no check is ever pending: verify answers at once */
}

static void destruct(void *arg)
{
    struct verifier *v = arg;
    bt_tls_unref(v->tls);
    free(v->who);
    free(v);
}

static grpc_tls_credentials_options *make_options(struct bt_tls *t, bool server, const char *who)
{
    grpc_tls_credentials_options *o = grpc_tls_credentials_options_create();
    grpc_tls_credentials_options_set_certificate_provider(o, t->provider);
    grpc_tls_credentials_options_watch_root_certs(o);
    grpc_tls_credentials_options_watch_identity_key_cert_pairs(o);
    if (t->host_names) {
        return o; /* gRPC's own check of the chain and of the dialed name */
    }
    struct verifier *v = bt_calloc(1, sizeof(*v));
    v->ext = (grpc_tls_certificate_verifier_external){
        .user_data = v, .verify = verify, .cancel = cancel, .destruct = destruct};
    v->tls = t;
    v->server = server;
    v->who = who != NULL ? bt_strdup(who) : NULL;
    atomic_fetch_add(&t->refs, 1);
    grpc_tls_certificate_verifier *verifier =
        grpc_tls_certificate_verifier_external_create(&v->ext);
    grpc_tls_credentials_options_set_certificate_verifier(o, verifier);
    grpc_tls_certificate_verifier_release(verifier);
    if (server) {
        grpc_tls_credentials_options_set_cert_request_type(
            o, GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_BUT_DONT_VERIFY);
    } else {
        grpc_tls_credentials_options_set_verify_server_cert(o, 0);
        /* Certificates name roles, not hosts. */
        grpc_tls_credentials_options_set_check_call_host(o, 0);
    }
    return o;
}

grpc_channel_credentials *bt_tls_channel_credentials(struct bt_tls *t, const char *who)
{
    return t == NULL ? grpc_insecure_credentials_create()
                     : grpc_tls_credentials_create(make_options(t, false, who));
}

grpc_server_credentials *bt_tls_server_credentials(struct bt_tls *t)
{
    return t == NULL ? grpc_insecure_server_credentials_create()
                     : grpc_tls_server_credentials_create(make_options(t, true, NULL));
}

/* ---- calls ---- */

bool bt_tls_call_is(struct bt_tls *t, grpc_call *call, const char *role, const char *node)
{
    if (t == NULL) {
        return true;
    }
    grpc_auth_context *ctx = grpc_call_auth_context(call);
    grpc_auth_property_iterator it =
        grpc_auth_context_find_properties_by_name(ctx, GRPC_PEER_URI_PROPERTY_NAME);
    const grpc_auth_property *p;
    bool is = false;
    while (!is && (p = grpc_auth_property_iterator_next(&it)) != NULL) {
        is = strlen(p->value) == p->value_length && bt_tls_uri_is(p->value, t->cluster, role, node);
    }
    grpc_auth_context_release(ctx);
    return is;
}

/* Reads the certificate of the other end of a call; false: none is known (yet). */
static bool read_peer(grpc_call *call, struct bt_cert *c)
{
    char why[100];
    grpc_auth_context *ctx = grpc_call_auth_context(call);
    if (ctx == NULL) {
        return false;
    }
    grpc_auth_property_iterator it =
        grpc_auth_context_find_properties_by_name(ctx, GRPC_X509_PEM_CERT_PROPERTY_NAME);
    const grpc_auth_property *p = grpc_auth_property_iterator_next(&it);
    bool is = p != NULL && bt_cert_read(p->value, c, why, sizeof(why)) == BT_OK;
    grpc_auth_context_release(ctx);
    return is;
}

bool bt_tls_call_counts(struct bt_tls *t, grpc_call *call, char *text, size_t cap)
{
    struct bt_cert c;
    if (t == NULL || t->host_names || !read_peer(call, &c)) {
        return true;
    }
    bool over = bt_real_ns() / 1000000000 >= c.not_after_s;
    pthread_mutex_lock(&t->lock);
    bool revoked = bt_revoked_has(t->revoked, &c);
    pthread_mutex_unlock(&t->lock);
    if (!over && !revoked) {
        return true;
    }
    const char *name = c.n_uris > 0 ? c.uris[0] : c.subject;
    snprintf(text, cap, "the certificate of %s %s", name, revoked ? "was revoked" : "has expired");
    if (note_refusal(t, text)) {
        BT_WARN(
            "tls_refused", "peer=%s why=%s remedy=%s", name, text,
            "its calls and streams were ended; give it a new certificate if it may connect again");
    }
    return false;
}

void bt_tls_call_name(grpc_call *call, char *text, size_t cap)
{
    grpc_auth_context *ctx = grpc_call_auth_context(call);
    grpc_auth_property_iterator it =
        grpc_auth_context_find_properties_by_name(ctx, GRPC_PEER_URI_PROPERTY_NAME);
    const grpc_auth_property *p = grpc_auth_property_iterator_next(&it);
    snprintf(text, cap, "%s", p != NULL ? p->value : "a peer without a name in its certificate");
    grpc_auth_context_release(ctx);
}

bool bt_tls_may_call(struct bt_tls *t, grpc_call *call, const char *method, const char *role,
                     char *text, size_t cap)
{
    char name[BT_CERT_URI_MAX];
    if (!bt_tls_call_counts(t, call, text, cap)) {
        return false;
    }
    if (bt_tls_call_is(t, call, role, NULL)) {
        return true;
    }
    bt_tls_call_name(call, name, sizeof(name));
    snprintf(text, cap, "%s may not call %s; only %s may", name, method,
             role != NULL ? role : "members of this cluster");
    if (note_refusal(t, text)) {
        char *peer = grpc_call_get_peer(call);
        BT_WARN("tls_refused", "peer=%s dir=in addr=%s why=%s", name, peer, text);
        gpr_free(peer);
    }
    return false;
}

bool bt_tls_log(const char *file, const char *message)
{
    static _Atomic uint64_t told_ns[2];
    static const char *const known[][2] = {
        {"peer did not return a certificate",
         "a peer connected without a certificate: a daemon without cluster.tls.cert, or a host "
         "outside the cluster"},
        {"wrong version number",
         "the other side does not use TLS: set cluster.tls.* in all daemons, or in none"}};
    if (strstr(file, "ssl_transport_security") == NULL) {
        return false;
    }
    if (strstr(message, "No match found for server name") != NULL) {
        return true; /* the server's certificate names a role, so do not compare it with the host
                        name */
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(known); i++) {
        if (strstr(message, known[i][0]) != NULL) {
            uint64_t now = bt_mono_ns(), last = atomic_load(&told_ns[i]);
            if ((last == 0 || now - last > BT_TLS_REPEAT_NS) &&
                atomic_compare_exchange_strong(&told_ns[i], &last, now)) {
                BT_WARN("tls_refused", "peer=unknown why=%s", known[i][1]);
            }
            return true;
        }
    }
    return false;
}

/* The files of a bt_tls: reads and checks them, and watches them for changes. gRPC reads
 * certificate and key itself, from the same files and at the same interval. tls_peer.c checks the
 * peers' certificates. Loop's thread, except as struct bt_tls says. */
#include "common/rpc/tls.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/file.h"
#include "common/conf/conf.h"
#include "common/log/log.h"
#include "common/rpc/tls_priv.h"

#define FILE_MAX    (1u << 20)
#define HOW_TO_MAKE "docs/OPERATING.md tells how to make one"

/* The result of reading the files once. */
struct reading {
    struct bt_cert_ca *ca;
    struct bt_revoked *revoked;
    struct bt_cert own;
};

static bt_status_t fault(const struct bt_tls *t, const char *which, const char *file, char *err,
                         size_t cap, const char *fmt, ...) __attribute__((format(printf, 6, 7)));

static bt_status_t fault(const struct bt_tls *t, const char *which, const char *file, char *err,
                         size_t cap, const char *fmt, ...)
{
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    snprintf(err, cap, "%s.%s: %s: %s", t->key, which, file, what);
    return BT_ERR_CONFIG;
}

/* The whole file as text, heap; NULL with err. */
static char *read_text(const struct bt_tls *t, const char *which, const char *file, char *err,
                       size_t cap)
{
    struct stat st;
    const char *why;
    FILE *f = bt_file_open(file, &st, &why);
    if (f == NULL) {
        (void)fault(t, which, file, err, cap, "it cannot be read: %s", why);
        return NULL;
    }
    char *text = bt_malloc(FILE_MAX + 1);
    size_t n = fread(text, 1, FILE_MAX, f);
    bool may_be_empty = file == t->files[BT_TLS_REVOKED];
    (void)fclose(f);
    text[n] = '\0';
    if ((n == 0 && !may_be_empty) || n == FILE_MAX || strlen(text) != n) {
        (void)fault(t, which, file, err, cap, "%s",
                    may_be_empty ? "it is not a text file of less than 1 MiB"
                                 : "it is not a PEM file");
        free(text);
        return NULL;
    }
    return text;
}

static bt_status_t check_key(const struct bt_tls *t, const char *cert, char *err, size_t cap)
{
    struct stat st;
    char why[200];
    if (stat(t->files[BT_TLS_KEY], &st) == 0 && !bt_conf_secret_private(&st, why, sizeof(why))) {
        return fault(t, "key", t->files[BT_TLS_KEY], err, cap, "%s", why);
    }
    char *key = read_text(t, "key", t->files[BT_TLS_KEY], err, cap);
    if (key == NULL) {
        return BT_ERR_CONFIG;
    }
    bt_status_t st2 = bt_cert_key_fits(cert, key, why, sizeof(why));
    explicit_bzero(key, strlen(key));
    free(key);
    return st2 == BT_OK ? BT_OK
                        : fault(t, "key", t->files[BT_TLS_KEY], err, cap,
                                "%s (%s); give a key and a certificate that belong together", why,
                                t->files[BT_TLS_CERT]);
}

static bt_status_t check_names(struct bt_tls *t, const struct bt_cert *own, char *err, size_t cap)
{
    for (uint32_t i = 0; i < own->n_uris; i++) {
        const char *uri = own->uris[i], *rest = uri + sizeof(BT_TLS_SCHEME) - 1;
        if (t->cluster == NULL && strncmp(uri, BT_TLS_SCHEME, sizeof(BT_TLS_SCHEME) - 1) == 0 &&
            strchr(rest, '/') != NULL) {
            t->cluster = bt_sprintf("%.*s", (int)(strchr(rest, '/') - rest), rest);
        }
        if (t->cluster != NULL && bt_tls_uri_is(uri, t->cluster, t->role, t->node)) {
            return BT_OK;
        }
    }
    return fault(t, "cert", t->files[BT_TLS_CERT], err, cap,
                 "its subjectAltName must have URI:" BT_TLS_SCHEME "%s/%s/%s and has %s; %s",
                 t->cluster != NULL ? t->cluster : "CLUSTER", t->role != NULL ? t->role : "ROLE",
                 t->node != NULL ? t->node : "NODE", own->n_uris > 0 ? own->uris[0] : "none",
                 HOW_TO_MAKE);
}

static bt_status_t check_cert(struct bt_tls *t, struct reading *r, const char *cert, char *err,
                              size_t cap)
{
    char why[200];
    const char *file = t->files[BT_TLS_CERT];
    uint64_t now_s = bt_real_ns() / 1000000000;
    bt_status_t st = bt_cert_read(cert, &r->own, why, sizeof(why));
    if (st != BT_OK) {
        return fault(t, "cert", file, err, cap, "%s", why);
    }
    /* The CA for such servers may not be the CA of this process's own certificate. */
    if (t->host_names) {
        return r->own.not_after_s > now_s
                   ? BT_OK
                   : fault(t, "cert", file, err, cap, "it expired; %s", HOW_TO_MAKE);
    }
    st = bt_cert_verify(r->ca, cert, NULL, BT_CERT_CLIENT, now_s, why, sizeof(why));
    if (st == BT_OK) {
        st = bt_cert_verify(r->ca, cert, NULL, BT_CERT_SERVER, now_s, why, sizeof(why));
    }
    if (st != BT_OK) {
        return fault(t, "cert", file, err, cap, "%s (%s.ca is %s); %s", why, t->key,
                     t->files[BT_TLS_CA], HOW_TO_MAKE);
    }
    return check_names(t, &r->own, err, cap);
}

static bt_status_t read_revoked(const struct bt_tls *t, struct reading *r, char *err, size_t cap)
{
    char why[200];
    const char *file = t->files[BT_TLS_REVOKED];
    if (file == NULL) {
        return BT_OK;
    }
    char *text = read_text(t, "revoked", file, err, cap);
    if (text == NULL) {
        return BT_ERR_CONFIG;
    }
    bt_status_t st = bt_revoked_parse(text, &r->revoked, why, sizeof(why));
    free(text);
    return st == BT_OK ? BT_OK : fault(t, "revoked", file, err, cap, "%s", why);
}

static bt_status_t read_all(struct bt_tls *t, struct reading *r, char *err, size_t cap)
{
    char why[200];
    char *text = read_text(t, "ca", t->files[BT_TLS_CA], err, cap);
    if (text == NULL) {
        return BT_ERR_CONFIG;
    }
    bt_status_t st = bt_cert_ca_create(text, &r->ca, why, sizeof(why));
    free(text);
    if (st != BT_OK) {
        return fault(t, "ca", t->files[BT_TLS_CA], err, cap, "%s", why);
    }
    text = read_text(t, "cert", t->files[BT_TLS_CERT], err, cap);
    if (text == NULL || check_cert(t, r, text, err, cap) != BT_OK ||
        check_key(t, text, err, cap) != BT_OK || read_revoked(t, r, err, cap) != BT_OK) {
        bt_cert_ca_destroy(r->ca);
        free(text);
        return BT_ERR_CONFIG;
    }
    free(text);
    return BT_OK;
}

/* ---- watching ---- */

static void take_stamps(const struct bt_tls *t, struct bt_conf_stamp to[BT_TLS_FILES])
{
    for (int i = 0; i < BT_TLS_FILES; i++) {
        bt_conf_stamp_read(t->files[i], &to[i]);
    }
}

static void on_look(void *arg)
{
    struct bt_tls *t = arg;
    struct bt_conf_stamp now[BT_TLS_FILES];
    struct reading r = {0};
    char err[600];
    bt_conf_expiry_warn(&t->expiry, t->files[BT_TLS_CERT], t->own.not_after_s);
    take_stamps(t, now);
    if (memcmp(now, t->stamps, sizeof(now)) == 0) {
        return;
    }
    memcpy(t->stamps, now, sizeof(now));
    if (read_all(t, &r, err, sizeof(err)) != BT_OK) {
        BT_WARN("tls_not_renewed", "why=%s remedy=%s", err,
                "correct it: until then new connections may fail");
        return;
    }
    pthread_mutex_lock(&t->lock);
    struct bt_cert_ca *old = t->ca;
    struct bt_revoked *old_revoked = t->revoked;
    t->ca = r.ca;
    t->revoked = r.revoked;
    t->own = r.own;
    if (t->m_not_after != NULL) {
        bt_metric_set(t->m_not_after, (double)t->own.not_after_s);
    }
    pthread_mutex_unlock(&t->lock);
    bt_cert_ca_destroy(old);
    free(old_revoked);
    t->expiry = (struct bt_conf_expiry){0};
    BT_INFO("tls_renewed", "file=%s not_after_s=%llu", t->files[BT_TLS_CERT],
            (unsigned long long)t->own.not_after_s);
    bt_conf_expiry_warn(&t->expiry, t->files[BT_TLS_CERT], t->own.not_after_s);
}

void bt_tls_watch(struct bt_tls *t, struct bt_loop *loop, struct bt_metrics *metrics)
{
    t->loop = loop;
    if (metrics != NULL) {
        char *label = bt_metrics_label("use", t->key);
        pthread_mutex_lock(&t->lock);
        t->m_not_after =
            bt_metrics_gauge(metrics, "baton_tls_certificate_not_after_seconds", label);
        t->m_refused = bt_metrics_counter(metrics, "baton_tls_peers_refused_total", label);
        bt_metric_set(t->m_not_after, (double)t->own.not_after_s);
        pthread_mutex_unlock(&t->lock);
        free(label);
    }
    bt_conf_expiry_warn(&t->expiry, t->files[BT_TLS_CERT], t->own.not_after_s);
    bt_timer_start(loop, &t->timer, BT_TLS_LOOK_S * 1000, BT_TLS_LOOK_S * 1000, on_look, t);
}

/* ---- life ---- */

bt_status_t bt_tls_create(const struct bt_tls_config *conf, struct bt_tls **tls_p, char *err,
                          size_t err_cap)
{
    struct reading r = {0};
    struct bt_tls *t = bt_calloc(1, sizeof(*t));
    t->refs = 1;
    t->host_names = conf->host_names;
    t->key = bt_strdup(conf->key);
    t->cluster = conf->cluster != NULL ? bt_strdup(conf->cluster) : NULL;
    t->role = conf->role != NULL ? bt_strdup(conf->role) : NULL;
    t->node = conf->node != NULL ? bt_strdup(conf->node) : NULL;
    t->files[BT_TLS_CA] = bt_strdup(conf->ca);
    t->files[BT_TLS_CERT] = bt_strdup(conf->cert);
    t->files[BT_TLS_KEY] = bt_strdup(conf->private_key);
    t->files[BT_TLS_REVOKED] = conf->revoked != NULL ? bt_strdup(conf->revoked) : NULL;
    pthread_mutex_init(&t->lock, NULL);
    /* Before reading, so that files that change meanwhile are read again. */
    take_stamps(t, t->stamps);
    if (read_all(t, &r, err, err_cap) != BT_OK) {
        bt_tls_unref(t);
        return BT_ERR_CONFIG;
    }
    t->ca = r.ca;
    t->revoked = r.revoked;
    t->own = r.own;
    sigset_t all, old;
    sigfillset(&all); /* its thread must not take the loop's signals */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bt_rpc_grpc_init();
    t->provider = grpc_tls_certificate_provider_file_watcher_create(
        t->files[BT_TLS_KEY], t->files[BT_TLS_CERT], t->files[BT_TLS_CA], BT_TLS_LOOK_S);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    *tls_p = t;
    return BT_OK;
}

void bt_tls_unref(struct bt_tls *t)
{
    if (atomic_fetch_sub(&t->refs, 1) > 1) {
        return;
    }
    bt_cert_ca_destroy(t->ca);
    free(t->revoked);
    for (int i = 0; i < BT_TLS_FILES; i++) {
        free(t->files[i]);
    }
    free(t->key);
    free(t->cluster);
    free(t->role);
    free(t->node);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

int64_t bt_tls_not_after_s(struct bt_tls *t)
{
    pthread_mutex_lock(&t->lock);
    int64_t s = (int64_t)t->own.not_after_s;
    pthread_mutex_unlock(&t->lock);
    return s;
}

void bt_tls_release(struct bt_tls *t)
{
    if (t == NULL) {
        return;
    }
    if (t->loop != NULL) {
        bt_timer_stop(t->loop, &t->timer);
    }
    pthread_mutex_lock(&t->lock);
    t->m_not_after = t->m_refused = NULL; /* the registry may be destroyed before gRPC's last
                                             channel */
    pthread_mutex_unlock(&t->lock);
    grpc_tls_certificate_provider_release(t->provider);
    t->provider = NULL;
    bt_rpc_grpc_shutdown();
    bt_tls_unref(t);
}

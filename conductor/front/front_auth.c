/* Authentication: compares the key of each request with the file of keys, and counts and logs
 * refused requests. A key is checked when the header of a request has arrived. An answer that has
 * begun goes on to its end, even if its key expires or is revoked meanwhile. Loop thread. */
#include <stdio.h>
#include <string.h>

#include "conductor/front/front_priv.h"

#define LOOK_MS 2000 /* time between two checks whether the file has changed */
/* time between two log lines about refused keys, of which there may be thousands */
#define SAY_NS 10000000000ull

static const char *const refusals[FRONT_REFUSALS] = {"no_key", "unknown_key", "expired_key",
                                                     "revoked_key", "missing_scope"};

static void on_look(void *arg)
{
    struct bt_front *f = arg;
    bt_front_keys_look(f->keys);
}

bt_status_t bt_front_auth_start(struct bt_front *f, const char *path, char *err, size_t err_cap)
{
    bt_status_t st = bt_front_keys_load(path, &f->keys, err, err_cap);
    if (st == BT_OK) {
        bt_front_keys_say(f->keys);
        bt_timer_start(f->loop, &f->auth.look, LOOK_MS, LOOK_MS, on_look, f);
    }
    return st;
}

void bt_front_auth_stop(struct bt_front *f)
{
    bt_timer_stop(f->loop, &f->auth.look);
    bt_front_keys_destroy(f->keys);
    f->keys = NULL;
}

void bt_front_auth_metrics(struct bt_front *f)
{
    for (size_t i = 0; i < FRONT_REFUSALS; i++) {
        char labels[48];
        snprintf(labels, sizeof(labels), "reason=\"%s\"", refusals[i]);
        f->m.keys_refused[i] =
            bt_metrics_counter(f->metrics, "baton_http_keys_refused_total", labels);
    }
}

static void refused(struct bt_front *f, const char *reason, const char *client)
{
    for (size_t i = 0; i < FRONT_REFUSALS; i++) {
        if (strcmp(refusals[i], reason) == 0) {
            bt_metric_add(f->m.keys_refused[i], 1);
        }
    }
    uint32_t times = bt_log_due(&f->auth.refused, bt_mono_ns(), SAY_NS);
    if (times > 0) {
        BT_WARN("key_refused", "reason=%s client=%s times=%u", reason, client, times);
    }
}

bool bt_front_auth(struct bt_front *f, struct bt_http_req *req, uint32_t scope,
                   struct bt_front_note *note, struct bt_front_error *e)
{
    if (f->keys == NULL) {
        /* With TLS the browser itself compares the name with the certificate. */
        return scope != BT_KEYS_ADMIN || f->tls != NULL || bt_front_asked_by_own_name(req) ||
               bt_front_fail(e, 403, NULL, NULL,
                             "without API keys, %.64s answers only who asks for this host by its "
                             "address, its host name or localhost; use one of these, or set "
                             "conductor.api_keys_file",
                             bt_http_path(req));
    }
    const struct bt_front_credentials c = {.authorization = bt_http_header(req, "authorization"),
                                           .x_api_key = bt_http_header(req, "x-api-key"),
                                           .api_key = bt_http_header(req, "api-key")};
    const struct bt_key *key = bt_front_keys_check(f->keys, &c, scope, e);
    if (key == NULL) {
        char peer[BT_HTTP_PEER_LEN];
        bt_http_peer(req, peer);
        refused(f, e->refusal, peer);
        return false;
    }
    snprintf(note->tenant, sizeof(note->tenant), "%s", key->tenant);
    snprintf(note->key, sizeof(note->key), "%s", key->id);
    return true;
}

void bt_front_auth_challenge(struct bt_http_req *req, const struct bt_front_error *e)
{
    if (e->scope != 0) {
        struct bt_buf text;
        bt_buf_init(&text);
        bt_buf_puts(&text, "Bearer error=\"insufficient_scope\", scope=\"");
        bt_keys_scopes_put(e->scope, &text);
        bt_buf_puts(&text, "\"");
        bt_http_add_header(req, "WWW-Authenticate", text.data);
        bt_buf_cleanup(&text);
    } else {
        bt_http_add_header(req, "WWW-Authenticate", "Bearer");
    }
}

bool bt_front_admin_key(struct bt_front *f, const char *authorization, char id[33], bool *known_p,
                        char *why, size_t cap)
{
    struct bt_front_error e = {0};
    const struct bt_front_credentials c = {.authorization = authorization};
    const struct bt_key *key = bt_front_keys_check(f->keys, &c, BT_KEYS_ADMIN, &e);
    if (key != NULL) {
        snprintf(id, 33, "%s", key->id);
        return true;
    }
    refused(f, e.refusal, "grpc");
    *known_p = e.http == 403;
    if (authorization == NULL) {
        snprintf(why, cap,
                 "this conductor asks for an API key with the scope admin: give its file with "
                 "--key-file, or the key in BATON_API_KEY (batonctl key add makes one)");
    } else {
        snprintf(why, cap, "%s", e.message);
    }
    return false;
}

/* The access log: one line ev=access when an HTTP response ends, for all responses or for a sample
 * of them. A line names the tenant and the key's id, but never contains a key or a query string.
 * Loop thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log/log.h"
#include "conductor/front/front_priv.h"

bt_status_t bt_front_access_share(const char *text, double *share_p, char *err, size_t err_cap)
{
    char *end = NULL;
    if (strcmp(text, "off") == 0) {
        *share_p = 0;
        return BT_OK;
    }
    if (strcmp(text, "all") == 0) {
        *share_p = 1;
        return BT_OK;
    }
    double share = strtod(text, &end);
    if (end == text || *end != '\0' || !(share > 0 && share < 1)) {
        snprintf(err, err_cap,
                 "conductor.access_log: '%s' is not off, all, or a share above 0 and below 1 "
                 "(0.01: one response in a hundred)",
                 text);
        return BT_ERR_CONFIG;
    }
    *share_p = share;
    return BT_OK;
}

struct bt_front_note *bt_front_access_begin(struct bt_http_req *req)
{
    struct bt_front_note *note = bt_calloc(1, sizeof(*note));
    bt_http_set_note(req, note);
    return note;
}

struct bt_front_note *bt_front_note(const struct bt_http_req *req)
{
    return bt_http_note(req);
}

/* Uses a random number for each response (xorshift64*). If it took every n-th response, a probe
 * every second might always or never be in the sample. Server errors are always logged. */
static bool wanted(struct bt_front *f, int status)
{
    if (f->access_share <= 0) {
        return false;
    }
    uint64_t x = f->access_random | (f->access_random == 0);
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    f->access_random = x;
    double draw = (double)((x * 2685821657736338717ull) >> 11) * 0x1p-53;
    return status >= 500 || draw < f->access_share;
}

static const char *none_if_empty(const char *s)
{
    return s[0] != '\0' ? s : NULL;
}

void bt_front_access_ended(void *arg, const struct bt_http_record *r)
{
    static const char *const endings[] = {
        [BT_HTTP_COMPLETE] = "complete", [BT_HTTP_GONE] = "client_gone", [BT_HTTP_CUT] = "cut_off"};
    struct bt_front *f = arg;
    struct bt_front_note *note = r->note;
    static const struct bt_front_note unknown;
    const struct bt_front_note *n = note != NULL ? note : &unknown;
    if (!wanted(f, r->status)) {
        free(note);
        return;
    }
#define FIELDS                                                                                     \
    "id=%s method=%s path=%s status=%d end=%s bytes_in=%llu bytes_out=%llu duration_ms=%.3f "      \
    "first_byte_ms=%.3f client=%s tenant=%s key=%s cert=%s"
#define VALUES                                                                                     \
    r->request_id, r->method, r->path, r->status, endings[r->ending],                              \
        (unsigned long long)r->bytes_in, (unsigned long long)r->bytes_out,                         \
        (double)r->duration_ns / 1e6, (double)r->first_ns / 1e6, none_if_empty(r->client),         \
        none_if_empty(n->tenant), none_if_empty(n->key), r->certificate
    if (n->generation[0] != '\0') {
        BT_INFO("access",
                FIELDS " req=%s model=%s prompt_tokens=%llu completion_tokens=%llu grammar=%s",
                VALUES, n->generation, f->model_id, (unsigned long long)n->prompt_tokens,
                (unsigned long long)n->completion_tokens, n->grammar);
    } else {
        BT_INFO("access", FIELDS, VALUES);
    }
    free(note);
}

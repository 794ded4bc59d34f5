/* The headers of one generation: objectives, priority, additional parts of the answer. Loop
 * thread. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "conductor/front/front_priv.h"

#define OBJECTIVE_MAX_MS 86400000.0

/* *text_p NULL: absent. */
static bool header(struct bt_http_req *req, const char *name, const char **text_p,
                   struct bt_front_error *e)
{
    *text_p = bt_http_header(req, name);
    if (bt_http_header_ambiguous(req, name)) {
        return bt_front_fail(e, 400, NULL, NULL,
                             "the header %s occurs more than once with different values; send one",
                             name);
    }
    return true;
}

static bool milliseconds(struct bt_http_req *req, const char *name, double *ms_p,
                         struct bt_front_error *e)
{
    const char *text;
    if (!header(req, name, &text, e)) {
        return false;
    }
    if (text == NULL) {
        return true;
    }
    char *end;
    double v = strtod(text, &end);
    if (strspn(text, "0123456789.") != strlen(text) || end == text || *end != '\0' ||
        !(v > 0 && v <= OBJECTIVE_MAX_MS)) {
        return bt_front_fail(
            e, 400, NULL, NULL,
            "the header %s is '%.40s': give milliseconds, above 0 and at most 86400000", name,
            text);
    }
    *ms_p = v;
    return true;
}

static bool flag(struct bt_http_req *req, const char *name, bool *v_p, struct bt_front_error *e)
{
    const char *text;
    if (!header(req, name, &text, e)) {
        return false;
    }
    *v_p = text != NULL && strcmp(text, "1") == 0;
    if (text != NULL && !*v_p && strcmp(text, "0") != 0) {
        return bt_front_fail(e, 400, NULL, NULL, "the header %s is '%.40s': give 1 or 0", name,
                             text);
    }
    return true;
}

static bool whole(struct bt_http_req *req, const char *name, bool *has_p, int32_t *v_p,
                  struct bt_front_error *e)
{
    const char *text;
    if (!header(req, name, &text, e)) {
        return false;
    }
    if (text == NULL) {
        return true;
    }
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (strspn(text, "-0123456789") != strlen(text) || end == text || *end != '\0' || errno != 0 ||
        v < INT32_MIN || v > INT32_MAX) {
        return bt_front_fail(e, 400, NULL, NULL,
                             "the header %s is '%.40s': give a whole number from %d to %d; "
                             "requests with a smaller one go first",
                             name, text, INT32_MIN, INT32_MAX);
    }
    *has_p = true;
    *v_p = (int32_t)v;
    return true;
}

void bt_front_headers_read(struct bt_http_req *req, struct bt_front_headers *h)
{
    *h = (struct bt_front_headers){0};
    struct bt_front_error *e = &h->wrong;
    const char *timings;
    if (!header(req, "x-baton-timings", &timings, e)) {
        return;
    }
    const char *parent = bt_http_header(req, "traceparent");
    if (parent != NULL && !bt_http_header_ambiguous(req, "traceparent")) {
        snprintf(h->traceparent, sizeof(h->traceparent), "%s", parent);
    }
    h->timings = timings != NULL && strcmp(timings, "1") == 0;
    h->valid = flag(req, "x-baton-plan", &h->plan, e) &&
               whole(req, "x-priority", &h->has_priority, &h->priority, e) &&
               milliseconds(req, "x-slo-ttft-ms", &h->slo_ttft_ms, e) &&
               milliseconds(req, "x-slo-tbt-ms", &h->slo_tbt_ms, e);
}

/* Writes a time as 12.34, or as - if it is unknown. */
static void put_ms(struct bt_buf *out, const char *name, double ms)
{
    if (ms < 0) {
        bt_buf_printf(out, "; %s=-", name);
    } else {
        bt_buf_printf(out, "; %s=%.2f", name, ms);
    }
}

void bt_front_plan_header(struct bt_http_req *req, const char *id, const struct bt_gen_plan *p)
{
    struct bt_buf b;
    bt_buf_init(&b);
    bt_buf_printf(&b, "id=%s; prefill=%s; decode=%s; reason=%s; cached_tokens=%u; fetch_tokens=%u",
                  id, p->prefill[0] != '\0' ? p->prefill : "-",
                  p->decode[0] != '\0' ? p->decode : "-", p->reason[0] != '\0' ? p->reason : "-",
                  p->cached_tokens, p->fetch_tokens);
    put_ms(&b, "queue_ms", p->queue_ms);
    put_ms(&b, "prefill_ms", p->prefill_ms);
    put_ms(&b, "ttft_ms", p->ttft_ms);
    put_ms(&b, "tbt_ms", p->tbt_ms);
    bt_http_add_header(req, "x-baton-plan", b.data);
    bt_buf_cleanup(&b);
}

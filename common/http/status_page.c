/* /health and /metrics on common/http. Loop thread. */
#include "common/http/status_page.h"

#include <stdlib.h>
#include <string.h>

#include "common/http/http.h"

struct bt_status_page {
    struct bt_http *http;
    struct bt_metrics *metrics;
    bt_health_fn health;
    void *arg;
};

static void respond_text(struct bt_http_req *req, int status, const char *text)
{
    bt_http_respond(req, status, "text/plain; charset=utf-8", text, strlen(text));
}

static void on_request(void *arg, struct bt_http_req *req)
{
    struct bt_status_page *page = arg;
    const char *path = bt_http_path(req), *method = bt_http_method(req);
    bool health = strcmp(path, "/health") == 0;
    if (!health && strcmp(path, "/metrics") != 0) {
        respond_text(req, 404, "not found; this daemon has /health and /metrics\n");
    } else if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0) {
        bt_http_add_header(req, "Allow", "GET, HEAD");
        respond_text(req, 405, "method not allowed\n");
    } else if (health) {
        const char *why = page->health != NULL ? page->health(page->arg) : NULL;
        respond_text(req, why == NULL ? 200 : 503, why == NULL ? "ok" : why);
    } else {
        struct bt_buf out;
        bt_buf_init(&out);
        bt_metrics_render(page->metrics, &out);
        bt_http_respond(req, 200, "text/plain; version=0.0.4", out.data, out.len);
        bt_buf_cleanup(&out);
    }
}

bt_status_t bt_status_page_create(struct bt_loop *loop, const char *listen,
                                  struct bt_metrics *metrics, bt_health_fn health, void *arg,
                                  struct bt_status_page **page_p, int *port_p)
{
    struct bt_http_options o;
    bt_http_options_default(&o);
    o.listen = listen;
    o.body_max = 4096;
    o.conns_max = 64; /* enough for a scraper and a few people */
    o.strangers_max = o.conns_max / 2;
    struct bt_status_page *page = bt_calloc(1, sizeof(*page));
    page->metrics = metrics;
    page->health = health;
    page->arg = arg;
    bt_status_t st = bt_http_create(loop, &o, on_request, page, &page->http, port_p);
    if (st != BT_OK) {
        free(page);
        return st;
    }
    *page_p = page;
    return BT_OK;
}

void bt_status_page_destroy(struct bt_status_page *page)
{
    if (page != NULL) {
        bt_http_destroy(page->http);
        free(page);
    }
}

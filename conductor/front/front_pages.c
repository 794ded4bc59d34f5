/* Pages for people: the home page, the API's reference, and the cluster page with its files, which
 * the build puts into the program. A page loads nothing from elsewhere, and its policy (CSP) makes
 * browsers refuse any script that is not one of these files. Loop thread. */
#include <string.h>

#include "conductor/front/front_priv.h"
#include "conductor/front/front_reference.h"

#define HTML "text/html; charset=utf-8"

static const struct file {
    const char *name, *type, *data;
    size_t len;
} files[] = {
#define FILE_ROW(name, type, data) {name, type, data, sizeof(data) - 1},
#include "ui_files.def"
#undef FILE_ROW
};

/* Answers with a part of a page. Nobody may frame it or guess another type for it. */
static void respond(struct bt_front *f, struct bt_http_req *req, const char *type,
                    const struct bt_buf *body)
{
    bt_http_add_header(req, "Content-Security-Policy",
                       "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
                       "connect-src 'self'; base-uri 'none'; form-action 'none'; "
                       "frame-ancestors 'none'");
    bt_http_add_header(req, "X-Content-Type-Options", "nosniff");
    bt_http_add_header(req, "Referrer-Policy", "no-referrer");
    bt_http_add_header(req, "Cross-Origin-Opener-Policy", "same-origin");
    bt_http_add_header(req, "Cache-Control", "no-cache");
    bt_front_respond(f, req, 200, type, body);
}

static void respond_file(struct bt_front *f, struct bt_http_req *req, const char *name)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(files); i++) {
        if (strcmp(files[i].name, name) == 0) {
            struct bt_buf body = {.data = (char *)files[i].data, .len = files[i].len};
            respond(f, req, files[i].type, &body);
            return;
        }
    }
    struct bt_front_error e = {0};
    bt_front_fail(&e, 404, NULL, NULL, "there is no file '%.64s' below /ui", name);
    bt_front_respond_error(f, req, &e);
}

void bt_front_get_ui(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    const char *name = bt_http_path(req) + strlen("/ui");
    (void)tenant;
    name += *name == '/';
    respond_file(f, req, *name != '\0' ? name : "index.html");
}

void bt_front_show(struct bt_front *f, bt_front_show_fn fn, void *arg)
{
    f->show = fn;
    f->show_arg = arg;
}

/* Answers without CORS headers, so that no page of another origin can read it. */
void bt_front_get_admin(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    struct bt_buf out;
    struct bt_front_error e = {0};
    char why[400] = "this server has no administration interface";
    (void)tenant;
    bt_buf_init(&out);
    int status = f->show != NULL ? f->show(f->show_arg, bt_http_path(req) + strlen("/admin/v1/"),
                                           &out, why, sizeof(why))
                                 : 404;
    if (status != 200) {
        bt_front_fail(&e, status, NULL, NULL, "%s", why);
        bt_front_respond_error(f, req, &e);
    } else {
        bt_http_add_header(req, "Cache-Control", "no-store");
        bt_http_add_header(req, "X-Content-Type-Options", "nosniff");
        bt_front_count(f, 200);
        bt_http_respond(req, 200, FRONT_JSON_TYPE, out.data, out.len);
    }
    bt_buf_cleanup(&out);
}

void bt_front_get_home(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    (void)tenant;
    respond_file(f, req, "home.html");
}

/* Answers with a document that is made at its first request. */
static void
respond_made(struct bt_front *f, struct bt_http_req *req, const char *type, struct bt_buf *kept,
             void (*make)(const struct bt_front_route *routes, size_t n, struct bt_buf *out))
{
    if (kept->len == 0) {
        size_t n;
        const struct bt_front_route *routes = bt_front_routes(&n);
        make(routes, n, kept);
    }
    respond(f, req, type, kept);
}

void bt_front_get_docs(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    (void)tenant;
    respond_made(f, req, HTML, &f->docs_page, bt_front_reference_page);
}

void bt_front_get_openapi(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    (void)tenant;
    respond_made(f, req, FRONT_JSON_TYPE, &f->openapi, bt_front_reference_openapi);
}

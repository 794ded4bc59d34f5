/* The conductor's HTTP routes, and the start and the end of the front. front_gen.c has generations,
 * front_tokenize.c has the tokenizer's routes. Loop thread. */
#include "conductor/front/front.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/conf/conf.h"
#include "common/grammar/grammar.h"
#include "common/http/http_tls.h"
#include "common/log/log.h"
#include "conductor/front/front_fields.h"
#include "conductor/front/front_format.h"
#include "conductor/front/front_jobs.h"
#include "conductor/front/front_reference.h"
#include "conductor/front/front_thinking.h"

#define ANSWERS_MAX_DEFAULT (512 * 1024 * 1024)
/* this part of the answers' memory is for output that clients have not read */
#define UNSENT_PART 4
/* of compiled grammars, which are kept for later requests */
#define GRAMMARS_BYTES      (64 * 1024 * 1024)
#define RESPONSES_PATH      "/v1/responses"
#define MESSAGES_PATH       "/v1/messages"
#define MESSAGES_VERSION    "2023-06-01"
#define MESSAGES_OVERLOADED 529 /* the status with which this API replaces 503 */
#define TLS_KEY             "conductor.http.tls"
#define STRANGERS_PART      4 /* connections without a key may take a quarter of all */

static const int codes[FRONT_CODES] = {200, 400, 401, 403, 404, 405, 415,
                                       429, 500, 503, 504, 529, 0 /* any other code */};

void bt_front_count(struct bt_front *f, int status)
{
    size_t i = 0;
    while (i < FRONT_CODES - 1 && codes[i] != status) {
        i++;
    }
    bt_metric_add(f->m.by_code[i], 1);
}

/* ---- answers ---- */

/* Returns whether the path belongs to Anthropic's API. */
static bool of_messages(const char *path)
{
    size_t n = strlen(MESSAGES_PATH);
    return strncmp(path, MESSAGES_PATH, n) == 0 && (path[n] == '\0' || path[n] == '/');
}

void bt_front_common_headers(const struct bt_front *f, struct bt_http_req *req)
{
    if (of_messages(bt_http_path(req))) { /* where clients of this API look for it */
        bt_http_add_header(req, "request-id", bt_http_request_id(req));
    }
    bt_front_cors_headers(f, req);
}

void bt_front_respond(struct bt_front *f, struct bt_http_req *req, int status, const char *type,
                      const struct bt_buf *body)
{
    bt_front_common_headers(f, req);
    bt_front_count(f, status);
    bt_http_respond(req, status, type, body->data, body->len);
}

/* Writes an error in the form of the path's API, and returns its status. */
static int put_error(const char *path, const struct bt_front_error *e, const char *request_id,
                     struct bt_buf *out)
{
    if (!of_messages(path)) {
        bt_front_error_json(e, out);
        return e->http;
    }
    bt_front_messages_error(e, request_id, out);
    return e->http == 503 ? MESSAGES_OVERLOADED : e->http;
}

void bt_front_respond_error(struct bt_front *f, struct bt_http_req *req,
                            const struct bt_front_error *e)
{
    struct bt_buf out;
    bt_buf_init(&out);
    int status = put_error(bt_http_path(req), e, bt_http_request_id(req), &out);
    if (e->retry_after_s > 0) {
        char seconds[16];
        snprintf(seconds, sizeof(seconds), "%u", e->retry_after_s);
        bt_http_add_header(req, "Retry-After", seconds);
    }
    if (e->http == 401 || e->http == 403) {
        bt_front_auth_challenge(req, e);
    }
    bt_front_respond(f, req, status, FRONT_JSON_TYPE, &out);
    bt_buf_cleanup(&out);
}

static bool on_http_error(const char *path, int *status, const char *why, const char *request_id,
                          struct bt_buf *body)
{
    struct bt_front_error e = {0};
    bt_front_fail(&e, *status, NULL, NULL, "%s", why);
    if (of_messages(path)) {
        *status = put_error(path, &e, request_id, body);
    }
    return of_messages(path);
}

static void respond_json(struct bt_front *f, struct bt_http_req *req, struct bt_buf *out)
{
    bt_front_respond(f, req, 200, FRONT_JSON_TYPE, out);
    bt_buf_cleanup(out);
}

/* ---- the small routes ---- */

static void put_model(const struct bt_front *f, struct bt_buf *out)
{
    bt_buf_puts(out, "{\"id\":");
    bt_front_put_cstr(out, f->model_id);
    bt_buf_printf(out, ",\"object\":\"model\",\"created\":%llu,\"owned_by\":\"baton\",\"root\":",
                  (unsigned long long)f->created_s);
    bt_front_put_cstr(out, f->model_path);
    bt_buf_printf(out, ",\"parent\":null,\"max_model_len\":%u}", f->model.max_model_len);
}

static void get_models(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    struct bt_buf out;
    (void)tenant;
    bt_buf_init(&out);
    bt_buf_puts(&out, "{\"object\":\"list\",\"data\":[");
    put_model(f, &out);
    bt_buf_puts(&out, "]}");
    respond_json(f, req, &out);
}

static void get_model(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    struct bt_buf out;
    struct bt_front_error e = {0};
    const char *name = bt_http_path(req) + strlen("/v1/models/");
    (void)tenant;
    if (strcmp(name, f->model_id) != 0) {
        bt_front_fail(&e, 404, "model", "model_not_found", "the model '%.128s' does not exist",
                      name);
        bt_front_respond_error(f, req, &e);
        return;
    }
    bt_buf_init(&out);
    put_model(f, &out);
    respond_json(f, req, &out);
}

static void get_health(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    const char *why = NULL;
    struct bt_buf out;
    (void)tenant;
    bool ok = !f->leaving && bt_requests_serving(f->rs, &why);
    bt_buf_init(&out);
    if (ok) {
        bt_buf_puts(&out, "ok");
    } else {
        bt_buf_puts(&out, f->leaving ? "shutting down" : why != NULL ? why : "not serving");
        bt_http_add_header(req, "Retry-After", "1");
    }
    bt_front_respond(f, req, ok ? 200 : 503, "text/plain; charset=utf-8", &out);
    bt_buf_cleanup(&out);
}

static void get_version(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    struct bt_buf out;
    (void)tenant;
    bt_buf_init(&out);
    bt_buf_puts(&out, "{\"version\":");
    bt_front_put_cstr(&out, bt_version());
    bt_buf_puts(&out, "}");
    respond_json(f, req, &out);
}

static void get_metrics(struct bt_front *f, struct bt_http_req *req, const char *tenant)
{
    struct bt_buf out;
    (void)tenant;
    bt_buf_init(&out);
    bt_metric_set(f->m.conns, bt_http_conns(f->http));
    bt_metric_add(f->m.unheard, bt_http_unheard(f->http) - (uint64_t)bt_metric_value(f->m.unheard));
    bt_metric_set(f->m.unsent, (double)bt_http_unsent(f->http));
    if (f->tls != NULL) {
        bt_metric_set(f->m.tls_not_after, (double)bt_http_tls_not_after_s(f->tls));
        bt_metric_add(f->m.tls_refused,
                      bt_http_tls_refused(f->tls) - (uint64_t)bt_metric_value(f->m.tls_refused));
    }
    bt_metric_set(f->m.held, (double)f->room.used);
    bt_metrics_render(f->metrics, &out);
    bt_front_respond(f, req, 200, "text/plain; version=0.0.4", &out);
    bt_buf_cleanup(&out);
}

/* ---- routing ---- */

#define TEXT "text/plain"
#define HTML "text/html"
#define JSON FRONT_JSON_TYPE

static const struct bt_front_route routes[] = {
    {"/v1/completions", "", true, BT_KEYS_INFERENCE, true, bt_front_post_completions,
     FRONT_COMPLETION, JSON, "continues a prompt (OpenAI's legacy API)"},
    {"/v1/chat/completions", "", true, BT_KEYS_INFERENCE, true, bt_front_post_chat, FRONT_CHAT,
     JSON, "answers a conversation (OpenAI's API)"},
    {RESPONSES_PATH, "", true, BT_KEYS_INFERENCE, true, bt_front_post_responses, FRONT_RESPONSES,
     JSON, "answers a conversation (OpenAI's Responses); nothing is stored"},
    {RESPONSES_PATH "/input_tokens", "", true, BT_KEYS_INFERENCE, false, bt_front_post_input_tokens,
     FRONT_RESPONSES, JSON, "counts the prompt's tokens"},
    {MESSAGES_PATH, "", true, BT_KEYS_INFERENCE, true, bt_front_post_messages, FRONT_MESSAGES, JSON,
     "answers a conversation (Anthropic's API)"},
    {MESSAGES_PATH "/count_tokens", "", true, BT_KEYS_INFERENCE, false, bt_front_post_count,
     FRONT_MESSAGES_COUNT, JSON, "counts the prompt's tokens"},
    {"/v1/models", "", false, BT_KEYS_INFERENCE, false, get_models, 0, JSON,
     "lists the served model"},
    {"/v1/models/", "{model}", false, BT_KEYS_INFERENCE, false, get_model, 0, JSON,
     "describes the model"},
    {"/tokenize", "", true, BT_KEYS_INFERENCE, false, bt_front_post_tokenize, FRONT_TOKENIZE, JSON,
     "token ids of a prompt or a conversation"},
    {"/detokenize", "", true, BT_KEYS_INFERENCE, false, bt_front_post_detokenize, FRONT_DETOKENIZE,
     JSON, "text of token ids"},
    {"/health", "", false, 0, false, get_health, 0, TEXT,
     "200 while the conductor accepts requests, otherwise 503 with the reason"},
    {"/version", "", false, 0, false, get_version, 0, JSON, "version of the server"},
    {"/metrics", "", false, BT_KEYS_METRICS, false, get_metrics, 0, TEXT, "metrics for Prometheus"},
    {"/docs", "", false, 0, false, bt_front_get_docs, 0, HTML, "this reference as a page"},
    {"/openapi.json", "", false, 0, false, bt_front_get_openapi, 0, JSON,
     "this reference as OpenAPI 3.1"},
    {"/admin/v1/status", "", false, BT_KEYS_ADMIN, false, bt_front_get_admin, 0, JSON,
     "members, their loads and pools, objectives"},
    {"/admin/v1/requests", "", false, BT_KEYS_ADMIN, false, bt_front_get_admin, 0, JSON,
     "open requests, and the latest plans with their results"},
    {"/admin/v1/explain/", "{id}", false, BT_KEYS_ADMIN, false, bt_front_get_admin, 0, JSON,
     "why a request runs where it does, and which other workers could have taken it"},
    {"/admin/v1/history", "", false, BT_KEYS_ADMIN, false, bt_front_get_admin, 0, JSON,
     "counters of the last half hour"},
    {"/ui", "", false, 0, false, bt_front_get_ui, 0, HTML, "the cluster page"},
    {"/ui/", "{file}", false, 0, false, bt_front_get_ui, 0, HTML, "files of the pages"},
    {"/", "", false, 0, false, bt_front_get_home, 0, HTML, "a page with links to the others"},
};
#undef TEXT
#undef HTML
#undef JSON

const struct bt_front_route *bt_front_routes(size_t *n_p)
{
    *n_p = BT_ARRAY_LEN(routes);
    return routes;
}

static const struct bt_front_route *find_route(const char *path)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(routes); i++) {
        size_t n = strlen(routes[i].path);
        bool prefix = routes[i].rest[0] != '\0';
        if (prefix ? strncmp(path, routes[i].path, n) == 0 : strcmp(path, routes[i].path) == 0) {
            return &routes[i];
        }
    }
    return NULL;
}

static bool is_plain(const char *encoding)
{
    return encoding == NULL || strcasecmp(encoding, "identity") == 0;
}

/* Returns whether the type is application/json with UTF-8. The header may be missing, and may have
 * other parameters. */
static bool is_json(const char *type)
{
    if (type == NULL) {
        return true;
    }
    size_t n = strcspn(type, "; \t");
    if (n != strlen(FRONT_JSON_TYPE) || strncasecmp(type, FRONT_JSON_TYPE, n) != 0) {
        return false;
    }
    const char *charset = strcasestr(type + n, "charset=");
    if (charset == NULL) {
        return true;
    }
    charset += strlen("charset=");
    charset += *charset == '"';
    return strncasecmp(charset, "utf-8", 5) == 0;
}

/* Refuses a header that occurs twice with different values, although only one is allowed: a proxy
 * or a log might use the other value. Returns false with the header's name in e. */
static bool check_single(const struct bt_http_req *req, struct bt_front_error *e)
{
    static const char *const names[] = {"authorization",    "x-api-key", "content-type",
                                        "content-encoding", "origin",    "x-request-id",
                                        "api-key"};
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        if (bt_http_header_ambiguous(req, names[i])) {
            return bt_front_fail(
                e, 400, NULL, NULL,
                "the header %s occurs more than once with different values; send one", names[i]);
        }
    }
    return true;
}

static bool check_method(struct bt_http_req *req, const struct bt_front_route *r,
                         struct bt_front_error *e)
{
    const char *method = bt_http_method(req);
    if (r->post ? strcmp(method, "POST") == 0
                : strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0) {
        return true;
    }
    const char *allow = r->post ? "POST" : "GET, HEAD";
    bt_http_add_header(req, "Allow", allow);
    return bt_front_fail(e, 405, NULL, NULL, "the method '%.32s' is not allowed here; use %s",
                         method, allow);
}

/* Checks everything that needs only the header. Returns false with the error in e. */
static bool check_head(struct bt_front *f, struct bt_http_req *req, const struct bt_front_route *r,
                       struct bt_front_note *note, struct bt_front_error *e)
{
    bool open = r != NULL && r->scope == 0;
    if (!check_single(req, e) ||
        (!open && !bt_front_auth(f, req, r != NULL ? r->scope : 0, note, e))) {
        return false;
    }
    if (r == NULL &&
        strncmp(bt_http_path(req), RESPONSES_PATH "/", strlen(RESPONSES_PATH "/")) == 0) {
        return bt_front_fail(e, 404, NULL, NULL,
                             "this server does not store responses: there is no '%.128s'. Send the "
                             "whole conversation as `input`",
                             bt_http_path(req));
    }
    if (r == NULL) {
        struct bt_buf paths;
        bt_buf_init(&paths);
        bt_front_reference_paths(routes, BT_ARRAY_LEN(routes), &paths);
        bt_front_fail(e, 404, NULL, NULL, "there is no '%.128s' on this server; there are: %s",
                      bt_http_path(req), paths.data);
        bt_buf_cleanup(&paths);
        return false;
    }
    if (!check_method(req, r, e)) {
        return false;
    }
    const char *version = bt_http_header(req, "anthropic-version");
    if (version != NULL && strcmp(version, MESSAGES_VERSION) < 0 &&
        of_messages(bt_http_path(req))) {
        return bt_front_fail(e, 400, NULL, NULL,
                             "anthropic-version: '%.32s' is not supported; use " MESSAGES_VERSION
                             " or a later one, whose answers have the same form here",
                             version);
    }
    if (r->post && !is_json(bt_http_header(req, "content-type"))) {
        return bt_front_fail(e, 415, NULL, NULL, "the Content-Type must be " FRONT_JSON_TYPE);
    }
    if (r->post && !is_plain(bt_http_header(req, "content-encoding"))) {
        return bt_front_fail(
            e, 415, NULL, NULL,
            "a compressed body (Content-Encoding) is not supported; send it as it is");
    }
    return true;
}

/* Runs before the body is read, so that a client without a key cannot make the server store one.
 * The connection of an open route (/health) still counts as one without an accepted request. */
static bool on_head(void *arg, struct bt_http_req *req)
{
    struct bt_front *f = arg;
    const struct bt_front_route *r = find_route(bt_http_path(req));
    struct bt_front_error e = {0};
    struct bt_front_note *note = bt_front_access_begin(req);
    note->route = r;
    if (r != NULL && bt_front_cors_preflight(f, req, r->post ? "POST" : "GET, HEAD")) {
        return false; /* a preflight request never has a key */
    }
    if (!check_head(f, req, r, note, &e) ||
        (r->post && !bt_front_keys_admit_body(f->keys, note->tenant, bt_http_body_announced(req),
                                              r->generates, &e))) {
        bt_front_respond_error(f, req, &e);
        return false;
    }
    if (r->scope == 0) { /* answered at once: without a key, a client cannot make us reserve memory
                      for a body */
        r->fn(f, req, NULL);
        return false;
    }
    bt_http_accept(req, bt_front_keys_owner(f->keys, note->tenant));
    return true;
}

/* Called after on_head: the request has a route and, where keys are needed, a key. */
static void on_request(void *arg, struct bt_http_req *req)
{
    const struct bt_front_note *note = bt_front_note(req);
    note->route->fn(arg, req, note->tenant[0] != '\0' ? note->tenant : NULL);
}

/* ---- start and end ---- */

static void create_metrics(struct bt_front *f)
{
    struct bt_metrics *m = f->metrics;
    for (size_t i = 0; i < FRONT_CODES; i++) {
        char labels[32];
        if (codes[i] != 0) {
            snprintf(labels, sizeof(labels), "code=\"%d\"", codes[i]);
        } else {
            snprintf(labels, sizeof(labels), "code=\"other\"");
        }
        f->m.by_code[i] = bt_metrics_counter(m, "baton_http_responses_total", labels);
    }
    f->m.gone = bt_metrics_counter(m, "baton_http_disconnects_total", NULL);
    f->m.slow = bt_metrics_counter(m, "baton_http_slow_readers_total", NULL);
    f->m.open = bt_metrics_gauge(m, "baton_http_generations_open", NULL);
    for (uint32_t i = 1; i < BT_ARRAY_LEN(f->m.constrained); i++) {
        char labels[48];
        snprintf(labels, sizeof(labels), "kind=\"%s\"", bt_front_grammar_name(i));
        f->m.constrained[i] = bt_metrics_counter(m, "baton_http_constrained_total", labels);
    }
    bt_front_auth_metrics(f);
    f->m.conns = bt_metrics_gauge(m, "baton_http_connections", NULL);
    f->m.unheard = bt_metrics_counter(m, "baton_http_connections_unheard_total", NULL);
    f->m.held = bt_metrics_gauge(m, "baton_http_answer_bytes", "of=\"generations\"");
    f->m.unsent = bt_metrics_gauge(m, "baton_http_answer_bytes", "of=\"unsent\"");
}

static uint32_t longest_piece(const struct bt_tokenizer *tok)
{
    size_t longest = 1;
    struct bt_buf piece;
    bt_buf_init(&piece);
    for (uint32_t id = 0; id < bt_tokenizer_vocab(tok); id++) {
        bt_buf_clear(&piece);
        if (bt_tokenizer_piece(tok, id, &piece) == BT_OK) {
            longest = BT_MAX(longest, piece.len);
        }
    }
    bt_buf_cleanup(&piece);
    return (uint32_t)longest;
}

static char *base_name(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') {
        n--;
    }
    size_t from = n;
    while (from > 0 && path[from - 1] != '/') {
        from--;
    }
    return bt_sprintf("%.*s", (int)(n - from), path + from);
}

void bt_front_api_doc(struct bt_buf *out)
{
    bt_front_reference_markdown(routes, BT_ARRAY_LEN(routes), out);
}

bt_status_t bt_front_check_form(const char *form, char *err, size_t err_cap)
{
    struct bt_reply_style s;
    char why[256];
    bt_status_t st = bt_reply_style_read(form, NULL, &s, why, sizeof(why));
    if (st != BT_OK) {
        snprintf(err, err_cap, "conductor.answer_form: %s", why);
    }
    return st;
}

/* Collects the markers of a style that are special tokens. */
static void keep_markers(const struct bt_tokenizer *tok, struct bt_reply_style style,
                         struct bt_tokens *ids)
{
    const char *marker;
    uint32_t id;
    ids->ids = bt_calloc(BT_REPLY_MARKERS, sizeof(ids->ids[0]));
    for (size_t i = 0; (marker = bt_reply_marker(&style, i)) != NULL; i++) {
        if (bt_tokenizer_find(tok, marker, &id) && bt_tokenizer_is_special(tok, id)) {
            ids->ids[ids->n++] = id;
        }
    }
}

/* Collects the markers of a style that are tokens of the model, special or not. */
static void find_tokens(const struct bt_tokenizer *tok, const struct bt_reply_style *style,
                        struct bt_reply_tokens *t)
{
    const char *marker;
    for (size_t i = 0; (marker = bt_reply_marker(style, i)) != NULL; i++) {
        if (bt_tokenizer_find(tok, marker, &t->id[t->n]) &&
            bt_tokenizer_is_added(tok, t->id[t->n])) {
            t->marker[t->n++] = marker;
        }
    }
}

/* Returns whether the template writes the arguments of a call only if they are a text. */
static bool wants_text(const struct bt_template *t)
{
    bool ok[2];
    for (int text = 0; text < 2; text++) {
        char why[64];
        struct bt_buf out;
        bt_buf_init(&out);
        json_t *probe = bt_front_probe(text);
        ok[text] = bt_template_render_object(t, probe, 0, NULL, &out, why, sizeof(why)) == BT_OK &&
                   out.len > 0 && strstr(out.data, FRONT_PROBE_TEXT) != NULL;
        json_decref(probe);
        bt_buf_cleanup(&out);
    }
    return ok[1] && !ok[0];
}

/* Finds out in which form the model writes reasoning and calls. */
static bt_status_t take_style(struct bt_front *f, const char *form, char *err, size_t err_cap)
{
    struct bt_front_model *m = &f->model;
    const char *text = m->tmpl != NULL ? bt_template_text(m->tmpl, true) : NULL;
    bt_status_t st = bt_front_check_form(form, err, err_cap);
    if (st != BT_OK || bt_reply_style_read(form, text, &m->style.reply, err, err_cap) != BT_OK) {
        return BT_ERR_CONFIG;
    }
    m->style.takes_tools = text != NULL && bt_reply_template_takes_tools(text);
    bool elements = bt_reply_xml_form(m->style.reply.tools) != NULL;
    m->style.text_arguments = m->style.takes_tools && !elements && wants_text(m->tmpl);
    find_tokens(m->tok, &m->style.reply, &f->marker_tokens);
    m->style.tokens = &f->marker_tokens;
    keep_markers(m->tok, m->style.reply, &f->kept_tools);
    keep_markers(m->tok, (struct bt_reply_style){BT_TOOLS_NONE, m->style.reply.thoughts},
                 &f->kept_thoughts);
    m->kept_tools = &f->kept_tools;
    m->kept_thoughts = &f->kept_thoughts;
    bt_front_thoughts_end(m->tok, m->style.reply.thoughts, text, &f->thoughts_end);
    m->thoughts_end = &f->thoughts_end;
    return BT_OK;
}

bt_status_t bt_front_check_tls(const char *dir, char *err, size_t err_cap)
{
    struct bt_http_tls *tls = NULL;
    bt_status_t st = dir != NULL ? bt_http_tls_create(TLS_KEY, dir, &tls, err, err_cap) : BT_OK;
    bt_http_tls_destroy(tls);
    return st;
}

static bt_status_t start_tls(struct bt_front *f, const char *dir, char *err, size_t err_cap)
{
    bt_status_t st = bt_http_tls_create(TLS_KEY, dir, &f->tls, err, err_cap);
    if (st == BT_OK) {
        bt_http_tls_watch(f->tls, f->loop);
        f->m.tls_not_after = bt_metrics_gauge(f->metrics, "baton_tls_certificate_not_after_seconds",
                                              "use=\"" TLS_KEY "\"");
        f->m.tls_refused = bt_metrics_counter(f->metrics, "baton_http_tls_refused_total", NULL);
    }
    return st;
}

bt_status_t bt_front_create(const struct bt_front_parts *parts, const struct bt_front_config *conf,
                            struct bt_front **front_p, int *port_p, char *err, size_t err_cap)
{
    struct bt_front *f = bt_calloc(1, sizeof(*f));
    f->loop = parts->loop;
    f->rs = parts->rs;
    f->metrics = parts->metrics;
    f->config = *conf->model;
    f->model_path = bt_strdup(conf->model_path);
    f->model_id = conf->model_id != NULL ? bt_strdup(conf->model_id) : base_name(conf->model_path);
    f->created_s = conf->created_s != 0 ? conf->created_s : bt_real_ns() / 1000000000ull;
    f->request_timeout_ms = conf->request_timeout_ms;
    f->access_share = conf->access_share;
    bt_random(&f->access_random, sizeof(f->access_random));
    f->allowed_origins = bt_strdup(conf->allowed_origins != NULL ? conf->allowed_origins : "");
    uint32_t len = conf->max_model_len;
    f->model = (struct bt_front_model){
        .id = f->model_id,
        .max_model_len = len > 0 ? BT_MIN(len, f->config.max_model_len) : f->config.max_model_len,
        .config = &f->config,
        .tok = parts->tok,
        .tmpl = parts->tmpl,
        .grammars = bt_grammar_cache_create(GRAMMARS_BYTES),
        .piece_max = longest_piece(parts->tok)};
    bt_list_init(&f->gens);
    bt_list_init(&f->pending);
    bt_list_init(&f->starting);
    bt_list_init(&f->ending);
    bt_list_init(&f->dead);
    size_t answers_max = conf->answers_max != 0 ? conf->answers_max : ANSWERS_MAX_DEFAULT;
    struct bt_http_options http = conf->http;
    http.out_total = answers_max / UNSENT_PART;
    bt_front_room_init(&f->room, answers_max - http.out_total);
    create_metrics(f);
    bt_status_t st = bt_front_check_origins(f->allowed_origins, err, err_cap);
    if (st == BT_OK) {
        st = take_style(f, conf->answer_form, err, err_cap);
    }
    if (st == BT_OK && conf->api_keys_file != NULL) {
        st = bt_front_auth_start(f, conf->api_keys_file, err, err_cap);
    }
    if (st == BT_OK && conf->tls_dir != NULL) {
        st = start_tls(f, conf->tls_dir, err, err_cap);
    }
    if (st == BT_OK) {
        st = bt_front_jobs_create(f, err, err_cap);
    }
    if (st == BT_OK) {
        http.tls = f->tls;
        http.head = on_head;
        http.ended = bt_front_access_ended;
        http.error = on_http_error;
        http.key_prefix = "conductor.http.";
        http.strangers_max = BT_MAX(http.conns_max / STRANGERS_PART, 1u);
        st = bt_http_create(f->loop, &http, on_request, f, &f->http, port_p);
        if (st != BT_OK) {
            char why[256];
            (void)bt_conf_listen_why(conf->http.listen, why, sizeof(why));
            snprintf(err, err_cap, "%s: %s",
                     conf->http.listen != NULL ? conf->http.listen : "(nothing)", why);
        }
    }
    if (st != BT_OK) {
        bt_front_destroy(f);
        return st;
    }
    *front_p = f;
    return BT_OK;
}

void bt_front_leave(struct bt_front *f)
{
    f->leaving = true;
    bt_http_wind_down(f->http);
}

void bt_front_drain(struct bt_front *f)
{
    bt_front_leave(f);
    f->draining = true;
    bt_http_drain(f->http);
}

uint32_t bt_front_open(const struct bt_front *f)
{
    return f->n_gens + f->n_jobs;
}

void bt_front_destroy(struct bt_front *f)
{
    if (f == NULL) {
        return;
    }
    f->draining = true;
    bt_http_destroy(f->http); /* calls on_gone of every request, which cancels its generation */
    bt_front_jobs_destroy(f);
    bt_front_gen_end_all(f);
    BT_ASSERT(f->n_gens == 0);
    bt_front_room_cleanup(&f->room);
    bt_front_auth_stop(f);
    bt_http_tls_destroy(f->tls);
    bt_grammar_cache_destroy(f->model.grammars);
    bt_buf_cleanup(&f->docs_page);
    bt_buf_cleanup(&f->openapi);
    free(f->allowed_origins);
    bt_tokens_cleanup(&f->kept_thoughts);
    bt_tokens_cleanup(&f->thoughts_end);
    bt_tokens_cleanup(&f->kept_tools);
    free(f->model_id);
    free(f->model_path);
    free(f);
}

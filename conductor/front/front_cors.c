/* Cross-origin requests: what a browser asks before it lets a page of another origin read this
 * server's answers (Fetch Standard, "CORS protocol"). The server uses no cookies, which the
 * standard calls credentials. The page itself sends the API key in a header. No other origin may
 * read /admin/v1/. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "conductor/front/front_priv.h"

#define MAX_AGE_S "600"

/* Returns the next origin of a list; NULL at its end. Advances *at. */
static const char *next_origin(const char **at, size_t *len_p)
{
    const char *p = *at + strspn(*at, ", \t");
    *len_p = strcspn(p, ", \t");
    *at = p + *len_p;
    return *len_p > 0 ? p : NULL;
}

/* Returns whether s is scheme://host[:port], as browsers write an origin: without path and user. */
static bool is_origin(const char *s, size_t len)
{
    char text[256];
    if (len == 0 || len >= sizeof(text)) {
        return false;
    }
    memcpy(text, s, len);
    text[len] = '\0';
    const char *sep = strstr(text, "://");
    return sep != NULL && sep != text && sep[3] != '\0' && strpbrk(sep + 3, "/@?#*") == NULL;
}

bt_status_t bt_front_check_origins(const char *origins, char *err, size_t err_cap)
{
    const char *at = origins != NULL ? origins : "", *o;
    size_t len;
    while ((o = next_origin(&at, &len)) != NULL) {
        bool any = len == 1 && *o == '*';
        if (!any && !is_origin(o, len)) {
            snprintf(err, err_cap,
                     "conductor.http.allowed_origins: '%.*s' is not an origin; write "
                     "scheme://host[:port], or * for any",
                     (int)BT_MIN(len, 200), o);
            return BT_ERR_CONFIG;
        }
    }
    return BT_OK;
}

/* Returns 0 if the origin is not allowed, 1 if it is in the list, 2 if every origin is allowed. */
static int allowed(const char *origins, const char *origin)
{
    const char *at = origins, *o;
    size_t len, n = strlen(origin);
    int found = 0;
    while ((o = next_origin(&at, &len)) != NULL) {
        if (len == 1 && *o == '*') {
            return 2;
        }
        found |= len == n && memcmp(o, origin, n) == 0;
    }
    return found;
}

static bool for_own_pages(struct bt_http_req *req)
{
    return strncmp(bt_http_path(req), "/admin/", strlen("/admin/")) == 0;
}

/* Is the name, without a port, an address or localhost or the name of this host? */
static bool is_own(const char *name)
{
    char own[256] = "";
    size_t n = strlen(name);
    unsigned char address[sizeof(struct in6_addr)];
    (void)gethostname(own, sizeof(own) - 1);
    return inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1 ||
           strcasecmp(name, "localhost") == 0 || strcasecmp(name, own) == 0 ||
           (n > 10 && strcasecmp(name + n - 10, ".localhost") == 0);
}

bool bt_front_asked_by_own_name(struct bt_http_req *req)
{
    const char *host = bt_http_header(req, "host");
    char name[256];
    if (host == NULL) {
        return true; /* no browser */
    }
    bool v6 = host[0] == '[';
    size_t n = strcspn(host + v6, v6 ? "]" : ":");
    snprintf(name, sizeof(name), "%.*s", (int)BT_MIN(n, sizeof(name)), host + v6);
    return is_own(name);
}

void bt_front_cors_headers(const struct bt_front *f, struct bt_http_req *req)
{
    if (for_own_pages(req)) {
        return;
    }
    const char *origin = bt_http_header(req, "origin");
    int how = origin != NULL ? allowed(f->allowed_origins, origin) : 0;
    if (f->allowed_origins[0] != '\0' && how != 2) { /* the answer depends on the origin */
        bt_http_add_header(req, "Vary", "Origin");
    }
    if (how == 0) {
        return;
    }
    bt_http_add_header(req, "Access-Control-Allow-Origin", how == 2 ? "*" : origin);
    bt_http_add_header(req, "Access-Control-Expose-Headers",
                       "x-request-id, request-id, x-baton-plan, retry-after");
}

bool bt_front_cors_preflight(struct bt_front *f, struct bt_http_req *req, const char *methods)
{
    const char *origin = bt_http_header(req, "origin");
    const char *wanted = bt_http_header(req, "access-control-request-headers");
    if (strcmp(bt_http_method(req), "OPTIONS") != 0 || origin == NULL ||
        bt_http_header(req, "access-control-request-method") == NULL || for_own_pages(req) ||
        allowed(f->allowed_origins, origin) == 0) {
        return false;
    }
    bt_http_add_header(req, "Access-Control-Allow-Methods", methods);
    if (wanted != NULL && strlen(wanted) <= 1024) {
        bt_http_add_header(req, "Access-Control-Allow-Headers", wanted);
    }
    bt_http_add_header(req, "Access-Control-Max-Age", MAX_AGE_S);
    const struct bt_buf empty = {.data = ""};
    bt_front_respond(f, req, 200, "text/plain; charset=utf-8", &empty);
    return true;
}

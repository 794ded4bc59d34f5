/* Within front/: the reference of the API as documents: Markdown for docs/API.md, a page for /docs,
 * OpenAPI 3.1 for /openapi.json. All are made from the tables of routes and fields. Pure. */
#ifndef BT_CONDUCTOR_FRONT_REFERENCE_H
#define BT_CONDUCTOR_FRONT_REFERENCE_H

#include "common/base/buf.h"
#include "conductor/front/front_priv.h"

/* Each appends a whole document. routes[n]: the table of routes. */
void bt_front_reference_openapi(const struct bt_front_route *routes, size_t n, struct bt_buf *out);
void bt_front_reference_page(const struct bt_front_route *routes, size_t n, struct bt_buf *out);
void bt_front_reference_markdown(const struct bt_front_route *routes, size_t n, struct bt_buf *out);
/* Appends the routes as one line, for an answer 404: "GET /health, POST /tokenize, ...". */
void bt_front_reference_paths(const struct bt_front_route *routes, size_t n, struct bt_buf *out);

/* Appends text with the characters of HTML escaped, and what is between two ` as code. */
void bt_front_put_html(struct bt_buf *out, const char *text);

#endif

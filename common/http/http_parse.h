/* The request parser of common/http: bytes in, one checked request out, one after the other. Pure:
 * no I/O, no clock. The result does not depend on how the bytes are cut into pieces. What RFC 9112
 * leaves to a recipient's choice is refused here, because a proxy in front may choose otherwise
 * (request smuggling): bare CR or LF, obs-fold, space before a colon, two Content-Length, any
 * Transfer-Encoding but "chunked", Content-Length beside Transfer-Encoding, two Host. */
#ifndef BT_HTTP_PARSE_H
#define BT_HTTP_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/buf.h"

#define BT_HTTP_HEAD_MAX   (16 * 1024) /* request line, fields and trailers together */
#define BT_HTTP_FIELDS_MAX 64
#define BT_HTTP_EXT_MAX    (16 * 1024) /* chunk extensions of one body */

typedef enum {
    BT_HTTP_HEAD,  /* request line or fields are incomplete */
    BT_HTTP_BODY,  /* the fields are complete, the body (or its trailers) is not */
    BT_HTTP_DONE,  /* a whole request; bt_http_parser_reset starts the next */
    BT_HTTP_REFUSE /* answer `status` with `why` and close */
} bt_http_phase_t;

struct bt_http_parser {
    bt_http_phase_t phase;
    int status;      /* REFUSE: 400, 413, 417, 431, 501 or 505 */
    const char *why; /* REFUSE: static text */

    /* valid from BODY on; offsets into head.data, where every string ends with NUL */
    struct bt_buf head;
    uint32_t method, path, query;
    struct bt_http_field {
        uint32_t name, value;
    } fields[BT_HTTP_FIELDS_MAX];
    uint32_t n_fields;
    bool http10, keep_alive, expect_continue;
    struct bt_buf body;

    /* private */
    uint8_t step, ext;
    bool last_cr, blank_seen, has_length, chunked, trailer, skip;
    uint32_t line, hosts, te_fields, head_used, n_trailers;
    uint64_t left; /* bytes of the body or of the chunk that are still to come */
    uint32_t digits, ext_used;
    size_t body_max;
};

void bt_http_parser_init(struct bt_http_parser *p, size_t body_max);
void bt_http_parser_cleanup(struct bt_http_parser *p);
/* Ready for the next request; frees what the last one held. */
void bt_http_parser_reset(struct bt_http_parser *p);
/* Takes bytes up to the end of one request; returns how many it took (all of them unless the phase
 * is DONE or REFUSE afterwards). */
size_t bt_http_parse(struct bt_http_parser *p, const void *data, size_t len);
/* As bt_http_parse, but stops behind the header, too: the phase is BODY then, or DONE where no body
 * follows. */
size_t bt_http_parse_head(struct bt_http_parser *p, const void *data, size_t len);
/* The body's length as the header gives it; 0: there is no body, or it comes in chunks. Phase BODY,
 * before any of it was parsed. */
uint64_t bt_http_parser_announced(const struct bt_http_parser *p);
/* Phase BODY: the request is answered already. What is left of its body is parsed and thrown away.
 */
void bt_http_parser_skip_body(struct bt_http_parser *p);
/* Will the rest of the body certainly come, and is it at most max bytes? A client that waits for
 * "100 Continue" may leave its body out, and the length of a chunked body is not known. */
bool bt_http_parser_can_skip(const struct bt_http_parser *p, uint64_t max);
/* Has anything of a request arrived? */
bool bt_http_parser_started(const struct bt_http_parser *p);
/* Value of the first field of that name (letter case ignored), NULL if absent. */
const char *bt_http_parser_field(const struct bt_http_parser *p, const char *name);
/* Does the header occur more than once, with different values? */
bool bt_http_parser_ambiguous(const struct bt_http_parser *p, const char *name);

#endif

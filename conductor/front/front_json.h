/* Within front/: typed reading of a request's JSON object, and writing of JSON text. Pure. */
#ifndef BT_CONDUCTOR_FRONT_JSON_H
#define BT_CONDUCTOR_FRONT_JSON_H

#include <jansson.h>

#include "common/base/base.h"
#include "common/base/buf.h"

/* An OpenAI error object: what a client gets when its request is refused. */
struct bt_front_error {
    int http;
    const char *type; /* static */
    const char *code; /* static or NULL */
    char param[64];   /* "" : null */
    char message[480];
    uint32_t retry_after_s;
    bool beyond; /* a limit of bt_front_model ended the parsing; without that limit the body may be
                    right */
    const char *refusal; /* why a key is refused: static, NULL: another error */
    uint32_t scope;      /* that the key lacks, of a 403 */
};

/* Fills e and returns false, for `return bt_front_fail(...)`. param may be NULL. */
bool bt_front_fail(struct bt_front_error *e, int http, const char *param, const char *code,
                   const char *fmt, ...) __attribute__((format(printf, 5, 6)));
/* {"error":{"message","type","param","code"}} */
void bt_front_error_json(const struct bt_front_error *e, struct bt_buf *out);

/* Parses a body: an object, UTF-8, no duplicate keys, limited depth and size. NULL with e set. A
 * number that fits neither a 64-bit integer nor a double becomes the real number 1e308. */
json_t *bt_front_json_parse(const void *body, size_t len, struct bt_front_error *e);

/* Readers. If the member is absent or null, *v_p keeps its value (the default). False: wrong type
 * or out of range, and e says what is allowed. bt_front_get_str gives a pointer into root. */
bool bt_front_get_int(const json_t *root, const char *key, int64_t min, int64_t max, int64_t *v_p,
                      struct bt_front_error *e);
/* min_open: min itself is not allowed. */
bool bt_front_get_num(const json_t *root, const char *key, double min, bool min_open, double max,
                      float *v_p, struct bt_front_error *e);
bool bt_front_get_bool(const json_t *root, const char *key, bool *v_p, struct bt_front_error *e);
bool bt_front_get_str(const json_t *root, const char *key, const char **v_p,
                      struct bt_front_error *e);
/* Is it a number beyond 64 bits? */
bool bt_front_is_huge(const json_t *v);
/* True if the member exists and is not null. */
bool bt_front_has(const json_t *root, const char *key);

/* True if it is set to anything but null, false, 0, "", [] and {}. */
bool bt_front_asked_for(const json_t *v);

/* Appends s quoted and escaped; bytes that are not UTF-8 become U+FFFD. */
void bt_front_put_str(struct bt_buf *out, const char *s, size_t len);
void bt_front_put_cstr(struct bt_buf *out, const char *s);
/* As bt_front_put_str without the quotes: a string may be written in pieces, each of whole
 * characters.
 */
void bt_front_put_text(struct bt_buf *out, const char *s, size_t len);
/* Appends a decimal number without printf, because this happens several times for each token. */
void bt_front_put_uint(struct bt_buf *out, uint64_t v);
/* Appends the shortest form that reads back as the same float; -9999 for values that JSON cannot
 * express. */
void bt_front_put_float(struct bt_buf *out, float v);
/* Appends the number, or null if it is negative (not known). */
void bt_front_put_known(struct bt_buf *out, double v);
/* Length of the UTF-8 character at s (1..4), 0 if there is none. */
size_t bt_front_utf8_len(const char *s, size_t len);

#endif

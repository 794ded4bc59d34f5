/* The front: the OpenAI-compatible API of a conductor (completions, chat, models, tokenize, health,
 * version, metrics), on common/http. It parses and checks a request, passes a bt_gen_spec to the
 * request machine, and formats the results as JSON or server-sent events. It knows no workers,
 * plans or sessions. Everything runs on the conductor's loop thread. */
#ifndef BT_CONDUCTOR_FRONT_H
#define BT_CONDUCTOR_FRONT_H

#include "common/base/base.h"
#include "common/base/buf.h"
#include "common/engine/model_config.h"
#include "common/http/http.h"
#include "common/loop/loop.h"
#include "common/metrics/metrics.h"
#include "common/token/token.h"
#include "conductor/request/request.h"

struct bt_front;

struct bt_front_config {         /* bt_front_create copies it, including the strings */
    struct bt_http_options http; /* start from bt_http_options_default, set .listen */
    const char *model_path;      /* `root` in /v1/models */
    const char *model_id;        /* served name; NULL: base name of model_path */
    const struct bt_model_config *model;
    uint32_t max_model_len;      /* 0, or more than the model's limit: the model's limit */
    const char *allowed_origins; /* list of allowed browser origins; "*": any; NULL or "": none */
    const char *api_keys_file;   /* form: common/keys; NULL: requests need no key */
    const char *tls_dir;         /* conductor.http.tls; NULL: plain HTTP */
    uint64_t created_s;          /* unix time for /v1/models; 0: now */
    uint64_t request_timeout_ms; /* limit of a generation; 0: none */
    size_t answers_max;          /* limit of all answers in memory, in bytes; 0: 512 MiB */
    const char *answer_form;     /* conductor.answer_form; NULL: auto */
    double access_share; /* share of responses that get a line in the log; 0: none, 1: all */
};

struct bt_front_parts { /* what the front uses; the caller owns it, and it outlives the front */
    struct bt_loop *loop;
    const struct bt_tokenizer *tok;
    const struct bt_template *tmpl; /* NULL: the model has none, chat requests get 400 */
    struct bt_requests *rs;
    struct bt_metrics *metrics;
};

/* Checks a list of origins. ERR_CONFIG: err names the wrong origin and the configuration key. */
bt_status_t bt_front_check_origins(const char *origins, char *err, size_t err_cap) BT_MUST_CHECK;

/* conductor.access_log as a share: "off", "all", or a number above 0 and below 1. ERR_CONFIG: err
 * names the key. */
bt_status_t bt_front_access_share(const char *text, double *share_p, char *err,
                                  size_t err_cap) BT_MUST_CHECK;

/* Checks conductor.answer_form. ERR_CONFIG: err names the key. */
bt_status_t bt_front_check_form(const char *form, char *err, size_t err_cap) BT_MUST_CHECK;

/* Checks the files of conductor.http.tls. dir NULL: there are none. ERR_CONFIG: err names the key
 * of the configuration, file and remedy. */
bt_status_t bt_front_check_tls(const char *dir, char *err, size_t err_cap) BT_MUST_CHECK;

/* Checks the keys file. path NULL: there is none. ERR_CONFIG: err names the key of the
 * configuration, file, line and remedy. */
bt_status_t bt_front_check_keys(const char *path, char *err, size_t err_cap) BT_MUST_CHECK;

/* Writes all routes and request fields as Markdown: the lists of docs/API.md. */
void bt_front_api_doc(struct bt_buf *out);

/* Starts listening. port_p (may be NULL) gets the bound port. ERR_CONFIG: the keys file cannot be
 * read, is readable by others, or holds no key, or allowed_origins names no origin. ERR_IO: listen
 * failed. err names the file or address and the remedy. */
bt_status_t bt_front_create(const struct bt_front_parts *parts, const struct bt_front_config *conf,
                            struct bt_front **front_p, int *port_p, char *err,
                            size_t err_cap) BT_MUST_CHECK;
/* From now on /health says 503, so that load balancers stop sending requests. Everything else goes
 * on. */
void bt_front_leave(struct bt_front *f);
/* Stops accepting connections, and refuses new generations with 503. /health says 503. Open
 * responses go on until they end. */
void bt_front_drain(struct bt_front *f);
/* The number of open generations. A draining daemon exits when it is 0. */
uint32_t bt_front_open(const struct bt_front *f);
/* Cancels all open generations (bt_request_cancel) and closes every connection. */
void bt_front_destroy(struct bt_front *f);

/* Returns whether requests need API keys. Then every tenant has a cache of its own. */
bool bt_front_has_keys(const struct bt_front *f);
/* The tenant with this name, or with the API key that has this digest (the first 16 bytes of its
 * SHA-256, in hexadecimal). NULL: there is none. Valid until the next turn of the loop. */
const char *bt_front_tenant(const struct bt_front *f, const char *name);
/* For callers that are not HTTP clients. Returns whether this value of an Authorization header
 * (NULL: absent) has a key with the scope admin. Keys must be needed (bt_front_has_keys). On false,
 * why says what is missing, and *known_p whether the key is valid. */
bool bt_front_admin_key(struct bt_front *f, const char *authorization, char id[33], bool *known_p,
                        char *why, size_t cap);
/* Lets fn answer requests below /admin/v1/. fn appends JSON for `what`, the rest of the path, and
 * returns 200. Otherwise it returns another status, with the reason in why. */
typedef int (*bt_front_show_fn)(void *arg, const char *what, struct bt_buf *out, char *why,
                                size_t cap);
void bt_front_show(struct bt_front *f, bt_front_show_fn fn, void *arg);
/* For callers that are not HTTP clients. Makes token ids of the prompt of a body, which has the
 * form of /tokenize or of a generation. Calls done once, later: with the ids, or with NULL and the
 * reason. Both are valid during that call. */
void bt_front_tokens(struct bt_front *f, const void *body, size_t len,
                     void (*done)(void *arg, const struct bt_tokens *ids, const char *why),
                     void *arg);

#endif

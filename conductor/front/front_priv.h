/* Within front/: the front's state, shared by routes (front.c) and generations (front_gen.c). Loop
 * thread. */
#ifndef BT_CONDUCTOR_FRONT_PRIV_H
#define BT_CONDUCTOR_FRONT_PRIV_H

#include "common/base/list.h"
#include "common/grammar/grammar.h"
#include "common/keys/keys.h"
#include "common/log/log.h"
#include "conductor/front/front.h"
#include "conductor/front/front_answer.h"
#include "conductor/front/front_grammar.h"
#include "conductor/front/front_parse.h"
#include "conductor/front/front_room.h"

struct bt_front_keys; /* API keys, hashed */

struct bt_front_credentials { /* headers; NULL: absent */
    const char *authorization, *x_api_key, *api_key;
};

/* ERR_CONFIG with err: unreadable, readable by others, wrong, or empty. */
bt_status_t bt_front_keys_load(const char *path, struct bt_front_keys **keys_p, char *err,
                               size_t err_cap) BT_MUST_CHECK;
void bt_front_keys_destroy(struct bt_front_keys *k);
/* Warns of keys that the file has as they are. */
void bt_front_keys_say(const struct bt_front_keys *k);
/* Reads the file again if it has changed. A wrong file changes nothing; the log says what is
 * wrong. */
void bt_front_keys_look(struct bt_front_keys *k);
/* The key that a request shows, if it may be used now and has all bits of scope; valid until the
 * next bt_front_keys_look. Two different keys are wrong. Takes the same time for all keys. NULL: e
 * is a 401 or 403. */
const struct bt_key *bt_front_keys_check(const struct bt_front_keys *k,
                                         const struct bt_front_credentials *c, uint32_t scope,
                                         struct bt_front_error *e);
/* The tenant of this name, or of the key whose digest's first half is this in hex; NULL: none.
 * Valid as long as a key. */
const char *bt_front_keys_tenant(const struct bt_front_keys *k, const char *name);
/* The tenant's number, from 1 on, as bt_http_accept takes it; 0 where there are no keys. */
uint64_t bt_front_keys_owner(const struct bt_front_keys *k, const char *tenant);
/* The terms of a tenant; NULL for NULL. */
const struct bt_keys_terms *bt_front_keys_terms(const struct bt_front_keys *k, const char *tenant);
/* May the tenant send a body of this many bytes (0: not known)? True: what the body counts is taken
 * from its limits. generates: false while all of its concurrency is in use. False: e is a 429 that
 * says when to try again, or a 400 if it can never be allowed. tenant NULL: true. */
bool bt_front_keys_admit_body(struct bt_front_keys *k, const char *tenant, uint64_t bytes,
                              bool generates, struct bt_front_error *e);
struct bt_front_work {                   /* the size of a request, known after its body was read */
    uint64_t body_bytes, body_announced; /* announced: as bt_front_keys_admit_body was told */
    uint64_t generations, prompt_tokens; /* choices of all prompts */
    uint64_t context;                    /* tokens that one prompt may have */
};
/* May the tenant have this request, whose body was admitted? True: its generations are in flight
 * until bt_front_keys_end. False: as above. */
bool bt_front_keys_admit(struct bt_front_keys *k, const char *tenant, const struct bt_front_work *w,
                         struct bt_front_error *e);
/* Counts a text that was tokenized and generates nothing. */
void bt_front_keys_counted(struct bt_front_keys *k, const char *tenant,
                           const struct bt_front_work *w);
void bt_front_keys_end(struct bt_front_keys *k, const char *tenant, uint64_t generations);
/* Charges generated tokens. */
void bt_front_keys_charge(struct bt_front_keys *k, const char *tenant, uint64_t tokens);

#define FRONT_CODES     13
#define FRONT_REFUSALS  5 /* reasons for which keys are refused */
#define FRONT_JSON_TYPE "application/json"

struct bt_front {
    struct bt_loop *loop;
    struct bt_http *http;
    struct bt_http_tls *tls; /* NULL: plain HTTP */
    struct bt_requests *rs;
    struct bt_metrics *metrics;
    struct bt_front_model model;
    struct bt_reply_tokens marker_tokens;
    struct bt_tokens kept_thoughts, kept_tools, thoughts_end; /* of model */
    struct bt_model_config config;
    char *model_id, *model_path;
    char *allowed_origins;      /* "": none */
    struct bt_front_keys *keys; /* NULL: open to all */
    struct {
        struct bt_timer look;       /* at the file of keys */
        struct bt_log_pace refused; /* of lines about keys that were refused */
    } auth;
    struct bt_buf docs_page, openapi; /* made when first asked for (front_pages.c) */
    bt_front_show_fn show;            /* bt_front_show */
    void *show_arg;
    uint64_t created_s, request_timeout_ms;
    double access_share;    /* bt_front_config.access_share */
    uint64_t access_random; /* state of the sample's random numbers, never 0 */
    bool leaving;           /* /health says 503 already */
    bool draining;
    struct bt_list gens, pending; /* generations; those with events to send this turn */
    struct bt_list starting;      /* some of their requests are to be started */
    struct bt_list ending; /* answered, or the client left; their other requests are cancelled */
    struct bt_list dead;   /* their memory is freed */
    struct bt_front_room room;
    uint32_t n_gens;
    struct front_jobs *jobs; /* front_jobs.h */
    uint32_t n_jobs;         /* jobs in progress */
    struct bt_timer pending_timer, starting_timer, ending_timer, dead_timer;
    struct {
        struct bt_metric *constrained[BT_GRAMMAR_TAGS + 1]; /* by enum bt_grammar_kind */
        struct bt_metric *keys_refused[FRONT_REFUSALS];
        struct bt_metric *by_code[FRONT_CODES], *gone, *slow, *open, *conns, *held, *unsent,
            *unheard, *tls_not_after, *tls_refused;
    } m;
};

/* ---- front.c: sending of answers ---- */
void bt_front_respond(struct bt_front *f, struct bt_http_req *req, int status, const char *type,
                      const struct bt_buf *body);
/* Answers 200 with JSON of any length. The front takes ownership of a long body, counts it as an
 * answer of the tenant (and refuses it if the tenant's memory is used up), and sends it as fast as
 * the client reads. */
void bt_front_respond_long(struct bt_front *f, struct bt_http_req *req, const char *tenant,
                           struct bt_buf *body);
void bt_front_respond_error(struct bt_front *f, struct bt_http_req *req,
                            const struct bt_front_error *e);
/* Adds the CORS headers, which every answer has. */
void bt_front_common_headers(const struct bt_front *f, struct bt_http_req *req);
void bt_front_count(struct bt_front *f, int status);

/* front_auth.c: who may ask. */
struct bt_front_note;
bt_status_t bt_front_auth_start(struct bt_front *f, const char *path, char *err,
                                size_t err_cap) BT_MUST_CHECK; /* as bt_front_keys_load */
void bt_front_auth_stop(struct bt_front *f);
void bt_front_auth_metrics(struct bt_front *f);
/* Does the request show a key with all bits of scope? True, too, where no keys are needed. note
 * gets tenant and id of the key. False: e is the answer. */
bool bt_front_auth(struct bt_front *f, struct bt_http_req *req, uint32_t scope,
                   struct bt_front_note *note, struct bt_front_error *e);
/* Adds the header WWW-Authenticate of a 401 or 403. */
void bt_front_auth_challenge(struct bt_http_req *req, const struct bt_front_error *e);

/* front_access.c: the access log. The note of a request holds what HTTP does not know: what its
 * header decided (front.c), and what the log adds. It is gone when the answer was sent. */
struct bt_front_route {
    const char *path; /* ends with '/': a prefix */
    const char *rest; /* what follows a prefix, for documents: "{model}"; "" */
    bool post;
    uint32_t scope; /* that an API key needs; 0: no key is needed, for probes and pages */
    bool generates; /* a POST that needs one of the key's generations (concurrency=) */
    void (*fn)(struct bt_front *f, struct bt_http_req *req, const char *tenant);
    uint64_t body;       /* of enum bt_front_object; 0: none */
    const char *type;    /* media type of its answer */
    const char *summary; /* for documents */
};
/* The table of routes (front.c). */
const struct bt_front_route *bt_front_routes(size_t *n_p);
struct bt_front_note {
    const struct bt_front_route *route; /* NULL: there is none */
    char tenant[33], key[33];           /* of its API key: tenant and id; "": none */
    char generation[48]; /* id, as answers and `batonctl explain` have it; "": none was made */
    uint64_t prompt_tokens, completion_tokens;
    const char *grammar; /* kind of what its answers follow; NULL: nothing */
};
/* A new request gets its note. */
struct bt_front_note *bt_front_access_begin(struct bt_http_req *req);
/* The note of a request. NULL: it was answered, or ended before its header was read. */
struct bt_front_note *bt_front_note(const struct bt_http_req *req);
void bt_front_access_ended(void *arg, const struct bt_http_record *r);

struct bt_front_headers {        /* what a generation's headers ask for */
    bool valid;                  /* if false, only `wrong` is set ... */
    struct bt_front_error wrong; /* ... which names the header */
    bool timings, plan;
    double slo_ttft_ms, slo_tbt_ms; /* 0: none */
    bool has_priority;
    int32_t priority;
    char traceparent[64]; /* its beginning; "": none, or several that differ */
};
/* traceparent, x-baton-timings, x-baton-plan, x-slo-ttft-ms, x-slo-tbt-ms, x-priority. */
void bt_front_headers_read(struct bt_http_req *req, struct bt_front_headers *h);
/* The answer's header x-baton-plan. id: for `batonctl explain`. */
void bt_front_plan_header(struct bt_http_req *req, const char *id, const struct bt_gen_plan *p);

/* Does the Host header have an address, localhost or the name of this host? The owner of any other
 * name can point it here after a browser has loaded a page of that name. The page could then read
 * the answer as one of its own origin (DNS rebinding). */
bool bt_front_asked_by_own_name(struct bt_http_req *req);
/* Lets pages of an allowed origin read the answer, except below /admin/. */
void bt_front_cors_headers(const struct bt_front *f, struct bt_http_req *req);
/* Answers a browser's preflight request for one of `methods`. False: it is no preflight, or its
 * origin is not allowed. */
bool bt_front_cors_preflight(struct bt_front *f, struct bt_http_req *req, const char *methods);

/* The routes that have files of their own. */
void bt_front_post_completions(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_post_chat(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_post_messages(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_post_responses(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_post_count(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_post_input_tokens(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_post_tokenize(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_post_detokenize(struct bt_front *f, struct bt_http_req *req, const char *tenant);

/* front_pages.c: pages for people, and files for their browsers. */
void bt_front_get_home(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_get_docs(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_get_openapi(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_get_admin(struct bt_front *f, struct bt_http_req *req, const char *tenant);
void bt_front_get_ui(struct bt_front *f, struct bt_http_req *req, const char *tenant);

/* Cancels the requests that answered generations have left running, and frees them. */
void bt_front_gen_end_all(struct bt_front *f);

#endif

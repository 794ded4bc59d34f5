/* Within front/: a generation in flight, shared by front_gen.c (its life and the request
 * machine's callbacks) and front_out.c (what its client receives). Loop thread. */
#ifndef BT_CONDUCTOR_FRONT_GEN_H
#define BT_CONDUCTOR_FRONT_GEN_H

#include "conductor/front/front_priv.h"
#include "conductor/front/front_write.h"

/* Events that wait behind echoed prompts. Prompts take seconds to read, so a client that reads is
 * allowed more than one whose events alone wait (bt_http_options.out_max). */
#define FRONT_QUEUED_MAX (8 * 1024 * 1024)

struct bt_front_part { /* one prompt's request */
    struct bt_front_gen *g;
    struct bt_request *r; /* NULL: not started yet, or over */
    uint64_t tokens;      /* generated, and not charged to its key yet */
};

struct bt_front_gen {
    struct bt_front *f;
    struct bt_list link;     /* in f->gens, or f->dead */
    struct bt_list pending;  /* in f->pending while events wait for the turn's end */
    struct bt_list starting; /* in f->starting while some of its parts are not started */
    struct bt_list ending;   /* in f->ending while its parts are cancelled */
    struct bt_front_hold hold;
    size_t base;             /* bytes of hold that its prompts take */
    struct bt_http_req *req; /* NULL: the answer is out, or nobody waits for it */
    bool closed;             /* what the machine says is not listened to any more */
    struct bt_front_answer a;
    struct bt_buf events;
    bool open; /* the last of events is not completed yet */
    uint32_t event_choice;
    bool started;                  /* the response's header is out */
    bool pulled;                   /* it is sent as fast as the client reads */
    struct bt_list queue;          /* front_piece: what a pulled stream sends next, before events */
    size_t queued;                 /* bytes of it */
    struct bt_front_writer writer; /* of a whole response */
    struct bt_gen_usage usage;
    struct bt_gen_spec *specs; /* of the parts from n_started on */
    struct bt_front_headers headers;
    uint32_t n_parts, n_started, n_running; /* running: not over, the others included */
    uint32_t n_live;                        /* parts that have a request */
    uint32_t n_generations;                 /* choices of all prompts, as its key's limit counts */
    char tenant[33];                        /* "": none */
    char id[48];
    struct bt_front_part parts[];
};

/* ---- front_out.c ---- */

/* Streams: an event of choice is begun in g->events; the turn's end completes and sends it. */
void bt_front_out_begun(struct bt_front_gen *g, uint32_t choice);
/* Streams: completes what was begun. */
void bt_front_out_complete(struct bt_front_gen *g);
/* Streams: begins the event of choice that tells its prompt, and d (NULL: nothing) behind it. */
void bt_front_out_echo(struct bt_front_gen *g, uint32_t choice, const struct bt_gen_delta *d);
/* The end of a stream behind all events. */
void bt_front_out_stream_end(struct bt_front_gen *g);
/* A whole response from g->a and g->usage. */
void bt_front_out_whole(struct bt_front_gen *g);
/* Sends an error in place of the missing part; plan: the failed part's plan, or NULL. */
void bt_front_out_error(struct bt_front_gen *g, const struct bt_front_error *e,
                        const struct bt_front_part *p, const struct bt_gen_plan *plan);
/* Ends it without a proper end. */
void bt_front_out_abort(struct bt_front_gen *g);
void bt_front_out_cleanup(struct bt_front_gen *g);

/* ---- front_gen.c ---- */

/* Writes what was generated so far into the note of g->req. */
void bt_front_gen_note(const struct bt_front_gen *g);

/* Cancels its parts, because no client waits for them. It is freed when its answer is sent. */
void bt_front_gen_close(struct bt_front_gen *g);
/* Ends g->req; its answer is sent. g may be freed afterwards. */
void bt_front_gen_answered(struct bt_front_gen *g);

#endif

/* Within front/: a generation in flight, shared by front_gen.c (its life and the request
 * machine's callbacks) and front_out.c (what its client receives). Loop thread. */
#ifndef BT_CONDUCTOR_FRONT_GEN_H
#define BT_CONDUCTOR_FRONT_GEN_H

#include "conductor/front/front_priv.h"
#include "conductor/front/front_write.h"

/* Limit of events that wait behind echoed prompts. Prompts take seconds to send, so this limit is
 * higher than the usual one for unsent output (bt_http_options.out_max). */
#define FRONT_QUEUED_MAX (8 * 1024 * 1024)
/* Of other streams. A stream that has more unsent ends with an error behind what is unsent; the
 * limit of bt_http_options.out_max leaves room for it. */
#define FRONT_UNSENT_MAX (960 * 1024)

struct bt_front_part { /* one prompt's request */
    struct bt_front_gen *g;
    struct bt_request *r; /* NULL: not started yet, or over */
    uint64_t tokens;      /* generated and not yet charged to the API key */
};

struct bt_front_gen {
    struct bt_front *f;
    struct bt_list link;     /* in f->gens, or f->dead */
    struct bt_list pending;  /* in f->pending while events wait for the end of the loop's turn */
    struct bt_list starting; /* in f->starting while some of its parts are not started */
    struct bt_list ending;   /* in f->ending while its parts are cancelled */
    struct bt_front_hold hold;
    size_t base;             /* bytes of hold that the prompts take */
    struct bt_http_req *req; /* NULL: the answer is sent, or the client has left */
    bool closed;             /* further callbacks of the request machine are ignored */
    struct bt_front_answer a;
    struct bt_buf events;
    bool open; /* the last event in events is not complete yet */
    uint32_t event_choice;
    bool started;                  /* the response's header is out */
    bool pulled;                   /* the answer is made as fast as the client reads it */
    struct bt_list queue;          /* front_piece: what a pulled stream sends next, before events */
    size_t queued;                 /* bytes of it */
    bool last_due;                 /* the format's last events follow behind the queue */
    struct bt_front_writer writer; /* of these, or of a whole response */
    struct bt_gen_usage usage;
    struct bt_gen_spec *specs; /* of the parts from n_started on */
    struct bt_front_headers headers;
    /* n_running counts the parts that are not over, also those not started */
    uint32_t n_parts, n_started, n_running;
    uint32_t n_live;        /* parts that have a request */
    uint32_t n_generations; /* choices of all prompts, as its key's limit counts */
    char tenant[33];        /* "": none */
    char id[48];
    struct bt_trace_context trace;
    struct bt_front_part parts[];
};

/* ---- front_out.c ---- */

/* Streams: an event of this choice was begun in g->events. It is completed and sent at the end of
 * the loop's turn. */
void bt_front_out_begun(struct bt_front_gen *g, uint32_t choice);
/* Streams: completes the event that was begun. */
void bt_front_out_complete(struct bt_front_gen *g);
/* Streams: begins the event that echoes the prompt of this choice, followed by d (NULL:
 * nothing). */
void bt_front_out_echo(struct bt_front_gen *g, uint32_t choice, const struct bt_gen_delta *d);
/* Ends a stream. all: with the format's last events; false: an error event was the last one. */
void bt_front_out_stream_end(struct bt_front_gen *g, bool all);
/* Sends a whole response made from g->a and g->usage. */
void bt_front_out_whole(struct bt_front_gen *g);
/* Sends an error in place of the missing part; plan: the failed part's plan, or NULL. */
void bt_front_out_error(struct bt_front_gen *g, const struct bt_front_error *e,
                        const struct bt_front_part *p, const struct bt_gen_plan *plan);
/* Ends the answer without a proper end, so that the client sees a broken stream. */
void bt_front_out_slow(struct bt_front_gen *g, size_t unsent);
void bt_front_out_cleanup(struct bt_front_gen *g);

/* ---- front_gen.c ---- */

/* Writes what was generated so far into the note of g->req. */
void bt_front_gen_note(const struct bt_front_gen *g);

/* Cancels its parts, because no client waits for them. It is freed when its answer is sent. */
void bt_front_gen_close(struct bt_front_gen *g);
/* Ends g->req, whose answer was sent. g may be freed by this. */
void bt_front_gen_answered(struct bt_front_gen *g);

#endif

/* Within front/: a generation in flight. front_gen.c has its life and the request machine's
 * callbacks; front_out.c has what its client receives. Loop thread. */
#ifndef BT_CONDUCTOR_FRONT_GEN_H
#define BT_CONDUCTOR_FRONT_GEN_H

#include "conductor/front/front_priv.h"
#include "conductor/front/front_write.h"

/* Limit of events that wait behind echoed prompts. It takes seconds to send prompts, so it is
 * higher than the usual limit for unsent output (bt_http_options.out_max). */
#define FRONT_QUEUED_MAX (8 * 1024 * 1024)
/* The limit of other streams. A stream with more unsent bytes ends with an error event behind them;
 * bt_http_options.out_max leaves room for it. */
#define FRONT_UNSENT_MAX (960 * 1024)

struct bt_front_part { /* the request of one prompt */
    struct bt_front_gen *g;
    struct bt_request *r; /* NULL: not started, or ended */
    uint64_t tokens;      /* generated tokens that are not charged to the API key yet */
};

struct bt_front_gen {
    struct bt_front *f;
    struct bt_list link;     /* in f->gens, or f->dead */
    struct bt_list pending;  /* in f->pending while events wait for the end of the loop's turn */
    struct bt_list starting; /* in f->starting while some of its parts are not started */
    struct bt_list ending;   /* in f->ending while its parts are cancelled */
    struct bt_front_hold hold;
    size_t base;             /* bytes of `hold` that the prompts use */
    struct bt_http_req *req; /* NULL: the answer is sent, or the client has left */
    bool closed;             /* further callbacks of the request machine are ignored */
    struct bt_front_answer a;
    struct bt_buf events;
    bool open; /* the last event in events is not complete yet */
    uint32_t event_choice;
    bool started;         /* the header of the response was sent */
    bool pulled;          /* the answer is made as fast as the client reads it */
    struct bt_list queue; /* of front_piece: what a pulled stream sends next, before events */
    size_t queued;        /* bytes in `queue` */
    bool last_due;        /* the format's last events follow the queue */
    struct bt_front_writer writer; /* writes the last events, or a whole response */
    struct bt_gen_usage usage;
    struct bt_gen_spec *specs; /* of the parts from number n_started on */
    struct bt_front_headers headers;
    /* n_running: parts that have not ended, including those that are not started */
    uint32_t n_parts, n_started, n_running;
    uint32_t n_live;        /* parts that have a request */
    uint32_t n_generations; /* choices of all prompts, for the limit of the key */
    char tenant[33];        /* "": none */
    char id[48];
    struct bt_trace_context trace;
    struct bt_front_part parts[];
};

/* ---- front_out.c ---- */

/* Streams: an event of this choice has begun in g->events. It is completed and sent at the end of
 * the loop's turn. */
void bt_front_out_begun(struct bt_front_gen *g, uint32_t choice);
/* Streams: completes the event that has begun. */
void bt_front_out_complete(struct bt_front_gen *g);
/* Streams: begins the event that echoes the prompt of this choice, followed by d (NULL:
 * nothing). */
void bt_front_out_echo(struct bt_front_gen *g, uint32_t choice, const struct bt_gen_delta *d);
/* Ends a stream. all: with the format's last events. false: an error event was the last one. */
void bt_front_out_stream_end(struct bt_front_gen *g, bool all);
/* Sends a whole response made from g->a and g->usage. */
void bt_front_out_whole(struct bt_front_gen *g);
/* Sends an error instead of the missing rest. plan: the plan of the part that failed, or NULL. */
void bt_front_out_error(struct bt_front_gen *g, const struct bt_front_error *e,
                        const struct bt_front_part *p, const struct bt_gen_plan *plan);
/* Ends the answer without its regular end, so that the client sees a broken stream. */
void bt_front_out_slow(struct bt_front_gen *g, size_t unsent);
void bt_front_out_cleanup(struct bt_front_gen *g);

/* ---- front_gen.c ---- */

/* Writes what was generated so far to the note of g->req. */
void bt_front_gen_note(const struct bt_front_gen *g);

/* Cancels the parts, because no client waits for them. g is freed when its answer was sent. */
void bt_front_gen_close(struct bt_front_gen *g);
/* Ends g->req, whose answer was sent. This may free g. */
void bt_front_gen_answered(struct bt_front_gen *g);

#endif

/* The automaton that runs a program: a nondeterministic pushdown automaton over bytes. A thread is
 * a state of an expression and a frame, what follows when the expression ends. Frames are immutable
 * and interned, and so are states (sorted sets of threads): equal situations have equal numbers.
 * One thread of the process at a time; grammar.c has the lock. */
#ifndef BT_GRAMMAR_AUTOMATON_H
#define BT_GRAMMAR_AUTOMATON_H

#include "common/grammar/program_priv.h"
#include "common/grammar/reader.h"
#include "common/grammar/rx_priv.h"

#define BT_STATE_FAILED UINT32_MAX
#define BT_STATE_DEAD   (UINT32_MAX - 1)

/* A frame of the text that a thread has read since the frame BT_TEXT_BEGIN below: one frame a byte.
 * Keys that may come only once need it when they end. */
#define BT_FRAME_TEXT 0x80000000u /* in the number of such a frame */
#define BT_TEXT_BEGIN 0x100u

struct bt_thread {
    bt_rx_t q;
    uint32_t frame;
};
struct bt_frame {
    bt_node_t node;   /* SEQ, REPEAT, OBJECT, DISTINCT or ITEM */
    uint32_t payload; /* SEQ: the next member. REPEAT: count * 2 + (1: at the separator). OBJECT:
                         set of seen keys * 2 + (1: at a value, 0: at a key); of text: the byte.
                         DISTINCT, ITEM: the level (reader.h) */
    uint32_t parent;  /* 0: the text may end */
    uint32_t next;    /* in its hash chain */
    uint32_t inner;   /* the innermost frame of a DISTINCT or an ITEM, itself included; 0: none */
    uint32_t flags;   /* within such a frame, see below */
};
/* What is above the frame, up to the ITEM around it, may still become very many values. */
#define BT_FRAME_F_RICH 1u
/* Of a DISTINCT: each item may be very many values. */
#define BT_FRAME_F_ITEMS_RICH 2u
/* Of DISTINCT and ITEM: once an item is right, its array and all those around can be ended. */
#define BT_FRAME_F_SAFE_UP 4u
#define BT_FRAME_F_SAFE    8u /* no thread of the frame needs a test */
struct bt_state {
    uint32_t at, n;  /* pool[at..at+n) */
    bool final;      /* the text may end */
    uint32_t reader; /* of arrays of different items; 0: no thread is in one */
    uint32_t next;   /* in its hash chain */
    void *mask;      /* of the state, owned by mask.c; NULL: not computed */
};
struct bt_memo { /* what was computed for four numbers */
    uint32_t key[4], value;
};
struct bt_closure_op {
    uint32_t op, x, frame;
    bool fresh;
};
struct bt_distinct { /* for arrays of different values: reader.c, automaton_distinct.c */
    struct bt_reader_node *nodes;
    uint32_t n_nodes, nodes_cap;
    uint32_t *heads, n_heads; /* hash chains of nodes */
    uint32_t out;             /* in a step: the least level at which an item has ended */
    bool uncertain;           /* a step with BT_READER_ANY could not decide */
    uint8_t *rich;            /* [nodes of the program]; NULL: not asked yet */
    struct bt_found *found;   /* results of searches of this generation */
    uint32_t generation;
};
struct bt_automaton {
    struct bt_program *p;
    struct bt_rx_set *rx;
    size_t max_bytes, bytes;
    bool full;
    struct bt_frame *frames;
    uint32_t n_frames, frames_cap;
    uint32_t *frame_heads, n_frame_heads;
    struct bt_state *states;
    uint32_t n_states, states_cap;
    uint32_t *state_heads, n_state_heads;
    struct bt_thread *pool; /* threads of states */
    uint32_t n_pool, pool_cap;
    uint32_t *seen; /* sets of keys: the number of properties, then words of bits */
    uint32_t n_seen, seen_cap;
    struct bt_memo *memo; /* open addressing */
    uint32_t n_memo, memo_cap;
    struct bt_thread *arena; /* a stack of threads of steps under way */
    uint32_t n_arena, arena_cap;
    struct bt_closure_op *ops, *done; /* to do; done in this closure, by open addressing */
    uint32_t n_ops, ops_cap, n_done, done_cap;
    bool final;      /* of the last step */
    uint32_t reader; /* before a step: of the threads; behind it: of those that follow */
    struct bt_distinct distinct;
    struct bt_rx_mark mark; /* what the compilation left in rx */
};

bool bt_automaton_init(struct bt_automaton *m, struct bt_program *p, size_t max_bytes);
void bt_automaton_cleanup(struct bt_automaton *m);
/* Forgets all states and frames, and what steps added to the expressions. */
void bt_automaton_reset(struct bt_automaton *m);

/* The first state. BT_STATE_FAILED: a limit, of this and of the following. */
uint32_t bt_automaton_start(struct bt_automaton *m);
/* Steps arena[at..at+n) by a byte and pushes the threads that follow, sorted, onto the arena; sets
 * final and reader. Returns their number. */
uint32_t bt_automaton_step(struct bt_automaton *m, uint32_t at, uint32_t n, uint8_t byte);
/* The same with threads that can only end with equal items. */
uint32_t bt_automaton_step_all(struct bt_automaton *m, uint32_t at, uint32_t n, uint8_t byte);
/* Sorts arena[at..) and removes doubles; returns how many are left, UINT32_MAX: too many. */
uint32_t bt_automaton_sort(struct bt_automaton *m, uint32_t at);
/* The state of arena[at..) (sorted) and the reader; takes the threads off. DEAD: no threads and not
 * final. */
uint32_t bt_automaton_intern(struct bt_automaton *m, uint32_t at, bool final);
/* Forgets the frames from number n on: of threads that are in no state. */
void bt_automaton_drop_frames(struct bt_automaton *m, uint32_t n);
/* Pushes the threads of a state onto the arena and sets the reader; returns where they begin,
 * UINT32_MAX: a limit. */
uint32_t bt_automaton_load(struct bt_automaton *m, uint32_t state);

/* Within the automaton. */
bool bt_automaton_grow(struct bt_automaton *m, void *array_p, uint32_t n, uint32_t *cap,
                       size_t size);
bool bt_automaton_take(struct bt_automaton *m, size_t bytes);
/* Makes or enlarges the heads of hash chains; all of them are empty then. */
bool bt_automaton_heads(struct bt_automaton *m, uint32_t **heads, uint32_t *n, uint32_t want);
/* The value of four numbers, UINT32_MAX: none. */
uint32_t bt_memo_get(const struct bt_automaton *m, const uint32_t key[4]);
bool bt_memo_put(struct bt_automaton *m, const uint32_t key[4], uint32_t value);

uint32_t bt_frame(struct bt_automaton *m, bt_node_t node, uint32_t payload, uint32_t parent);
uint32_t bt_text_frame(struct bt_automaton *m, bt_node_t node, uint32_t byte, uint32_t parent);
bool bt_push_thread(struct bt_automaton *m, bt_rx_t q, uint32_t frame);
static inline struct bt_frame *bt_frame_at(const struct bt_automaton *m, uint32_t frame)
{
    return &m->frames[frame & ~BT_FRAME_TEXT];
}

/* automaton_distinct.c. Arrays of different values: the frames of a DISTINCT and of an ITEM;
 * whether an item may end here; what a new frame inherits; the threads of a step that can end as
 * they must (their number, UINT32_MAX: a limit). */
uint32_t bt_distinct_enter(struct bt_automaton *m, bt_node_t node, uint32_t parent);
uint32_t bt_distinct_item(struct bt_automaton *m, bt_node_t node, uint32_t parent);
bool bt_distinct_item_done(struct bt_automaton *m, uint32_t frame);
void bt_distinct_frame(struct bt_automaton *m, uint32_t frame, bool text);
uint32_t bt_distinct_filter(struct bt_automaton *m, uint32_t at, uint32_t n);
/* Whether a text leads the thread out of the arrays around it. */
bool bt_distinct_can_end(struct bt_automaton *m, struct bt_thread t, uint32_t reader);
/* Frames or readers were dropped. */
void bt_distinct_forget(struct bt_automaton *m);
/* Whether a mask of the state can be made that does not know the items, with BT_READER_ANY. */
bool bt_distinct_forgets(const struct bt_automaton *m, uint32_t state);
/* Whether the array of node, a DISTINCT, can be ended at all. false with m->full: a limit. */
bool bt_distinct_exists(struct bt_automaton *m, bt_node_t node);

/* automaton_object.c. The empty set of keys of an object, and a set with one more key. name: its
 * spellings, where the object asks for them (distinct). */
uint32_t bt_seen_first(struct bt_automaton *m, uint32_t object);
/* The text of a frame of text; the caller frees it. *base_p: the frame below. NULL: a limit. */
char *bt_frame_text(struct bt_automaton *m, uint32_t frame, uint32_t *n_p, uint32_t *base_p);
/* The frame of the keys of an object, given those seen. */
uint32_t bt_object_frame(struct bt_automaton *m, bt_node_t node, uint32_t seen, uint32_t parent);
/* The last key of a text of keys in all its spellings. */
bt_rx_t bt_object_name(struct bt_automaton *m, const char *text, uint32_t n);
uint32_t *bt_seen_room(struct bt_automaton *m, uint32_t words);
uint32_t bt_seen_intern(struct bt_automaton *m, uint32_t owner, uint32_t words);
uint32_t bt_seen_add(struct bt_automaton *m, uint32_t object, uint32_t seen, uint32_t key,
                     bt_rx_t name);
/* What may come in an object before the next value: after its begin (first) or after a value. */
bt_rx_t bt_object_rx(struct bt_automaton *m, uint32_t object, uint32_t seen, bool first);

#endif

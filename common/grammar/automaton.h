/* The automaton that runs a program: a nondeterministic pushdown automaton over bytes. A thread
 * is a state of an expression and a frame. The frame says what follows when the expression ends.
 * Frames never change, and equal frames have the same number. The same holds for states, which
 * are sorted sets of threads. One thread of the process may use an automaton at a time:
 * grammar.c has the lock. */
#ifndef BT_GRAMMAR_AUTOMATON_H
#define BT_GRAMMAR_AUTOMATON_H

#include "common/grammar/program_priv.h"
#include "common/grammar/reader.h"
#include "common/grammar/rx_priv.h"

#define BT_STATE_FAILED UINT32_MAX
#define BT_STATE_DEAD   (UINT32_MAX - 1)

/* A frame of text holds one byte of the text that a thread has read since the frame BT_TEXT_BEGIN
 * below. Where a key may come only once, the automaton needs the key's text when the key ends. */
#define BT_FRAME_TEXT 0x80000000u /* set in the number of a frame of text */
#define BT_TEXT_BEGIN 0x100u

struct bt_thread {
    bt_rx_t q;
    uint32_t frame;
};
struct bt_frame {
    bt_node_t node; /* SEQ, REPEAT, OBJECT, DISTINCT or ITEM */
    /* By the kind of the node. SEQ: number of the next member. REPEAT: count * 2, + 1 at the
     * separator. OBJECT: set of seen keys * 2, + 1 at a value. Frame of text: the byte. DISTINCT,
     * ITEM: the level (reader.h). */
    uint32_t payload;
    uint32_t parent; /* 0: the text may end with this frame */
    uint32_t next;   /* next frame of the hash chain */
    uint32_t inner;  /* innermost DISTINCT or ITEM frame, which may be this one; 0: none */
    uint32_t flags;  /* for frames within a DISTINCT or an ITEM: */
};
/* What follows above this frame, up to the ITEM around it, can still become very many values. */
#define BT_FRAME_F_RICH 1u
/* Of a DISTINCT: each of its items can be very many values. */
#define BT_FRAME_F_ITEMS_RICH 2u
/* Of a DISTINCT or an ITEM: as soon as the item is right, this array and all arrays around it
 * can end. */
#define BT_FRAME_F_SAFE_UP 4u
#define BT_FRAME_F_SAFE    8u /* no thread with this frame needs a test */
struct bt_state {
    uint32_t at, n; /* pool[at..at+n) */
    bool final;     /* the text may end in this state */
    /* the reader of arrays whose items must differ; 0: no thread is in such an array */
    uint32_t reader;
    uint32_t next; /* next state of the hash chain */
    void *mask;    /* the state's mask, owned by mask.c; NULL: not computed yet */
};
struct bt_memo { /* a result that was computed from four numbers */
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
    uint32_t out;             /* during a step: the smallest level at which an item has ended */
    bool uncertain;           /* a step with BT_READER_ANY could not decide whether items differ */
    /* [nodes of the program] what is known of each node; NULL: nothing yet */
    uint8_t *rich;
    struct bt_found *found; /* results of this generation's searches */
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
    struct bt_memo *memo; /* hash table with open addressing */
    uint32_t n_memo, memo_cap;
    struct bt_thread *arena; /* a stack of threads, for the steps under way */
    uint32_t n_arena, arena_cap;
    /* operations to do, and those that this closure has done (open addressing) */
    struct bt_closure_op *ops, *done;
    uint32_t n_ops, ops_cap, n_done, done_cap;
    bool final; /* whether the text may end after the last step */
    /* before a step: the reader of its threads; after it: the reader of those that follow */
    uint32_t reader;
    struct bt_distinct distinct;
    struct bt_rx_mark mark; /* memory of the expressions when the compilation ended */
};

bool bt_automaton_init(struct bt_automaton *m, struct bt_program *p, size_t max_bytes);
void bt_automaton_cleanup(struct bt_automaton *m);
/* Forgets all states and frames, and what steps have added to the expressions. */
void bt_automaton_reset(struct bt_automaton *m);

/* The first state. BT_STATE_FAILED: a limit was met; so it is for all functions below. */
uint32_t bt_automaton_start(struct bt_automaton *m);
/* Moves the threads arena[at..at+n) on by a byte. Pushes the threads that follow onto the arena,
 * sorted, and sets final and reader. Returns how many threads follow. */
uint32_t bt_automaton_step(struct bt_automaton *m, uint32_t at, uint32_t n, uint8_t byte);
/* The same, but keeps threads that can end only with two equal items. */
uint32_t bt_automaton_step_all(struct bt_automaton *m, uint32_t at, uint32_t n, uint8_t byte);
/* Sorts arena[at..) and removes doubles. Returns how many are left; UINT32_MAX: too many. */
uint32_t bt_automaton_sort(struct bt_automaton *m, uint32_t at);
/* Makes a state of the sorted threads arena[at..) and the reader, and takes the threads off the
 * arena. DEAD: there are no threads, and the text may not end here. */
uint32_t bt_automaton_intern(struct bt_automaton *m, uint32_t at, bool final);
/* Forgets all frames from number n on. Only threads that are in no state may have them. */
void bt_automaton_drop_frames(struct bt_automaton *m, uint32_t n);
/* Pushes a state's threads onto the arena and sets the reader. Returns where the threads begin;
 * UINT32_MAX: a limit was met. */
uint32_t bt_automaton_load(struct bt_automaton *m, uint32_t state);

/* For the files of the automaton only. */
bool bt_automaton_grow(struct bt_automaton *m, void *array_p, uint32_t n, uint32_t *cap,
                       size_t size);
bool bt_automaton_take(struct bt_automaton *m, size_t bytes);
/* Makes or enlarges a table of hash chains. All chains are empty then. */
bool bt_automaton_heads(struct bt_automaton *m, uint32_t **heads, uint32_t *n, uint32_t want);
/* The value that was kept for four numbers; UINT32_MAX: none. */
uint32_t bt_memo_get(const struct bt_automaton *m, const uint32_t key[4]);
bool bt_memo_put(struct bt_automaton *m, const uint32_t key[4], uint32_t value);

uint32_t bt_frame(struct bt_automaton *m, bt_node_t node, uint32_t payload, uint32_t parent);
uint32_t bt_text_frame(struct bt_automaton *m, bt_node_t node, uint32_t byte, uint32_t parent);
bool bt_push_thread(struct bt_automaton *m, bt_rx_t q, uint32_t frame);
static inline struct bt_frame *bt_frame_at(const struct bt_automaton *m, uint32_t frame)
{
    return &m->frames[frame & ~BT_FRAME_TEXT];
}

/* automaton_distinct.c: the frames of a DISTINCT and of an ITEM; whether an item may end here;
 * what a new frame takes over from its parent; which threads of a step can still end with
 * different items (returns their number, UINT32_MAX: a limit was met). */
uint32_t bt_distinct_enter(struct bt_automaton *m, bt_node_t node, uint32_t parent);
uint32_t bt_distinct_item(struct bt_automaton *m, bt_node_t node, uint32_t parent);
bool bt_distinct_item_done(struct bt_automaton *m, uint32_t frame);
void bt_distinct_frame(struct bt_automaton *m, uint32_t frame, bool text);
uint32_t bt_distinct_filter(struct bt_automaton *m, uint32_t at, uint32_t n);
/* Returns whether some text leads the thread out of all arrays around it. */
bool bt_distinct_can_end(struct bt_automaton *m, struct bt_thread t, uint32_t reader);
/* Must be called after frames or readers were dropped. */
void bt_distinct_forget(struct bt_automaton *m);
/* Returns whether one mask (made with BT_READER_ANY) serves all states that differ from this one
 * in their items only. */
bool bt_distinct_forgets(const struct bt_automaton *m, uint32_t state);
/* Returns whether the array of a DISTINCT node can end at all. false with m->full: a limit was
 * met. */
bool bt_distinct_exists(struct bt_automaton *m, bt_node_t node);

/* automaton_object.c: the empty set of keys of an object, and a set with one more key. name: the
 * key's spellings, for objects whose keys must differ (distinct). */
uint32_t bt_seen_first(struct bt_automaton *m, uint32_t object);
/* The text that frames of text hold; the caller frees it. *base_p: the frame below them. NULL: a
 * limit was met. */
char *bt_frame_text(struct bt_automaton *m, uint32_t frame, uint32_t *n_p, uint32_t *base_p);
/* The frame that follows the keys of an object, for the set of keys seen so far. */
uint32_t bt_object_frame(struct bt_automaton *m, bt_node_t node, uint32_t seen, uint32_t parent);
/* The last key in a text of keys, in all its spellings. */
bt_rx_t bt_object_name(struct bt_automaton *m, const char *text, uint32_t n);
uint32_t *bt_seen_room(struct bt_automaton *m, uint32_t words);
uint32_t bt_seen_intern(struct bt_automaton *m, uint32_t owner, uint32_t words);
uint32_t bt_seen_add(struct bt_automaton *m, uint32_t object, uint32_t seen, uint32_t key,
                     bt_rx_t name);
/* The expression of what may come in an object before the next value: at its begin (first), or
 * after a value. */
bt_rx_t bt_object_rx(struct bt_automaton *m, uint32_t object, uint32_t seen, bool first);

#endif

/* common/rpc without gRPC: streams and calls whose other end is the fuzz target. A target that uses
 * it calls fake_rpc_create, which makes the linker take these functions instead of the real ones.
 * As with gRPC, callbacks come from fake_rpc_* below only, or from the destruction of a channel or
 * a server, never from inside of a call of the owner. */
#ifndef TESTS_FUZZ_FAKE_RPC_H
#define TESTS_FUZZ_FAKE_RPC_H

#include "common/rpc/rpc.h"

struct bt_rpc *fake_rpc_create(struct bt_loop *loop);
struct bt_rpc *fake_rpc_last(void); /* what was created last, by whomever */

/* ---- streams: of either side; those that the owner has closed are not shown ---- */
uint32_t fake_rpc_streams(const struct bt_rpc *rpc);
struct bt_rpc_stream *fake_rpc_stream(const struct bt_rpc *rpc, uint32_t i);
bool fake_rpc_stands(const struct bt_rpc *rpc, const struct bt_rpc_stream *s); /* is it one? */
const char *fake_rpc_stream_method(const struct bt_rpc_stream *s);
const char *fake_rpc_stream_target(const struct bt_rpc_stream *s); /* client side: who is dialed */
/* The oldest message that the owner has sent and this was not called for; NULL: none. Valid until
 * the next call about the stream. taken: tells the owner that it has left (on_sent, on_writable),
 * so s may be gone. */
const void *fake_rpc_sent(struct bt_rpc_stream *s, size_t *len_p);
void fake_rpc_sent_done(struct bt_rpc_stream *s);
/* A message from the other end; of owners who take pieces it comes in up to three, cut at `cut`. */
void fake_rpc_deliver(struct bt_rpc_stream *s, const void *data, size_t len, size_t cut);
/* The other end has ended it. */
void fake_rpc_end(struct bt_rpc_stream *s, int code, const char *detail);
/* While set, sends of the stream say AGAIN. */
void fake_rpc_full(struct bt_rpc_stream *s, bool full);
/* While set, nobody's certificate is what the owner asks for. */
void fake_rpc_strangers(struct bt_rpc *rpc, bool strangers);

/* ---- unary calls that the owner makes ---- */
struct fake_rpc_call {
    const char *method;
    const void *data;
    size_t len;
};
uint32_t fake_rpc_calls(const struct bt_rpc *rpc);
struct fake_rpc_call fake_rpc_call(const struct bt_rpc *rpc, uint32_t i); /* 0: the oldest */
void fake_rpc_answer(struct bt_rpc *rpc, uint32_t i, int code, const void *data, size_t len);

/* ---- the owner's servers ---- */
/* A client opens a stream of this method; NULL: there is none, or the owner has closed it. */
struct bt_rpc_stream *fake_rpc_open(struct bt_rpc *rpc, const char *method);
/* A unary call; false: there is no such method, or it is not answered yet. Then *code_p is what was
 * answered. */
bool fake_rpc_ask(struct bt_rpc *rpc, const char *method, const void *data, size_t len,
                  int *code_p);

#endif

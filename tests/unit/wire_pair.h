/* Two wires (kvstore/wire/wire.h) in one process, each with a slab of its own, which move KV to
 * each other over gRPC or over UCX. The test is the core of both: it grants and takes flows. One
 * loop, polled. Include after cmocka.h. A program that uses UCX calls bt_wx_child_main_if_asked
 * first. */
#ifndef BT_TESTS_WIRE_PAIR_H
#define BT_TESTS_WIRE_PAIR_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/log/log.h"
#include "kvstore/wire/wire.h"
#include "loop_wait.h"

#define WP_PAGE    16u /* tokens of a block */
#define WP_LAYERS  3u
#define WP_SEG     2048u /* bytes of a segment, if the options do not say */
#define WP_BLOCKS  64u   /* of a flow, at most */
#define WP_SLOTS   400u
#define WP_SOURCES 16

struct wp_source { /* a flow that an end can send */
    uint64_t request;
    uint32_t epoch;
    struct bt_flow_shape shape;
    uint32_t slots[WP_BLOCKS];
    struct bt_kv_key names[WP_BLOCKS];
    bt_flow_word_t *word;
    bt_status_t answer; /* of lookup, if it is not OK */
    uint32_t looked;    /* calls of lookup */
    bool abort_inside;  /* lookup takes the grant back at once */
    struct bt_wire_send *send;
    const struct bt_wire_trailer *early; /* given inside lookup */
    uint32_t n_ended;
    bt_status_t ended;
};

struct wp_sink { /* a flow that an end receives */
    uint64_t request;
    uint32_t epoch, first;
    struct bt_flow_shape shape;
    uint32_t slots[WP_BLOCKS];
    struct bt_kv_key names[WP_BLOCKS];
    bt_flow_word_t word;
    struct bt_wire_recv *recv;
    uint32_t n_progress, n_offer, n_done, n_failed, n_quiet;
    uint8_t have[WP_BLOCKS];
    struct bt_wire_trailer trailer;
    uint64_t first_ns, last_ns, bytes, segments;
    bt_status_t failed;
    char why[200];
};

struct wp_want { /* a fetch that an end was asked for */
    struct bt_wire_send *send;
    char peer[64];
    uint64_t incarnation, request;
    uint32_t epoch, class, n, n_seen, n_ended;
    struct bt_kv_key keys[WP_BLOCKS];
    bt_status_t answer, ended;
    bt_flow_word_t word;
};

struct wp_end {
    char name[32], target[64];
    const char *rpc_listen; /* NULL: any port */
    uint64_t incarnation;
    struct bt_rpc_server *server;
    struct bt_slab *slab;
    struct bt_slab_crcs *crcs;
    struct bt_metrics *metrics;
    struct bt_wire *wire;
    uint32_t next_slot, next_word;
    struct wp_source sources[WP_SOURCES];
    uint32_t n_sources;
    struct wp_want want;
};

struct wp_options { /* of both ends; zero: usual */
    bool over_grpc, no_crcs, no_want;
    const char *const *listen;
    const char *secret;
    uint64_t in_flight, idle_ms;
    uint32_t seg; /* bytes of a segment */
};

struct wp {
    struct bt_loop *loop;
    struct bt_rpc *rpc;
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    struct wp_options opt;
    uint32_t seg; /* bytes of a segment */
    struct wp_end e[2];
};

/* The pair of a program. */
static struct wp P;
static struct wp_end *const A = &P.e[0], *const B = &P.e[1];

/* ---- contents ---- */

static inline uint8_t *wp_segment(const struct wp *p, const struct wp_end *e, uint32_t slot,
                                  uint32_t layer)
{
    uint32_t bytes;
    uint64_t off = bt_kv_segment(&p->layout, layer, &bytes);
    assert_int_equal(bytes, p->seg);
    return (uint8_t *)bt_slab_data(e->slab, slot) + off;
}

static inline uint8_t wp_byte(uint64_t request, uint32_t block, uint32_t layer, uint32_t i)
{
    return (uint8_t)(request * 31 + block * 7 + layer * 3 + i * 13 + i / 251);
}

static inline uint32_t wp_slots(struct wp_end *e, uint32_t n)
{
    uint32_t first = e->next_slot;
    e->next_slot += n;
    assert_true(e->next_slot <= e->slab->super->n_slots);
    return first;
}

/* ---- the sending core ---- */

/* Blocks of the request with its contents; nothing of it may be sent yet. */
static inline struct wp_source *wp_grant(struct wp *p, struct wp_end *e, uint64_t request,
                                         uint32_t epoch, uint32_t tokens, uint32_t chunk)
{
    assert_true(e->n_sources < WP_SOURCES);
    struct wp_source *s = &e->sources[e->n_sources++];
    *s = (struct wp_source){.request = request, .epoch = epoch};
    s->shape = (struct bt_flow_shape){tokens, WP_PAGE, chunk, WP_LAYERS};
    uint32_t n = bt_flow_blocks(&s->shape), slot = wp_slots(e, n);
    for (uint32_t b = 0; b < n; b++) {
        s->slots[b] = slot + n - 1 - b; /* in no order of the slab */
        bt_slab_private_key(request, 0, b, &s->names[b]);
        bt_slab_crcs_forget(e->crcs, s->slots[b]);
        for (uint32_t l = 0; l < WP_LAYERS; l++) {
            uint8_t *at = wp_segment(p, e, s->slots[b], l);
            for (uint32_t i = 0; i < p->seg; i++) {
                at[i] = wp_byte(request, b, l, i);
            }
        }
    }
    s->word = &e->slab->flows[1 + e->next_word++];
    bt_flow_raise(s->word, epoch, 0);
    return s;
}

static inline void wp_raise(struct wp_end *e, struct wp_source *s, uint32_t progress)
{
    bt_flow_raise(s->word, s->epoch, progress);
    bt_wire_kick(e->wire);
}

static inline bt_status_t wp_lookup(void *arg, uint64_t request, uint32_t epoch,
                                    struct bt_wire_send *snd, struct bt_wire_source *src)
{
    struct wp_end *e = arg;
    for (uint32_t i = 0; i < e->n_sources; i++) {
        struct wp_source *s = &e->sources[i];
        if (s->request != request) {
            continue;
        }
        s->looked++;
        if (s->answer != BT_OK || s->epoch != epoch) {
            return s->answer != BT_OK ? s->answer : BT_ERR_STALE;
        }
        *src = (struct bt_wire_source){s->shape, s->slots, s->names, s->word, s};
        s->send = snd;
        if (s->early != NULL) {
            bt_wire_send_trailer(snd, s->early);
        }
        if (s->abort_inside) {
            bt_wire_send_abort(snd, BT_ERR_EXHAUSTED, "no room after all");
        }
        return BT_OK;
    }
    return BT_ERR_NOT_FOUND;
}

static inline void wp_send_end(void *arg, void *grant, struct bt_wire_send *snd, bt_status_t st)
{
    struct wp_source *s = grant;
    (void)arg;
    assert_ptr_equal(s->send, snd);
    s->send = NULL;
    s->n_ended++;
    s->ended = st;
}

static inline bt_status_t wp_on_want(void *arg, const struct bt_wire_want *want,
                                     struct bt_wire_send *snd, void **handle_p)
{
    struct wp_want *w = &((struct wp_end *)arg)->want;
    bt_status_t answer = w->answer;
    w->n_seen++;
    if (answer != BT_OK) {
        return answer;
    }
    w->send = snd;
    snprintf(w->peer, sizeof(w->peer), "%s", want->peer);
    w->incarnation = want->incarnation;
    w->request = want->request;
    w->epoch = want->epoch;
    w->class = want->class;
    w->n = want->n;
    assert_true(want->n <= WP_BLOCKS);
    memcpy(w->keys, want->keys, want->n * sizeof(*want->keys));
    *handle_p = w;
    return BT_OK;
}

static inline void wp_want_end(void *arg, void *handle, bt_status_t st)
{
    struct wp_want *w = handle;
    assert_ptr_equal(w, &((struct wp_end *)arg)->want);
    w->send = NULL;
    w->n_ended++;
    w->ended = st;
}

/* ---- the receiving core ---- */

static inline void wp_on_offer(void *arg, const uint8_t *have, uint32_t n)
{
    struct wp_sink *k = arg;
    k->n_offer++;
    assert_true(n <= WP_BLOCKS);
    memcpy(k->have, have, n);
}

static inline void wp_on_progress(void *arg)
{
    ((struct wp_sink *)arg)->n_progress++;
}

static inline void wp_on_done(void *arg, const struct bt_wire_trailer *t, uint64_t first_ns,
                              uint64_t last_ns, uint64_t bytes, uint64_t segments)
{
    struct wp_sink *k = arg;
    assert_int_equal(k->n_failed + k->n_quiet, 0);
    k->n_done++;
    k->trailer = *t;
    k->first_ns = first_ns;
    k->last_ns = last_ns;
    k->bytes = bytes;
    k->segments = segments;
}

static inline void wp_on_failed(void *arg, bt_status_t st, const char *why)
{
    struct wp_sink *k = arg;
    assert_int_equal(k->n_done + k->n_quiet, 0);
    k->n_failed++;
    k->failed = st;
    snprintf(k->why, sizeof(k->why), "%s", why);
}

static inline void wp_on_quiet(void *arg)
{
    struct wp_sink *k = arg;
    k->n_quiet++;
    k->recv = NULL;
}

static const struct bt_wire_recv_ops wp_sink_ops = {.on_offer = wp_on_offer,
                                                    .on_progress = wp_on_progress,
                                                    .on_done = wp_on_done,
                                                    .on_failed = wp_on_failed,
                                                    .on_quiet = wp_on_quiet};

static inline struct bt_wire_peer_addr wp_addr(const struct wp_end *e)
{
    return (struct bt_wire_peer_addr){e->name, e->target, e->incarnation};
}

static inline void wp_take_slots(struct wp_end *e, struct wp_sink *k, uint32_t n)
{
    uint32_t slot = wp_slots(e, n);
    for (uint32_t b = 0; b < n; b++) {
        k->slots[b] = slot + b;
        memset(bt_slab_data(e->slab, k->slots[b]), 0xee, e->slab->super->block_bytes);
    }
}

/* End e pulls what the source says from the other one. */
static inline void wp_recv(struct wp *p, struct wp_end *e, struct wp_sink *k,
                           const struct bt_wire_peer_addr *from, uint64_t request, uint32_t epoch,
                           uint32_t tokens, uint32_t chunk, uint32_t first, uint64_t timeout_ms)
{
    (void)p;
    *k = (struct wp_sink){.request = request, .epoch = epoch, .first = first};
    k->shape = (struct bt_flow_shape){tokens, WP_PAGE, chunk, WP_LAYERS};
    uint32_t n = bt_flow_blocks(&k->shape);
    wp_take_slots(e, k, n);
    for (uint32_t b = 0; b < n; b++) {
        bt_slab_private_key(request, 0, b, &k->names[b]);
    }
    k->recv = bt_wire_recv_start(e->wire, from, request, epoch, &k->shape, first, k->slots,
                                 k->names, &k->word, timeout_ms, &wp_sink_ops, k);
}

/* End B pulls the request of A's source s from block `first` on. */
static inline void wp_pull(struct wp *p, struct wp_sink *k, const struct wp_source *s,
                           uint32_t first)
{
    struct bt_wire_peer_addr a = wp_addr(&p->e[0]);
    wp_recv(p, &p->e[1], k, &a, s->request, s->epoch, s->shape.n_tokens, s->shape.chunk_tokens,
            first, 0);
}

static const struct bt_wire_trailer wp_trailer = {4711, true, 123456789};

/* All of A's source may be sent, with the trailer. */
static inline void wp_send_all(struct wp *p, struct wp_source *s)
{
    wp_raise(&p->e[0], s, bt_flow_items(&s->shape));
    if (s->send != NULL) {
        bt_wire_send_trailer(s->send, &wp_trailer);
    } else {
        s->early = &wp_trailer;
    }
}

/* Blocks below `first` are untouched; the others are the source's, and their CRC rows are right. */
static inline void wp_check(const struct wp *p, const struct wp_end *e, const struct wp_sink *k,
                            uint64_t request, uint32_t first, uint32_t n)
{
    for (uint32_t b = 0; b < n; b++) {
        for (uint32_t l = 0; l < WP_LAYERS; l++) {
            const uint8_t *at = wp_segment(p, e, k->slots[b], l);
            for (uint32_t i = 0; i < p->seg; i++) {
                if (at[i] != (b < first ? 0xee : wp_byte(request, b, l, i))) {
                    fail_msg("request %llu: block %u layer %u byte %u is %02x",
                             (unsigned long long)request, b, l, i, at[i]);
                }
            }
            uint32_t crc = bt_slab_segment_crc(&k->names[b], l, p->layout.layout_id, at, p->seg);
            if (b >= first) {
                assert_int_equal(e->slab->crcs[k->slots[b] * WP_LAYERS + l], crc);
            }
        }
    }
}

/* ---- metrics ---- */

/* The series' value in the text that is exported; -1: there is no such series. */
static inline double wp_metric(const struct wp_end *e, const char *series)
{
    struct bt_buf b;
    char line[256];
    bt_buf_init(&b);
    bt_metrics_render(e->metrics, &b);
    bt_buf_append(&b, "", 1);
    snprintf(line, sizeof(line), "\n%s ", series);
    const char *at = strstr((const char *)b.data, line);
    double v = at != NULL ? strtod(at + strlen(line), NULL) : -1;
    bt_buf_cleanup(&b);
    return v;
}

/* ---- life ---- */

static inline void wp_slab(struct wp *p, struct wp_end *e)
{
    char path[96], err[256];
    snprintf(path, sizeof(path), "/dev/shm/baton-wire-pair.%d.%s", (int)getpid(), e->name);
    uint64_t slot = BT_ALIGN_UP(p->layout.block_bytes, 4096ull) + 4096;
    struct bt_slab_spec spec = {.path = path,
                                .bytes = WP_SLOTS * slot + (1 << 20),
                                .layout = &p->layout,
                                .root = &p->root,
                                .incarnation = e->incarnation};
    assert_int_equal(bt_slab_create(&spec, NULL, NULL, &e->slab, err, sizeof(err)), BT_OK);
    assert_int_equal(bt_slab_unlink(e->slab, path, err, sizeof(err)), BT_OK);
    e->crcs = bt_slab_crcs_create(e->slab, &p->layout);
}

static inline struct bt_wire_config wp_config(const struct wp *p, const struct wp_end *e)
{
    static const char *const loopback[] = {"127.0.0.1", NULL};
    return (struct bt_wire_config){
        .cluster = "test",
        .name = e->name,
        .incarnation = e->incarnation,
        .layout = &p->layout,
        .root = &p->root,
        .crcs = p->opt.no_crcs ? NULL : e->crcs,
        .listen = p->opt.listen != NULL ? p->opt.listen : loopback,
        .over_grpc = p->opt.over_grpc,
        .bytes_in_flight_max = p->opt.in_flight,
        .secret = p->opt.secret,
        .secret_len = p->opt.secret != NULL ? strlen(p->opt.secret) : 0,
        .idle_ms = p->opt.idle_ms,
    };
}

static inline void wp_end_start(struct wp *p, struct wp_end *e, const struct bt_wire_config *conf)
{
    static const struct bt_wire_ops all = {
        .lookup = wp_lookup, .send_end = wp_send_end, .want = wp_on_want, .want_end = wp_want_end};
    struct bt_wire_ops ops = all;
    char err[512] = "";
    int port;
    ops.want = p->opt.no_want ? NULL : ops.want;
    e->metrics = bt_metrics_create();
    assert_int_equal(bt_rpc_server_create(p->rpc,
                                          e->rpc_listen != NULL ? e->rpc_listen : "127.0.0.1:0",
                                          &e->server, &port),
                     BT_OK);
    snprintf(e->target, sizeof(e->target), "127.0.0.1:%d", port);
    if (bt_wire_create(p->loop, p->rpc, e->server, e->slab, conf, &ops, e, e->metrics, &e->wire,
                       err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
    bt_rpc_server_start(e->server);
}

/* The wire and its server; the slab stays. */
static inline void wp_end_stop(struct wp_end *e)
{
    bt_wire_destroy(e->wire);
    bt_rpc_server_destroy(e->server);
    bt_metrics_destroy(e->metrics);
    e->wire = NULL;
    e->server = NULL;
    e->metrics = NULL;
}

static inline void wp_open(struct wp *p, const struct wp_options *opt)
{
    memset(p, 0, sizeof(*p));
    p->opt = *opt;
    p->seg = opt->seg != 0 ? opt->seg : WP_SEG;
    bt_log_init("test", "wire", BT_LOG_ERROR, false);
    assert_int_equal(bt_loop_create(&p->loop), BT_OK);
    assert_int_equal(bt_rpc_create(p->loop, &p->rpc), BT_OK);
    assert_int_equal(bt_kv_layout_gqa(WP_PAGE, WP_LAYERS, 4, p->seg / (4 * 4 * WP_PAGE), BT_DT_BF16,
                                      0, &p->layout),
                     BT_OK);
    memset(&p->root, 7, sizeof(p->root));
    for (uint32_t i = 0; i < 2; i++) {
        struct wp_end *e = &p->e[i];
        snprintf(e->name, sizeof(e->name), "kvstore-n%u", i + 1);
        e->incarnation = 100 + i;
        wp_slab(p, e);
        struct bt_wire_config conf = wp_config(p, e);
        wp_end_start(p, e, &conf);
    }
}

static inline void wp_close(struct wp *p)
{
    for (uint32_t i = 0; i < 2; i++) {
        wp_end_stop(&p->e[i]);
    }
    bt_rpc_destroy(p->rpc);
    bt_loop_poll(p->loop, 0);
    bt_loop_destroy(p->loop);
    for (uint32_t i = 0; i < 2; i++) {
        bt_slab_crcs_destroy(p->e[i].crcs);
        bt_slab_unmap(p->e[i].slab);
    }
}

/* ---- set-ups of tests ---- */

static inline int wp_over_grpc(void **state)
{
    (void)state;
    wp_open(&P, &(struct wp_options){.over_grpc = true});
    return 0;
}

static inline int wp_over_ucx(void **state)
{
    (void)state;
    wp_open(&P, &(struct wp_options){.secret = "a secret of at least 32 characters"});
    return 0;
}

static inline int wp_over(void **state)
{
    (void)state;
    wp_close(&P);
    return 0;
}

#endif

/* baton-prefill and baton-decode: start, serve, drain, stop. The control thread: it runs the loop,
 * owns the tables of submissions and passes messages between sessions and the engine thread. */
#include "common/worker/control.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "common/conf/daemon.h"
#include "common/etcd/starting.h"
#include "common/log/log.h"
#include "common/loop/notify.h"

#define DRAIN_MS    50 /* time between two checks whether all is done; nothing waits for a check */
#define ENDING_NS   2000000000ull /* for cancelled requests to become quiet */
#define FLUSH_TURNS 10            /* of 5 ms: the last messages get that long to leave */
/* For a conductor that is behind. Tokens for the others wait meanwhile: their clients see one slow
 * step at most. */
#define HELD_NS 100000000ull

/* ---- tables ---- */

void bt_wctl_command(struct bt_wctl *w, const struct bt_wcmd *cmd)
{
    /* The ring has room for everything that active requests and puts can ask for. So it is full
     * only if the engine thread has hung for minutes; then a restart by the supervisor is the only
     * way out. */
    bool pushed = bt_ring_push(&w->core.in, cmd);
    BT_ASSERT(pushed);
}

struct bt_wreq *bt_wctl_find(struct bt_wctl *w, uint64_t request, uint32_t epoch)
{
    struct bt_wkey key = {.request = request, .epoch = epoch};
    return bt_map_get(w->active, &key);
}

void bt_wctl_cancel(struct bt_wctl *w, struct bt_wreq *r, bt_status_t st, const char *why)
{
    if (r->ctl.cancel_sent) {
        return;
    }
    r->ctl.cancel_sent = true;
    struct bt_wcmd c = {.kind = BT_WCMD_CANCEL, .req = r, .status = st};
    snprintf(c.detail, sizeof(c.detail), "%s", why);
    bt_wctl_command(w, &c);
}

static void cancel_everything(struct bt_wctl *w, bt_status_t st, const char *why)
{
    size_t it = 0;
    struct bt_wreq *r;
    while ((r = bt_map_next(w->active, &it, NULL)) != NULL) {
        bt_wctl_cancel(w, r, st, why);
    }
}

static void on_ended(struct bt_wctl *w, const struct bt_wout *o)
{
    struct bt_wreq *r = o->req;
    struct bt_wkey key = {.request = r->sub->request, .epoch = r->sub->epoch};
    bt_map_del(w->active, &key);
    bt_list_remove(&r->ctl.link);
    w->n_active--;
    w->n_choices -= bt_wreq_choices(r);
    bt_wsession_ended(w, r, o->status, o->detail);
    struct bt_wcmd c = {.kind = BT_WCMD_FORGET, .req = r};
    bt_wctl_command(w, &c);
}

/* ---- health and state ---- */

static const char *health(void *arg)
{
    struct bt_wctl *w = arg;
    switch (w->state) {
    case BT_WCTL_LOADING: return w->health;
    case BT_WCTL_DRAINING:
    case BT_WCTL_ENDING:
    case BT_WCTL_STOPPED: return "draining";
    case BT_WCTL_SERVING: break;
    }
    return w->attach == 0 ? "not attached to the kvstore of this node"
           : w->joined    ? NULL
                          : "not registered in etcd yet";
}

void bt_wctl_update_state(struct bt_wctl *w)
{
    if (w->net.member == NULL) {
        return;
    }
    Baton__MemberState s = BATON__MEMBER_STATE__READY;
    if (w->state != BT_WCTL_SERVING) {
        s = BATON__MEMBER_STATE__DRAINING;
    } else if (w->attach == 0) {
        s = BATON__MEMBER_STATE__STARTING;
    }
    bt_member_set_state(w->net.member, s);
    if (s == BATON__MEMBER_STATE__READY && w->joined && !w->ready_said) {
        w->ready_said = true;
        BT_INFO("ready",
                "name=%s rpc=%s http=%s incarnation=%016llx model=%s device=%s pages=%u slots=%u",
                w->conf.name, w->net.rpc_addr, w->net.http_addr, (unsigned long long)w->incarnation,
                w->model_id, w->core.info->device, w->core.info->pages, w->core.max_slots);
        bt_notify_status("serving on %s with %u pages, %s", w->net.rpc_addr, w->core.info->pages,
                         w->core.info->device);
        bt_notify_ready();
    }
}

static void stop_with(struct bt_wctl *w, int code)
{
    if (w->state != BT_WCTL_STOPPED) {
        w->state = BT_WCTL_STOPPED;
        w->exit_code = code;
        bt_loop_stop(w->loop);
    }
}

/* ---- membership ---- */

static void on_joined(void *arg)
{
    struct bt_wctl *w = arg;
    w->joined = true;
    bt_starting_end(w->net.starting);
    w->net.starting = NULL;
    bt_wctl_update_state(w);
}

static void on_refused(void *arg, bt_status_t st, const char *why)
{
    BT_ERROR("join_refused", "status=%s why=%s", bt_status_name(st), why);
    stop_with(arg, BT_EXIT_REFUSED);
}

static void on_lost(void *arg)
{
    (void)arg;
    BT_WARN("membership_lost", "why=%s",
            "etcd or this process stood still for longer than the lease; registering again. If "
            "this repeats, look at etcd's disk and at the load of both hosts");
}

static bool connect_etcd(struct bt_wctl *w)
{
    if (bt_etcd_create(w->net.rpc, w->conf.common.etcd_endpoints, w->net.tls.etcd, &w->net.etcd) !=
        BT_OK) {
        BT_ERROR("etcd", "why=%s", "etcd.endpoints cannot be used");
        return false;
    }
    Baton__Starting self = BATON__STARTING__INIT;
    self.kind = (char *)(uintptr_t)w->kind;
    self.name = w->conf.name;
    self.node = w->conf.common.node_id;
    self.http = w->net.http_addr;
    self.what = (char *)(uintptr_t) "starts";
    self.started_ns = w->started_ns;
    w->net.starting = bt_starting_begin(w->net.etcd, w->conf.common.cluster_name, &self);
    return true;
}

void bt_wctl_join(struct bt_wctl *w)
{
    static const struct bt_member_ops ops = {
        .on_joined = on_joined, .on_refused = on_refused, .on_lost = on_lost};
    const struct bt_conf_common *c = &w->conf.common;
    Baton__Member self = BATON__MEMBER__INIT;
    self.kind = (char *)(uintptr_t)w->kind;
    self.name = w->conf.name;
    self.node = c->node_id;
    self.incarnation = w->incarnation;
    self.pid = (uint32_t)getpid();
    self.rpc = w->net.rpc_addr;
    self.http = w->net.http_addr;
    self.state = w->attach != 0 ? BATON__MEMBER_STATE__READY : BATON__MEMBER_STATE__STARTING;
    self.started_ns = w->started_ns;
    self.version = (char *)bt_version();
    self.device = (char *)(uintptr_t)w->core.info->device;
    self.model = w->model_id;
    self.role = w->role.now;
    self.role_epoch = w->role.epoch;
    Baton__ClusterSettings s = BATON__CLUSTER_SETTINGS__INIT;
    s.root_key.data = w->core.root.b;
    s.root_key.len = sizeof(w->core.root.b);
    s.layout_id = w->core.layout.layout_id;
    s.block_tokens = (uint32_t)c->kv_block_tokens;
    s.flow_chunk_tokens = (uint32_t)c->kv_flow_chunk_tokens;
    s.salt_id.data = w->secret.id;
    s.salt_id.len = w->secret.id_len;
    s.model_id = w->model_id;
    w->net.member = bt_member_join(w->net.etcd, c->cluster_name, &self, &s, &ops, w);
}

/* ---- messages of the engine thread ---- */

static void on_progress(struct bt_wctl *w, const struct bt_wout *o)
{
    int percent = (int)(o->u.fraction * 100);
    snprintf(w->health, sizeof(w->health), "loading: %s %d%%", o->detail, percent);
    if (w->net.starting != NULL) {
        bt_starting_say(w->net.starting, o->detail, (uint32_t)BT_MIN(BT_MAX(percent, 0), 100));
    }
    if (o->u.fraction >= w->load_logged + 0.1 || o->u.fraction < w->load_logged ||
        (o->u.fraction >= 1 && w->load_logged < 1)) {
        w->load_logged = o->u.fraction;
        BT_INFO("loading", "what=%s percent=%d", o->detail, (int)(o->u.fraction * 100));
        bt_notify_status("%s", w->health);
    }
}

static void on_engine_ready(struct bt_wctl *w)
{
    uint32_t n = w->core.max_tokens;
    w->engine_ready = true;
    bt_wstats_cache_config(w->stats, w->core.block_tokens, w->core.info->pages);
    bt_wstats_engine(w->stats, w->core.vt->name, w->core.info->device,
                     (w->core.info->caps & BT_ENGINE_CAP_EXACT) != 0);
    w->tok = bt_calloc(n, sizeof(w->tok[0]));
    w->tok_ptr = bt_calloc(n, sizeof(w->tok_ptr[0]));
    w->top = bt_calloc((size_t)n * BT_ENGINE_MAX_TOP, sizeof(w->top[0]));
    w->top_ptr = bt_calloc((size_t)n * BT_ENGINE_MAX_TOP, sizeof(w->top_ptr[0]));
    BT_INFO("engine", "plugin=%s device=%s pages=%u block_tokens=%u slots=%u rows=%u context=%u",
            w->core.vt->name, w->core.info->device, w->core.info->pages, w->core.block_tokens,
            w->core.max_slots, w->core.max_rows, w->core.info->max_model_len);
    if (w->state != BT_WCTL_LOADING) {
        return; /* stop was ordered meanwhile */
    }
    w->core.masks.pool =
        bt_wmask_pool_create(&(struct bt_wmask_pool_conf){.loop = w->loop,
                                                          .stats = w->stats,
                                                          .model_path = w->conf.common.model_path,
                                                          .vocab = w->core.info->vocab,
                                                          .made = bt_wsession_mask_made,
                                                          .arg = w});
    if (w->core.masks.pool == NULL) {
        BT_ERROR("start", "why=%s",
                 "no threads for masks: raise the limit of threads (TasksMax=, ulimit -u)");
        stop_with(w, BT_EXIT_FAILED);
        return;
    }
    w->state = BT_WCTL_SERVING;
    bt_notify_status("the engine is ready; waiting for this node's kvstore and for etcd");
    bt_rpc_server_start(w->net.server);
    bt_wnode_start(w);
    bt_wrole_start(w); /* registers in etcd when it knows the role */
    if (w->net.starting != NULL) {
        bt_starting_say(w->net.starting, "waits for its kvstore and for etcd", 100);
    }
}

static void on_fatal(struct bt_wctl *w, const struct bt_wout *o)
{
    BT_ERROR("out_of_service", "why=%s requests=%u", o->detail, w->n_active);
    size_t it = 0;
    struct bt_wreq *r;
    while ((r = bt_map_next(w->active, &it, NULL)) != NULL) {
        bt_wsession_ended(w, r, BT_ERR_DEVICE, o->detail);
    }
    stop_with(w, BT_EXIT_DEVICE);
}

/* Gives the buffers back to the engine thread. If a conductor does not read its tokens, keeps them
 * for up to HELD_NS: generation then pauses, for all conductors. The heartbeat timeout ends the
 * session of a conductor that reads nothing at all. */
static void return_buffers(struct bt_wctl *w)
{
    if (bt_wsession_behind(w) && bt_mono_ns() - w->held.since_ns < HELD_NS) {
        return;
    }
    for (uint32_t i = 0; i < w->held.n; i++) {
        atomic_store(&w->held.bufs[i]->busy, false);
    }
    w->held.n = 0;
    bt_timer_stop(w->loop, &w->held.timer);
    bt_ring_nudge(&w->core.in);
}

static void on_held(void *arg)
{
    return_buffers(arg);
}

static void on_tokens(struct bt_wctl *w, struct bt_wtokens *t)
{
    bt_wsession_tokens(w, t);
    if (w->held.n == 0) {
        w->held.since_ns = bt_mono_ns();
    }
    w->held.bufs[w->held.n++] = t;
    return_buffers(w);
    if (w->held.n == 1) {
        bt_timer_start(w->loop, &w->held.timer, 1, 1, on_held, w);
    }
}

static void handle_out(struct bt_wctl *w, const struct bt_wout *o)
{
    switch (o->kind) {
    case BT_WOUT_PROGRESS: on_progress(w, o); break;
    case BT_WOUT_READY: on_engine_ready(w); break;
    case BT_WOUT_FAILED:
        BT_ERROR("engine", "status=%s why=%s", bt_status_name(o->status), o->detail);
        stop_with(w, bt_conf_model_exit(o->status));
        break;
    case BT_WOUT_FATAL: on_fatal(w, o); break;
    case BT_WOUT_TOKENS: on_tokens(w, o->u.tokens); break;
    case BT_WOUT_PROMPT_LOGPROBS: bt_wsession_prompt_logprobs(w, o->u.prompt); break;
    case BT_WOUT_PREFILL_DONE: bt_wsession_prefill_done(w, o); break;
    case BT_WOUT_SEARCHING: bt_wsession_searching(w, o); break;
    case BT_WOUT_TRAILER:
    case BT_WOUT_CLOSE:
    case BT_WOUT_TAIL_END:
    case BT_WOUT_PUT:
    case BT_WOUT_PUT_DONE:
    case BT_WOUT_LEASE:
    case BT_WOUT_UNLEASE: bt_wnode_out(w, o); break;
    case BT_WOUT_ENDED: on_ended(w, o); break;
    }
}

static void drain_ring(struct bt_wctl *w)
{
    struct bt_wout o;
    while (bt_ring_pop(&w->core.out, &o)) {
        handle_out(w, &o);
    }
}

static void on_ring(void *arg, uint32_t events)
{
    struct bt_wctl *w = arg;
    (void)events;
    bt_ring_disarm(&w->core.out);
    do {
        drain_ring(w);
    } while (!bt_ring_arm(&w->core.out));
}

/* Tells the kvstore that a flow word was raised; any thread. `local` is set before the first
 * request exists. */
static void ring_kvstore(void *arg)
{
    struct bt_wctl *w = arg;
    bt_local_ring(w->local);
}

/* ---- draining ---- */

static void on_drain(void *arg)
{
    struct bt_wctl *w = arg;
    uint64_t now = bt_mono_ns();
    if (w->n_active == 0) {
        stop_with(w, w->exit_code);
    } else if (w->state == BT_WCTL_DRAINING && now >= w->drain_until_ns) {
        BT_WARN("drain_timeout", "requests=%u then=%s", w->n_active,
                "the conductors plan them again on other workers; raise worker.drain_ms if they "
                "should end here");
        w->state = BT_WCTL_ENDING;
        w->drain_until_ns = now + ENDING_NS;
        cancel_everything(w, BT_ERR_UNAVAILABLE, "this worker is stopping");
    } else if (w->state == BT_WCTL_ENDING && now >= w->drain_until_ns) {
        stop_with(w, w->exit_code);
    }
}

static void on_signal(void *arg, int signo)
{
    struct bt_wctl *w = arg;
    if (w->state == BT_WCTL_LOADING) {
        BT_INFO("stopping", "signal=%d while=loading", signo);
        bt_notify_stopping();
        stop_with(w, 0);
        return;
    }
    if (w->state == BT_WCTL_DRAINING) { /* a second signal: stop now */
        BT_INFO("stopping", "signal=%d requests=%u", signo, w->n_active);
        w->drain_until_ns = 0;
        on_drain(w);
        return;
    }
    if (w->state != BT_WCTL_SERVING) {
        stop_with(w, w->exit_code); /* a third signal: do not wait for requests to end */
        return;
    }
    BT_INFO("draining", "signal=%d requests=%u", signo, w->n_active);
    bt_notify_stopping();
    bt_notify_status("draining: %u requests", w->n_active);
    w->state = BT_WCTL_DRAINING;
    w->drain_until_ns = bt_mono_ns() + w->conf.drain_ms * 1000000ull;
    bt_wctl_update_state(w);
    bt_timer_start(w->loop, &w->drain_timer, 0, DRAIN_MS, on_drain, w);
}

static void on_tick(void *arg)
{
    bt_wsession_tick(arg);
}

/* ---- start and stop ---- */

static bool start_servers(struct bt_wctl *w)
{
    const struct bt_conf_common *c = &w->conf.common;
    char why[256];
    int port;
    if (bt_rpc_create(w->loop, &w->net.rpc) != BT_OK) {
        BT_ERROR("rpc", "why=%s", "gRPC cannot be started");
        return false;
    }
    if (!bt_tls_conf_start(&w->net.tls, c, w->kind, w->net.rpc, w->stats->registry)) {
        return false;
    }
    if (bt_rpc_server_create(w->net.rpc, c->rpc_listen, &w->net.server, &port) != BT_OK) {
        (void)bt_conf_listen_why(c->rpc_listen, why, sizeof(why));
        BT_ERROR("config", "key=rpc.listen value=%s why=%s", c->rpc_listen, why);
        return false;
    }
    bt_rpc_server_stream(w->net.server, "/baton.Worker/Session", "conductor", bt_wsession_accept,
                         w);
    w->net.rpc_addr = bt_conf_dialled(c->rpc_listen, c->rpc_advertise, port);
    if (bt_status_page_create(w->loop, c->http_listen, w->stats->registry, health, w, &w->net.page,
                              &port) != BT_OK) {
        (void)bt_conf_listen_why(c->http_listen, why, sizeof(why));
        BT_ERROR("config", "key=http.listen value=%s why=%s", c->http_listen, why);
        return false;
    }
    w->net.http_addr = bt_conf_dialled(c->http_listen, NULL, port);
    return true;
}

static bool start_core(struct bt_wctl *w, pthread_t *thread)
{
    struct bt_wcore *c = &w->core;
    char err[512] = "";
    uint32_t n = (uint32_t)w->conf.max_requests;
    c->conf = &w->conf;
    c->stats = w->stats;
    c->bell = ring_kvstore;
    c->bell_arg = w;
    if (bt_engine_load(w->conf.engine_device, &c->vt, err, sizeof(err)) != BT_OK) {
        BT_ERROR("engine", "key=engine.device value=%s why=%s", w->conf.engine_device, err);
        return false;
    }
    if (bt_ring_init(&c->in, 9 * n + (uint32_t)w->conf.writeback_max + 4096,
                     sizeof(struct bt_wcmd)) != BT_OK ||
        bt_ring_init(&c->out, 4096, sizeof(struct bt_wout)) != BT_OK) {
        BT_ERROR("start", "why=%s", "no eventfd: raise the limit of open files");
        return false;
    }
    bt_loop_fd_add(w->loop, c->out.efd, EPOLLIN, on_ring, w);
    bool armed = bt_ring_arm(&c->out);
    BT_ASSERT(armed);
    if (pthread_create(thread, NULL, bt_wcore_thread, c) != 0) {
        BT_ERROR("start", "why=%s",
                 "no thread for the engine: raise the limit of threads (TasksMax=, ulimit -u)");
        return false;
    }
    return true;
}

static void drop_outs(struct bt_wctl *w)
{
    struct bt_wout o;
    while (bt_ring_pop(&w->core.out, &o)) {
        if (o.kind == BT_WOUT_TOKENS) {
            atomic_store(&o.u.tokens->busy, false);
        } else if (o.kind == BT_WOUT_PROMPT_LOGPROBS) {
            free(o.u.prompt);
        } else if (o.kind == BT_WOUT_LEASE) {
            free(o.u.lease.keys);
        }
    }
}

/* Ends the engine thread. Takes its last messages meanwhile, so that it never waits for room in the
 * ring. */
static void stop_core(struct bt_wctl *w, pthread_t thread)
{
    struct bt_wcmd cmd = {.kind = BT_WCMD_STOP};
    bt_wctl_command(w, &cmd);
    while (!atomic_load(&w->core.exited)) {
        drop_outs(w);
        usleep(1000);
    }
    pthread_join(thread, NULL);
    drop_outs(w);
}

/* Frees the messages that were in the ring when the engine thread ended. */
static void free_commands(struct bt_wctl *w)
{
    struct bt_wcmd c;
    while (w->core.in.mem != NULL && bt_ring_pop(&w->core.in, &c)) {
        if (c.kind == BT_WCMD_OPENED) {
            free(c.u.grant);
        } else if (c.kind == BT_WCMD_ATTACHED) {
            bt_slab_unmap(c.u.slab->slab);
            free(c.u.slab);
        } else if (c.kind == BT_WCMD_LEASED) {
            free(c.u.lease.lease);
        } else if (c.kind == BT_WCMD_TAIL) {
            free(c.u.tail);
        } else if (c.kind == BT_WCMD_FORGET) {
            bt_wreq_free(c.req);
        }
    }
    if (w->core.slab != NULL) {
        bt_slab_unmap(w->core.slab->slab);
        free(w->core.slab);
    }
}

static void free_tables(struct bt_wctl *w)
{
    size_t it = 0;
    struct bt_wreq *r;
    while ((r = bt_map_next(w->active, &it, NULL)) != NULL) {
        bt_wreq_free(r);
    }
    bt_map_destroy(w->active);
    struct bt_list *l, *tmp;
    bt_list_for_each_safe (l, tmp, &w->known_list) {
        free(BT_CONTAINER_OF(l, struct bt_wknown, link));
    }
    bt_map_destroy(w->known);
    free(w->tok);
    free(w->tok_ptr);
    free(w->top);
    free(w->top_ptr);
}

static void stop(struct bt_wctl *w, bool core_running, pthread_t thread)
{
    bt_timer_stop(w->loop, &w->tick);
    bt_timer_stop(w->loop, &w->drain_timer);
    bt_timer_stop(w->loop, &w->held.timer);
    bt_wrole_stop(w);
    bt_starting_end(w->net.starting);
    if (w->net.member != NULL) {
        /* First, so that no conductor plans with this worker any more. */
        bt_member_leave(w->net.member);
        w->net.member = NULL;
    }
    bt_etcd_destroy(w->net.etcd);
    bt_wsession_close_all(w, "this worker has stopped");
    for (int i = 0; i < FLUSH_TURNS; i++) {
        bt_loop_poll(w->loop, 5);
    }
    if (core_running && !w->engine_ready && !atomic_load(&w->core.exited)) {
        /* A model is being loaded: the worker is not registered and shares nothing. */
        _exit(w->exit_code);
    }
    if (core_running) {
        struct bt_wmask_pool *masks = w->core.masks.pool;
        stop_core(w, thread);
        bt_wmask_pool_destroy(masks);
        bt_loop_poll(w->loop, 0); /* runs the tasks that it has posted */
    }
    if (w->local != NULL) {
        bt_local_stop(w->local);
    }
    if (w->net.server != NULL) {
        bt_rpc_server_destroy(w->net.server);
    }
    bt_status_page_destroy(w->net.page);
    if (w->net.rpc != NULL) {
        bt_rpc_destroy(w->net.rpc);
    }
    bt_tls_conf_stop(&w->net.tls);
    free_commands(w);
    free_tables(w);
    bt_ring_cleanup(&w->core.in);
    bt_ring_cleanup(&w->core.out);
    bt_notify_end();
    bt_loop_destroy(w->loop);
    bt_wstats_destroy(w->stats);
    free(w->net.rpc_addr);
    free(w->net.http_addr);
    free(w->model_id);
}

static void on_reload_signal(void *arg, int signo)
{
    struct bt_wctl *w = arg;
    (void)signo;
    bt_conf_reload_all(bt_worker_schema(strcmp(w->kind, "decode") == 0), &w->conf, w->kind);
    (void)bt_wmixed_apply(w); /* the next heartbeat tells conductors */
}

static int serve(struct bt_wctl *w)
{
    pthread_t thread = 0;
    bool core_running = false;
    do {
        bt_random(&w->incarnation, sizeof(w->incarnation));
    } while (w->incarnation == 0);
    w->started_ns = bt_real_ns();
    w->model_id = bt_conf_model_id(&w->conf.common);
    w->stats = bt_wstats_create(w->model_id, w->kind);
    w->active = bt_map_create(sizeof(struct bt_wkey));
    w->known = bt_map_create(sizeof(uint64_t));
    bt_list_init(&w->known_list);
    bt_list_init(&w->sessions);
    snprintf(w->health, sizeof(w->health), "loading");
    w->exit_code = 0;
    if (bt_loop_create(&w->loop) != BT_OK) {
        return BT_EXIT_FAILED;
    }
    (void)bt_loop_process_limits();
    bt_notify_start(w->loop, bt_conf_env("NOTIFY_SOCKET"), bt_conf_env("WATCHDOG_USEC"),
                    bt_conf_env("WATCHDOG_PID"));
    bt_loop_on_signal(w->loop, SIGTERM, on_signal, w);
    bt_loop_on_signal(w->loop, SIGINT, on_signal, w);
    bt_loop_on_signal(w->loop, SIGHUP, on_reload_signal, w);
    BT_INFO("starting", "version=\"%s\" name=%s incarnation=%016llx", bt_version(), w->conf.name,
            (unsigned long long)w->incarnation);
    (void)bt_wmixed_apply(w);
    if (!bt_conf_secret_id(&w->conf.common, &w->secret)) {
        w->exit_code = BT_EXIT_CONFIG;
    } else if (start_servers(w) && connect_etcd(w) && start_core(w, &thread)) {
        core_running = true;
        bt_timer_start(w->loop, &w->tick, BT_WCTL_TICK_MS, BT_WCTL_TICK_MS, on_tick, w);
        bt_loop_short_slices(BT_LOOP_SLICE_US); /* this thread sends each step's tokens */
        bt_loop_run(w->loop);
    } else {
        w->exit_code = BT_EXIT_FAILED;
    }
    BT_INFO("stopped", "code=%d", w->exit_code);
    stop(w, core_running, thread);
    return w->exit_code;
}

int bt_worker_main(int argc, char **argv, bt_role_t start, const struct bt_prefill_ops *prefill,
                   const struct bt_decode_ops *decode)
{
    const struct bt_conf_schema *schema = bt_worker_schema(start == BT_ROLE_DECODE);
    struct bt_wctl *w = bt_calloc(1, sizeof(*w));
    int code = BT_EXIT_CONFIG;
    if (!bt_conf_main(schema, argc, argv, &w->conf, &code)) {
        free(w);
        return code;
    }
    w->core.prefill = prefill;
    w->core.decode = decode;
    w->kind = start == BT_ROLE_PREFILL ? prefill->role.kind : decode->role.kind;
    w->role.now = bt_roles_of_kind(w->kind);
    atomic_store(&w->core.role, w->role.now);
    bt_worker_conf_name(&w->conf, w->kind);
    bt_conf_log_start(&w->conf.common, w->kind);
    code = serve(w);
    free(w->conf.name);
    bt_conf_cleanup(schema, &w->conf);
    free(w);
    return code;
}

/* baton-conductor: connects the front, the request machine, the view of the cluster, etcd and the
 * Admin service on one loop, and ends them in the opposite order. Exit status: 0 after SIGTERM, 1
 * start failed, 2 bad configuration, 3 may not join the cluster. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/conf/daemon.h"
#include "common/engine/model_config.h"
#include "common/etcd/member.h"
#include "common/etcd/starting.h"
#include "common/log/log.h"
#include "common/loop/notify.h"
#include "common/policy/sched/copies.h"
#include "common/rpc/tls_conf.h"
#include "common/trace/trace.h"
#include "conductor/admin.h"
#include "conductor/admin_pins.h"
#include "conductor/conf.h"
#include "conductor/front/front.h"
#include "conductor/request/requests.h"
#include "conductor/role_job.h"
#include "conductor/sched_conf.h"
#include "conductor/view/view.h"

/* After a request's last token: the numbers of `usage` come over other sessions, within a round
 * trip or so. A client waits for them no longer than this. */
#define SETTLE_MS     250
#define FILES_BESIDE  256 /* open files of a conductor besides those of clients */
#define LEAVE_POLLS   20  /* of 10 ms: the lease's revocation gets that long to leave */
#define DRAIN_POLL_MS 50  /* between two looks whether the last request has ended */

struct conductor {
    struct bt_conductor_conf conf;
    int exit_code;
    /* model */
    struct bt_model_config model;
    struct bt_kv_layout layout;
    struct bt_kv_key root;
    char *model_id;
    struct bt_tokenizer *tok;
    struct bt_template *tmpl;
    struct bt_secret secret;
    /* identity */
    char *name, *rpc_addr, *http_addr;
    uint64_t incarnation;
    /* parts, in order of creation */
    struct bt_loop *loop;
    struct {
        struct bt_metric *wall, *cpu, *longest_wall, *longest_cpu;
        double wall_s, cpu_s; /* the longest so far */
    } tick;
    struct bt_metrics *metrics;
    struct bt_rpc *rpc;
    struct bt_tls_conf tls;
    struct bt_rpc_server *server;
    struct bt_etcd *etcd;
    struct bt_view *view;
    struct bt_requests *requests;
    struct bt_trace *trace;
    struct bt_front *front;
    struct bt_starting_table *starting;
    struct bt_admin_gate gate;
    struct bt_history *history;
    struct bt_admin *admin;
    struct bt_pin_table *pins;
    struct bt_admin_pins *admin_pins;
    struct bt_member *member;
    struct bt_role_job *role_job; /* NULL: roles are fixed */
    struct bt_timer drain;
    uint64_t drain_since_ns; /* 0: serving */
    bool doors_closed;       /* the grace after SIGTERM is over */
};

/* ---- start ---- */

static bool fail(struct conductor *c, const char *what, const char *why)
{
    BT_ERROR("start_failed", "what=%s why=%s", what, why);
    c->exit_code = BT_EXIT_FAILED;
    return false;
}

/* The same as fail(), for files of the model that were not loaded or do not fit together. */
static bool refuse(struct conductor *c, bt_status_t status, const char *what, const char *why)
{
    (void)fail(c, what, why);
    c->exit_code = bt_conf_model_exit(status);
    return false;
}

static bool load_model(struct conductor *c)
{
    const struct bt_conf_common *m = &c->conf.common;
    char err[512] = "";
    c->model_id = bt_conf_model_id(m);
    bt_notify_status("loading the tokenizer of %s", c->model_id);
    BT_INFO("loading", "what=model path=%s", m->model_path);
    bt_status_t st = bt_model_config_load(m->model_path, &c->model, err, sizeof(err));
    if (st == BT_OK) {
        st = bt_model_root_key(
            m->model_path,
            &(struct bt_model_settings){.load_format = m->model_load_format,
                                        .activations = m->model_activations,
                                        .quantize = m->model_quantize,
                                        .kv_dtype = m->model_kv_dtype,
                                        .deterministic = m->engine_deterministic,
                                        .mtp = m->model_mtp,
                                        .block_tokens = (uint32_t)m->kv_block_tokens},
            &c->layout, &c->root, err, sizeof(err));
    }
    if (st == BT_OK) {
        st = bt_tokenizer_load(m->model_path, &c->tok, err, sizeof(err));
    }
    if (st != BT_OK) {
        return refuse(c, st, "model.path", err);
    }
    if (bt_tokenizer_vocab(c->tok) > c->model.vocab) {
        snprintf(err, sizeof(err),
                 "%.300s/tokenizer.json: it has ids up to %u, vocab_size of config.json is %u; the "
                 "two files are not of one model",
                 m->model_path, bt_tokenizer_vocab(c->tok) - 1, c->model.vocab);
        return refuse(c, BT_ERR_INVALID, "model.path", err);
    }
    st = bt_template_load(m->model_path, &c->tmpl, err, sizeof(err));
    if (st == BT_ERR_NOT_FOUND) {
        c->tmpl = NULL;
        BT_INFO("no_chat_template", "note=%s",
                "chat requests are refused: the model has no chat template");
        return true;
    }
    return st == BT_OK || refuse(c, st, "chat template", err);
}

/* Applies the scheduler's configuration, at the start and after SIGHUP. */
static void apply_sched(struct conductor *c)
{
    const struct bt_conductor_conf *conf = &c->conf;
    struct bt_sched_params p;
    const char *note;
    bt_sched_conf_params(conf, &p);
    bt_view_set_mixed(c->view, p.mixed.step_ms, p.mixed.gap_ms);
    bt_requests_set_sched(c->requests, bt_sched_policy_find(conf->policy),
                          bt_sched_admission_find(conf->admission), &p);
    if (c->role_job != NULL) {
        bt_role_job_set_sched(c->role_job, &p);
    }
    BT_INFO("scheduling",
            "policy=%s admission=%s ttft_objective_ms=%g tbt_objective_ms=%g mixed_step_ms=%g "
            "mixed_gap_ms=%g",
            conf->policy, conf->admission, p.objective.ttft_ms, p.objective.tbt_ms, p.mixed.step_ms,
            p.mixed.gap_ms);
    for (uint32_t i = 0; (note = bt_sched_conf_note(conf, i)) != NULL; i++) {
        BT_WARN("scheduling_note", "note=%s", note);
    }
}

static void start_requests(struct conductor *c)
{
    const struct bt_conductor_conf *conf = &c->conf;
    struct bt_view_config vc = {.cluster = conf->common.cluster_name,
                                .name = c->name,
                                .node = conf->common.node_id,
                                .model = c->model_id,
                                .incarnation = c->incarnation,
                                .root = c->root,
                                .layout_id = c->layout.layout_id,
                                .index_keys_max = (size_t)conf->index_blocks,
                                .extent_blocks = bt_conductor_extent_blocks(
                                    conf->index_blocks, conf->common.kv_block_tokens)};
    c->view = bt_view_create(c->loop, c->rpc, &vc, c->metrics);
    struct bt_requests_config rc = {.max_running = (uint32_t)conf->max_running,
                                    .max_overtaking = BT_CONDUCTOR_OVERTAKING_MAX,
                                    .max_waiting = (uint32_t)conf->max_waiting,
                                    .max_replans = BT_CONDUCTOR_REPLANS_MAX,
                                    .no_worker_ms = BT_CONDUCTOR_NO_WORKER_MS,
                                    .queue_timeout_ms = (uint32_t)conf->queue_timeout_ms,
                                    .stall_ms = (uint32_t)conf->stall_ms,
                                    .settle_ms = SETTLE_MS,
                                    .role_move_ms = (uint32_t)conf->role_move_ms,
                                    .ended_ms = BT_CONDUCTOR_ENDED_MS,
                                    .replica_bytes_per_s = (double)conf->replica_bytes_per_s,
                                    .replica_uses = BT_SCHED_COPY_USES,
                                    .block_tokens = (uint32_t)conf->common.kv_block_tokens,
                                    .token_bytes =
                                        (uint32_t)(c->layout.block_bytes / c->layout.page_tokens),
                                    .vocab = c->model.vocab,
                                    .root = c->root,
                                    .secret = c->secret.bytes,
                                    .secret_len = c->secret.len,
                                    .model_name = c->model_id};
    c->requests = bt_requests_create(c->loop, c->view, c->tok, &rc, c->metrics);
    bt_requests_set_trace(c->requests, c->trace, c->model_id);
    apply_sched(c);
}

static bool start_front(struct conductor *c)
{
    const struct bt_conductor_conf *conf = &c->conf;
    struct bt_front_config fc = {.model_path = conf->common.model_path,
                                 .model_id = c->model_id,
                                 .model = &c->model,
                                 .max_model_len = (uint32_t)conf->max_model_len,
                                 .allowed_origins = conf->http.allowed_origins,
                                 .answer_form = conf->answer_form,
                                 .api_keys_file = conf->api_keys_file,
                                 .tls_dir = bt_conductor_tls(conf),
                                 .request_timeout_ms = conf->request_timeout_ms,
                                 .answers_max = (size_t)conf->http.answers_max};
    bt_http_options_default(&fc.http);
    fc.http.listen = conf->http.listen;
    fc.http.body_max = (size_t)conf->http.body_max;
    fc.http.body_total = bt_conductor_body_total(conf->http.body_max);
    fc.http.conns_max = (uint32_t)conf->http.conns_max;
    char err[512] = "";
    int port = 0;
    if (bt_front_access_share(conf->access_log, &fc.access_share, err, sizeof(err)) != BT_OK) {
        return fail(c, "conductor.access_log", err);
    }
    struct bt_front_parts parts = {
        .loop = c->loop, .tok = c->tok, .tmpl = c->tmpl, .rs = c->requests, .metrics = c->metrics};
    if (bt_front_create(&parts, &fc, &c->front, &port, err, sizeof(err)) != BT_OK) {
        return fail(c, "conductor.http.listen", err);
    }
    c->http_addr = bt_conf_dialled(conf->http.listen, NULL, port);
    return true;
}

static void on_tick(void *arg, const struct bt_loop_tick *t)
{
    struct conductor *c = arg;
    double wall_s = (double)t->wall_ns / 1e9, cpu_s = (double)t->cpu_ns / 1e9;
    bt_metric_observe(c->tick.wall, wall_s);
    bt_metric_observe(c->tick.cpu, cpu_s);
    if (wall_s > c->tick.wall_s) {
        bt_metric_set(c->tick.longest_wall, c->tick.wall_s = wall_s);
    }
    if (cpu_s > c->tick.cpu_s) {
        bt_metric_set(c->tick.longest_cpu, c->tick.cpu_s = cpu_s);
    }
}

static void watch_loop(struct conductor *c)
{
    static const double bounds[] = {0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1};
    static const char wall[] = "clock=\"wall\"", cpu[] = "clock=\"cpu\"";
    size_t n = BT_ARRAY_LEN(bounds);
    c->tick.wall = bt_metrics_histogram(c->metrics, "baton_loop_tick_seconds", wall, bounds, n);
    c->tick.cpu = bt_metrics_histogram(c->metrics, "baton_loop_tick_seconds", cpu, bounds, n);
    c->tick.longest_wall = bt_metrics_gauge(c->metrics, "baton_loop_tick_longest_seconds", wall);
    c->tick.longest_cpu = bt_metrics_gauge(c->metrics, "baton_loop_tick_longest_seconds", cpu);
    bt_loop_watch(c->loop, on_tick, c);
}

static bool start_trace(struct conductor *c)
{
    char err[512] = "";
    bt_status_t st =
        bt_trace_create(c->name, c->conf.common.node_id, c->metrics, &c->trace, err, sizeof(err));
    if (st != BT_OK) {
        (void)fail(c, "traces", err);
        c->exit_code = st == BT_ERR_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_FAILED;
    }
    return st == BT_OK;
}

static bool start_parts(struct conductor *c)
{
    const struct bt_conf_common *m = &c->conf.common;
    int port = 0;
    c->metrics = bt_metrics_create();
    watch_loop(c);
    if (!start_trace(c)) {
        return false;
    }
    if (bt_rpc_create(c->loop, &c->rpc) != BT_OK) {
        return fail(c, "gRPC", "the completion queue could not be started");
    }
    if (!bt_tls_conf_start(&c->tls, m, "conductor", c->rpc, c->metrics)) {
        return false;
    }
    if (bt_rpc_server_create(c->rpc, m->rpc_listen, &c->server, &port) != BT_OK) {
        char why[256];
        (void)bt_conf_listen_why(m->rpc_listen, why, sizeof(why));
        return fail(c, "rpc.listen", why);
    }
    c->rpc_addr = bt_conf_dialled(m->rpc_listen, m->rpc_advertise, port);
    if (bt_etcd_create(c->rpc, m->etcd_endpoints, c->tls.etcd, &c->etcd) != BT_OK) {
        return fail(c, "etcd.endpoints", "not a list of host:port");
    }
    start_requests(c);
    if (!start_front(c)) {
        return false;
    }
    c->history = bt_history_create(c->loop, c->requests);
    c->starting = bt_starting_watch(c->etcd, m->cluster_name);
    struct bt_admin_config ac = {.cluster = m->cluster_name,
                                 .name = c->name,
                                 .model_id = c->model_id,
                                 .block_tokens = (uint32_t)m->kv_block_tokens,
                                 .history = c->history,
                                 .starting = c->starting};
    c->gate = (struct bt_admin_gate){.server = c->server, .front = c->front};
    c->admin = bt_admin_create(&c->gate, c->view, c->requests, &ac);
    bt_front_show(c->front, bt_admin_page, c->admin);
    c->pins = bt_pin_table_create(c->etcd, m->cluster_name);
    struct bt_admin_pins_config pc = {.view = c->view,
                                      .requests = c->requests,
                                      .front = c->front,
                                      .pins = c->pins,
                                      .block_tokens = (uint32_t)m->kv_block_tokens,
                                      .root = c->root,
                                      .secret = c->secret.bytes,
                                      .secret_len = c->secret.len};
    c->admin_pins = bt_admin_pins_create(&c->gate, &pc);
    bt_rpc_server_start(c->server);
    return true;
}

/* ---- membership ---- */

static void on_joined(void *arg)
{
    struct conductor *c = arg;
    BT_INFO("joined", "name=%s incarnation=%016" PRIx64, c->name, c->incarnation);
}

static void on_refused(void *arg, bt_status_t st, const char *why)
{
    struct conductor *c = arg;
    BT_ERROR("join_refused", "status=%s why=%s", bt_status_name(st), why);
    c->exit_code = BT_EXIT_REFUSED;
    bt_loop_stop(c->loop);
}

static void on_lost(void *arg)
{
    (void)arg;
    BT_WARN("membership_lost", "why=%s",
            "etcd or this process stood still for longer than the lease; registering again. If "
            "this repeats, look at etcd's disk and at the load of both hosts");
}

static void join(struct conductor *c)
{
    static const struct bt_member_ops ops = {
        .on_joined = on_joined, .on_refused = on_refused, .on_lost = on_lost};
    Baton__Member self = BATON__MEMBER__INIT;
    self.kind = (char *)"conductor";
    self.name = c->name;
    self.node = c->conf.common.node_id;
    self.incarnation = c->incarnation;
    self.pid = (uint32_t)getpid();
    self.rpc = c->rpc_addr;
    self.http = c->http_addr;
    self.state = BATON__MEMBER_STATE__READY;
    self.started_ns = bt_real_ns();
    self.version = (char *)bt_version();
    self.model = c->model_id;
    Baton__ClusterSettings s = BATON__CLUSTER_SETTINGS__INIT;
    s.root_key.data = c->root.b;
    s.root_key.len = sizeof(c->root.b);
    s.layout_id = c->layout.layout_id;
    s.block_tokens = (uint32_t)c->conf.common.kv_block_tokens;
    s.flow_chunk_tokens = (uint32_t)c->conf.common.kv_flow_chunk_tokens;
    s.model_id = c->model_id;
    s.salt_id.data = c->secret.id;
    s.salt_id.len = c->secret.id_len;
    c->member = bt_member_join(c->etcd, c->conf.common.cluster_name, &self, &s, &ops, c);
    bt_view_watch(c->view, c->etcd);
    if (strcmp(c->conf.roles, "auto") == 0) {
        struct bt_role_job_config rc = {.cluster = c->conf.common.cluster_name,
                                        .name = c->name,
                                        .window_ms = (uint32_t)c->conf.roles_window_ms};
        bt_sched_conf_params(&c->conf, &rc.sched);
        c->role_job = bt_role_job_create(c->loop, c->etcd, c->view, &rc, c->metrics);
    }
}

/* ---- signals and the end ---- */

/* The grace has ended: nothing new is accepted. */
static void close_doors(struct conductor *c)
{
    BT_INFO("closed", "grace_ms=%" PRIu64, c->conf.drain_grace_ms);
    c->doors_closed = true;
    bt_requests_drain(c->requests);
    bt_front_drain(c->front);
}

static void on_drain_tick(void *arg)
{
    struct conductor *c = arg;
    struct bt_requests_stats st;
    bt_requests_stats(c->requests, &st);
    uint64_t spent_ns = bt_mono_ns() - c->drain_since_ns;
    uint64_t grace_ns = c->conf.drain_grace_ms * 1000000;
    if (spent_ns < grace_ns) {
        return;
    }
    if (!c->doors_closed) {
        close_doors(c);
        return; /* input that was read before now becomes a request first */
    }
    if ((bt_front_open(c->front) == 0 && st.open == 0) ||
        spent_ns > grace_ns + c->conf.drain_ms * 1000000) {
        BT_INFO("drained", "open=%u ms=%" PRIu64, st.open, spent_ns / 1000000);
        bt_loop_stop(c->loop);
    }
}

static void on_stop_signal(void *arg, int signo)
{
    struct conductor *c = arg;
    if (c->drain_since_ns != 0) {
        BT_WARN("stopping_now", "signal=%d", signo);
        bt_loop_stop(c->loop);
        return;
    }
    BT_INFO("draining", "signal=%d", signo);
    bt_notify_stopping();
    bt_notify_status("draining, at most %" PRIu64 " s",
                     (c->conf.drain_grace_ms + c->conf.drain_ms) / 1000);
    c->drain_since_ns = bt_mono_ns();
    if (c->member != NULL) {
        bt_member_set_state(c->member, BATON__MEMBER_STATE__DRAINING);
    }
    bt_front_leave(c->front);
    if (c->conf.drain_grace_ms == 0) {
        close_doors(c);
    }
    bt_timer_start(c->loop, &c->drain, DRAIN_POLL_MS, DRAIN_POLL_MS, on_drain_tick, c);
}

static void on_reload_signal(void *arg, int signo)
{
    struct conductor *c = arg;
    (void)signo;
    bt_conf_reload_all(bt_conductor_schema(), &c->conf, "conductor");
    apply_sched(c);
}

static void stop(struct conductor *c)
{
    bt_timer_stop(c->loop, &c->drain);
    bt_notify_stopping();
    if (c->member != NULL) {
        bt_member_leave(c->member);
        c->member = NULL; /* the member is gone, and SIGTERM may still come */
        for (int i = 0; i < LEAVE_POLLS; i++) {
            bt_loop_poll(c->loop, 10);
        }
    }
    /* After a failed start, members that were not created are NULL. */
#define DESTROY(member, type) ((c->member != NULL) ? bt_##type##_destroy(c->member) : (void)0)
    DESTROY(role_job, role_job);
    DESTROY(front, front);
    c->front = NULL;
    c->gate.closed = true;
    DESTROY(history, history);
    DESTROY(requests, requests);
    if (c->admin != NULL) {
        bt_admin_leave_view(c->admin);
    }
    DESTROY(view, view);
    bt_starting_unwatch(c->starting);
    DESTROY(pins, pin_table);
    DESTROY(etcd, etcd);
    DESTROY(server, rpc_server);
    DESTROY(admin, admin);
    DESTROY(admin_pins, admin_pins);
    DESTROY(rpc, rpc);
    bt_tls_conf_stop(&c->tls);
    bt_loop_watch(c->loop, NULL, NULL);
    DESTROY(trace, trace); /* after the requests, whose last spans it sends */
    DESTROY(metrics, metrics);
    DESTROY(tmpl, template);
    DESTROY(tok, tokenizer);
#undef DESTROY
    bt_notify_end();
    bt_loop_destroy(c->loop);
    free(c->name);
    free(c->rpc_addr);
    free(c->http_addr);
    free(c->model_id);
    explicit_bzero(&c->secret, sizeof(c->secret));
}

static void run(struct conductor *c)
{
    c->name = c->conf.name != NULL ? bt_strdup(c->conf.name)
                                   : bt_sprintf("conductor-%s", c->conf.common.node_id);
    while (c->incarnation == 0) {
        bt_random(&c->incarnation, sizeof(c->incarnation));
    }
    bt_loop_on_signal(c->loop, SIGTERM, on_stop_signal, c);
    bt_loop_on_signal(c->loop, SIGINT, on_stop_signal, c);
    bt_loop_on_signal(c->loop, SIGHUP, on_reload_signal, c);
    bt_notify_start(c->loop, bt_conf_env("NOTIFY_SOCKET"), bt_conf_env("WATCHDOG_USEC"),
                    bt_conf_env("WATCHDOG_PID"));
    if (!bt_conf_secret(&c->conf.common, &c->secret)) {
        c->exit_code = BT_EXIT_CONFIG;
        return;
    }
    if (!load_model(c) || !start_parts(c)) {
        return;
    }
    join(c);
    BT_INFO("ready",
            "name=%s rpc=%s http=%s incarnation=%016" PRIx64
            " model=%s policy=%s max_running=%" PRId64 " index_blocks=%" PRId64,
            c->name, c->rpc_addr, c->http_addr, c->incarnation, c->model_id, c->conf.policy,
            c->conf.max_running, c->conf.index_blocks);
    bt_notify_status("serving %s on %s://%s", c->model_id,
                     bt_conductor_tls(&c->conf) != NULL ? "https" : "http", c->http_addr);
    bt_notify_ready();
    bt_loop_short_slices(BT_LOOP_SLICE_US);
    bt_loop_run(c->loop);
}

/* The fields of requests, for docs/API.md. */
static int print_doc(void (*doc)(struct bt_buf *out))
{
    struct bt_buf text;
    bt_buf_init(&text);
    doc(&text);
    bool ok = fwrite(text.data, 1, text.len, stdout) == text.len && fflush(stdout) == 0;
    bt_buf_cleanup(&text);
    return ok ? 0 : BT_EXIT_FAILED;
}

int main(int argc, char **argv)
{
    static struct conductor c;
    int exit_code = 0;
    if (argc == 2 && strcmp(argv[1], "--print-api") == 0) {
        return print_doc(bt_front_api_doc);
    }
    if (argc == 2 && strcmp(argv[1], "--print-metrics") == 0) {
        return print_doc(bt_metrics_doc);
    }
    if (!bt_conf_main(bt_conductor_schema(), argc, argv, &c.conf, &exit_code)) {
        return exit_code;
    }
    bt_conf_log_start(&c.conf.common, "conductor");
    uint64_t files = bt_loop_process_limits();
    if ((uint64_t)c.conf.http.conns_max + FILES_BESIDE > files) {
        BT_WARN("open_files", "limit=%" PRIu64 " conns_max=%" PRId64 " remedy=%s", files,
                c.conf.http.conns_max,
                "clients beyond the limit get 503: raise LimitNOFILE (ulimit -Hn, --ulimit "
                "nofile), or lower conductor.http.conns_max");
    }
    if (bt_loop_create(&c.loop) != BT_OK) {
        (void)fail(&c, "loop", "epoll, timerfd or signalfd is not available");
        bt_conf_cleanup(bt_conductor_schema(), &c.conf);
        return BT_EXIT_FAILED;
    }
    run(&c);
    stop(&c);
    bt_conf_cleanup(bt_conductor_schema(), &c.conf);
    return c.exit_code;
}

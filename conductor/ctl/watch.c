/* A command that is repeated (--watch), and the live picture (top). */
#include "conductor/ctl/watch.h"

#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "admin.pb-c.h"
#include "common/etcd/roles.h"
#include "conductor/ctl/table.h"

static volatile sig_atomic_t interrupted;

static void on_signal(int sig)
{
    (void)sig;
    interrupted = 1;
}

/* ---- the terminal ---- */

static struct termios before;
static bool is_raw; /* keys are read one by one, without echo */

static void screen_open(void)
{
    struct termios t;
    if (isatty(STDIN_FILENO) && tcgetattr(STDIN_FILENO, &before) == 0) {
        t = before;
        t.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        is_raw = tcsetattr(STDIN_FILENO, TCSANOW, &t) == 0;
    }
    fputs("\033[?1049h\033[?25l", stdout); /* another screen, no cursor */
}

static void screen_close(void)
{
    fputs("\033[?25h\033[?1049l", stdout);
    (void)fflush(stdout);
    if (is_raw) {
        (void)tcsetattr(STDIN_FILENO, TCSANOW, &before);
    }
}

/* Rows of the terminal; where there is none, as many as anybody could want. */
static size_t rows(void)
{
    struct winsize w;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_row > 0 ? w.ws_row : SIZE_MAX;
}

/* Waits; false: the user has ended it. */
static bool wait_s(double s)
{
    uint64_t end = bt_mono_ns() + (uint64_t)(s * 1e9);
    for (uint64_t now; !interrupted && (now = bt_mono_ns()) < end;) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        char key;
        int ms = (int)((end - now) / 1000000) + 1;
        if (poll(&p, is_raw ? 1 : 0, ms) == 1 &&
            (read(STDIN_FILENO, &key, 1) != 1 || key == 'q' || key == 'Q')) {
            return false;
        }
    }
    return !interrupted;
}

int bt_ctl_watch(const struct bt_ctl *c, const struct bt_ctl_command *k)
{
    bool tty = isatty(STDOUT_FILENO) && !c->json;
    double every = c->watch_s > 0 ? c->watch_s : k->run == bt_ctl_top && tty ? 1 : 0;
    if (every == 0) {
        return k->run(c);
    }
    struct sigaction act = {.sa_handler = on_signal};
    (void)sigaction(SIGINT, &act, NULL);
    (void)sigaction(SIGTERM, &act, NULL);
    if (tty) {
        screen_open();
    }
    int rc;
    do {
        fputs(tty ? "\033[2J\033[H" : "", stdout);
        (void)fflush(stdout); /* must come before the command's output on stderr */
        rc = k->run(c);
        fputs(tty || c->json ? "" : "\n", stdout);
    } while (fflush(stdout) == 0 && wait_s(every));
    if (tty) {
        screen_close();
    }
    return rc;
}

/* ---- top ---- */

/* Values of the last picture, for rates. */
static struct {
    uint64_t at_ns, requests;
    Baton__AdminRequests *list;
} last;

static double share(uint64_t part, uint64_t all)
{
    return all != 0 ? 100.0 * (double)part / (double)all : 0;
}

static void put_head(const Baton__AdminStatus *s, uint64_t now)
{
    printf("%s  %s  serving %s%s%s\n", s->cluster, s->model_id, s->serving ? "yes" : "NO",
           s->reason[0] != '\0' ? ": " : "", s->reason);
    printf("requests  %u running, %u waiting, %" PRIu64 " in all, %" PRIu64 " re-planned",
           s->requests_running, s->requests_waiting, s->requests_total, s->replanned_total);
    if (last.at_ns != 0 && s->requests_total >= last.requests) {
        printf(", %.1f new/s",
               (double)(s->requests_total - last.requests) / ((double)(now - last.at_ns) / 1e9));
    }
    printf("\n\n");
}

static size_t put_workers(Baton__AdminStatus *s)
{
    static const char *const head[] = {"WORKER", "NODE",      "ROLE", "STATE",    "RUN",  "WAIT",
                                       "QUEUED", "PREFILL/S", "STEP", "KV PAGES", "SLOTS"};
    struct bt_ctl_table t;
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < s->n_nodes; i++) {
        const Baton__AdminNode *n = s->nodes[i];
        const Baton__WorkerLoad *l = n->load;
        if (bt_roles_of_kind(n->member->kind) == 0) {
            continue;
        }
        bt_ctl_table_cell(&t, "%s", n->member->name);
        bt_ctl_table_cell(&t, "%s", n->member->node);
        bt_ctl_table_cell(&t, "%s", bt_roles_name(n->role));
        bt_ctl_table_cell(&t, "%s", !n->session_up ? "down" : bt_ctl_state_of(n));
        for (size_t k = 5; l == NULL && k <= BT_ARRAY_LEN(head); k++) {
            bt_ctl_table_cell(&t, "-");
        }
        if (l != NULL) {
            bt_ctl_table_cell(&t, "%u", l->running);
            bt_ctl_table_cell(&t, "%u", l->waiting);
            bt_ctl_table_cell(&t, "%" PRIu64, (uint64_t)l->queued_prefill_tokens);
            bt_ctl_table_cell(&t, "%.0f", l->prefill_tokens_per_s);
            bt_ctl_table_cell(&t, "%.1f ms", l->step_ms);
            bt_ctl_table_cell(&t, "%.0f%%", share(l->pages_total - l->pages_free, l->pages_total));
            bt_ctl_table_cell(&t, "%.0f%%", share(l->slots_total - l->slots_free, l->slots_total));
        }
    }
    bt_ctl_table_print(&t, stdout);
    size_t lines = t.n / t.columns;
    bt_ctl_table_cleanup(&t);
    return lines + 1;
}

static size_t put_pool(Baton__AdminStatus *s)
{
    static const char *const head[] = {"KVSTORE", "NODE",    "STATE",      "IN USE",
                                       "SEALED",  "WRITING", "QUARANTINE", "LEASES"};
    struct bt_ctl_table t;
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < s->n_nodes; i++) {
        const Baton__AdminNode *n = s->nodes[i];
        const Baton__PoolLoad *p = n->pool;
        if (p == NULL) {
            continue;
        }
        bt_ctl_table_cell(&t, "%s", n->member->name);
        bt_ctl_table_cell(&t, "%s", n->member->node);
        bt_ctl_table_cell(&t, "%s", !n->session_up ? "down" : bt_ctl_state_of(n));
        bt_ctl_table_cell(&t, "%.0f%%", share(p->slots_total - p->slots_free, p->slots_total));
        bt_ctl_table_cell(&t, "%u", p->slots_sealed);
        bt_ctl_table_cell(&t, "%u", p->slots_writing);
        bt_ctl_table_cell(&t, "%u", p->slots_quarantine);
        bt_ctl_table_cell(&t, "%u", p->leases);
    }
    putchar('\n');
    bt_ctl_table_print(&t, stdout);
    size_t lines = t.n / t.columns;
    bt_ctl_table_cleanup(&t);
    return lines + 2;
}

/* Tokens that the request had in the picture before; UINT32_MAX: it was not there. */
static uint32_t tokens_before(const Baton__AdminRequest *r)
{
    for (size_t i = 0; last.list != NULL && i < last.list->n_list; i++) {
        if (last.list->list[i]->wire_id == r->wire_id) {
            return last.list->list[i]->tokens;
        }
    }
    return UINT32_MAX;
}

static void put_requests(const Baton__AdminRequests *a, size_t room, uint64_t now)
{
    static const char *const head[] = {"REQUEST",  "STATE",   "AGE",     "PROMPT", "TOKENS",
                                       "TOKENS/S", "REPLANS", "PREFILL", "DECODE"};
    struct bt_ctl_table t;
    size_t n = BT_MIN(a->n_list, room);
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < n; i++) {
        const Baton__AdminRequest *r = a->list[i];
        uint32_t had = tokens_before(r);
        bt_ctl_table_cell(&t, "%s", r->id);
        bt_ctl_table_cell(&t, "%s", r->state);
        bt_ctl_table_cell(&t, "%.1f s", (double)r->age_ms / 1e3);
        bt_ctl_table_cell(&t, "%u", r->prompt_tokens);
        bt_ctl_table_cell(&t, "%u", r->tokens);
        if (had <= r->tokens) {
            bt_ctl_table_cell(&t, "%.1f",
                              (double)(r->tokens - had) / ((double)(now - last.at_ns) / 1e9));
        } else {
            bt_ctl_table_cell(&t, "-");
        }
        bt_ctl_table_cell(&t, "%u", r->replans);
        bt_ctl_table_cell(&t, "%s", r->prefill[0] != '\0' ? r->prefill : "-");
        bt_ctl_table_cell(&t, "%s", r->decode[0] != '\0' ? r->decode : "-");
    }
    putchar('\n');
    bt_ctl_table_print(&t, stdout);
    bt_ctl_table_cleanup(&t);
    if (n < a->total) {
        printf("(the %zu oldest of %" PRIu64 ")\n", n, a->total);
    }
}

int bt_ctl_top(const struct bt_ctl *c)
{
    Baton__AdminRequestsRequest q = BATON__ADMIN_REQUESTS_REQUEST__INIT;
    q.limit = c->limit;
    if (c->json) {
        return bt_ctl_usage("top has no JSON; 'status', 'nodes' and 'requests' have", NULL);
    }
    Baton__AdminStatus *s = bt_ctl_status_of(c);
    Baton__AdminRequests *a = s == NULL ? NULL
                                        : bt_ctl_ask(c, "/baton.Admin/Requests", &q.base,
                                                     &baton__admin_requests__descriptor);
    if (a != NULL) {
        uint64_t now = bt_mono_ns();
        size_t all = rows(), used = 3;
        put_head(s, now);
        bt_ctl_sort_nodes(s);
        used += put_workers(s);
        used += put_pool(s);
        used += bt_ctl_print_starting(s);
        used += 4; /* an empty line, the titles, the line behind the table, the cursor's */
        put_requests(a, all > used ? all - used : 0, now);
        last.at_ns = now;
        last.requests = s->requests_total;
        if (last.list != NULL) {
            baton__admin_requests__free_unpacked(last.list, NULL);
        }
        last.list = a;
    }
    if (s != NULL) {
        baton__admin_status__free_unpacked(s, NULL);
    }
    return a != NULL ? 0 : 1;
}

/* batonctl requests, explain, drain, undrain. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "admin.pb-c.h"
#include "conductor/ctl/ctl.h"
#include "conductor/ctl/table.h"

/* ---- requests ---- */

static json_t *request_json(const Baton__AdminRequest *r)
{
    char wire[17];
    snprintf(wire, sizeof(wire), "%016" PRIx64, r->wire_id);
    return json_pack("{s:s,s:s,s:s,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:s,s:s}", "id", r->id, "req", wire,
                     "state", r->state, "age_ms", (json_int_t)r->age_ms, "choice",
                     (json_int_t)r->choice, "n", (json_int_t)r->n, "prompt_tokens",
                     (json_int_t)r->prompt_tokens, "tokens", (json_int_t)r->tokens, "epoch",
                     (json_int_t)r->epoch, "replans", (json_int_t)r->replans, "prefill", r->prefill,
                     "decode", r->decode);
}

static int requests_table(const struct bt_ctl *c, const Baton__AdminRequests *a)
{
    static const char *const head[] = {"ID",     "REQ",   "CHOICES", "STATE",   "AGE",   "PROMPT",
                                       "TOKENS", "EPOCH", "REPLANS", "PREFILL", "DECODE"};
    struct bt_ctl_table t;
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < a->n_list; i++) {
        const Baton__AdminRequest *r = a->list[i];
        bt_ctl_table_cell(&t, "%s", r->id);
        bt_ctl_table_cell(&t, "%016" PRIx64, r->wire_id);
        if (r->n > 1) {
            bt_ctl_table_cell(&t, "%u-%u", r->choice, r->choice + r->n - 1);
        } else {
            bt_ctl_table_cell(&t, "%u", r->choice);
        }
        bt_ctl_table_cell(&t, "%s", r->state);
        bt_ctl_table_cell(&t, "%.1fs", (double)r->age_ms / 1e3);
        bt_ctl_table_cell(&t, "%u", r->prompt_tokens);
        bt_ctl_table_cell(&t, "%u", r->tokens);
        bt_ctl_table_cell(&t, "%u", r->epoch);
        bt_ctl_table_cell(&t, "%u", r->replans);
        bt_ctl_table_cell(&t, "%s", r->prefill[0] != '\0' ? r->prefill : "-");
        bt_ctl_table_cell(&t, "%s", r->decode[0] != '\0' ? r->decode : "-");
    }
    int rc = bt_ctl_print_table(c, &t);
    if (a->n_list < a->total) {
        printf("(%zu of %" PRIu64 " shown; --limit N shows more)\n", a->n_list, a->total);
    }
    return rc;
}

int bt_ctl_requests(const struct bt_ctl *c)
{
    Baton__AdminRequestsRequest q = BATON__ADMIN_REQUESTS_REQUEST__INIT;
    q.limit = c->limit;
    Baton__AdminRequests *a =
        bt_ctl_ask(c, "/baton.Admin/Requests", &q.base, &baton__admin_requests__descriptor);
    if (a == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        json_t *list = json_array();
        for (size_t i = 0; i < a->n_list; i++) {
            json_array_append_new(list, request_json(a->list[i]));
        }
        rc = bt_ctl_print_json(list);
    } else {
        rc = requests_table(c, a);
    }
    baton__admin_requests__free_unpacked(a, NULL);
    return rc;
}

/* ---- explain ---- */

/* Negative: unknown. */
static json_t *ms_json(double ms)
{
    return ms < 0 ? json_null() : json_real(ms);
}

static json_t *outcome_json(const Baton__AdminOutcome *o)
{
    if (o == NULL) {
        return json_null();
    }
    return json_pack("{s:o,s:I,s:I,s:I,s:o,s:o,s:o,s:o}", "error",
                     o->error[0] != '\0' ? json_string(o->error) : json_null(), "cached_tokens",
                     (json_int_t)o->cached_tokens, "tokens", (json_int_t)o->tokens, "replans",
                     (json_int_t)o->replans, "ttft_ms", ms_json(o->ttft_ms), "tbt_ms",
                     ms_json(o->tbt_ms), "queue_ms", ms_json(o->queue_ms), "prefill_ms",
                     ms_json(o->prefill_ms));
}

static json_t *explanation_json(const Baton__AdminExplanation *e)
{
    char wire[17];
    snprintf(wire, sizeof(wire), "%016" PRIx64, e->wire_id);
    json_t *list = json_array();
    for (size_t i = 0; i < e->n_candidates; i++) {
        const Baton__AdminCandidate *k = e->candidates[i];
        json_array_append_new(
            list,
            json_pack("{s:s,s:s,s:s,s:b,s:s,s:I,s:o,s:o,s:o,s:o}", "worker", k->worker, "node",
                      k->node, "for", k->for_prefill ? "prefill" : "decode", "chosen", k->chosen,
                      "verdict", k->verdict, "cached_tokens", (json_int_t)k->cached_tokens,
                      "queue_ms", ms_json(k->for_prefill ? k->queue_ms : -1), "ttft_ms",
                      ms_json(k->ttft_ms), "tbt_ms", ms_json(k->tbt_ms), "load",
                      k->for_prefill ? json_null() : json_real(k->load)));
    }
    json_t *sources = json_array();
    for (size_t i = 0; i < e->n_sources; i++) {
        json_array_append_new(sources, json_pack("{s:s,s:I}", "kvstore", e->sources[i]->kvstore,
                                                 "blocks", (json_int_t)e->sources[i]->blocks));
    }
    return json_pack("{s:s,s:s,s:I,s:I,s:I,s:I,s:I,s:b,s:b,s:b,s:s,s:o,s:o,s:o,s:o,s:o,s:I,s:o,s:I,"
                     "s:o,s:o}",
                     "id", e->id, "req", wire, "epoch", (json_int_t)e->epoch, "planned_ns",
                     (json_int_t)e->planned_ns, "tokens", (json_int_t)e->tokens, "cached_tokens",
                     (json_int_t)e->cached_tokens, "choices", (json_int_t)e->choices, "planned",
                     e->planned, "both", e->both, "draining", e->draining, "reason", e->reason,
                     "ttft_ms", ms_json(e->ttft_ms), "tbt_ms", ms_json(e->tbt_ms), "queue_ms",
                     ms_json(e->queue_ms), "prefill_ms", ms_json(e->prefill_ms), "outcome",
                     outcome_json(e->outcome), "candidates_total", (json_int_t)e->candidates_total,
                     "candidates", list, "fetch_tokens", (json_int_t)e->fetch_tokens, "sources",
                     sources, "again", e->again[0] != '\0' ? json_string(e->again) : json_null());
}

static void time_cell(struct bt_ctl_table *t, double ms)
{
    if (ms >= 0) {
        bt_ctl_table_cell(t, "%.1f ms", ms);
    } else {
        bt_ctl_table_cell(t, "-");
    }
}

static void put_ms(const char *name, double ms)
{
    if (ms < 0) {
        printf("%s -", name);
    } else {
        printf("%s %.1f ms", name, ms);
    }
}

static void times_text(const char *what, const char *token, double ttft, double queue,
                       double prefill, double tbt)
{
    printf("%-10s ", what);
    put_ms(token, ttft);
    put_ms("; queue", queue);
    put_ms(", prefill", prefill);
    put_ms("; between tokens", tbt);
    printf("\n");
}

static void outcome_text(const Baton__AdminOutcome *o, bool planned)
{
    if (o == NULL) {
        printf("actual     %s\n", planned ? "it runs" : "it waits");
        return;
    }
    times_text("actual", "first token", o->ttft_ms, o->queue_ms, o->prefill_ms, o->tbt_ms);
    printf("%-10s %u tokens from the cache, %u generated, %u times planned again%s%s\n",
           o->error[0] != '\0' ? "failed" : "done", o->cached_tokens, o->tokens, o->replans,
           o->error[0] != '\0' ? ": " : "", o->error);
}

static void explanation_text(const Baton__AdminExplanation *e)
{
    printf("request    %s (req %016" PRIx64 "), plan %u, %.1f s ago\n", e->id, e->wire_id, e->epoch,
           (double)(bt_real_ns() - e->planned_ns) / 1e9);
    printf("tokens     %u, of them %u expected in the cache; %u choice%s\n", e->tokens,
           e->cached_tokens, e->choices, e->choices == 1 ? "" : "s");
    if (e->again[0] != '\0') {
        printf("again      the previous plan was given up: %s\n", e->again);
    }
    if (e->planned) {
        bool plain = !e->both && strcmp(e->reason, "apart") == 0;
        printf(
            "plan       %s%s%s%s\n", e->both ? "one worker for both" : "prefill and decode apart",
            plain ? "" : ": ", plain ? "" : e->reason,
            e->draining ? "; on a node that is being drained, because no other worker could take it"
                        : "");
        if (e->fetch_tokens != 0) {
            printf("fetch      %u tokens from", e->fetch_tokens);
            for (size_t i = 0; i < e->n_sources; i++) {
                printf("%s %s (%u blocks)", i != 0 ? "," : "", e->sources[i]->kvstore,
                       e->sources[i]->blocks);
            }
            printf("\n");
        }
        times_text("predicted", e->epoch > 1 ? "next token" : "first token", e->ttft_ms,
                   e->queue_ms, e->prefill_ms, e->tbt_ms);
    } else {
        printf("not placed %s\n", e->reason);
    }
    outcome_text(e->outcome, e->planned);
    static const char *const head[] = {"WORKER", "NODE", "FOR",  "CACHED", "QUEUE",
                                       "TTFT",   "TBT",  "LOAD", "VERDICT"};
    struct bt_ctl_table t;
    bt_ctl_table_init(&t, head, BT_ARRAY_LEN(head));
    for (size_t i = 0; i < e->n_candidates; i++) {
        const Baton__AdminCandidate *k = e->candidates[i];
        bt_ctl_table_cell(&t, "%s", k->worker);
        bt_ctl_table_cell(&t, "%s", k->node);
        bt_ctl_table_cell(&t, "%s", k->for_prefill ? "prefill" : "decode");
        bt_ctl_table_cell(&t, "%u", k->cached_tokens);
        if (k->for_prefill) {
            time_cell(&t, k->queue_ms);
            time_cell(&t, k->ttft_ms);
            bt_ctl_table_cell(&t, "-");
            bt_ctl_table_cell(&t, "-");
        } else {
            bt_ctl_table_cell(&t, "-");
            bt_ctl_table_cell(&t, "-");
            bt_ctl_table_cell(&t, "%.1f ms", k->tbt_ms);
            bt_ctl_table_cell(&t, "%.0f%%", 100 * k->load);
        }
        bt_ctl_table_cell(&t, "%s", k->verdict);
    }
    bt_ctl_table_print(&t, stdout);
    bt_ctl_table_cleanup(&t);
    if (e->n_candidates < e->candidates_total) {
        printf("(%zu of %u candidates shown)\n", e->n_candidates, e->candidates_total);
    }
}

int bt_ctl_explain(const struct bt_ctl *c)
{
    Baton__AdminExplainRequest q = BATON__ADMIN_EXPLAIN_REQUEST__INIT;
    q.id = (char *)(c->arg != NULL ? c->arg : "");
    Baton__AdminExplanation *e =
        bt_ctl_ask(c, "/baton.Admin/Explain", &q.base, &baton__admin_explanation__descriptor);
    if (e == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        rc = bt_ctl_print_json(explanation_json(e));
    } else {
        explanation_text(e);
    }
    baton__admin_explanation__free_unpacked(e, NULL);
    return rc;
}

/* ---- drain ---- */

static void drain_text(const Baton__AdminDrain *d)
{
    if (!d->draining) {
        printf("%s is in use again\n", d->node);
        return;
    }
    printf("%s is being drained:", d->node);
    for (size_t i = 0; i < d->n_members; i++) {
        printf("%s %s", i != 0 ? "," : "", d->members[i]);
    }
    printf("\n");
    if (d->stays) {
        printf("%u request%s of this conductor use it and stay there, because no worker on another "
               "node can take them. They move when such a worker starts.\n",
               d->requests, d->requests == 1 ? "" : "s");
    } else {
        printf(
            "%u request%s of this conductor use it and are moved; 'batonctl requests' shows them\n",
            d->requests, d->requests == 1 ? "" : "s");
    }
}

static int drain(const struct bt_ctl *c, bool undrain)
{
    Baton__AdminDrainRequest q = BATON__ADMIN_DRAIN_REQUEST__INIT;
    q.node = (char *)c->arg;
    q.undrain = undrain;
    q.force = c->opt[BT_CTL_FORCE] != NULL;
    Baton__AdminDrain *d =
        bt_ctl_ask(c, "/baton.Admin/Drain", &q.base, &baton__admin_drain__descriptor);
    if (d == NULL) {
        return 1;
    }
    int rc = 0;
    if (c->json) {
        json_t *members = json_array();
        for (size_t i = 0; i < d->n_members; i++) {
            json_array_append_new(members, json_string(d->members[i]));
        }
        rc = bt_ctl_print_json(json_pack("{s:s,s:b,s:o,s:I,s:b}", "node", d->node, "draining",
                                         d->draining, "members", members, "requests",
                                         (json_int_t)d->requests, "stays", d->stays));
    } else {
        drain_text(d);
    }
    baton__admin_drain__free_unpacked(d, NULL);
    return rc;
}

int bt_ctl_drain(const struct bt_ctl *c)
{
    return drain(c, false);
}

int bt_ctl_undrain(const struct bt_ctl *c)
{
    return drain(c, true);
}

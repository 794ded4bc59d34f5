/* batonctl doctor: checks this host, its daemons and the cluster, and says what to correct. */
#include "conductor/ctl/doctor.h"

#include <stdio.h>
#include <stdlib.h>

#include "conductor/ctl/ctl.h"
#include "conductor/ctl/where.h"

static const char *const level_names[] = {[BT_CTL_GOOD] = "ok",
                                          [BT_CTL_WARNING] = "warning",
                                          [BT_CTL_FAULT] = "FAULT",
                                          [BT_CTL_NOTE] = "note"};

/* Names and messages of others must not move the cursor of a terminal, nor make JSON invalid. */
static void make_printable(char *text)
{
    for (char *p = text; *p != '\0'; p++) {
        bool plain = (*p >= ' ' && *p <= '~') || *p == '\n' || *p == '\t';
        *p = plain ? *p : '?';
    }
}

void bt_ctl_find(struct bt_ctl_findings *f, enum bt_ctl_level level, const char *what,
                 const char *remedy, const char *fmt, ...)
{
    char text[1200];
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    make_printable(text);
    f->list = bt_realloc(f->list, (f->n + 1) * sizeof(*f->list));
    f->list[f->n++] = (struct bt_ctl_finding){.level = level,
                                              .what = bt_strdup(what),
                                              .text = bt_strdup(text),
                                              .remedy = remedy != NULL ? bt_strdup(remedy) : NULL};
}

/* The cluster as its conductor sees it. */
static void look_cluster(struct bt_ctl_findings *f, struct bt_ctl *c)
{
    if (!bt_ctl_find_conductor(c)) {
        bt_ctl_find(f, BT_CTL_NOTE, "cluster", NULL, "no conductor was named");
        return;
    }
    Baton__AdminStatus *s = bt_ctl_status_of(c);
    bt_tls_release(c->tls);
    if (s == NULL) {
        bt_ctl_find(f, BT_CTL_FAULT, "cluster",
                    "see the message above; start the conductor, or name another one with --addr",
                    "the conductor at %s does not answer", c->addr);
        return;
    }
    bt_ctl_find(f, s->serving ? BT_CTL_GOOD : BT_CTL_FAULT, "cluster",
                s->serving ? NULL : "'batonctl nodes' shows who is missing or down",
                s->serving ? "%s serves %s with %zu members%s"
                           : "%s does not serve %s (%zu members): %s",
                s->cluster, s->model_id, s->n_nodes, s->reason);
    for (size_t i = 0; i < s->n_nodes; i++) {
        const Baton__AdminNode *n = s->nodes[i];
        const Baton__Member *m = n->member;
        if (strcmp(m->kind, "conductor") != 0 && !n->session_up) {
            bt_ctl_find(
                f, BT_CTL_FAULT, "cluster",
                "check that the conductor reaches this address (rpc.advertise, firewall), and "
                "both logs",
                "the conductor has no session with %s %s on %s (%s)", m->kind, m->name, m->node,
                m->rpc);
        }
        if (strcmp(m->version, s->version) != 0) {
            bt_ctl_find(f, BT_CTL_WARNING, "cluster", "end the upgrade on that node",
                        "%s %s on %s has version %s, the conductor %s", m->kind, m->name, m->node,
                        m->version, s->version);
        }
    }
    baton__admin_status__free_unpacked(s, NULL);
}

static int print_findings(const struct bt_ctl *c, const struct bt_ctl_findings *f)
{
    json_t *list = json_array();
    size_t faults = 0, warnings = 0;
    for (size_t i = 0; i < f->n; i++) {
        const struct bt_ctl_finding *x = &f->list[i];
        faults += x->level == BT_CTL_FAULT;
        warnings += x->level == BT_CTL_WARNING;
        if (c->json) {
            json_array_append_new(
                list, json_pack("{s:s,s:s,s:s,s:o}", "level",
                                x->level == BT_CTL_FAULT ? "fault" : level_names[x->level], "what",
                                x->what, "text", x->text, "remedy",
                                x->remedy != NULL ? json_string(x->remedy) : json_null()));
            continue;
        }
        printf("%-8s %s: %s\n", level_names[x->level], x->what, x->text);
        if (x->remedy != NULL) {
            printf("%-8s -> %s\n", "", x->remedy);
        }
    }
    if (c->json) {
        (void)bt_ctl_print_json(list);
    } else {
        json_decref(list);
        printf("%zu fault%s, %zu warning%s\n", faults, faults == 1 ? "" : "s", warnings,
               warnings == 1 ? "" : "s");
    }
    return faults != 0;
}

int bt_ctl_doctor(const struct bt_ctl *c)
{
    const char *etc = c->opt[BT_CTL_CONFIG];
    struct bt_ctl_findings f = {.n = 0};
    struct bt_ctl_daemons d = {.n = 0};
    struct bt_ctl conductor = *c;
    bt_ctl_look_host(&f);
    bt_ctl_find_daemons(etc, &d);
    for (size_t i = 0; i < d.n; i++) {
        bt_ctl_look_daemon(&f, &d.list[i]);
    }
    if (d.n == 0) {
        bt_ctl_find(
            &f, BT_CTL_NOTE, "daemons", "name the folder of the configuration files with --config",
            "no daemon runs here, and %s has no file KIND.yaml", etc != NULL ? etc : BT_CTL_ETC);
    }
    look_cluster(&f, &conductor);
    int rc = print_findings(c, &f);
    bt_ctl_daemons_free(&d);
    for (size_t i = 0; i < f.n; i++) {
        free(f.list[i].what);
        free(f.list[i].text);
        free(f.list[i].remedy);
    }
    free(f.list);
    return rc;
}

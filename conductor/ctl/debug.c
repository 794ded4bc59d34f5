/* batonctl debug: writes one archive for a person who looks for a fault elsewhere. It contains no
 * prompt, answer, key or certificate: requests are named by ids, and configurations name files. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "conductor/ctl/child.h"
#include "conductor/ctl/ctl.h"
#include "conductor/ctl/doctor.h"
#include "conductor/ctl/help.h"
#include "conductor/ctl/where.h"

#define LOG_BYTES "2097152" /* of each log file, its end */
#define LOG_SINCE "-2h"     /* of the journal */
#define COMMAND_S 60
#define METRICS_S "5"

struct bundle {
    const struct bt_ctl *c;
    char *folder; /* in which the files are made; its last part is the archive's top folder */
    char name[64];
    size_t n, failed;
};

/* Writes a file of the bundle. */
static void put(struct bundle *b, const char *name, const char *text)
{
    char *path = bt_sprintf("%s/%s/%s", b->folder, b->name, name);
    FILE *f = fopen(path, "wxe");
    bool ok = f != NULL && fputs(text, f) >= 0;
    ok = f != NULL && fclose(f) == 0 && ok;
    if (!ok) {
        fprintf(stderr, "batonctl: %s: %s\n", path, strerror(errno));
        b->failed++;
    }
    b->n++;
    free(path);
}

/* Runs a program, and writes its output below its command line and status. */
static void put_output(struct bundle *b, const char *name, const char *const *argv)
{
    char *out, *text;
    int rc = bt_ctl_child(argv, COMMAND_S, &out);
    text = rc == 0 ? bt_strdup(out) : bt_sprintf("%s\n(ended with %d)\n", out, rc);
    put(b, name, text);
    free(text);
    free(out);
}

/* A command of this batonctl, asked of the same conductor. */
static void put_command(struct bundle *b, const char *name, const char *command, const char *option)
{
    const struct bt_ctl *c = b->c;
    char *self = bt_ctl_beside("batonctl");
    const char *argv[12];
    size_t n = 0;
    argv[n++] = self;
    argv[n++] = command;
    if (option != NULL) {
        argv[n++] = option;
    }
    static const int passed[] = {BT_CTL_ADDR, BT_CTL_DIR, BT_CTL_TLS, BT_CTL_KEY_FILE};
    for (size_t i = 0; i < BT_ARRAY_LEN(passed); i++) {
        if (c->opt[passed[i]] != NULL) {
            argv[n++] = bt_ctl_options[passed[i]].name;
            argv[n++] = c->opt[passed[i]];
        }
    }
    argv[n] = NULL;
    put_output(b, name, argv);
    free(self);
}

static void put_cluster(struct bundle *b)
{
    put_command(b, "version.txt", "version", NULL);
    put_command(b, "doctor.txt", "doctor", NULL);
    put_command(b, "status.json", "status", "--output=json");
    put_command(b, "nodes.json", "nodes", "--output=json");
    put_command(b, "requests.json", "requests", "--output=json");
    put_command(b, "explain.txt", "explain", "--last");
    put_command(b, "pins.json", "pins", "--output=json");
    put_command(b, "blocks.txt", "blocks", "--limit=0");
}

/* Returns whether the text is HOST:PORT and nothing else. A member's address must not become a
 * path, a question, or one of curl's patterns. */
static bool is_address(const char *text)
{
    return text[0] != '\0' &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:_-[]") ==
               strlen(text);
}

/* Where the conductor that answers batonctl has its API: on the host that the operator has named,
 * with the port of its record. Every daemon can write records into etcd, so a record alone must not
 * say who gets the key. NULL: another conductor. */
static char *own_address(const struct bt_ctl *c, const Baton__AdminStatus *s,
                         const Baton__Member *m)
{
    const char *host_end = strrchr(c->addr, ':'), *port = strrchr(m->http, ':');
    if (strcmp(m->name, s->conductor) != 0 || !is_address(c->addr) || host_end == NULL ||
        port == NULL) {
        return NULL;
    }
    return bt_sprintf("%.*s%s", (int)(host_end - c->addr), c->addr, port);
}

/* Writes a conductor's metrics over HTTPS; with_key: with the API key. curl reads the key from a
 * file, because command lines are not secret. Returns false if there is no HTTPS, or no answer. */
static bool put_over_https(struct bundle *b, const struct bt_ctl *c, const char *name,
                           const char *address, bool with_key)
{
    char *config = bt_sprintf("%s/curl", b->folder), *out = NULL;
    char *ca =
        c->tls_dir != NULL ? bt_sprintf("cacert = \"%s/ca.crt\"\n", c->tls_dir) : bt_strdup("");
    char *key = with_key && c->authorization != NULL
                    ? bt_sprintf("header = \"Authorization: %s\"\n", c->authorization)
                    : bt_strdup("");
    int fd = open(config, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool ok =
        fd >= 0 &&
        dprintf(
            fd,
            "silent\nshow-error\ngloboff\nmax-time = %s\n%s%surl = \"https://%.300s/metrics\"\n",
            METRICS_S, ca, key, address) > 0;
    if (fd >= 0) {
        close(fd);
    }
    const char *const argv[] = {"curl", "--config", config, NULL};
    ok = ok && bt_ctl_child(argv, COMMAND_S, &out) == 0;
    if (ok) {
        put(b, name, out);
    }
    free(out);
    (void)unlink(config);
    explicit_bzero(key, strlen(key));
    free(key);
    free(ca);
    free(config);
    return ok;
}

/* A conductor's metrics over HTTPS. Only the one that batonctl asks gets the key. False: there are
 * none. */
static bool put_conductor(struct bundle *b, const struct bt_ctl *c, const Baton__AdminStatus *s,
                          const Baton__Member *m, const char *name)
{
    char *own = own_address(c, s, m);
    bool ok = strcmp(m->kind, "conductor") == 0 &&
              put_over_https(b, c, name, own != NULL ? own : m->http, own != NULL);
    free(own);
    return ok;
}

/* The metrics of each member that this host reaches. */
static void put_metrics(struct bundle *b)
{
    struct bt_ctl c = *b->c;
    Baton__AdminStatus *s = bt_ctl_find_conductor(&c) ? bt_ctl_status_of(&c) : NULL;
    bt_tls_release(c.tls);
    for (size_t i = 0; s != NULL && i < s->n_nodes; i++) {
        const Baton__Member *m = s->nodes[i]->member;
        char name[300], url[400];
        if (!is_address(m->http) || strchr(m->name, '/') != NULL) {
            continue;
        }
        snprintf(name, sizeof(name), "metrics-%.100s.txt", m->name);
        if (put_conductor(b, &c, s, m, name)) {
            continue;
        }
        snprintf(url, sizeof(url), "http://%.300s/metrics", m->http);
        const char *const argv[] = {"curl",    "-sS", "--globoff", "--max-time",
                                    METRICS_S, "--",  url,         NULL};
        put_output(b, name, argv);
    }
    if (s != NULL) {
        baton__admin_status__free_unpacked(s, NULL);
    }
}

static void put_daemons(struct bundle *b)
{
    struct bt_ctl_daemons d = {.n = 0};
    bt_ctl_find_daemons(b->c->opt[BT_CTL_CONFIG], &d);
    for (size_t i = 0; i < d.n; i++) {
        char name[80];
        snprintf(name, sizeof(name), "values-%s-%d.txt", d.list[i].kind, (int)d.list[i].pid);
        put(b, name, d.list[i].values != NULL ? d.list[i].values : "not known\n");
    }
    bt_ctl_daemons_free(&d);
}

static void put_host(struct bundle *b)
{
    static const struct {
        const char *name;
        const char *argv[10];
    } all[] = {
        {"uname.txt", {"uname", "-a", NULL}},
        {"memory.txt", {"cat", "/proc/meminfo", NULL}},
        {"disks.txt", {"df", "-h", NULL}},
        {"ports.txt", {"ss", "-ltn", NULL}},
        {"units.txt", {"systemctl", "--no-pager", "status", "baton-*", "baton.target", NULL}},
        {"journal.txt",
         {"journalctl", "--no-pager", "--output=short-iso", "--since=" LOG_SINCE, "--unit=baton-*",
          "--lines=20000", NULL}},
        {"gpus.txt", {"nvidia-smi", NULL}},
    };
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        put_output(b, all[i].name, all[i].argv);
    }
}

/* The logs of a local cluster. */
static void put_logs(struct bundle *b)
{
    char *logs = bt_ctl_local_logs(b->c);
    if (logs == NULL) {
        return;
    }
    /* The shell names the files: the folder is the user's own, and was checked. */
    char *to = bt_sprintf("%s/%s", b->folder, b->name), *out;
    const char *const argv[] = {
        "sh",
        "-c",
        "cd \"$1\" && for f in *.log; do tail -c " LOG_BYTES " -- \"$f\" > \"$2/log-$f\"; done",
        "sh",
        logs,
        to,
        NULL};
    if (bt_ctl_child(argv, COMMAND_S, &out) != 0) {
        put(b, "logs.txt", out);
    }
    free(out);
    free(to);
    free(logs);
}

/* The archive is for its maker's eyes first. It is always a new file: another user may have put a
 * link, or a file of theirs, where root writes. */
static int write_archive(struct bundle *b, const char *archive)
{
    char to[40], *out = NULL;
    int fd = open(archive, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
    if (fd < 0) {
        fprintf(stderr, "batonctl: %s was not written: %s\n", archive,
                errno == EEXIST ? "it exists; remove it, or name another with --file"
                                : strerror(errno));
        return 1;
    }
    snprintf(to, sizeof(to), "/dev/fd/%d", fd);
    const char *const tar[] = {"tar", "-czf", to, "-C", b->folder, b->name, NULL};
    int rc = bt_ctl_child(tar, COMMAND_S, &out);
    if (close(fd) != 0 || rc != 0) {
        fprintf(stderr, "batonctl: %s was not written: %s\n", archive,
                out[0] != '\0' ? out : strerror(errno));
        (void)unlink(archive);
        rc = 1;
    }
    free(out);
    return rc;
}

int bt_ctl_debug(const struct bt_ctl *c)
{
    struct bundle b = {.c = c};
    char folder[] = "/tmp/batonctl-XXXXXX", *out = NULL;
    time_t now = (time_t)(bt_real_ns() / 1000000000);
    struct tm tm;
    const char *given = c->opt[BT_CTL_FILE];
    (void)strftime(b.name, sizeof(b.name), "baton-debug-%Y%m%dT%H%M%SZ", gmtime_r(&now, &tm));
    char *archive = given != NULL ? bt_strdup(given) : bt_sprintf("%s.tar.gz", b.name);
    if (mkdtemp(folder) == NULL) {
        fprintf(stderr, "batonctl: /tmp: %s\n", strerror(errno));
        free(archive);
        return 1;
    }
    b.folder = folder;
    char *top = bt_sprintf("%s/%s", folder, b.name);
    bool made = mkdir(top, 0700) == 0;
    put_cluster(&b);
    put_metrics(&b);
    put_daemons(&b);
    put_host(&b);
    put_logs(&b);
    int rc = made ? write_archive(&b, archive) : 1;
    const char *const rm[] = {"rm", "-rf", "--", folder, NULL};
    (void)bt_ctl_child(rm, COMMAND_S, &out);
    free(out);
    if (rc == 0) {
        printf("%s\n", archive);
        fprintf(stderr,
                "batonctl: %zu files, without prompts, answers and keys; they name hosts, requests "
                "and tenants: read them before you send them to others\n",
                b.n);
    }
    free(top);
    free(archive);
    return rc == 0 && b.failed == 0 ? 0 : 1;
}

/* Doctor's checks of one daemon: of a running one, or of a configuration with which one could
 * run. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <netdb.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/base/buf.h"
#include "common/base/cert.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/conf/conf.h"
#include "common/rpc/rpc.h"
#include "common/rpc/tls.h"
#include "conductor/ctl/child.h"
#include "conductor/ctl/doctor.h"
#include "etcd.pb-c.h"

#define ETCD_ASKS         5
#define ETCD_SLOW_MS      50
#define EXPIRES_SOON_DAYS 30
#define FILES_LEAST       10000
#define DAEMONS_USER      "baton" /* of the systemd units */

extern char **environ;

static const char *const kinds[] = {"conductor", "kvstore", "prefill", "decode"};

/* ---- which there are ---- */

/* A file of a process's folder in /proc as it is, with two NULs behind it; NULL: it cannot be read.
 */
static char *read_proc(int process, const char *name)
{
    struct bt_buf b;
    int fd = openat(process, name, O_RDONLY | O_CLOEXEC);
    FILE *f = fd >= 0 ? fdopen(fd, "r") : NULL;
    if (f == NULL) {
        return NULL;
    }
    bt_buf_init(&b);
    char part[4096];
    for (size_t n; (n = fread(part, 1, sizeof(part), f)) > 0 && b.len < 1u << 20;) {
        bt_buf_append(&b, part, n);
    }
    (void)fclose(f);
    bt_buf_append(&b, "\0", 2);
    return bt_buf_take(&b);
}

/* Of a list of texts with a NUL behind each: those behind the first (skip), or those that begin
 * with prefix. In the same form. */
static char *texts(const char *all, bool skip, const char *prefix)
{
    struct bt_buf b;
    bt_buf_init(&b);
    for (const char *p = all; *p != '\0'; p += strlen(p) + 1) {
        if ((p != all || !skip) && strncmp(p, prefix, strlen(prefix)) == 0) {
            bt_buf_append(&b, p, strlen(p) + 1);
        }
    }
    bt_buf_append(&b, "\0", 2);
    return bt_buf_take(&b);
}

static void add(struct bt_ctl_daemons *d, const struct bt_ctl_daemon *found)
{
    struct bt_ctl_daemon *x;
    d->list = bt_realloc(d->list, (d->n + 1) * sizeof(*d->list));
    x = &d->list[d->n++];
    *x = *found;
    char *out = NULL;
    if (!x->stranger && bt_ctl_daemon_say(x, "--print-values", &out) == 0) {
        x->values = out;
    } else {
        free(out);
    }
}

/* The user of a process. False: it has gone, or it changes its user. */
static bool user_of(int process, uid_t *uid_p)
{
    unsigned long u[4] = {0};
    char *all = read_proc(process, "status");
    const char *at = all != NULL ? strstr(all, "\nUid:") : NULL;
    bool ok = at != NULL && sscanf(at + 5, "%lu %lu %lu %lu", &u[0], &u[1], &u[2], &u[3]) == 4 &&
              u[0] == u[1] && u[0] == u[2] && u[0] == u[3];
    *uid_p = (uid_t)u[0];
    free(all);
    return ok;
}

/* Returns whether root may trust a process of this user. Any user can run a daemon's program with
 * any arguments and environment. */
static bool believed(uid_t uid)
{
    const struct passwd *daemons = getpwnam(DAEMONS_USER);
    return uid == geteuid() || (daemons != NULL && daemons->pw_uid == uid);
}

/* Adds a process if it runs the program `want`. Only the program in the folder of this batonctl
 * counts, because doctor runs that program with the process's arguments. */
static void add_process(struct bt_ctl_daemons *d, const char *kind, const char *want, pid_t pid,
                        int process)
{
    char exe[PATH_MAX];
    uid_t uid, after;
    bool known = user_of(process, &uid);
    ssize_t n = readlinkat(process, "exe", exe, sizeof(exe) - 1);
    exe[BT_MAX(n, 0)] = '\0';
    char *gone = strstr(exe, " (deleted)");
    bool replaced = gone != NULL;
    *(replaced ? gone : exe + strlen(exe)) = '\0';
    char *argv = known && strcmp(exe, want) == 0 ? read_proc(process, "cmdline") : NULL;
    char *env = argv != NULL ? read_proc(process, "environ") : NULL;
    bool part = argv != NULL && strcmp(argv + strlen(argv) + 1, "--wire-process") == 0;
    /* A process may change its user, so the user must be the same before and after the reading. A
     * kvstore's wire process is part of it. */
    if (env != NULL && !part && user_of(process, &after) && after == uid) {
        struct bt_ctl_daemon x = {.kind = bt_strdup(kind),
                                  .pid = pid,
                                  .uid = uid,
                                  .stranger = !believed(uid),
                                  .replaced = replaced,
                                  .argv = texts(argv, true, ""),
                                  .env = texts(env, false, "BATON_")};
        add(d, &x);
    }
    free(argv);
    free(env);
}

static void find_running(struct bt_ctl_daemons *d, const char *kind)
{
    char name[40];
    snprintf(name, sizeof(name), "baton-%s", kind);
    char *want = bt_ctl_beside(name);
    DIR *all = opendir("/proc");
    for (struct dirent *e; all != NULL && (e = readdir(all)) != NULL;) {
        pid_t pid = (pid_t)atoi(e->d_name);
        /* Open, the folder stays that of this process, also if its number is used again. */
        int process =
            pid > 0 ? openat(dirfd(all), e->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
        if (process >= 0) {
            add_process(d, kind, want, pid, process);
            close(process);
        }
    }
    if (all != NULL) {
        (void)closedir(all);
    }
    free(want);
}

void bt_ctl_find_daemons(const char *given, struct bt_ctl_daemons *d)
{
    const char *etc = given != NULL ? given : BT_CTL_ETC;
    for (size_t k = 0; k < BT_ARRAY_LEN(kinds); k++) {
        size_t before = d->n;
        char path[PATH_MAX];
        find_running(d, kinds[k]);
        snprintf(path, sizeof(path), "%s/%s.yaml", etc, kinds[k]);
        if ((d->n == before || given != NULL) && access(path, F_OK) == 0) {
            struct bt_buf argv;
            bt_buf_init(&argv);
            bt_buf_append(&argv, "--config", sizeof("--config"));
            bt_buf_append(&argv, path, strlen(path) + 1);
            bt_buf_append(&argv, "", 1);
            struct bt_ctl_daemon x = {.kind = bt_strdup(kinds[k]),
                                      .uid = geteuid(),
                                      .argv = bt_buf_take(&argv),
                                      .env = bt_strdup("")};
            add(d, &x);
        }
    }
}

void bt_ctl_daemons_free(struct bt_ctl_daemons *d)
{
    for (size_t i = 0; i < d->n; i++) {
        free(d->list[i].kind);
        free(d->list[i].argv);
        free(d->list[i].env);
        free(d->list[i].values);
    }
    free(d->list);
}

/* The environment for the program of a daemon: its BATON_ variables, and with `ours` also those of
 * this process. In arguments of env, every user of the host could read them. The caller frees the
 * list. */
static const char **environment_of(const struct bt_ctl_daemon *d, bool ours)
{
    const char **list = NULL;
    size_t n = 0;
    for (const char *p = d->env; *p != '\0'; p += strlen(p) + 1) {
        list = bt_realloc(list, (n + 2) * sizeof(*list));
        list[n++] = p;
    }
    for (char **e = environ; ours && *e != NULL; e++) {
        if (d->pid == 0 || strncmp(*e, "BATON_", 6) != 0) {
            list = bt_realloc(list, (n + 2) * sizeof(*list));
            list[n++] = *e;
        }
    }
    list = list != NULL ? list : bt_calloc(1, sizeof(*list));
    list[n] = NULL;
    return list;
}

int bt_ctl_daemon_say(const struct bt_ctl_daemon *d, const char *more, char **out_p)
{
    static const char *const as[] = {"setpriv", "--reuid=" DAEMONS_USER, "--regid=" DAEMONS_USER,
                                     "--init-groups", "--no-new-privs"};
    const char *argv[CTL_CHILD_ARGS_MAX];
    bool own = d->uid == geteuid();
    char name[40];
    size_t n = 0;
    snprintf(name, sizeof(name), "baton-%s", d->kind);
    char *program = bt_ctl_beside(name);
    if (!own) { /* root runs it as its own user, who must not see root's environment */
        memcpy(argv, as, sizeof(as));
        n = BT_ARRAY_LEN(as);
    }
    argv[n++] = program;
    argv[n++] = more; /* comes first, so that it cannot be the value of an option */
    for (const char *p = d->argv; *p != '\0' && n < CTL_CHILD_ARGS_MAX - 1; p += strlen(p) + 1) {
        argv[n++] = p;
    }
    argv[n] = NULL;
    const char **environment = environment_of(d, own);
    int rc = bt_ctl_child_with(argv, environment, 60, out_p);
    free(environment);
    free(program);
    return rc;
}

void bt_ctl_daemon_value(const struct bt_ctl_daemon *d, const char *key, char *out, size_t cap)
{
    size_t len = strlen(key);
    out[0] = '\0';
    for (const char *p = d->values; p != NULL && *p != '\0';) {
        size_t n = strcspn(p, "\n");
        if (n >= len + 2 && strncmp(p, key, len) == 0 && p[len] == ':') {
            snprintf(out, cap, "%.*s", (int)(n - len - 2), p + len + 2);
            return;
        }
        p += n + (p[n] == '\n');
    }
}

/* ---- the checks ---- */

struct look {
    struct bt_ctl_findings *f;
    const struct bt_ctl_daemon *d;
};

static void find(const struct look *l, enum bt_ctl_level level, const char *what,
                 const char *remedy, const char *fmt, ...) __attribute__((format(printf, 5, 6)));

static void find(const struct look *l, enum bt_ctl_level level, const char *what,
                 const char *remedy, const char *fmt, ...)
{
    char text[1000], name[80];
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (l->d->pid != 0) {
        snprintf(name, sizeof(name), "%s[%d] %s", l->d->kind, (int)l->d->pid, what);
    } else {
        snprintf(name, sizeof(name), "%s %s", l->d->kind, what);
    }
    bt_ctl_find(l->f, level, name, remedy, "%s", text);
}

/* Runs the daemon's own check of its configuration and of everything that the configuration names
 * on this host. */
static void look_configuration(const struct look *l)
{
    char *out;
    int rc = bt_ctl_daemon_say(l->d, "--check", &out);
    size_t n = strlen(out);
    while (n > 0 && out[n - 1] == '\n') {
        out[--n] = '\0';
    }
    if (rc == 0) {
        find(l, BT_CTL_GOOD, "configuration", NULL, "good");
    } else {
        find(l, BT_CTL_FAULT, "configuration", "correct the fault that the message names", "%s",
             n != 0 ? out : "the program does not start");
    }
    free(out);
}

static double bytes_of(const char *text)
{
    char *unit = NULL;
    double v = strtod(text, &unit);
    static const struct {
        const char *name;
        double factor;
    } units[] = {{"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
                 {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
    for (size_t i = 0; i < BT_ARRAY_LEN(units); i++) {
        v *= strcmp(unit, units[i].name) == 0 ? units[i].factor : 1;
    }
    return v;
}

/* Checks that there is room for the slab, whose file has its full size as soon as the kvstore
 * starts. */
static void look_slab(const struct look *l)
{
    char size[40], path[PATH_MAX], folder[PATH_MAX];
    struct statvfs v;
    bt_ctl_daemon_value(l->d, "kvstore.slab_bytes", size, sizeof(size));
    bt_ctl_daemon_value(l->d, "kvstore.slab_path", path, sizeof(path));
    snprintf(folder, sizeof(folder), "%s", path[0] != '\0' ? path : "/dev/shm/slab");
    char *slash = strrchr(folder, '/');
    *(slash != NULL && slash != folder ? slash : folder + strlen(folder)) = '\0';
    if (size[0] == '\0' || statvfs(folder, &v) != 0) {
        return;
    }
    double want = bytes_of(size), all = (double)v.f_blocks * (double)v.f_frsize,
           left = (double)v.f_bavail * (double)v.f_frsize;
    if (want > all || (l->d->pid == 0 && want > left)) {
        find(l, BT_CTL_FAULT, "slab",
             want > all ? "make the file system larger: mount -o remount,size=... (and in "
                          "/etc/fstab), or set a smaller kvstore.slab_bytes"
                        : "remove other files there ('ls -l' shows them), or set a smaller "
                          "kvstore.slab_bytes",
             "kvstore.slab_bytes is %s, and %s has %.1f GiB, %.1f of them free", size, folder,
             all / 0x1p30, left / 0x1p30);
    } else {
        find(l, BT_CTL_GOOD, "slab", NULL, "%s of the %.1f GiB in %s", size, all / 0x1p30, folder);
    }
}

static void look_ssd(const struct look *l)
{
    char size[40], path[PATH_MAX];
    struct statvfs v;
    bt_ctl_daemon_value(l->d, "kvstore.ssd.bytes", size, sizeof(size));
    bt_ctl_daemon_value(l->d, "kvstore.ssd.path", path, sizeof(path));
    if (path[0] == '\0' || statvfs(path, &v) != 0) {
        return; /* none, or not made yet: --check has looked at the folder above it */
    }
    double want = bytes_of(size), all = (double)v.f_blocks * (double)v.f_frsize;
    if (want > all) {
        find(l, BT_CTL_FAULT, "SSD", "set a smaller kvstore.ssd.bytes, or another kvstore.ssd.path",
             "kvstore.ssd.bytes is %s, and the file system of %s has %.1f GiB", size, path,
             all / 0x1p30);
    } else {
        find(l, BT_CTL_GOOD, "SSD", NULL, "%s in %s", size, path);
    }
}

/* A limit of a running process; false: the kernel does not say. *unlimited_p: there is none. */
static bool limit_of(pid_t pid, const char *name, uint64_t *value_p)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d", (int)pid);
    int process = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    char *all = process >= 0 ? read_proc(process, "limits") : NULL;
    if (process >= 0) {
        close(process);
    }
    const char *at = all != NULL ? strstr(all, name) : NULL;
    if (at != NULL) {
        at += strlen(name);
        at += strspn(at, " ");
        *value_p = strncmp(at, "unlimited", 9) == 0 ? UINT64_MAX : strtoull(at, NULL, 10);
    }
    free(all);
    return at != NULL;
}

static void look_limits(const struct look *l)
{
    uint64_t files, locked;
    if (strcmp(l->d->kind, "conductor") == 0 && limit_of(l->d->pid, "Max open files", &files) &&
        files < FILES_LEAST) {
        find(l, BT_CTL_WARNING, "limits",
             "start it with Baton's systemd unit, or with a larger 'ulimit -n'",
             "it can open %llu files; each client and each session needs one",
             (unsigned long long)files);
    }
    if (strcmp(l->d->kind, "kvstore") == 0 && access("/sys/class/infiniband", F_OK) == 0 &&
        limit_of(l->d->pid, "Max locked memory", &locked) && locked != UINT64_MAX) {
        find(l, BT_CTL_WARNING, "limits", "LimitMEMLOCK=infinity in its unit",
             "it can lock %llu bytes; RDMA locks the whole slab", (unsigned long long)locked);
    }
}

/* Checks that a daemon that does not run could listen there. A running one has proved it. */
static void look_address(const struct look *l, const char *key)
{
    char addr[300], why[400];
    bt_ctl_daemon_value(l->d, key, addr, sizeof(addr));
    const char *port = strrchr(addr, ':');
    if (port == NULL || strcmp(port, ":0") == 0) {
        return;
    }
    if (l->d->pid == 0 && !bt_conf_listen_why(addr, why, sizeof(why))) {
        find(l, BT_CTL_FAULT, key, "ss -ltnp shows who has the port", "%s: %s", addr, why);
    } else {
        find(l, BT_CTL_GOOD, key, NULL, "%s %s", addr, l->d->pid == 0 ? "is free" : "listens");
    }
}

/* The file that a key with this prefix names, or else the one that a key with the other prefix
 * names. "" if neither does. */
static void tls_file(const struct look *l, const char *prefix, const char *other, const char *name,
                     char *out, size_t cap)
{
    char key[80];
    snprintf(key, sizeof(key), "%s.%s", prefix, name);
    bt_ctl_daemon_value(l->d, key, out, cap);
    if (out[0] == '\0' && other != NULL) {
        tls_file(l, other, NULL, name, out, cap);
    }
}

/* How long a certificate is still good. */
static void tell_end(const struct look *l, const char *what, const char *file, uint64_t not_after_s)
{
    double days = ((double)not_after_s - (double)bt_real_ns() / 1e9) / 86400;
    if (days < EXPIRES_SOON_DAYS) {
        find(l, days > 0 ? BT_CTL_WARNING : BT_CTL_FAULT, what,
             "make a new one with baton-certs, or where it came from, and put it in its place; the "
             "daemon reads it by itself",
             days > 0 ? "the certificate %s ends in %.1f days"
                      : "the certificate %s ended %.1f days ago",
             file, fabs(days));
    } else {
        find(l, BT_CTL_GOOD, what, NULL, "%s is good for %.0f days", file, days);
    }
}

/* The certificate that clients see. --check has looked whether it can be used. */
static void look_https(const struct look *l)
{
    char dir[PATH_MAX], pem[65536], err[200];
    const char *why;
    struct stat st;
    struct bt_cert c;
    bt_ctl_daemon_value(l->d, "conductor.http.tls", dir, sizeof(dir));
    if (dir[0] == '\0') {
        return;
    }
    char *path = bt_sprintf("%s/tls.crt", dir);
    FILE *f = bt_file_open(path, &st, &why);
    size_t n = f != NULL ? fread(pem, 1, sizeof(pem) - 1, f) : 0;
    pem[n] = '\0';
    if (f != NULL) {
        (void)fclose(f);
    }
    if (n != 0 && bt_cert_read(pem, &c, err, sizeof(err)) == BT_OK) {
        tell_end(l, "conductor.http.tls", path, c.not_after_s);
    }
    free(path);
}

/* Reads certificates as the daemon does (common/rpc/tls_conf.c): those of etcd.tls.* are those of
 * cluster.tls.* where they are not set. NULL: there are none, or they are wrong. */
static struct bt_tls *look_certificates(const struct look *l, bool of_etcd)
{
    const char *prefix = of_etcd ? "etcd.tls" : "cluster.tls",
               *other = of_etcd ? "cluster.tls" : NULL;
    char ca[PATH_MAX], cert[PATH_MAX], private_key[PATH_MAX], cluster[200], own[PATH_MAX], err[700];
    struct bt_tls *tls;
    tls_file(l, prefix, other, "ca", ca, sizeof(ca));
    tls_file(l, prefix, NULL, "cert", own, sizeof(own));
    tls_file(l, prefix, other, "cert", cert, sizeof(cert));
    tls_file(l, own[0] != '\0' ? prefix : "cluster.tls", NULL, "key", private_key,
             sizeof(private_key));
    bt_ctl_daemon_value(l->d, "cluster.name", cluster, sizeof(cluster));
    if (ca[0] == '\0') {
        return NULL;
    }
    struct bt_tls_config conf = {.key = prefix,
                                 .ca = ca,
                                 .cert = cert,
                                 .private_key = private_key,
                                 .cluster = cluster,
                                 .host_names = of_etcd};
    if (bt_tls_create(&conf, &tls, err, sizeof(err)) != BT_OK) {
        find(l, BT_CTL_FAULT, prefix, "correct the fault that the message names", "%s", err);
        return NULL;
    }
    if (of_etcd && own[0] == '\0') {
        return tls; /* the cluster's, which was looked at */
    }
    tell_end(l, prefix, cert, (uint64_t)bt_tls_not_after_s(tls));
    return tls;
}

/* How long a connection and a linearizable read take at one endpoint: the shortest of a few. */
static void look_etcd_at(const struct look *l, const char *endpoint, struct bt_tls *tls)
{
    Etcdserverpb__RangeRequest q = ETCDSERVERPB__RANGE_REQUEST__INIT;
    uint8_t data[64];
    double best = 1e9;
    char detail[400] = "";
    bool secure = strncmp(endpoint, "https://", 8) == 0;
    const char *host = strstr(endpoint, "://");
    q.key.data = (uint8_t *)"/baton-doctor";
    q.key.len = 13;
    size_t len = etcdserverpb__range_request__pack(&q, data);
    struct bt_rpc_question ask = {.target = host != NULL ? host + 3 : endpoint,
                                  .tls = secure ? tls : NULL,
                                  .method = "/etcdserverpb.KV/Range",
                                  .data = data,
                                  .len = len,
                                  .deadline_ms = 5000};
    for (size_t i = 0; i < ETCD_ASKS; i++) {
        void *reply = NULL;
        size_t n = 0;
        uint64_t from = bt_mono_ns();
        int code = bt_rpc_unary_blocking(&ask, &reply, &n, detail, sizeof(detail));
        best = BT_MIN(best, (double)(bt_mono_ns() - from) / 1e6);
        if (code != BT_GRPC_OK) {
            find(l, BT_CTL_FAULT, "etcd",
                 "start etcd there, check etcd.endpoints and the firewall; https:// for TLS",
                 "%s does not answer: %s", endpoint,
                 detail[0] != '\0' ? detail : "no reason given");
            return;
        }
        free(reply);
    }
    bool slow = best > ETCD_SLOW_MS;
    find(l, slow ? BT_CTL_WARNING : BT_CTL_GOOD, "etcd",
         slow ? "give etcd a disk of its own that syncs fast, and a fast network: members whose "
                "lease it renews too late count as dead"
              : NULL,
         "%s takes a connection and answers a read in %.1f ms", endpoint, best);
}

static void look_etcd(const struct look *l, struct bt_tls *tls)
{
    char all[2000], *save = NULL;
    bt_ctl_daemon_value(l->d, "etcd.endpoints", all, sizeof(all));
    for (char *e = strtok_r(all, ",", &save); e != NULL; e = strtok_r(NULL, ",", &save)) {
        look_etcd_at(l, e, tls);
    }
}

void bt_ctl_look_daemon(struct bt_ctl_findings *f, const struct bt_ctl_daemon *d)
{
    static const char *const addresses[] = {"rpc.listen", "http.listen", "conductor.http.listen"};
    struct look l = {.f = f, .d = d};
    if (d->stranger) {
        find(&l, BT_CTL_NOTE, "user",
             "run batonctl doctor as that user to check it; the daemons' user is " DAEMONS_USER,
             "user %u runs this program, and doctor, as root, reads no file that this user names",
             (unsigned)d->uid);
        return;
    }
    look_configuration(&l);
    if (d->values == NULL) {
        return;
    }
    if (strcmp(d->kind, "kvstore") == 0) {
        look_slab(&l);
        look_ssd(&l);
    }
    if (d->replaced) {
        find(&l, BT_CTL_WARNING, "program",
             "start it again to use the new one; UPGRADING says in which order",
             "its program was replaced since it started");
    }
    if (d->pid != 0) {
        look_limits(&l);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(addresses); i++) {
        look_address(&l, addresses[i]);
    }
    look_https(&l);
    struct bt_tls *cluster = look_certificates(&l, false), *etcd = look_certificates(&l, true);
    look_etcd(&l, etcd);
    bt_tls_release(etcd);
    bt_tls_release(cluster);
}

/* The checks of --check on this host: the addresses that the daemon will listen on and the
 * directories that it uses. The daemon's own `look` adds its model and devices. Runs once, before
 * any thread. Creates and changes nothing. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/file.h"
#include "common/conf/conf_priv.h"

/* Splits host:port or [v6]:port; false: the text is longer than any address. */
static bool split(const char *addr, char *host, size_t host_cap, const char **port_p)
{
    const char *colon = strrchr(addr, ':');
    size_t len = colon != NULL ? (size_t)(colon - addr) : strlen(addr);
    if (len >= 2 && addr[0] == '[' && addr[len - 1] == ']') {
        addr++;
        len -= 2;
    }
    if (len >= host_cap) {
        return false;
    }
    snprintf(host, host_cap, "%.*s", (int)len, addr);
    *port_p = colon != NULL ? colon + 1 : "0";
    return true;
}

/* Checks that it is an address of this host. A port in use is not a mistake: the daemon may be
 * running. */
bool bt_conf_look_listen(const char *key, const char *addr)
{
    char host[256];
    const char *port;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *all = NULL;
    if (addr == NULL || addr[0] == '\0') {
        return true;
    }
    if (!split(addr, host, sizeof(host), &port)) {
        bt_conf_say("%s: \"%.60s...\" is too long for an address", key, addr);
        return false;
    }
    int rc =
        getaddrinfo(host[0] == '\0' || strcmp(host, "*") == 0 ? NULL : host, "0", &hints, &all);
    if (rc != 0) {
        bt_conf_say("%s: the host of \"%s\" cannot be resolved: %s", key, addr, gai_strerror(rc));
        return false;
    }
    int error = EADDRNOTAVAIL;
    for (const struct addrinfo *a = all; a != NULL && error != 0; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0) {
            error = bind(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
            close(fd);
        }
    }
    freeaddrinfo(all);
    if (error != 0) {
        bt_conf_say("%s: this host cannot listen on \"%s\": %s; name an address of this host", key,
                    addr, strerror(error));
    }
    return error == 0;
}

bool bt_conf_listen_why(const char *addr, char *why, size_t cap)
{
    char host[256];
    const char *port;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *all = NULL;
    int error = 0, one = 1;
    bool any = addr == NULL || !split(addr, host, sizeof(host), &port) || host[0] == '\0' ||
               strcmp(host, "*") == 0;
    if (addr == NULL || getaddrinfo(any ? NULL : host, port, &hints, &all) != 0) {
        snprintf(why, cap, "it is not an address: write host:port");
        return false;
    }
    for (const struct addrinfo *a = all; a != NULL && error == 0; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
        if (fd < 0 || bind(fd, a->ai_addr, a->ai_addrlen) != 0) {
            error = errno;
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    freeaddrinfo(all);
    const char *remedy = error == EADDRINUSE
                             ? "stop the process that has the port, or give another port (0: a "
                               "free one)"
                         : error == EACCES || error == EPERM
                             ? "give a port from 1024 up, or the right to use lower ones "
                               "(CAP_NET_BIND_SERVICE)"
                         : error == EADDRNOTAVAIL ? "name an address of this host"
                                                  : "the lines before this one say more";
    snprintf(why, cap, "cannot listen there: %s; %s",
             error != 0 ? strerror(error) : "it was refused", remedy);
    return error == 0;
}

bool bt_conf_look_dir(const char *key, const char *path, bool write)
{
    struct stat st;
    const char *why = NULL;
    if (stat(path, &st) != 0) {
        why = strerror(errno);
    } else if (!S_ISDIR(st.st_mode)) {
        why = "it is not a directory";
    } else if (access(path, write ? W_OK | X_OK : R_OK | X_OK) != 0) {
        why = strerror(errno);
    }
    if (why != NULL) {
        bt_conf_say("%s: the directory %s cannot be %s: %s", key, path, write ? "written" : "read",
                    why);
    }
    return why == NULL;
}

bool bt_conf_look_parent(const char *key, const char *path, bool write)
{
    char up[4096];
    struct stat st;
    if (stat(path, &st) == 0) {
        return true;
    }
    snprintf(up, sizeof(up), "%s", path);
    for (size_t n = strlen(up); n > 1 && up[n - 1] == '/'; n--) {
        up[n - 1] = '\0';
    }
    char *slash = strrchr(up, '/');
    if (slash == NULL) {
        return bt_conf_look_dir(key, ".", write);
    }
    slash[slash == up] = '\0';
    return bt_conf_look_dir(key, up, write);
}

bool bt_conf_look_own(const char *key, const char *path)
{
    char why[512];
    bool ok = bt_conf_dir_private(path, why, sizeof(why)) != BT_ERR_CONFIG;
    if (!ok) {
        bt_conf_say("%s: %s: %s", key, path, why);
    }
    return ok;
}

static bool look_file(const char *key, const char *path, bool secret)
{
    char why[256];
    const char *reason;
    struct stat st;
    if (path == NULL) {
        return true;
    }
    FILE *f = bt_file_open(path, &st, &reason);
    if (f == NULL) {
        snprintf(why, sizeof(why), "it cannot be read: %s", reason);
    } else {
        (void)fclose(f);
        if (!secret || bt_conf_secret_private(&st, why, sizeof(why))) {
            return true;
        }
    }
    bt_conf_say("%s: %s: %s", key, path, why);
    return false;
}

static bool look_tls(const struct bt_conf_common *c)
{
    const struct {
        const char *key, *path;
        bool secret;
    } all[] = {{"cluster.tls.ca", c->cluster_tls_ca, false},
               {"cluster.tls.cert", c->cluster_tls_cert, false},
               {"cluster.tls.key", c->cluster_tls_key, true},
               {"cluster.tls.revoked", c->cluster_tls_revoked, false},
               {"etcd.tls.ca", c->etcd_tls_ca, false},
               {"etcd.tls.cert", c->etcd_tls_cert, false},
               {"etcd.tls.key", c->etcd_tls_key, true}};
    bool ok = true;
    for (size_t i = 0; i < BT_ARRAY_LEN(all); i++) {
        ok = look_file(all[i].key, all[i].path, all[i].secret) && ok;
    }
    return ok;
}

bool bt_conf_look(const struct bt_conf_schema *s, const void *conf)
{
    const struct bt_conf_common *c = conf;
    char err[1024] = "";
    bool ok = bt_conf_look_listen("rpc.listen", c->rpc_listen);
    ok = bt_conf_look_listen("http.listen", c->http_listen) && ok;
    ok = look_tls(c) && ok;
    if (bt_conf_look_dir("model.path", c->model_path, false)) {
        if (s->look != NULL && !s->look(conf, err, sizeof(err))) {
            if (err[0] != '\0') {
                bt_conf_say("%s", err);
            }
            ok = false;
        }
    } else {
        ok = false;
    }
    return ok;
}

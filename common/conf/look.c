/* What --check looks at on this host: the addresses that the daemon will listen on and the
 * directories that it uses. The daemon's own `look` adds its model and devices. Runs once, before
 * any thread. Nothing is created or changed. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* Is it an address of this host? A port that is in use is no mistake: the daemon may be running. */
bool bt_conf_look_listen(const char *key, const char *addr)
{
    char host[256];
    const char *port;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *all = NULL;
    if (addr == NULL || addr[0] == '\0') {
        return true;
    }
    if (!split(addr, host, sizeof(host), &port)) {
        bt_conf_say("%s: \"%.60s...\" is longer than an address can be", key, addr);
        return false;
    }
    int rc =
        getaddrinfo(host[0] == '\0' || strcmp(host, "*") == 0 ? NULL : host, "0", &hints, &all);
    if (rc != 0) {
        bt_conf_say("%s: the host of \"%s\" is not known here: %s", key, addr, gai_strerror(rc));
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

bool bt_conf_look(const struct bt_conf_schema *s, const void *conf)
{
    const struct bt_conf_common *c = conf;
    char err[1024] = "";
    bool ok = bt_conf_look_listen("rpc.listen", c->rpc_listen);
    ok = bt_conf_look_listen("http.listen", c->http_listen) && ok;
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

/* The checks of `batonctl doctor`, and their findings. */
#ifndef BT_CONDUCTOR_CTL_DOCTOR_H
#define BT_CONDUCTOR_CTL_DOCTOR_H

#include <sys/types.h>

#include "common/base/base.h"

#define BT_CTL_ETC "/etc/baton"

enum bt_ctl_level { BT_CTL_GOOD, BT_CTL_WARNING, BT_CTL_FAULT, BT_CTL_NOTE };

struct bt_ctl_finding {
    enum bt_ctl_level level;
    char *what;   /* "clock", "kvstore: slab" */
    char *text;   /* the observation */
    char *remedy; /* NULL: nothing to do */
};

struct bt_ctl_findings {
    struct bt_ctl_finding *list;
    size_t n;
};

/* remedy NULL: none. */
void bt_ctl_find(struct bt_ctl_findings *f, enum bt_ctl_level level, const char *what,
                 const char *remedy, const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/* A daemon of this host: one that runs, or one that is configured. */
struct bt_ctl_daemon {
    char *kind;
    pid_t pid;     /* 0: it does not run */
    uid_t uid;     /* its user, or this one's */
    bool stranger; /* it runs as a user whom this one does not believe: nothing is asked of it */
    bool replaced; /* it runs, and the program's file is another one now */
    char *argv;    /* its arguments behind argv[0], each with a NUL, then another NUL */
    char *env;     /* its BATON_ variables, likewise */
    char *values;  /* what --print-values says; NULL: not known */
};

struct bt_ctl_daemons {
    struct bt_ctl_daemon *list;
    size_t n;
};

/* Finds the daemons that run from the folder of this batonctl. Adds daemons that have a
 * configuration file KIND.yaml: all of the folder `given`, or, if that is NULL, those of /etc/baton
 * that do not run. End it with bt_ctl_daemons_free. */
void bt_ctl_find_daemons(const char *given, struct bt_ctl_daemons *d);
void bt_ctl_daemons_free(struct bt_ctl_daemons *d);
/* Runs the daemon's program with its own arguments and environment, and one more argument; as root
 * with the daemon's user. Not for strangers. Returns as bt_ctl_child. */
int bt_ctl_daemon_say(const struct bt_ctl_daemon *d, const char *more, char **out_p);
/* Value of a key into out; "" if the values are not known or the key is not set. */
void bt_ctl_daemon_value(const struct bt_ctl_daemon *d, const char *key, char *out, size_t cap);

/* The host: clock, huge pages, RDMA devices, GPUs. */
void bt_ctl_look_host(struct bt_ctl_findings *f);
/* A daemon: its configuration, limits, memory, files, certificates and addresses, and etcd. */
void bt_ctl_look_daemon(struct bt_ctl_findings *f, const struct bt_ctl_daemon *d);

#endif

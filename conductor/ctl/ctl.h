/* Shared by the commands of batonctl. */
#ifndef BT_CONDUCTOR_CTL_H
#define BT_CONDUCTOR_CTL_H

#include <jansson.h>

#include "admin.pb-c.h"
#include "common/base/base.h"
#include "common/rpc/pb.h"
#include "common/rpc/tls.h"
#include "conductor/ctl/table.h"

enum bt_ctl_option_id {
#define BT_CTL_OPTION(id, name, value, commands, text) BT_CTL_##id,
#include "conductor/ctl/options.def"
#undef BT_CTL_OPTION
    BT_CTL_N_OPTIONS
};

struct bt_ctl {
    const char *command;
    const char *arg;                   /* NODE, REQUEST_ID; NULL: none given */
    const char *arg2;                  /* ROLE */
    const char *opt[BT_CTL_N_OPTIONS]; /* as given; a flag is ""; NULL: not given */
    char addr[256];
    const char *addr_from; /* for error messages */
    struct bt_tls *tls;    /* NULL: plaintext */
    char *tls_dir;         /* where its files are; NULL: plaintext */
    char *authorization;   /* metadata of every call: an API key; NULL: none */
    bool json;
    uint32_t limit;
    double watch_s; /* 0: once */
};

/* Prints the fault of the command line and returns the exit status. arg may be NULL. */
int bt_ctl_usage(const char *what, const char *arg);
/* Sends q to method and waits for the reply, a message of reply_type, which the caller frees
 * (baton__..._free_unpacked); NULL after an error message. */
void *bt_ctl_ask(const struct bt_ctl *c, const char *method, const ProtobufCMessage *q,
                 const ProtobufCMessageDescriptor *reply_type);
/* Prints and frees j; exit status. */
int bt_ctl_print_json(json_t *j);

/* Sorts the table as --sort says, prints it and frees its cells; exit status. */
int bt_ctl_print_table(const struct bt_ctl *c, struct bt_ctl_table *t);

/* The members by kind, node and name. */
void bt_ctl_sort_nodes(Baton__AdminStatus *s);
/* A table of the daemons that are not members yet, if there are any. Returns the lines printed. */
size_t bt_ctl_print_starting(const Baton__AdminStatus *s);
/* A member's state in a word. */
const char *bt_ctl_state_of(const Baton__AdminNode *n);

/* The answer for `batonctl status` and other commands. NULL after an error message. The caller
 * frees it (baton__admin_status__free_unpacked). */
Baton__AdminStatus *bt_ctl_status_of(const struct bt_ctl *c);

/* The commands (commands.def); each returns the exit status. */
#define BT_CTL_COMMAND(name, run, arg, arg2, summary, details) int run(const struct bt_ctl *c);
#include "conductor/ctl/commands.def"
#undef BT_CTL_COMMAND

#endif

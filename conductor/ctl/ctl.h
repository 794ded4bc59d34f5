/* What the commands of batonctl share. */
#ifndef BT_CONDUCTOR_CTL_H
#define BT_CONDUCTOR_CTL_H

#include <jansson.h>

#include "admin.pb-c.h"
#include "common/base/base.h"
#include "common/rpc/pb.h"
#include "common/rpc/tls.h"

struct bt_ctl_pin { /* options of pin, as given; NULL: not */
    const char *prompt, *prompt_file, *tokens_file, *chat_file, *request;
    const char *ttl, *label, *tenant, *api_key_file, *cache_salt;
    const char *given; /* name of the last such option, for messages */
};

struct bt_ctl {
    const char *command;
    const char *arg;  /* NODE, REQUEST_ID; NULL: none given */
    const char *arg2; /* ROLE */
    char addr[256];
    const char *addr_from; /* for error messages */
    const char *tls_dir;   /* --tls */
    const char *state_dir; /* --dir: of a local cluster */
    struct bt_tls *tls;    /* NULL: plaintext */
    bool json, last, force;
    uint32_t limit;
    struct bt_ctl_pin pin;
};

/* Prints what is wrong with the command line; returns the exit status. arg may be NULL. */
int bt_ctl_usage(const char *what, const char *arg);
/* Is arg the option, as "--opt" or "--opt=value"? */
bool bt_ctl_is_option(const char *arg, const char *name);
/* Value of option argv[*i], in it or behind it; NULL if it is missing. */
const char *bt_ctl_option_value(int argc, char **argv, int *i, const char *name);

/* Sends q to method and waits for the reply, a message of reply_type, which the caller frees
 * (baton__..._free_unpacked); NULL after an error message. */
void *bt_ctl_ask(const struct bt_ctl *c, const char *method, const ProtobufCMessage *q,
                 const ProtobufCMessageDescriptor *reply_type);
/* Prints and frees j; exit status. */
int bt_ctl_print_json(json_t *j);

/* Commands; each returns the exit status. */
int bt_ctl_requests(const struct bt_ctl *c);
int bt_ctl_explain(const struct bt_ctl *c);
int bt_ctl_drain(const struct bt_ctl *c);
int bt_ctl_undrain(const struct bt_ctl *c);
int bt_ctl_role(const struct bt_ctl *c);
int bt_ctl_pin(const struct bt_ctl *c);
int bt_ctl_unpin(const struct bt_ctl *c);
int bt_ctl_pins(const struct bt_ctl *c);

/* Takes argv[*i] if it is an option of pin. 0: taken; -1: it is none; else exit status + 1. */
int bt_ctl_pin_option(struct bt_ctl *c, int argc, char **argv, int *i);

#endif

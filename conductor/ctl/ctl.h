/* What the commands of batonctl share. */
#ifndef BT_CONDUCTOR_CTL_H
#define BT_CONDUCTOR_CTL_H

#include <jansson.h>

#include "common/base/base.h"
#include "common/rpc/pb.h"

struct ctl {
    const char *command;
    const char *arg;  /* NODE, REQUEST_ID; NULL: none given */
    const char *arg2; /* ROLE */
    char addr[256];
    const char *addr_from; /* for error messages */
    bool json, last;
    uint32_t limit;
};

/* The reply's bytes, to be freed; NULL after an error message. */
void *ctl_call(const struct ctl *c, const char *method, const void *data, size_t len,
               size_t *reply_len_p);
/* The same of a message. */
void *ctl_ask(const struct ctl *c, const char *method, const ProtobufCMessage *q,
              size_t *reply_len_p);
void ctl_malformed(const struct ctl *c); /* says that the reply could not be read */
/* Prints and frees j; exit status. */
int ctl_print_json(json_t *j);

/* Commands; each returns the exit status. */
int ctl_requests(const struct ctl *c);
int ctl_explain(const struct ctl *c);
int ctl_drain(const struct ctl *c);
int ctl_undrain(const struct ctl *c);
int ctl_role(const struct ctl *c);

#endif

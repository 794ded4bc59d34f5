/* The tables of batonctl's commands and options, and the help texts made of them. */
#ifndef BT_CONDUCTOR_CTL_HELP_H
#define BT_CONDUCTOR_CTL_HELP_H

#include <stdio.h>

#include "conductor/ctl/ctl.h"

struct bt_ctl_command {
    const char *name;
    int (*run)(const struct bt_ctl *c);
    const char *arg, *arg2; /* names of its arguments; NULL: none */
    const char *summary, *details;
};

struct bt_ctl_option {
    const char *name, *value; /* value "": a flag; "[...]": can be left out */
    const char *commands;     /* NULL: all */
    const char *text;
};

extern const struct bt_ctl_command bt_ctl_commands[];
extern const size_t bt_ctl_n_commands;
extern const struct bt_ctl_option bt_ctl_options[]; /* by BT_CTL_ADDR and so on */
extern const size_t bt_ctl_n_options;

/* NULL: there is none. */
const struct bt_ctl_command *bt_ctl_find_command(const char *name);
bool bt_ctl_takes(const struct bt_ctl_command *k, const struct bt_ctl_option *o);
/* Help for a command; k NULL: for batonctl. At most 80 columns. */
void bt_ctl_help(const struct bt_ctl_command *k, FILE *f);

#endif

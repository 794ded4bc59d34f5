/* Programs that batonctl runs: daemons' --check and --print-values, nvidia-smi, journalctl, tar. */
#ifndef BT_CONDUCTOR_CTL_CHILD_H
#define BT_CONDUCTOR_CTL_CHILD_H

#include <stdbool.h>
#include <stddef.h>

#define CTL_CHILD_ARGS_MAX 80 /* with the NULL at the end */

/* Runs argv[0] (looked up in PATH) without standard input, and kills it after seconds_max. Returns
 * its exit status; -1 if it did not start, was killed, or did not end in time. *out_p: the text of
 * both its outputs, up to 4 MiB, with a NUL at its end. The caller frees it. */
int bt_ctl_child(const char *const *argv, int seconds_max, char **out_p);
/* The same with another environment: NAME=VALUE texts, then NULL. */
int bt_ctl_child_with(const char *const *argv, const char *const *environment, int seconds_max,
                      char **out_p);

/* The path of a program that was installed beside batonctl (baton-kvstore). The caller frees it. */
char *bt_ctl_beside(const char *program);

#endif

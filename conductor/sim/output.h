/* Files that a command writes. It is checked before the work whether they can be written, and a
 * file that could not be written completely is removed. */
#ifndef BT_CONDUCTOR_SIM_OUTPUT_H
#define BT_CONDUCTOR_SIM_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "common/base/base.h"

/* Checks that a file can be written at path. Changes nothing. BT_ERR_INVALID: err gives the reason
 * why not. */
bt_status_t bt_sim_output_check(const char *path, char *err, size_t err_cap);
/* Checks that files can be made in a folder, which need not exist. Changes nothing. BT_ERR_INVALID:
 * err gives the reason why not. */
bt_status_t bt_sim_output_check_folder(const char *folder, char *err, size_t err_cap);

/* All of it is kept in memory until it is closed. stdio forgets why an earlier write failed, so a
 * full disk would look like a broken one. */
struct bt_sim_output {
    FILE *f; /* to write to */
    char *path, *text;
    size_t len; /* of text */
    int fd;
};

/* Opens folder/name for writing and makes the folder; folder NULL: name. o stays where it is until
 * it is closed. BT_ERR_INVALID: err says why not, nothing is open. */
bt_status_t bt_sim_output_open(struct bt_sim_output *o, const char *folder, const char *name,
                               char *err, size_t err_cap);
/* Closes it. BT_ERR_INVALID: not all of it was written (a full disk); it is removed, err says why.
 */
bt_status_t bt_sim_output_close(struct bt_sim_output *o, char *err, size_t err_cap);

#endif

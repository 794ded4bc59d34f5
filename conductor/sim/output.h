/* Files that a command writes: what cannot be written is said before the work, and what could not
 * be written as a whole is not left behind. */
#ifndef BT_CONDUCTOR_SIM_OUTPUT_H
#define BT_CONDUCTOR_SIM_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "common/base/base.h"

/* Whether a file can be written at path; changes nothing. BT_ERR_INVALID: err says why not. */
bt_status_t bt_sim_output_check(const char *path, char *err, size_t err_cap);
/* Whether files can be made in a folder, which need not be there; changes nothing. BT_ERR_INVALID:
 * err says why not. */
bt_status_t bt_sim_output_check_folder(const char *folder, char *err, size_t err_cap);

struct bt_sim_output {
    FILE *f;
    char *path;
};

/* folder/name for writing, the folder is made; folder NULL: name. BT_ERR_INVALID: err says why not,
 * nothing is open. */
bt_status_t bt_sim_output_open(struct bt_sim_output *o, const char *folder, const char *name,
                               char *err, size_t err_cap);
/* Closes it. BT_ERR_INVALID: not all of it was written (a full disk); it is removed, err says why.
 */
bt_status_t bt_sim_output_close(struct bt_sim_output *o, char *err, size_t err_cap);

#endif

/* Reads a text file line by line. A line has at most 16 MiB, because a device, or a file without
 * line ends, would fill the memory. */
#ifndef BT_CONDUCTOR_SIM_LINES_H
#define BT_CONDUCTOR_SIM_LINES_H

#include <stdbool.h>
#include <stdio.h>

#include "common/base/buf.h"

/* The next line, with its line end. False: there is none; *wrong_p is NULL at the end of the
 * file. */
bool bt_sim_next_line(FILE *f, struct bt_buf *line, const char **wrong_p);

#endif

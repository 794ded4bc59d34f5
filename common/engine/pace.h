/* Holds up the steps of the cpu and null engines, for tests in which something is to happen while
 * requests run, however fast the machine is and however late the test comes. BATON_ENGINE_PACE
 * names a file; it says in decimal digits how many us each step takes longer. The file may change
 * at any time, also while a step waits. */
#ifndef BT_ENGINE_PACE_H
#define BT_ENGINE_PACE_H

#include <stdbool.h>
#include <stddef.h>

#include "common/base/base.h"

struct bt_pace {
    bool on; /* false: the variable is not set */
    int fd;
};

/* Opens the file. ERR_CONFIG: it cannot be opened; err says why. */
bt_status_t bt_pace_open(struct bt_pace *p, char *err, size_t err_cap) BT_MUST_CHECK;
/* Also for a zeroed struct. */
void bt_pace_close(struct bt_pace *p);
/* Sleeps for as long as the file says. Notices within 10 ms if the file's number becomes
 * smaller. */
void bt_pace_wait(const struct bt_pace *p);

#endif

/* Logs the end of a process whose slab file was cut while it is mapped. The next access to a page
 * without bytes raises SIGBUS, which would end the process without a message. */
#ifndef BT_SLAB_GUARD_H
#define BT_SLAB_GUARD_H

#include <stddef.h>

/* From now on a SIGBUS at [at, at + bytes) writes one line that names path and the remedy, and then
 * ends the process as it would have ended (core dump included). Of the areas of a process 32 are
 * watched; those beyond are as without this. The handler is installed with the first one. */
void bt_slab_guard_add(const void *at, size_t bytes, const char *path);
/* Before the area is unmapped; one that is not watched is ignored. */
void bt_slab_guard_remove(const void *at);

#endif

/* Opens the files of the SSD tier: slab file, index, and the index's records. This takes long on a
 * large tier, and never ends on a disk that does not answer. So after a first attempt at start a
 * thread of its own does it. */
#ifndef BT_KVSTORE_SSD_OPENER_H
#define BT_KVSTORE_SSD_OPENER_H

#include "common/base/base.h"
#include "common/loop/loop.h"
#include "common/slab/slab.h"
#include "kvstore/ssd/db.h"
#include "kvstore/ssd/file.h"

#define BT_SSD_RETRY_MAX_MS 60000u

struct bt_ssd_found { /* a record of the index */
    uint32_t pos;
    uint32_t tenant; /* tag */
    struct bt_ssd_entry e;
};

struct bt_ssd_files {
    struct bt_ssd_file file;
    struct bt_ssd_db *db; /* not started */
    struct bt_ssd_found *found;
    uint32_t n_found, found_cap;
    uint64_t ms; /* that it took */
};

struct bt_ssd_files_config {
    const char *path;
    uint64_t bytes;
    const struct bt_slab_super *super;
    struct bt_ssd_db_config db; /* path, data_fd and identity are filled in here */
};

/* Any thread. ERR_CONFIG: the folder cannot be used; ERR_EXHAUSTED, ERR_IO: the disk refuses. err
 * says why and what to do. last_try as of bt_ssd_db_load. */
bt_status_t bt_ssd_files_open(const struct bt_ssd_files_config *c, bool last_try,
                              struct bt_ssd_files *f_p, char *err, size_t err_cap) BT_MUST_CHECK;

struct bt_ssd_opener;

/* Control thread. Tries after first_ms and then at doubling intervals (at most
 * BT_SSD_RETRY_MAX_MS) until it succeeds. opened is called once, on the control thread, and owns
 * the contents of f. c->path must stay valid. */
struct bt_ssd_opener *bt_ssd_opener_start(const struct bt_ssd_files_config *c, uint64_t first_ms,
                                          void (*opened)(void *arg, struct bt_ssd_files *f),
                                          void *arg);
/* Waits for an attempt under way. opened is not called any more. May be called from inside opened.
 */
void bt_ssd_opener_destroy(struct bt_ssd_opener *o);

#endif

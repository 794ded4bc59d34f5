/* The SSD tier's slab file: a header page, a page for probes, then equal slots. Preallocated,
 * opened with O_DIRECT where the file system has it, owned by an OFD lock. */
#ifndef BT_KVSTORE_SSD_FILE_H
#define BT_KVSTORE_SSD_FILE_H

#include "common/base/base.h"

#define BT_SSD_PAGE      4096u
#define BT_SSD_PROBE_OFF 4096u      /* a page to try writing on */
#define BT_SSD_DATA_OFF  (1u << 20) /* slot 0 */

struct bt_ssd_file {
    int fd;
    uint32_t n_slots;
    uint64_t slot_bytes;
    uint8_t uuid[16]; /* made with the file */
    bool direct;
};

/* Opens or makes <folder>/blocks for as many slots of slot_bytes as fit bytes, or as the disk has
 * room for. A file of another slot size is made anew. ERR_CONFIG: the folder cannot be used, or
 * another kvstore has it; ERR_EXHAUSTED, ERR_IO: the disk is full or refuses. err names the cause
 * and the remedy. */
bt_status_t bt_ssd_file_open(const char *folder, uint64_t bytes, uint64_t slot_bytes,
                             struct bt_ssd_file *f_p, char *err, size_t err_cap) BT_MUST_CHECK;
void bt_ssd_file_close(struct bt_ssd_file *f);

typedef enum {
    BT_SSD_FILE_OK,
    BT_SSD_FILE_GONE, /* removed, moved away, or another one has its name */
    BT_SSD_FILE_CUT   /* it was shortened */
} bt_ssd_file_state_t;

/* State of the open file. *bytes_p: the length of a file that was cut. */
bt_ssd_file_state_t bt_ssd_file_look(const struct bt_ssd_file *f, const char *folder,
                                     uint64_t *bytes_p);
/* Restores the length and the header of a file that was cut. The bytes behind the cut are zeros,
 * which no checksum accepts. ERR_IO: the disk refuses. */
bt_status_t bt_ssd_file_mend(const struct bt_ssd_file *f) BT_MUST_CHECK;

static inline uint64_t bt_ssd_file_off(const struct bt_ssd_file *f, uint32_t slot)
{
    return BT_SSD_DATA_OFF + (uint64_t)slot * f->slot_bytes;
}

#endif

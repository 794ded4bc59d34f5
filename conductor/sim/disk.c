/* A simulated node's SSD. See disk.h. */
#include "conductor/sim/disk.h"

#include <stdlib.h>
#include <string.h>

#include "common/policy/evict/recent.h"
#include "common/policy/evict/ssd_dir.h"

const char *const bt_sim_write_names[3] = {"second_use", "evict", "always"};

#define BEHIND_MS 1000.0 /* a disk that is this late gets no more writes */

struct bt_sim_disk {
    struct bt_sim_disk_config c;
    struct bt_ssd_dir *dir;
    struct bt_recent *seen;
    double read_free_ms, write_free_ms, written;
};

struct bt_sim_disk *bt_sim_disk_create(const struct bt_sim_disk_config *c, uint32_t seen)
{
    struct bt_sim_disk *d = bt_calloc(1, sizeof(*d));
    d->c = *c;
    d->dir = bt_ssd_dir_create(c->blocks, c->policy != NULL ? c->policy : &bt_evict_lru, NULL);
    d->seen = bt_recent_create(seen);
    return d;
}

void bt_sim_disk_destroy(struct bt_sim_disk *d)
{
    if (d != NULL) {
        bt_ssd_dir_destroy(d->dir);
        bt_recent_destroy(d->seen);
        free(d);
    }
}

/* The directory needs keys with spread bits, which block numbers do not have. */
static struct bt_kv_key key_of(uint32_t block)
{
    uint64_t spread = (block + 1ull) * 0x9e3779b97f4a7c15ull;
    struct bt_kv_key k = {{0}};
    memcpy(k.b, &spread, sizeof(spread));
    memcpy(k.b + sizeof(spread), &block, sizeof(block));
    return k;
}

static uint32_t block_of(const struct bt_kv_key *key)
{
    uint32_t block;
    memcpy(&block, key->b + sizeof(uint64_t), sizeof(block));
    return block;
}

bool bt_sim_disk_has(const struct bt_sim_disk *d, uint32_t block)
{
    struct bt_kv_key k = key_of(block);
    return bt_ssd_dir_find(d->dir, &k) != BT_SSD_NONE;
}

static double transfer_ms(double bytes, double bytes_per_s)
{
    return bytes_per_s > 0 ? 1e3 * bytes / bytes_per_s : 0;
}

/* The same rule as in kvstore/cache/tier.c. */
static bool wanted(struct bt_sim_disk *d, const struct bt_kv_key *key, bt_sim_disk_event_t event)
{
    switch (d->c.write) {
    case BT_SIM_WRITE_ALWAYS: return event != BT_SIM_DISK_GIVEN_UP;
    case BT_SIM_WRITE_EVICT: return event == BT_SIM_DISK_GIVEN_UP;
    case BT_SIM_WRITE_SECOND_USE: break;
    }
    return event == BT_SIM_DISK_HIT || (event == BT_SIM_DISK_NEW && bt_recent_again(d->seen, key));
}

bool bt_sim_disk_offer(struct bt_sim_disk *d, uint32_t block, uint32_t depth,
                       bt_sim_disk_event_t event, double now_ms, uint32_t *old_p)
{
    struct bt_ssd_entry e = {.key = key_of(block), .depth = depth & 0xffffff};
    *old_p = BT_SIM_DISK_NONE;
    if (!wanted(d, &e.key, event) || d->write_free_ms > now_ms + BEHIND_MS ||
        bt_ssd_dir_find(d->dir, &e.key) != BT_SSD_NONE) {
        return false;
    }
    uint32_t slot = bt_ssd_dir_take(d->dir, 0);
    if (slot == BT_SSD_NONE) {
        uint32_t victim = bt_ssd_dir_victim(d->dir);
        *old_p = block_of(&bt_ssd_dir_entry(d->dir, victim)->key);
        bt_ssd_dir_remove(d->dir, victim);
        bt_ssd_dir_free(d->dir, victim);
        slot = bt_ssd_dir_take(d->dir, 0);
    }
    bt_ssd_dir_add(d->dir, slot, &e);
    d->write_free_ms =
        BT_MAX(d->write_free_ms, now_ms) + transfer_ms(d->c.block_bytes, d->c.write_bytes_per_s);
    d->written += d->c.block_bytes;
    return true;
}

void bt_sim_disk_touch(struct bt_sim_disk *d, uint32_t block)
{
    struct bt_kv_key k = key_of(block);
    uint32_t slot = bt_ssd_dir_find(d->dir, &k);
    if (slot != BT_SSD_NONE) {
        bt_ssd_dir_touch(d->dir, slot);
    }
}

double bt_sim_disk_read(struct bt_sim_disk *d, uint32_t n, double now_ms)
{
    if (n == 0) {
        return now_ms;
    }
    d->read_free_ms =
        BT_MAX(d->read_free_ms, now_ms) + transfer_ms(n * d->c.block_bytes, d->c.read_bytes_per_s);
    return d->read_free_ms;
}

double bt_sim_disk_written(const struct bt_sim_disk *d)
{
    return d->written;
}

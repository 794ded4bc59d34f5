/* Bits that turn over in what a restart reads: the slab (bytes of blocks, header records, CRCs) and
 * the SSD (slots, index). What is damaged is noticed and never served; what is not is served as it
 * was. argv[1]: how many bits, in all. */
#include "kv_life.h"

#include <dirent.h>
#include <sys/stat.h>

#include "ssd_fixture.h"

static uint32_t n_flips = 600;

/* Numbers that follow from a seed: each test's are its own. */
static uint32_t draw(uint32_t test, uint32_t n)
{
    static uint32_t at;
    uint32_t key[2] = {test, 4711}, counter[4] = {at++, 0, 0, 0}, out[4];
    bt_philox4x32(key, counter, out);
    return out[0] % n;
}

/* ---- the slab ---- */

/* Turns over a bit of what the slot's seal vouches for: a block's bytes, its header or its CRCs. */
static void flip_in_slab(const struct life *k, uint32_t slot)
{
    struct bt_slot_header *h = &k->slab->headers[slot];
    const size_t from = offsetof(struct bt_slot_header, key);
    const size_t head = offsetof(struct bt_slot_header, use) - from;
    const size_t row = layout.n_layers * sizeof(uint32_t);
    uint32_t what = draw(1, 4), at;
    uint8_t *p;
    if (what < 2) {
        p = bt_slab_data(k->slab, slot);
        at = draw(1, (uint32_t)layout.block_bytes);
    } else if (what == 2) {
        p = (uint8_t *)h + from;
        at = draw(1, (uint32_t)head);
    } else {
        p = (uint8_t *)&k->slab->crcs[(size_t)slot * layout.n_layers];
        at = draw(1, (uint32_t)row);
    }
    p[at] ^= (uint8_t)(1u << draw(1, 8));
}

static void slab(void **state)
{
    uint32_t flips = 0, served = 0;
    (void)state;
    for (uint32_t chain = 1; flips < n_flips; chain++) {
        struct life k;
        uint32_t slots[40];
        bool hurt[40];
        live(&k, false);
        for (uint32_t b = 0; b < 40; b++) {
            slots[b] = seal(&k, chain, b);
            hurt[b] = draw(1, 4) > 0;
            if (hurt[b]) {
                flip_in_slab(&k, slots[b]);
                flips++;
            }
        }
        vanish(&k);
        live(&k, true);
        NODE_UNTIL(&k, stats(&k).pending == 0);
        for (uint32_t b = 0; b < 40; b++) {
            assert_int_equal(right(&k, chain, b), !hurt[b]); /* compares what is there */
            served += !hurt[b];
        }
        assert_int_equal(index_count(k.cache->index), stats(&k).blocks);
        die(&k);
        unlink(life_path);
    }
    print_message("slab: %u bits, %u whole blocks\n", flips, served);
}

/* State words and generations have no checksum: whatever they become, nothing wrong is served. */
static void slab_states(void **state)
{
    (void)state;
    for (uint32_t flips = 0, chain = 1; flips < n_flips; chain++) {
        struct life k;
        live(&k, false);
        for (uint32_t b = 0; b < 40; b++) {
            seal(&k, chain, b);
        }
        for (uint32_t s = 0; s < k.slab->super->n_slots; s++, flips++) {
            ((uint8_t *)&k.slab->headers[s].state)[draw(2, 8)] ^= (uint8_t)(1u << draw(2, 8));
        }
        vanish(&k);
        live(&k, true);
        NODE_UNTIL(&k, stats(&k).pending == 0);
        for (uint32_t b = 0; b < 40; b++) {
            right(&k, chain, b);
        }
        NODE_UNTIL(&k, stats(&k).quarantine == 0);
        struct bt_pool_counts c;
        bt_pool_counts(k.cache->pool, &c);
        assert_int_equal(c.free + c.sealed, c.total); /* no slot is lost */
        die(&k);
        unlink(life_path);
    }
}

/* ---- the SSD ---- */

#define FILE_SLOTS 40u
#define FILE_KEPT  32u /* blocks of a round; the tier keeps some slots free */

static struct ssd_fix fix;

static void flip_in_file(const char *name, uint64_t at, uint32_t bit)
{
    uint8_t byte;
    int fd = open(name, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= (uint8_t)(1u << bit);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static void ssd_close(void)
{
    bt_ssd_close(fix.ssd);
    fix.ssd = NULL;
}

static void ssd_again(void)
{
    char err[512];
    if (bt_ssd_open(&fix.conf, &fix.ssd, err, sizeof(err)) != BT_OK) {
        fail_msg("%s", err);
    }
}

static uint32_t position_of(uint64_t id)
{
    struct bt_kv_key want;
    ssd_key(id, &want);
    for (uint32_t pos = 0; pos < ssd_stats(&fix).slots; pos++) {
        uint32_t depth;
        const struct bt_kv_key *k = bt_ssd_at(fix.ssd, pos, &depth);
        if (k != NULL && memcmp(k, &want, sizeof(want)) == 0) {
            return pos;
        }
    }
    fail_msg("block %llu is not on the disk", (unsigned long long)id);
    return 0;
}

static void ssd_slots(void **state)
{
    uint64_t first = 0;
    uint32_t flips = 0;
    char name[128];
    (void)state;
    ssd_start(&fix, FILE_SLOTS, NULL);
    snprintf(name, sizeof(name), "%s/blocks", fix.dir);
    for (; flips < n_flips; first += FILE_KEPT) {
        bool hurt[FILE_KEPT];
        for (uint64_t id = first; id < first + FILE_KEPT; id++) {
            ssd_put(&fix, id);
        }
        for (uint32_t i = 0; i < FILE_KEPT; i++) {
            hurt[i] = draw(3, 4) > 0;
            if (hurt[i]) {
                uint64_t slot = BT_ALIGN_UP(fix.layout.block_bytes, 4096);
                flip_in_file(name,
                             (1u << 20) + position_of(first + i) * slot +
                                 draw(3, (uint32_t)fix.layout.block_bytes),
                             draw(3, 8));
                flips++;
            }
        }
        uint64_t before = ssd_stats(&fix).crc_errors;
        uint32_t n_hurt = 0;
        for (uint32_t i = 0; i < FILE_KEPT; i++) {
            assert_int_equal(ssd_get(&fix, first + i, 3), hurt[i] ? BT_ERR_DATA_LOSS : BT_OK);
            n_hurt += hurt[i];
        }
        assert_int_equal(ssd_stats(&fix).crc_errors, before + n_hurt);
    }
    ssd_stop(&fix);
    print_message("ssd slots: %u bits\n", flips);
}

/* Turns over bits in the files of RocksDB. */
static void flip_in_index(uint32_t n)
{
    char folder[128], name[512];
    snprintf(folder, sizeof(folder), "%s/index", fix.dir);
    while (n > 0) {
        uint32_t skip = draw(4, 12);
        DIR *d = opendir(folder);
        assert_non_null(d);
        for (struct dirent *e; n > 0 && (e = readdir(d)) != NULL;) {
            struct stat st;
            snprintf(name, sizeof(name), "%s/%s", folder, e->d_name);
            if (stat(name, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 && skip-- == 0) {
                flip_in_file(name, draw(4, (uint32_t)st.st_size), draw(4, 8));
                n--;
            }
        }
        closedir(d);
    }
}

/* The index may be read as far as its own checksums go, or start empty: what is found is right, and
 * the tier works afterwards. */
static void ssd_index(void **state)
{
    uint32_t rounds = BT_MAX(8u, n_flips / 40), kept = 0, n = 0;
    (void)state;
    ssd_start(&fix, FILE_SLOTS, NULL);
    for (uint32_t round = 0; round < rounds; round++) {
        uint64_t first = (uint64_t)round * 50;
        for (uint64_t id = first; id < first + 20; id++) {
            ssd_put(&fix, id);
        }
        ssd_close();
        uint32_t flips = 1 + (round % 2) * draw(4, 20);
        flip_in_index(flips);
        n += flips;
        ssd_again();
        SSD_UNTIL(&fix, ssd_stats(&fix).up);
        for (uint64_t id = first; id < first + 20; id++) {
            bt_status_t st = ssd_get(&fix, id, 2); /* compares the bytes */
            assert_true(st == BT_OK || st == BT_ERR_NOT_FOUND || st == BT_ERR_DATA_LOSS);
            kept += st == BT_OK;
        }
    }
    ssd_stop(&fix);
    print_message("ssd index: %u bits in %u rounds, %u of %u blocks still found\n", n, rounds, kept,
                  20 * rounds);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(slab, setup, teardown),
        cmocka_unit_test_setup_teardown(slab_states, setup, teardown),
        cmocka_unit_test(ssd_slots),
        cmocka_unit_test(ssd_index),
    };
    if (argc > 1) {
        n_flips = (uint32_t)atoi(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}

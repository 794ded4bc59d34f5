/* RocksDB's blob files with values as large as blocks, for comparison with the SSD tier's slab
 * file: blob_bench FOLDER block_kib=1024 blocks=1024. Writes so many until all are durable, reads
 * them all. Direct I/O, no compression, checksums verified. Prints "write GBPS CPU_S_PER_GB" and
 * "read ...". */
#include <rocksdb/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/base.h"
#include "common/base/clock.h"
#include "tests/tools/bench_arg.h"

static void must(char *err)
{
    if (err != NULL) {
        fprintf(stderr, "blob_bench: %s\n", err);
        exit(1);
    }
}

static void key_of(uint64_t i, char key[32])
{
    memset(key, 3, 32);
    memcpy(key, &i, sizeof(i));
}

static rocksdb_t *open_db(const char *path)
{
    char *err = NULL;
    rocksdb_options_t *o = rocksdb_options_create();
    rocksdb_options_set_create_if_missing(o, 1);
    rocksdb_options_set_enable_blob_files(o, 1);
    rocksdb_options_set_min_blob_size(o, 0);
    rocksdb_options_set_blob_file_size(o, 256u << 20);
    rocksdb_options_set_compression(o, rocksdb_no_compression);
    rocksdb_options_set_blob_compression_type(o, rocksdb_no_compression);
    rocksdb_options_set_use_direct_reads(o, 1);
    rocksdb_options_set_use_direct_io_for_flush_and_compaction(o, 1);
    rocksdb_options_set_write_buffer_size(o, 64u << 20);
    rocksdb_options_set_max_write_buffer_number(o, 4);
    rocksdb_options_set_max_background_jobs(o, 4);
    rocksdb_t *db = rocksdb_open(o, path, &err);
    must(err);
    rocksdb_options_destroy(o);
    return db;
}

static void report(const char *what, uint64_t bytes, uint64_t since_ns, double cpu)
{
    double gb = 1e-9 * (double)bytes;
    printf("%s %.3f %.4f\n", what, gb / (1e-9 * (double)(bt_mono_ns() - since_ns)),
           (cpu_s() - cpu) / gb);
}

int main(int argc, char **argv)
{
    char key[32], *err = NULL;
    if (argc < 2) {
        fprintf(stderr, "usage: blob_bench FOLDER [block_kib=N] [blocks=N]\n");
        return 2;
    }
    size_t block = opt(argc, argv, "block_kib", 1024) << 10;
    uint64_t n = opt(argc, argv, "blocks", 1024), t = 0;
    char *data = bt_malloc(block);
    bt_random(data, block);
    rocksdb_t *db = open_db(argv[1]);
    rocksdb_writeoptions_t *w = rocksdb_writeoptions_create();
    rocksdb_writeoptions_disable_WAL(w,
                                     1); /* the flush at the end makes it durable: bytes go once */
    double cpu = cpu_s();
    t = bt_mono_ns();
    for (uint64_t i = 0; i < n; i++) {
        key_of(i, key);
        memcpy(data, &i, sizeof(i));
        rocksdb_put(db, w, key, sizeof(key), data, block, &err);
        must(err);
    }
    rocksdb_flushoptions_t *f = rocksdb_flushoptions_create();
    rocksdb_flush(db, f, &err);
    must(err);
    report("write", n * block, t, cpu);
    rocksdb_readoptions_t *r = rocksdb_readoptions_create();
    cpu = cpu_s();
    t = bt_mono_ns();
    for (uint64_t i = 0; i < n; i++) {
        key_of(i, key);
        rocksdb_pinnableslice_t *v = rocksdb_get_pinned(db, r, key, sizeof(key), &err);
        must(err);
        size_t len;
        const char *p = rocksdb_pinnableslice_value(v, &len);
        BT_ASSERT(v != NULL && len == block && memcmp(p, &i, sizeof(i)) == 0);
        rocksdb_pinnableslice_destroy(v);
    }
    report("read", n * block, t, cpu);
    rocksdb_readoptions_destroy(r);
    rocksdb_flushoptions_destroy(f);
    rocksdb_writeoptions_destroy(w);
    rocksdb_close(db);
    free(data);
    return 0;
}

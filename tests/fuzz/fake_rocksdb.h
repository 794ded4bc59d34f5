/* RocksDB's C interface, as far as kvstore/ssd uses it, over a small table in memory, so that a
 * target decides what is in the database and when it fails. */
#ifndef TESTS_FUZZ_FAKE_ROCKSDB_H
#define TESTS_FUZZ_FAKE_ROCKSDB_H

#include <stdbool.h>
#include <stddef.h>

void fake_rocksdb_reset(void); /* empty, and nothing fails */
void fake_rocksdb_put(const void *key, size_t key_len, const void *value, size_t value_len);
/* The next n opens, reads or writes fail with this text; NULL: none does. */
void fake_rocksdb_fail(const char *why, unsigned n);
/* The i-th entry, in the order of the keys; false: there are fewer. */
bool fake_rocksdb_at(size_t i, const void **key, size_t *key_len, const void **value,
                     size_t *value_len);

#endif

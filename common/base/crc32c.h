/* CRC32C (Castagnoli, reflected polynomial 0x82f63b78), by the fastest instructions of the
 * processor. */
#ifndef BT_BASE_CRC32C_H
#define BT_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continues `crc` (0 at the start, or a seed) over n bytes. crc32c("123456789") == 0xe3069283. */
uint32_t bt_crc32c(uint32_t crc, const void *p, size_t n);
/* The same, and copies the bytes in the same pass over memory, where the processor can fold. */
uint32_t bt_crc32c_copy(uint32_t crc, void *to, const void *from, size_t n);
/* The same as bt_crc32c_copy, but the copy bypasses the cache. For bytes that are not read soon: it
 * avoids reading the memory that is overwritten. */
uint32_t bt_crc32c_stream(uint32_t crc, void *to, const void *from, size_t n);
/* For tests, while no thread computes: sets what is used. 0: the table only; 1: also the CRC32
 * instruction; 2: everything, as at the start. */
void bt_crc32c_ways(int most);

#endif

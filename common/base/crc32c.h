/* CRC32C (Castagnoli, reflected polynomial 0x82f63b78). Hardware SSE4.2 where there is. */
#ifndef BT_BASE_CRC32C_H
#define BT_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continues `crc` (0 at the start, or a seed) over n bytes. crc32c("123456789") == 0xe3069283. */
uint32_t bt_crc32c(uint32_t crc, const void *p, size_t n);

#endif

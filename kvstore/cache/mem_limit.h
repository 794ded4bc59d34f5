/* The memory limit of the control group (container, systemd slice) in which a process runs. Shared
 * memory counts against it, and the kernel kills a process that exceeds it without a message. Reads
 * files; any thread. */
#ifndef BT_KVSTORE_CACHE_MEM_LIMIT_H
#define BT_KVSTORE_CACHE_MEM_LIMIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Least limit in bytes of the group and those above it; UINT64_MAX: none, or none that can be read.
 * groups: /proc/self/cgroup; mount: /sys/fs/cgroup, of version 2 (memory.max) or 1
 * (memory/.../memory.limit_in_bytes). */
uint64_t bt_mem_limit(const char *groups, const char *mount);

/* false: a slab of this size does not fit below limit; why says both numbers and the remedy. */
bool bt_mem_limit_allows(uint64_t limit, uint64_t slab_bytes, char *why, size_t cap);

#endif

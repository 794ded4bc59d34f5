/* Which kernels this process's GPU runs. */
#ifndef BT_CUDA_DEVICE_H
#define BT_CUDA_DEVICE_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Hopper's own (copy engine, WGMMA, clusters), or those for compute capability 8.0 and newer. The
 * environment's BATON_CUDA_PORTABLE=1 asks for the latter on Hopper too: for tests, and for finding
 * out whether a kernel is to blame. The same answer for the life of the process. */
bool bt_cu_hopper(void);

#ifdef __cplusplus
}
#endif

#endif

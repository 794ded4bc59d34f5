/* Tensor maps: how Hopper's copy engine (TMA) finds a box of a tensor. */
#ifndef BT_CUDA_TENSOR_MAP_H
#define BT_CUDA_TENSOR_MAP_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor map of 16-bit values (pairs of E4M3, too) in 128-byte swizzle; box[0] is 64, or 32 and
 * the swizzle is of 64 bytes. F32: without swizzle. */
cudaError_t bt_cu_tensor_map(CUtensorMap *map, int type, const void *base, uint32_t rank,
                             const uint64_t *dims, const uint64_t *strides, const uint32_t *box);

#ifdef __cplusplus
}
#endif

#endif

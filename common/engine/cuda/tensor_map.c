/* Asks the driver to encode a tensor map. Looks the driver's function up once, so that nothing
 * needs to link with libcuda. */
#include "common/engine/cuda/tensor_map.h"

#include <stddef.h>

#include "common/engine/cuda/value.h"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

cudaError_t bt_cu_tensor_map(CUtensorMap *map, int type, const void *base, uint32_t rank,
                             const uint64_t *dims, const uint64_t *strides, const uint32_t *box)
{
    static encode_fn encode; /* the same address for all callers */
    if (!encode) {
        void *fn = NULL;
        enum cudaDriverEntryPointQueryResult found;
        cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
                                                         cudaEnableDefault, &found);
        if (e != cudaSuccess || found != cudaDriverEntryPointSuccess) {
            return e != cudaSuccess ? e : cudaErrorNotSupported;
        }
        *(void **)&encode = fn;
    }
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    CUtensorMapDataType of = type == BT_CU_BF16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                             : type == BT_CU_F32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUtensorMapSwizzle swizzle = type == BT_CU_F32 ? CU_TENSOR_MAP_SWIZZLE_NONE
                                 : box[0] == 32    ? CU_TENSOR_MAP_SWIZZLE_64B
                                                   : CU_TENSOR_MAP_SWIZZLE_128B;
    CUresult r =
        encode(map, of, rank, (void *)base, (const cuuint64_t *)dims, (const cuuint64_t *)strides,
               box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

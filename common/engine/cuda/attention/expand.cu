/* Expands pages of e4m3 to f16 for prefill attention, whose products read 16-bit values from shared
 * memory. A chunk reads each page of its prefix once a KV head for all its queries, so expanding
 * the prefix first costs little (32k tokens of 8 heads of 128: 200 MB, about 50 us, compared to
 * milliseconds of products). Bound by memory: 16 values a thread at once. */
#include "common/engine/cuda/attention/attention_priv.h"
#include "common/engine/cuda/e4m3.cuh"

#include <cuda_fp16.h>

struct expand_args {
    const uint8_t *segment; /* of page 0 */
    const uint8_t *scales;
    uint4 *to;
    size_t page_bytes;
    const struct bt_attn_span *spans;
    uint32_t n_spans, planes; /* planes: K and V of all heads */
    const int32_t *table;
    uint32_t table_stride, page_tokens;
};

/* f16 has only 5 bits of exponent, so the scale is applied before the conversion to f16. */
static __device__ __forceinline__ uint32_t scaled_pair(uint32_t two, float f)
{
    uint32_t h = e4m3_pair(two);
    float2 v = __half22float2(*(const __half2 *)&h);
    __half2 r = __floats2half2_rn(v.x * f, v.y * f);
    return *(const uint32_t *)&r;
}

/* One block for each page. */
template <int D>
static __global__ void __launch_bounds__(256)
    expand_kernel(const __grid_constant__ struct expand_args a)
{
    uint32_t lo = 0, hi = a.n_spans - 1; /* the last span that begins at or before this page */
    while (lo < hi) {
        uint32_t mid = (lo + hi + 1) / 2;
        if (a.spans[mid].first <= (int)blockIdx.x) {
            lo = mid;
        } else {
            hi = mid - 1;
        }
    }
    const struct bt_attn_span s = a.spans[lo];
    size_t page = (size_t)a.table[(size_t)s.slot * a.table_stride + blockIdx.x - s.first];
    const uint4 *from = (const uint4 *)(a.segment + page * a.page_bytes);
    const uint8_t *scales = a.scales + page * a.page_bytes;
    uint32_t n = a.planes * a.page_tokens * (D / 16);
    uint4 *to = a.to + (size_t)blockIdx.x * n * 2;
    for (uint32_t i = threadIdx.x; i < n; i += 256) {
        uint4 v = __ldcs(from + i);
        float f = e4m3_scale_value(scales[i / (D / 16)]);
        to[i * 2] = make_uint4(scaled_pair(v.x, f), scaled_pair(v.x >> 16, f), scaled_pair(v.y, f),
                               scaled_pair(v.y >> 16, f));
        to[i * 2 + 1] = make_uint4(scaled_pair(v.z, f), scaled_pair(v.z >> 16, f),
                                   scaled_pair(v.w, f), scaled_pair(v.w >> 16, f));
    }
}

extern "C" cudaError_t bt_attn_expand(const struct bt_attn *from, uint32_t layer_row, void *to,
                                      const struct bt_attn_span *spans, uint32_t n_spans,
                                      uint32_t pages, const int32_t *table, uint32_t table_stride,
                                      cudaStream_t s)
{
    const struct bt_attn_pool *p = &from->pool;
    const uint8_t *layer = (const uint8_t *)p->kv + (size_t)layer_row * p->head_dim;
    const struct expand_args a = {layer,           layer + (size_t)p->scale_row * p->head_dim,
                                  (uint4 *)to,     (size_t)p->page_rows * p->head_dim,
                                  spans,           n_spans,
                                  p->kv_heads * 2, table,
                                  table_stride,    p->page_tokens};
    if (n_spans == 0 || pages == 0) {
        return cudaSuccess;
    }
    switch (p->head_dim) {
    case 64: expand_kernel<64><<<pages, 256, 0, s>>>(a); break;
    case 128: expand_kernel<128><<<pages, 256, 0, s>>>(a); break;
    case 256: expand_kernel<256><<<pages, 256, 0, s>>>(a); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

/* Named ranges for Nsight Systems: what a step, a layer, a flow enqueues, with a number each.
 * Without a profiler a range costs a test of a pointer. Not in the build with NVTX=0. */
#ifndef BT_CUDA_RANGES_H
#define BT_CUDA_RANGES_H

#include <stdint.h>

#ifdef BT_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

static inline void bt_cu_range_push(const char *name, uint64_t number)
{
#ifdef BT_NVTX
    const nvtxEventAttributes_t a = {.version = NVTX_VERSION,
                                     .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                                     .messageType = NVTX_MESSAGE_TYPE_ASCII,
                                     .message.ascii = name,
                                     .payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64,
                                     .payload.ullValue = number};
    nvtxRangePushEx(&a);
#else
    (void)name;
    (void)number;
#endif
}

static inline void bt_cu_range_pop(void)
{
#ifdef BT_NVTX
    nvtxRangePop();
#endif
}

#endif

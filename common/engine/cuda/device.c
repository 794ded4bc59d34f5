/* Asks the CUDA runtime once what kind of GPU this process has, and keeps the answer. */
#include "common/engine/cuda/device.h"

#include <cuda_runtime.h>
#include <string.h>

#include "common/conf/conf.h"

bool bt_cu_hopper(void)
{
    static int known; /* 1: no, 2: yes */
    if (!known) {
        const char *ask = bt_conf_env("BATON_CUDA_PORTABLE");
        int device = 0, major = 0;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) !=
                cudaSuccess) {
            return false;
        }
        known = major == 9 && !(ask && strcmp(ask, "1") == 0) ? 2 : 1;
    }
    return known == 2;
}

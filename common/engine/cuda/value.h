/* Types of the values in tensors on the device. */
#ifndef BT_CUDA_VALUE_H
#define BT_CUDA_VALUE_H

enum { BT_CU_F16 = 0, BT_CU_BF16 = 1, BT_CU_E4M3 = 2, BT_CU_F32 = 3 };

#endif

/* e4m3 weights in registers: conversion to f16, exact. Device code only. */
#ifndef BT_CUDA_FP8_CUH
#define BT_CUDA_FP8_CUH

#include "common/engine/cuda/e4m3.cuh"

/* A word of weights in the order of weight.h (columns 2c, 2c + 1, 8 + 2c, 9 + 2c) as two pairs of
 * f16: what lane % 4 = c holds of a row in a product over 16 columns. */
static __device__ __forceinline__ void f16_of_e4m3(uint32_t w, uint32_t &low, uint32_t &high)
{
    low = e4m3_pair(w & 0xffff);
    high = e4m3_pair(w >> 16);
}

/* The nearest value that f16 has; NaN stays. */
static __device__ __forceinline__ float f16_range(float v)
{
    return v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}

#endif

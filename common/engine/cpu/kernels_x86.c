/* The kernel sets: kernels_body.h once per instruction set. */
#include "common/engine/cpu/kernels.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "common/base/base.h"

#define CAT_(a, b)     a##_##b
#define CAT(a, b)      CAT_(a, b)
#define BT_CPU_STR_(x) #x
#define BT_CPU_STR(x)  BT_CPU_STR_(x)

#define SET            base
#define VL             4
#define BF16           0
#define V_FMA(a, b, c) ((a) * (b) + (c))
#include "common/engine/cpu/kernels_body.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define SET            avx2
#define VL             8
#define BF16           0
#define V_FMA(a, b, c) ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#include "common/engine/cpu/kernels_body.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#define SET            avx512
#define VL             16
#define BF16           0
#define V_FMA(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#include "common/engine/cpu/kernels_body.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#define SET            avx512_bf16
#define VL             16
#define BF16           1
#define V_FMA(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#include "common/engine/cpu/kernels_body.h"
#pragma GCC pop_options

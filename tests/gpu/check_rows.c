/* make check-gpu: the kernels for few rows against double precision on the CPU: products of 1 to 8
 * rows with and without addition, fused SwiGLU. Fresh inputs, poisoned outputs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/engine/cuda/rows.h"
#include "tests/gpu/ref.h"

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (x);                                                                      \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_));            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static double bf16(uint16_t v)
{
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static void *fetch(const void *d, size_t bytes)
{
    void *h = malloc(bytes);
    CHECK(cudaMemcpy(h, d, bytes, cudaMemcpyDeviceToHost));
    return h;
}

static int report(const char *what, uint32_t m, uint32_t n, uint32_t k, double diff, double norm,
                  double limit)
{
    double e = sqrt(diff / norm);
    int ok = e < limit; /* false for NaN */
    printf("%s %-8s m %u n %5u k %5u: %.1e\n", ok ? "ok  " : "FAIL", what, m, n, k, e);
    return ok;
}

static int check_product(uint32_t m, uint32_t n, uint32_t k, uint32_t seed)
{
    void *w, *x, *h;
    float *y;
    CHECK(cudaMalloc(&w, (size_t)n * k * 2));
    CHECK(cudaMalloc(&x, (size_t)m * k * 2));
    CHECK(cudaMalloc((void **)&y, (size_t)m * n * 4));
    CHECK(cudaMalloc(&h, (size_t)m * n));
    ref_fill(w, (size_t)n * k, BT_CU_BF16, 0.05f, seed);
    ref_fill(x, (size_t)m * k, BT_CU_BF16, 1, seed + 1);
    CHECK(cudaMemset(y, 0xff, (size_t)m * n * 4));
    CHECK(cudaMemset(h, 0xff, (size_t)m * n));
    CHECK(bt_cu_gemv(w, x, y, m, n, k, false, 0));
    CHECK(bt_cu_gemv(w, x, y, m, n, k, true, 0)); /* twice the product */
    CHECK(bt_cu_gemv_swiglu(w, x, h, m, n, k, 0));
    CHECK(cudaDeviceSynchronize());
    uint16_t *hw = fetch(w, (size_t)n * k * 2), *hx = fetch(x, (size_t)m * k * 2),
             *hh = fetch(h, (size_t)m * n);
    float *hy = fetch(y, (size_t)m * n * 4);
    double *want = malloc((size_t)m * n * sizeof(*want)), diff = 0, norm = 0;
    for (uint32_t i = 0; i < m; i++) {
        for (uint32_t j = 0; j < n; j++) {
            double sum = 0;
            for (uint32_t c = 0; c < k; c++) {
                sum += bf16(hw[(size_t)j * k + c]) * bf16(hx[(size_t)i * k + c]);
            }
            want[(size_t)i * n + j] = sum;
            diff += pow(hy[(size_t)i * n + j] - 2 * sum, 2);
            norm += pow(2 * sum, 2);
        }
    }
    int ok = report("product", m, n, k, diff, norm, 1e-5);
    diff = norm = 0;
    for (uint32_t i = 0; i < m; i++) {
        for (uint32_t j = 0; j < n / 2; j++) {
            double g = want[(size_t)i * n + j], u = want[(size_t)i * n + n / 2 + j];
            double v = g / (1 + exp(-g)) * u;
            diff += pow(bf16(hh[(size_t)i * (n / 2) + j]) - v, 2);
            norm += v * v;
        }
    }
    ok &= report("swiglu", m, n, k, diff, norm, 4e-3);
    void *device[] = {w, x, y, h}, *host[] = {hw, hx, hh, hy, want};
    for (int i = 0; i < 4; i++) {
        cudaFree(device[i]);
    }
    for (int i = 0; i < 5; i++) {
        free(host[i]);
    }
    return ok;
}

int main(void)
{
    static const uint32_t shapes[][2] = {
        {16, 32}, {768, 256}, {1536, 192}, {6144, 4096}, {48, 8192}};
    uint32_t seed = (uint32_t)time(NULL), failed = 0, n = 0;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("1..0 # SKIP no GPU\n");
        return 0;
    }
    for (uint32_t s = 0; s < 5; s++) {
        for (uint32_t m = 1; m <= 8; m += s == 3 ? 7 : 1) {
            failed += !check_product(m, shapes[s][0], shapes[s][1], seed + n++ * 3);
        }
    }
    printf("%u passed, %u failed\n", n - failed, failed);
    return failed != 0;
}

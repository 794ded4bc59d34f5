/* Measures the machine for limits.h. Own oneDNN engine and memory; for benchmarks only. */
#include "common/engine/cpu/limits.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/engine/cpu/dnnl_api.h"
#include "common/engine/cpu/gemm.h"

#define READ_BYTES (1ull << 30)

struct product {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_t prim;
    dnnl_memory_t src, wei, dst;
};

static void product_cleanup(struct product *p)
{
    dnnl_memory_destroy(p->src);
    dnnl_memory_destroy(p->wei);
    dnnl_memory_destroy(p->dst);
    if (p->prim) {
        dnnl_primitive_destroy(p->prim);
    }
    *p = (struct product){.engine = p->engine, .stream = p->stream};
}

static dnnl_status_t product_make(struct product *p, int64_t m, int64_t k, int64_t n, bool bf16)
{
    dnnl_data_type_t dt = bf16 ? dnnl_bf16 : dnnl_f32;
    const dnnl_dims_t sd = {m, k}, wd = {k, n}, dd = {m, n};
    bt_md_t src, wei, dst;
    dnnl_primitive_desc_t pd = NULL;
    dnnl_status_t st = bt_md_init(&src, sd, dt, dnnl_ab);
    st = st == dnnl_success ? bt_md_init(&wei, wd, dt, dnnl_format_tag_any) : st;
    st = st == dnnl_success ? bt_md_init(&dst, dd, dnnl_f32, dnnl_ab) : st;
    st = st == dnnl_success
             ? bt_matmul_pd(&pd, p->engine, BT_MD_REF(src), BT_MD_REF(wei), BT_MD_REF(dst))
             : st;
    if (st != dnnl_success) {
        return st;
    }
    const_dnnl_primitive_desc_t q = pd;
    st = dnnl_primitive_create(&p->prim, q);
    st = st == dnnl_success
             ? dnnl_memory_create(&p->src, BT_MD_REF(src), p->engine, DNNL_MEMORY_ALLOCATE)
             : st;
    st =
        st == dnnl_success
            ? dnnl_memory_create(&p->wei, dnnl_primitive_desc_query_md(q, dnnl_query_weights_md, 0),
                                 p->engine, DNNL_MEMORY_ALLOCATE)
            : st;
    st = st == dnnl_success
             ? dnnl_memory_create(&p->dst, BT_MD_REF(dst), p->engine, DNNL_MEMORY_ALLOCATE)
             : st;
    dnnl_primitive_desc_destroy(pd);
    bt_md_cleanup(&src);
    bt_md_cleanup(&wei);
    bt_md_cleanup(&dst);
    return st;
}

static void fill(dnnl_memory_t m, size_t bytes)
{
    void *p;
    if (dnnl_memory_get_data_handle(m, &p) == dnnl_success) {
        memset(p, 0x3c, bytes); /* small finite numbers */
    }
}

static bt_status_t measure_product(uint32_t threads, uint32_t rounds, struct bt_cpu_limits *l)
{
    static const int64_t shapes[][3] = {{512, 768, 768},
                                        {512, 1024, 1024},
                                        {1024, 1024, 1024},
                                        {512, 2048, 1024},
                                        {1024, 1024, 4096}};
    struct product p = {0};
    bool bf16 = bt_gemm_isa() >= BT_ISA_AVX512_BF16;
    if (dnnl_engine_create(&p.engine, dnnl_cpu, 0) != dnnl_success ||
        dnnl_stream_create(&p.stream, p.engine, dnnl_stream_default_flags) != dnnl_success) {
        return BT_ERR_DEVICE;
    }
    omp_set_num_threads((int)threads);
    bt_status_t st = BT_OK;
    for (size_t i = 0; st == BT_OK && i < BT_ARRAY_LEN(shapes); i++) {
        int64_t m = shapes[i][0], k = shapes[i][1], n = shapes[i][2];
        if (product_make(&p, m, k, n, bf16) != dnnl_success) {
            st = BT_ERR_DEVICE;
            break;
        }
        fill(p.src, (size_t)(m * k) * (bf16 ? 2 : 4));
        fill(p.wei, (size_t)(k * n) * (bf16 ? 2 : 4));
        dnnl_exec_arg_t args[] = {
            {DNNL_ARG_SRC, p.src}, {DNNL_ARG_WEIGHTS, p.wei}, {DNNL_ARG_DST, p.dst}};
        for (uint32_t r = 0; r < rounds * 10; r++) {
            uint64_t t0 = bt_mono_ns();
            if (dnnl_primitive_execute(p.prim, p.stream, 3, args) != dnnl_success ||
                dnnl_stream_wait(p.stream) != dnnl_success) {
                st = BT_ERR_DEVICE;
                break;
            }
            double rate = 2.0 * (double)(m * k * n) / (double)(bt_mono_ns() - t0) * 1e9;
            if (rate > l->product) {
                l->product = rate;
                snprintf(l->product_text, sizeof(l->product_text), "oneDNN %s %lld x %lld x %lld",
                         bf16 ? "bf16" : "f32", (long long)m, (long long)k, (long long)n);
            }
        }
        product_cleanup(&p);
    }
    product_cleanup(&p);
    dnnl_stream_destroy(p.stream);
    dnnl_engine_destroy(p.engine);
    return st;
}

typedef uint64_t v8 __attribute__((vector_size(64)));

__attribute__((target_clones("default", "avx2", "avx512f"))) static uint64_t read_all(const v8 *p,
                                                                                      size_t n)
{
    v8 a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i + 4 <= n; i += 4) {
        __builtin_prefetch(p + i + 64);
        __builtin_prefetch(p + i + 65);
        __builtin_prefetch(p + i + 66);
        __builtin_prefetch(p + i + 67);
        a += p[i];
        b += p[i + 1];
        c += p[i + 2];
        d += p[i + 3];
    }
    a += b + (c + d);
    return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}

static bt_status_t measure_read(uint32_t threads, uint32_t rounds, struct bt_cpu_limits *l)
{
    v8 *p = aligned_alloc(4096, READ_BYTES);
    if (!p) {
        return BT_ERR_NO_MEMORY;
    }
    size_t n = READ_BYTES / sizeof(*p);
    uint64_t sum = 0;
    memset(p, 1, READ_BYTES);
    for (uint32_t r = 0; r < rounds; r++) {
        uint64_t t0 = bt_mono_ns();
#pragma omp parallel num_threads(threads) reduction(+ : sum)
        {
            size_t k = (size_t)omp_get_num_threads(), i = (size_t)omp_get_thread_num();
            sum += read_all(p + n * i / k, n / k);
        }
        l->read = BT_MAX(l->read, (double)READ_BYTES / (double)(bt_mono_ns() - t0) * 1e9);
    }
    free(p);
    return sum ? BT_OK : BT_ERR_DEVICE; /* uses the sum, so that the compiler keeps the loop */
}

bt_status_t bt_cpu_limits(uint32_t threads, uint32_t rounds, struct bt_cpu_limits *l_p)
{
    struct bt_cpu_limits l = {0};
    bt_status_t st = measure_product(threads, rounds, &l);
    if (st == BT_OK) {
        st = measure_read(threads, rounds, &l);
    }
    if (st == BT_OK) {
        *l_p = l;
    }
    return st;
}

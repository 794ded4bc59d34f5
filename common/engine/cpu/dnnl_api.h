/* The differences between oneDNN 2.x (Debian 12) and 3.x (Ubuntu 24.04) that gemm.c meets. */
#ifndef BT_ENGINE_CPU_DNNL_API_H
#define BT_ENGINE_CPU_DNNL_API_H

#include <dnnl.h>

#if DNNL_VERSION_MAJOR >= 3

typedef dnnl_memory_desc_t bt_md_t;
typedef const_dnnl_memory_desc_t bt_md_ref_t;
#define BT_MD_REF(md) (md)

static inline dnnl_status_t bt_md_init(bt_md_t *md, const dnnl_dims_t dims, dnnl_data_type_t dt,
                                       dnnl_format_tag_t tag)
{
    return dnnl_memory_desc_create_with_tag(md, 2, dims, dt, tag);
}
static inline dnnl_status_t bt_md_copy(bt_md_t *md, bt_md_ref_t from)
{
    return dnnl_memory_desc_clone(md, from);
}
static inline void bt_md_cleanup(bt_md_t *md)
{
    dnnl_memory_desc_destroy(*md);
}
static inline dnnl_status_t bt_matmul_pd(dnnl_primitive_desc_t *pd, dnnl_engine_t engine,
                                         bt_md_ref_t src, bt_md_ref_t wei, bt_md_ref_t dst)
{
    return dnnl_matmul_primitive_desc_create(pd, engine, src, wei, NULL, dst, NULL);
}

#else

typedef dnnl_memory_desc_t bt_md_t;
typedef const dnnl_memory_desc_t *bt_md_ref_t;
#define BT_MD_REF(md) (&(md))

static inline dnnl_status_t bt_md_init(bt_md_t *md, const dnnl_dims_t dims, dnnl_data_type_t dt,
                                       dnnl_format_tag_t tag)
{
    return dnnl_memory_desc_init_by_tag(md, 2, dims, dt, tag);
}
static inline dnnl_status_t bt_md_copy(bt_md_t *md, bt_md_ref_t from)
{
    *md = *from;
    return dnnl_success;
}
static inline void bt_md_cleanup(bt_md_t *md)
{
    (void)md;
}
static inline dnnl_status_t bt_matmul_pd(dnnl_primitive_desc_t *pd, dnnl_engine_t engine,
                                         bt_md_ref_t src, bt_md_ref_t wei, bt_md_ref_t dst)
{
    dnnl_matmul_desc_t desc;
    dnnl_status_t st = dnnl_matmul_desc_init(&desc, src, wei, NULL, dst);
    return st != dnnl_success ? st : dnnl_primitive_desc_create(pd, &desc, NULL, engine, NULL);
}

#endif
#endif

/* The body of one kernel set; included by kernels_x86.c with SET (name), VL (floats a vector),
 * BF16 (activations are bf16) and V_FMA defined; it undefines them.
 * GCC vector types carry everything but the products, so one text serves all sets. */
#define N(x)        CAT(x, SET)
#define vf          N(vf)
#define vi          N(vi)
#define vu16        N(vu16)
#define bt_act_t    N(bt_act_t)
#define tile_matmul N(tile_matmul)
#define softmax_row N(softmax_row)

typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vu16 __attribute__((vector_size(VL * 2), aligned(2), may_alias));
#if BF16
typedef uint16_t bt_act_t;
#else
typedef float bt_act_t;
#endif

#define V_LOAD(p)     (*(const vf *)(p))
#define V_STORE(p, v) (*(vf *)(p) = (v))
#define V_SET(x)      N(v_set)(x)

static inline vf N(v_set)(float x)
{
#if VL == 16
    return (vf)_mm512_set1_ps(x);
#elif VL == 8
    return (vf)_mm256_set1_ps(x);
#else
    return (vf)_mm_set1_ps(x);
#endif
}

static inline vf N(v_max)(vf a, vf b)
{
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#endif
}

static inline float N(v_sum)(vf v)
{
    float s = 0;
    for (int i = 0; i < VL; i++) {
        s += v[i];
    }
    return s;
}

/* 2^x by x = n + f, |f| <= 1/2, and the Taylor series of 2^f to the 6th power (relative error
 * below 2e-7); 0 below 2^-125. */
static inline vf N(v_exp2)(vf x)
{
    vf y = N(v_max)(x, V_SET(-126.0f));
    y = -N(v_max)(-y, V_SET(-126.0f));
    vf magic = V_SET(12582912.0f);
    vf t = y + magic;
    vi n = (vi)t - (vi)magic;
    vf f = y - (t - magic);
    vf p = V_SET(1.54035304e-4f);
    p = V_FMA(p, f, V_SET(1.33335581e-3f));
    p = V_FMA(p, f, V_SET(9.61812911e-3f));
    p = V_FMA(p, f, V_SET(5.55041087e-2f));
    p = V_FMA(p, f, V_SET(2.40226507e-1f));
    p = V_FMA(p, f, V_SET(6.93147181e-1f));
    p = V_FMA(p, f, V_SET(1.0f));
    vi r = (vi)p + (n << 23);
    return (vf)(r & (x > V_SET(-125.0f)));
}

/* Columns c .. c + VL - 1 of a row of act. */
static inline void N(act_store)(bt_act_t *row, uint32_t parts, uint32_t c, vf v)
{
#if BF16
    bt_act_t *at = row + bt_act_col(c, parts);
    __m256i hi = (__m256i)_mm512_cvtneps_pbh((__m512)v);
    _mm256_storeu_si256((__m256i *)at, hi);
    if (parts == 2) {
        __m512 back = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(hi), 16);
        _mm256_storeu_si256((__m256i *)(at + BT_ACT_LO),
                            (__m256i)_mm512_cvtneps_pbh((__m512)v - back));
    }
#else
    (void)parts;
    V_STORE(row + c, v);
#endif
}

/* KV is f16: three more bits than bf16 has, and keys need them. Beyond its range: the largest. */
static inline void N(f16_store)(uint16_t *out, vf v)
{
    v = N(v_max)(V_SET(-65504.0f), v); /* in this order a NaN stays one */
    v = -N(v_max)(V_SET(-65504.0f), -v);
#if VL == 16
    _mm256_storeu_si256((__m256i *)out,
                        _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif VL == 8
    _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < VL; i++) {
        _Float16 h = (_Float16)v[i];
        memcpy(out + i, &h, 2);
    }
#endif
}

static inline vf N(f16_load)(const uint16_t *p)
{
#if VL == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf v;
    for (int i = 0; i < VL; i++) {
        _Float16 h;
        memcpy(&h, p + i, 2);
        v[i] = (float)h;
    }
    return v;
#endif
}

/* The columns n & ~(VL - 1) .. n - 1, too few for a vector, and zeros up to the end of the tile. */
static inline void N(act_tail)(bt_act_t *row, uint32_t parts, uint32_t n, const float *x)
{
    uint32_t c = n / VL * VL;
    (void)parts; /* read where BF16 */
    if (c < n) {
        float v[VL] = {0};
        memcpy(v, x, (n - c) * sizeof(*v));
#if BF16
        N(act_store)(row, parts, c, V_LOAD(v));
#else
        memcpy(row + c, v, (n - c) * sizeof(*v));
#endif
        c += VL;
    }
#if BF16
    if (c % 32) {
        N(act_store)(row, parts, c, V_SET(0.0f));
    }
#endif
}

static void N(norm)(float *x, const float *add, const float *w, void *out, uint32_t parts,
                    uint32_t n, float eps)
{
    bt_act_t *o = out;
    vf acc = V_SET(0.0f);
    uint32_t i = 0;
    float tail = 0;
    for (; i + VL <= n; i += VL) {
        vf v = V_LOAD(x + i);
        if (add) {
            v += V_LOAD(add + i);
            V_STORE(x + i, v);
        }
        acc = V_FMA(v, v, acc);
    }
    for (; i < n; i++) {
        x[i] += add ? add[i] : 0.0f;
        tail += x[i] * x[i];
    }
    float s = 1.0f / sqrtf((N(v_sum)(acc) + tail) / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) {
        N(act_store)(o, parts, i, V_LOAD(x + i) * V_SET(s) * V_LOAD(w + i));
    }
    float rest[VL] = {0};
    for (uint32_t j = i; j < n; j++) {
        rest[j - i] = x[j] * s * w[j];
    }
    N(act_tail)(o, parts, n, rest);
}

static void N(layer_norm)(float *x, const float *add, const float *w, const float *bias, void *out,
                          uint32_t parts, uint32_t n, float eps)
{
    float sum = 0, squares = 0;
    for (uint32_t i = 0; i < n; i++) {
        x[i] += add ? add[i] : 0.0f;
        sum += x[i];
    }
    float mean = sum / (float)n;
    for (uint32_t i = 0; i < n; i++) {
        squares += (x[i] - mean) * (x[i] - mean);
    }
    float s = 1.0f / sqrtf(squares / (float)n + eps);
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf v = (V_LOAD(x + i) - V_SET(mean)) * V_SET(s) * V_LOAD(w + i) + V_LOAD(bias + i);
        N(act_store)(out, parts, i, v);
    }
    float rest[VL] = {0};
    for (uint32_t j = i; j < n; j++) {
        rest[j - i] = (x[j] - mean) * s * w[j] + bias[j];
    }
    N(act_tail)(out, parts, n, rest);
}

/* d is a multiple of 16, so d / 2 is one of 8: the two halves go by 8 or fewer lanes. */
static void N(head)(float *h, const float *bias, const float *w, const float *cs, uint32_t d,
                    float eps)
{
    if (bias) {
        for (uint32_t i = 0; i < d; i++) {
            h[i] += bias[i];
        }
    }
    if (w) {
        vf acc = V_SET(0.0f);
        for (uint32_t i = 0; i < d; i += VL) {
            acc = V_FMA(V_LOAD(h + i), V_LOAD(h + i), acc);
        }
        float s = 1.0f / sqrtf(N(v_sum)(acc) / (float)d + eps);
        for (uint32_t i = 0; i < d; i += VL) {
            V_STORE(h + i, V_LOAD(h + i) * V_SET(s) * V_LOAD(w + i));
        }
    }
    if (cs) {
        bt_cpu_rope(h, cs, d, false);
    }
}

static void N(to_f16)(const float *x, uint16_t *out, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += VL) {
        N(f16_store)(out + i, V_LOAD(x + i));
    }
}

static void N(swiglu)(const float *gu, void *out, uint32_t n)
{
    bt_act_t *o = out;
    const float *up = gu + n;
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf g = V_LOAD(gu + i);
        vf e = N(v_exp2)(g * V_SET(-1.44269504f));
        N(act_store)(o, 2, i, g / (V_SET(1.0f) + e) * V_LOAD(up + i));
    }
    float rest[VL] = {0};
    for (uint32_t j = i; j < n; j++) {
        rest[j - i] = gu[j] / (1.0f + expf(-gu[j])) * up[j];
    }
    N(act_tail)(o, 2, n, rest);
}

static void N(to_act)(const float *x, void *row, uint32_t col, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += VL) {
        N(act_store)(row, 2, col + i, V_LOAD(x + i));
    }
}

/* x (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) */
static inline vf N(v_gelu)(vf x)
{
    vf u = x * V_SET(0.7978845608f) * (V_SET(1.0f) + V_SET(0.044715f) * x * x);
    return x / (V_SET(1.0f) + N(v_exp2)(u * V_SET(-2.0f * 1.44269504f)));
}

static void N(gelu)(const float *x, const float *bias, void *out, uint32_t parts, uint32_t n)
{
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        N(act_store)(out, parts, i, N(v_gelu)(V_LOAD(x + i) + V_LOAD(bias + i)));
    }
    float rest[VL] = {0};
    for (uint32_t j = i; j < n; j++) {
        rest[j - i] = x[j] + bias[j];
    }
    V_STORE(rest, N(v_gelu)(V_LOAD(rest)));
    N(act_tail)(out, parts, n, rest);
}

/* ---- attention ---- */

/* e4m3's bits, moved to f16's places, mean value / 2^8, also for subnormals. */
static void N(latent)(const struct bt_kv_group *g, const uint8_t *row, uint16_t *out)
{
    uint32_t latent = bt_kv_latent(g);
    const uint8_t *scales = row + bt_kv_latent_scales(g);
    const uint16_t *rope = (const uint16_t *)(row + bt_kv_latent_rope(g));
    for (uint32_t i = 0; i < latent; i += 16) {
        float scale;
        memcpy(&scale, scales + i / BT_KV_LATENT_GROUP * sizeof(scale), sizeof(scale));
        uint16_t bits[16];
        for (uint32_t j = 0; j < 16; j++) {
            bits[j] = (uint16_t)((row[i + j] & 0x80) << 8 | (row[i + j] & 0x7f) << 7);
        }
        for (uint32_t j = 0; j < 16; j += VL) {
            N(f16_store)(out + i + j, N(f16_load)(bits + j) * V_SET(scale * 256.0f));
        }
    }
    for (uint32_t i = 0; i < g->rope; i += VL) {
        vi bits;
        for (uint32_t j = 0; j < VL; j++) {
            bits[j] = (int32_t)((uint32_t)rope[i + j] << 16);
        }
        N(f16_store)(out + latent + i, (vf)bits);
    }
}

#if VL == 16
/* Dimensions d0 .. d0+15 of 16 tokens, transposed: out[c * out_stride + r] = rows[r][d0 + c]. */
static inline void N(transpose16)(const uint16_t *const *rows, uint32_t d0, float *out,
                                  size_t out_stride)
{
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) {
        r[i] = (__m512i)N(f16_load)(rows[i] + d0);
    }
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* r[4g + i]: columns i, 4+i, 8+i, 12+i of rows 4g..4g+3 */
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(out + (size_t)i * out_stride,
                            _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
        _mm512_storeu_si512(out + (size_t)(8 + i) * out_stride,
                            _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
        _mm512_storeu_si512(out + (size_t)(4 + i) * out_stride,
                            _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
        _mm512_storeu_si512(out + (size_t)(12 + i) * out_stride,
                            _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
    }
}
#endif

/* K tile as [head_dim][64 tokens] f32. */
static inline void N(pack_k)(const uint16_t *const *rows, uint32_t d, float *out)
{
#if VL == 16
    for (uint32_t d0 = 0; d0 < d; d0 += 16) {
        for (uint32_t t = 0; t < BT_CPU_TILE; t += 16) {
            N(transpose16)(rows + t, d0, out + (size_t)d0 * BT_CPU_TILE + t, BT_CPU_TILE);
        }
    }
#else
    for (uint32_t t = 0; t < BT_CPU_TILE; t++) {
        for (uint32_t i = 0; i < d; i += VL) {
            vf v = N(f16_load)(rows[t] + i);
            for (uint32_t j = 0; j < VL; j++) {
                out[(size_t)(i + j) * BT_CPU_TILE + t] = v[j];
            }
        }
    }
#endif
}

/* V tile as [64 tokens][head_dim] f32. */
static inline void N(pack_v)(const uint16_t *const *rows, uint32_t d, float *out)
{
    for (uint32_t t = 0; t < BT_CPU_TILE; t++) {
        for (uint32_t i = 0; i < d; i += VL) {
            V_STORE(out + (size_t)t * d + i, N(f16_load)(rows[t] + i));
        }
    }
}

#define S_VECS (BT_CPU_TILE / VL)

/* out[r][j] += sum over k < n, in order, of x[r][k] * tile[k][j], for j of NV vectors. */
#define KERNEL(NAME, R, NV)                                                                        \
    static inline void N(NAME)(const float *x, size_t x_stride, const float *tile,                 \
                               size_t tile_stride, uint32_t n, float *out, size_t out_stride)      \
    {                                                                                              \
        vf acc[R][NV];                                                                             \
        for (int r = 0; r < R; r++) {                                                              \
            for (int j = 0; j < NV; j++) {                                                         \
                acc[r][j] = V_LOAD(out + r * out_stride + j * VL);                                 \
            }                                                                                      \
        }                                                                                          \
        for (uint32_t k = 0; k < n; k++) {                                                         \
            for (int r = 0; r < R; r++) {                                                          \
                for (int j = 0; j < NV; j++) {                                                     \
                    acc[r][j] = V_FMA(V_SET(x[r * x_stride + k]),                                  \
                                      V_LOAD(tile + k * tile_stride + j * VL), acc[r][j]);         \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (int r = 0; r < R; r++) {                                                              \
            for (int j = 0; j < NV; j++) {                                                         \
                V_STORE(out + r * out_stride + j * VL, acc[r][j]);                                 \
            }                                                                                      \
        }                                                                                          \
    }
#if VL == 16
KERNEL(mm_r4, 4, 4)
KERNEL(mm_r1, 1, 4)
KERNEL(mm_r4_v1, 4, 1)
#define MM_ROWS 4
#else
KERNEL(mm_r4, 2, 4)
KERNEL(mm_r1, 1, 4)
KERNEL(mm_r4_v1, 2, 1)
#define MM_ROWS 2
#endif
KERNEL(mm_r1_v1, 1, 1)

/* out[rows][cols] += x[rows][n] * tile[n][cols]; every (row, column) sums in order of k whatever
 * the blocking. */
static inline void tile_matmul(const float *x, size_t x_stride, const float *tile, size_t cols,
                               uint32_t n, float *out, uint32_t rows)
{
    uint32_t c = 0;
    for (; c + 4 * VL <= cols; c += 4 * VL) {
        uint32_t r = 0;
        for (; r + MM_ROWS <= rows; r += MM_ROWS) {
            N(mm_r4)(x + r * x_stride, x_stride, tile + c, cols, n, out + r * cols + c, cols);
        }
        for (; r < rows; r++) {
            N(mm_r1)(x + r * x_stride, x_stride, tile + c, cols, n, out + r * cols + c, cols);
        }
    }
    for (; c < cols; c += VL) {
        uint32_t r = 0;
        for (; r + MM_ROWS <= rows; r += MM_ROWS) {
            N(mm_r4_v1)(x + r * x_stride, x_stride, tile + c, cols, n, out + r * cols + c, cols);
        }
        for (; r < rows; r++) {
            N(mm_r1_v1)(x + r * x_stride, x_stride, tile + c, cols, n, out + r * cols + c, cols);
        }
    }
}

/* Online softmax (Milakov and Gimelshein 2018) of one row's scores, in the base-2 domain: scores
 * become probabilities, the output row is rescaled. */
static inline void softmax_row(float *s, uint32_t from, uint32_t valid, float scale, float *m_p,
                               float *l_p, float *o, uint32_t d)
{
    vf max = V_SET(-1e30f);
    vf v[S_VECS];
    for (int j = 0; j < (int)S_VECS; j++) {
        vi idx;
        for (int i = 0; i < VL; i++) {
            idx[i] = j * VL + i;
        }
        vi ok = (idx < ((vi){0} + (int32_t)valid)) & (idx >= ((vi){0} + (int32_t)from));
        vf x = V_LOAD(s + j * VL) * V_SET(scale);
        v[j] = (vf)(((vi)x & ok) | ((vi)V_SET(-1e30f) & ~ok));
        max = N(v_max)(max, v[j]);
    }
    float m = *m_p;
    for (int i = 0; i < VL; i++) {
        m = max[i] > m ? max[i] : m;
    }
    vf sum = V_SET(0.0f);
    for (int j = 0; j < (int)S_VECS; j++) {
        v[j] = N(v_exp2)(v[j] - V_SET(m));
        sum += v[j];
        V_STORE(s + j * VL, v[j]);
    }
    vf alpha = N(v_exp2)(V_SET(*m_p - m));
    *l_p = *l_p * alpha[0] + N(v_sum)(sum);
    *m_p = m;
    for (uint32_t i = 0; i < d; i += VL) {
        V_STORE(o + i, V_LOAD(o + i) * alpha);
    }
}

static void N(attn)(const struct bt_cpu_attn *a)
{
    uint32_t d = a->head_dim, vd = a->v_dim, rows = a->n * a->group;
    float *o = a->scratch;                         /* [rows][vd] */
    float *m = o + (size_t)BT_CPU_ROWS_MAX * vd;   /* [rows] */
    float *l = m + BT_CPU_ROWS_MAX;                /* [rows] */
    float *s = l + BT_CPU_ROWS_MAX;                /* [rows][64] */
    float *kt = s + BT_CPU_ROWS_MAX * BT_CPU_TILE; /* tiles */
    float *vt = kt + (size_t)d * BT_CPU_TILE;
    uint16_t *zero = (uint16_t *)(vt + (size_t)vd * BT_CPU_TILE);
    uint16_t *wide = zero + d; /* [64][d] */
    const uint16_t *ptr[BT_CPU_TILE];
    const float scale = a->scale * 1.44269504f;

    memset(o, 0, (size_t)rows * vd * sizeof(*o));
    memset(zero, 0, d * sizeof(*zero));
    for (uint32_t r = 0; r < rows; r++) {
        m[r] = -1e30f;
        l[r] = 0;
    }
    /* Tiles that only some of the rows see are masked for the others: their weights are then wiped
     * by the first score that counts, exactly, so where the block begins does not show. */
    uint32_t start = a->window && a->pos >= a->window ? a->pos - a->window + 1 : 0;
    for (uint32_t t0 = start / BT_CPU_TILE * BT_CPU_TILE; t0 < a->pos + a->n; t0 += BT_CPU_TILE) {
        uint32_t valid = BT_MIN(a->pos + a->n - t0, (uint32_t)BT_CPU_TILE);
        /* earlier queries see no token of the tile */
        uint32_t first = t0 > a->pos ? t0 - a->pos : 0;
        bt_cpu_tile_rows(a, t0, valid, a->k_off, zero, wide, ptr);
        N(pack_k)(ptr, d, kt);
        if (a->v_off != a->k_off) {
            bt_cpu_tile_rows(a, t0, valid, a->v_off, zero, wide, ptr);
        }
        N(pack_v)(ptr, vd, vt);
        uint32_t r0 = first * a->group;
        memset(s + (size_t)r0 * BT_CPU_TILE, 0, (size_t)(rows - r0) * BT_CPU_TILE * sizeof(*s));
        for (uint32_t i = first; i < a->n; i++) {
            tile_matmul(a->q + i * a->q_stride, d, kt, BT_CPU_TILE, d,
                        s + (size_t)i * a->group * BT_CPU_TILE, a->group);
        }
        for (uint32_t r = r0; r < rows; r++) {
            uint32_t q = a->pos + r / a->group;
            uint32_t see = BT_MIN(q + 1 - t0, (uint32_t)BT_CPU_TILE);
            uint32_t from = a->window && q + 1 > a->window + t0 ? q + 1 - a->window - t0 : 0;
            from = t0 == 0 ? BT_MAX(from, a->first) : from;
            softmax_row(s + (size_t)r * BT_CPU_TILE, from, see, scale, &m[r], &l[r],
                        o + (size_t)r * vd, vd);
        }
        tile_matmul(s + (size_t)r0 * BT_CPU_TILE, BT_CPU_TILE, vt, vd, BT_CPU_TILE,
                    o + (size_t)r0 * vd, rows - r0);
    }
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t row = a->out_row + r / a->group, head = r % a->group;
        uint32_t col = a->out_col + head * a->out_step;
        bt_act_t *out = (bt_act_t *)(a->out + head * a->out_next);
#if BF16
        out += bt_act_row(row, a->out_width, 2);
#else
        out += (size_t)row * a->out_width;
#endif
        vf inv = V_SET(1.0f / l[r]);
        for (uint32_t i = 0; i < vd; i += VL) {
            N(act_store)(out, 2, col + i, V_LOAD(o + (size_t)r * vd + i) * inv);
        }
    }
}

const struct bt_cpu_kernels N(bt_cpu_kernels) = {
    .name = BT_CPU_STR(SET),
    .bf16 = BF16,
    .norm = N(norm),
    .layer_norm = N(layer_norm),
    .head = N(head),
    .to_act = N(to_act),
    .to_f16 = N(to_f16),
    .latent = N(latent),
    .swiglu = N(swiglu),
    .gelu = N(gelu),
    .attn = N(attn),
};

#undef N
#undef vf
#undef vi
#undef vu16
#undef bt_act_t
#undef tile_matmul
#undef softmax_row
#undef V_LOAD
#undef V_STORE
#undef V_SET
#undef V_FMA
#undef S_VECS
#undef KERNEL
#undef MM_ROWS
#undef SET
#undef VL
#undef BF16

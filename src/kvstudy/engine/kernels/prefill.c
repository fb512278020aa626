// Causal attention of a chunk of a prompt on a CPU in bf16, by blocks: `attention.py` has the same in torch, and its docs.
//
// The queries that share a KV head (tokens of the chunk x the head's group, token by token) are taken ROWS at a time, one a
// vector lane, so that the softmax over keys never adds across lanes. Keys go by KEYS at a time. Both products use pairs of
// bf16 with float32 sums: queries are packed as pairs along the head dimension, values and probabilities along the keys.
#include "simd.h"

#ifdef HAVE_BF16_SIMD
enum { ROWS = 32, KEYS = 64, PREFILL_MAX_DIM = 256 };
#define LOG2E 1.44269504f

typedef struct {
    const bf16 *q, *k, *v;
    int64_t q_row, k_head, k_row, v_head, v_row;
    int tokens, start, heads, kv_heads, dim;
    float scale;
} Chunk;

INLINE int group_of(const Chunk *c) { return c->heads / c->kv_heads; }
INLINE int blocks_of(const Chunk *c) { return (c->tokens * group_of(c) + ROWS - 1) / ROWS; }

// One block of queries as [dim / 2][ROWS] pairs, and each lane's position (-1 beyond the last).
static void pack(const Chunk *c, int h, int block, uint32_t *packed, int32_t *position) {
    const int group = group_of(c), all = c->tokens * group;
    for (int r = 0; r < ROWS; r++) {
        const int row = block * ROWS + r, token = row / group, head = h * group + row % group;
        const uint32_t *pairs = (const uint32_t *)(c->q + token * c->q_row + (int64_t)head * c->dim);
        position[r] = row < all ? c->start + token : -1;
        for (int i = 0; i < c->dim / 2; i++) packed[i * ROWS + r] = row < all ? pairs[i] : 0;
    }
}

// s[key][ROWS] = scores, times scale, of a block of queries with keys first .. first + KEYS - 1; where MASKED, -1e30 where a
// lane may not look. top[2] rises to the greatest of each lane.
INLINE void scores_of(const Chunk *c, int h, const uint32_t *packed, const int32_t *position, int first, int keys,
                      float scale_by, float *s, __m512 *top, const int MASKED) {
    const __m512i at[2] = {_mm512_loadu_si512(position), _mm512_loadu_si512(position + 16)};
    const __m512 scale = _mm512_set1_ps(scale_by), never = _mm512_set1_ps(-1e30f);
    for (int j = 0; j < KEYS; j += 8) {
        const uint32_t *key[8];
        __m512 acc[8][2];
        for (int i = 0; i < 8; i++) {
            const int e = first + (j + i < keys ? j + i : keys - 1);
            key[i] = (const uint32_t *)(c->k + h * c->k_head + e * c->k_row);
            acc[i][0] = acc[i][1] = _mm512_setzero_ps();
        }
        for (int d = 0; d < c->dim / 2; d++) {
            const __m512bh q0 = (__m512bh)_mm512_loadu_si512(packed + d * ROWS);
            const __m512bh q1 = (__m512bh)_mm512_loadu_si512(packed + d * ROWS + 16);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)key[i][d]);
                acc[i][0] = _mm512_dpbf16_ps(acc[i][0], q0, pair);
                acc[i][1] = _mm512_dpbf16_ps(acc[i][1], q1, pair);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            for (int half = 0; half < 2; half++) {
                __m512 value = _mm512_mul_ps(acc[i][half], scale);
                if (MASKED) {
                    const __m512i e = _mm512_set1_epi32(j + i < keys ? first + j + i : INT32_MAX);
                    value = _mm512_mask_blend_ps(_mm512_cmple_epi32_mask(e, at[half]), never, value);
                }
                top[half] = _mm512_max_ps(top[half], value);
                _mm512_storeu_ps(s + (j + i) * ROWS + half * 16, value);
            }
    }
}

static void scores(const Chunk *c, int h, const uint32_t *packed, const int32_t *position, int first, int keys, float scale,
                   float *s, __m512 *top) {
    // Lanes go by position, so that the first sees the least; those beyond the last query see nothing.
    if (keys == KEYS && first + KEYS - 1 <= position[0] && position[ROWS - 1] >= 0)
        scores_of(c, h, packed, position, first, keys, scale, s, top, 0);
    else
        scores_of(c, h, packed, position, first, keys, scale, s, top, 1);
}

// 2^x to about 2e-6 relative, for x <= 0; below -126 it is 2^-126.
INLINE __m512 exp2_16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
    const __m512 k = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, k);
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, k);
}

// out[4 rows][16 ND dims] = out * shrink + P V over pairs of keys.
INLINE void weigh(const uint32_t *p, const uint32_t *v, int dim, int pairs, const float *shrink, float *out, const int ND) {
    __m512 acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int d = 0; d < ND; d++)
            acc[r][d] = _mm512_mul_ps(_mm512_loadu_ps(out + r * dim + d * 16), _mm512_set1_ps(shrink[r]));
    for (int j = 0; j < pairs; j++) {
        __m512bh value[4];
#pragma GCC unroll 4
        for (int d = 0; d < ND; d++) value[d] = (__m512bh)_mm512_loadu_si512(v + j * dim + d * 16);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const __m512bh weight = (__m512bh)_mm512_set1_epi32((int)p[j * ROWS + r]);
#pragma GCC unroll 4
            for (int d = 0; d < ND; d++) acc[r][d] = _mm512_dpbf16_ps(acc[r][d], weight, value[d]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int d = 0; d < ND; d++) _mm512_storeu_ps(out + r * dim + d * 16, acc[r][d]);
}

// (a[i], b[i]) as pairs of bf16.
INLINE __m512i pairs_of(__m256i a, __m256i b) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

// One block of queries over all keys that any of them may see.
static void attend(const Chunk *c, int h, int block, bf16 *out, int64_t out_row, float *lse) {
    uint32_t packed[PREFILL_MAX_DIM / 2 * ROWS], p[KEYS / 2 * ROWS], v[KEYS / 2 * PREFILL_MAX_DIM];
    float s[KEYS * ROWS], o[ROWS * PREFILL_MAX_DIM], shrink[ROWS], peaks[ROWS], sums[ROWS];
    int32_t position[ROWS];
    const int group = group_of(c), all = c->tokens * group, dim = c->dim;
    const int rows = all - block * ROWS < ROWS ? all - block * ROWS : ROWS;
    pack(c, h, block, packed, position);
    memset(o, 0, sizeof(float) * ROWS * dim);
    __m512 peak[2] = {_mm512_set1_ps(-1e30f), _mm512_set1_ps(-1e30f)}, sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    const int end = position[rows - 1] + 1;
    for (int first = 0; first < end; first += KEYS) {
        const int keys = end - first < KEYS ? end - first : KEYS;
        __m512 top[2] = {peak[0], peak[1]};
        scores(c, h, packed, position, first, keys, c->scale * LOG2E, s, top);  // in powers of two
        for (int half = 0; half < 2; half++) {
            const __m512 less = exp2_16(_mm512_sub_ps(peak[half], top[half]));
            _mm512_storeu_ps(shrink + half * 16, less);
            sum[half] = _mm512_mul_ps(sum[half], less);
            peak[half] = top[half];
#pragma GCC unroll 2
            for (int j = 0; j < KEYS; j += 2) {
                const __m512 a = exp2_16(_mm512_sub_ps(_mm512_loadu_ps(s + j * ROWS + half * 16), top[half]));
                const __m512 b = exp2_16(_mm512_sub_ps(_mm512_loadu_ps(s + (j + 1) * ROWS + half * 16), top[half]));
                sum[half] = _mm512_add_ps(sum[half], _mm512_add_ps(a, b));
                _mm512_storeu_si512(p + j / 2 * ROWS + half * 16,
                                    pairs_of((__m256i)_mm512_cvtneps_pbh(a), (__m256i)_mm512_cvtneps_pbh(b)));
            }
        }
        for (int j = 0; j < KEYS; j += 2)
            for (int d = 0; d < dim; d += 16) {
                const bf16 *at = c->v + h * c->v_head + (int64_t)(first + j) * c->v_row + d;
                const __m256i a = j < keys ? _mm256_loadu_si256((const void *)at) : _mm256_setzero_si256();
                const __m256i b = j + 1 < keys ? _mm256_loadu_si256((const void *)(at + c->v_row)) : _mm256_setzero_si256();
                _mm512_storeu_si512(v + j / 2 * dim + d, pairs_of(a, b));
            }
        for (int r = 0; r < rows; r += 4) {
            int d = 0;
            for (; d + 64 <= dim; d += 64) weigh(p + r, v + d, dim, KEYS / 2, shrink + r, o + r * dim + d, 4);
            for (; d < dim; d += 32) weigh(p + r, v + d, dim, KEYS / 2, shrink + r, o + r * dim + d, 2);
        }
    }
    for (int half = 0; half < 2; half++) {
        _mm512_storeu_ps(peaks + half * 16, peak[half]);
        _mm512_storeu_ps(sums + half * 16, sum[half]);
    }
    for (int r = 0; r < rows; r++) {
        const int row = block * ROWS + r, token = row / group, head = h * group + row % group;
        bf16 *to = out + token * out_row + (int64_t)head * dim;
        for (int d = 0; d < dim; d++) to[d] = bf16_of_f32(o[r * dim + d] / sums[r]);
        if (lse) lse[(int64_t)head * c->tokens + token] = peaks[r] / LOG2E + logf(sums[r]);
    }
}

void prefill(const bf16 *q, int64_t q_row, const bf16 *k, int64_t k_head, int64_t k_row, const bf16 *v, int64_t v_head,
             int64_t v_row, int tokens, int start, int heads, int kv_heads, int dim, float scale, bf16 *out, int64_t out_row,
             float *lse, int threads) {
    const Chunk c = {q, k, v, q_row, k_head, k_row, v_head, v_row, tokens, start, heads, kv_heads, dim, scale};
    const int blocks = blocks_of(&c);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int i = blocks * kv_heads - 1; i >= 0; i--) attend(&c, i % kv_heads, i / kv_heads, out, out_row, lse);
}

// sums[kv_head][key]: probability that each key received, over all queries of its head; lse as `prefill` gives it.
int column_sums(const bf16 *q, int64_t q_row, const bf16 *k, int64_t k_head, int64_t k_row, int tokens, int start, int heads,
                int kv_heads, int dim, float scale, const float *lse, float *sums, int threads) {
    const Chunk c = {q, k, NULL, q_row, k_head, k_row, 0, 0, tokens, start, heads, kv_heads, dim, scale};
    const int blocks = blocks_of(&c), group = group_of(&c), n = start + tokens, spans = (n + KEYS - 1) / KEYS;
    const int64_t size = (int64_t)dim / 2 * ROWS;
    uint32_t *packed = malloc(sizeof(uint32_t) * blocks * kv_heads * size);
    int32_t *position = malloc(sizeof(int32_t) * blocks * ROWS);
    if (!packed || !position) return -1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int i = 0; i < blocks * kv_heads; i++) {
            int32_t mine[ROWS];
            pack(&c, i % kv_heads, i / kv_heads, packed + i * size, mine);
            if (i % kv_heads == 0) memcpy(position + i / kv_heads * ROWS, mine, sizeof mine);
        }
#pragma omp for schedule(dynamic)
        for (int item = 0; item < spans * kv_heads; item++) {
            const int h = item % kv_heads, first = item / kv_heads * KEYS, keys = n - first < KEYS ? n - first : KEYS;
            float s[KEYS * ROWS], norm[ROWS];
            __m512 total[KEYS];
            for (int j = 0; j < KEYS; j++) total[j] = _mm512_setzero_ps();
            for (int block = 0; block < blocks; block++) {
                const int last = (block + 1) * ROWS < tokens * group ? (block + 1) * ROWS : tokens * group;
                if (start + (last - 1) / group < first) continue;  // these queries come before these keys
                for (int r = 0; r < ROWS; r++) {
                    const int row = block * ROWS + r;
                    norm[r] = row < tokens * group ? lse[(int64_t)(h * group + row % group) * tokens + row / group] : 0;
                }
                __m512 top[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};  // not wanted here
                scores(&c, h, packed + ((int64_t)block * kv_heads + h) * size, position + block * ROWS, first, keys, scale, s, top);
                const __m512 n0 = _mm512_loadu_ps(norm), n1 = _mm512_loadu_ps(norm + 16);
                for (int j = 0; j < keys; j++) {
                    const __m512 a = exp16(_mm512_sub_ps(_mm512_loadu_ps(s + j * ROWS), n0));
                    const __m512 b = exp16(_mm512_sub_ps(_mm512_loadu_ps(s + j * ROWS + 16), n1));
                    total[j] = _mm512_add_ps(total[j], _mm512_add_ps(a, b));
                }
            }
            for (int j = 0; j < keys; j++) sums[(int64_t)h * n + first + j] = _mm512_reduce_add_ps(total[j]);
        }
    }
    free(packed), free(position);
    return 0;
}
#endif

// Attention over block tables on a CPU: ragged decode, store, gather. `attention.py` has the same in torch, and its docs.
//
// A pool is [blocks][K, V][kv_heads][block_size][dim]: entry e of a table row lies in block table[e / block_size]; its key
// and its value are kv_heads * block_size * dim elements apart. Decode cuts every row into spans of SPAN entries, whatever
// the batch and the number of threads, so that a row's result does not depend on who shares the batch. A span is walked in
// tiles of TILE entries, all heads of a tile before the next (so memory is read in order, and the tile ahead is asked for
// early), with an online softmax a head; a second pass puts the spans together.
#include "simd.h"

#ifndef T
enum { SPAN = 256, TILE = 32, MAX_GROUP = 4, MAX_DIM = 512 };

// Bytes of a run of entries of one KV head; used for any dtype.
void kv_store(char *kv, const int64_t *slots, int64_t per_head, const char *k, int64_t k_row, const char *v, int64_t v_row,
              int64_t tokens, int64_t heads, int64_t size, int64_t bytes) {
    const int64_t value = heads * size * bytes;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t slot = per_head ? slots[t * heads + h] : slots[t];
            char *at = kv + (slot / size * 2 * heads * size + h * size + slot % size) * bytes;
            memcpy(at, k + t * k_row + h * bytes, bytes);
            memcpy(at + value, v + t * v_row + h * bytes, bytes);
        }
}

void kv_gather(const char *kv, const int32_t *table, char *k, char *v, int64_t n, int64_t heads, int64_t size,
               int64_t bytes, int threads) {
    const int64_t blocks = (n + size - 1) / size, value = heads * size * bytes;
#pragma omp parallel for collapse(2) num_threads(threads) if (blocks * heads > 64)
    for (int64_t h = 0; h < heads; h++)
        for (int64_t b = 0; b < blocks; b++) {
            const char *from = kv + ((int64_t)table[b] * 2 * heads + h) * size * bytes;
            const int64_t to = (h * n + b * size) * bytes, run = (b == blocks - 1 ? n - b * size : size) * bytes;
            memcpy(k + to, from, run);
            memcpy(v + to, from + value, run);
        }
}

void kv_gather_slots(const char *kv, const int64_t *slots, char *k, char *v, int64_t m, int64_t heads, int64_t size,
                     int64_t bytes, int threads) {
    const int64_t value = heads * size * bytes;
#pragma omp parallel for collapse(2) num_threads(threads) if (m * heads > 1024)
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < m; i++) {
            const int64_t slot = slots[h * m + i];
            const char *from = kv + (slot / size * 2 * heads * size + h * size + slot % size) * bytes;
            memcpy(k + (h * m + i) * bytes, from, bytes);
            memcpy(v + (h * m + i) * bytes, from + value, bytes);
        }
}

#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define NAME(a) CAT(a, SUFFIX)

#define T float
#define SUFFIX f32
#include __FILE__
#undef T
#undef SUFFIX
#define T bf16
#define SUFFIX bf16
#define SIMD HAVE_BF16_SIMD
#include __FILE__
#else

// scores[g][t] = q[g] . rows[t], for G queries that share their keys. Asks for the keys of the tile ahead.
INLINE void NAME(dots)(const T *q, const T *const *rows, const T *const *ahead, int64_t key, int n, int dim, float *scores,
                       const int G) {
#ifdef SIMD
    if (dim % 16 == 0) {
        const __mmask32 tail = dim % 32 ? 0xffff : 0xffffffff;
        for (int t = 0; t < n; t += 16) {  // rows beyond n repeat the last one
            for (int g = 0; g < G; g++) {
                __m512 a[16];
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) a[i] = _mm512_setzero_ps();
                for (int c = 0; c < dim; c += 32) {
                    const __mmask32 m = c + 32 > dim ? tail : 0xffffffff;
                    const __m512bh x = (__m512bh)_mm512_maskz_loadu_epi16(m, q + g * dim + c);
                    if (g == 0)
                        for (int i = 0; i < 16; i++) __builtin_prefetch(ahead[t + i] + key + c, 0, 2);
#pragma GCC unroll 16
                    for (int i = 0; i < 16; i++)
                        a[i] = _mm512_dpbf16_ps(a[i], x, (__m512bh)_mm512_maskz_loadu_epi16(m, rows[t + i] + key + c));
                }
                _mm512_storeu_ps(scores + g * TILE + t, sum_each_of_16(a));
            }
        }
        return;
    }
#endif
    for (int t = 0; t < n; t++)
        for (int g = 0; g < G; g++) {
            float s = 0;
            for (int i = 0; i < dim; i++) s += NAME(load)(q + g * dim + i) * NAME(load)(rows[t] + key + i);
            scores[g * TILE + t] = s;
        }
}

// acc[g] += sum over t of p[g][t] * rows[t]. With SIMD, acc holds the even and the odd elements of each 32 apart.
// Asks for the values of the tile ahead.
INLINE void NAME(weighted)(const float *p, const T *const *rows, const T *const *ahead, int64_t value, int n, int dim,
                           float *acc, int acc_row, const int G) {
#ifdef SIMD
    if (dim % 32 == 0) {
        const __m512i high = _mm512_set1_epi32((int)0xffff0000);
        for (int c = 0; c < dim; c += 32) {
            __m512 even[MAX_GROUP], odd[MAX_GROUP];
            for (int g = 0; g < G; g++) {
                even[g] = _mm512_loadu_ps(acc + g * acc_row + c);
                odd[g] = _mm512_loadu_ps(acc + g * acc_row + c + 16);
            }
            for (int t = 0; t < n; t++) {
                const __m512i x = _mm512_loadu_si512(rows[t] + value + c);
                __builtin_prefetch(ahead[t] + value + c, 0, 2);
                const __m512 lo = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
                const __m512 hi = _mm512_castsi512_ps(_mm512_and_si512(x, high));
                for (int g = 0; g < G; g++) {
                    const __m512 w = _mm512_set1_ps(p[g * TILE + t]);
                    even[g] = _mm512_fmadd_ps(w, lo, even[g]);
                    odd[g] = _mm512_fmadd_ps(w, hi, odd[g]);
                }
            }
            for (int g = 0; g < G; g++) {
                _mm512_storeu_ps(acc + g * acc_row + c, even[g]);
                _mm512_storeu_ps(acc + g * acc_row + c + 16, odd[g]);
            }
        }
        return;
    }
#endif
    for (int g = 0; g < G; g++)
        for (int t = 0; t < n; t++) {
            const T *v = rows[t] + value;
            for (int i = 0; i < dim; i++) acc[g * acc_row + i] += p[g * TILE + t] * NAME(load)(v + i);
        }
}

// Where element i of an accumulator lies: see `weighted`.
INLINE int NAME(place)(int i, int dim) {
#ifdef SIMD
    if (dim % 32 == 0) return i / 32 * 32 + i % 2 * 16 + i % 32 / 2;
#endif
    return i;
}

// Where the keys of entries from .. from + TILE + 15 of a row begin; beyond its last entry, that one's is repeated.
INLINE void NAME(find)(const T **rows, const T *kv, const int32_t *table, int from, int length, int dim, int size,
                       int64_t block) {
    int e = from < length ? from : length - 1, b = e / size, at = e % size;
    for (int t = 0; t < TILE + 16; t++) {
        rows[t] = kv + table[b] * block + at * dim;
        if (from + t + 1 < length && ++at == size) b++, at = 0;
    }
}

// One tile for G queries of one KV head. A query's state is acc[dim], peak, sum, state_row floats in all.
INLINE void NAME(tile)(const T *q, const T *const *rows, const T *const *ahead, int64_t key, int64_t value, int n, int dim,
                       float scale, float *state, int state_row, float *raw, int64_t raw_row, const int G) {
    float s[MAX_GROUP * TILE];
    NAME(dots)(q, rows, ahead, key, n, dim, s, G);
    for (int g = 0; g < G; g++) {
        float *acc = state + g * state_row, *peak = acc + dim, *sum = peak + 1, top = *peak;
        for (int t = 0; t < n; t++) {
            s[g * TILE + t] *= scale;
            top = s[g * TILE + t] > top ? s[g * TILE + t] : top;
        }
        if (raw) memcpy(raw + g * raw_row, s + g * TILE, sizeof(float) * n);
        if (top > *peak) {
            const float shrink = expf(*peak - top);
            *sum *= shrink, *peak = top;
            for (int i = 0; i < dim; i++) acc[i] *= shrink;
        }
        *sum += exp_and_sum(s + g * TILE, n, top);
    }
    NAME(weighted)(s, rows, ahead, value, n, dim, state, state_row, G);
}

int NAME(kv_decode)(const T *q, int64_t q_row, const T *kv, const int32_t *tables, int64_t table_row, const int32_t *lengths,
                    T *out, int64_t out_row, float *mass, int64_t mass_row, int64_t mass_head, int rows, int heads,
                    int kv_heads, int dim, int size, float scale, int threads) {
    const int group = heads / kv_heads;
    const int64_t value = (int64_t)kv_heads * size * dim, block = 2 * value;
    const int state_row = (dim + 2 + 15) / 16 * 16;
    int longest = 0, items = 0;
    int *first = malloc(sizeof(int) * (rows + 1));  // a row's first span among all
    for (int r = 0; r < rows; r++) {
        first[r] = items;
        items += (lengths[r] + SPAN - 1) / SPAN;
        longest = lengths[r] > longest ? lengths[r] : longest;
    }
    first[rows] = items;
    float *states = aligned_alloc(64, sizeof(float) * items * heads * state_row);
    float *raw = mass ? malloc(sizeof(float) * rows * heads * longest) : NULL;
    if (!states || (mass && !raw)) return -1;

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int item = 0; item < items; item++) {
            const T *both[2][TILE + 16], **here = both[0], **ahead = both[1];
            int r = 0;
            while (first[r + 1] <= item) r++;
            const int length = lengths[r], from = (item - first[r]) * SPAN, to = from + SPAN < length ? from + SPAN : length;
            const int32_t *table = tables + r * table_row;
            float *state = states + (int64_t)item * heads * state_row;
            for (int h = 0; h < heads; h++) {
                memset(state + h * state_row, 0, sizeof(float) * state_row);
                state[h * state_row + dim] = -1e30f;
            }
            NAME(find)(here, kv, table, from, length, dim, size, block);
            for (int t = from; t < to; t += TILE) {
                const int n = to - t < TILE ? to - t : TILE;
                NAME(find)(ahead, kv, table, t + TILE, length, dim, size, block);
                for (int head = 0; head < heads;) {
                    const int h = head / group, left = (h + 1) * group - head, some = left < MAX_GROUP ? left : MAX_GROUP;
                    const int64_t key = (int64_t)h * size * dim;
                    float *scores = raw ? raw + ((int64_t)r * heads + head) * longest + t : NULL;
#define GO(G) \
    NAME(tile)(q + r * q_row + head * dim, here, ahead, key, key + value, n, dim, scale, state + head * state_row, state_row, \
               scores, longest, G)
                    switch (some) {  // a constant G lets the compiler keep the accumulators in registers
                        case 1: GO(1); break;
                        case 2: GO(2); break;
                        case 3: GO(3); break;
                        default: GO(4);
                    }
#undef GO
                    head += some;
                }
                const T **swap = here;
                here = ahead, ahead = swap;
            }
        }
#pragma omp for schedule(static)
        for (int rh = 0; rh < rows * kv_heads; rh++) {  // put the spans together
            const int r = rh / kv_heads, h = rh % kv_heads;
            float *to_mass = mass ? mass + r * mass_row + h * mass_head : NULL;
            if (mass) memset(to_mass, 0, sizeof(float) * lengths[r]);
            for (int g = 0; g < group; g++) {
                float acc[MAX_DIM] = {0}, peak = -1e30f, sum = 0;
                const int64_t apart = (int64_t)heads * state_row;
                const float *begin = states + first[r] * apart + (h * group + g) * state_row, *end = begin + (first[r + 1] - first[r]) * apart;
                for (const float *s = begin; s < end; s += apart) peak = s[dim] > peak ? s[dim] : peak;
                for (const float *s = begin; s < end; s += apart) {
                    const float w = expf(s[dim] - peak);
                    sum += w * s[dim + 1];
                    for (int i = 0; i < dim; i++) acc[i] += w * s[i];
                }
                T *to = out + r * out_row + (int64_t)(h * group + g) * dim;
                for (int i = 0; i < dim; i++) NAME(save)(to + i, acc[NAME(place)(i, dim)] / sum);
                if (mass) {
                    float *scores = raw + ((int64_t)r * heads + h * group + g) * longest;
                    exp_and_sum(scores, lengths[r], peak);
                    for (int t = 0; t < lengths[r]; t++) to_mass[t] += scores[t] / sum;
                }
            }
        }
    }
    free(raw), free(states), free(first);
    return 0;
}
#undef SIMD
#endif

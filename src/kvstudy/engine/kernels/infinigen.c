// InfiniGen's heavy loops on a CPU: speculated scores, the best of them, and copying what is fetched.
// `policies/infinigen_kernel.py` has the calls; the rule (number of entries) stays in `infinigen_rules`.
#include "simd.h"

enum { BLOCK = 64, MOST_GROUP = 4 };

static inline float rounded_f32(float f) { return f; }
static inline float rounded_bf16(float f) { return f32_of_bf16(bf16_of_f32(f)); }

// By lanes: a compiler that minds NaNs makes no vectors of one running maximum.
static float greatest_of(const float *x, long n) {
    enum { LANES = 64 };
    float most[LANES];
    for (int l = 0; l < LANES; l++) most[l] = x[0];
    long j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int l = 0; l < LANES; l++) most[l] = x[j + l] > most[l] ? x[j + l] : most[l];
    for (int l = 0; j < n; j++, l++) most[l] = x[j] > most[l] ? x[j] : most[l];
    float greatest = most[0];
    for (int l = 1; l < LANES; l++) greatest = most[l] > greatest ? most[l] : greatest;
    return greatest;
}

// Of a group's scores own[group][n] each place's greatest, of several queries each taken from its own greatest score and
// a little less for each query, so that what they like best is not tied.
static const float APART = 1.0f / (1 << 20);
static void best_of_group(const float *own, long group, long n, float *out) {
    if (group == 1) { memcpy(out, own, sizeof(float) * n); return; }
    for (long g = 0; g < group; g++) {
        const float *mine = own + g * n;
        const float greatest = greatest_of(mine, n);
        for (long j = 0; j < n; j++) {
            const float below = mine[j] - greatest - g * APART;
            out[j] = !g || below > out[j] ? below : out[j];
        }
    }
}

// How many of n scores are within alpha of the greatest (rule `qualifying`, strict).
static long within(const float *scores, long n, float alpha) {
    const float floor = greatest_of(scores, n) - alpha;
    int32_t count = 0;
    for (long j = 0; j < n; j++) count += scores[j] > floor;
    return count;
}

// scores[r][h][j] for j < held[r]: the group's best (above) of (q turned) . partial[r][h][:, j], and counts[r][h], how
// many of them are within alpha. q [rows][heads][group][dim] becomes columns wide by turn [rows][heads][dim][columns]
// and is rounded as torch rounds it. partial[r] points to one layer's [heads][columns][room[r]]. Queries go by G at a
// time, so that a partial key is converted once for all of them; sums are in the order of the columns. Returns -1 where
// there is no memory.
#define SCORES(SUFFIX, T) \
    static inline void turned_##SUFFIX(const T *q, const T *turn, long dim, long columns, float scale, float *out) { \
        for (long c = 0; c < columns; c++) out[c] = 0; \
        for (long d = 0; d < dim; d++) { \
            const float weight = load_##SUFFIX(q + d); \
            for (long c = 0; c < columns; c++) out[c] += weight * load_##SUFFIX(turn + d * columns + c); \
        } \
        for (long c = 0; c < columns; c++) out[c] = rounded_##SUFFIX(rounded_##SUFFIX(out[c]) * scale); \
    } \
    static inline __attribute__((always_inline)) void block_##SUFFIX( \
        const float *q, const T *keys, long columns, long room, long n, float *own, long line_floats, const int G) { \
        float sum[MOST_GROUP][BLOCK] = {{0}}; \
        for (long c = 0; c < columns; c++) { \
            float key[BLOCK]; \
            const T *line = keys + c * room; \
            if (n == BLOCK) for (int j = 0; j < BLOCK; j++) key[j] = load_##SUFFIX(line + j); \
            else for (long j = 0; j < BLOCK; j++) key[j] = j < n ? load_##SUFFIX(line + j) : 0; \
            for (int g = 0; g < G; g++) { \
                const float weight = q[g * columns + c]; \
                for (int j = 0; j < BLOCK; j++) sum[g][j] += weight * key[j]; \
            } \
        } \
        for (int g = 0; g < G; g++) memcpy(own + g * line_floats, sum[g], sizeof(float) * n); \
    } \
    int ig_scores_##SUFFIX(const T *q, const T *turn, float scale, const int64_t *partial, const int64_t *held, \
                           const int64_t *room, long rows, long heads, long group, long dim, long columns, float alpha, \
                           float *scores, long width, int64_t *counts, int threads) { \
        int failed = 0; \
        _Pragma("omp parallel num_threads(threads)") \
        { \
            float *own = malloc(sizeof(float) * group * (width + columns)), *queries = own + group * width; \
            if (!own) failed = -1; \
            _Pragma("omp for collapse(2) schedule(dynamic, 1)") \
            for (long r = 0; r < rows; r++) \
                for (long h = 0; h < heads; h++) { \
                    if (!own) continue; \
                    const long at = r * heads + h; \
                    for (long g = 0; g < group; g++) \
                        turned_##SUFFIX(q + (at * group + g) * dim, turn + at * dim * columns, dim, columns, scale, \
                                        queries + g * columns); \
                    const T *keys = (const T *)partial[r] + h * columns * room[r]; \
                    for (long first = 0; first < held[r]; first += BLOCK) { \
                        const long n = held[r] - first < BLOCK ? held[r] - first : BLOCK; \
                        for (long g = 0; g < group; g += MOST_GROUP) { \
                            const float *mine = queries + g * columns; \
                            float *to = own + g * held[r] + first; \
                            switch (group - g) { \
                                case 1: block_##SUFFIX(mine, keys + first, columns, room[r], n, to, held[r], 1); break; \
                                case 2: block_##SUFFIX(mine, keys + first, columns, room[r], n, to, held[r], 2); break; \
                                case 3: block_##SUFFIX(mine, keys + first, columns, room[r], n, to, held[r], 3); break; \
                                default: block_##SUFFIX(mine, keys + first, columns, room[r], n, to, held[r], 4); \
                            } \
                        } \
                    } \
                    best_of_group(own, group, held[r], scores + at * width); \
                    counts[at] = within(scores + at * width, held[r], alpha); \
                } \
            free(own); \
        } \
        return failed; \
    }
SCORES(f32, float)
SCORES(bf16, bf16)

// Floats as integers in the same order.
static inline uint32_t rank_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The indices of the m greatest of n scores, rising; of equals the first. The m-th greatest rank is found bit by bit, by
// counting, which a CPU does sixteen scores at a time. `picked` has room for m + 1.
static void top(const float *scores, long n, long m, uint32_t *ranks, int64_t *picked) {
    for (long i = 0; i < n; i++) ranks[i] = rank_of(scores[i]);
    uint32_t least = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t wanted = least | 1u << bit;
        int32_t count = 0;
        for (long i = 0; i < n; i++) count += ranks[i] >= wanted;
        if (count >= m) least = wanted;
        if (count == m) break;
    }
    int32_t above = 0;
    for (long i = 0; i < n; i++) above += ranks[i] > least;
    long ties = m - above, at = 0;
    for (long i = 0; i < n && at < m; i++) {
        const int tie = ranks[i] == least && ties > 0;
        picked[at] = i;
        at += (ranks[i] > least) | tie;
        ties -= tie;
    }
    picked[m] = 0;
}

enum { AHEAD = 12 };

static inline const char *key_of(int64_t entry, const int32_t *table, const char *kv, long heads, long h,
                                 long block_size, long row_bytes) {
    long block = table[entry / block_size];
    return kv + ((block * 2 * heads + h) * block_size + entry % block_size) * row_bytes;
}

// Each row's and head's numbers[r] best entries into entries [rows][heads][places], numbers[r] < places.
int ig_select(const float *scores, long width, const int64_t *held, const int64_t *numbers, long rows, long heads,
              long places, int64_t *entries, int threads) {
    int failed = 0;
    #pragma omp parallel num_threads(threads)
    {
        uint32_t *ranks = malloc(sizeof(uint32_t) * width);
        if (!ranks) failed = -1;
        #pragma omp for collapse(2) schedule(dynamic, 1)
        for (long r = 0; r < rows; r++)
            for (long h = 0; h < heads; h++)
                if (numbers[r] && ranks)
                    top(scores + (r * heads + h) * width, held[r], numbers[r], ranks, entries + (r * heads + h) * places);
        free(ranks);
    }
    return failed;
}

// Their keys and values into staging [rows][2][heads][places] of row_bytes.
void ig_gather(const int64_t *entries, const int64_t *numbers, long rows, long heads, const int32_t *tables, long blocks,
               const char *kv, long block_size, long row_bytes, char *staging, long places, int threads) {
    #pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const int64_t *mine = entries + (r * heads + h) * places;
            char *keys = staging + (r * 2 * heads + h) * places * row_bytes;
            char *values = keys + heads * places * row_bytes;
            const int32_t *table = tables + r * blocks;
            for (long j = 0; j < numbers[r]; j++) {
                if (j + AHEAD < numbers[r]) {  // entries lie apart: fetch what comes while this one is copied
                    const char *later = key_of(mine[j + AHEAD], table, kv, heads, h, block_size, row_bytes);
                    for (long b = 0; b < row_bytes; b += 64) {
                        __builtin_prefetch(later + b);
                        __builtin_prefetch(later + heads * block_size * row_bytes + b);
                    }
                }
                const char *key = key_of(mine[j], table, kv, heads, h, block_size, row_bytes);
                memcpy(keys + j * row_bytes, key, row_bytes);
                memcpy(values + j * row_bytes, key + heads * block_size * row_bytes, row_bytes);
            }
        }
}

/* Successive cancellation as a quantiser, as reference/polar.py, on 64 blocks side by side.

   A row holds one position of 64 blocks: 64 log-likelihood ratios of int8, or 64 bits in a word.
   So every step is one instruction for all blocks, decisions are masks, nothing is transposed. */
#include "native.h"
#include "polar.h"
#include "threads.h"

#include <stdlib.h>

enum { LANES = 64 };
typedef gw_polar_rows rows_t;

#if defined(__x86_64__)
#include <immintrin.h>

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw")))
#define V __m512i
#define BYTES 64
#define WORD uint64_t
#define load(p) _mm512_loadu_si512(p)
#define store(p, v) _mm512_storeu_si512(p, v)
#define fill(x) _mm512_set1_epi8(x)
#define absolute(a) _mm512_abs_epi8(a)
#define differ(a, b) _mm512_xor_si512(a, b)
#define plus(a, b) _mm512_add_epi8(a, b)
#define minus(a, b) _mm512_sub_epi8(a, b)
#define min_u(a, b) _mm512_min_epu8(a, b)
#define max_u(a, b) _mm512_max_epu8(a, b)
#define plus_u(a, b) _mm512_adds_epu8(a, b)
#define minus_u(a, b) _mm512_subs_epu8(a, b)
#define plus_s(a, b) _mm512_max_epi8(_mm512_adds_epi8(a, b), fill(-127))
#define half_up(a) _mm512_avg_epu8(a, _mm512_setzero_si512())
#define like(a, s) turned(a, negative(s))
#define turned(a, w) _mm512_mask_sub_epi8(a, w, _mm512_setzero_si512(), a)
#define negative(a) _mm512_movepi8_mask(a)
#define equal(a, b) _mm512_cmpeq_epi8_mask(a, b)
#include "polar_rows.h"

/* Bytes of -1 where the bits of a word are one. */
__attribute__((target("avx2"))) static inline __m256i spread_avx2(uint32_t word) {
    const __m256i byte = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                          2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i place = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)word), byte);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, place), place);
}

__attribute__((target("avx2"))) static inline __m256i turned_avx2(__m256i v, uint32_t word) {
    const __m256i ones = spread_avx2(word);
    return _mm256_sub_epi8(_mm256_xor_si256(v, ones), ones);
}

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2")))
#define V __m256i
#define BYTES 32
#define WORD uint32_t
#define load(p) _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define store(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), v)
#define fill(x) _mm256_set1_epi8(x)
#define absolute(a) _mm256_abs_epi8(a)
#define differ(a, b) _mm256_xor_si256(a, b)
#define plus(a, b) _mm256_add_epi8(a, b)
#define minus(a, b) _mm256_sub_epi8(a, b)
#define min_u(a, b) _mm256_min_epu8(a, b)
#define max_u(a, b) _mm256_max_epu8(a, b)
#define plus_u(a, b) _mm256_adds_epu8(a, b)
#define minus_u(a, b) _mm256_subs_epu8(a, b)
#define plus_s(a, b) _mm256_max_epi8(_mm256_adds_epi8(a, b), fill(-127))
#define half_up(a) _mm256_avg_epu8(a, _mm256_setzero_si256())
#define like(a, s) _mm256_sign_epi8(a, _mm256_or_si256(s, fill(1)))
#define turned(a, w) turned_avx2(a, w)
#define negative(a) (uint32_t)_mm256_movemask_epi8(a)
#define equal(a, b) (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b))
#include "polar_rows.h"
#endif

/* For every other processor, in plain C. */
static int magnitude(int a) { return a < 0 ? -a : a; }
static int above_zero(int a) { return a > 0 ? a : 0; }

static void f_rows_plain(const int8_t *alpha, int64_t half, int corrected, int8_t *out) {
    const int8_t *later = alpha + half * LANES;
    for (int64_t i = 0; i < half * LANES; i++) {
        const int p = magnitude(alpha[i]), q = magnitude(later[i]);
        int m = p < q ? p : q;
        if (corrected)
            m = above_zero(m + (above_zero(16 - p - q) + 3) / 4 -
                           (above_zero(16 - magnitude(p - q)) + 3) / 4);
        out[i] = (int8_t)((alpha[i] < 0) != (later[i] < 0) ? -m : m);
    }
}

static void g_rows_plain(const int8_t *alpha, const uint64_t *beta, int64_t half, int8_t *out) {
    const int8_t *later = alpha + half * LANES;
    for (int64_t i = 0; i < half * LANES; i++) {
        const int one = beta && (beta[i / LANES] >> i % LANES & 1);
        const int sum = later[i] + (one ? -alpha[i] : alpha[i]);
        out[i] = (int8_t)(sum > 127 ? 127 : sum < -127 ? -127 : sum);
    }
}

static void spread_rows_plain(const uint64_t *bits, int64_t rows, int magnitude, int8_t *out) {
    for (int64_t i = 0; i < rows * LANES; i++)
        out[i] = (int8_t)(bits[i / LANES] >> i % LANES & 1 ? -magnitude : magnitude);
}

static void decide_rows_plain(const int8_t *alpha, int64_t rows, uint64_t *beta) {
    for (int64_t i = 0; i < rows; i++) {
        uint64_t bits = 0;
        for (int lane = 0; lane < LANES; lane++)
            bits |= (uint64_t)(alpha[i * LANES + lane] < 0) << lane;
        beta[i] = bits;
    }
}

static void parity_rows_plain(const int8_t *alpha, int64_t rows, uint64_t *beta) {
    decide_rows_plain(alpha, rows, beta);
    for (int lane = 0; lane < LANES; lane++) {
        int64_t least = 0;
        uint64_t odd = 0;
        for (int64_t i = 0; i < rows; i++) {
            odd ^= beta[i] >> lane & 1;
            if (magnitude(alpha[i * LANES + lane]) < magnitude(alpha[least * LANES + lane]))
                least = i;
        }
        beta[least] ^= odd << lane;
    }
}

static const rows_t rows_plain = {f_rows_plain, g_rows_plain, spread_rows_plain,
                                  decide_rows_plain, parity_rows_plain};

/* `widest`: 0 for plain C, 1 for AVX2 too, 2 for AVX-512 too; what the processor lacks is left out.
   Returns what `rows` is. */
static int32_t widest = 2;

const gw_polar_rows *gw_polar_best_rows(void) {
#if defined(__x86_64__)
    if (widest >= 2 && __builtin_cpu_supports("avx512bw")) return &rows_avx512;
    if (widest >= 1 && __builtin_cpu_supports("avx2")) return &rows_avx2;
#endif
    return &rows_plain;
}

/* For tests: the same bits must come out of all of them. */
void gw_polar_widest(int32_t level) { widest = level; }

typedef struct {
    const rows_t *rows;
    const uint8_t *kinds; /* a heap: the root at 1, the halves of node k at 2k and 2k + 1 */
    int corrected;
} tree;

/* The bits of n rows under node `at`; scratch has room for n rows. */
static void cancel(const tree *t, int64_t at, const int8_t *alpha, int64_t n, int8_t *scratch,
                   uint64_t *beta) {
    const int64_t half = n / 2;
    int8_t *deeper = scratch + half * LANES;
    switch (t->kinds[at]) {
    case GW_POLAR_FROZEN:
        memset(beta, 0, (size_t)n * sizeof *beta);
        return;
    case GW_POLAR_FREE:
        t->rows->decide(alpha, n, beta);
        return;
    case GW_POLAR_PARITY:
        t->rows->parity(alpha, n, beta);
        return;
    case GW_POLAR_REPETITION:
        for (int64_t left = half; left > 0; left /= 2, alpha = scratch)
            t->rows->g(alpha, 0, left, scratch);
        t->rows->decide(alpha, 1, beta);
        for (int64_t i = 1; i < n; i++) beta[i] = beta[0];
        return;
    }
    if (t->kinds[2 * at] == GW_POLAR_FROZEN) {
        t->rows->g(alpha, 0, half, scratch);
        cancel(t, 2 * at + 1, scratch, half, deeper, beta + half);
        memcpy(beta, beta + half, (size_t)half * sizeof *beta);
        return;
    }
    t->rows->f(alpha, half, t->corrected, scratch);
    cancel(t, 2 * at, scratch, half, deeper, beta);
    t->rows->g(alpha, beta, half, scratch);
    cancel(t, 2 * at + 1, scratch, half, deeper, beta + half);
    for (int64_t i = 0; i < half; i++) beta[i] ^= beta[half + i];
}

typedef struct {
    tree tree;
    const int8_t *llr;     /* null if there are words of signs */
    const uint64_t *words; /* ones where the ratio is -magnitude, not magnitude */
    int magnitude;
    int64_t n;
    uint64_t *bits;
    int failed;
} quantise_job;

static void quantise_groups(void *argument, int64_t first, int64_t last) {
    quantise_job *job = argument;
    const int64_t n = job->n;
    int8_t *scratch = malloc((size_t)((job->llr ? 1 : 2) * n * LANES));
    if (!scratch) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t g = first; g < last; g++) {
        const int8_t *llr = job->llr + g * n * LANES;
        if (!job->llr) {
            llr = scratch + n * LANES;
            job->tree.rows->spread(job->words + g * n, n, job->magnitude, scratch + n * LANES);
        }
        cancel(&job->tree, 1, llr, n, scratch, job->bits + g * n);
    }
    free(scratch);
}

/* llr [groups][n][64], kinds [2n], bits [groups][n]. Returns 1 if there is no memory, else 0. */
int32_t gw_polar_quantise(const int8_t *llr, int64_t groups, int64_t n, const uint8_t *kinds,
                          int32_t corrected, uint64_t *bits) {
    quantise_job job = {{gw_polar_best_rows(), kinds, corrected}, llr, 0, 0, n, bits, 0};
    gw_parallel(quantise_groups, &job, groups, 1, 1 + 16384 / n);
    return job.failed;
}

/* The same, of ratios that are all `magnitude` but for the sign: words [groups][n]. */
int32_t gw_polar_quantise_bits(const uint64_t *words, int32_t magnitude, int64_t groups, int64_t n,
                               const uint8_t *kinds, int32_t corrected, uint64_t *bits) {
    quantise_job job = {{gw_polar_best_rows(), kinds, corrected}, 0, words, magnitude, n, bits, 0};
    gw_parallel(quantise_groups, &job, groups, 1, 1 + 16384 / n);
    return job.failed;
}

/* Of n channels the log-likelihood ratio of each input if all before it are zero, 64 samples at a
   time; adds cost[ratio + 127] over the samples to `total` [n]. Room: 2 n rows. */
static void genie_group(const rows_t *rows, const int8_t *llr, int64_t n, const int32_t *cost,
                        int8_t *room, int64_t *total) {
    const int8_t *from = llr;
    int8_t *to = room, *other = room + n * LANES;
    for (int64_t size = n; size > 1; size /= 2) {
        for (int64_t at = 0; at < n; at += size) {
            rows->f(from + at * LANES, size / 2, 1, to + at * LANES);
            rows->g(from + at * LANES, 0, size / 2, to + (at + size / 2) * LANES);
        }
        from = to;
        to = other;
        other = (int8_t *)from;
    }
    for (int64_t i = 0; i < n; i++)
        for (int lane = 0; lane < LANES; lane++) total[i] += cost[from[i * LANES + lane] + 127];
}

/* llr [groups][n][64]; total [n] is added to. Returns 1 if there is no memory, else 0. */
int32_t gw_polar_genie(const int8_t *llr, int64_t groups, int64_t n, const int32_t *cost,
                       int64_t *total) {
    int8_t *room = malloc((size_t)(2 * n * LANES));
    if (!room) return 1;
    const rows_t *rows = gw_polar_best_rows();
    for (int64_t g = 0; g < groups; g++)
        genie_group(rows, llr + g * n * LANES, n, cost, room, total);
    free(room);
    return 0;
}

/* x[j] ^= x[j + h] for h = 1, 2, 4 ... n / 2, three distances at a time: fewer passes. */
GW_INLINE void transform(uint64_t *x, int64_t n) {
    int64_t h = 1;
    for (; 8 * h <= n; h *= 8)
        for (int64_t i = 0; i < n; i += 8 * h)
            for (int64_t j = i; j < i + h; j++) {
                uint64_t a[8];
                for (int k = 0; k < 8; k++) a[k] = x[j + k * h];
                for (int k = 0; k < 8; k += 2) a[k] ^= a[k + 1];
                for (int k = 0; k < 8; k += 4) a[k] ^= a[k + 2], a[k + 1] ^= a[k + 3];
                for (int k = 0; k < 4; k++) a[k] ^= a[k + 4];
                for (int k = 0; k < 8; k++) x[j + k * h] = a[k];
            }
    for (; h < n; h *= 2)
        for (int64_t i = 0; i < n; i += 2 * h)
            for (int64_t j = i; j < i + h; j++) x[j] ^= x[j + h];
}

typedef struct {
    const uint64_t *in;
    int64_t n;
    uint64_t *out;
} transform_job;

GW_CLONES static void transform_groups(void *argument, int64_t first, int64_t last) {
    const transform_job *job = argument;
    for (int64_t g = first; g < last; g++) {
        memcpy(job->out + g * job->n, job->in + g * job->n, (size_t)job->n * sizeof *job->out);
        transform(job->out + g * job->n, job->n);
    }
}

/* in and out [groups][n]. */
void gw_polar_transform(const uint64_t *in, int64_t groups, int64_t n, uint64_t *out) {
    transform_job job = {in, n, out};
    gw_parallel(transform_groups, &job, groups, 1, 1 + (1 << 17) / n);
}

typedef struct {
    const float *x;
    float factor;
    int8_t *out;
} ratios_job;

GW_CLONES static void ratios_part(void *argument, int64_t first, int64_t last) {
    const ratios_job job = *(const ratios_job *)argument; /* bytes stored could change the other */
    const float magic = 0x1.8p23f; /* added and taken away it rounds to whole numbers, ties to even */
    for (int64_t i = first; i < last; i++) {
        float ratio = job.x[i] * job.factor;
        ratio = ratio > 127.0f ? 127.0f : ratio;
        ratio = ratio < -127.0f ? -127.0f : ratio;
        job.out[i] = (int8_t)(int32_t)((ratio + magic) - magic);
    }
}

/* out = x * factor, rounded, within -127 .. 127. */
void gw_polar_ratios(const float *x, float factor, int64_t count, int8_t *out) {
    ratios_job job = {x, factor, out};
    gw_parallel(ratios_part, &job, count, 64, 1 << 18);
}

typedef struct {
    const float *x;
    float factor;
    int32_t bins;
    const int8_t *table;
    const uint8_t *labels;
    int8_t *out;
} lookup_job;

enum { PIECE = 256 };

GW_CLONES static void lookup_part(void *argument, int64_t first, int64_t last) {
    const lookup_job job = *(const lookup_job *)argument;
    const float top = (float)(job.bins - 1), half = 0.5f * (float)job.bins;
    int32_t at[PIECE];
    for (int64_t start = first; start < last; start += PIECE) {
        const int64_t n = last - start < PIECE ? last - start : PIECE;
        for (int64_t i = 0; i < n; i++) {
            float place = job.x[start + i] * job.factor + half;
            place = place < top ? place : top;
            place = place > 0.0f ? place : 0.0f;
            at[i] = (int32_t)place + job.labels[start + i] * job.bins;
        }
        for (int64_t i = 0; i < n; i++) job.out[start + i] = job.table[at[i]];
    }
}

/* table [labels][bins] at each label and bin floor(x * factor + bins / 2), the nearest that exists. */
void gw_polar_lookup(const float *x, float factor, int32_t bins, const int8_t *table,
                     const uint8_t *labels, int64_t count, int8_t *out) {
    lookup_job job = {x, factor, bins, table, labels, out};
    gw_parallel(lookup_part, &job, count, PIECE, 1 << 17);
}

typedef struct {
    const uint8_t *bits;
    int32_t plane;
    uint8_t *labels;
} label_job;

GW_CLONES static void label_part(void *argument, int64_t first, int64_t last) {
    const label_job job = *(const label_job *)argument;
    for (int64_t start = first; start < last; start += 8) {
        uint64_t eight = job.bits[start / 8] * 0x0101010101010101u & 0x8040201008040201u, old = 0;
        eight = ((eight + 0x7F7F7F7F7F7F7F7Fu) | eight) >> 7 & 0x0101010101010101u;
        const size_t n = last - start < 8 ? (size_t)(last - start) : 8;
        memcpy(&old, job.labels + start, n);
        old |= eight << job.plane;
        memcpy(job.labels + start, &old, n);
    }
}

/* Sets bit `plane` of each label where the packed bit is one. */
void gw_polar_label(const uint8_t *bits, int32_t plane, int64_t count, uint8_t *labels) {
    label_job job = {bits, plane, labels};
    gw_parallel(label_part, &job, count, 64, 1 << 18);
}

typedef struct {
    const uint8_t *labels;
    const float *points;
    float *out;
} points_job;

GW_CLONES static void points_part(void *argument, int64_t first, int64_t last) {
    const points_job job = *(const points_job *)argument;
    for (int64_t i = first; i < last; i++) job.out[i] = job.points[job.labels[i]];
}

/* points has 256 entries. */
void gw_polar_points(const uint8_t *labels, const float *points, int64_t count, float *out) {
    points_job job = {labels, points, out};
    gw_parallel(points_part, &job, count, 64, 1 << 18);
}

/* Successive cancellation as a quantiser, as reference/polar.py, on 64 blocks side by side.

   A row holds one position of 64 blocks: 64 log-likelihood ratios of int8, or 64 bits in a word.
   So every step is one instruction for all blocks, decisions are masks, nothing is transposed.
   Where there are fewer blocks rows are narrower, and an instruction does several of them. */
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

static void f_rows_plain(const int8_t *alpha, int64_t count, int corrected, int8_t *out) {
    const int8_t *later = alpha + count;
    for (int64_t i = 0; i < count; i++) {
        const int p = magnitude(alpha[i]), q = magnitude(later[i]);
        int m = p < q ? p : q;
        if (corrected)
            m = above_zero(m + (above_zero(16 - p - q) + 3) / 4 -
                           (above_zero(16 - magnitude(p - q)) + 3) / 4);
        out[i] = (int8_t)((alpha[i] < 0) != (later[i] < 0) ? -m : m);
    }
}

static void g_rows_plain(const int8_t *alpha, const uint8_t *beta, int64_t count, int8_t *out) {
    const int8_t *later = alpha + count;
    for (int64_t i = 0; i < count; i++) {
        const int one = beta && (beta[i / 8] >> i % 8 & 1);
        const int sum = later[i] + (one ? -alpha[i] : alpha[i]);
        out[i] = (int8_t)(sum > 127 ? 127 : sum < -127 ? -127 : sum);
    }
}

static void spread_rows_plain(const uint8_t *bits, int64_t count, int magnitude, int8_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = (int8_t)(bits[i / 8] >> i % 8 & 1 ? -magnitude : magnitude);
}

static void decide_rows_plain(const int8_t *alpha, int64_t count, uint8_t *beta) {
    for (int64_t i = 0; i < count; i += 8) {
        int bits = 0;
        for (int k = 0; k < 8; k++) bits |= (alpha[i + k] < 0) << k;
        beta[i / 8] = (uint8_t)bits;
    }
}

static void parity_rows_plain(const int8_t *alpha, int64_t rows, int64_t lanes, uint8_t *beta) {
    decide_rows_plain(alpha, rows * lanes, beta);
    for (int64_t lane = 0; lane < lanes; lane++) {
        int64_t least = lane;
        int odd = 0;
        for (int64_t i = lane; i < rows * lanes; i += lanes) {
            odd ^= alpha[i] < 0;
            if (magnitude(alpha[i]) < magnitude(alpha[least])) least = i;
        }
        beta[least / 8] ^= (uint8_t)(odd << least % 8);
    }
}

static const rows_t rows_plain = {f_rows_plain, g_rows_plain, spread_rows_plain,
                                  decide_rows_plain, parity_rows_plain};

static int32_t widest = 2;

int32_t gw_polar_level(void) { return widest; }

const gw_polar_rows *gw_polar_best_rows(void) {
#if defined(__x86_64__)
    if (widest >= 2 && __builtin_cpu_supports("avx512bw")) return &rows_avx512;
    if (widest >= 1 && __builtin_cpu_supports("avx2")) return &rows_avx2;
#endif
    return &rows_plain;
}

/* For tests: the same bits must come out of all levels. What the processor lacks is left out. */
void gw_polar_widest(int32_t level) { widest = level; }

typedef struct {
    const rows_t *rows;
    const uint8_t *kinds; /* a heap: the root at 1, the halves of node k at 2k and 2k + 1 */
    int corrected;
} tree;

/* to ^= from; never more than `bytes`, a power of two. */
GW_INLINE void add_bits(uint8_t *to, const uint8_t *from, int64_t bytes) {
    if (bytes < 8) {
        for (int64_t i = 0; i < bytes; i++) to[i] ^= from[i];
        return;
    }
    for (int64_t i = 0; i < bytes; i += 8) {
        uint64_t a, b;
        memcpy(&a, to + i, 8);
        memcpy(&b, from + i, 8);
        a ^= b;
        memcpy(to + i, &a, 8);
    }
}

/* The bits of n rows under node `at`; scratch has room for n rows. Whatever lies after the bits of a
   node is found after them, so that it does not matter if they are written too far. */
GW_INLINE void cancel_node(const tree *t, int64_t at, const int8_t *alpha, int64_t n,
                           int64_t lanes, int8_t *scratch, uint8_t *beta,
                           void (*below)(const tree *, int64_t, const int8_t *, int64_t, int64_t,
                                         int8_t *, uint8_t *)) {
    const int64_t half = n / 2, count = half * lanes, bytes = count / 8;
    int8_t *deeper = scratch + count;
    switch (t->kinds[at]) {
    case GW_POLAR_FROZEN:
        memset(beta, 0, (size_t)(n * lanes / 8));
        return;
    case GW_POLAR_FREE:
        t->rows->decide(alpha, n * lanes, beta);
        return;
    case GW_POLAR_PARITY:
        t->rows->parity(alpha, n, lanes, beta);
        return;
    case GW_POLAR_REPETITION:
        for (int64_t left = count; left >= lanes; left /= 2, alpha = scratch)
            t->rows->g(alpha, 0, left, scratch);
        t->rows->decide(alpha, lanes, beta);
        for (int64_t i = 1; i < n; i++) memcpy(beta + i * lanes / 8, beta, (size_t)lanes / 8);
        return;
    }
    if (t->kinds[2 * at] == GW_POLAR_FROZEN) {
        t->rows->g(alpha, 0, count, scratch);
        below(t, 2 * at + 1, scratch, half, lanes, deeper, beta + bytes);
        memcpy(beta, beta + bytes, (size_t)bytes);
        return;
    }
    t->rows->f(alpha, count, t->corrected, scratch);
    below(t, 2 * at, scratch, half, lanes, deeper, beta);
    t->rows->g(alpha, beta, count, scratch);
    below(t, 2 * at + 1, scratch, half, lanes, deeper, beta + bytes);
    add_bits(beta, beta + bytes, bytes);
}

/* Widths that the compiler knows. */
static void cancel_64(const tree *t, int64_t at, const int8_t *alpha, int64_t n, int64_t lanes,
                      int8_t *scratch, uint8_t *beta) {
    (void)lanes;
    cancel_node(t, at, alpha, n, LANES, scratch, beta, cancel_64);
}

static void cancel_8(const tree *t, int64_t at, const int8_t *alpha, int64_t n, int64_t lanes,
                     int8_t *scratch, uint8_t *beta) {
    (void)lanes;
    cancel_node(t, at, alpha, n, 8, scratch, beta, cancel_8);
}

static void cancel_any(const tree *t, int64_t at, const int8_t *alpha, int64_t n, int64_t lanes,
                       int8_t *scratch, uint8_t *beta) {
    cancel_node(t, at, alpha, n, lanes, scratch, beta, cancel_any);
}

static void cancel(const tree *t, const int8_t *alpha, int64_t n, int64_t lanes, int8_t *scratch,
                   uint8_t *beta) {
    if (lanes == LANES)
        cancel_64(t, 1, alpha, n, lanes, scratch, beta);
    else if (lanes == 8)
        cancel_8(t, 1, alpha, n, lanes, scratch, beta);
    else
        cancel_any(t, 1, alpha, n, lanes, scratch, beta);
}

typedef struct {
    tree tree;
    const int8_t *llr;    /* null if there are bits of signs */
    const uint8_t *signs; /* ones where the ratio is -magnitude, not magnitude */
    int magnitude;
    int64_t n, lanes;
    uint8_t *bits;
    int failed;
} quantise_job;

static void quantise_groups(void *argument, int64_t first, int64_t last) {
    quantise_job *job = argument;
    const int64_t n = job->n, lanes = job->lanes, count = n * lanes;
    const int narrow = lanes < LANES; /* then work on copies, with slack */
    const int copied = narrow || !job->llr;
    const int64_t ratios = (copied ? 2 : 1) * count;
    int8_t *scratch = malloc((size_t)(ratios + GW_POLAR_SLACK + (narrow ? count / 8 : 0) +
                                      GW_POLAR_SLACK));
    if (!scratch) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    int8_t *copy = scratch; /* before what is made of it: slack may be overwritten */
    int8_t *room = copied ? scratch + count : scratch;
    uint8_t *found = (uint8_t *)scratch + ratios + GW_POLAR_SLACK;
    for (int64_t g = first; g < last; g++) {
        const int8_t *llr = job->llr ? job->llr + g * count : copy;
        uint8_t *bits = job->bits + g * count / 8, *beta = narrow ? found : bits;
        if (!job->llr) {
            const uint8_t *signs = job->signs + g * count / 8;
            if (narrow) signs = memcpy(found, signs, (size_t)count / 8);
            job->tree.rows->spread(signs, count, job->magnitude, copy);
        } else if (narrow) {
            llr = memcpy(copy, llr, (size_t)count);
        }
        cancel(&job->tree, llr, n, lanes, room, beta);
        if (narrow) memcpy(bits, found, (size_t)count / 8);
    }
    free(scratch);
}

static int32_t quantise(quantise_job job, int64_t groups) {
    gw_parallel(quantise_groups, &job, groups, 1, 1 + 16384 / job.n);
    return job.failed;
}

/* llr [groups][n][lanes], kinds [2n], bits [groups][n][lanes / 8]; lanes are 8, 16, 32 or 64.
   Returns 1 if there is no memory, else 0. */
int32_t gw_polar_quantise_lanes(const int8_t *llr, int64_t groups, int64_t n, int32_t lanes,
                                const uint8_t *kinds, int32_t corrected, uint8_t *bits) {
    return quantise((quantise_job){.tree = {gw_polar_best_rows(), kinds, corrected},
                                   .llr = llr, .n = n, .lanes = lanes, .bits = bits},
                    groups);
}

/* The same, of ratios that are all `magnitude` but for the sign: signs [groups][n][lanes / 8]. */
int32_t gw_polar_quantise_signs(const uint8_t *signs, int32_t magnitude, int64_t groups, int64_t n,
                                int32_t lanes, const uint8_t *kinds, int32_t corrected,
                                uint8_t *bits) {
    return quantise((quantise_job){.tree = {gw_polar_best_rows(), kinds, corrected},
                                   .signs = signs, .magnitude = magnitude, .n = n, .lanes = lanes,
                                   .bits = bits},
                    groups);
}

/* Of n channels the log-likelihood ratio of each input if all before it are zero, 64 samples at a
   time; adds cost[ratio + 127] over the samples to `total` [n]. Room: 2 n rows. */
static void genie_group(const rows_t *rows, const int8_t *llr, int64_t n, const int32_t *cost,
                        int8_t *room, int64_t *total) {
    const int8_t *from = llr;
    int8_t *to = room, *other = room + n * LANES;
    for (int64_t size = n; size > 1; size /= 2) {
        for (int64_t at = 0; at < n; at += size) {
            rows->f(from + at * LANES, size / 2 * LANES, 1, to + at * LANES);
            rows->g(from + at * LANES, 0, size / 2 * LANES, to + (at + size / 2) * LANES);
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

/* Rows of 8, 16 or 32 bits, several in a word: the distances within it, of all words. */
GW_INLINE void transform_within(uint64_t *x, int64_t words, int32_t lanes) {
    for (int64_t i = 0; i < words; i++) {
        uint64_t w = x[i];
        if (lanes <= 8) w ^= w >> 8 & 0x00FF00FF00FF00FFu;
        if (lanes <= 16) w ^= w >> 16 & 0x0000FFFF0000FFFFu;
        if (lanes <= 32) w ^= w >> 32;
        x[i] = w;
    }
}

typedef struct {
    const uint64_t *in;
    int64_t words; /* of a group */
    int32_t lanes;
    uint64_t *out;
} transform_job;

GW_CLONES static void transform_groups(void *argument, int64_t first, int64_t last) {
    const transform_job *job = argument;
    const int64_t words = job->words;
    for (int64_t g = first; g < last; g++) {
        uint64_t *out = job->out + g * words;
        memcpy(out, job->in + g * words, (size_t)words * sizeof *out);
        if (job->lanes < LANES) transform_within(out, words, job->lanes);
        transform(out, words);
    }
}

/* in and out [groups][n][lanes / 8]; n lanes are whole words. */
void gw_polar_transform_lanes(const uint64_t *in, int64_t groups, int64_t n, int32_t lanes,
                              uint64_t *out) {
    transform_job job = {in, n * lanes / LANES, lanes, out};
    gw_parallel(transform_groups, &job, groups, 1, 1 + (1 << 17) / n);
}

typedef struct {
    const float *x;
    float factor;
    int8_t *out;
} ratios_job;

GW_INLINE int8_t ratio_of(float x, float factor) {
    float ratio = x * factor;
    ratio = ratio < 127.0f ? ratio : 127.0f;
    ratio = ratio > -127.0f ? ratio : -127.0f;
    ratio += 0x1.8p23f; /* rounds to whole numbers, ties to even, into the lowest bits */
    uint32_t bits;
    memcpy(&bits, &ratio, sizeof bits);
    return (int8_t)(uint8_t)bits;
}

GW_CLONES static void ratios_plain(const ratios_job *job, int64_t first, int64_t last) {
    const ratios_job own = *job; /* bytes stored could change the other */
    for (int64_t i = first; i < last; i++) own.out[i] = ratio_of(own.x[i], own.factor);
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw"))) static void ratios_avx512(const ratios_job *job,
                                                                      int64_t first,
                                                                      int64_t last) {
    const __m512 factor = _mm512_set1_ps(job->factor), magic = _mm512_set1_ps(0x1.8p23f);
    const __m512 top = _mm512_set1_ps(127.0f), bottom = _mm512_set1_ps(-127.0f);
    int64_t i = first;
    for (; i + 16 <= last; i += 16) {
        __m512 ratio = _mm512_mul_ps(_mm512_loadu_ps(job->x + i), factor);
        ratio = _mm512_max_ps(_mm512_min_ps(ratio, top), bottom);
        const __m512i bits = _mm512_castps_si512(_mm512_add_ps(ratio, magic));
        _mm_storeu_si128((__m128i *)(void *)(job->out + i), _mm512_cvtepi32_epi8(bits));
    }
    for (; i < last; i++) job->out[i] = ratio_of(job->x[i], job->factor);
}
#endif

static void ratios_part(void *argument, int64_t first, int64_t last) {
#if defined(__x86_64__)
    if (widest >= 2 && __builtin_cpu_supports("avx512bw")) {
        ratios_avx512(argument, first, last);
        return;
    }
#endif
    ratios_plain(argument, first, last);
}

/* out = x * factor, rounded, within -127 .. 127. */
void gw_polar_ratios(const float *x, float factor, int64_t count, int8_t *out) {
    ratios_job job = {x, factor, out};
    gw_parallel(ratios_part, &job, count, 64, 1 << 18);
}

/* All of it for two points, group by group, so that a group's elements are still in the cache when
   they are added up. */
typedef struct {
    tree tree;
    const float *x;
    float factor;
    const float *values;
    int64_t count, blocks, used, n, lanes;
    uint8_t *bits;
    double *along;
    int failed;
} signs_job;

static void signs_groups(void *argument, int64_t first, int64_t last) {
    signs_job *job = argument;
    const int64_t n = job->n, lanes = job->lanes, used = job->used;
    const int64_t whole = n * lanes, filled = used * lanes, most = filled / GW_SUMMED + 1;
    double *sums = malloc((size_t)(most * (int64_t)sizeof *sums + 2 * whole + whole / 8 +
                                   filled + filled / 8 + 4 * GW_POLAR_SLACK));
    if (!sums) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    int8_t *alpha = (int8_t *)(sums + most), *room = alpha + whole;
    uint8_t *beta = (uint8_t *)room + whole + GW_POLAR_SLACK;
    uint8_t *joined = beta + whole / 8 + GW_POLAR_SLACK;
    int8_t *loose = (int8_t *)joined + filled / 8 + GW_POLAR_SLACK;
    for (int64_t g = first; g < last; g++) {
        const int64_t left = job->blocks - g * lanes, present = left < lanes ? left : lanes;
        const float *x = job->x + g * filled;
        int64_t here = job->count - g * filled, parts = 0;
        if (here > used * present) here = used * present;
        ratios_job ratios = {x, job->factor, present < lanes ? loose : alpha};
        ratios_part(&ratios, 0, here);
        if (present < lanes) {
            gw_polar_fill(loose, here, present, used, n, (int32_t)lanes, 127, alpha);
        } else {
            memset(alpha + here, 0, (size_t)(filled - here));
            memset(alpha + filled, 127, (size_t)(whole - filled));
        }
        cancel(&job->tree, alpha, n, lanes, room, beta);
        memcpy(job->bits + g * whole / 8, beta, (size_t)whole / 8);
        if (present < lanes) gw_join_lanes(beta, 1, used, present, (int32_t)lanes, joined);
        const uint8_t *bits = present < lanes ? joined : beta;
        for (int64_t at = 0; at < here; at += GW_SUMMED)
            sums[parts++] = gw_fold_signed(x + at, here - at < GW_SUMMED ? here - at : GW_SUMMED,
                                           bits + at / 8, job->values);
        gw_sum_rows(sums, 1, parts);
        job->along[g] = sums[0];
    }
    free(sums);
}

/* x [count] in blocks as gw_polar_fill places them; bits [groups][n][lanes / 8]; along [groups] is
   the sum of x values[bit]. Returns 1 if there is no memory, else 0. */
int32_t gw_polar_signs(const float *x, int64_t count, float factor, const float *values,
                       int64_t blocks, int64_t n, int32_t lanes, const uint8_t *kinds,
                       uint8_t *bits, double *along) {
    signs_job job = {.tree = {gw_polar_best_rows(), kinds, 1}, .x = x, .factor = factor,
                     .values = values, .count = count, .blocks = blocks,
                     .used = (count + blocks - 1) / blocks, .n = n, .lanes = lanes, .bits = bits,
                     .along = along};
    gw_parallel(signs_groups, &job, (blocks + lanes - 1) / lanes, 1, 1 + 16384 / n);
    return job.failed;
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

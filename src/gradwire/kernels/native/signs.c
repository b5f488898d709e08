/* Scaled signs, as reference/signs.py: error feedback, mean magnitudes, packing and the new
   residual in one call. Magnitudes are added in float64 along a fixed tree, so that the scale has
   the same bits wherever it is computed. */
#include "stream.h"
#include "threads.h"

/* Buckets from SHARED on are shared by the threads; smaller ones are handed out whole. */
enum { BLOCK = 256, SHARED = 1 << 18, LEAST = 1 << 16 };

GW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The tree over one block: element i meets i + 128, the sums meet at a distance of 64, ... */
GW_INLINE double magnitude(const float *p) {
    double t[BLOCK / 2];
    for (int i = 0; i < BLOCK / 2; i++)
        t[i] = (double)__builtin_fabsf(p[i]) + (double)__builtin_fabsf(p[i + BLOCK / 2]);
    for (int i = 0; i < 64; i++) t[i] += t[i + 64];
    for (int i = 0; i < 32; i++) t[i] += t[i + 32];
    for (int i = 0; i < 16; i++) t[i] += t[i + 16];
    for (int i = 0; i < 8; i++) t[i] += t[i + 8];
    for (int i = 0; i < 4; i++) t[i] += t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

/* Sums of blocks meet in the same way; `count` of them, the rest up to a power of two is zero. */
GW_INLINE double tree_sum(double *sums, int64_t count) {
    if (count == 0) return 0.0;
    int64_t half = 1;
    while (half < count) half *= 2;
    for (half /= 2; half > 0; half /= 2) {
        for (int64_t i = 0; i + half < count; i++) sums[i] += sums[i + half];
        count = smaller(count, half);
    }
    return sums[0];
}

/* Signs of a block whose rest is zero: bits are one where p < 0. */
GW_INLINE void pack_block(const float *p, uint8_t *packed) {
    uint8_t negative[BLOCK];
    for (int i = 0; i < BLOCK; i++) negative[i] = p[i] < 0;
    for (int g = 0; g < BLOCK / 8; g++) {
        uint64_t bytes;
        memcpy(&bytes, negative + 8 * g, 8);
        packed[g] = (uint8_t)((bytes * 0x0102040810204080u) >> 56);
    }
}

typedef struct {
    const float *x, *residual;
    int64_t count, bucket;
    float *scale;
    uint8_t *packed;
    float *lost;
    int past_caches;
    int32_t not_finite;
    /* Of the bucket that is shared by the threads: */
    int64_t start, end;
    double *sums;
    float size;
} encoding;

GW_INLINE void corrected_part(const encoding *e, int64_t at, int64_t n, float *p) {
    corrected(e->x + at, e->residual ? e->residual + at : 0, n, p);
}

/* Packs the signs from `start` to `end`, sums magnitudes of blocks, and returns how many. */
GW_INLINE int64_t measure(const encoding *e, int64_t start, int64_t end, double *sums) {
    float p[BLOCK];
    uint8_t bits[BLOCK / 8];
    int64_t blocks = 0;
    for (int64_t at = start; at < end; at += BLOCK) {
        const int64_t n = smaller(BLOCK, end - at);
        if (n == BLOCK) {
            corrected_part(e, at, BLOCK, p);
            pack_block(p, e->packed + at / 8);
        } else {
            corrected_part(e, at, n, p);
            memset(p + n, 0, (size_t)(BLOCK - n) * sizeof *p);
            pack_block(p, bits);
            memcpy(e->packed + at / 8, bits, (size_t)((n + 7) / 8));
        }
        sums[blocks++] = magnitude(p);
    }
    return blocks;
}

/* The scale of a bucket of `n` elements whose blocks' sums these are. */
GW_INLINE float mean_of(encoding *e, double *sums, int64_t blocks, int64_t n) {
    const double mean = tree_sum(sums, blocks) / (double)n;
    if (!__builtin_isfinite(mean)) __atomic_store_n(&e->not_finite, 1, __ATOMIC_RELAXED);
    return (float)mean;
}

GW_INLINE void subtract(const encoding *e, int64_t start, int64_t end, float size) {
    float p[BLOCK], staged[BLOCK];
    for (int64_t at = start; at < end; at += BLOCK) {
        const int64_t n = smaller(BLOCK, end - at);
        corrected_part(e, at, n, p);
        for (int64_t i = 0; i < n; i++) staged[i] = p[i] - (p[i] < 0 ? -size : size);
        put(e->lost + at, staged, n * 4, e->past_caches);
    }
}

GW_CLONES static void encode_buckets(void *job, int64_t first, int64_t last) {
    encoding *e = job;
    double sums[SHARED / BLOCK];
    for (int64_t b = first; b < last; b++) {
        const int64_t start = b * e->bucket, end = smaller(start + e->bucket, e->count);
        const int64_t blocks = measure(e, start, end, sums);
        e->scale[b] = mean_of(e, sums, blocks, end - start);
        if (e->lost) subtract(e, start, end, e->scale[b]);
    }
    put_done();
}

/* Blocks of one bucket. */
GW_CLONES static void measure_shared(void *job, int64_t first, int64_t last) {
    const encoding *e = job;
    const int64_t start = e->start + first * BLOCK;
    measure(e, start, smaller(e->start + last * BLOCK, e->end), e->sums + first);
}

GW_CLONES static void sum_shared(encoding *e) {
    const int64_t n = e->end - e->start;
    e->size = mean_of(e, e->sums, (n + BLOCK - 1) / BLOCK, n);
    e->scale[e->start / e->bucket] = e->size;
}

GW_CLONES static void subtract_shared(void *job, int64_t first, int64_t last) {
    const encoding *e = job;
    const int64_t start = e->start + first * BLOCK;
    subtract(e, start, smaller(e->start + last * BLOCK, e->end), e->size);
    put_done();
}

/* `sums` has room for the blocks of one bucket. Buckets but the last are multiples of eight.
   Without `lost` only the payload is made. Returns 1 if something is not finite, else 0. */
int32_t gw_encode_signs(const float *x, const float *residual, int64_t count, int64_t bucket,
                        double *sums, float *scale, uint8_t *packed, float *lost) {
    encoding e = {x, residual, count, bucket, scale, packed, lost,
                  lost != residual && count * 4 >= STREAM_BYTES, 0, 0, 0, sums, 0};
    if (bucket < SHARED) {
        gw_parallel(encode_buckets, &e, (count + bucket - 1) / bucket, 1, LEAST / bucket);
        return e.not_finite;
    }
    for (e.start = 0; e.start < count; e.start = e.end) {
        e.end = smaller(e.start + bucket, count);
        const int64_t blocks = (e.end - e.start + BLOCK - 1) / BLOCK;
        gw_parallel(measure_shared, &e, blocks, 1, LEAST / BLOCK);
        sum_shared(&e);
        if (lost) gw_parallel(subtract_shared, &e, blocks, 1, LEAST / BLOCK);
    }
    return e.not_finite;
}

/* The magnitudes with their signs, of one block of one payload: added to `sum`, or first in it. */
GW_INLINE void add_signs(const uint8_t *bits, float scale, int first, float *sum) {
    uint8_t minus[BLOCK];
    for (int g = 0; g < BLOCK / 8; g++) {
        const uint64_t eight = bits[g] * 0x0101010101010101u & 0x8040201008040201u;
        memcpy(minus + 8 * g, &eight, 8);
    }
    if (first)
        for (int i = 0; i < BLOCK; i++) sum[i] = minus[i] ? -scale : scale;
    else
        for (int i = 0; i < BLOCK; i++) sum[i] += minus[i] ? -scale : scale;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Packed signs are what AVX-512 calls a mask; from plain C gcc makes code that takes four times
   as long. Sums of a whole block, in order, all in registers. */
__attribute__((target("avx512f"))) static void sum_block_avx512(const uint8_t *const *packed,
                                                                const float *const *scale,
                                                                int64_t n, int64_t byte,
                                                                int64_t at_scale, float *sum) {
    __m512 total[BLOCK / 16];
    for (int64_t r = 0; r < n; r++) {
        const __m512 plus = _mm512_set1_ps(scale[r][at_scale]);
        const __m512 minus = _mm512_set1_ps(-scale[r][at_scale]);
        uint16_t bits[BLOCK / 16];
        memcpy(bits, packed[r] + byte, sizeof bits);
        for (int v = 0; v < BLOCK / 16; v++) {
            const __m512 term = _mm512_mask_blend_ps(bits[v], plus, minus);
            total[v] = r ? _mm512_add_ps(total[v], term) : term;
        }
    }
    for (int v = 0; v < BLOCK / 16; v++) _mm512_storeu_ps(sum + 16 * v, total[v]);
}
#endif

typedef struct {
    const uint8_t *const *packed;
    const float *const *scale;
    int64_t n, bucket;
    float *out;
    int past_caches;
} averaging;

GW_CLONES static void mean_part(void *job, int64_t first, int64_t last) {
    const averaging *a = job;
    const int64_t n = a->n;
    const float divisor = (float)n;
    const int exact = (n & (n - 1)) == 0; /* then 1/n is a float, and division a product */
    int masks = 0;
#if defined(__x86_64__)
    masks = __builtin_cpu_supports("avx512f");
#endif
    float sum[BLOCK];
    for (int64_t start = first, end; start < last; start = end) {
        const int64_t s = start / a->bucket;
        end = smaller((s + 1) * a->bucket, last);
        for (int64_t at = start; at < end; at += BLOCK) {
            const int64_t size = smaller(BLOCK, end - at);
            if (masks && size == BLOCK) {
#if defined(__x86_64__)
                sum_block_avx512(a->packed, a->scale, n, at / 8, s, sum);
#endif
            } else {
                for (int64_t r = 0; r < n; r++) {
                    uint8_t bits[BLOCK / 8] = {0};
                    memcpy(bits, a->packed[r] + at / 8, (size_t)((size + 7) / 8));
                    add_signs(bits, a->scale[r][s], r == 0, sum);
                }
            }
            if (exact)
                for (int i = 0; i < BLOCK; i++) sum[i] *= 1.0f / divisor;
            else
                for (int i = 0; i < BLOCK; i++) sum[i] /= divisor;
            put(a->out + at, sum, size * 4, a->past_caches);
        }
    }
    put_done();
}

/* The mean of n decoded payloads, added in order and divided by n. `packed` and `scale` are
   arrays of n pointers. Buckets but the last are multiples of eight. */
void gw_mean_signs(const uint8_t *const *packed, const float *const *scale, int64_t n,
                   int64_t count, int64_t bucket, float *out) {
    averaging a = {packed, scale, n, bucket, out, count * 4 >= STREAM_BYTES};
    gw_parallel(mean_part, &a, count, BLOCK, LEAST);
}

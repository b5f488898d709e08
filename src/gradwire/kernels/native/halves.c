/* float32 to 16 bits, saturating, and means of 16-bit floats, as reference/halves.py. */
#include "stream.h"
#include "threads.h"

enum { BLOCK = 512, LEAST = 1 << 16 };

typedef struct {
    const float *x;
    uint16_t *out;
    int past_caches;
    int32_t not_finite;
} cast;

/* `highest`: the bits of the largest magnitude of a part. */
GW_INLINE void part_done(cast *c, uint32_t highest) {
    put_done();
    if (highest >= 0x7F800000u) __atomic_store_n(&c->not_finite, 1, __ATOMIC_RELAXED);
}

GW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* To nearest, ties to even; what would round to infinity becomes the largest number. */
GW_CLONES static void cast_bf16(void *job, int64_t first, int64_t last) {
    cast *c = job;
    uint16_t staged[BLOCK];
    uint32_t highest = 0;
    for (int64_t at = first; at < last; at += BLOCK) {
        const int64_t n = smaller(BLOCK, last - at);
        for (int64_t i = 0; i < n; i++) {
            uint32_t u;
            memcpy(&u, c->x + at + i, 4);
            const uint32_t sign = u & 0x80000000u, size = u & 0x7FFFFFFFu;
            highest = size > highest ? size : highest;
            uint32_t rounded = (size + 0x7FFFu + (size >> 16 & 1)) >> 16;
            rounded = rounded > 0x7F7Fu ? 0x7F7Fu : rounded;
            staged[i] = (uint16_t)(rounded | sign >> 16);
        }
        put(c->out + at, staged, n * 2, c->past_caches);
    }
    part_done(c, highest);
}

static int32_t run(gw_task task, const float *x, int64_t count, uint16_t *out) {
    cast c = {x, out, count * 2 >= STREAM_BYTES, 0};
    gw_parallel(task, &c, count, BLOCK, LEAST);
    return c.not_finite;
}

/* Returns 1 if something is not finite, else 0. */
int32_t gw_cast_bf16(const float *x, int64_t count, uint16_t *out) {
    return run(cast_bf16, x, count, out);
}

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2,f16c"))) static void cast_f16c(void *job, int64_t first,
                                                           int64_t last) {
    cast *c = job;
    const __m256 largest = _mm256_set1_ps(65504.0f), least = _mm256_set1_ps(-65504.0f);
    float p[BLOCK];
    uint16_t staged[BLOCK];
    __m256i highest = _mm256_setzero_si256();
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    for (int64_t at = first; at < last; at += BLOCK) {
        const int64_t n = smaller(BLOCK, last - at);
        const float *from = c->x + at;
        if (n < BLOCK) {
            memset(p, 0, sizeof p);
            memcpy(p, from, (size_t)n * sizeof *p);
            from = p;
        }
        for (int i = 0; i < BLOCK; i += 8) {
            const __m256 v = _mm256_loadu_ps(from + i);
            highest = _mm256_max_epu32(highest,
                                       _mm256_and_si256(_mm256_castps_si256(v), magnitude));
            /* Clamping first or last is the same: no number beyond the range rounds into it. */
            const __m256 clamped = _mm256_min_ps(_mm256_max_ps(v, least), largest);
            _mm_storeu_si128((__m128i *)(staged + i),
                             _mm256_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT));
        }
        put(c->out + at, staged, n * 2, c->past_caches);
    }
    uint32_t lanes[8];
    memcpy(lanes, &highest, sizeof lanes);
    uint32_t top = 0;
    for (int i = 0; i < 8; i++) top = lanes[i] > top ? lanes[i] : top;
    part_done(c, top);
}
#endif

/* As gw_cast_bf16; -1 if this processor cannot. */
int32_t gw_cast_fp16(const float *x, int64_t count, uint16_t *out) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
        return run(cast_f16c, x, count, out);
#else
    (void)x, (void)count, (void)out;
#endif
    return -1;
}

/* The mean of `num` vectors, added in order in float32 and rounded once, as reference/halves.py. */
typedef struct {
    const uint16_t *const *pieces;
    int64_t num;
    float count;
    uint16_t *out;
    int past_caches;
} mean;

GW_CLONES static void mean_bf16(void *job, int64_t first, int64_t last) {
    const mean *m = job;
    float total[BLOCK];
    uint16_t staged[BLOCK];
    for (int64_t at = first; at < last; at += BLOCK) {
        const int64_t n = smaller(BLOCK, last - at);
        for (int64_t k = 0; k < m->num; k++) {
            const uint16_t *piece = m->pieces[k] + at;
            for (int64_t i = 0; i < n; i++) {
                const uint32_t u = (uint32_t)piece[i] << 16;
                float value;
                memcpy(&value, &u, 4);
                total[i] = k ? total[i] + value : value;
            }
        }
        for (int64_t i = 0; i < n; i++) {
            const float value = total[i] / m->count;
            uint32_t u;
            memcpy(&u, &value, 4);
            const uint32_t rounded = (u + 0x7FFFu + (u >> 16 & 1)) >> 16;
            staged[i] = value != value ? 0x7FC0 : (uint16_t)rounded;
        }
        put(m->out + at, staged, n * 2, m->past_caches);
    }
    put_done();
}

int32_t gw_mean_bf16(const uint16_t *const *pieces, int64_t num, int64_t count, int64_t numel,
                     uint16_t *out) {
    mean m = {pieces, num, (float)count, out, numel * 2 >= STREAM_BYTES};
    gw_parallel(mean_bf16, &m, numel, BLOCK, LEAST);
    return 0;
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) static void mean_f16c(void *job, int64_t first,
                                                           int64_t last) {
    const mean *m = job;
    const __m256 count = _mm256_set1_ps(m->count);
    float total[BLOCK];
    uint16_t p[BLOCK], staged[BLOCK];
    for (int64_t at = first; at < last; at += BLOCK) {
        const int64_t n = smaller(BLOCK, last - at);
        for (int64_t k = 0; k < m->num; k++) {
            const uint16_t *from = m->pieces[k] + at;
            if (n < BLOCK) {
                memset(p, 0, sizeof p);
                memcpy(p, from, (size_t)n * sizeof *p);
                from = p;
            }
            for (int i = 0; i < BLOCK; i += 8) {
                __m256 v = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i)));
                if (k) v = _mm256_add_ps(_mm256_loadu_ps(total + i), v);
                _mm256_storeu_ps(total + i, v);
            }
        }
        for (int i = 0; i < BLOCK; i += 8) {
            const __m256 v = _mm256_div_ps(_mm256_loadu_ps(total + i), count);
            _mm_storeu_si128((__m128i *)(staged + i),
                             _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
        }
        put(m->out + at, staged, n * 2, m->past_caches);
    }
    put_done();
}
#endif

/* As gw_mean_bf16; -1 if this processor cannot. */
int32_t gw_mean_fp16(const uint16_t *const *pieces, int64_t num, int64_t count, int64_t numel,
                     uint16_t *out) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        mean m = {pieces, num, (float)count, out, numel * 2 >= STREAM_BYTES};
        gw_parallel(mean_f16c, &m, numel, BLOCK, LEAST);
        return 0;
    }
#else
    (void)pieces, (void)num, (void)count, (void)numel, (void)out;
#endif
    return -1;
}

/* Rounding to tables of levels, packed, and back, bit for bit as reference/tables.py.

   A vector is done in blocks that stay in the first-level cache: draw the random bits of a block,
   turn each stretch of one bucket into symbols, pack the block. BLOCK is a multiple of 8, 5 and 3,
   so that packed blocks end on a byte, and of what the vector generator of random bits makes. */
#include "polar.h"
#include "stream.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

void gw_philox_words(uint64_t seed, uint32_t stream0, uint32_t stream1, uint32_t stream2,
                     uint32_t first_block, uint32_t *out, int64_t count);
int32_t gw_pack_uints(const void *values, int32_t size, int64_t count, int32_t width,
                      uint8_t *packed);
int32_t gw_pack_digits(const int32_t *values, int64_t count, int32_t base, int32_t digits,
                       uint8_t *packed);
void gw_unpack_uints(const uint8_t *packed, int64_t count, int32_t width, void *values);

enum { BLOCK = 1920, SUMMED = 512, LEAST = 1 << 15, FEW = 16, MOST = 256, KEYS = (127 << 6) + 2 };
enum { TO_LEVELS, TO_WHOLE, TO_NEAREST, TO_CELLS, TO_FP8 };

GW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
GW_INLINE float safe(float divisor) { return divisor > 0 ? divisor : 1.0f; }
GW_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
GW_INLINE float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
GW_INLINE float between(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* What is summed or compared in each block of SUMMED elements of a bucket. */

typedef struct {
    const float *x;
    int64_t count, bucket, blocks; /* blocks of one bucket */
    uint32_t *maxima;
    float *low, *high;
    double *sums, *below;
    int64_t *negative;
} statistics;

GW_INLINE int64_t block_begin(const statistics *job, int64_t number, int64_t *n) {
    const int64_t start = number / job->blocks * job->bucket;
    const int64_t at = start + number % job->blocks * SUMMED;
    const int64_t end = smaller(start + job->bucket, job->count);
    *n = at < end ? smaller(SUMMED, end - at) : 0;
    return at;
}

GW_INLINE double fold(double *sums, int64_t half) {
    for (; half; half /= 2)
        for (int64_t i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

/* The same tree over a whole block of SUMMED elements, without a place in memory for every sum:
   elements 64 apart meet first, in registers. */
typedef double doubles __attribute__((vector_size(64)));

/* Adds eight in the order in which halves, quarters and eighths of a block are folded. */
#define FOLDED(v)                                                                        \
    ((((v)[0] + (v)[4]) + ((v)[2] + (v)[6])) + (((v)[1] + (v)[5]) + ((v)[3] + (v)[7])))

/* `value` is eight doubles made of the elements from x + at on. */
#define FOLD_BLOCK(value)                                        \
    do {                                                         \
        doubles columns[8];                                      \
        for (int i = 0; i < 8; i++) {                            \
            doubles v[8];                                        \
            for (int k = 0; k < 8; k++) {                        \
                const int at = 64 * k + 8 * i;                   \
                v[k] = value;                                    \
            }                                                    \
            columns[i] = FOLDED(v);                              \
        }                                                        \
        const doubles last_eight = FOLDED(columns);              \
        return FOLDED(last_eight);                               \
    } while (0)

GW_INLINE void widened(const float *x, doubles *out) {
    for (int k = 0; k < 8; k++) (*out)[k] = x[k];
}

GW_CLONES static double fold_floats_plain(const float *x) {
    doubles eight;
    FOLD_BLOCK((widened(x + at, &eight), eight));
}

GW_CLONES static double fold_squares_plain(const float *x) {
    doubles eight;
    FOLD_BLOCK((widened(x + at, &eight), eight * eight));
}

/* x c, as float32, c being values[0] or, where a bit is one, values[1]. */
GW_CLONES static double fold_signed_plain(const float *x, const uint8_t *bits,
                                          const float *values) {
    float products[SUMMED];
    for (int i = 0; i < SUMMED; i++) products[i] = x[i] * values[bits[i / 8] >> i % 8 & 1];
    return fold_floats_plain(products);
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,avx512vl")))
#define LOADED(x) _mm256_loadu_ps(x)

WIDE static double fold_floats_wide(const float *x) {
    FOLD_BLOCK(_mm512_cvtps_pd(LOADED(x + at)));
}

WIDE static double fold_squares_wide(const float *x) {
    FOLD_BLOCK(_mm512_cvtps_pd(LOADED(x + at)) * _mm512_cvtps_pd(LOADED(x + at)));
}

WIDE static double fold_signed_wide(const float *x, const uint8_t *bits, const float *values) {
    const __m256 zero = _mm256_set1_ps(values[0]), one = _mm256_set1_ps(values[1]);
    FOLD_BLOCK(_mm512_cvtps_pd(LOADED(x + at) * _mm256_mask_blend_ps(bits[at / 8], zero, one)));
}

static int wide(void) {
    return gw_polar_level() >= 2 && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512vl");
}
#define PICKED(name, arguments) return wide() ? name##_wide arguments : name##_plain arguments
#else
#define PICKED(name, arguments) return name##_plain arguments
#endif

static double fold_floats(const float *x) { PICKED(fold_floats, (x)); }
static double fold_squares(const float *x) { PICKED(fold_squares, (x)); }
static double fold_signed(const float *x, const uint8_t *bits, const float *values) {
    PICKED(fold_signed, (x, bits, values));
}

/* rows [count][width] added up along the tree, into the first of each. */
void gw_sum_rows(double *rows, int64_t count, int64_t width) {
    double sums[SUMMED];
    for (int64_t r = 0; r < count; r++) {
        double *row = rows + r * width;
        for (int64_t left = width; left > 1;) {
            int64_t size = 2;
            while (size < left && size < SUMMED) size *= 2;
            int64_t blocks = 0;
            for (int64_t at = 0; at < left; at += size) {
                const int64_t n = smaller(size, left - at);
                memcpy(sums, row + at, (size_t)n * sizeof *sums);
                memset(sums + n, 0, (size_t)(size - n) * sizeof *sums);
                row[blocks++] = fold(sums, size / 2);
            }
            left = blocks;
        }
    }
}

GW_CLONES static void block_maxima(void *argument, int64_t first, int64_t last) {
    const statistics *job = argument;
    for (int64_t number = first; number < last; number++) {
        int64_t n;
        const int64_t at = block_begin(job, number, &n);
        uint32_t top = 0; /* magnitudes order as their bits do, and NaN comes last */
        for (int64_t i = 0; i < n; i++) {
            const uint32_t u = bits_of(job->x[at + i]) & 0x7FFFFFFFu;
            top = u > top ? u : top;
        }
        job->maxima[number] = top;
    }
}

/* Signed integers that order as floats do, and back. */
GW_INLINE int32_t ordered(uint32_t u) { return (int32_t)(u ^ ((uint32_t)((int32_t)u >> 31) >> 1)); }

GW_CLONES static void block_extremes(void *argument, int64_t first, int64_t last) {
    const statistics *job = argument;
    for (int64_t number = first; number < last; number++) {
        int64_t n;
        const float *x = job->x + block_begin(job, number, &n);
        if (!n) x = job->x + job->count - 1, n = 1; /* one that counts already */
        int32_t low = ordered(bits_of(x[0])), high = low;
        for (int64_t i = 0; i < n; i++) {
            const int32_t v = ordered(bits_of(x[i]));
            low = v < low ? v : low;
            high = v > high ? v : high;
        }
        job->low[number] = float_of((uint32_t)ordered((uint32_t)low)) + 0.0f; /* no minus zero */
        job->high[number] = float_of((uint32_t)ordered((uint32_t)high)) + 0.0f;
    }
}

static void block_squares(void *argument, int64_t first, int64_t last) {
    const statistics *job = argument;
    float block[SUMMED];
    for (int64_t number = first; number < last; number++) {
        int64_t n;
        const float *x = job->x + block_begin(job, number, &n);
        if (n < SUMMED) {
            memset(block, 0, sizeof block);
            memcpy(block, x, (size_t)n * sizeof *x);
            x = block;
        }
        job->sums[number] = fold_squares(x);
    }
}

GW_CLONES static void block_sides(void *argument, int64_t first, int64_t last) {
    const statistics *job = argument;
    float block[SUMMED];
    double above[SUMMED / 2], below[SUMMED / 2];
    for (int64_t number = first; number < last; number++) {
        int64_t n;
        const float *x = job->x + block_begin(job, number, &n);
        if (n < SUMMED) {
            memset(block, 0, sizeof block);
            memcpy(block, x, (size_t)n * sizeof *x);
            x = block;
        }
        int32_t negative = 0;
        for (int64_t i = 0; i < SUMMED; i++) negative += x[i] < 0;
        for (int64_t i = 0; i < SUMMED / 2; i++) {
            /* (|a| + a) / 2 is a where that is positive, else zero, and exact. */
            const double a = x[i], b = x[i + SUMMED / 2];
            const double a_size = __builtin_fabs(a), b_size = __builtin_fabs(b);
            above[i] = (a_size + a) / 2 + (b_size + b) / 2;
            below[i] = (a_size - a) / 2 + (b_size - b) / 2;
        }
        job->sums[number] = fold(above, SUMMED / 4);
        job->below[number] = fold(below, SUMMED / 4);
        job->negative[number] = negative;
    }
}

static statistics blocks_of(const float *x, int64_t count, int64_t bucket) {
    return (statistics){
        .x = x, .count = count, .bucket = bucket, .blocks = (bucket + SUMMED - 1) / SUMMED};
}

/* Calls `task` for all blocks of all buckets. */
static void over_blocks(gw_task task, statistics *job) {
    const int64_t buckets = (job->count + job->bucket - 1) / job->bucket;
    const int64_t size = smaller(SUMMED, job->bucket);
    gw_parallel(task, job, buckets * job->blocks, 1, LEAST / size);
}

void gw_bucket_maxima(const float *x, int64_t count, int64_t bucket, float *maxima) {
    statistics job = blocks_of(x, count, bucket);
    job.maxima = (uint32_t *)(void *)maxima;
    over_blocks(block_maxima, &job);
}

void gw_bucket_extremes(const float *x, int64_t count, int64_t bucket, float *low, float *high) {
    statistics job = blocks_of(x, count, bucket);
    job.low = low;
    job.high = high;
    over_blocks(block_extremes, &job);
}

void gw_bucket_squares(const float *x, int64_t count, int64_t bucket, double *sums) {
    statistics job = blocks_of(x, count, bucket);
    job.sums = sums;
    over_blocks(block_squares, &job);
}

void gw_bucket_sides(const float *x, int64_t count, int64_t bucket, double *above, double *below,
                     int64_t *negative) {
    statistics job = blocks_of(x, count, bucket);
    job.sums = above;
    job.below = below;
    job.negative = negative;
    over_blocks(block_sides, &job);
}

/* Sums of x c and of c^2, rounded to float32 before they are added, where c is the value that a
   packed symbol of `width` bits (1 .. 8) names. Buckets are powers of two from 8 on. */

typedef struct {
    statistics where;
    const uint8_t *packed;
    const float *values;
    int32_t width;
} products;

GW_CLONES static void block_products(void *argument, int64_t first, int64_t last) {
    const products *job = argument;
    int32_t symbols[SUMMED];
    float a[SUMMED], b[SUMMED];
    for (int64_t number = first; number < last; number++) {
        int64_t n;
        const int64_t at = block_begin(&job->where, number, &n);
        const float *x = job->where.x + at;
        gw_unpack_uints(job->packed + at / 8 * job->width, n, job->width, symbols);
        for (int64_t i = 0; i < n; i++) {
            const float c = job->values[symbols[i]];
            a[i] = x[i] * c;
            b[i] = c * c;
        }
        memset(a + n, 0, (size_t)(SUMMED - n) * sizeof *a);
        memset(b + n, 0, (size_t)(SUMMED - n) * sizeof *b);
        job->where.sums[number] = fold_floats(a);
        job->where.below[number] = fold_floats(b);
    }
}

/* The sum of x c over a block of n <= SUMMED elements, one bit each: see polar.h. */
double gw_fold_signed(const float *x, int64_t n, const uint8_t *bits, const float *values) {
    if (n == SUMMED) return fold_signed(x, bits, values);
    const int one = values[1] > 0; /* so that no product beyond the end is a minus zero */
    float block[SUMMED] = {0};
    uint8_t few[SUMMED / 8];
    memcpy(block, x, (size_t)n * sizeof *x);
    memset(few, one ? 255 : 0, sizeof few);
    memcpy(few, bits, (size_t)n / 8);
    for (int64_t i = n & ~7; i < n; i++)
        if ((bits[i / 8] >> i % 8 & 1) != one) few[i / 8] ^= (uint8_t)(1 << i % 8);
    return fold_signed(block, few, values);
}

/* The same for +-c, one bit each. Of equal squares any order of adding gives the exact sum. */
static void block_signed(void *argument, int64_t first, int64_t last) {
    const products *job = argument;
    const float square = job->values[0] * job->values[0];
    for (int64_t number = first; number < last; number++) {
        int64_t n;
        const int64_t at = block_begin(&job->where, number, &n);
        job->where.sums[number] =
            gw_fold_signed(job->where.x + at, n, job->packed + at / 8, job->values);
        job->where.below[number] = (double)n * square;
    }
}

/* `values` has 2^width entries. */
void gw_cell_products(const float *x, const uint8_t *packed, int64_t count, int64_t bucket,
                      const float *values, int32_t width, double *along, double *squares) {
    products job = {blocks_of(x, count, bucket), packed, values, width};
    job.where.sums = along;
    job.where.below = squares;
    const int opposite = width == 1 && bits_of(values[0]) == (bits_of(values[1]) ^ 0x80000000u);
    over_blocks(opposite ? block_signed : block_products, &job.where);
}

/* Rounding. */

typedef struct {
    const float *x, *scale, *start; /* of each bucket, or null */
    int64_t count, bucket;
    int32_t rule, alphabet, width, digits;
    int32_t entries; /* of the table of levels, from 0 on, or of edges of cells */
    float least, most; /* whole numbers */
    uint64_t seed;
    uint32_t stream[3];
    uint8_t *packed;
    int32_t powers;         /* whether all levels above zero are powers of two */
    const uint8_t *keys;    /* for leading bits of magnitudes, how many inner levels lie below */
    float padded[MOST + 1]; /* levels or edges, and infinity where there are no more */
    float inner[MOST + 1];  /* levels between the first and the last, then infinity */
} rounding;

GW_INLINE float dither(uint16_t half) { return ((float)half + 0.5f) * 0x1p-16f; }

/* Level `low` or the next, which `fraction` of the way lies behind; dither is between 0 and 1, so
   that it need not be clamped. */
GW_INLINE int32_t drawn_level(float x, int32_t low, float fraction, uint16_t half, int32_t s) {
    const int32_t level = low + (dither(half) < fraction);
    return x < 0 ? s - level : s + level;
}

GW_INLINE float fraction_between(float x, float floor, float next) {
    return (__builtin_fabsf(x) - floor) / safe(next - floor);
}

/* Up to `few` levels: compared with each. */
GW_INLINE void to_few(const float *x, const uint16_t *random, int64_t n, const float *padded,
                      const float *inner, int few, int32_t s, int32_t *symbols) {
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = __builtin_fabsf(x[i]);
        int32_t low = 0;
        float floor = padded[0], next = padded[1];
        for (int j = 1; j < few; j++) {
            const float here = padded[j], after = padded[j + 1]; /* read whether needed or not */
            const int above = magnitude >= inner[j];
            low += above;
            floor = above ? here : floor;
            next = above ? after : next;
        }
        symbols[i] = drawn_level(x[i], low, fraction_between(x[i], floor, next), random[i], s);
    }
}

/* Powers of two: the exponent is the level. */
GW_INLINE void to_powers(const float *x, const uint16_t *random, int64_t n, float first,
                         int32_t s, int32_t *symbols) {
    const int32_t lowest = (int32_t)(bits_of(first) >> 23);
    for (int64_t i = 0; i < n; i++) {
        int32_t low = (int32_t)((bits_of(x[i]) & 0x7FFFFFFFu) >> 23) - lowest + 1;
        low = low < 0 ? 0 : low;
        low = low > s - 1 ? s - 1 : low;
        /* The gap above 2^e is 2^e, the one above zero the first power, and 2^-e times the
           distance is the quotient: both are exact. */
        const int32_t gap = lowest + (low ? low - 1 : 0);
        const float floor = low ? float_of((uint32_t)gap << 23) : 0.0f;
        const float fraction =
            (__builtin_fabsf(x[i]) - floor) * float_of((uint32_t)(254 - gap) << 23);
        symbols[i] = drawn_level(x[i], low, fraction, random[i], s);
    }
}

/* Magnitudes up to one: their leading bits give the starting point, and two steps mostly suffice. */
GW_INLINE void to_many(const float *x, const uint16_t *random, int64_t n, const float *padded,
                       const float *inner, const uint8_t *keys, int32_t s, int32_t *symbols) {
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = __builtin_fabsf(x[i]);
        const uint32_t key = bits_of(magnitude) >> 17;
        int32_t low = keys[key < KEYS ? key : KEYS - 1];
        low += magnitude >= inner[low + 1];
        low += magnitude >= inner[low + 1];
        while (magnitude >= inner[low + 1]) low++;
        symbols[i] = low;
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t low = symbols[i];
        const float fraction = fraction_between(x[i], padded[low], padded[low + 1]);
        symbols[i] = drawn_level(x[i], low, fraction, random[i], s);
    }
}

GW_INLINE void to_whole(const float *x, const uint16_t *random, int64_t n, float start, float step,
                        float least, float most, int32_t *symbols) {
    const int32_t lowest = (int32_t)least;
    for (int64_t i = 0; i < n; i++) {
        const float v = between((x[i] - start) / step, least, most);
        int32_t whole = (int32_t)v;
        whole -= (float)whole > v;
        whole += dither(random[i]) < v - (float)whole;
        symbols[i] = whole - lowest;
    }
}

GW_INLINE void to_nearest(const float *x, int64_t n, float start, float step, float least,
                          float most, int32_t *symbols) {
    const float large = 0x1.8p23f; /* its last place is one: adding it rounds, ties to even */
    for (int64_t i = 0; i < n; i++) {
        const float v = between((x[i] - start) / step, least, most);
        symbols[i] = (int32_t)(bits_of(v + large) - bits_of(large)) - (int32_t)least;
    }
}

GW_INLINE void to_cells(const float *x, int64_t n, float scale, const float *padded, int few,
                        int32_t last, int32_t *symbols) {
    for (int64_t i = 0; i < n; i++) {
        const float v = x[i] / scale;
        int32_t cell = 0;
        for (int j = 0; j < few; j++) cell += v >= padded[j];
        symbols[i] = cell < last ? cell : last;
    }
}

/* `mantissa` bits, the least normal number and the largest one, and a number whose last place is
   the step below that: adding it rounds, ties to even. */
GW_INLINE void to_fp8(const float *x, int64_t n, float scale, int mantissa, float tiny, float most,
                      float large, int32_t *symbols) {
    const int drop = 23 - mantissa;
    const uint32_t half = (1u << (drop - 1)) - 1;
    const uint32_t bias = (bits_of(tiny) >> drop) - (1u << mantissa);
    for (int64_t i = 0; i < n; i++) {
        const float v = between(x[i] / scale, -1.0f, 1.0f) * most;
        const uint32_t u = bits_of(v), magnitude = u & 0x7FFFFFFFu;
        const uint32_t normal = ((magnitude + half + (magnitude >> drop & 1)) >> drop) - bias;
        const uint32_t below = bits_of(float_of(magnitude) + large) - bits_of(large);
        symbols[i] = (int32_t)((float_of(magnitude) >= tiny ? normal : below) | (u >> 24 & 0x80u));
    }
}

/* x over the scale of its bucket. */
GW_INLINE void relative(const float *x, int64_t n, float scale, float *out) {
    for (int64_t i = 0; i < n; i++) out[i] = between(x[i] / scale, -1.0f, 1.0f);
}

GW_INLINE void to_levels(const rounding *job, const float *x, const uint16_t *random, int64_t n,
                         int32_t *symbols) {
    const int32_t s = job->entries - 1;
    if (job->powers) to_powers(x, random, n, job->padded[1], s, symbols);
    else if (s <= 1) to_few(x, random, n, job->padded, job->inner, 1, s, symbols);
    else if (s <= 3) to_few(x, random, n, job->padded, job->inner, 3, s, symbols);
    else if (s <= 7) to_few(x, random, n, job->padded, job->inner, 7, s, symbols);
    else if (s <= FEW) to_few(x, random, n, job->padded, job->inner, FEW, s, symbols);
    else to_many(x, random, n, job->padded, job->inner, job->keys, s, symbols);
}

GW_INLINE void to_symbols(const rounding *job, const float *x, const uint16_t *random, int64_t n,
                          int64_t bucket, int32_t *symbols) {
    const float scale = job->scale ? safe(job->scale[bucket]) : 1.0f;
    const float start = job->start ? job->start[bucket] : 0.0f;
    if (job->rule == TO_WHOLE)
        to_whole(x, random, n, start, scale, job->least, job->most, symbols);
    else if (job->rule == TO_NEAREST)
        to_nearest(x, n, start, scale, job->least, job->most, symbols);
    else if (job->rule == TO_CELLS) {
        if (job->entries <= 2) to_cells(x, n, scale, job->padded, 2, job->entries, symbols);
        else if (job->entries <= 4) to_cells(x, n, scale, job->padded, 4, job->entries, symbols);
        else if (job->entries <= 8) to_cells(x, n, scale, job->padded, 8, job->entries, symbols);
        else to_cells(x, n, scale, job->padded, FEW, job->entries, symbols);
    } else if (job->most == 448.0f)
        to_fp8(x, n, scale, 3, 0x1p-6f, 448.0f, 0x1p14f, symbols);
    else to_fp8(x, n, scale, 2, 0x1p-14f, 57344.0f, 0x1p7f, symbols);
}

GW_CLONES static void round_blocks(void *argument, int64_t first, int64_t last) {
    const rounding *job = argument;
    const int draws = job->rule == TO_LEVELS || job->rule == TO_WHOLE;
    int32_t symbols[BLOCK];
    uint16_t random[BLOCK];
    float staged[BLOCK];
    for (int64_t at = first; at < last; at += BLOCK) {
        const int64_t size = smaller(BLOCK, last - at);
        if (draws)
            gw_philox_words(job->seed, job->stream[0], job->stream[1], job->stream[2],
                            (uint32_t)(at / 8), (uint32_t *)(void *)random, (size + 1) / 2);
        for (int64_t i = 0, n; i < size; i += n) {
            const int64_t bucket = (at + i) / job->bucket;
            n = smaller(size - i, (bucket + 1) * job->bucket - (at + i));
            if (job->rule != TO_LEVELS)
                to_symbols(job, job->x + at + i, random + i, n, bucket, symbols + i);
            else if (job->scale)
                relative(job->x + at + i, n, safe(job->scale[bucket]), staged + i);
        }
        if (job->rule == TO_LEVELS)
            to_levels(job, job->scale ? staged : job->x + at, random, size, symbols);
        if (job->digits)
            gw_pack_digits(symbols, size, job->alphabet, job->digits,
                           job->packed + at / job->digits);
        else gw_pack_uints(symbols, 4, size, job->width, job->packed + at / 8 * job->width);
    }
}

/* Whether levels[1 ..] are consecutive powers of two in the normal range. */
static int32_t powers_of_two(const float *levels, int32_t entries) {
    if ((bits_of(levels[1]) & 0x807FFFFFu) || bits_of(levels[1]) == 0) return 0;
    for (int32_t j = 2; j < entries; j++)
        if (levels[j] != 2 * levels[j - 1]) return 0;
    return 1;
}

/* `table` holds `entries` levels from 0 to 1 (of magnitudes beyond one only if they are powers of
   two), at most 256, or edges, at most 16. A scale comes for each bucket, or null. */
void gw_round(const float *x, const float *scale, const float *start, int64_t count,
              int64_t bucket, int32_t rule, const float *table, int32_t entries, float least,
              float most, uint64_t seed, uint32_t stream0, uint32_t stream1, uint32_t stream2,
              int32_t alphabet, int32_t width, int32_t digits, uint8_t *packed) {
    rounding job = {.x = x, .scale = scale, .start = start, .count = count, .bucket = bucket,
                    .rule = rule, .alphabet = alphabet, .width = width, .digits = digits,
                    .entries = entries, .least = least, .most = most, .seed = seed,
                    .stream = {stream0, stream1, stream2}, .packed = packed};
    uint8_t keys[KEYS];
    const float none = __builtin_inff();
    for (int32_t j = 0; j <= MOST; j++) job.padded[j] = j < entries ? table[j] : none;
    for (int32_t j = 0; j <= MOST; j++) job.inner[j] = j < entries - 1 ? table[j] : none;
    if (rule == TO_LEVELS) {
        job.powers = entries > 2 && powers_of_two(table, entries);
        if (!job.powers && entries > FEW + 1) {
            int32_t low = 0;
            for (uint32_t key = 0; key < KEYS; key++) {
                while (low < entries - 2 && table[low + 1] <= float_of(key << 17)) low++;
                keys[key] = (uint8_t)low;
            }
            job.keys = keys;
        }
    }
    gw_parallel(round_blocks, &job, count, BLOCK, LEAST);
}

/* Back. */

typedef struct {
    const uint8_t *packed;
    const float *scale, *start;
    int64_t count, bucket;
    int32_t width, digits;
    const float *table;
    int32_t in_byte; /* symbols of one byte if that is a whole number, else 0 */
    float (*bytes)[8];
    float *out;
    int32_t bad;
} reading;

GW_INLINE void look_up(const reading *job, const uint8_t *from, int64_t n, int in_byte,
                       float *values) {
    for (int64_t i = 0, b = 0; i < n; i += in_byte, b++)
        memcpy(values + i, job->bytes[from[b]], in_byte == 5 || in_byte == 3
                                                    ? 8 * sizeof(float)
                                                    : (size_t)in_byte * sizeof(float));
}

GW_CLONES static void read_blocks(void *argument, int64_t first, int64_t last) {
    reading *job = argument;
    const int past_caches = job->count * 4 >= STREAM_BYTES;
    float values[BLOCK + 16];
    int32_t symbols[BLOCK];
    for (int64_t at = first; at < last; at += BLOCK) {
        const int64_t size = smaller(BLOCK, last - at);
        const uint8_t *from = job->packed + (job->digits ? at / job->digits : at / 8 * job->width);
        if (job->in_byte == 8) look_up(job, from, size, 8, values);
        else if (job->in_byte == 5) look_up(job, from, size, 5, values);
        else if (job->in_byte == 4) look_up(job, from, size, 4, values);
        else if (job->in_byte == 3) look_up(job, from, size, 3, values);
        else if (job->in_byte == 2) look_up(job, from, size, 2, values);
        else if (job->width == 8)
            for (int64_t i = 0; i < size; i++) values[i] = job->table[from[i]];
        else {
            gw_unpack_uints(from, size, job->width, symbols);
            for (int64_t i = 0; i < size; i++) values[i] = job->table[symbols[i]];
        }
        uint32_t top = 0;
        for (int64_t i = 0; i < size; i++) {
            const uint32_t u = bits_of(values[i]) & 0x7FFFFFFFu;
            top = u > top ? u : top;
        }
        if (top >= 0x7F800000u) __atomic_store_n(&job->bad, 1, __ATOMIC_RELAXED);
        for (int64_t i = 0, n; i < size; i += n) {
            const int64_t bucket = (at + i) / job->bucket;
            n = smaller(size - i, (bucket + 1) * job->bucket - (at + i));
            const float scale = job->scale ? job->scale[bucket] : 1.0f, most = 0x1.fffffep127f;
            float *v = values + i;
            if (job->start) {
                const float start = job->start[bucket];
                for (int64_t k = 0; k < n; k++) v[k] = between(v[k] * scale + start, -most, most);
            } else
                for (int64_t k = 0; k < n; k++) v[k] = between(v[k] * scale, -most, most);
        }
        put(job->out + at, values, size * 4, past_caches);
    }
    put_done();
}

/* `table` has 2^width entries, or one for each digit, and NaN where a symbol is none. Returns 1 if
   a symbol named a number that is not finite, else 0. */
int32_t gw_from_table(const uint8_t *packed, const float *scale, const float *start, int64_t count,
                      int64_t bucket, int32_t alphabet, int32_t width, int32_t digits,
                      const float *table, float *out) {
    float bytes[256][8];
    const int32_t in_byte = digits ? digits : width <= 4 && 8 % width == 0 ? 8 / width : 0;
    for (int byte = 0; in_byte && byte < 256; byte++) {
        int rest = byte;
        for (int d = 0; d < in_byte; d++) {
            const int base = digits ? alphabet : 1 << width;
            bytes[byte][d] = table[rest % base];
            rest /= base;
        }
        for (int d = 0; d < 8; d++)
            if (rest || d >= in_byte) bytes[byte][d] = __builtin_nanf("");
    }
    reading job = {packed, scale, start, count, bucket, width, digits,
                   table,  in_byte, bytes, out,  0};
    gw_parallel(read_blocks, &job, count, BLOCK, LEAST);
    return job.bad;
}

/* Of two numbers of each bucket the one that a bit names. */

typedef struct {
    const uint8_t *packed;
    const float *pairs;
    int64_t count, bucket;
    float *out;
} choosing;

GW_CLONES static void choose_blocks(void *argument, int64_t first, int64_t last) {
    const choosing *job = argument;
    const int past_caches = job->count * 4 >= STREAM_BYTES;
    int32_t bits[BLOCK];
    float values[BLOCK];
    for (int64_t at = first; at < last; at += BLOCK) {
        const int64_t size = smaller(BLOCK, last - at);
        gw_unpack_uints(job->packed + at / 8, size, 1, bits);
        for (int64_t i = 0, n; i < size; i += n) {
            const int64_t bucket = (at + i) / job->bucket;
            n = smaller(size - i, (bucket + 1) * job->bucket - (at + i));
            const float zero = job->pairs[2 * bucket], one = job->pairs[2 * bucket + 1];
            for (int64_t k = i; k < i + n; k++) values[k] = bits[k] ? one : zero;
        }
        put(job->out + at, values, size * 4, past_caches);
    }
    put_done();
}

void gw_from_pairs(const uint8_t *packed, const float *pairs, int64_t count, int64_t bucket,
                   float *out) {
    choosing job = {packed, pairs, count, bucket, out};
    gw_parallel(choose_blocks, &job, count, BLOCK, LEAST);
}

/* Zero-run coding of 3LC: `zero` bytes, of which up to `longest` in a row become one byte,
   `shift` plus their number from two on; other bytes stay. */

GW_CLONES int64_t gw_shorten(const uint8_t *bytes, int64_t count, int32_t zero, int32_t longest,
                             int32_t shift, uint8_t *code) {
    int64_t length = 0;
    for (int64_t i = 0; i < count;) {
        int64_t run = 0;
        while (run < longest && i + run < count && bytes[i + run] == zero) run++;
        code[length++] = run > 1 ? (uint8_t)(shift + run) : bytes[i];
        i += run ? run : 1;
    }
    return length;
}

/* How many bytes they come to; no more than `room` are written, where there is room. */
int64_t gw_lengthen(const uint8_t *code, int64_t length, int32_t zero, int32_t shift,
                    uint8_t *bytes, int64_t room) {
    int64_t count = 0;
    for (int64_t i = 0; i < length; i++) {
        const int64_t run = code[i] > shift + 1 ? code[i] - shift : 1;
        if (count + run <= room) {
            if (run == 1) bytes[count] = code[i];
            else memset(bytes + count, zero, (size_t)run);
        }
        count += run;
    }
    return count;
}

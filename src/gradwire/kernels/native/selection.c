/* Elements of large magnitude, as reference/selection.py: error feedback, selection and the new
   residual in one pass. Bits of a float's magnitude, read as an integer, order as the magnitudes
   do, with infinity and NaN above all numbers; so thresholds here are integers. */
#include "stream.h"

enum { BLOCK = 512, BINS = 1 << 11, SAMPLES = 1 << 16, RUN = 8 };

GW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

GW_INLINE uint32_t magnitude_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u & 0x7FFFFFFFu;
}

/* Selects all magnitudes above `threshold` and the first `ties` equal to it, in order. Stores at
   most `capacity` of them, returns how many there are. `lost` (or null) gets the others, with
   zeros in place of the selected if `clear`. */
GW_INLINE int64_t collect(const float *x, const float *residual, int64_t count,
                          uint32_t threshold, int64_t ties, int64_t capacity, int64_t *indices,
                          float *values, float *lost, int clear) {
    const int past_caches = lost && lost != residual && count * 4 >= STREAM_BYTES;
    float p[BLOCK];
    uint8_t hit[BLOCK];
    int64_t found = 0;
    for (int64_t at = 0; at < count; at += BLOCK) {
        const int64_t n = smaller(BLOCK, count - at);
        if (n == BLOCK) corrected(x + at, residual ? residual + at : residual, BLOCK, p);
        else {
            corrected(x + at, residual ? residual + at : residual, n, p);
            memset(p + n, 0, (size_t)(BLOCK - n) * sizeof *p);
        }
        for (int i = 0; i < BLOCK; i++) {
            uint32_t u;
            memcpy(&u, p + i, 4);
            hit[i] = (u & 0x7FFFFFFFu) >= threshold;
        }
        for (int64_t group = 0; group < n; group += 8) {
            uint64_t word;
            memcpy(&word, hit + group, 8);
            for (; word; word &= word - 1) {
                const int64_t i = group + __builtin_ctzll(word) / 8;
                if (i >= n) break; /* what fills the last block up */
                if (magnitude_bits(p[i]) == threshold && ties-- <= 0) continue;
                if (found < capacity) {
                    indices[found] = at + i;
                    values[found] = p[i];
                }
                found++;
                if (clear) p[i] = 0.0f;
            }
        }
        if (lost) put(lost + at, p, n * 4, past_caches);
    }
    put_done();
    return found;
}

GW_CLONES int64_t gw_select_above(const float *x, const float *residual, int64_t count,
                                  uint32_t threshold, int64_t capacity, int64_t *indices,
                                  float *values, float *lost) {
    return collect(x, residual, count, threshold, INT64_MAX, capacity, indices, values, lost, 1);
}

/* The rank-th largest magnitude (rank >= 1), 11 + 10 + 10 bits at a time, and how many of those
   equal to it belong to the first `rank`. */
GW_INLINE uint32_t ranked(const float *x, const float *residual, int64_t count, int64_t rank,
                          int64_t *ties) {
    static const int shifts[3] = {20, 10, 0};
    uint32_t prefix = 0;
    float p[BLOCK];
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level], above = level ? shifts[level - 1] : 31;
        const uint32_t mask = (1u << (above - shift)) - 1;
        int64_t bins[2][BINS]; /* two, so that equal neighbours do not wait for one another */
        memset(bins, 0, sizeof bins);
        for (int64_t at = 0; at < count; at += BLOCK) {
            const int64_t n = smaller(BLOCK, count - at);
            corrected(x + at, residual ? residual + at : residual, n, p);
            for (int64_t i = 0; i < n; i++) {
                const uint32_t u = magnitude_bits(p[i]);
                if (u >> above == prefix >> above) bins[i % 2][u >> shift & mask]++;
            }
        }
        uint32_t bin = mask;
        for (;; bin--) {
            const int64_t here = bins[0][bin] + bins[1][bin];
            if (here >= rank || bin == 0) break;
            rank -= here;
        }
        prefix |= bin << shift;
    }
    *ties = rank;
    return prefix;
}

/* A threshold that a little more than `rank` elements are likely to reach, from a sample of runs
   at equal distances. */
GW_INLINE uint32_t guess(const float *x, const float *residual, int64_t count, int64_t rank) {
    float sample[SAMPLES];
    const int64_t runs = SAMPLES / RUN, distance = count / runs;
    for (int64_t r = 0; r < runs; r++)
        for (int64_t j = 0; j < RUN; j++) {
            const int64_t at = r * distance + j;
            sample[r * RUN + j] = residual ? x[at] + residual[at] : x[at];
        }
    const double expected = (double)SAMPLES * (double)rank / (double)count;
    const double wanted = 1.05 * expected + 5.0 * __builtin_sqrt(expected) + 8.0;
    if (wanted >= SAMPLES) return 0;
    int64_t ties;
    return ranked(sample, 0, SAMPLES, (int64_t)wanted, &ties);
}

/* The `rank` largest magnitudes, 1 <= rank <= count, of equal ones the first; indices ascend.
   `capacity` >= rank is the room in `indices` and `values`. `lost` may be null. */
GW_CLONES void gw_select_largest(const float *x, const float *residual, int64_t count,
                                 int64_t rank, int64_t capacity, int64_t *indices, float *values,
                                 float *lost) {
    if (count >= 4 * SAMPLES && rank < count / 2) {
        /* Exact whatever the sample says: it only decides how many candidates there are. */
        const uint32_t low = guess(x, residual, count, rank);
        const int64_t found = collect(x, residual, count, low, INT64_MAX, capacity, indices,
                                      values, lost, 0);
        if (rank <= found && found <= capacity) {
            int64_t ties, kept = 0;
            const uint32_t threshold = ranked(values, 0, found, rank, &ties);
            for (int64_t i = 0; i < found; i++) {
                const uint32_t u = magnitude_bits(values[i]);
                if (u < threshold || (u == threshold && ties-- <= 0)) continue;
                indices[kept] = indices[i];
                values[kept] = values[i];
                kept++;
                if (lost) lost[indices[i]] = 0.0f;
            }
            return;
        }
    }
    int64_t ties;
    const uint32_t threshold = ranked(x, residual, count, rank, &ties);
    collect(x, residual, count, threshold, ties, capacity, indices, values, lost, 1);
}

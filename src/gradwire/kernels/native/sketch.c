/* Count sketches, as reference/sketch.py: hashing, signs, and sums or medians, block by block. */
#include "threads.h"

enum { BLOCK = 256, LEAST = 1 << 14, MOST_ROWS = 64 };

typedef struct {
    const float *x;
    float *table;
    int64_t count, columns, rows;
    const uint64_t *multipliers, *offsets;
    float *out;
} sketch;

/* The column of each element of a block in one row, and the sign bit to flip. */
GW_INLINE void hash(const sketch *s, int64_t row, int64_t at, int64_t n, uint32_t *column,
                    uint32_t *sign) {
    const uint64_t a = s->multipliers[row], b = s->offsets[row], columns = (uint64_t)s->columns;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t h = (uint32_t)((a * (uint64_t)(at + i) + b) >> 32);
        column[i] = (uint32_t)((uint64_t)(h >> 1) * columns >> 31);
        sign[i] = h << 31;
    }
}

GW_CLONES static void sketch_rows(void *job, int64_t first, int64_t last) {
    const sketch *s = job;
    uint32_t column[BLOCK], sign[BLOCK];
    float signedx[BLOCK];
    for (int64_t at = 0; at < s->count; at += BLOCK) {
        const int64_t n = s->count - at < BLOCK ? s->count - at : BLOCK;
        for (int64_t row = first; row < last; row++) {
            float *table = s->table + row * s->columns;
            hash(s, row, at, n, column, sign);
            for (int64_t i = 0; i < n; i++) {
                uint32_t u;
                memcpy(&u, s->x + at + i, 4);
                u ^= sign[i];
                memcpy(signedx + i, &u, 4);
            }
            for (int64_t i = 0; i < n; i++) table[column[i]] += signedx[i];
        }
    }
}

void gw_sketch(const float *x, int64_t count, int64_t rows, int64_t columns,
               const uint64_t *multipliers, const uint64_t *offsets, float *table) {
    sketch s = {.x = x, .table = table, .count = count, .columns = columns, .rows = rows,
                .multipliers = multipliers, .offsets = offsets};
    gw_parallel(sketch_rows, &s, rows, 1, LEAST / (count + 1) + 1);
}

GW_CLONES static void median_part(void *job, int64_t first, int64_t last) {
    const sketch *s = job;
    uint32_t column[BLOCK], sign[BLOCK];
    float estimates[MOST_ROWS][BLOCK];
    for (int64_t block = first; block < last; block++) {
        const int64_t at = block * BLOCK;
        const int64_t n = s->count - at < BLOCK ? s->count - at : BLOCK;
        for (int64_t row = 0; row < s->rows; row++) {
            const float *table = s->table + row * s->columns;
            hash(s, row, at, n, column, sign);
            for (int64_t i = 0; i < n; i++) {
                uint32_t u;
                memcpy(&u, table + column[i], 4);
                u ^= sign[i];
                memcpy(estimates[row] + i, &u, 4);
            }
        }
        /* Rows are sorted by exchanges of neighbours, for all elements of the block at once. */
        for (int64_t round = 0; round < s->rows; round++)
            for (int64_t row = round % 2; row + 1 < s->rows; row += 2) {
                float *low = estimates[row], *high = estimates[row + 1];
                for (int64_t i = 0; i < n; i++) {
                    const float a = low[i], b = high[i];
                    low[i] = b < a ? b : a;
                    high[i] = b < a ? a : b;
                }
            }
        memcpy(s->out + at, estimates[s->rows / 2], (size_t)n * sizeof(float));
    }
}

/* rows is odd and at most MOST_ROWS. */
void gw_sketch_medians(const float *table, int64_t count, int64_t rows, int64_t columns,
                       const uint64_t *multipliers, const uint64_t *offsets, float *out) {
    sketch s = {.table = (float *)table, .count = count, .columns = columns, .rows = rows,
                .multipliers = multipliers, .offsets = offsets, .out = out};
    gw_parallel(median_part, &s, (count + BLOCK - 1) / BLOCK, 1, LEAST / BLOCK);
}

/* What the polar kernels share: operations on rows. */
#ifndef GRADWIRE_POLAR_H
#define GRADWIRE_POLAR_H

#include "native.h"

/* Kinds of nodes, as in reference/polar.py. */
enum { GW_POLAR_FROZEN, GW_POLAR_FREE, GW_POLAR_REPETITION, GW_POLAR_PARITY, GW_POLAR_MIXED };

/* A row is one position of `lanes` = 8, 16, 32 or 64 blocks: as many ratios of int8, or as many bits.
   `count` is rows times lanes. Vectors may be wider than what there is: whatever is read or written
   has GW_POLAR_SLACK more bytes, and what comes after `count` may be overwritten. With 64 lanes
   nothing is. */
enum { GW_POLAR_SLACK = 64 };

typedef struct {
    /* alpha has 2 count ratios, of a first and a second half; out has count. */
    void (*f)(const int8_t *alpha, int64_t count, int corrected, int8_t *out);
    /* beta are the first half's bits, null if all are zero; out may be alpha. */
    void (*g)(const int8_t *alpha, const uint8_t *beta, int64_t count, int8_t *out);
    /* -magnitude where a bit is one, else magnitude. */
    void (*spread)(const uint8_t *bits, int64_t count, int magnitude, int8_t *out);
    void (*decide)(const int8_t *alpha, int64_t count, uint8_t *beta);
    void (*parity)(const int8_t *alpha, int64_t rows, int64_t lanes, uint8_t *beta);
} gw_polar_rows;

/* What tests allow at most: 0 for plain C, 1 for AVX2 too, 2 for AVX-512 too. */
int32_t gw_polar_level(void);

/* The fastest that the processor has. */
const gw_polar_rows *gw_polar_best_rows(void);

/* Of other files: lanes.c and tables.c say what they do. */
enum { GW_SUMMED = 512 };
void gw_polar_fill(const int8_t *ratios, int64_t count, int64_t blocks, int64_t used, int64_t n,
                   int32_t lanes, int32_t certain, int8_t *out);
void gw_join_lanes(const uint8_t *rows, int64_t groups, int64_t count, int64_t blocks,
                   int32_t lanes, uint8_t *out);
double gw_fold_signed(const float *x, int64_t n, const uint8_t *bits, const float *values);
void gw_sum_rows(double *rows, int64_t count, int64_t width);

#endif

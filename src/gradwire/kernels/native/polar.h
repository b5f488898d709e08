/* What the polar kernels share: operations on rows, each one position of 64 blocks. */
#ifndef GRADWIRE_POLAR_H
#define GRADWIRE_POLAR_H

#include "native.h"

/* Kinds of nodes, as in reference/polar.py. */
enum { GW_POLAR_FROZEN, GW_POLAR_FREE, GW_POLAR_REPETITION, GW_POLAR_PARITY, GW_POLAR_MIXED };

typedef struct {
    void (*f)(const int8_t *alpha, int64_t half, int corrected, int8_t *out);
    void (*g)(const int8_t *alpha, const uint64_t *beta, int64_t half, int8_t *out);
    void (*spread)(const uint64_t *bits, int64_t rows, int magnitude, int8_t *out);
    void (*decide)(const int8_t *alpha, int64_t rows, uint64_t *beta);
    void (*parity)(const int8_t *alpha, int64_t rows, uint64_t *beta);
} gw_polar_rows;

/* The fastest that the processor has. */
const gw_polar_rows *gw_polar_best_rows(void);

#endif

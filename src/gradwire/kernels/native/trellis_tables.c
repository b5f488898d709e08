/* Tables of a trellis-coded quantiser, as reference/trellis_tables.py chooses them. */
#include "trellis.h"

#include <math.h>

enum {
    LEVEL = 47, /* the largest, and minus the smallest */
    GROUPINGS = 3,
    MOST_TEXT = 2 + 8 + 6 * CLASSES * 15,
};

static const int64_t SHARED[GROUPINGS] = {1, 2, 16}, LEAST_SHARED[2] = {2048, 512};

/* The bits of a table as digits, and what they and the indices take together. */
typedef struct {
    double size;
    int32_t length;
    int8_t levels[2 * CLASSES][3];
    char text[MOST_TEXT];
} written;

static int32_t clamped(int64_t level) {
    return (int32_t)(level < -LEVEL ? -LEVEL : level > LEVEL ? LEVEL : level);
}

static int32_t code_of(int32_t n) { return n > 0 ? 2 * n : 1 - 2 * n; }

static int32_t bit_length(int32_t n) { return 32 - __builtin_clz((uint32_t)n); }

static void write_number(written *w, int32_t n, int32_t bits) {
    for (int32_t b = bits - 1; b >= 0; b--) w->text[w->length++] = (char)('0' + (n >> b & 1));
}

static void write_level(written *w, int32_t n) {
    const int32_t code = code_of(n);
    write_number(w, code, 2 * bit_length(code) - 1);
}

/* `bits`: of an event, by LEVEL + the level of its odds. */
static int32_t best_level(int64_t yes, int64_t no, int32_t guess, const double *bits,
                          double *least) {
    const int32_t nearest =
        clamped((int64_t)rint(3 * log2(((double)yes + 0.4) / ((double)no + 0.4))));
    const int32_t first = guess < nearest ? guess : nearest;
    const int32_t last = guess < nearest ? nearest : guess;
    int32_t best = guess;
    *least = INFINITY;
    for (int32_t level = first; level <= last; level++) {
        double cost = (double)yes * bits[LEVEL + level] + (double)no * bits[LEVEL - level];
        cost += 2 * bit_length(code_of(level - guess)) - 1;
        if (cost < *least) {
            *least = cost;
            best = level;
        }
    }
    return best;
}

static void write_tables(written *w, const int64_t *counts, int32_t shared, const double *bits) {
    const int64_t width = SHARED[shared], groups = CLASSES / width;
    int64_t sums[CLASSES][2][KINDS] = {{{0}}};
    int64_t first = groups, last = 0;
    for (int64_t c = 0; c < CLASSES; c++)
        for (int q = 0; q < 2; q++)
            for (int k = 0; k < KINDS; k++) {
                const int64_t n = counts[(2 * c + q) * KINDS + k];
                sums[c / width][q][k] += n;
                if (n && first == groups) first = c / width;
                if (n) last = c / width;
            }
    if (first == groups) first = 0;
    w->length = 0;
    w->size = 0;
    write_number(w, shared, 2);
    if (groups > 1) {
        write_number(w, (int32_t)first, 4);
        write_number(w, (int32_t)last, 4);
    }
    const int32_t front = w->length;
    int32_t levels[CLASSES][2][3];
    for (int64_t g = first; g <= last; g++)
        for (int q = 0; q < 2; q++) {
            const int64_t *const own = sums[g][q];
            const int64_t yes[3] = {own[1] + own[2], own[1], own[3]};
            const int64_t no[3] = {own[0], own[2], own[2]};
            int32_t guess[3] = {clamped(3 * (g * width + (width - 1) / 2 - CLASSES / 2)), 6, -6};
            if (g > first) {
                guess[0] = clamped(levels[g - 1][q][0] + 3 * width);
                guess[1] = clamped(levels[g - 1][q][1] - width);
                guess[2] = clamped(levels[g - 1][q][2] + 2 * width);
            }
            for (int t = 0; t < 3; t++) {
                double cost;
                levels[g][q][t] = best_level(yes[t], no[t], guess[t], bits, &cost);
                w->size += cost;
                write_level(w, levels[g][q][t] - guess[t]);
            }
            w->size += (double)(own[1] + own[2]);
        }
    w->size += front;
    for (int64_t c = 0; c < CLASSES; c++) {
        const int64_t g = c / width < first ? first : c / width > last ? last : c / width;
        for (int q = 0; q < 2; q++)
            for (int t = 0; t < 3; t++) w->levels[2 * c + q][t] = (int8_t)levels[g][q][t];
    }
}

/* `counts` [2 CLASSES, KINDS], none negative; `bits` [2 LEVEL + 1]; `levels` [2 CLASSES, 3];
   `text` has room for MOST_TEXT. The length of the text. */
int32_t gw_trellis_tables(const int64_t *counts, const double *bits, int8_t *levels, char *text,
                          double *size) {
    written all[GROUPINGS];
    int64_t total = 0;
    for (int c = 0; c < 2 * CLASSES; c++)
        for (int k = 0; k < 3; k++) total += counts[c * KINDS + k];
    const int first = (total < LEAST_SHARED[0]) + (total < LEAST_SHARED[1]);
    int best = first;
    for (int shared = first; shared < GROUPINGS; shared++) {
        write_tables(&all[shared], counts, shared, bits);
        if (all[shared].size < all[best].size) best = shared;
    }
    memcpy(levels, all[best].levels, sizeof all[best].levels);
    memcpy(text, all[best].text, (size_t)all[best].length);
    *size = all[best].size;
    return all[best].length;
}

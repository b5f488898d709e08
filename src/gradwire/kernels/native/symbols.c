/* Counting symbols and finding the rare ones, as reference/symbols.py. Symbols have 1, 4 or 8
   bytes. */
#include "native.h"

enum { SMALL = 1024 };

/* An entry too many collects what is no symbol. */
#define GW_COUNT(TYPE, NAME)                                                                \
    GW_INLINE void count_##NAME(const TYPE *symbols, int64_t count, uint64_t alphabet,      \
                                uint32_t *t0, uint32_t *t1, uint32_t *t2, uint32_t *t3) {   \
        int64_t i = 0;                                                                      \
        for (; i + 4 <= count; i += 4) {                                                    \
            const uint64_t a = (uint64_t)symbols[i], b = (uint64_t)symbols[i + 1];          \
            const uint64_t c = (uint64_t)symbols[i + 2], d = (uint64_t)symbols[i + 3];      \
            t0[a < alphabet ? a : alphabet]++;                                              \
            t1[b < alphabet ? b : alphabet]++;                                              \
            t2[c < alphabet ? c : alphabet]++;                                              \
            t3[d < alphabet ? d : alphabet]++;                                              \
        }                                                                                   \
        for (; i < count; i++) {                                                            \
            const uint64_t a = (uint64_t)symbols[i];                                        \
            t0[a < alphabet ? a : alphabet]++;                                              \
        }                                                                                   \
    }                                                                                       \
    GW_INLINE int64_t others_##NAME(const TYPE *symbols, int64_t count, int64_t frequent,   \
                                    int64_t capacity, int64_t *positions, int32_t *others) { \
        int64_t found = 0;                                                                  \
        for (int64_t i = 0; i < count; i++) {                                               \
            const int64_t symbol = (int64_t)symbols[i];                                     \
            positions[found] = i;                                                           \
            others[found] = (int32_t)(symbol - (symbol > frequent));                        \
            found += symbol != frequent;                                                    \
            if (found > capacity) return -1;                                                \
        }                                                                                   \
        return found;                                                                       \
    }
GW_COUNT(uint8_t, u8)
GW_COUNT(int32_t, i32)
GW_COUNT(int64_t, i64)

GW_INLINE void count_any(const void *symbols, int32_t item_bytes, int64_t start, int64_t count,
                         int64_t alphabet, uint32_t *t0, uint32_t *t1, uint32_t *t2,
                         uint32_t *t3) {
    const uint64_t m = (uint64_t)alphabet;
    if (item_bytes == 1) count_u8((const uint8_t *)symbols + start, count, m, t0, t1, t2, t3);
    else if (item_bytes == 4)
        count_i32((const int32_t *)symbols + start, count, m, t0, t1, t2, t3);
    else count_i64((const int64_t *)symbols + start, count, m, t0, t1, t2, t3);
}

/* counts[s] for each symbol below `alphabet`. `table` has room for alphabet + 1. Returns 1 if
   something is no symbol. */
int32_t gw_count_symbols(const void *symbols, int32_t item_bytes, int64_t count, int64_t alphabet,
                         uint32_t *table, int64_t *counts) {
    const int64_t block = 1 << 30; /* of which 32 bits can count */
    uint32_t small[4][SMALL + 1];
    memset(counts, 0, (size_t)alphabet * sizeof *counts);
    for (int64_t start = 0; start < count; start += block) {
        const int64_t size = count - start < block ? count - start : block;
        if (alphabet <= SMALL) {
            for (int j = 0; j < 4; j++) memset(small[j], 0, (size_t)(alphabet + 1) * 4);
            count_any(symbols, item_bytes, start, size, alphabet, small[0], small[1], small[2],
                      small[3]);
            for (int64_t s = 0; s <= alphabet; s++)
                table[s] = small[0][s] + small[1][s] + small[2][s] + small[3][s];
        } else {
            memset(table, 0, (size_t)(alphabet + 1) * sizeof *table);
            count_any(symbols, item_bytes, start, size, alphabet, table, table, table, table);
        }
        if (table[alphabet]) return 1;
        for (int64_t s = 0; s < alphabet; s++) counts[s] += table[s];
    }
    return 0;
}

/* Where symbols are that differ from the frequent one, and which of the others. The results have
   room for capacity + 1. Returns how many there are, -1 if more than `capacity`. */
int64_t gw_find_others(const void *symbols, int32_t item_bytes, int64_t count, int64_t frequent,
                       int64_t capacity, int64_t *positions, int32_t *others) {
    if (item_bytes == 1) return others_u8(symbols, count, frequent, capacity, positions, others);
    if (item_bytes == 4) return others_i32(symbols, count, frequent, capacity, positions, others);
    return others_i64(symbols, count, frequent, capacity, positions, others);
}

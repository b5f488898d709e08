/* Rice codes of the gaps of a sorted set, byte for byte as reference/gaps.py. */
#include "bitstream.h"

enum { MOST_PARAMETER = 31 };

GW_INLINE int log2_of(uint64_t value) { return 63 - __builtin_clzll(value); }

/* Whether indices increase from 0 on and stay below `universe`; then the parameter at log2 of the
   mean gap, the sums of gap >> parameter for the one before it (if there is one) and the next two,
   and how many gaps plus one have 1, 2, .. 64 bits. */
GW_CLONES static uint64_t sum_quotients(const int64_t *indices, int64_t count, int first,
                                        uint64_t sums[3]) {
    uint64_t wrong = 0, a = 0, b = 0, c = 0;
    for (int64_t i = 1; i < count; i++) {
        const uint64_t gap = (uint64_t)indices[i] - (uint64_t)indices[i - 1] - 1;
        wrong |= indices[i] <= indices[i - 1];
        a += gap >> first;
        b += gap >> (first + 1);
        c += gap >> (first + 2);
    }
    sums[0] += a;
    sums[1] += b;
    sums[2] += c;
    return wrong;
}

int32_t gw_measure_gaps(const int64_t *indices, int64_t count, int64_t universe,
                        int64_t *parameter, uint64_t *sums, int64_t *lengths) {
    memset(lengths, 0, 64 * sizeof *lengths);
    memset(sums, 0, 3 * sizeof *sums);
    *parameter = 0;
    if (count == 0) return 0;
    const int64_t last = indices[count - 1];
    if (indices[0] < 0 || last >= universe || last < count - 1) return 1;
    const int64_t mean = (last + 1 - count) / count;
    const int middle = mean < 2 ? 0 : log2_of((uint64_t)mean);
    *parameter = middle < MOST_PARAMETER ? middle : MOST_PARAMETER;
    const int first = *parameter ? (int)*parameter - 1 : 0;
    for (int j = 0; j < 3; j++) sums[j] = (uint64_t)indices[0] >> (first + j);
    if (sum_quotients(indices, count, first, sums)) return 1;
    /* Four tables, since neighbours often have equal lengths. */
    uint32_t table[4][64];
    lengths[log2_of((uint64_t)indices[0] + 1)]++;
    for (int64_t start = 1; start < count; start += 1 << 30) {
        const int64_t end = count - start < 1 << 30 ? count : start + (1 << 30);
        memset(table, 0, sizeof table);
        for (int64_t i = start; i < end; i++)
            /* | 1: the set may change meanwhile */
            table[i & 3][log2_of(((uint64_t)indices[i] - (uint64_t)indices[i - 1]) | 1)]++;
        for (int j = 0; j < 64; j++)
            lengths[j] += (int64_t)table[0][j] + table[1][j] + table[2][j] + table[3][j];
    }
    return 0;
}

/* A byte 1 + parameter, `low_bytes` of low parts, `unary_bytes` of quotients. Returns 0, or 1 if
   they do not fill these bytes. */
int32_t gw_encode_rice(const int64_t *indices, int64_t count, int32_t parameter, int64_t low_bytes,
                       int64_t unary_bytes, uint8_t *out) {
    uint8_t *const unary = out + 1 + low_bytes;
    bit_writer low = write_to(out + 1, low_bytes);
    const uint64_t mask = (1ull << parameter) - 1, num_bits = 8 * (uint64_t)unary_bytes;
    const uint64_t full = (uint64_t)unary_bytes / 8;
    uint64_t next = 0, cell = 0, word = 0; /* the first bit behind the last one; its word */
    int64_t before = -1;
    out[0] = (uint8_t)(1 + parameter);
    if (unary_bytes) memset(unary, 0, (size_t)unary_bytes);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t gap = (uint64_t)indices[i] - (uint64_t)before - 1;
        before = indices[i];
        if (parameter) put_bits(&low, gap & mask, parameter);
        const uint64_t at = next + (gap >> parameter);
        if (at >= num_bits || at < next) return 1;
        next = at + 1;
        word = (at >> 6 == cell ? word : 0) | 1ull << (at & 63);
        cell = at >> 6;
        if (cell < full) memcpy(unary + 8 * cell, &word, 8);
        else memcpy(unary + 8 * cell, &word, (size_t)((uint64_t)unary_bytes - 8 * cell));
    }
    return !put_end(&low) || (next + 7) / 8 != (uint64_t)unary_bytes;
}

/* The parts behind the first byte; returns 0, or 1 if they are no code of `count` indices below
   `universe`. The caller has checked that count low parts have low_bytes, that count * 2^parameter
   does not overflow, and count > 0. */
GW_CLONES int32_t gw_decode_rice(const uint8_t *body, int64_t low_bytes, int64_t unary_bytes,
                                 int64_t count, int32_t parameter, int64_t universe,
                                 int64_t *indices) {
    const uint8_t *const unary = body + low_bytes;
    const int64_t size = low_bytes + unary_bytes;
    const uint64_t mask = (1ull << parameter) - 1;
    int64_t found = 0, next = 0, low_at = 0;
    uint64_t index = UINT64_MAX;
    for (int64_t start = 0; start < unary_bytes; start += 8)
        for (uint64_t word = load_word(unary, start, unary_bytes); word; word &= word - 1) {
            if (found == count) return 1;
            const int64_t at = 8 * start + __builtin_ctzll(word);
            const uint64_t low = load_word(body, low_at >> 3, size) >> (low_at & 7) & mask;
            index += ((uint64_t)(at - next) << parameter | low) + 1;
            indices[found++] = (int64_t)index;
            next = at + 1;
            low_at += parameter;
        }
    if (found != count || (next + 7) / 8 != unary_bytes) return 1;
    /* Unless the quotients alone fit, the sums above may have overflowed. */
    return next - count > (universe - 1) >> parameter || index >= (uint64_t)universe ||
           !padded(body, count * parameter);
}

/* Elias' codes, byte for byte as reference/elias.py. Integers are values of int64, or symbols of
   1, 4 or 8 bytes by their distance from a centre: 1 + zigzag(symbol - centre). */
#include "bitstream.h"

GW_INLINE int log2_of(uint64_t value) { return 63 - __builtin_clzll(value | 1); }

GW_INLINE uint64_t zigzag(int64_t distance) {
    return ((uint64_t)distance << 1) ^ (uint64_t)(distance >> 63);
}

/* How many integers have 1, 2, .. 64 bits: of `values`, or, if there are none, of all symbols,
   counts[s] of each. Returns 1 if one is below 1 or has more bits than a codeword may. */
int32_t gw_elias_lengths(const int64_t *values, const int64_t *counts, int64_t size,
                         int64_t centre, int64_t *lengths) {
    int64_t table[2][64] = {{0}};
    if (values)
        for (int64_t i = 0; i < size; i++) {
            if (values[i] < 1 || values[i] >> MOST_BITS) return 1;
            table[i & 1][log2_of((uint64_t)values[i])]++;
        }
    else
        for (int64_t s = 0; s < size; s++) table[0][log2_of(zigzag(s - centre) + 1)] += counts[s];
    for (int j = 0; j < 64; j++) lengths[j] = table[0][j] + table[1][j];
    return 0;
}

GW_INLINE uint64_t integer(const void *source, int32_t kind, int64_t centre, int64_t i) {
    if (kind == 0) return (uint64_t)((const int64_t *)source)[i];
    if (kind == 1) return zigzag((int64_t)((const uint8_t *)source)[i] - centre) + 1;
    if (kind == 4) return zigzag((int64_t)((const int32_t *)source)[i] - centre) + 1;
    return zigzag(((const int64_t *)source)[i] - centre) + 1;
}

GW_INLINE int32_t encode(const void *source, int32_t kind, int64_t centre, int64_t count,
                         int is_delta, const int64_t *sizes, uint8_t *out) {
    bit_writer unary = write_to(out, sizes[0]);
    bit_writer middle = write_to(out + sizes[0], sizes[1]);
    bit_writer low = write_to(out + sizes[0] + sizes[1], sizes[2]);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t value = integer(source, kind, centre, i);
        const int length = log2_of(value);
        if (length > MOST_BITS) return 1;
        if (is_delta) {
            const int of_length = log2_of((uint64_t)length + 1);
            put_bits(&unary, 1ull << of_length, of_length + 1);
            put_bits(&middle, ((uint64_t)length + 1) ^ 1ull << of_length, of_length);
        } else {
            put_bits(&unary, 1ull << length, length + 1);
        }
        put_bits(&low, (value | !value) ^ 1ull << length, length);
    }
    return !put_end(&unary) | !put_end(&middle) | !put_end(&low);
}

/* Three streams of sizes[0], [1] and [2] bytes, the middle one empty in the gamma code. Returns 0,
   or 1 if the integers do not fill them. */
int32_t gw_elias_encode(const void *source, int32_t kind, int64_t centre, int64_t count,
                        int32_t is_delta, const int64_t *sizes, uint8_t *out) {
#define GW_CASE(KIND, DELTA)            \
    if (kind == KIND && !is_delta == !DELTA) \
        return encode(source, KIND, centre, count, DELTA, sizes, out);
    GW_CASE(0, 0) GW_CASE(0, 1) GW_CASE(1, 0) GW_CASE(1, 1)
    GW_CASE(4, 0) GW_CASE(4, 1) GW_CASE(8, 0) GW_CASE(8, 1)
#undef GW_CASE
    return 1;
}

/* The bit behind the `count`-th one, or -1; `count` > 0. */
GW_CLONES static int64_t unary_end(const uint8_t *packed, int64_t size, int64_t count) {
    for (int64_t at = 0; at < size; at += 8) {
        uint64_t word = load_word(packed, at, size);
        const int64_t ones = __builtin_popcountll(word);
        if (ones >= count) {
            while (--count) word &= word - 1;
            return 8 * at + __builtin_ctzll(word) + 1;
        }
        count -= ones;
    }
    return -1;
}

GW_INLINE int64_t decode(const uint8_t *packed, int64_t size, int64_t count, int is_delta,
                         int64_t largest, int64_t centre, int64_t alphabet, void *out) {
    const int longest = log2_of((uint64_t)largest);
    const int64_t end = unary_end(packed, size, count);
    if (end < 0 || !padded(packed, end)) return -1;
    const int64_t unary_bytes = (end + 7) / 8, middle_bits = is_delta ? end - count : 0;
    const uint8_t *const middle = packed + unary_bytes;
    const int64_t middle_bytes = (middle_bits + 7) / 8, after = size - unary_bytes;
    if (middle_bytes > after || (is_delta && !padded(middle, middle_bits))) return -1;
    const uint8_t *const low = middle + middle_bytes;
    const int64_t low_size = after - middle_bytes;
    int64_t found = 0, next = 0, middle_at = 0, low_at = 0;
    uint64_t wrong = 0;
    for (int64_t start = 0; start < unary_bytes; start += 8)
        for (uint64_t word = load_word(packed, start, unary_bytes); word; word &= word - 1) {
            const int64_t at = 8 * start + __builtin_ctzll(word);
            int64_t length = at - next;
            next = at + 1;
            if (found == count || length > longest) return -1;
            if (is_delta) {
                if (length > 6) return -1; /* no length has more than six bits */
                const uint64_t rest = get_bits(middle, after, middle_at, (int32_t)length);
                middle_at += length;
                length = (int64_t)(1ull << length | rest) - 1;
                if (length > longest) return -1;
            }
            const uint64_t value =
                1ull << length | get_bits(low, low_size, low_at, (int32_t)length);
            low_at += length;
            wrong |= value > (uint64_t)largest;
            if (alphabet) {
                const uint64_t z = value - 1;
                const int64_t symbol = centre + (int64_t)(z >> 1 ^ -(z & 1));
                wrong |= (uint64_t)symbol >= (uint64_t)alphabet;
                ((int32_t *)out)[found++] = (int32_t)symbol;
            } else {
                ((int64_t *)out)[found++] = (int64_t)value;
            }
        }
    const int64_t low_bytes = (low_at + 7) / 8;
    if (wrong || found != count || low_bytes > low_size || !padded(low, low_at)) return -1;
    return unary_bytes + middle_bytes + low_bytes;
}

/* Integers in 1 .. largest < 2^MOST_BITS + 1 as int64, or with an alphabet the symbols as int32.
   Returns how many bytes they took, or -1 if the bytes are no code of so many; `count` > 0. */
GW_CLONES int64_t gw_elias_decode(const uint8_t *packed, int64_t size, int64_t count,
                                  int32_t is_delta, int64_t largest, int64_t centre,
                                  int64_t alphabet, void *out) {
    if (alphabet)
        return is_delta ? decode(packed, size, count, 1, largest, centre, alphabet, out)
                        : decode(packed, size, count, 0, largest, centre, alphabet, out);
    return is_delta ? decode(packed, size, count, 1, largest, 0, 0, out)
                    : decode(packed, size, count, 0, largest, 0, 0, out);
}

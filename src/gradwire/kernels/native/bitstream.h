/* Little-endian bit streams of codewords of different lengths: bit b is bit b % 8 of byte b / 8.
   Neither a writer nor a reader touches a byte outside of what it was given. */
#ifndef GRADWIRE_BITSTREAM_H
#define GRADWIRE_BITSTREAM_H

#include "native.h"

enum { MOST_BITS = 56 }; /* of one codeword: with a byte's offset it fits into a word */

typedef struct {
    uint8_t *next, *end;
    uint64_t word; /* what is not yet stored: its lowest `fill` bits */
    int32_t fill;
} bit_writer;

GW_INLINE bit_writer write_to(uint8_t *out, int64_t size) {
    return (bit_writer){out, out + size, 0, 0};
}

/* Appends the lowest `bits` <= MOST_BITS + 1 bits of a value that has no others. */
GW_INLINE void put_bits(bit_writer *w, uint64_t value, int32_t bits) {
    const int32_t fill = w->fill + bits;
    w->word |= value << w->fill;
    if (fill < 64) {
        w->fill = fill;
        return;
    }
    if (w->end - w->next >= 8) memcpy(w->next, &w->word, 8);
    else if (w->end > w->next) memcpy(w->next, &w->word, (size_t)(w->end - w->next));
    w->next = w->end - w->next >= 8 ? w->next + 8 : w->end;
    w->word = value >> (64 - w->fill); /* fill was at least 7 */
    w->fill = fill - 64;
}

/* Stores the rest, padded with zeros to a byte. Returns whether exactly all bytes are written. */
GW_INLINE int put_end(bit_writer *w) {
    const int64_t rest = (w->fill + 7) / 8;
    if (w->end - w->next != rest) return 0;
    if (rest) memcpy(w->next, &w->word, (size_t)rest);
    return 1;
}

/* The 64 bits from byte `at` on, zeros beyond `size`. */
GW_INLINE uint64_t load_word(const uint8_t *packed, int64_t at, int64_t size) {
    uint64_t word = 0;
    if (size - at >= 8) memcpy(&word, packed + at, 8);
    else if (size > at) memcpy(&word, packed + at, (size_t)(size - at));
    return word;
}

/* `bits` <= MOST_BITS bits from bit `at` on. */
GW_INLINE uint64_t get_bits(const uint8_t *packed, int64_t size, int64_t at, int32_t bits) {
    return load_word(packed, at >> 3, size) >> (at & 7) & ((1ull << bits) - 1);
}

/* Whether the bits of a stream's last byte behind its `num_bits` are zero; it is complete. */
GW_INLINE int padded(const uint8_t *packed, int64_t num_bits) {
    return num_bits % 8 == 0 || packed[num_bits / 8] >> num_bits % 8 == 0;
}

#endif

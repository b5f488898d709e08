/* Packing integers and signs into bits, bit for bit as reference/bits.py.

   Everything goes through blocks that stay in the L1 cache: narrow BLOCK values to bytes
   (the only part that depends on the caller's type), then squeeze the bytes, eight at a time,
   with shifts in a 64-bit word. BLOCK is a multiple of eight, so a block of any width ends on
   a byte. Staging arrays carry SLACK bytes so that 64-bit loads and stores may overrun inside
   them; what reaches the caller's memory is copied with the exact length. */
#include "threads.h"

enum { BLOCK = 512, SLACK = 8, LEAST = 1 << 16 };

GW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
/* Values or numbers on one side and bits on the other; every kernel below uses some of this. */
typedef struct {
    const void *values;
    int32_t item_bytes, width;
    uint64_t plus, minus; /* patterns */
    int64_t count;
    const uint8_t *packed;
    void *out;
    uint64_t seen; /* the union of what parts found, or their sum */
} conversion;

GW_INLINE int64_t bytes_of(int64_t bits) { return bits / 8 + (bits % 8 != 0); }

/* Eight bytes of `width` significant bits each -> 8 * width bits, and back (width <= 8):
   bytes pair up to 2 * width bits, pairs to 4 * width, and those to 8 * width. */
GW_INLINE uint64_t squeeze(uint64_t x, int width) {
    x = (x & 0x00FF00FF00FF00FFu) | ((x & 0xFF00FF00FF00FF00u) >> (8 - width));
    x = (x & 0x0000FFFF0000FFFFu) | ((x & 0xFFFF0000FFFF0000u) >> (16 - 2 * width));
    return (x & 0x00000000FFFFFFFFu) | ((x & 0xFFFFFFFF00000000u) >> (32 - 4 * width));
}

GW_INLINE uint64_t spread(uint64_t x, int width) {
    const uint64_t quads = (1ull << (4 * width)) - 1;
    const uint64_t pairs = ((1ull << (2 * width)) - 1) * 0x0000000100000001u;
    const uint64_t singles = ((1ull << width) - 1) * 0x0001000100010001u;
    x = (x & quads) | ((x & (quads << (4 * width))) << (32 - 4 * width));
    x = (x & pairs) | ((x & (pairs << (2 * width))) << (16 - 2 * width));
    return (x & singles) | ((x & (singles << width)) << (8 - width));
}

/* The stores of one squeezed group overlap the next group's, except where `T` is exactly
   `width` bytes: those loops vectorise. */
#define GW_BYTE_LOOPS(SUFFIX, T)                                                     \
    GW_INLINE void squeeze_##SUFFIX(const uint8_t *block, int64_t groups, int width, \
                                    uint8_t *staged) {                               \
        for (int64_t g = 0; g < groups; g++) {                                       \
            uint64_t x;                                                              \
            memcpy(&x, block + 8 * g, 8);                                            \
            const T y = (T)squeeze(x, width);                                        \
            memcpy(staged + g * width, &y, sizeof y);                                \
        }                                                                            \
    }                                                                                \
    GW_INLINE void spread_##SUFFIX(const uint8_t *staged, int64_t groups, int width, \
                                   uint8_t *block) {                                 \
        for (int64_t g = 0; g < groups; g++) {                                       \
            T y;                                                                     \
            memcpy(&y, staged + g * width, sizeof y);                                \
            const uint64_t x = spread(y, width);                                     \
            memcpy(block + 8 * g, &x, 8);                                            \
        }                                                                            \
    }
GW_BYTE_LOOPS(u8, uint8_t)
GW_BYTE_LOOPS(u16, uint16_t)
GW_BYTE_LOOPS(u32, uint32_t)
GW_BYTE_LOOPS(u64, uint64_t)

/* Bytes of `count` values of width <= 8 into `packed`; the block has room to round up to 8. */
GW_INLINE void pack_bytes(uint8_t *block, int64_t count, int width, uint8_t *packed) {
    uint8_t staged[BLOCK + SLACK];
    const int64_t groups = bytes_of(count);
    for (int64_t i = count; i < 8 * groups; i++) block[i] = 0;
    if (width == 1) squeeze_u8(block, groups, 1, staged);
    else if (width == 2) squeeze_u16(block, groups, 2, staged);
    else if (width == 4) squeeze_u32(block, groups, 4, staged);
    else if (width == 8) memcpy(staged, block, (size_t)count);
    else squeeze_u64(block, groups, width, staged);
    memcpy(packed, staged, (size_t)bytes_of(count * width));
}

GW_INLINE void unpack_bytes(const uint8_t *packed, int64_t count, int width, uint8_t *block) {
    uint8_t staged[BLOCK + SLACK];
    const int64_t groups = bytes_of(count), size = bytes_of(count * width);
    memcpy(staged, packed, (size_t)size);
    memset(staged + size, 0, (size_t)(groups * width + SLACK - size));
    if (width == 1) spread_u8(staged, groups, 1, block);
    else if (width == 2) spread_u16(staged, groups, 2, block);
    else if (width == 4) spread_u32(staged, groups, 4, block);
    else if (width == 8) memcpy(block, staged, (size_t)count);
    else spread_u64(staged, groups, width, block);
}

/* The same for 9 .. 32 bits, whose groups do not fit one 64-bit word. */
GW_INLINE void pack_words(uint32_t *block, int64_t count, int width, uint8_t *packed) {
    uint8_t staged[4 * BLOCK + SLACK];
    if (width == 16) {
        for (int64_t i = 0; i < count; i++) {
            const uint16_t y = (uint16_t)block[i];
            memcpy(staged + 2 * i, &y, 2);
        }
    } else {
        uint64_t waiting = 0; /* bits not yet stored, fewer than 64 between two pairs */
        int filled = 0;
        uint8_t *next = staged;
        if (count % 2) block[count] = 0;
        for (int64_t i = 0; i < count; i += 2) {
            const uint64_t pair = block[i] | (uint64_t)block[i + 1] << width;
            waiting |= pair << filled;
            memcpy(next, &waiting, 8);
            filled += 2 * width;
            if (filled >= 64) {
                next += 8;
                filled -= 64;
                waiting = pair >> (2 * width - filled - 1) >> 1; /* may be by 64 in all */
            }
        }
        memcpy(next, &waiting, 8);
    }
    memcpy(packed, staged, (size_t)bytes_of(count * width));
}

GW_INLINE void unpack_words(const uint8_t *packed, int64_t count, int width, uint32_t *block) {
    uint8_t staged[4 * BLOCK + SLACK];
    const int64_t size = bytes_of(count * width);
    memcpy(staged, packed, (size_t)size);
    memset(staged + size, 0, SLACK);
    if (width == 16) {
        for (int64_t i = 0; i < count; i++) {
            uint16_t y;
            memcpy(&y, staged + 2 * i, 2);
            block[i] = y;
        }
    } else {
        const uint64_t mask = (1ull << width) - 1;
        uint32_t at = 0;
        for (int64_t i = 0; i < count; i++, at += (uint32_t)width) {
            uint64_t x;
            memcpy(&x, staged + at / 8, 8);
            block[i] = (uint32_t)(x >> at % 8 & mask);
        }
    }
}

/* Narrowing returns the union of all bits seen, sign extended, to find values out of range. */
#define GW_NARROW(NAME, T, TO)                                           \
    GW_INLINE uint64_t NAME(const T *values, int64_t count, TO *block) { \
        T seen = 0;                                                      \
        for (int64_t i = 0; i < count; i++) {                            \
            seen |= values[i];                                           \
            block[i] = (TO)values[i];                                    \
        }                                                                \
        return (uint64_t)(int64_t)seen;                                  \
    }
GW_NARROW(narrow_u8_u8, uint8_t, uint8_t)
GW_NARROW(narrow_i32_u8, int32_t, uint8_t)
GW_NARROW(narrow_i64_u8, int64_t, uint8_t)
GW_NARROW(narrow_u8_u32, uint8_t, uint32_t)
GW_NARROW(narrow_i32_u32, int32_t, uint32_t)
GW_NARROW(narrow_i64_u32, int64_t, uint32_t)

GW_CLONES static void pack_uints_part(void *job, int64_t first, int64_t last) {
    conversion *c = job;
    const int32_t value_bytes = c->item_bytes, width = c->width;
    uint64_t seen = 0;
    for (int64_t start = first; start < last; start += BLOCK) {
        const int64_t size = smaller(BLOCK, last - start);
        uint8_t *target = (uint8_t *)c->out + start / 8 * width;
        const uint8_t *from8 = (const uint8_t *)c->values + start;
        const int32_t *from32 = (const int32_t *)c->values + start;
        const int64_t *from64 = (const int64_t *)c->values + start;
        if (width <= 8) {
            uint8_t block[BLOCK];
            if (value_bytes == 1) seen |= narrow_u8_u8(from8, size, block);
            else if (value_bytes == 4) seen |= narrow_i32_u8(from32, size, block);
            else seen |= narrow_i64_u8(from64, size, block);
            pack_bytes(block, size, width, target);
        } else {
            uint32_t block[BLOCK];
            if (value_bytes == 1) seen |= narrow_u8_u32(from8, size, block);
            else if (value_bytes == 4) seen |= narrow_i32_u32(from32, size, block);
            else seen |= narrow_i64_u32(from64, size, block);
            pack_words(block, size, width, target);
        }
    }
    __atomic_fetch_or(&c->seen, seen, __ATOMIC_RELAXED);
}

/* Values are uint8, int32 or int64, distinguished by their size. Returns 0, or 1 if some value lies
   outside 0 .. 2^width - 1 (then `packed` holds nothing of use). */
int32_t gw_pack_uints(const void *values, int32_t value_bytes, int64_t count, int32_t width,
                      uint8_t *packed) {
    conversion c = {.values = values, .item_bytes = value_bytes, .width = width, .out = packed};
    gw_parallel(pack_uints_part, &c, count, BLOCK, LEAST);
    return (c.seen >> width) != 0;
}

GW_CLONES static void unpack_uints_part(void *job, int64_t first, int64_t last) {
    const conversion *c = job;
    const int32_t width = c->width;
    for (int64_t start = first; start < last; start += BLOCK) {
        const int64_t size = smaller(BLOCK, last - start);
        const uint8_t *source = c->packed + start / 8 * width;
        int32_t *to32 = (int32_t *)c->out + start;
        int64_t *to64 = (int64_t *)c->out + start;
        if (width <= 8) {
            uint8_t block[BLOCK];
            unpack_bytes(source, size, width, block);
            for (int64_t i = 0; i < size; i++) to32[i] = block[i];
        } else {
            uint32_t block[BLOCK];
            unpack_words(source, size, width, block);
            if (width < 32) memcpy(to32, block, (size_t)size * 4);
            else
                for (int64_t i = 0; i < size; i++) to64[i] = block[i];
        }
    }
}

/* Writes int32 up to width 31 and int64 at width 32. */
void gw_unpack_uints(const uint8_t *packed, int64_t count, int32_t width, void *values) {
    conversion c = {.packed = packed, .width = width, .out = values};
    gw_parallel(unpack_uints_part, &c, count, BLOCK, LEAST);
}

/* x < 0 on the bit pattern of an IEEE number, whatever the thread's denormal mode: the
   patterns from the smallest negative number (sign bit plus one) to -infinity. */
#define GW_SIGNS(BITS)                                                                         \
    GW_INLINE void signs_##BITS(const uint##BITS##_t *x, int64_t count,                        \
                                uint##BITS##_t minus_infinity, uint8_t *block) {               \
        const uint##BITS##_t first = ((uint##BITS##_t)1 << (BITS - 1)) + 1;                    \
        const uint##BITS##_t span = minus_infinity - first;                                    \
        for (int64_t i = 0; i < count; i++) block[i] = (uint##BITS##_t)(x[i] - first) <= span; \
    }                                                                                          \
    GW_INLINE void choose_##BITS(const uint8_t *block, int64_t count, uint##BITS##_t plus,     \
                                 uint##BITS##_t minus, uint##BITS##_t *x) {                    \
        for (int64_t i = 0; i < count; i++) x[i] = block[i] ? minus : plus;                    \
    }
GW_SIGNS(16)
GW_SIGNS(32)
GW_SIGNS(64)

GW_CLONES static void pack_signs_part(void *job, int64_t first, int64_t last) {
    const conversion *c = job;
    const void *x = c->values;
    for (int64_t start = first; start < last; start += BLOCK) {
        const int64_t size = smaller(BLOCK, last - start);
        uint8_t block[BLOCK];
        if (c->item_bytes == 2)
            signs_16((const uint16_t *)x + start, size, (uint16_t)c->minus, block);
        else if (c->item_bytes == 4)
            signs_32((const uint32_t *)x + start, size, (uint32_t)c->minus, block);
        else signs_64((const uint64_t *)x + start, size, c->minus, block);
        pack_bytes(block, size, 1, (uint8_t *)c->out + start / 8);
    }
}

void gw_pack_signs(const void *x, int32_t item_bytes, uint64_t minus_infinity, int64_t count,
                   uint8_t *packed) {
    conversion c = {
        .values = x, .item_bytes = item_bytes, .minus = minus_infinity, .out = packed};
    gw_parallel(pack_signs_part, &c, count, BLOCK, LEAST);
}

GW_CLONES static void unpack_signs_part(void *job, int64_t first, int64_t last) {
    const conversion *c = job;
    const uint64_t plus = c->plus, minus = c->minus;
    void *x = c->out;
    for (int64_t start = first; start < last; start += BLOCK) {
        const int64_t size = smaller(BLOCK, last - start);
        uint8_t block[BLOCK];
        unpack_bytes(c->packed + start / 8, size, 1, block);
        if (c->item_bytes == 2)
            choose_16(block, size, (uint16_t)plus, (uint16_t)minus, (uint16_t *)x + start);
        else if (c->item_bytes == 4)
            choose_32(block, size, (uint32_t)plus, (uint32_t)minus, (uint32_t *)x + start);
        else choose_64(block, size, plus, minus, (uint64_t *)x + start);
    }
}

/* Writes the pattern `plus` for a zero bit and `minus` for a one. */
void gw_unpack_signs(const uint8_t *packed, int64_t count, int32_t item_bytes, uint64_t plus,
                     uint64_t minus, void *x) {
    conversion c = {
        .packed = packed, .item_bytes = item_bytes, .plus = plus, .minus = minus, .out = x};
    gw_parallel(unpack_signs_part, &c, count, BLOCK, LEAST);
}

/* The 64 bits from bit `start` (a multiple of 64), zero beyond `num_bits`. */
GW_INLINE uint64_t load_bits(const uint8_t *packed, int64_t start, int64_t num_bits) {
    uint64_t word = 0;
    const int64_t rest = num_bits - start;
    if (rest >= 64) {
        memcpy(&word, packed + start / 8, 8);
    } else {
        memcpy(&word, packed + start / 8, (size_t)bytes_of(rest));
        word &= (1ull << rest) - 1;
    }
    return word;
}

GW_CLONES static void count_ones_part(void *job, int64_t first, int64_t last) {
    conversion *c = job;
    uint64_t ones = 0;
    for (int64_t start = first; start < last; start += 64)
        ones += (uint64_t)__builtin_popcountll(load_bits(c->packed, start, c->count));
    __atomic_fetch_add(&c->seen, ones, __ATOMIC_RELAXED);
}

int64_t gw_count_ones(const uint8_t *packed, int64_t num_bits) {
    conversion c = {.packed = packed, .count = num_bits};
    gw_parallel(count_ones_part, &c, num_bits, 64, 64 * LEAST);
    return (int64_t)c.seen;
}

/* Positions of at most `capacity` ones: the bytes may change between the count and this. */
GW_CLONES void gw_ones_positions(const uint8_t *packed, int64_t num_bits, int64_t capacity,
                                 int64_t *positions) {
    int64_t found = 0;
    for (int64_t start = 0; start < num_bits; start += 64)
        for (uint64_t word = load_bits(packed, start, num_bits); word; word &= word - 1) {
            if (found == capacity) return;
            positions[found++] = start + __builtin_ctzll(word);
        }
}

/* Returns 0, or 1 if a position lies outside 0 .. num_bits - 1. */
int32_t gw_pack_ones(const int64_t *positions, int64_t count, int64_t num_bits, uint8_t *packed) {
    if (num_bits > 0) memset(packed, 0, (size_t)bytes_of(num_bits)); /* an empty tensor is null */
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = positions[i];
        if (at < 0 || at >= num_bits) return 1;
        packed[at >> 3] |= (uint8_t)(1u << (at & 7));
    }
    return 0;
}

/* `digits` values of 0 .. base - 1 in each byte, the first one least significant, or back.
   gw_pack_digits returns 0, or 1 if a value is out of range. */
GW_INLINE uint64_t horner(const int32_t *values, int64_t bytes, int32_t base, int digits,
                          uint8_t *packed) {
    uint32_t seen = 0;
    for (int64_t b = 0; b < bytes; b++) {
        uint32_t total = 0;
        for (int d = digits - 1; d >= 0; d--) {
            const uint32_t value = (uint32_t)values[b * digits + d];
            seen |= value >= (uint32_t)base;
            total = total * (uint32_t)base + value;
        }
        packed[b] = (uint8_t)total;
    }
    return seen;
}

GW_CLONES int32_t gw_pack_digits(const int32_t *values, int64_t count, int32_t base,
                                 int32_t digits, uint8_t *packed) {
    const int64_t whole = count / digits;
    uint64_t seen;
    if (digits == 5) seen = horner(values, whole, base, 5, packed);
    else if (digits == 3) seen = horner(values, whole, base, 3, packed);
    else seen = horner(values, whole, base, digits, packed);
    if (whole * digits < count) {
        int32_t last[8] = {0};
        memcpy(last, values + whole * digits, (size_t)(count - whole * digits) * sizeof *last);
        seen |= horner(last, 1, base, digits, packed + whole);
    }
    return seen != 0;
}

void gw_unpack_digits(const uint8_t *packed, int64_t count, int32_t base, int32_t digits,
                      int32_t *values) {
    int32_t table[256][8]; /* the digits of every byte */
    for (int byte = 0; byte < 256; byte++)
        for (int d = 0, rest = byte; d < digits; d++, rest /= base) table[byte][d] = rest % base;
    int64_t byte = 0;
    /* Whole rows are copied while they fit; the next byte's overwrite what is too much. */
    for (; byte * digits + 8 <= count; byte++)
        memcpy(values + byte * digits, table[packed[byte]], sizeof table[0]);
    for (int64_t at = byte * digits; at < count; at++)
        values[at] = table[packed[at / digits]][at % digits];
}

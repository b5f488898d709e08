/* Interleaved rANS, byte for byte as reference/rans.py: 32-bit states, 16-bit words.

   The lanes of a row do not depend on one another but for the place of their next word, which
   moves by zero or one. So a step has no branch, and where AVX-512 is there to collect the words
   of sixteen lanes (compress) and to hand them out (expand), a step is sixteen lanes wide. Tables
   have one entry per symbol, its frequency and the sum of those before it, in 16 bits each. */
#include "native.h"

#include <stdlib.h>

enum { LOW = 1 << 16 };

#if defined(__x86_64__) && defined(__GNUC__)
#define GW_WIDE __attribute__((target("avx512f")))
#include <immintrin.h>
#endif

GW_INLINE uint32_t frequency_of(uint32_t entry) { return entry & 0xFFFF; }
GW_INLINE uint32_t start_of(uint32_t entry) { return entry >> 16; }

/* Pushing: lanes `from` .. `to` - 1 of a row, the last one first. In double precision a quotient
   of numbers below 2^32 and 2^15 is exact enough to be rounded down: it is a whole number or at
   least 2^-15 away from the next one, and its error is below 2^-21. */
GW_INLINE uint16_t *push(const int32_t *symbols, const uint32_t *table, int precision, int64_t from,
                         int64_t to, uint32_t *states, uint16_t *next) {
    for (int64_t j = to - 1; j >= from; j--) {
        const uint32_t entry = table[symbols[j]], f = frequency_of(entry);
        uint32_t x = states[j];
        const uint32_t full = (x >> (32 - precision)) >= f;
        next[-1] = (uint16_t)x;
        next -= full;
        x >>= 16 * full;
        const uint32_t q = (uint32_t)((double)x / f);
        states[j] = x + start_of(entry) + q * ((1u << precision) - f);
    }
    return next;
}

/* Popping: the first `width` lanes of a row, without looking where the words end. */
GW_INLINE const uint16_t *pop(const uint16_t *next, const uint32_t *symbol_of,
                              const uint32_t *table, int precision, int64_t width,
                              uint32_t *states, int32_t *symbols) {
    for (int64_t j = 0; j < width; j++) {
        const uint32_t slot = states[j] & ((1u << precision) - 1);
        const uint32_t s = symbol_of[slot], entry = table[s];
        const uint32_t x = frequency_of(entry) * (states[j] >> precision) + slot - start_of(entry);
        const uint32_t empty = x < LOW, filled = x << 16 | *next;
        symbols[j] = (int32_t)s;
        states[j] = empty ? filled : x;
        next += empty;
    }
    return next;
}

/* The same where words may run out: then `missing` is set. */
static const uint16_t *pop_last(const uint16_t *next, const uint16_t *end,
                                const uint32_t *symbol_of, const uint32_t *table, int precision,
                                int64_t width, uint32_t *states, int32_t *symbols,
                                uint32_t *missing) {
    for (int64_t j = 0; j < width; j++) {
        const uint16_t none = 0;
        const uint16_t *const word = next < end ? next : &none;
        const int64_t taken =
            pop(word, symbol_of, table, precision, 1, states + j, symbols + j) - word;
        if (taken && next == end) {
            *missing = 1;
            break;
        }
        next += taken;
    }
    return next;
}

#ifdef GW_WIDE
GW_WIDE static uint16_t *push_wide(const int32_t *symbols, const uint32_t *table, int precision,
                                   int64_t width, uint32_t *states, uint16_t *next) {
    const __m512i total = _mm512_set1_epi32(1 << precision), low = _mm512_set1_epi32(0xFFFF);
    const __m128i top = _mm_cvtsi32_si128(32 - precision);
    for (int64_t j = width - 16; j >= 0; j -= 16) {
        const __m512i s = _mm512_loadu_si512(symbols + j);
        const __m512i entry = _mm512_i32gather_epi32(s, table, 4);
        const __m512i f = _mm512_and_si512(entry, low);
        __m512i x = _mm512_loadu_si512(states + j);
        const __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_srl_epi32(x, top), f);
        const int taken = __builtin_popcount(full);
        next -= taken;
        _mm512_mask_cvtepi32_storeu_epi16(next, (__mmask16)((1u << taken) - 1),
                                          _mm512_maskz_compress_epi32(full, x));
        x = _mm512_mask_srli_epi32(x, full, x, 16);
        const __m256i q0 = _mm512_cvttpd_epu32(
            _mm512_div_pd(_mm512_cvtepu32_pd(_mm512_castsi512_si256(x)),
                          _mm512_cvtepi32_pd(_mm512_castsi512_si256(f))));
        const __m256i q1 = _mm512_cvttpd_epu32(
            _mm512_div_pd(_mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(x, 1)),
                          _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(f, 1))));
        const __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(q0), q1, 1);
        x = _mm512_add_epi32(x, _mm512_srli_epi32(entry, 16));
        x = _mm512_add_epi32(x, _mm512_mullo_epi32(q, _mm512_sub_epi32(total, f)));
        _mm512_storeu_si512(states + j, x);
    }
    return next;
}

/* Reads up to sixteen words ahead of what it takes. */
GW_WIDE static const uint16_t *pop_wide(const uint16_t *next, const uint32_t *symbol_of,
                                        const uint32_t *table, int precision, int64_t width,
                                        uint32_t *states, int32_t *symbols) {
    const __m512i slots = _mm512_set1_epi32((1 << precision) - 1);
    const __m512i low = _mm512_set1_epi32(0xFFFF), least = _mm512_set1_epi32(LOW);
    const __m128i shift = _mm_cvtsi32_si128(precision);
    for (int64_t j = 0; j < width; j += 16) {
        __m512i x = _mm512_loadu_si512(states + j);
        const __m512i slot = _mm512_and_si512(x, slots);
        const __m512i s = _mm512_i32gather_epi32(slot, symbol_of, 4);
        const __m512i entry = _mm512_i32gather_epi32(s, table, 4);
        const __m512i offset = _mm512_sub_epi32(slot, _mm512_srli_epi32(entry, 16));
        x = _mm512_mullo_epi32(_mm512_and_si512(entry, low), _mm512_srl_epi32(x, shift));
        x = _mm512_add_epi32(x, offset);
        const __mmask16 empty = _mm512_cmplt_epu32_mask(x, least);
        const __m512i ahead =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)next));
        const __m512i words = _mm512_maskz_expand_epi32(empty, ahead);
        x = _mm512_mask_or_epi32(x, empty, _mm512_slli_epi32(x, 16), words);
        next += __builtin_popcount(empty);
        _mm512_storeu_si512(states + j, x);
        _mm512_storeu_si512(symbols + j, s);
    }
    return next;
}
#endif

static int is_wide(int32_t lanes) {
#ifdef GW_WIDE
    return lanes % 16 == 0 && __builtin_cpu_supports("avx512f");
#else
    return (void)lanes, 0;
#endif
}

static uint32_t *tabulate(const int32_t *frequencies, int32_t alphabet) {
    uint32_t *const table = malloc((size_t)alphabet * sizeof *table), start = 0;
    for (int32_t s = 0; table && s < alphabet; s++) {
        table[s] = (uint32_t)frequencies[s] | start << 16;
        start += (uint32_t)frequencies[s];
    }
    return table;
}

/* Whether each symbol has a frequency. */
GW_CLONES static int all_known(const int32_t *symbols, int64_t count, const int32_t *frequencies,
                     int32_t alphabet) {
    uint32_t unknown = 0;
    for (int64_t i = 0; i < count; i++) unknown |= (uint32_t)symbols[i] >= (uint32_t)alphabet;
    if (unknown) return 0;
    for (int64_t i = 0; i < count; i++) unknown |= frequencies[symbols[i]] == 0;
    return !unknown;
}

/* `words` has room for count + 1; they are written from its end. Returns how many there are, -1
   if a symbol has no frequency, -2 without memory. */
int64_t gw_rans_encode(const int32_t *symbols, int64_t count, const int32_t *frequencies,
                       int32_t alphabet, int32_t precision, int32_t lanes, uint32_t *states,
                       uint16_t *words) {
    if (!all_known(symbols, count, frequencies, alphabet)) return -1;
    uint32_t *const table = tabulate(frequencies, alphabet);
    if (!table) return -2;
    uint16_t *const end = words + count + 1, *next = end;
    const int wide = is_wide(lanes);
    for (int32_t j = 0; j < lanes; j++) states[j] = LOW;
    int64_t row = count / lanes * lanes;
    next = push(symbols + row, table, precision, 0, count - row, states, next);
    for (row -= lanes; row >= 0; row -= lanes) {
#ifdef GW_WIDE
        if (wide) {
            next = push_wide(symbols + row, table, precision, lanes, states, next);
            continue;
        }
#endif
        next = push(symbols + row, table, precision, 0, lanes, states, next);
    }
    (void)wide;
    free(table);
    return end - next;
}

/* Frequencies add up to 2^precision and states are at least LOW: the caller has checked. Returns
   0, -1 if words are missing or left over or a state does not end where it began, -2 without
   memory. `states` are changed. */
int32_t gw_rans_decode(const uint16_t *words, int64_t num_words, uint32_t *states,
                       const int32_t *frequencies, int32_t alphabet, int32_t precision,
                       int32_t lanes, int64_t count, int32_t *symbols) {
    uint32_t *const table = tabulate(frequencies, alphabet);
    uint32_t *const symbol_of = malloc(sizeof *symbol_of << precision);
    const uint16_t *next = words, *const end = words + num_words;
    if (!table || !symbol_of) {
        free(table);
        free(symbol_of);
        return -2;
    }
    for (int32_t s = 0, slot = 0; s < alphabet; s++)
        for (int32_t i = 0; i < frequencies[s]; i++) symbol_of[slot++] = (uint32_t)s;
    const int wide = is_wide(lanes);
    uint32_t wrong = 0;
    for (int64_t row = 0; row < count && !wrong; row += lanes) {
        const int64_t width = count - row < lanes ? count - row : lanes;
        if (end - next < width + 16)
            next = pop_last(next, end, symbol_of, table, precision, width, states, symbols + row,
                            &wrong);
#ifdef GW_WIDE
        else if (wide && width == lanes)
            next = pop_wide(next, symbol_of, table, precision, width, states, symbols + row);
#endif
        else
            next = pop(next, symbol_of, table, precision, width, states, symbols + row);
    }
    (void)wide;
    wrong |= next != end;
    for (int32_t j = 0; j < lanes; j++) wrong |= states[j] != LOW;
    free(table);
    free(symbol_of);
    return wrong ? -1 : 0;
}

/* Huffman codes of limited length, byte for byte as reference/huffman.py.

   Decoding is a chain: where a codeword starts is known when the one before it has been looked up.
   Chunks are independent of one another, so several are decoded side by side. A table of the next
   FAST bits knows all codewords that short and stays in the first-level cache; longer ones, which
   are rare, are looked up by all LIMIT bits. */
#include "bitstream.h"

#include <stdlib.h>

enum { LIMIT = 15, FAST = 11, CHUNK = 2048, CHUNK_BITS = 15, LANES = 4, MOST_SYMBOLS = 1 << 16 };

typedef struct {
    int64_t weight;
    int32_t symbol;
} leaf;

static int by_weight(const void *a, const void *b) {
    const leaf *const x = a, *const y = b;
    if (x->weight != y->weight) return x->weight < y->weight ? -1 : 1;
    return x->symbol < y->symbol ? -1 : 1;
}

/* Package-merge. Returns 0, 1 if there are too many symbols, -2 without memory. */
int32_t gw_huffman_lengths(const int64_t *counts, int32_t alphabet, int64_t *lengths) {
    int64_t n = 0;
    for (int32_t s = 0; s < alphabet; s++) {
        lengths[s] = 0;
        n += counts[s] > 0;
    }
    if (n > 1 << LIMIT) return 1;
    if (n == 0) return 0;
    leaf *const leaves = malloc((size_t)n * sizeof *leaves);
    int64_t *const items = malloc(4 * (size_t)n * sizeof *items);
    uint8_t *const is_pair = malloc(2 * (size_t)n * LIMIT);
    int32_t status = -2;
    if (leaves && items && is_pair) {
        int64_t k = 0, sizes[LIMIT], size = 0;
        for (int32_t s = 0; s < alphabet; s++)
            if (counts[s] > 0) leaves[k++] = (leaf){counts[s], s};
        qsort(leaves, (size_t)n, sizeof *leaves, by_weight);
        int64_t *now = items, *before = items + 2 * n;
        for (int level = 0; level < LIMIT; level++) {
            const int64_t pairs = level ? size / 2 : 0;
            uint8_t *const kinds = is_pair + 2 * n * level;
            int64_t i = 0, j = 0;
            size = 0;
            while (i < n || j < pairs) {
                const int64_t pair = j < pairs ? before[2 * j] + before[2 * j + 1] : 0;
                const int take_pair = i == n || (j < pairs && pair < leaves[i].weight);
                kinds[size] = (uint8_t)take_pair;
                now[size++] = take_pair ? pair : leaves[i].weight;
                if (take_pair) j++;
                else i++;
            }
            sizes[level] = size;
            int64_t *const swap = now;
            now = before;
            before = swap;
        }
        int64_t bought = 2 * n - 2;
        for (int level = LIMIT - 1; level >= 0; level--) {
            int64_t pairs = 0;
            for (int64_t i = 0; i < bought && i < sizes[level]; i++)
                pairs += is_pair[2 * n * level + i];
            for (int64_t i = 0; i < bought - pairs; i++) lengths[leaves[i].symbol]++;
            bought = 2 * pairs;
        }
        if (n == 1) lengths[leaves[0].symbol] = 1;
        status = 0;
    }
    free(leaves);
    free(items);
    free(is_pair);
    return status;
}

/* The first canonical codeword of each length, from 1 on, at LIMIT bits. Returns whether lengths
   are those of a complete code: otherwise codewords would not fit. */
static int first_codewords(const int64_t *lengths, int32_t alphabet, uint32_t first[LIMIT + 1]) {
    int64_t with_length[LIMIT + 1] = {0}, sum = 0;
    for (int32_t s = 0; s < alphabet; s++) {
        if (lengths[s] < 0 || lengths[s] > LIMIT) return 0;
        with_length[lengths[s]]++;
    }
    for (int bits = 1; bits <= LIMIT; bits++) {
        first[bits] = (uint32_t)sum;
        sum += with_length[bits] << (LIMIT - bits);
    }
    return sum == 1 << LIMIT;
}

GW_INLINE int64_t symbol_at(const void *symbols, int32_t item_bytes, int64_t i) {
    if (item_bytes == 1) return ((const uint8_t *)symbols)[i];
    if (item_bytes == 4) return ((const int32_t *)symbols)[i];
    return ((const int64_t *)symbols)[i];
}

GW_INLINE int32_t encode(const void *symbols, int32_t item_bytes, int64_t count,
                         const uint32_t *table, uint64_t mask, int64_t head_bytes,
                         int64_t num_bits, uint8_t *out) {
    bit_writer head = write_to(out, head_bytes);
    uint8_t *const begin = out + head_bytes, *const end = begin + (num_bits + 7) / 8;
    uint8_t *next = begin;
    uint64_t word = 0, wrong = 0; /* the lowest `fill` bits of the word are to be stored */
    int64_t fill = 0, chunk_start = 0;
    for (int64_t start = 0; start < count; start += CHUNK) {
        const int64_t stop = count - start < CHUNK ? count : start + CHUNK;
        if (start) {
            const int64_t at = 8 * (next - begin) + fill;
            put_bits(&head, (uint64_t)(at - chunk_start), CHUNK_BITS);
            chunk_start = at;
        }
        int64_t i = start;
        /* Three codewords and what is left of a byte are 52 bits at most. */
        for (; i + 3 <= stop && end - next >= 8; i += 3) {
            for (int64_t j = i; j < i + 3; j++) {
                const uint64_t s = (uint64_t)symbol_at(symbols, item_bytes, j);
                const uint32_t entry = table[s & mask];
                wrong |= (s & ~mask) | !entry;
                word = word << (entry >> 16) | (entry & 0xFFFF);
                fill += entry >> 16;
            }
            if (wrong) return 1;
            const uint64_t swapped = __builtin_bswap64(word << (64 - fill));
            memcpy(next, &swapped, 8);
            next += fill >> 3;
            fill &= 7;
        }
        for (; i < stop; i++) {
            const uint64_t s = (uint64_t)symbol_at(symbols, item_bytes, i);
            const uint32_t entry = table[s & mask];
            if ((s & ~mask) || !entry) return 1;
            word = word << (entry >> 16) | (entry & 0xFFFF);
            for (fill += entry >> 16; fill >= 8; fill -= 8) {
                if (next == end) return 1;
                *next++ = (uint8_t)(word >> (fill - 8));
            }
        }
    }
    if (8 * (next - begin) + fill != num_bits) return 1;
    if (fill) *next = (uint8_t)(word << (8 - fill));
    return !put_end(&head);
}

/* `head_bytes` of chunk lengths and the codewords of `num_bits` bits in all. Returns 0, 1 if a
   symbol has no codeword or they do not fill these bytes, 2 if lengths are no code, -2 without
   memory. */
int32_t gw_huffman_encode(const void *symbols, int32_t item_bytes, int64_t count,
                          const int64_t *lengths, int32_t alphabet, int64_t head_bytes,
                          int64_t num_bits, uint8_t *out) {
    uint32_t next[LIMIT + 1];
    if (alphabet > MOST_SYMBOLS || !first_codewords(lengths, alphabet, next)) return 2;
    uint64_t size = 1;
    while (size < (uint64_t)alphabet) size *= 2;
    uint32_t *const table = calloc(size, sizeof *table);
    if (!table) return -2;
    for (int32_t s = 0; s < alphabet; s++) {
        const int64_t bits = lengths[s];
        if (!bits) continue;
        table[s] = next[bits] >> (LIMIT - bits) | (uint32_t)bits << 16;
        next[bits] += 1u << (LIMIT - bits);
    }
    const uint64_t mask = size - 1;
    int32_t status;
    if (item_bytes == 1)
        status = encode(symbols, 1, count, table, mask, head_bytes, num_bits, out);
    else if (item_bytes == 4)
        status = encode(symbols, 4, count, table, mask, head_bytes, num_bits, out);
    else status = encode(symbols, 8, count, table, mask, head_bytes, num_bits, out);
    free(table);
    return status;
}

typedef struct {
    const uint32_t *fast, *slow; /* by the next FAST and LIMIT bits: length << 16 | symbol */
} tables;

GW_INLINE uint32_t look_up(tables t, uint64_t ahead) {
    const uint32_t entry = t.fast[ahead >> (64 - FAST)];
    return __builtin_expect(entry != 0, 1) ? entry : t.slow[ahead >> (64 - LIMIT)];
}

/* The 57 bits or more from bit `at` on, highest first: zeros beyond the stream, or where there are
   eight bytes anyway. */
GW_INLINE uint64_t ahead_of(const uint8_t *stream, int64_t size, int64_t at) {
    return __builtin_bswap64(load_word(stream, at >> 3, size)) << (at & 7);
}

GW_INLINE uint64_t ahead_within(const uint8_t *stream, int64_t at) {
    uint64_t word;
    memcpy(&word, stream + (at >> 3), 8);
    return __builtin_bswap64(word) << (at & 7);
}

/* One chunk; returns where it ends. */
static int64_t decode_one(tables t, const uint8_t *stream, int64_t size, int64_t at, int64_t count,
                          int32_t *symbols) {
    int64_t i = 0;
    for (; i + 3 <= count; i += 3) {
        uint64_t ahead = ahead_of(stream, size, at);
        for (int64_t j = i; j < i + 3; j++) {
            const uint32_t entry = look_up(t, ahead);
            symbols[j] = (int32_t)(entry & 0xFFFF);
            ahead <<= entry >> 16;
            at += entry >> 16;
        }
    }
    for (; i < count; i++) {
        const uint32_t entry = look_up(t, ahead_of(stream, size, at));
        symbols[i] = (int32_t)(entry & 0xFFFF);
        at += entry >> 16;
    }
    return at;
}

/* LANES chunks, all of which end before the last eight bytes whatever they hold. */
static void decode_side_by_side(tables t, const uint8_t *stream, int64_t at[LANES],
                                int32_t *symbols) {
    int64_t a[LANES];
    memcpy(a, at, sizeof a);
    int64_t i = 0;
    for (; i + 3 <= CHUNK; i += 3) {
        uint64_t ahead[LANES];
        for (int lane = 0; lane < LANES; lane++) ahead[lane] = ahead_within(stream, a[lane]);
        for (int64_t j = i; j < i + 3; j++)
            for (int lane = 0; lane < LANES; lane++) {
                const uint32_t entry = look_up(t, ahead[lane]);
                symbols[lane * CHUNK + j] = (int32_t)(entry & 0xFFFF);
                ahead[lane] <<= entry >> 16;
                a[lane] += entry >> 16;
            }
    }
    for (; i < CHUNK; i++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t entry = look_up(t, ahead_within(stream, a[lane]));
            symbols[lane * CHUNK + i] = (int32_t)(entry & 0xFFFF);
            a[lane] += entry >> 16;
        }
    memcpy(at, a, sizeof a);
}

static int32_t decode_chunks(tables t, const uint8_t *head, int64_t head_bytes, int64_t size,
                             int64_t count, int32_t *symbols) {
    const uint8_t *const stream = head + head_bytes;
    const int64_t safe = size - LIMIT * CHUNK / 8 - 16;
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    int64_t at = 0;
    for (int64_t c = 0; c < chunks;) {
        int64_t starts[LANES], ends[LANES];
        if (c + LANES < chunks) { /* so each of these is whole and has a next one */
            int64_t next = at;
            for (int lane = 0; lane < LANES; lane++) {
                starts[lane] = ends[lane] = next;
                next += (int64_t)get_bits(head, head_bytes, (c + lane) * CHUNK_BITS, CHUNK_BITS);
            }
            if (starts[LANES - 1] >> 3 < safe) {
                decode_side_by_side(t, stream, ends, symbols + c * CHUNK);
                for (int lane = 0; lane + 1 < LANES; lane++)
                    if (ends[lane] != starts[lane + 1]) return 1;
                if (ends[LANES - 1] != next) return 1;
                at = next;
                c += LANES;
                continue;
            }
        }
        const int is_last = c + 1 == chunks;
        const int64_t end = decode_one(t, stream, size, at, is_last ? count - c * CHUNK : CHUNK,
                                       symbols + c * CHUNK);
        if (!is_last &&
            end - at != (int64_t)get_bits(head, head_bytes, c * CHUNK_BITS, CHUNK_BITS))
            return 1;
        at = end;
        c++;
    }
    if ((at + 7) / 8 != size) return 1;
    return at % 8 && (stream[size - 1] & (0xFF >> at % 8)) ? 3 : 0;
}

/* `head_bytes` of chunk lengths, as many as there must be for `count` > 0 symbols, then `size`
   bytes of codewords. Returns 0, 1 if the codewords do not end where they should, 2 if lengths are
   no code, 3 if there are ones in the padding, -2 without memory. */
int32_t gw_huffman_decode(const uint8_t *packed, int64_t head_bytes, int64_t size,
                          const int64_t *lengths, int32_t alphabet, int64_t count,
                          int32_t *symbols) {
    uint32_t next[LIMIT + 1];
    if (alphabet > MOST_SYMBOLS || !first_codewords(lengths, alphabet, next)) return 2;
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    if (head_bytes && !padded(packed, (chunks - 1) * CHUNK_BITS)) return 3;
    uint32_t *const memory = calloc((1 << LIMIT) + (1 << FAST), sizeof *memory);
    if (!memory) return -2;
    uint32_t *const slow = memory, *const fast = memory + (1 << LIMIT);
    for (int32_t s = 0; s < alphabet; s++) {
        const int64_t bits = lengths[s];
        if (!bits) continue;
        const uint32_t entry = (uint32_t)bits << 16 | (uint32_t)s, from = next[bits];
        next[bits] += 1u << (LIMIT - bits);
        if (bits <= FAST)
            for (uint32_t i = from >> (LIMIT - FAST); i < next[bits] >> (LIMIT - FAST); i++)
                fast[i] = entry;
        else
            for (uint32_t i = from; i < next[bits]; i++) slow[i] = entry;
    }
    const int32_t status =
        decode_chunks((tables){fast, slow}, packed, head_bytes, size, count, symbols);
    free(memory);
    return status;
}

/* Payloads of entries, positions and values, of several vectors: byte for byte those of
   `encode_indices` (coding/indices.py) and `seal` (core/payload_header.py), one after another. */
#include "bitstream.h"

int32_t gw_measure_gaps(const int64_t *, int64_t, int64_t, int64_t *, uint64_t *, int64_t *);
int32_t gw_encode_rice(const int64_t *, int64_t, int32_t, int64_t, int64_t, uint8_t *);
int32_t gw_elias_encode(const void *, int32_t, int64_t, int64_t, int32_t, const int64_t *,
                        uint8_t *);
int32_t gw_pack_ones(const int64_t *, int64_t, int64_t, uint8_t *);

enum { FIXED = 8, VALUE = 4, MODE_BITMAP = 0, MODE_GAMMA = 33, MODE_DELTA = 34 };
enum { MOST_PARAMETER = 31 };

GW_INLINE int64_t bytes_of(uint64_t bits) { return (int64_t)((bits + 7) / 8); }

/* What code a set of gaps takes, and how long it is. */
typedef struct {
    int32_t mode;
    int64_t size;     /* with the byte of the mode; 0: nothing has to be said */
    int64_t parts[3]; /* of Rice's code the low parts and the quotients, of Elias' the streams */
} index_code;

static void elias_sizes(const int64_t lengths[64], int is_delta, int64_t sizes[3]) {
    uint64_t count = 0, low = 0, middle = 0;
    for (int bits = 0; bits < 64; bits++) {
        const uint64_t own = (uint64_t)lengths[bits];
        count += own;
        low += own * (uint64_t)bits;
        if (is_delta) middle += own * (uint64_t)(63 - __builtin_clzll((uint64_t)bits + 1));
    }
    sizes[0] = bytes_of(count + (is_delta ? middle : low));
    sizes[1] = bytes_of(middle);
    sizes[2] = bytes_of(low);
}

GW_INLINE void take_shorter(index_code *best, index_code other) {
    if (other.size < best->size) *best = other;
}

/* The shortest code, of several as short the one of the least mode, but the bitmap only where it is
   no longer than the others. Returns 1 if the indices are no such set. */
static int32_t choose_code(const int64_t *indices, int64_t count, int64_t universe,
                           index_code *best) {
    int64_t middle, lengths[64];
    uint64_t sums[3];
    if (gw_measure_gaps(indices, count, universe, &middle, sums, lengths)) return 1;
    *best = (index_code){MODE_BITMAP, 0, {0, 0, 0}};
    if (count == 0 || count == universe) return 0;
    best->size = INT64_MAX;
    const int first = middle ? (int)middle - 1 : 0;
    for (int p = first; p <= middle + 1 && p <= MOST_PARAMETER; p++) {
        const int64_t low = bytes_of((uint64_t)count * (uint64_t)p);
        const int64_t unary = bytes_of(sums[p - first] + (uint64_t)count);
        take_shorter(best, (index_code){1 + p, 1 + low + unary, {low, unary, 0}});
    }
    if (universe < 1ll << MOST_BITS)
        for (int is_delta = 0; is_delta < 2; is_delta++) {
            int64_t s[3];
            elias_sizes(lengths, is_delta, s);
            take_shorter(best, (index_code){is_delta ? MODE_DELTA : MODE_GAMMA,
                                            1 + s[0] + s[1] + s[2], {s[0], s[1], s[2]}});
        }
    const int64_t bitmap = 1 + bytes_of((uint64_t)universe);
    if (bitmap <= best->size) *best = (index_code){MODE_BITMAP, bitmap, {0, 0, 0}};
    return 0;
}

/* `steps` has room for the differences of indices. */
static int32_t write_code(const int64_t *indices, int64_t count, int64_t universe,
                          const index_code *code, int64_t *steps, uint8_t *out) {
    if (!code->size) return 0;
    if (code->mode >= MODE_GAMMA) {
        out[0] = (uint8_t)code->mode;
        for (int64_t i = 0; i < count; i++) steps[i] = indices[i] - (i ? indices[i - 1] : -1);
        return gw_elias_encode(steps, 0, 0, count, code->mode == MODE_DELTA, code->parts, out + 1);
    }
    if (code->mode == MODE_BITMAP) {
        out[0] = MODE_BITMAP;
        return gw_pack_ones(indices, count, universe, out + 1);
    }
    return gw_encode_rice(indices, count, code->mode - 1, code->parts[0], code->parts[1], out);
}

/* CRC-32 as zlib has it, eight bytes at a time. */
static void make_table(uint32_t table[8][256]) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        table[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int k = 1; k < 8; k++)
            table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 0xFF];
}

static uint32_t crc_after(uint32_t table[8][256], const uint8_t *data, int64_t size, uint32_t crc) {
    crc = ~crc;
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = table[7][word & 0xFF] ^ table[6][word >> 8 & 0xFF] ^ table[5][word >> 16 & 0xFF] ^
              table[4][word >> 24 & 0xFF] ^ table[3][word >> 32 & 0xFF] ^
              table[2][word >> 40 & 0xFF] ^ table[1][word >> 48 & 0xFF] ^ table[0][word >> 56];
    }
    for (; size > 0; data++, size--) crc = crc >> 8 ^ table[0][(crc ^ *data) & 0xFF];
    return ~crc;
}

GW_INLINE int64_t put_varint(uint8_t *out, int64_t at, uint64_t number) {
    for (; number >= 0x80; number >>= 7) out[at++] = (uint8_t)(number | 0x80);
    out[at++] = (uint8_t)number;
    return at;
}

/* `rows` payloads, each from a multiple of 8 on: the four bytes of `lead`, the checksum, and a
   table of two parts, whose dtypes have the codes of `kinds`; zeros up to a multiple of 4; the
   values; and the positions with their number in `front` bytes. Row r has counts[r] positions and
   values, which lie behind those of row r - 1. `steps` has room for the most positions. `layout` gets, of
   each payload, where it begins, its bytes, those of its positions and the gap behind it. Returns
   the bytes of all, -1 if there is not enough room, -2 if positions are out of order or range. */
int64_t gw_encode_entries(const int64_t *positions, const float *values, const int64_t *counts,
                          int64_t rows, int64_t universe, int32_t front, uint32_t lead,
                          uint32_t kinds, uint32_t context, int64_t *steps, uint8_t *out,
                          int64_t room, int64_t *layout) {
    uint32_t table[8][256];
    make_table(table);
    int64_t start = 0;
    for (int64_t r = 0; r < rows; r++, layout += 4) {
        const int64_t count = counts[r];
        index_code code;
        if (choose_code(positions, count, universe, &code)) return -2;
        const int64_t index_bytes = front + code.size;
        uint8_t head[FIXED + 24] = {0};
        memcpy(head, &lead, 4);
        int64_t at = FIXED;
        head[at++] = (uint8_t)kinds;
        at = put_varint(head, at, (uint64_t)index_bytes);
        head[at++] = (uint8_t)(kinds >> 8);
        at = put_varint(head, at, (uint64_t)count);
        at += -at & (VALUE - 1);
        const int64_t nbytes = at + VALUE * count + index_bytes, gap = -nbytes & 7;
        if (nbytes + gap > room - start) return -1;
        uint8_t *const own = out + start, *const coded = own + at + VALUE * count;
        if (count) memcpy(own + at, values, (size_t)(VALUE * count));
        for (int32_t i = 0; i < front; i++) coded[i] = (uint8_t)((uint64_t)count >> 8 * i);
        if (write_code(positions, count, universe, &code, steps, coded + front)) return -2;
        memcpy(own + FIXED, head + FIXED, (size_t)(at - FIXED));
        uint32_t crc = crc_after(table, head, 4, context);
        crc = crc_after(table, own + FIXED, nbytes - FIXED, crc);
        memcpy(head + 4, &crc, 4);
        memcpy(own, head, FIXED);
        memset(own + nbytes, 0, (size_t)gap);
        layout[0] = start;
        layout[1] = nbytes;
        layout[2] = index_bytes;
        layout[3] = gap;
        start += nbytes + gap;
        positions += count;
        values += count;
    }
    return start;
}

/* The row operations of polar.c for one instruction set. Included once for each, with these defined:

   NAME(x)      x with the set's suffix; TARGET, the attribute of its functions
   V, BYTES     a vector of int8 and its width; WORD, as many bits
   load, store, fill, absolute, differ (xor), plus, minus
   min_u, max_u, plus_u, minus_u     on unsigned bytes; the latter two saturate
   plus_s       signed, saturates at -127 and 127
   half_up(v)   (v + 1) >> 1 of unsigned bytes
   like(v, s)   v, negated where s is negative
   turned(v, w) v, negated where the word w has ones
   negative(v), equal(a, b)          words with ones where it is so */

TARGET static void NAME(f_rows)(const int8_t *alpha, int64_t half, int corrected, int8_t *out) {
    const V reach = fill(16);
    for (int64_t i = 0; i < half * LANES; i += BYTES) {
        const V a = load(alpha + i), b = load(alpha + half * LANES + i);
        const V p = absolute(a), q = absolute(b);
        V m = min_u(p, q);
        if (corrected) {
            const V apart = minus_u(reach, minus(max_u(p, q), m));
            const V together = minus_u(reach, plus_u(p, q));
            m = minus_u(plus(m, half_up(half_up(together))), half_up(half_up(apart)));
        }
        store(out + i, like(m, differ(a, b)));
    }
}

/* `beta` are the first half's bits, null if all are zero. */
TARGET static void NAME(g_rows)(const int8_t *alpha, const uint64_t *beta, int64_t half,
                                int8_t *out) {
    if (!beta) {
        for (int64_t i = 0; i < half * LANES; i += BYTES)
            store(out + i, plus_s(load(alpha + half * LANES + i), load(alpha + i)));
        return;
    }
    for (int64_t i = 0; i < half * LANES; i += BYTES) {
        WORD bits;
        memcpy(&bits, (const char *)beta + i / 8, sizeof bits);
        store(out + i, plus_s(load(alpha + half * LANES + i), turned(load(alpha + i), bits)));
    }
}

/* -magnitude where a bit is one, else magnitude. */
TARGET static void NAME(spread_rows)(const uint64_t *words, int64_t rows, int magnitude,
                                     int8_t *out) {
    const V v = fill((char)magnitude);
    for (int64_t i = 0; i < rows * LANES; i += BYTES) {
        WORD bits;
        memcpy(&bits, (const char *)words + i / 8, sizeof bits);
        store(out + i, turned(v, bits));
    }
}

TARGET static void NAME(decide_rows)(const int8_t *alpha, int64_t rows, uint64_t *beta) {
    for (int64_t i = 0; i < rows * LANES; i += BYTES) {
        const WORD bits = negative(load(alpha + i));
        memcpy((char *)beta + i / 8, &bits, sizeof bits);
    }
}

TARGET static void NAME(parity_rows)(const int8_t *alpha, int64_t rows, uint64_t *beta) {
    for (int64_t lane = 0; lane < LANES; lane += BYTES) {
        V least = fill(127);
        WORD odd = 0;
        for (int64_t i = 0; i < rows; i++) {
            const V a = load(alpha + i * LANES + lane);
            const WORD bits = negative(a);
            memcpy((char *)(beta + i) + lane / 8, &bits, sizeof bits);
            odd ^= bits;
            least = min_u(least, absolute(a));
        }
        for (int64_t i = 0; odd && i < rows; i++) {
            const WORD hit = odd & equal(absolute(load(alpha + i * LANES + lane)), least);
            WORD bits;
            memcpy(&bits, (char *)(beta + i) + lane / 8, sizeof bits);
            bits ^= hit;
            memcpy((char *)(beta + i) + lane / 8, &bits, sizeof bits);
            odd ^= hit;
        }
    }
}

static const rows_t NAME(rows) = {NAME(f_rows), NAME(g_rows), NAME(spread_rows),
                                  NAME(decide_rows), NAME(parity_rows)};

#undef NAME
#undef TARGET
#undef V
#undef BYTES
#undef WORD
#undef load
#undef store
#undef fill
#undef absolute
#undef differ
#undef plus
#undef minus
#undef min_u
#undef max_u
#undef plus_u
#undef minus_u
#undef plus_s
#undef half_up
#undef like
#undef turned
#undef negative
#undef equal

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

TARGET static void NAME(f_rows)(const int8_t *alpha, int64_t count, int corrected, int8_t *out) {
    const V reach = fill(16);
    for (int64_t i = 0; i < count; i += BYTES) {
        const V a = load(alpha + i), b = load(alpha + count + i);
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

TARGET static void NAME(g_rows)(const int8_t *alpha, const uint8_t *beta, int64_t count,
                                int8_t *out) {
    if (!beta) {
        for (int64_t i = 0; i < count; i += BYTES)
            store(out + i, plus_s(load(alpha + count + i), load(alpha + i)));
        return;
    }
    for (int64_t i = 0; i < count; i += BYTES) {
        WORD bits;
        memcpy(&bits, beta + i / 8, sizeof bits);
        store(out + i, plus_s(load(alpha + count + i), turned(load(alpha + i), bits)));
    }
}

TARGET static void NAME(spread_rows)(const uint8_t *words, int64_t count, int magnitude,
                                     int8_t *out) {
    const V v = fill((char)magnitude);
    for (int64_t i = 0; i < count; i += BYTES) {
        WORD bits;
        memcpy(&bits, words + i / 8, sizeof bits);
        store(out + i, turned(v, bits));
    }
}

TARGET static void NAME(decide_rows)(const int8_t *alpha, int64_t count, uint8_t *beta) {
    for (int64_t i = 0; i < count; i += BYTES) {
        const WORD bits = negative(load(alpha + i));
        memcpy(beta + i / 8, &bits, sizeof bits);
    }
}

/* Rows that fill a vector or more. */
TARGET static void NAME(parity_wide)(const int8_t *alpha, int64_t rows, int64_t lanes,
                                     uint8_t *beta) {
    for (int64_t lane = 0; lane < lanes; lane += BYTES) {
        V least = fill(127);
        WORD odd = 0;
        for (int64_t i = lane; i < rows * lanes; i += lanes) {
            const V a = load(alpha + i);
            const WORD bits = negative(a);
            memcpy(beta + i / 8, &bits, sizeof bits);
            odd ^= bits;
            least = min_u(least, absolute(a));
        }
        for (int64_t i = lane; odd && i < rows * lanes; i += lanes) {
            const WORD hit = odd & equal(absolute(load(alpha + i)), least);
            WORD bits;
            memcpy(&bits, beta + i / 8, sizeof bits);
            bits ^= hit;
            memcpy(beta + i / 8, &bits, sizeof bits);
            odd ^= hit;
        }
    }
}

/* Several rows to a vector. */
TARGET static void NAME(parity_narrow)(const int8_t *alpha, int64_t rows, int64_t lanes,
                                       uint8_t *beta) {
    int8_t filled[BYTES], low[BYTES];
    int64_t count = rows * lanes;
    if (count < BYTES) {
        store(filled, fill(127));
        memcpy(filled, alpha, (size_t)count);
        alpha = filled;
        count = BYTES;
    }
    V least = fill(127);
    WORD odd = 0;
    for (int64_t i = 0; i < count; i += BYTES) {
        const V a = load(alpha + i);
        const WORD bits = negative(a);
        memcpy(beta + i / 8, &bits, sizeof bits);
        odd ^= bits;
        least = min_u(least, absolute(a));
    }
    for (int64_t far = BYTES / 2; far >= lanes; far /= 2) odd ^= odd >> far;
    odd &= ((WORD)1 << lanes) - 1;
    if (!odd) return;
    store(low, least);
    for (int64_t far = BYTES / 2; far >= lanes; far /= 2)
        for (int64_t i = 0; i < far; i++) low[i] = low[i] < low[i + far] ? low[i] : low[i + far];
    for (int64_t i = lanes; i < BYTES; i++) low[i] = low[i - lanes];
    least = load(low);
    for (int64_t i = 0; odd && i < count; i += BYTES) {
        const WORD same = equal(absolute(load(alpha + i)), least);
        WORD bits;
        memcpy(&bits, beta + i / 8, sizeof bits);
        for (int64_t lane = 0; lane < BYTES; lane += lanes) {
            const WORD hit = odd & same >> lane;
            bits ^= hit << lane;
            odd ^= hit;
        }
        memcpy(beta + i / 8, &bits, sizeof bits);
    }
}

TARGET static void NAME(parity_rows)(const int8_t *alpha, int64_t rows, int64_t lanes,
                                     uint8_t *beta) {
    if (lanes < BYTES)
        NAME(parity_narrow)(alpha, rows, lanes, beta);
    else
        NAME(parity_wide)(alpha, rows, lanes, beta);
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

/* Words of polar codes for the pieces of a plane: what reference/plane.py composes, a piece in each
   task. */
#include "threads.h"

#include <stdlib.h>

int32_t gw_polar_quantise_lanes(const int8_t *llr, int64_t groups, int64_t n, int32_t lanes,
                                const uint8_t *kinds, int32_t corrected, uint8_t *bits);
void gw_polar_transform_lanes(const uint8_t *bits, int64_t groups, int64_t n, int32_t lanes,
                              uint8_t *out);

/* n is a power of two. Element i of a row of the code is element order[i] of the piece. */
typedef struct {
    const int8_t *ratios;  /* [n][lanes] */
    const uint8_t *kinds;  /* [2 n] */
    const int64_t *order;  /* [n] */
    uint8_t *inputs;       /* [n][lanes / 8] */
    uint8_t *word;         /* [n][lanes / 8], in the order of the ratios */
    int64_t n, lanes;
} piece;

typedef struct {
    const piece *pieces;
    int32_t failed;
} words_job;

GW_INLINE void copy_row(void *to, const void *from, int64_t bytes) {
    if (bytes == 64)
        memcpy(to, from, 64);
    else if (bytes == 8)
        memcpy(to, from, 8);
    else
        memcpy(to, from, (size_t)bytes);
}

static void words_task(void *given, int64_t first, int64_t last) {
    words_job *const job = given;
    for (int64_t p = first; p < last; p++) {
        const piece *const own = &job->pieces[p];
        const int64_t n = own->n, lanes = own->lanes, bytes = lanes / 8;
        int8_t *const ratios = malloc((size_t)(n * (lanes + bytes)));
        if (!ratios) {
            __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
            return;
        }
        uint8_t *const word = (uint8_t *)ratios + n * lanes;
        for (int64_t i = 0; i < n; i++)
            copy_row(ratios + i * lanes, own->ratios + (own->order[i] & (n - 1)) * lanes, lanes);
        if (gw_polar_quantise_lanes(ratios, 1, n, (int32_t)lanes, own->kinds, 1, word))
            __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        for (int64_t i = 0; i < n; i++)
            copy_row(own->word + (own->order[i] & (n - 1)) * bytes, word + i * bytes, bytes);
        gw_polar_transform_lanes(word, 1, n, (int32_t)lanes, own->inputs);
        free(ratios);
    }
}

/* 0, or -2 without memory. */
int32_t gw_plane_words(const piece *pieces, int64_t count) {
    words_job job = {pieces, 0};
    gw_parallel(words_task, &job, count, 1, 1);
    return job.failed ? -2 : 0;
}

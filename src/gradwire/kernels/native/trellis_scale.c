/* Numbers in terms of a step, as the kernels of trellis-coded quantisation take them. */
#include "threads.h"
#include "trellis.h"

#include <math.h>

typedef struct {
    const void *x; /* float, or double */
    double factor, most;
    int32_t *scaled;
} scale_job;

/* rint() rounds ties to even, as torch.round; `most` is a whole number that a float can be. */
GW_CLONES static void scale_floats(const float *x, int64_t count, float factor, float most,
                                   int32_t *scaled) {
    for (int64_t i = 0; i < count; i++) {
        const float y = rintf(x[i] * factor), low = y < -most ? -most : y;
        scaled[i] = (int32_t)(low > most ? most : low);
    }
}

GW_CLONES static void scale_doubles(const double *x, int64_t count, double factor, double most,
                                    int32_t *scaled) {
    for (int64_t i = 0; i < count; i++) {
        const double y = rint(x[i] * factor), low = y < -most ? -most : y;
        scaled[i] = (int32_t)(low > most ? most : low);
    }
}

static void float_task(void *given, int64_t first, int64_t last) {
    const scale_job *const job = given;
    scale_floats((const float *)job->x + first, last - first, (float)job->factor,
                 (float)job->most, job->scaled + first);
}

static void double_task(void *given, int64_t first, int64_t last) {
    const scale_job *const job = given;
    scale_doubles((const double *)job->x + first, last - first, job->factor, job->most,
                  job->scaled + first);
}

void gw_trellis_scale(const void *x, int64_t count, int32_t is_double, double factor,
                      int32_t most, int32_t *scaled) {
    scale_job job = {x, factor, most, scaled};
    gw_parallel(is_double ? double_task : float_task, &job, count, 64, 1 << 17);
}

typedef struct {
    const int32_t *numbers;
    const uint8_t *contexts; /* if there are no numbers */
    int64_t *found;          /* the least and the largest, shared by all tasks */
} range_job;

GW_CLONES static void number_range(const int32_t *x, int64_t count, int32_t *low, int32_t *high) {
    int32_t from = x[0], to = x[0];
    for (int64_t i = 1; i < count; i++) {
        from = x[i] < from ? x[i] : from;
        to = x[i] > to ? x[i] : to;
    }
    *low = from;
    *high = to;
}

GW_CLONES static uint8_t largest_context(const uint8_t *contexts, int64_t count) {
    uint8_t most = 0;
    for (int64_t i = 0; i < count; i++) most = contexts[i] > most ? contexts[i] : most;
    return most;
}

static void widen(int64_t *found, int64_t low, int64_t high) {
    int64_t old = __atomic_load_n(&found[0], __ATOMIC_RELAXED);
    while (low < old && !__atomic_compare_exchange_n(&found[0], &old, low, 0, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED))
        continue;
    old = __atomic_load_n(&found[1], __ATOMIC_RELAXED);
    while (high > old && !__atomic_compare_exchange_n(&found[1], &old, high, 0, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED))
        continue;
}

static void range_task(void *given, int64_t first, int64_t last) {
    const range_job *const job = given;
    if (first >= last) return;
    if (job->numbers) {
        int32_t low, high;
        number_range(job->numbers + first, last - first, &low, &high);
        widen(job->found, low, high);
    } else {
        const uint8_t most = largest_context(job->contexts + first, last - first);
        widen(job->found, most, most);
    }
}

/* The range of `count` >= 1 numbers, or of contexts where there are none of those: int64 [2]. */
void gw_trellis_range(const int32_t *numbers, const uint8_t *contexts, int64_t count,
                      int64_t *found) {
    range_job job = {numbers, contexts, found};
    found[0] = INT64_MAX;
    found[1] = INT64_MIN;
    gw_parallel(range_task, &job, count, 64, 1 << 18);
}

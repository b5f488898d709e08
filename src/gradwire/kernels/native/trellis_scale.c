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

/* Threads live as long as one call: there is no pool whose state a fork could leave behind. They
   inherit the caller's floating-point environment. */
#include "threads.h"

#include <pthread.h>

enum { MOST_THREADS = 64, STACK_BYTES = 1 << 21 };

typedef struct {
    gw_task task;
    void *job;
    int64_t first, last;
} part;

static _Thread_local int32_t allowed = 1;

void gw_use_threads(int32_t count) {
    allowed = count < 1 ? 1 : count > MOST_THREADS ? MOST_THREADS : count;
}

static void *run(void *argument) {
    const part *p = argument;
    p->task(p->job, p->first, p->last);
    return 0;
}

void gw_parallel(gw_task task, void *job, int64_t items, int64_t grain, int64_t least) {
    int64_t parts = items / (least > grain ? least : grain);
    if (parts > allowed) parts = allowed;
    if (parts < 2) {
        if (items > 0) task(job, 0, items);
        return;
    }
    const int64_t grains = (items + grain - 1) / grain;
    part work[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    pthread_attr_t attributes;
    const int sized = pthread_attr_init(&attributes) == 0 &&
                      pthread_attr_setstacksize(&attributes, STACK_BYTES) == 0;
    for (int64_t i = 0; i < parts; i++) {
        const int64_t first = grains * i / parts * grain, next = grains * (i + 1) / parts * grain;
        work[i] = (part){task, job, first, next < items ? next : items};
        /* The first part is the caller's own. */
        if (i > 0 && sized)
            started[i] = pthread_create(&threads[i], &attributes, run, &work[i]) == 0;
    }
    run(&work[0]);
    for (int64_t i = 1; i < parts; i++) {
        if (started[i]) pthread_join(threads[i], 0);
        else run(&work[i]); /* no thread to be had: slower, but done */
    }
    pthread_attr_destroy(&attributes);
}

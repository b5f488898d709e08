/* Threads end with the call that started them: there is no pool whose state a fork could leave
   behind. A call returns when its parts are done. It does not wait for a thread that had no turn
   on a busy machine, and which then finds nothing left to take: so the work is on the heap, and
   the last thread to leave frees it. Threads inherit the caller's floating-point environment. */
#include "threads.h"

#include <pthread.h>
#include <stdlib.h>

enum { STACK_BYTES = 1 << 21, PARTS_PER_THREAD = 8 };

typedef struct {
    gw_task task;
    void *job;
    int64_t items, grain, parts;
    int64_t taken, finished; /* parts */
    int32_t started;         /* threads besides the caller */
    int32_t users;           /* the caller and threads that have not left */
    pthread_mutex_t mutex;
    pthread_cond_t all_finished;
} work;

static _Thread_local int32_t allowed = 1;
static _Thread_local int32_t number = 0;
static _Thread_local int64_t least_items = 0;

void gw_use_threads(int32_t count) {
    allowed = count < 1 ? 1 : count > GW_MOST_THREADS ? GW_MOST_THREADS : count;
}

int32_t gw_threads(void) { return allowed; }

void gw_least_items(int64_t items) { least_items = items; }

int32_t gw_thread_number(void) { return number; }

int64_t gw_parts(int64_t items, int64_t least) {
    if (allowed < 2) return 1;
    if (least_items) least = least_items;
    const int64_t parts = items / (least > 1 ? least : 1), most = allowed * PARTS_PER_THREAD;
    return parts < 1 ? 1 : parts > most ? most : parts;
}

static void take_parts(work *w) {
    const int64_t grains = (w->items + w->grain - 1) / w->grain;
    for (;;) {
        const int64_t i = __atomic_fetch_add(&w->taken, 1, __ATOMIC_RELAXED);
        if (i >= w->parts) return;
        const int64_t first = grains * i / w->parts * w->grain;
        const int64_t next = grains * (i + 1) / w->parts * w->grain;
        w->task(w->job, first, next < w->items ? next : w->items);
        if (__atomic_add_fetch(&w->finished, 1, __ATOMIC_ACQ_REL) == w->parts) {
            pthread_mutex_lock(&w->mutex);
            pthread_cond_signal(&w->all_finished);
            pthread_mutex_unlock(&w->mutex);
        }
    }
}

static void leave(work *w) {
    if (__atomic_sub_fetch(&w->users, 1, __ATOMIC_ACQ_REL) > 0) return;
    pthread_cond_destroy(&w->all_finished);
    pthread_mutex_destroy(&w->mutex);
    free(w);
}

static void *run(void *argument) {
    work *w = argument;
    number = __atomic_add_fetch(&w->started, 1, __ATOMIC_RELAXED);
    take_parts(w);
    leave(w);
    return 0;
}

/* As many as can be had. */
static void start_threads(work *w, int64_t count) {
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0) return;
    if (pthread_attr_setstacksize(&attributes, STACK_BYTES) == 0 &&
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED) == 0)
        for (; count > 0; count--) {
            __atomic_add_fetch(&w->users, 1, __ATOMIC_RELAXED);
            if (pthread_create(&thread, &attributes, run, w) != 0) {
                leave(w);
                break;
            }
        }
    pthread_attr_destroy(&attributes);
}

void gw_parallel(gw_task task, void *job, int64_t items, int64_t grain, int64_t least) {
    const int64_t parts = gw_parts(items / grain, (least + grain - 1) / grain);
    work *w = parts < 2 ? 0 : malloc(sizeof *w);
    if (!w) {
        if (items > 0) task(job, 0, items);
        return;
    }
    *w = (work){.task = task, .job = job, .items = items, .grain = grain, .parts = parts,
                .users = 1};
    pthread_mutex_init(&w->mutex, 0);
    pthread_cond_init(&w->all_finished, 0);
    start_threads(w, (parts < allowed ? parts : allowed) - 1);
    const int32_t before = allowed;
    allowed = 1; /* a task runs on one thread */
    take_parts(w);
    allowed = before;
    pthread_mutex_lock(&w->mutex);
    while (__atomic_load_n(&w->finished, __ATOMIC_ACQUIRE) < parts)
        pthread_cond_wait(&w->all_finished, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    leave(w);
}

/* Messages that go around rings: each member sends one to its right neighbour, then n - 2 times
   what came from the left, perhaps after a call that adds to it. What a program of a member would
   do, one effect after the other, is done here; so are its messages' events, in their order. */
#include <stdlib.h>

#include "nics.h"

enum { HEAD, TAIL, CALLED };               /* kinds of events */
enum { AWAY, WAITING, CALLING, FINISHED }; /* what a member does */

typedef struct {
    double at;
    int64_t number;
    int32_t pass;
    uint32_t what; /* 4 * member + kind */
} event;

typedef struct {
    int64_t *bytes_to, *messages_to; /* to the right neighbour */
    int32_t node, does, turn;
    int32_t heads, inbox; /* messages whose first bit is there; that are there and not taken */
} member;

typedef struct {
    int32_t size, first; /* number of the message that member 0 starts with */
    member *members;     /* null: not under way */
    int64_t *nbytes;     /* by message */
    double *seconds;     /* of the call that each of its receivers makes */
    int64_t sent;        /* bytes */
} pass;

typedef struct {
    nics nics;
    double *calls_free; /* when each node has finished its calls */
    pass *passes;
    int64_t num_passes, room_passes;
    event *heap;
    int64_t num_events, room_events;
    int64_t next_number;
} rings;

static int events_before(const event *a, const event *b) {
    return is_before(a->at, a->number, b->at, b->number);
}

/* Adds an event, which gets the next number. There is room for it. */
static void push(rings *r, double at, int32_t pass_number, int32_t member_number, int kind) {
    const uint32_t what = 4 * (uint32_t)member_number + (uint32_t)kind;
    const event new = {at, r->next_number++, pass_number, what};
    int64_t place = r->num_events++;
    for (; place > 0 && events_before(&new, &r->heap[(place - 1) / 2]); place = (place - 1) / 2)
        r->heap[place] = r->heap[(place - 1) / 2];
    r->heap[place] = new;
}

static void pop(rings *r) {
    const event moved = r->heap[--r->num_events];
    event *heap = r->heap;
    const int64_t count = r->num_events;
    int64_t place = 0;
    for (;;) {
        int64_t child = 2 * place + 1;
        if (child >= count) break;
        if (child + 1 < count && events_before(&heap[child + 1], &heap[child])) child++;
        if (!events_before(&heap[child], &moved)) break;
        heap[place] = heap[child];
        place = child;
    }
    if (count) heap[place] = moved;
}

static int has_room(rings *r, int64_t more) {
    if (r->num_events + more <= r->room_events) return 1;
    const int64_t room = 2 * r->room_events + more;
    event *heap = realloc(r->heap, (size_t)room * sizeof *heap);
    if (!heap) return 0;
    r->heap = heap;
    r->room_events = room;
    return 1;
}

static int32_t wrapped(int32_t number, int32_t size) {
    return number < 0 ? number + size : number >= size ? number - size : number;
}

/* The message that a member sends in its present turn; it receives the one before. */
static int32_t leaving(const pass *p, int32_t rank) {
    const int32_t size = p->size, starts = wrapped(p->first + rank, size);
    return wrapped(starts - p->members[rank].turn, size);
}

static void send(rings *r, int32_t which, int32_t rank, double now) {
    pass *p = &r->passes[which];
    member *m = &p->members[rank];
    const int64_t nbytes = p->nbytes[leaving(p, rank)];
    *m->bytes_to += nbytes;
    ++*m->messages_to;
    p->sent += nbytes;
    push(r, leave(&r->nics, now, m->node, nbytes), which, wrapped(rank + 1, p->size), HEAD);
}

/* A member takes a message: whether it can go on at once, or only after a call. */
static int take(rings *r, int32_t which, int32_t rank, double now) {
    pass *p = &r->passes[which];
    member *m = &p->members[rank];
    const double seconds = p->seconds[wrapped(leaving(p, rank) - 1, p->size)];
    if (seconds <= 0) return 1;
    double *free_at = &r->calls_free[m->node];
    *free_at = (*free_at > now ? *free_at : now) + seconds;
    m->does = CALLING;
    push(r, *free_at, which, rank, CALLED);
    return 0;
}

/* Goes on with a member that has done with a turn, or is there now: whether it has all. At most one
   event is added for each message that is there, and two more. */
static int advance(rings *r, int32_t which, int32_t rank, double now) {
    pass *p = &r->passes[which];
    member *m = &p->members[rank];
    for (;; m->turn++) {
        if (m->turn == p->size - 1) {
            m->does = FINISHED;
            return 1;
        }
        send(r, which, rank, now);
        if (!m->inbox) {
            m->does = WAITING;
            return 0;
        }
        m->inbox--;
        if (!take(r, which, rank, now)) return 0;
    }
}

static void free_pass(pass *p) {
    free(p->members);
    free(p->nbytes);
    free(p->seconds);
    memset(p, 0, sizeof *p);
}

rings *gw_passes_new(int32_t num_nodes, double *egress, double *ingress, double *delivered,
                     const double *bandwidth, const double *latency, double *calls_free) {
    rings *r = calloc(1, sizeof *r);
    if (!r) return 0;
    r->nics = (nics){num_nodes, egress, ingress, delivered, bandwidth, latency};
    r->calls_free = calls_free;
    return r;
}

/* Forgets what is under way. */
void gw_passes_clear(rings *r) {
    for (int64_t i = 0; i < r->num_passes; i++) free_pass(&r->passes[i]);
    r->num_events = r->num_passes = 0;
}

void gw_passes_free(rings *r) {
    gw_passes_clear(r);
    free(r->heap);
    free(r->passes);
    free(r);
}

/* A new pass among members on these nodes, of which member 0 starts with message `first`: its
   number, or -1 without memory. Numbers of passes that have ended are used again. */
int64_t gw_passes_begin(rings *r, int32_t size, const int32_t *nodes, int32_t first) {
    int64_t number = 0;
    while (number < r->num_passes && r->passes[number].members) number++;
    if (number == r->room_passes) {
        const int64_t room = 2 * r->room_passes + 8;
        pass *more = realloc(r->passes, (size_t)room * sizeof *more);
        if (!more) return -1;
        r->passes = more;
        r->room_passes = room;
    }
    pass *p = &r->passes[number];
    *p = (pass){.size = size, .first = first};
    p->members = calloc((size_t)size, sizeof *p->members);
    p->nbytes = calloc((size_t)size, sizeof *p->nbytes);
    p->seconds = calloc((size_t)size, sizeof *p->seconds);
    if (!p->members || !p->nbytes || !p->seconds) {
        free_pass(p);
        return -1;
    }
    for (int32_t rank = 0; rank < size; rank++) p->members[rank].node = nodes[rank];
    if (number == r->num_passes) r->num_passes++;
    return number;
}

/* All members have all messages, or the run is over: returns how many bytes were sent. */
int64_t gw_passes_end(rings *r, int64_t which) {
    const int64_t sent = r->passes[which].sent;
    free_pass(&r->passes[which]);
    return sent;
}

/* Member `rank` starts at `now` with a message of so many bytes, for which each of its
   receivers makes a call of so many seconds. `next_number`: of the next event that is added. The
   ledger's entries for the right neighbour are counted as messages leave. 1 if it has all messages
   at once, 0 if it waits, -1 without memory. */
int32_t gw_passes_post(rings *r, int64_t which, int32_t rank, int64_t nbytes, double seconds,
                       double now, int64_t *next_number, int64_t *bytes_to,
                       int64_t *messages_to) {
    pass *p = &r->passes[which];
    member *m = &p->members[rank];
    if (!has_room(r, m->inbox + 2)) return -1;
    const int32_t own = wrapped(p->first + rank, p->size);
    p->nbytes[own] = nbytes;
    p->seconds[own] = seconds;
    m->bytes_to = bytes_to;
    m->messages_to = messages_to;
    r->next_number = *next_number;
    const int has_all = advance(r, (int32_t)which, rank, now);
    *next_number = r->next_number;
    return has_all;
}

/* The next event: whether there is one. */
int32_t gw_passes_next(const rings *r, double *at, int64_t *number) {
    if (!r->num_events) return 0;
    *at = r->heap[0].at;
    *number = r->heap[0].number;
    return 1;
}

/* Lets events happen before one of another kind, given by its time and number, and until a member
   has all its messages: 1, and when, and which one. 0 if none has, -1 without memory. */
int32_t gw_passes_run(rings *r, double limit_at, int64_t limit_number, int64_t *next_number,
                      double *at, int64_t *which, int32_t *rank) {
    int found = 0;
    r->next_number = *next_number;
    while (r->num_events && !found) {
        const event e = r->heap[0];
        if (!is_before(e.at, e.number, limit_at, limit_number)) break;
        pass *p = &r->passes[e.pass];
        const int32_t own = (int32_t)(e.what / 4), kind = (int32_t)(e.what % 4);
        member *m = &p->members[own];
        if (!has_room(r, m->inbox + 2)) {
            found = -1;
            break;
        }
        pop(r);
        if (kind == HEAD) {
            const int32_t left = wrapped(own - 1, p->size);
            const int32_t starts = wrapped(p->first + left, p->size);
            const int64_t nbytes = p->nbytes[wrapped(starts - m->heads++, p->size)];
            const double tail = arrive(&r->nics, e.at, p->members[left].node, m->node, nbytes);
            push(r, tail, e.pass, own, TAIL);
        } else if (kind == TAIL && m->does != WAITING) {
            m->inbox++;
        } else if (kind == CALLED || take(r, e.pass, own, e.at)) {
            m->turn++;
            found = advance(r, e.pass, own, e.at);
        }
        if (found) {
            *at = e.at;
            *which = e.pass;
            *rank = own;
        }
    }
    *next_number = r->next_number;
    return found;
}

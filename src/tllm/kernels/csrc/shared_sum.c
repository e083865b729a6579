/* Sums over ranks that are processes of one machine, in memory that they share.
 *
 * A tensor is summed in pieces. Each rank has two places for a piece: it copies its numbers to one, says that they are
 * there, waits until every other rank's are, and adds all of them in the order of comm/collectives/fold.py. A rank
 * that comes to piece k + 2 has seen everybody's piece k + 1, and whoever has said that is done with piece k: so two
 * places are enough.
 */
#define _POSIX_C_SOURCE 200809L
#include "recorded_calls.h"

#include <sched.h>
#include <time.h>

#include "vectors.h"

enum { PLACES = 2, LINE = 64 };

/* What a rank says, in a line of the cache of its own: the number of the piece that it has come to, and what its last
 * two pieces are, so that ranks which are not in step find out. comm/links/shared_memory.py reads it, too. */
typedef struct {
    int64_t number;
    int64_t pieces[PLACES];
    char rest[LINE - 3 * sizeof(int64_t)];
} Arrival;

/* One rank's sums; `arrivals` and `places` are shared. */
struct SharedSum {
    Arrival *arrivals;
    char *places;
    int64_t rank, ranks, place_bytes;
    int64_t number;   /* of the present piece, from 1 */
    int64_t summed;   /* numbers of the present tensor that are summed */
    int64_t has_come; /* whether this rank's numbers of the present piece are in their place */
    int64_t spin;     /* nanoseconds that others are waited for */
    int64_t taken;    /* nanoseconds of all sums until now */
};

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void pause_thread(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t bytes_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

static char *place_of(const SharedSum *sum, int64_t rank) {
    return sum->places + (rank * PLACES + sum->number % PLACES) * sum->place_bytes;
}

/* Turns that are pauses; after them each gives the core to others, one of which may be the rank that is waited for. */
#define PAUSES 1000

/* Whether a rank comes to the present piece before the time `until`. */
static int comes(const SharedSum *sum, int64_t rank, int64_t until) {
    const Arrival *arrival = sum->arrivals + rank;
    for (int64_t turn = 0; __atomic_load_n(&arrival->number, __ATOMIC_ACQUIRE) < sum->number; turn++) {
        pause_thread();
        if (turn < PAUSES) continue;
        if (now() >= until) return 0;
        sched_yield();
    }
    return 1;
}

/* 16 numbers of ranks [first, last), of which `left` are left. */
static f32x16 folded(const SharedSum *sum, int64_t first, int64_t last, int64_t at, int64_t left, int dtype) {
    if (last - first == 1) return load_up_to(place_of(sum, first), at, left, dtype);
    int64_t half = 1;
    while (2 * half < last - first) half *= 2;
    return folded(sum, first, first + half, at, left, dtype) + folded(sum, first + half, last, at, left, dtype);
}

static double folded_double(const SharedSum *sum, int64_t first, int64_t last, int64_t at) {
    if (last - first == 1) return ((const double *)(const void *)place_of(sum, first))[at];
    int64_t half = 1;
    while (2 * half < last - first) half *= 2;
    return folded_double(sum, first, first + half, at) + folded_double(sum, first + half, last, at);
}

static void add_up(const SharedSum *sum, void *to, int64_t count, int dtype) {
    if (dtype == FLOAT64 && sum->ranks == 2) {
        const double *x = (const void *)place_of(sum, 0), *y = (const void *)place_of(sum, 1);
        for (int64_t i = 0; i < count; i++) ((double *)to)[i] = x[i] + y[i];
    } else if (dtype == FLOAT64) {
        for (int64_t i = 0; i < count; i++) ((double *)to)[i] = folded_double(sum, 0, sum->ranks, i);
    } else {
        for (int64_t i = 0; i < count; i += LANES) {
            int64_t left = count - i;
            store_some(to, i, lanes_of(left), dtype, folded(sum, 0, sum->ranks, i, left, dtype));
        }
    }
}

/* x [count] becomes the sum of all ranks' x. 1 when it has; 0 where another rank has not come within `spin`, or with
 * another piece: to be called again, with the same x, when it has. */
int tllm_shared_sum(SharedSum *sum, void *x, int64_t count, int dtype) {
    int64_t began = now(), size = bytes_of(dtype), most = sum->place_bytes / size, is_whole = 1;
    while (is_whole && sum->summed < count) {
        int64_t here = count - sum->summed < most ? count - sum->summed : most, piece = here * 8 + dtype;
        char *numbers = (char *)x + sum->summed * size;
        Arrival *own = sum->arrivals + sum->rank;
        if (!sum->has_come) {
            memcpy(place_of(sum, sum->rank), numbers, (size_t)(here * size));
            own->pieces[sum->number % PLACES] = piece;
            __atomic_store_n(&own->number, sum->number, __ATOMIC_RELEASE);
            sum->has_come = 1;
        }
        for (int64_t rank = 0; is_whole && rank < sum->ranks; rank++)
            is_whole = comes(sum, rank, began + sum->spin) &&
                       sum->arrivals[rank].pieces[sum->number % PLACES] == piece;
        if (is_whole) {
            add_up(sum, numbers, here, dtype);
            sum->summed += here, sum->number += 1, sum->has_come = 0;
        }
    }
    if (is_whole) sum->summed = 0;
    sum->taken += now() - began;
    return (int)is_whole;
}

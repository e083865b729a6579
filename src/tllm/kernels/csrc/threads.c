#include "threads.h"

#include <stdatomic.h>
#include <stddef.h>

/* libgomp's own entry points, which kernels/library.py finds in the library that torch has loaded. */
typedef void (*Parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*Number)(void);

static Parallel parallel;
static Number thread_number, number_of_threads;

void tllm_set_threads(Parallel fork, Number number, Number count) {
    parallel = fork;
    thread_number = number;
    number_of_threads = count;
}

#define SMALLEST 8 /* parts of a fair share, which are not divided: what a thread fetches ahead of its part is lost */

typedef struct {
    Work work;
    void *data;
    int64_t items, unit;
    _Atomic int64_t next; /* the first unit that nobody has taken */
} Shared;

/* Guided self-scheduling (Polychronopoulos and Kuck, 1987): a thread that is free takes the next units, half of what would
 * be its share of those that are left. So cores that are unlike, or that others use for a while, finish together, and what
 * is read stays in long runs. */
static void body(void *of) {
    Shared *shared = of;
    const int64_t threads = number_of_threads(), units = (shared->items + shared->unit - 1) / shared->unit;
    const int64_t smallest = units / (SMALLEST * threads) + 1;
    const int mine = thread_number();
    int64_t first = atomic_load(&shared->next);
    while (first < units) {
        const int64_t half = (units - first) / (2 * threads), end = first + (half > smallest ? half : smallest);
        if (!atomic_compare_exchange_weak(&shared->next, &first, end)) continue; /* `first` is what there was */
        const int64_t last = end * shared->unit;
        shared->work(shared->data, first * shared->unit, last < shared->items ? last : shared->items, mine);
        first = atomic_load(&shared->next);
    }
}

void run_parallel(Work work, void *data, int64_t items, int64_t unit, int threads) {
    if (parallel == NULL || threads < 2 || items <= unit) {
        work(data, 0, items, 0);
        return;
    }
    Shared shared = {work, data, items, unit, 0};
    parallel(body, &shared, (unsigned)threads, 0);
}

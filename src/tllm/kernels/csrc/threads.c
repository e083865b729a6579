#include "threads.h"

#include <stdatomic.h>
#include <stddef.h>

/* libgomp's own entry points, which kernels/library.py finds in the library that torch has loaded. */
typedef void (*Parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*Number)(void);

static Parallel parallel;
static Number thread_number;

void tllm_set_threads(Parallel fork, Number number) {
    parallel = fork;
    thread_number = number;
}

/* A thread's own units that nobody has begun, alone in a line of the caches. */
typedef struct {
    _Alignas(64) _Atomic int64_t next;
    int64_t end;
} Left;

typedef struct {
    Work work;
    void *data;
    int64_t items, unit;
    Left *left;
    int threads;
} Shared;

/* Take a quarter of what is left, at least one unit, and do it, until none is left. */
static void do_units(const Shared *shared, Left *left, int thread) {
    int64_t first = atomic_load_explicit(&left->next, memory_order_relaxed);
    while (first < left->end) {
        int64_t stop = first + (left->end - first + 3) / 4;
        if (!atomic_compare_exchange_weak_explicit(&left->next, &first, stop, memory_order_relaxed, memory_order_relaxed))
            continue;
        int64_t last = stop * shared->unit < shared->items ? stop * shared->unit : shared->items;
        shared->work(shared->data, first * shared->unit, last, thread);
        first = atomic_load_explicit(&left->next, memory_order_relaxed);
    }
}

/* A thread does its own part, then what others have not begun of theirs. */
static void body(void *of) {
    const Shared *shared = of;
    const int mine = thread_number();
    for (int i = 0; i < shared->threads; i++) do_units(shared, shared->left + (mine + i) % shared->threads, mine);
}

void run_parallel(Work work, void *data, int64_t items, int64_t unit, int threads) {
    if (parallel == NULL || threads < 2 || items <= unit) {
        work(data, 0, items, 0);
        return;
    }
    const int64_t units = (items + unit - 1) / unit;
    if (units < threads) threads = (int)units;
    Left left[threads];
    for (int i = 0; i < threads; i++) left[i] = (Left){units * i / threads, units * (i + 1) / threads};
    Shared shared = {work, data, items, unit, left, threads};
    parallel(body, &shared, (unsigned)threads, 0);
}

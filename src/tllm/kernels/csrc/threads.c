#include "threads.h"

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

typedef struct {
    Work work;
    void *data;
    int64_t items, unit;
} Shared;

static void body(void *of) {
    const Shared *shared = of;
    int64_t threads = number_of_threads(), mine = thread_number();
    int64_t units = (shared->items + shared->unit - 1) / shared->unit;
    int64_t first = units * mine / threads * shared->unit, last = units * (mine + 1) / threads * shared->unit;
    if (last > shared->items) last = shared->items;
    if (first < last) shared->work(shared->data, first, last, (int)mine);
}

void run_parallel(Work work, void *data, int64_t items, int64_t unit, int threads) {
    if (parallel == NULL || threads < 2 || items <= unit) {
        work(data, 0, items, 0);
        return;
    }
    Shared shared = {work, data, items, unit};
    parallel(body, &shared, (unsigned)threads, 0);
}

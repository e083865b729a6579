/* Work shared among the threads that torch uses already: a second team on the same cores would make both sleep. */
#ifndef TLLM_THREADS_H
#define TLLM_THREADS_H

#include <stdint.h>

/* work(data, first, last, thread) does items [first, last) in the thread of this number. */
typedef void (*Work)(void *data, int64_t first, int64_t last, int thread);

/* Do `items` in at most `threads` threads, in parts that begin at multiples of `unit`. Each thread takes parts until none is
 * left: which ones, and how many, is different each time. */
void run_parallel(Work work, void *data, int64_t items, int64_t unit, int threads);

#endif

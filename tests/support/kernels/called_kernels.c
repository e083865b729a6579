/* Calls kernels that were compiled for another processor, by the orders of a test that runs on this one: an emulator runs
 * this program (emulated_kernels.py).
 *
 * An order, in 64-bit words: which function, how many blocks of memory, pointers, whole arguments and real ones; then each
 * block's address over there, its length and its bytes; where pointers lie in these blocks; the whole arguments, each with
 * whether it is a pointer; and the real ones. The answer is what the function returned and then the bytes of all blocks. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Anything)(void);

/* Whole and real arguments have registers of their own on 64-bit ARM, each kind in its order, and the stack has what is
 * left in words; whoever is called leaves what he does not ask for. So one type does for all functions. */
typedef int64_t (*Kernel)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t, int64_t, int64_t, float, float);
enum { MOST_WORDS = 14, MOST_REALS = 2 };

#define KERNEL(name) void name(void);
#include "kernel_names.h"
#undef KERNEL
#define KERNEL(name) name,
static const Anything kernels[] = {
#include "kernel_names.h"
};

typedef struct {
    uint64_t address;
    int64_t bytes;
    char *memory, *here;
} Block;

static void end_with(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(1);
}

static void read_all(void *to, size_t bytes) {
    if (bytes != 0 && fread(to, bytes, 1, stdin) != 1) end_with("an order ends too soon");
}

static int64_t next_word(void) {
    int64_t word;
    read_all(&word, sizeof word);
    return word;
}

static uint64_t here(uint64_t address, const Block *blocks, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t at = address - blocks[i].address;
        if (address >= blocks[i].address && at <= (uint64_t)blocks[i].bytes) return (uint64_t)(uintptr_t)blocks[i].here + at;
    }
    if (address != 0) end_with("a pointer is to no block");
    return 0;
}

int main(void) {
    int64_t function;
    while (fread(&function, sizeof function, 1, stdin) == 1) {
        const int64_t block_count = next_word(), pointer_count = next_word(), words = next_word(), reals = next_word();
        if (words > MOST_WORDS || reals > MOST_REALS) end_with("a kernel has too many arguments");
        Block *blocks = calloc((size_t)block_count + 1, sizeof *blocks);
        for (Block *block = blocks; block < blocks + block_count; block++) {
            block->address = (uint64_t)next_word();
            block->bytes = next_word();
            block->memory = malloc((size_t)block->bytes + 64);
            block->here = block->memory + (block->address - (uint64_t)(uintptr_t)block->memory) % 64; /* aligned alike */
            read_all(block->here, (size_t)block->bytes);
        }
        uint64_t **pointers = calloc((size_t)pointer_count + 1, sizeof *pointers);
        uint64_t *there = calloc((size_t)pointer_count + 1, sizeof *there);
        for (int64_t i = 0; i < pointer_count; i++) {
            pointers[i] = (uint64_t *)(uintptr_t)here((uint64_t)next_word(), blocks, block_count);
            there[i] = *pointers[i];
            *pointers[i] = here(there[i], blocks, block_count);
        }
        int64_t w[MOST_WORDS] = {0};
        for (int64_t i = 0; i < words; i++) {
            w[i] = next_word();
            if (next_word()) w[i] = (int64_t)here((uint64_t)w[i], blocks, block_count);
        }
        double r[MOST_REALS] = {0};
        read_all(r, (size_t)reals * sizeof *r);
        const Kernel kernel = (Kernel)kernels[function];
        const int64_t result = kernel(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13],
                                      (float)r[0], (float)r[1]);
        for (int64_t i = 0; i < pointer_count; i++) *pointers[i] = there[i];
        fwrite(&result, sizeof result, 1, stdout);
        for (Block *block = blocks; block < blocks + block_count; block++) {
            fwrite(block->here, (size_t)block->bytes, 1, stdout);
            free(block->memory);
        }
        fflush(stdout);
        free(blocks);
        free(pointers);
        free(there);
    }
    return 0;
}

/* A piece whose codes are unpacked for products by tiles: signed, less a bias, [columns / 4, 16 outputs, 4].
 *
 * The piece that is multiplied next is unpacked some columns at a time between the operations of this one, whose tiles leave
 * the units of vectors time for it.
 */
#ifndef TLLM_TILE_PIECE_H
#define TLLM_TILE_PIECE_H

#include "piece.h"

#if HAS_TILES

/* It is multiplied by columns [first, first + columns) of x, and `rest` times the sum of x's codes is still to be taken from
 * the sums of its unpacked ones. */
typedef struct {
    Piece piece;
    const uint8_t *packed; /* where its codes begin */
    int64_t first, columns;
    int64_t unpacked; /* of how many columns the codes are unpacked */
    int32_t bias, rest;
    int is_open; /* whether codes less the bias may have no place in 8 bits with a sign; */
    u8x64 most;  /* then the largest ones so far */
    int8_t codes[PIECE * LANES] __attribute__((aligned(64)));
} TilePiece;

/* Whether numbers from `least` to `most` have a place in 8 bits with a sign. */
INLINE int fits_int8(int least, int most) { return least >= -128 && most <= 127; }

/* The bias of a weight's codes: their offset, if they have a place then, and otherwise 128. Of 8 bits only the codes tell. */
INLINE int32_t bias_of(const PackedWeight *w) {
    int least = 0, most = w->kind == NIBBLES ? 15 : 127 + w->offset;
    for (int i = 0; w->kind == NIBBLES_BY_TABLE && i < 16; i++) {
        least = i == 0 || w->table[i] < least ? w->table[i] : least;
        most = i == 0 || w->table[i] > most ? w->table[i] : most;
    }
    return fits_int8(least - w->offset, most - w->offset) ? w->offset : 128;
}

INLINE void unpack_kind(TilePiece *of, int64_t columns, int kind) {
    const uint8_t *from = of->packed + of->unpacked * column_bytes(kind);
    int8_t *to = of->codes + of->unpacked * LANES;
    const u8x64 bias = (u8x64){} + (uint8_t)of->bias;
    u8x64 most = of->most;
    u8x16 table;
    memcpy(&table, of->piece.product->weight->table, sizeof table);
    for (int64_t k = 0; k < columns; k += kind == BYTES ? 4 : 8, from += 64) {
        u8x64 bytes;
        memcpy(&bytes, from, sizeof bytes);
        __builtin_prefetch(from + AHEAD);
        if (kind == BYTES) most = __builtin_elementwise_max(most, bytes);
        for (int part = 0; part < (kind == BYTES ? 1 : 2); part++) {
            u8x64 some = kind == BYTES ? bytes : part ? bytes >> 4 : bytes & 15;
            if (kind == NIBBLES_BY_TABLE) some = look_up(some, table);
            some -= bias;
            memcpy(to + (k + 4 * part) * LANES, &some, sizeof some);
        }
    }
    of->unpacked += columns, of->most = most;
}

/* Unpacks the next `columns`, a multiple of 16. */
INLINE void unpack(TilePiece *of, int64_t columns) {
    const int kind = of->piece.product->weight->kind;
    if (kind == NIBBLES)
        unpack_kind(of, columns, NIBBLES);
    else if (kind == BYTES)
        unpack_kind(of, columns, BYTES);
    else
        unpack_kind(of, columns, NIBBLES_BY_TABLE);
}

/* Unpacks what is left. Returns whether all codes have a place as they were unpacked; if not, they are unpacked anew. */
INLINE int unpack_rest(TilePiece *of) {
    unpack(of, of->columns - of->unpacked);
    if (!of->is_open || __builtin_reduce_max(of->most) - of->bias <= 127) return 1;
    of->bias = 128, of->rest = of->piece.product->weight->offset - of->bias, of->is_open = 0, of->unpacked = 0;
    unpack(of, of->columns);
    return 0;
}

/* The groups of a block from the `first`-th on, of which no code is unpacked yet. */
INLINE void begin_piece(TilePiece *of, const Product *p, int64_t block, int64_t first) {
    const PackedWeight *w = p->weight;
    begin_block(&of->piece, p, block);
    of->piece.last = first;
    next_piece(&of->piece, block, groups_of(w));
    const int64_t end = of->piece.last * w->group;
    of->first = first * w->group, of->columns = (end < w->padded ? end : w->padded) - of->first;
    of->packed = of->piece.codes + of->first * column_bytes(w->kind), of->unpacked = 0;
    of->bias = bias_of(w), of->rest = w->offset - of->bias, of->most = (u8x64){}, of->is_open = w->kind == BYTES && of->bias != 128;
}

#endif

#endif

// One tile of keys and values of decode attention: where its rows lie, and how those of the next are fetched meanwhile.
// Knows nothing of blocks, splits or softmax.
#pragma once
#include "vec.h"

enum { TILE = 64 };
enum { ROW = TILE + W };  // of scores: the last group of keys may write past the tile's end
enum { NEAR = 16 };  // how many rows before its turn one is brought into the first cache, in float
// Heads of a group that are computed together: what is read from memory is then read from the caches once, and fetches
// find computing all along to go beside.
template <class C> constexpr int HB_MAX = sizeof(C) == 2 || W == 16 ? 8 : 4;

// Where the rows of some tokens lie. Keys and values are taken by the group: those from n on are the last one again.
struct Rows {
    const char* k[TILE + W]; const char* v[TILE + W];
    int n;
};
// What scores and weights are multiplied with, vectors whole; of quantised KV.
struct Scales { float k[TILE], v[TILE]; };
// One head's rows: as far behind those of `rows` as `shift` says, in bytes.
struct Place {
    const Rows* rows; int64_t shift;
    const char* key(int i) const { return rows->k[i] + shift; }
    const char* value(int i) const { return rows->v[i] + shift; }
};
// What fetches is always inline: a call that does nothing else does nothing at all, to a compiler.
template <class C> struct Tile : Place {
    Place next;         // what is worked on after this, fetched meanwhile; itself where there is nothing
    Scales* scales;     // or null
    int n, row_bytes;
    float weight_unit;  // what 1 of a weight in fixed point stands for
    // Part i of the next, into the second cache. A few rows at a time, between products: what finds all of the cache's
    // requests taken waits, and so does all behind it. Whole rows in order: the machine's own prefetcher sees a stream.
    __attribute__((always_inline)) void fetch(const char* far) const {
        for (int b = 0; b < row_bytes; b += 64) __builtin_prefetch(far + b, 0, 1);
    }
    // The rows that come NEAR rows after row i of the keys, and of the values.
    const char* near_key(int i) const { return i + NEAR < TILE ? key(i + NEAR) : value(i + NEAR - TILE); }
    const char* near_value(int i) const { return i + NEAR < TILE ? value(i + NEAR) : next.key(i + NEAR - TILE); }
};
// A float that is multiplied with what is stored as S, and widened as it is loaded.
template <class S> struct float_over { float x; };
template <class S> INLINE void narrow(float_over<S>* p, vf v) { store(&p->x, v); }
// The line with element d of a row, into the first cache.
template <class S> INLINE void approach(const S* row, int d) {
    if (W * sizeof(S) >= 64 || d * sizeof(S) % 64 == 0) __builtin_prefetch(row + d, 0, 3);
}
// The same line by line, for products whose steps are no rows, and into the first cache: their tiles fit into it beside
// what is worked on, and rows that lie ready there cost a tenth less than rows in the second.
struct Lines {
    const char* const* row; int64_t shift; int at, row_bytes;
    __attribute__((always_inline)) void fetch(int count) {
        for (int i = 0; i < count; i++) {
            __builtin_prefetch(*row + shift + at, 0, 3);
            at += 64;
            if (at >= row_bytes) at = 0, row++;
        }
    }
};
template <class C> INLINE Lines next_keys(const Tile<C>& t) { return {t.next.rows->k, t.next.shift, 0, t.row_bytes}; }
template <class C> INLINE Lines next_values(const Tile<C>& t) { return {t.next.rows->v, t.next.shift, 0, t.row_bytes}; }

typedef vu Turned[2];  // some numbers of 2 * W keys, a lane for each key
// Before rows are read through their pointers: kept in registers for longer, pointers would displace one another.
INLINE void anew() { asm volatile("" ::: "memory"); }

// Decode attention's two products over one tile of keys and values, for a few heads of a group at a time, and the
// fetches that go beside them. Knows nothing of blocks, splits or softmax.
#pragma once
#include "pairs.h"

enum { TILE = 64 };
enum { ROW = TILE + W };  // of scores: the last group of keys may write past the tile's end
enum { NEAR = 16 };  // how many rows before its turn one is brought into the first cache, in float
// Heads of a group that are computed together: what is read from memory is then read from the caches once, and fetches
// find computing all along to go beside.
template <class C> constexpr int HB_MAX = sizeof(C) == 2 || W == 16 ? 8 : 4;

// One tile: where its rows lie (in the pool, or in `buffer` once converted), and what they are multiplied with.
struct Rows {
    const char* k[TILE + W]; const char* v[TILE + W];  // from n on: the last one
    float k_scale[TILE], v_scale[TILE];
    int n;
};
// What fetches is always inline: a call that does nothing else does nothing at all, to a compiler.
template <class C> struct Tile : Rows {
    const Rows* next;  // what is worked on after this, fetched meanwhile; itself where there is nothing
    int row_bytes;
    int part;          // bytes of 32 elements
    float weight_unit; // what 1 of a weight in fixed point stands for
    // Row i of the next, into the second cache. A few rows at a time, between products: what finds all of the cache's
    // requests taken waits, and so does all behind it. Whole rows in order: the machine's own prefetcher sees a stream.
    __attribute__((always_inline)) void fetch(const char* const* far, int i) const {
        for (int b = 0; b < row_bytes; b += 64) __builtin_prefetch(far[i] + b, 0, 1);
    }
    // The line with element d of a row, into the first cache.
    __attribute__((always_inline)) void approach(const char* row, int d) const {
        if (W >= 16 || d % 16 == 0) __builtin_prefetch(row + (part >> 5) * d, 0, 3);
    }
    // The rows that come NEAR rows after row i of the keys, and of the values.
    const char* const* near_keys(int i) const { return i + NEAR < TILE ? k + i + NEAR : v + (i + NEAR - TILE); }
    const char* const* near_values(int i) const { return i + NEAR < TILE ? v + i + NEAR : next->k + (i + NEAR - TILE); }
    // Both for 32 elements from d on; once for each line.
    __attribute__((always_inline)) void fetch_part(const char* const* far, const char* near, int i, int d) const {
        int at = part * (d >> 5);
        if (at & 63) return;
        __builtin_prefetch(far[i] + at, 0, 1);
        __builtin_prefetch(near + at, 0, 3);
    }
};

// ---- scores: s[h][ROW] = q[h] . k[t] for HB heads, KB keys at a time; HB * KB = W ----
template <int HB> INLINE void scores(const float* q, const Tile<float>& t, int D, float* s) {
    constexpr int KB = W / HB;  // lane h * KB + k of the sums; the last lanes may stay idle
    for (int at = 0; at < t.n; at += KB) {
        vf acc[W] = {};
        const float* rows[KB];
        for (int k = 0; k < KB; k++) rows[k] = (const float*)t.k[at + k];
        for (int k = 0; k < KB; k++) t.fetch(t.next->k, at + k);
        const char* const* near = t.near_keys(at);
        for (int d = 0; d < D; d += W) {
            vf key[KB];
            for (int k = 0; k < KB; k++) t.approach(near[k], d);
            for (int k = 0; k < KB; k++) key[k] = load(rows[k] + d);
            for (int h = 0; h < HB; h++) {
                vf query = load(q + h * D + d);
                for (int k = 0; k < KB; k++) acc[h * KB + k] += query * key[k];
            }
        }
        float both[W];
        store(both, sums(acc));
        for (int h = 0; h < HB; h++) memcpy(s + h * ROW + at, both + h * KB, 4 * KB);
    }
}
// ---- o[h] += p[h] v: HB heads, NC vectors of the row at a time ----
template <int HB, int NC> INLINE void values(const float* p, const Tile<float>& t, int d, float* o, int stride) {
    vf acc[HB][NC];
    for (int h = 0; h < HB; h++) for (int c = 0; c < NC; c++) acc[h][c] = load(o + h * stride + d + c * W);
    for (int k = 0; k < t.n; k++) {
        t.fetch(t.next->v, k);
        const char* near = *t.near_values(k);
        for (int c = 0; c < NC; c++) t.approach(near, d + c * W);
        vf value[NC];
        for (int c = 0; c < NC; c++) value[c] = load((const float*)t.v[k] + d + c * W);
        for (int h = 0; h < HB; h++) {
            vf weight = splat(p[h * TILE + k]);
            for (int c = 0; c < NC; c++) acc[h][c] += weight * value[c];
        }
    }
    for (int h = 0; h < HB; h++) for (int c = 0; c < NC; c++) store(o + h * stride + d + c * W, acc[h][c]);
}
template <int HB> INLINE void values_row(const float* p, const Tile<float>& t, int D, float* o, int stride) {
    constexpr int NC = HB > 4 ? 2 : NC_MAX;
    int d = NC * W <= D ? NC * W : W;
    if (NC * W <= D) values<HB, NC>(p, t, 0, o, stride);
    else values<HB, 1>(p, t, 0, o, stride);
    for (; d + NC * W <= D; d += NC * W) values<HB, NC>(p, t, d, o, stride);
    for (; d < D; d += W) values<HB, 1>(p, t, d, o, stride);
}
INLINE int padded(const float*, int D) { return D; }
INLINE void unpad(const float*, const float* o, int d, float* to) { memcpy(to, o + d, 64); }

#if defined(MP_BF16)
template <int HB, class C> INLINE void scores(const C* q, const Tile<C>& t, int D, float* s) {
    constexpr int KB = W / HB;
    for (int at = 0; at < t.n; at += KB) {
        typename Pairs<C>::Sum acc[W] = {};
        for (int k = 0; k < KB; k++) t.fetch(t.next->k, at + k);
        for (int d = 0; d < D; d += 32) {
            vu key[KB];
            for (int k = 0; k < KB; k++) key[k] = Pairs<C>::load(t.k[at + k], d, D - d);
            for (int h = 0; h < HB; h++) {
                vu query = Pairs<bf16>::load((const char*)(q + h * D), d, D - d);  // of two bytes, whatever they mean
                for (int k = 0; k < KB; k++) acc[h * KB + k] = Pairs<C>::dot(acc[h * KB + k], query, key[k]);
            }
        }
        vf wide[W];
        for (int i = 0; i < W; i++) wide[i] = Pairs<C>::number(acc[i]);
        float both[W];
        store(both, sums(wide));
        for (int h = 0; h < HB; h++) memcpy(s + h * ROW + at, both + h * KB, 4 * KB);
    }
}
// The same with a key in each lane, for many heads: 16 keys are turned around once, and no sum crosses lanes.
template <int HB, class C> INLINE void scores_turned(const C* q, const Tile<C>& t, int D, float* s) {
    for (int at = 0; at < t.n; at += 16) {
        typename Pairs<C>::Sum acc[HB] = {};
        const char* const* near = at + 16 < t.n ? t.k + at + 16 : t.v;
        for (int d = 0; d < D; d += 32) {
            vu key[16];
            for (int k = 0; k < 16; k++) key[k] = Pairs<C>::load(t.k[at + k], d, D - d);
            turn(key);
            auto eight = [&](int from) {
#pragma GCC unroll 8
                for (int i = from; i < from + 8; i++) {
                    t.fetch_part(t.next->k + at, near[i], i, d);
                    for (int h = 0; h < HB; h++) {
                        int32_t pair;
                        memcpy(&pair, q + h * D + d + 2 * i, 4);
                        acc[h] = Pairs<C>::dot(acc[h], (vu)_mm512_set1_epi32(pair), key[i]);
                    }
                }
            };
            eight(0);
            if (D - d >= 32) eight(8);
            else for (int i = 8; i < 16; i++) t.fetch_part(t.next->k + at, near[i], i, d);
        }
        for (int h = 0; h < HB; h++) store(s + h * ROW + at, Pairs<C>::number(acc[h]));
    }
}
// Two rows at a time, interleaved: 32 elements of o lie as two vectors in the order of unpacking, until the end.
template <int HB, int NC, class C>
INLINE void values(const C* p, const Tile<C>& t, int d, int left, float* o, int stride) {
    typename Pairs<C>::Sum acc[HB][2 * NC];
    for (int h = 0; h < HB; h++) for (int c = 0; c < 2 * NC; c++) Pairs<C>::begin(acc[h][c], o + h * stride + d + c * W);
    for (int k = 0; k < t.n; k += 2) {
        for (int c = 0; c < NC; c++)
            for (int i = k; i < k + 2; i++) t.fetch_part(t.next->v, t.v[(i + 8) & (TILE - 1)], i, d + 32 * c);
        vu value[2 * NC];
        for (int c = 0; c < NC; c++) {
            auto some = [&](int row) { return (__m512i)Pairs<C>::load(t.v[row], d + 32 * c, left - 32 * c); };
            __m512i x = some(k), y = some(k + 1);  // after the last row one with weight 0
            value[2 * c] = (vu)_mm512_unpacklo_epi16(x, y);
            value[2 * c + 1] = (vu)_mm512_unpackhi_epi16(x, y);
        }
        for (int h = 0; h < HB; h++) {
            int32_t pair;
            memcpy(&pair, p + h * TILE + k, 4);
            vu weight = (vu)_mm512_set1_epi32(pair);
            for (int c = 0; c < 2 * NC; c++) acc[h][c] = Pairs<C>::dot(acc[h][c], weight, value[c]);
        }
    }
    for (int h = 0; h < HB; h++) for (int c = 0; c < 2 * NC; c++) Pairs<C>::end(acc[h][c], t.weight_unit, o + h * stride + d + c * W);
}
template <int HB, class C>
INLINE void values_row(const C* p, const Tile<C>& t, int D, float* o, int stride) {
    constexpr int NC = HB > 4 ? 1 : 2;
    int d = 32 * NC <= D ? 32 * NC : 32;
    if (32 * NC <= D) values<HB, NC>(p, t, 0, 32 * NC, o, stride);
    else values<HB, 1>(p, t, 0, D, o, stride);
    for (; d + 32 * NC <= D; d += 32 * NC) values<HB, NC>(p, t, d, 32 * NC, o, stride);
    for (; d < D; d += 32) values<HB, 1>(p, t, d, D - d, o, stride);
}
template <class C> INLINE int padded(const C*, int D) { return (D + 31) & ~31; }
template <class C> INLINE void unpad(const C*, const float* o, int d, float* to) {  // 16 elements from d on
    const float* low = o + (d & ~31);
    int from = d & 16 ? 8 : 0;
    memcpy(to, low + from, 16), memcpy(to + 4, low + 16 + from, 16);
    memcpy(to + 8, low + from + 4, 16), memcpy(to + 12, low + 16 + from + 4, 16);
}
#endif

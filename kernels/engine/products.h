// Decode attention's two products over one tile of keys and values, for a few heads of a group at a time: in float, and in
// pairs of bfloat16.
#pragma once
#include "pairs.h"
#include "tile.h"

// ---- scores: s[h][ROW] = q[h] . k[t] for HB heads, KB keys of type S at a time; HB * KB = W ----
template <int HB, class S> INLINE void scores(const float_over<S>* q, const Tile<float_over<S>>& t, int D, float* s) {
    constexpr int KB = W / HB;  // lane h * KB + k of the sums; the last lanes may stay idle
    for (int at = 0; at < t.n; at += KB) {
        vf acc[W] = {};
        const S* rows[KB];
        for (int k = 0; k < KB; k++) rows[k] = (const S*)t.key(at + k);
        for (int k = 0; k < KB; k++) t.fetch(t.next.key(at + k));
        const S* near[KB];
        for (int k = 0; k < KB; k++) near[k] = (const S*)t.near_key(at + k);
        for (int d = 0; d < D; d += W) {
            vf key[KB];
            for (int k = 0; k < KB; k++) approach(near[k], d);
            for (int k = 0; k < KB; k++) key[k] = widen(rows[k] + d);
            for (int h = 0; h < HB; h++) {
                vf query = load(&q[h * D + d].x);
                for (int k = 0; k < KB; k++) acc[h * KB + k] += query * key[k];
            }
        }
        float both[W];
        store(both, sums(acc));
        for (int h = 0; h < HB; h++) memcpy(s + h * ROW + at, both + h * KB, 4 * KB);
    }
}
// ---- o[h] = o[h] * fade[h] + p[h] v: HB heads, NC vectors of the row at a time ----
template <int HB, int NC, class S>
INLINE void values(const float_over<S>* p, const Tile<float_over<S>>& t, int d, const float* fade, float* o, int stride) {
    vf acc[HB][NC];
    for (int h = 0; h < HB; h++) for (int c = 0; c < NC; c++) acc[h][c] = load(o + h * stride + d + c * W) * fade[h];
    for (int k = 0; k < t.n; k++) {
        t.fetch(t.next.value(k));
        const S* near = (const S*)t.near_value(k);
        for (int c = 0; c < NC; c++) approach(near, d + c * W);
        vf value[NC];
        for (int c = 0; c < NC; c++) value[c] = widen((const S*)t.value(k) + d + c * W);
        for (int h = 0; h < HB; h++) {
            vf weight = splat(p[h * TILE + k].x);
            for (int c = 0; c < NC; c++) acc[h][c] += weight * value[c];
        }
    }
    for (int h = 0; h < HB; h++) for (int c = 0; c < NC; c++) store(o + h * stride + d + c * W, acc[h][c]);
}
template <int HB, class S>
INLINE void values_row(const float_over<S>* p, const Tile<float_over<S>>& t, int D, const float* fade, float* o, int stride) {
    constexpr int NC = HB > 4 ? 2 : HB <= 2 ? 4 : NC_MAX;  // sums enough not to wait for one another
    int d = NC * W <= D ? NC * W : W;
    if (NC * W <= D) values<HB, NC>(p, t, 0, fade, o, stride);
    else values<HB, 1>(p, t, 0, fade, o, stride);
    for (; d + NC * W <= D; d += NC * W) values<HB, NC>(p, t, d, fade, o, stride);
    for (; d < D; d += W) values<HB, 1>(p, t, d, fade, o, stride);
}
template <class S> INLINE int padded(const float_over<S>*, int D) { return D; }
template <class S> INLINE void unpad(const float_over<S>*, const float* o, int d, float* to) { memcpy(to, o + d, 64); }

#if defined(MP_BF16)
template <class C> constexpr int ELEMENT = sizeof(C);  // bytes of a stored number
template <> constexpr int ELEMENT<bf16_f8> = 1;

template <int HB, class C> INLINE void scores_across(const C* q, const Tile<C>& t, int D, float* s) {
    constexpr int KB = W / HB;
    for (int at = 0; at < t.n; at += KB) {
        vf acc[W] = {};
        for (int k = 0; k < KB; k++) t.fetch(t.next.key(at + k));
        for (int d = 0; d < D; d += 32) {
            vu key[KB];
            for (int k = 0; k < KB; k++) key[k] = Pairs<C>::load(t.key(at + k), d, D - d);
            for (int h = 0; h < HB; h++) {
                vu query = Pairs<bf16>::load((const char*)(q + h * D), d, D - d);
                for (int k = 0; k < KB; k++) acc[h * KB + k] = dot2(acc[h * KB + k], query, key[k]);
            }
        }
        float both[W];
        store(both, sums(acc));
        for (int h = 0; h < HB; h++) memcpy(s + h * ROW + at, both + h * KB, 4 * KB);
    }
}
INLINE vu both(const void* pair) {
    int32_t bits;
    memcpy(&bits, pair, 4);
    return (vu)_mm512_set1_epi32(bits);
}
// The same with a key in each lane, for many heads: keys are turned around once, and no sum crosses lanes. 32 keys at a
// time, so that a query's number is loaded for two products, and there are sums enough not to wait for one another.
template <int HB, class C> INLINE void scores_turned(const C* q, const Tile<C>& t, int D, float* s) {
    Turned turned[256 / 2] __attribute__((aligned(64)));
    Lines lines = next_keys(t);
    for (int at = 0; at < t.n; at += 2 * W) {
        for (int d = 0; d < D; d += 32) for (int half = 0; half < 2; half++) {
            anew();
            vu key[W];
            for (int k = 0; k < W; k++) key[k] = Pairs<C>::load(t.key(at + half * W + k), d, D - d);
            turn(key);
            for (int i = 0; i < W; i++) turned[d / 2 + i][half] = key[i];
        }
        vf acc[HB][2] = {};
        for (int i = 0; i < D / 2; i++) {
            lines.fetch(ELEMENT<C>);
            vu low = turned[i][0], high = turned[i][1];
            for (int h = 0; h < HB; h++) {
                vu query = both(q + h * D + 2 * i);
                acc[h][0] = dot2(acc[h][0], query, low), acc[h][1] = dot2(acc[h][1], query, high);
            }
        }
        for (int h = 0; h < HB; h++) store(s + h * ROW + at, acc[h][0]), store(s + h * ROW + at + W, acc[h][1]);
    }
}
template <int HB, class C> INLINE void scores(const C* q, const Tile<C>& t, int D, float* s) {
    if constexpr (HB >= 5) scores_turned<HB>(q, t, D, s);
    else scores_across<HB>(q, t, D, s);
}
// Two rows at a time, interleaved: 32 elements of o lie as two vectors in the order of unpacking, until the end.
template <int HB, int NC, class C>
INLINE void values(const C* p, const Tile<C>& t, int d, int left, Lines& lines, const float* fade, float* o, int stride) {
    vf acc[HB][2 * NC];
    for (int h = 0; h < HB; h++) for (int c = 0; c < 2 * NC; c++) acc[h][c] = load(o + h * stride + d + c * W) * fade[h];
    for (int k = 0; k < t.n; k += 2) {
        lines.fetch(NC * ELEMENT<C>);
        vu value[2 * NC];
        for (int c = 0; c < NC; c++) {
            auto some = [&](int row) { return (__m512i)Pairs<C>::load(t.value(row), d + 32 * c, left - 32 * c); };
            __m512i x = some(k), y = some(k + 1);  // after the last row one with weight 0
            value[2 * c] = (vu)_mm512_unpacklo_epi16(x, y);
            value[2 * c + 1] = (vu)_mm512_unpackhi_epi16(x, y);
        }
        for (int h = 0; h < HB; h++) {
            vu weight = both(p + h * TILE + k);
            for (int c = 0; c < 2 * NC; c++) acc[h][c] = dot2(acc[h][c], weight, value[c]);
        }
    }
    for (int h = 0; h < HB; h++) for (int c = 0; c < 2 * NC; c++) store(o + h * stride + d + c * W, acc[h][c]);
}
template <int HB, class C>
INLINE void values_row(const C* p, const Tile<C>& t, int D, const float* fade, float* o, int stride) {
    constexpr int NC = HB > 4 ? 1 : 2;
    Lines lines = next_values(t);
    int d = 0;
    for (; d + 32 * NC <= D; d += 32 * NC) values<HB, NC>(p, t, d, 32 * NC, lines, fade, o, stride);
    for (; d < D; d += 32) values<HB, 1>(p, t, d, D - d, lines, fade, o, stride);
}
template <class C> INLINE int padded(const C*, int D) { return (D + 31) & ~31; }
template <class C> INLINE void unpad(const C*, const float* o, int d, float* to) {  // 16 elements from d on
    const float* low = o + (d & ~31);
    int from = d & 16 ? 8 : 0;
    memcpy(to, low + from, 16), memcpy(to + 4, low + 16 + from, 16);
    memcpy(to + 8, low + from + 4, 16), memcpy(to + 12, low + 16 + from + 4, 16);
}
#endif

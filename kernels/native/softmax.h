// The running softmax of decode attention, of a few heads over one tile (Milakov and Gimelshein 2018).
#pragma once
#include "tile.h"

// What is known of some rows (heads of a token) so far. A vector may be read from the last row's maximum on.
struct Running {
    float *top, *unit;  // maxima of scores; what 1 of a query stands for
    float *sums, *o;    // of weights, W of a row; of weighted values, `width` of a row
    int width;
    Running from(int row) const { return {top + row, unit + row, sums + (int64_t)row * W, o + (int64_t)row * width, width}; }
    static int64_t floats(int64_t rows, int width) { return (rows * (2 + W + width) + 31) / 16 * 16; }
    static Running in(float* p, int64_t rows, int width) { return {p + rows * (W + width), p + rows * (W + width + 1), p, p + rows * W, width}; }
};
template <class C> INLINE void put_weights(C* row, int k, vf x) { narrow(row + k, x); }

// Scores become weights p, in the type of the products. fade[h]: what a row's sums so far are to be multiplied with, as
// its maximum has risen; sums of weights are, sums of values are not yet. A score without an order, NaN or infinite,
// makes the sums NaN, and by that the row's result.
template <int HB, class C>
INLINE void softmax(float* s, const Tile<C>& t, float scale, const Running& r, float* fade, C* p) {
    constexpr int DEGREE = sizeof(C) == 2 ? 4 : 6;
    vf tops[HB];
    for (int h = 0; h < HB; h++) {
        vf times = splat(scale * r.unit[h]);
        tops[h] = splat(-__builtin_inff());
        for (int k = 0; k < t.n; k += W) {
            vf x = load(s + h * ROW + k) * times;
            if (t.scales) x = x * load(t.scales->k + k);
            if (k + W > t.n) x = first_lanes(t.n - k) ? x : splat(-__builtin_inff());
            store(s + h * ROW + k, x);
            tops[h] = vmax(tops[h], x);
        }
    }
    float risen[W];
    vf before = load(r.top), top = vmax(across<Larger, HB>(tops), before);
    store(fade, exp2v<6>(before - top));
    store(risen, top);
    memcpy(r.top, risen, HB * sizeof(float));
    for (int h = 0; h < HB; h++) {
        vf m = splat(risen[h]), l = load(r.sums + h * W) * fade[h];
        for (int k = 0; k < t.n; k += W) {
            vf e = exp2v<DEGREE>(load(s + h * ROW + k) - m);
            l += e;
            if (t.scales) e = e * load(t.scales->v + k);
            put_weights(p + h * TILE, k, e);
        }
        store(r.sums + h * W, l);
    }
}

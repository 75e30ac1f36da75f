// The running softmax of decode attention, of a few heads over one tile (Milakov and Gimelshein 2018).
#pragma once
#include "tile.h"

// What is known of some rows (heads of a token) so far. A vector may be read from the last row's maximum on.
struct Running {
    float *top, *q_scale;  // maxima of scores; what 1 of a query stands for
    float *sums, *o;    // of weights, W of a row; of weighted values, `width` of a row
    int width;
    Running from(int row) const { return {top + row, q_scale + row, sums + (int64_t)row * W, o + (int64_t)row * width, width}; }
    static int64_t floats(int64_t rows, int width) { return (rows * (2 + W + width) + 31) / 16 * 16; }
    static Running in(float* p, int64_t rows, int width) { return {p + rows * (W + width), p + rows * (W + width + 1), p, p + rows * W, width}; }
};
// A row's weights in the type of the products. Beyond the tile's last vector of keys they may be anything.
template <class C> INLINE void put_weights(C* row, const vf* weights) {
    for (int i = 0; i < TILE / W; i++) narrow(row + i * W, weights[i]);
}

// Scores become weights p, in the type of the products. fade[h]: what a row's sums so far are to be multiplied with, as
// its maximum has risen; sums of weights are, sums of values are not yet. A score without an order, NaN or infinite,
// makes the sums NaN, and by that the row's result. Tiles are taken whole: what is behind the last key has no weight.
template <int HB, class C>
INLINE void softmax(float* s, const Tile<C>& t, float scale, const Running& r, float* fade, C* p) {
    constexpr int DEGREE = sizeof(C) == 2 ? 4 : 6, VECTORS = TILE / W;
    vf tops[HB];
    for (int h = 0; h < HB; h++) {
        vf times = splat(scale * r.q_scale[h]);
        tops[h] = splat(-__builtin_inff());
        for (int i = 0; i < VECTORS; i++) {
            vf x = load(s + h * ROW + i * W) * times;
            if (t.scales) x = x * load(t.scales->k + i * W);
            if (t.n < TILE) x = first_lanes(t.n - i * W) ? x : splat(-__builtin_inff());
            store(s + h * ROW + i * W, x);
            tops[h] = vmax(tops[h], x);
        }
    }
    float risen[W];
    vf before = load(r.top), top = vmax(across<Larger, HB>(tops), before);
    store(fade, exp2v<6>(before - top));
    store(risen, top);
    memcpy(r.top, risen, HB * sizeof(float));
    for (int h = 0; h < HB; h++) {
        vf m = splat(risen[h]), l = load(r.sums + h * W) * fade[h], weights[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            weights[i] = exp2v<DEGREE>(load(s + h * ROW + i * W) - m);
            l += weights[i];
            if (t.scales) weights[i] = weights[i] * load(t.scales->v + i * W);
        }
        store(r.sums + h * W, l);
        put_weights(p + h * TILE, weights);
    }
}

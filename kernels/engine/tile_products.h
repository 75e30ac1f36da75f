// Products of bfloat16 by tiles: rows as they lie, weights in pairs of inputs by outputs, as panels and prefill's keys and values
// have them. A tile of weights is 16 pairs of 16 outputs. Any number of rows goes through tiles: a row's bits depend
// neither on the other rows nor on how many there are.
#pragma once
#include "tiles.h"

#if defined(MP_TILES)
enum { TILE_DEEP = 32, TILE_WIDE = 32, TILE_HIGH = 32 };  // inputs of a step; outputs and rows of a call
enum { TWO_PANELS = 64 };  // a number of a shape, see shape_tiles; below it as many rows as the number says

// Tiles 0 to 3: sums by rows and outputs; 4 and 5: rows; 6 and 7: weights. `beside`: 5 has weights, of a second panel.
INLINE TileConfig shape_of(int rows, bool beside) {
    TileConfig c = {1};
    int first = rows < 16 ? rows : 16, second = rows > 16 ? rows - 16 : first;
    for (int t = 0; t < 8; t++) c.colsb[t] = 64, c.rows[t] = t < 6 ? (t / 2 == 1 || t == 5 ? second : first) : 16;
    if (beside) c.rows[5] = 16;
    return c;
}
// Rows by 32 outputs. Strides are in bytes; `add`: to what `out` has. `pace` bytes from `ahead` on are fetched with each step.
struct TileWork {
    const char* rows; int64_t stride;
    const char* weight; int64_t weight_stride;
    float* out; int64_t out_stride;
    bool add;
    const char* ahead; int64_t pace;
};
template <bool TWO> INLINE void sums_by_tiles(TileWork w, int rows, int64_t inputs) {
    float *out = w.out, *below = out + 4 * w.out_stride;
    if (w.add) tile_load<0>(out, w.out_stride), tile_load<1>(out + 16, w.out_stride);
    else tile_zero<0>(), tile_zero<1>();
    if (TWO && w.add) tile_load<2>(below, w.out_stride), tile_load<3>(below + 16, w.out_stride);
    else if (TWO) tile_zero<2>(), tile_zero<3>();
    auto step = [](const char* row, int64_t stride, const char* weight, int64_t weight_stride) __attribute__((always_inline)) {
        tile_load<4>(row, stride);
        tile_load<6>(weight, weight_stride), tile_bf16<0, 4, 6>();
        tile_load<7>(weight + 64, weight_stride), tile_bf16<1, 4, 7>();
        if (TWO) tile_load<5>(row + 16 * stride, stride), tile_bf16<2, 5, 6>(), tile_bf16<3, 5, 7>();
    };
    for (; inputs >= TILE_DEEP; inputs -= TILE_DEEP, w.rows += 2 * TILE_DEEP, w.weight += TILE_DEEP / 2 * w.weight_stride, w.ahead += w.pace) {
        for (int64_t b = 0; b < w.pace; b += 64) __builtin_prefetch(w.ahead + b, 0, 2);
        step(w.rows, w.stride, w.weight, w.weight_stride);
    }
    if (inputs) {  // an even number of the last ones, with zeros behind
        alignas(64) char last[TILE_HIGH][64], weight[16][128] = {};
        memset(last, 0, 64 * rows);
        for (int r = 0; r < rows; r++) memcpy(last[r], w.rows + r * w.stride, 2 * inputs);
        for (int p = 0; p < inputs / 2; p++) memcpy(weight[p], w.weight + p * w.weight_stride, 128);
        step(last[0], 64, weight[0], 128);
    }
    tile_store<0>(out, w.out_stride), tile_store<1>(out + 16, w.out_stride);
    if (TWO) tile_store<2>(below, w.out_stride), tile_store<3>(below + 16, w.out_stride);
}
// Up to 32 rows by 32 outputs; `inputs` is even. A task that calls this has a TilesInUse.
static void by_tiles(const TileWork& w, int rows, int64_t inputs) {
    shape_tiles(rows, [&] { return shape_of(rows, false); });
    if (rows > 16) sums_by_tiles<true>(w, rows, inputs);
    else sums_by_tiles<false>(w, rows, inputs);
}
// Up to 16 rows by two panels side by side, as memory gives more to two streams; `inputs` is a multiple of TILE_DEEP. Both
// panels are fetched `ahead` bytes ahead, into the first cache. out [2][16][32].
static void two_panels_by_tiles(const char* row, int64_t stride, int rows, const char* weight, int64_t panel_bytes, int64_t inputs, int64_t ahead, float* out) {
    shape_tiles(TWO_PANELS + rows, [&] { return shape_of(rows, true); });
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    const char* second = weight + panel_bytes;
    constexpr int STEP = TILE_DEEP / 2 * 128;
    for (; inputs >= TILE_DEEP; inputs -= TILE_DEEP, row += 2 * TILE_DEEP, weight += STEP, second += STEP) {
        for (int b = 0; b < STEP; b += 64) __builtin_prefetch(weight + ahead + b, 0, 3);
        tile_load<4>(row, stride);
        tile_load<6>(weight, 128), tile_bf16<0, 4, 6>();
        tile_load<7>(weight + 64, 128), tile_bf16<1, 4, 7>();
        for (int b = 0; b < STEP; b += 64) __builtin_prefetch(second + ahead + b, 0, 3);
        tile_load<5>(second, 128), tile_bf16<2, 4, 5>();
        tile_load<6>(second + 64, 128), tile_bf16<3, 4, 6>();
    }
    for (int i = 0; i < 2; i++, out += 16 * TILE_WIDE) {
        if (i) tile_store<2>(out, 128), tile_store<3>(out + 16, 128);
        else tile_store<0>(out, 128), tile_store<1>(out + 16, 128);
    }
}
// Rows of a block that goes through all panels: as many as fit into half of a second cache of 2 MB.
INLINE int64_t tiled_block_rows(int64_t inputs) {
    int64_t rows = (1 << 20) / (2 * inputs) / TILE_HIGH * TILE_HIGH;
    return rows < 64 ? 64 : rows > 512 ? 512 : rows;
}
#endif

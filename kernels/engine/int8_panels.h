// A head in bytes beside it, by which the highest logit is found without reading the whole head. Mirrored in
// moonpool/engine/kernels/native/structures.py.
#pragma once
#include "panels.h"

struct Int8Panels {
    int8_t* weight;  // panel by panel; of each pair of inputs all outputs, an output's two side by side
    // Of each output, filled up to whole panels:
    float* unit;     // what 1 stands for
    float* off;      // times a row's length: what a logit is off by at most, as bytes are not the weights, and sums are rounded
    float* length;   // times the length of what a row loses in fixed point: the same for that
};
enum { INT8_ROWS = 3 };  // at most: more rows wait for sums, not for memory

// The highest logit's token of each row, the lowest of equal ones: what `product` and `mp_sample` would find. Returns 1
// where too many come close, or a logit may not be finite: then nothing is written. -1: no memory to work in.
extern "C" int mp_highest(const Panels* p, const Int8Panels* s, const void* x, int64_t rows, int32_t* tokens, int threads);

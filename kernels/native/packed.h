// Packed weights in panels: of each group of inputs the outputs' scales, then their offsets, then their codes.
//
// A weight is scale * (code - zero) + offset. Rows become signed bytes, with a scale for each chunk of 32 inputs, so that
// a chunk's sum (of 16 inputs, if a group has no more) is a whole number: it is the same on every machine and in every
// order. Chunks are added in their order, each by one multiplication with the product of both scales.
#pragma once
#include "panels.h"

enum { CHUNK = 32 };  // inputs of a row that share a scale

// Where bytes lie as the machine's products of bytes take them: four inputs of an output side by side, or two.
#if defined(MP_BF16) || W == 4
enum { SIDE_BY_SIDE = 4 };
#else
enum { SIDE_BY_SIDE = 2 };
#endif
INLINE int64_t byte_place(int64_t k, int lane) { return (k / SIDE_BY_SIDE * PANEL + lane) * SIDE_BY_SIDE + k % SIDE_BY_SIDE; }
// Nibbles: four inputs of an output in the low halves of four bytes, the next four in the high ones.
INLINE int64_t nibble_place(int64_t k, int lane) { return (k / 8 * PANEL + lane) * 4 + k % 4; }
INLINE int nibble_shift(int64_t k) { return k / 4 % 2 * 4; }

// `product` of packed weights.
template <class T>
int packed_product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads);

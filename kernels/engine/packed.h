// Packed weights in panels: of each group of inputs the outputs' scales, then their offsets, then their codes.
//
// A weight is scale * (code - zero) + offset. Rows become signed bytes, with a scale for each chunk of 32 inputs, so that
// a chunk's sum (of 16 inputs, if a group has no more) is a whole number: it is the same on every machine and in every
// order. Chunks are added in their order, each by one multiplication with the product of both scales.
//
// Scales and offsets of one byte are whole numbers of a unit (float16). Groups with the same units are a block: the
// outputs' units of scales, then those of offsets, then the groups.
//
// Codes that stand for floats (a table of 16, or floats of 8 bits) multiply rows as they are: scale * value(code).
#pragma once
#include "panels.h"

enum { CHUNK = 32 };  // inputs of a row that share a scale

// Four inputs of an output lie side by side: a quad. Bytes: quad by quad. Nibbles: a quad in the low halves of four bytes,
// the next quad in the high ones. Higher bits of codes with 5 and 6 bits lie behind the nibbles of 32 and 16 inputs: of
// each byte 1 or 2 bits belong to the first quad, the next ones to the second.
INLINE int64_t byte_place(int64_t k, int lane) { return (k / 4 * PANEL + lane) * 4 + k % 4; }
INLINE int64_t nibble_place(int64_t k, int lane) { return (k / 8 * PANEL + lane) * 4 + k % 4; }
INLINE int nibble_shift(int64_t k) { return k / 4 % 2 * 4; }
INLINE int64_t higher_inputs(int bits) { return bits == 5 ? 32 : bits == 6 ? 16 : 8; }  // whose nibbles lie together
// Where the nibble of input k lies, and the byte with higher bits, in front of which the shift says how many there are.
struct CodePlace { int64_t nibble, higher; int shift; };
INLINE CodePlace code_place(int bits, int64_t k, int lane) {
    int64_t together = higher_inputs(bits), run = k / together * (together * bits / 8 * PANEL), in = k % together;
    return {run + nibble_place(in, lane), run + together / 2 * PANEL + lane * 4 + k % 4, (int)(in / 4 * (bits - 4))};
}

// A float of 8 bits is that of 32 with the same digits, times a power of two: its exponent has another middle.
template <int VALUES> constexpr int FLOAT8_RIGHT = VALUES == FLOAT_E4M3 ? 4 : 3;  // from the highest byte on
template <int VALUES> constexpr int32_t FLOAT8_MASK = (int32_t)(VALUES == FLOAT_E4M3 ? 0x87f00000u : 0x8fe00000u);
template <int VALUES> constexpr float FLOAT8_UNIT = VALUES == FLOAT_E4M3 ? 0x1p120f : 0x1p112f;
INLINE float float8(int values, int code) {
    int32_t high = (int32_t)((uint32_t)code << 24);
    bool wide = values == FLOAT_E4M3;
    int32_t bits = wide ? high >> FLOAT8_RIGHT<FLOAT_E4M3> & FLOAT8_MASK<FLOAT_E4M3> : high >> FLOAT8_RIGHT<FLOAT_E5M2> & FLOAT8_MASK<FLOAT_E5M2>;
    float x;
    memcpy(&x, &bits, 4);
    return x * (wide ? FLOAT8_UNIT<FLOAT_E4M3> : FLOAT8_UNIT<FLOAT_E5M2>);
}
// A packed weight as it comes: codes [outputs, inputs] one a byte, nibbles two a byte; the others [outputs, groups], and
// units [outputs, blocks] in float16. Mirrors moonpool/engine/kernels/native/structures.py.
struct PackedMatrix { const uint8_t* codes; const char *scales, *offsets, *units, *offset_units; };

// `product` of packed weights, and of those whose codes stand for floats (packed_floats.cpp).
template <class T>
int packed_product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads);
template <class T>
int packed_float_product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads);

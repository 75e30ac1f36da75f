// The arithmetic of the tile instructions in plain C++, to the bit, for machines without them.
//
// TDPBF16PS keeps two sums for each output, of even and of odd inputs, over the tile's pairs. Both are added up, then added to the
// output. Every step rounds to nearest even, takes numbers below 2^-126 as 0 and gives 0 for them; no control register changes
// that. So the order is not the order of VDPBF16PS, which adds a pair's odd and then its even product to one running sum.
// Compared with a Xeon in 6.1 million outputs: near 1, of all exponents, around 2^-126, and of any bits.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace tile_model {
inline float of_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? of_bits(bits_of(x) & 0x80000000u) : x; }  // NaN stays
inline float wide(uint16_t x) { return flushed(of_bits((uint32_t)x << 16)); }
inline float added(float c, float a, float b) { return flushed(fmaf(a, b, c)); }  // c is flushed
inline float plus(float a, float b) { return flushed(flushed(a) + flushed(b)); }

// c[rows][columns] += a[rows][2 * pairs] b[pairs][2 * columns], 16 columns at most; each row takes 64 bytes.
inline void tdpbf16ps(float (*c)[16], const uint16_t (*a)[32], const uint16_t (*b)[32], int rows, int pairs, int columns) {
    for (int m = 0; m < rows; m++) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < pairs; k++)
            for (int n = 0; n < columns; n++) {
                even[n] = added(even[n], wide(a[m][2 * k]), wide(b[k][2 * n]));
                odd[n] = added(odd[n], wide(a[m][2 * k + 1]), wide(b[k][2 * n + 1]));
            }
        for (int n = 0; n < columns; n++) c[m][n] = plus(c[m][n], plus(even[n], odd[n]));
    }
}
// c[rows][columns] += a[rows][4 * quads] b[quads][4 * columns] of whole numbers, in any order: TDPBSUD, TDPBSSD.
template <class B> inline void tdpb(int32_t (*c)[16], const int8_t (*a)[64], const B (*b)[64], int rows, int quads, int columns) {
    for (int m = 0; m < rows; m++) for (int n = 0; n < columns; n++)
        for (int k = 0; k < 4 * quads; k++) c[m][n] += a[m][k] * b[k / 4][4 * n + k % 4];
}
}

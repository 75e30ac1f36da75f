// Decode attention's two products over int8, by the machine's products of bytes: four of them, unsigned by signed, are
// added to a lane. Queries and weights are in fixed point of 15 bits; their high and low bytes are multiplied apart, so
// that every sum is exact. Keys, which must be the unsigned side, are stored numbers + 128: what that adds is the same
// for all keys, and is taken off at the end.
#pragma once
#include "softmax.h"

#if defined(MP_BF16)
// Two bytes a number: of a row first all high ones, then all low ones. Behind a query's row lies its keys' excess.
struct fixed { int16_t bits; };
enum { FIXED_ONE = 1 << 14 };

INLINE vi add_bytes(vi c, vu positive, vu any) { return (vi)_mm512_dpbusd_epi32((__m512i)c, (__m512i)positive, (__m512i)any); }
INLINE vu four(const void* bytes) { return (vu)_mm512_set1_epi32(load_as<int32_t>(bytes)); }
INLINE vf exact(vi high, vi low) { return __builtin_convertvector((high << 8) + low, vf); }
// 64 numbers, or the `left` that there are; the rest is 0.
INLINE vu line_of(const char* row, int left) {
    if (left >= 64) return load_as<vu>(row);
    return (vu)_mm512_maskz_loadu_epi8(((__mmask64)1 << left) - 1, row);
}

// ---- scores of 32 keys at a time, four dimensions of them to a lane ----
template <int HB>
INLINE void dots(const fixed* q, const Turned* turned, int D, Lines& lines, float* s) {
    vi high[HB][2] = {}, low[HB][2] = {};
    for (int i = 0; i < D / 4; i++) {
        lines.fetch(2);
        for (int h = 0; h < HB; h++) {
            const char* query = (const char*)(q + h * (D + 2)) + 4 * i;
            vu upper = four(query), lower = four(query + D);
            for (int k = 0; k < 2; k++) {
                high[h][k] = add_bytes(high[h][k], turned[i][k], upper);
                low[h][k] = add_bytes(low[h][k], turned[i][k], lower);
            }
        }
    }
    for (int h = 0; h < HB; h++) {
        int32_t excess = load_as<int32_t>(q + h * (D + 2) + D);
        for (int k = 0; k < 2; k++) store(s + h * ROW + k * W, exact(high[h][k], low[h][k] - excess));
    }
}
template <int HB> INLINE void scores(const fixed* q, const Tile<fixed>& t, int D, float* s) {
    Turned turned[256 / 4] __attribute__((aligned(64)));
    Lines lines = next_keys(t);
    for (int at = 0; at < t.n; at += 2 * W) {
        for (int d = 0; d < D; d += 64) for (int half = 0; half < 2; half++) {
            anew();
            vu key[W];
            for (int k = 0; k < W; k++) key[k] = line_of(t.key(at + half * W + k) + d, D - d) ^ 0x80808080;
            turn(key);
            for (int i = 0; i < W; i++) turned[d / 4 + i][half] = key[i];
        }
        constexpr int FIRST = HB < 8 ? HB : HB / 2;  // more sums than that do not fit into the machine's registers
        dots<FIRST>(q, turned, D, lines, s + at);
        if constexpr (FIRST < HB) {
            Lines none{t.rows->k, t.shift, 0, t.row_bytes};
            dots<HB - FIRST>(q + FIRST * (D + 2), turned, D, none, s + FIRST * ROW + at);
        }
    }
}
// Four keys' bytes lie together, as products take them: of keys 16 i + 4 j on at 16 j + 4 i, which is how packing leaves them.
INLINE int at_key(int k) { return k % 16 * 4 + k / 16 * 4; }
// ---- o[h] = o[h] * fade[h] + p[h] v, four rows at a time, interleaved: 64 elements of o lie as four vectors in the order of unpacking ----
// Half of these vectors: of each 16 elements the first 8, or the others.
template <int HB, bool UPPER>
INLINE void values_half(const fixed* p, const Tile<fixed>& t, int d, int left, Lines& lines, const float* fade, float* o, int stride) {
    vi high[HB][2] = {}, low[HB][2] = {};
    for (int k = 0; k < t.n; k += 4) {
        lines.fetch(2);
        __m512i row[4], two[2];
        for (int i = 0; i < 4; i++) row[i] = (__m512i)line_of(t.value(k + i) + d, left);  // after the last: weights of 0
        for (int i = 0; i < 2; i++) {
            __m512i x = row[2 * i], y = row[2 * i + 1];
            two[i] = UPPER ? _mm512_unpackhi_epi8(x, y) : _mm512_unpacklo_epi8(x, y);
        }
        vu value[] = {(vu)_mm512_unpacklo_epi16(two[0], two[1]), (vu)_mm512_unpackhi_epi16(two[0], two[1])};
        for (int h = 0; h < HB; h++) {
            const char* weights = (const char*)(p + h * TILE) + at_key(k);
            vu upper = four(weights), lower = four(weights + TILE);
            for (int i = 0; i < 2; i++) {
                high[h][i] = add_bytes(high[h][i], upper, value[i]);
                low[h][i] = add_bytes(low[h][i], lower, value[i]);
            }
        }
    }
    for (int h = 0; h < HB; h++) for (int i = 0; i < 2; i++) {
        float* to = o + h * stride + d + (2 * UPPER + i) * W;
        store(to, load(to) * fade[h] + exact(high[h][i], low[h][i]) * t.weight_unit);
    }
}
template <int HB> INLINE void values_row(const fixed* p, const Tile<fixed>& t, int D, const float* fade, float* o, int stride) {
    if constexpr (HB > 7) {
        values_row<HB / 2>(p, t, D, fade, o, stride);
        values_row<HB - HB / 2>(p + HB / 2 * TILE, t, D, fade + HB / 2, o + HB / 2 * stride, stride);
    } else {
        Lines lines = next_values(t);
        for (int d = 0; d < D; d += 64) {
            values_half<HB, false>(p, t, d, D - d, lines, fade, o, stride);
            values_half<HB, true>(p, t, d, D - d, lines, fade, o, stride);
        }
    }
}
INLINE int query_width(const fixed*, int D) { return D + 2; }
INLINE int padded(const fixed*, int D) { return (D + 63) & ~63; }
INLINE void unpad(const fixed*, const float* o, int d, float* to) {  // 16 elements from d on
    const float* from = o + (d & ~63) + (d & 63) / 4;
    for (int i = 0; i < 4; i++) memcpy(to + 4 * i, from + i * W, 16);
}

// ---- from floats ----
INLINE void put_weights(fixed* row, const vf* weights) {
    auto words = [&](int i) {
        return _mm512_packs_epi32(_mm512_cvtps_epi32((__m512)weights[i]), _mm512_cvtps_epi32((__m512)weights[i + 1]));
    };
    __m512i a = words(0), b = words(2), low = _mm512_set1_epi16(255);
    _mm512_storeu_si512(row, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
    _mm512_storeu_si512((char*)row + TILE, _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
}
// A query of D numbers, `times` of which are 1; at most FIXED_ONE in size.
INLINE void put_query(const float* from, float times, fixed* to, int D) {
    vi all = {};
    for (int d = 0; d < D; d += W) {
        vi bits = nearest(load(from + d) * times), low = bits << 24 >> 24;
        store_bytes((char*)to + d, (bits - low) >> 8);
        store_bytes((char*)to + D + d, low);
        all += bits;
    }
    int32_t excess = 128 * _mm512_reduce_add_epi32((__m512i)all);
    memcpy((char*)to + 2 * D, &excess, 4);
}
#endif

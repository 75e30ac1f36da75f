// Products of pairs of numbers of two bytes, for KV of each type: how 32 stored numbers become pairs, and what is summed.
//
// The left side, queries or weights, is in the type C. Keys and values are widened as they are loaded: bfloat16 as it is,
// e4m3 to bfloat16, which holds all of it; int8 to int16, and then the left side is in fixed point of 14 bits, whose
// products and sums are exact.
#pragma once
#include "vec.h"

#if defined(MP_BF16)
struct fixed { int16_t bits; };  // over int8
struct bf16_f8 { uint16_t bits; };  // a bf16 over e4m3
enum { FIXED_ONE = 1 << 14 };

template <class C> struct Pairs;
template <> struct Pairs<bf16> {
    typedef vf Sum;
    static INLINE_IN vu load(const char* row, int at, int left) {  // numbers from `at` on, 32 at most; the rest is 0
        const char* p = row + 2 * at;
        if (left >= 32) return load_as<vu>(p);
        return (vu)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
    }
    static INLINE_IN vf dot(vf c, vu a, vu b) { return dot2(c, a, b); }
    static INLINE_IN vf number(vf sum) { return sum; }
    static INLINE_IN void begin(vf& sum, const float* o) { sum = ::load(o); }
    static INLINE_IN void end(vf sum, float, float* o) { store(o, sum); }
};
template <> struct Pairs<bf16_f8> : Pairs<bf16> {
    static INLINE_IN vu load(const char* row, int at, int left) {
        const __m256i bytes = left >= 32 ? _mm256_loadu_si256((const __m256i*)(row + at))
                                         : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)(row + at)));
        __m512i b = _mm512_cvtepu8_epi16(bytes), magnitude = _mm512_and_si512(b, _mm512_set1_epi16(0x7f));
        __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
        // Below 2^-6: 0 to 7 times 2^-9.
        const __m512i small = _mm512_castsi128_si512(
            _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
        __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
        __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), b), 8);
        return (vu)_mm512_or_si512(_mm512_mask_permutexvar_epi16(normal, is_small, magnitude, small), sign);
    }
};
template <> struct Pairs<fixed> {
    typedef vi Sum;
    static INLINE_IN vu load(const char* row, int at, int left) {
        if (left >= 32) return (vu)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(row + at)));
        return (vu)_mm512_zextsi256_si512(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(row + at))));
    }
    static INLINE_IN vi dot(vi c, vu a, vu b) { return (vi)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b); }
    static INLINE_IN vf number(vi sum) { return __builtin_convertvector(sum, vf); }
    static INLINE_IN void begin(vi& sum, const float*) { sum = (vi){}; }
    static INLINE_IN void end(vi sum, float unit, float* o) { store(o, ::load(o) + number(sum) * unit); }
};
INLINE void narrow(fixed* p, vf x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)nearest(x))); }
INLINE void narrow(bf16_f8* p, vf x) { narrow((bf16*)p, x); }
#endif

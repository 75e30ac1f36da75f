// Products of pairs of numbers of two bytes, for KV in bfloat16 and e4m3: how 32 stored numbers become pairs.
//
// The left side, queries or weights, is in bfloat16. Keys and values are widened as they are loaded: bfloat16 as it is,
// e4m3 to bfloat16, which holds all of it.
#pragma once
#include "vec.h"

#if defined(MP_BF16)
struct bf16_f8 { uint16_t bits; };  // a bf16 over e4m3

template <class C> struct Pairs;
template <> struct Pairs<bf16> {
    static INLINE_IN vu load(const char* row, int at, int left) {  // numbers from `at` on, 32 at most; the rest is 0
        const char* p = row + 2 * at;
        if (left >= 32) return load_as<vu>(p);
        return (vu)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
    }
};
template <> struct Pairs<bf16_f8> {
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
INLINE void narrow(bf16_f8* p, vf x) { narrow((bf16*)p, x); }
#endif

// Which of many weights are the first in falling order whose number, or sum, reaches a goal: without sorting them.
//
// A sample says between which two weights the border lies; one pass over all keeps those between them and adds up those
// above. That is repeated with what was kept, which is about a tenth, until little is left, which is sorted.
#pragma once
#include <algorithm>

#include "token_weights.h"

struct Cut { float at; int64_t dropped; };  // kept are all weights from `at` on, but the last `dropped` of those that are `at`

enum { SAMPLE = 128, MARGIN = 7 };

INLINE float beside(float x, int step) {  // the next float of one that is not negative: lower by -1, higher by 1
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits += step;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE void add(vd* sums_, vf v) {
    vd low, high;
    as_doubles(v, &low, &high);
    sums_[0] += low, sums_[1] += high;
}
INLINE double total(const vd* sums_) { return halved(sums_[0] + sums_[1]); }
// Lanes of a vector, and what they are used for.
#if defined(MP_AVX512)
typedef __mmask16 Lanes;
INLINE Lanes over(vf v, vf than) { return _mm512_cmp_ps_mask((__m512)v, (__m512)than, _CMP_GT_OQ); }
INLINE Lanes same(vf v, vf as_) { return _mm512_cmp_ps_mask((__m512)v, (__m512)as_, _CMP_EQ_OQ); }
INLINE vf only(vf v, Lanes lanes) { return (vf)_mm512_maskz_mov_ps(lanes, (__m512)v); }
INLINE int64_t number(Lanes lanes) { return __builtin_popcount(lanes); }
#else
typedef vi Lanes;
INLINE Lanes over(vf v, vf than) { return v > than; }
INLINE Lanes same(vf v, vf as_) { return v == as_; }
INLINE vf only(vf v, Lanes lanes) { return (vf)((vi)v & lanes); }
INLINE int64_t number(Lanes lanes) {
    int64_t r = 0;
    for (int i = 0; i < W; i++) r -= lanes[i];
    return r;
}
#endif
INLINE Lanes amid(vf v, vf low, vf high) { return over(v, low) & ~over(v, high); }
// Those lanes of v to `to`, behind `count` others; returns how many there are then.
INLINE int64_t pack(vf v, Lanes lanes, float* to, int64_t count) {
#if defined(MP_AVX512)
    _mm512_storeu_ps(to + count, _mm512_maskz_compress_ps(lanes, (__m512)v));
    return count + number(lanes);
#else
    for (int i = 0; i < W; i++) {
        to[count] = v[i];
        count -= lanes[i];
    }
    return count;
#endif
}
static int64_t fill_up(float* to, int64_t count) {  // with zeros, to a whole vector
    store(to + count, (vf){});
    return count;
}
// Those of n weights that are in (low, high].
static int64_t between(const float* from, int64_t n, float low, float high, float* to) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += W) {
        vf v = load(from + i);
        count = pack(v, amid(v, splat(low), splat(high)), to, count);
    }
    return fill_up(to, count);
}

// SAMPLE weights in falling order: the place of each is the number of higher ones, and of equal ones before it.
static void sort_falling(const float* from, float* to) {
    int32_t taken[SAMPLE] = {};
    for (int i = 0; i < SAMPLE; i++) {
        int place = 0;
#if defined(MP_AVX512)
        __m512 x = _mm512_set1_ps(from[i]);
        for (int j = 0; j < SAMPLE; j += W)
            place += __builtin_popcount(_mm512_cmp_ps_mask((__m512)load(from + j), x, _CMP_GT_OQ));
#else
        vi higher = {};
        for (int j = 0; j < SAMPLE; j += W) higher -= load(from + j) > splat(from[i]);
        for (int j = 0; j < W; j++) place += higher[j];
#endif
        to[place + taken[place]++] = from[i];
    }
}

template <bool COUNT> struct Cutting {
    double goal;       // what the kept weights' number or sum reaches
    double above = 0;  // of that, what lies above all candidates
    double all;        // number or sum of the candidates
    const float* from;
    int64_t n;         // candidates: positive, but for what fills up the last vector
    float* spare[2];   // where candidates go next
    float floor_ = 0;  // the candidates are all weights above it that are not in `above`

    double measure(const float* w, int64_t count) const {
        if (COUNT) return count;
        vd sums_[2] = {};
        for (int64_t i = 0; i < count; i += W) add(sums_, load(w + i));
        return total(sums_);
    }
    void go_on(int64_t count, double sum_) {
        from = spare[0], n = count, all = sum_;
        std::swap(spare[0], spare[1]);
    }
    // Of candidates that are all equal.
    Cut of_equals() const {
        double unit = COUNT ? 1.0 : from[0];
        int64_t kept = (int64_t)((goal - above) / unit);
        while (kept > 0 && above + (kept - 1) * unit >= goal) kept--;
        while (kept < n && above + kept * unit < goal) kept++;
        return {from[0], n - kept};
    }
    Cut of_few() const {
        float some[SAMPLE] = {}, sorted[SAMPLE];
        memcpy(some, from, n * sizeof(float));
        sort_falling(some, sorted);
        double sum_ = above;
        int64_t kept = 0, dropped = 0;
        for (; kept < n && sorted[kept] > 0 && sum_ < goal; kept++) sum_ += COUNT ? 1.0 : sorted[kept];
        if (!kept) return {beside(floor_, 1), 0};  // rounded in another order, sums may stay below the goal
        while (kept + dropped < n && sorted[kept + dropped] == sorted[kept - 1]) dropped++;
        return {sorted[kept - 1], dropped};
    }
    // Two weights between which the border probably lies: (low, high].
    void guess(float* low, float* high) const {
        float some[SAMPLE], sample[SAMPLE];
        for (int i = 0; i < SAMPLE; i++) some[i] = from[(2 * i + 1) * n / (2 * SAMPLE)];
        sort_falling(some, sample);
        double sum_ = 0, reached = 0;
        for (float w : sample) sum_ += COUNT ? 1.0 : w;
        double wanted = (goal - above) / all * sum_;
        int at = 0;
        while (at < SAMPLE - 1 && (reached += COUNT ? 1.0 : sample[at]) < wanted) at++;
        *high = at < MARGIN ? INFINITY : sample[at - MARGIN];
        *low = at + MARGIN < SAMPLE ? sample[at + MARGIN] : 0;
        if (*low == sample[0]) *high = *low;
        if (*low >= *high) *low = beside(*high, -1);  // many equal ones: these alone, so that each pass parts something off
    }
    // Number or sum of candidates above `high`; those in (low, high] go to spare[0], `count` of them.
    double sift(float low, float high, int64_t* count) const {
        vd sums_[2] = {};
        int64_t found = 0;
        *count = 0;
        for (int64_t i = 0; i < n; i += W) {
            vf v = load(from + i);
            Lanes higher = over(v, splat(high));
            if (COUNT) found += number(higher);
            else add(sums_, only(v, higher));
            *count = pack(v, amid(v, splat(low), splat(high)), spare[0], *count);
        }
        fill_up(spare[0], *count);
        return COUNT ? (double)found : total(sums_);
    }
    Cut find() {
        while (n > SAMPLE) {
            float low, high;
            guess(&low, &high);
            if (high == 0) low = 0, high = INFINITY;  // zeros, which are none of the candidates
            int64_t count;
            double higher = sift(low, high, &count);
            if (count == n) higher = sift(low = beside(high, -1), high, &count);
            double within = measure(spare[0], count);
            if (goal <= above + higher) {
                floor_ = high;
                go_on(between(from, n, high, INFINITY, spare[0]), higher);
            } else if (goal <= above + higher + within) {
                above += higher;
                floor_ = low;
                go_on(count, within);
                if (low == beside(high, -1)) return of_equals();
            } else {
                above += higher + within;
                go_on(between(from, n, 0, low, spare[0]), all - higher - within);
            }
        }
        return of_few();
    }
};

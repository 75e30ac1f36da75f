// What top-p keeps of a row, in one pass over its logits: weights are not written, but for those near the border.
//
// A sample says between which two weights the border lies. The pass adds up all weights, and in each run those above the
// two; those between them it packs. Of these follow the border, and what else of each run is kept. The sums have another
// order than the rule's: they are taken only where they are the same in any order, because nothing of them was rounded.
#pragma once
#include "cut.h"

enum { LOOKED_AT = 256 };  // logits of a sample
static const float SURE = 2.5f;  // times the deviation that its sums have: a wrong guess costs another pass

// Lanes of v added to sums, of which `low` and `high` are the halves as doubles.
INLINE void add_lanes(vd* sums_, vf v, vd low, vd high, Lanes lanes) {
#if defined(MP_AVX512)
    sums_[0] = (vd)_mm512_mask_add_pd((__m512d)sums_[0], (__mmask8)lanes, (__m512d)sums_[0], (__m512d)low);
    sums_[1] = (vd)_mm512_mask_add_pd((__m512d)sums_[1], (__mmask8)(lanes >> 8), (__m512d)sums_[1], (__m512d)high);
#else
    add(sums_, only(v, lanes));
#endif
}
INLINE float upper_half(uint32_t bits) {  // the float with these upper bits; they have the order of the floats
    bits <<= 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

struct Nucleus {
    const float* logits; int64_t vocab;
    float greatest, scale;
    const int32_t* live; int64_t alive;  // runs that have a weight which is not 0
    const float* best;                   // logit of every run
    float* crests;                       // the weight of that, of each live run; then zeros, to a whole vector
    double* sums;                        // of what is kept of each
    float* near;                         // weights in (low, high], of one run after the other
    int32_t* first;                      // of each run where its own begin there, and behind the last where they end
    float* spare[2];
    float low = 0, high = INFINITY;
    double all = 0;                      // of all weights

    vf weigh(const float* from) const { return weight(load(from), splat(greatest), splat(scale)); }

    // ---- where the border probably lies: by the highest weight of each run, and a sample of the others ----
    struct Sample {
        const Nucleus& of;
        float some[LOOKED_AT];
        float times;  // what one of it stands for
        explicit Sample(const Nucleus& n) : of(n), times((float)(n.alive * (RUN - 1)) / LOOKED_AT) {
            for (int i = 0; i < LOOKED_AT; i++) {
                int64_t at = (2 * i + 1) * n.alive * RUN / (2 * LOOKED_AT), token = n.live[at / RUN] * RUN + at % RUN;
                some[i] = token < n.vocab ? n.logits[token] : -INFINITY;
            }
            for (int i = 0; i < LOOKED_AT; i += W) store(some + i, n.weigh(some + i));
        }
        float sum_over(float least) const {
            vf tops = {}, others = {}, from = splat(least);
            for (int64_t i = 0; i < of.alive; i += W) tops += only(load(of.crests + i), over(load(of.crests + i), from));
            for (int i = 0; i < LOOKED_AT; i += W) others += only(load(some + i), over(load(some + i), from));
            return sum(tops) + times * sum(others);
        }
        // The upper half of the highest weight above which at least a sum lies.
        uint32_t place(float goal) const {
            uint32_t from = 0, to = 0x3f81;  // behind that of 1
            while (to - from > 1) {
                uint32_t middle = (from + to) / 2;
                (sum_over(upper_half(middle)) >= goal ? from : to) = middle;
            }
            return from;
        }
        // By how much the sum above a weight probably differs from its share of all.
        float deviation(float least, float share) const {
            vf sum_ = {}, squares = {};
            for (int i = 0; i < LOOKED_AT; i += W) {
                vf v = load(some + i), off = only(v, over(v, splat(least))) - v * share;
                sum_ += off, squares += off * off;
            }
            float mean = sum(sum_) / LOOKED_AT, variance = sum(squares) / LOOKED_AT - mean * mean;
            return times * __builtin_sqrtf(variance > 0 ? variance * LOOKED_AT : 0);
        }
    };
    void guess(float share) {
        Sample sample(*this);
        float goal = share * sample.sum_over(0);
        float margin = SURE * sample.deviation(upper_half(sample.place(goal)), share);
        low = upper_half(sample.place(goal + margin));
        if (goal > margin) high = upper_half(sample.place(goal - margin) + 1);
    }

    // ---- the pass ----
    // `whole`: where all weights are added up, or null.
    int64_t sift_run(int64_t index, vd* whole, int64_t count) {
        float room[RUN];
        const float* from = run_of(logits, vocab, live[index], room);
        vd above[2] = {};
        for (int i = 0; i < RUN; i += W) {
            vf v = weigh(from + i);
            vd lower, upper;
            as_doubles(v, &lower, &upper);
            if (whole) whole[0] += lower, whole[1] += upper;
            add_lanes(above, v, lower, upper, over(v, splat(high)));
            count = pack(v, amid(v, splat(low), splat(high)), near, count);
        }
        sums[index] = total(above);
        return count;
    }
    void weigh_run(int64_t index, vd* whole) const {
        float room[RUN];
        const float* from = run_of(logits, vocab, live[index], room);
        for (int i = 0; i < RUN; i += W) add(whole, weigh(from + i));
    }
    // Sums above `high`, and what lies near the border; `whole` as above.
    void sift(vd* whole) {
        int64_t count = 0;
        for (int64_t i = 0; i < alive; i++) {
            first[i] = (int32_t)count;
            if (crests[i] >= low * 0.9999f) {  // exponentials do not rise to the last bit
                count = whole ? sift_run(i, whole, count) : sift_run(i, nullptr, count);
            } else {
                sums[i] = 0;
                if (whole) weigh_run(i, whole);
            }
        }
        first[alive] = (int32_t)fill_up(near, count);
    }
    double above() const {
        double r = 0;
        for (int64_t i = 0; i < alive; i++) r += sums[i];
        return r;
    }
    double within() const {
        vd r[2] = {};
        for (int64_t i = 0; i < first[alive]; i += W) add(r, load(near + i));
        return total(r);
    }
    void find_crests() {
        for (int64_t i = 0; i < alive; i++) crests[i] = best[live[i]];
        for (int64_t i = 0; i < alive; i += W) store(crests + i, weigh(crests + i));
        for (int64_t i = alive; i % W; i++) crests[i] = 0;
    }
    // The border is between `low` and `high` when this returns.
    void part(double share) {
        find_crests();
        if (alive * RUN > 16 * LOOKED_AT) guess((float)share);
        vd whole[2] = {};
        sift(whole);
        all = total(whole);
        double goal = share * all, higher = above();
        if (goal <= higher) low = high, high = INFINITY, sift(nullptr);
        else if (low > 0 && goal > higher + within()) high = low, low = 0, sift(nullptr);
    }
    // Of what is near, weights that the cut leaves out become 0, and the others are added to their runs' sums.
    void keep(Cut cut) {
        int64_t count = first[alive];
        for (int64_t i = 0; i < count; i += W) store(near + i, only(load(near + i), ~over(splat(cut.at), load(near + i))));
        for (int64_t i = (count - 1) / W * W; cut.dropped > 0 && i >= 0; i -= W) {
            if (!number(same(load(near + i), splat(cut.at)))) continue;
            for (int64_t j = i + W; cut.dropped > 0 && j-- > i;)
                if (near[j] == cut.at) near[j] = 0, cut.dropped--;
        }
        for (int64_t i = 0; i < alive; i++)
            for (int64_t j = first[i]; j < first[i + 1]; j++) sums[i] += near[j];
    }
    // Keeps a share; false where sums may depend on their order, and are not the rule's. All weights that are kept are
    // multiples of the last digit of the least one: a double has 53 digits, and so have the sums of some of them.
    bool find(double share) {
        part(share);
        Cut cut = Cutting<false>{share * all, above(), within(), near, first[alive], {spare[0], spare[1]}, low}.find();
        keep(cut);
        return above() <= (double)(beside(cut.at, 1) - cut.at) * 0x1p53;
    }
    // The weights of a run that are kept, and 0 for the others.
    void kept(int64_t index, float* to) const {
        const float *from = run_of(logits, vocab, live[index], to), *next = near + first[index];
        for (int i = 0; i < RUN; i += W) store(to + i, weigh(from + i));
        for (int i = 0; i < RUN; i++)
            if (!(to[i] > high)) to[i] = to[i] > low ? *next++ : 0;
    }
};

// What top-p keeps of a row, in one pass over its logits: weights are not written, but for those near the border.
//
// A sample says between which two weights the border lies. The pass adds up all weights, and in each run those above the
// two; those between them it packs. Of these follow the border, and what else of each run is kept. The sums have another
// order than the rule's: they are taken only where they are the same in any order, because nothing of them was rounded.
#pragma once
#include "cut.h"

enum { WHOLE_RUNS = 8 };  // all of whose weights are looked at before
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
enum : uint32_t { BEHIND_ONE = 0x3f81 };  // the upper half of no weight
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
    float* crests;                       // the weight of that, of each live run; then zeros, as many as are weighed together
    double* sums;                        // of what is kept of each
    float* near;                         // weights in (low, high], of one run after the other
    int32_t* first;                      // of each run where its own begin there, and behind the last where they end
    float* spare[2];
    float low = 0, high = INFINITY;
    double all = 0, above = 0;           // sums of all weights, and of those above `high`

    // Of so many logits, a multiple of TOGETHER vectors; in place if need be.
    void weigh_some(const float* from, int64_t count, float* to) const {
        for (int64_t i = 0; i < count; i += TOGETHER * W) {
            vf some[TOGETHER];
            weigh<TOGETHER>(from + i, splat(greatest), splat(scale), some);
            for (int k = 0; k < TOGETHER; k++) store(to + i + k * W, some[k]);
        }
    }

    // ---- where the border probably lies: by all weights of the runs with the highest, and of the others by the highest
    // and one more ----
    struct Sample {
        float *known, *others;
        int64_t known_count = 0, others_count = 0;
        explicit Sample(const Nucleus& n) : known(n.spare[0]), others(n.spare[1]) {
            float least = upper_half(n.crest_of_first(WHOLE_RUNS));
            for (int64_t i = 0; i < n.alive; i++) {
                if (n.crests[i] > least) {
                    float room[RUN];
                    n.weigh_some(run_of(n.logits, n.vocab, n.live[i], room), RUN, known + known_count);
                    known_count += RUN;
                } else {
                    others[others_count++] = n.another(n.live[i], (int)(i * 37 % RUN));
                }
            }
            for (int64_t i = 0; i < n.alive; i++) if (!(n.crests[i] > least)) known[known_count++] = n.crests[i];
            for (int64_t i = known_count; i % (TOGETHER * W); i++) known[i] = 0;
            for (int64_t i = others_count; i % (TOGETHER * W); i++) others[i] = -INFINITY;
            n.weigh_some(others, others_count, others);
        }
        float sum_over(float least) const {
            return sum_of(known, known_count, splat(least)) + (RUN - 1) * sum_of(others, others_count, splat(least));
        }
        static float sum_of(const float* weights, int64_t count, vf least) {
            vf some[TOGETHER] = {};
            for (int64_t i = 0; i < count; i += TOGETHER * W)
                for (int k = 0; k < TOGETHER; k++) {
                    vf v = load(weights + i + k * W);
                    some[k] += only(v, over(v, least));
                }
            return sum((some[0] + some[1]) + (some[2] + some[3]));
        }
        // The upper half of the highest weight above which at least a sum lies: in [from, to) if it can be there.
        uint32_t place(float goal, uint32_t from, uint32_t to) const {
            while (to - from > 1) {
                uint32_t middle = (from + to) / 2;
                (sum_over(upper_half(middle)) >= goal ? from : to) = middle;
            }
            return from;
        }
        // The same from one place on that is higher, or lower.
        uint32_t below(float goal, uint32_t from) const {
            uint32_t step = 1;
            while (step < from && sum_over(upper_half(from - step)) < goal) step *= 2;
            return place(goal, step < from ? from - step : 0, from);
        }
        uint32_t beyond(float goal, uint32_t from) const {
            uint32_t step = 1;
            while (from + step < BEHIND_ONE && sum_over(upper_half(from + step)) >= goal) step *= 2;
            return place(goal, from, from + step < BEHIND_ONE ? from + step : BEHIND_ONE);
        }
        // By how much the sum above a weight probably differs from its share of all.
        float deviation(float least, float share) const {
            vf squares = {};
            for (int64_t i = 0; i < others_count; i += W) {
                vf v = load(others + i), off = only(v, over(v, splat(least))) - v * share;
                squares += off * off;
            }
            return (RUN - 1) * __builtin_sqrtf(sum(squares));
        }
    };
    // A logit of a run, not its highest.
    float another(int32_t index, int at) const {
        int64_t token = index * RUN + at;
        if (token < vocab && logits[token] == best[index]) token ^= 1;
        return token < vocab ? logits[token] : -INFINITY;
    }
    // The upper half of a weight that at most so many crests are above.
    uint32_t crest_of_first(int64_t most) const {
        uint32_t from = 0, to = BEHIND_ONE;
        while (to - from > 1) {
            uint32_t middle = (from + to) / 2;
            int64_t count = 0;
            for (int64_t i = 0; i < alive; i += W) count += number(over(load(crests + i), splat(upper_half(middle))));
            (count > most ? from : to) = middle;
        }
        return to;
    }
    void guess(float share) {
        Sample sample(*this);
        float goal = share * sample.sum_over(0);
        uint32_t middle = sample.place(goal, 0, BEHIND_ONE);
        float margin = SURE * sample.deviation(upper_half(middle), share);
        low = upper_half(sample.below(goal + margin, middle + 1));
        if (goal > margin) high = upper_half(sample.beyond(goal - margin, middle) + 1);
    }

    // ---- the pass ----
    // Sums of each run above `high`, and what lies near the border. WHOLE: the sum of all weights, too.
    template <bool WHOLE> void sift() {
        // Copies, as what is written to `near` might be any of them to a compiler.
        const vf most = splat(greatest), times = splat(scale), from = splat(low), to = splat(high);
        const float least = low * 0.9999f;  // exponentials do not rise to the last bit
        float* const packed = near;
        int64_t count = 0;
        vd whole[2] = {};
        double beneath = 0;
        above = 0;
        for (int64_t i = 0; i < alive; i++) {
            float room[RUN];
            const float* its = run_of(logits, vocab, live[i], room);
            first[i] = (int32_t)count, sums[i] = 0;
            if (crests[i] < least) {
                if (WHOLE) beneath += sum_of_run([&](int j, vf* some) { weigh<TOGETHER>(its + j * W, most, times, some); });
                continue;
            }
            vd upper_sums[2] = {};
            for (int j = 0; j < RUN; j += TOGETHER * W) {
                vf some[TOGETHER];
                weigh<TOGETHER>(its + j, most, times, some);
#pragma GCC unroll 4
                for (vf v : some) {
                    vd lower, upper;
                    as_doubles(v, &lower, &upper);
                    if (WHOLE) whole[0] += lower, whole[1] += upper;
                    add_lanes(upper_sums, v, lower, upper, over(v, to));
                    count = pack(v, amid(v, from, to), packed, count);
                }
            }
            above += sums[i] = total(upper_sums);
        }
        first[alive] = (int32_t)fill_up(packed, count);
        if (WHOLE) all = total(whole) + beneath;
    }
    double within() const {
        vd r[2] = {};
        for (int64_t i = 0; i < first[alive]; i += W) add(r, load(near + i));
        return total(r);
    }
    void find_crests() {
        for (int64_t i = 0; i < alive; i++) crests[i] = best[live[i]];
        for (int64_t i = alive; i % (TOGETHER * W); i++) crests[i] = -INFINITY;
        weigh_some(crests, alive, crests);
    }
    // The border is between `low` and `high` when this returns.
    void part(double share) {
        find_crests();
        if (alive > 2 * WHOLE_RUNS) guess((float)share);
        sift<true>();
        double goal = share * all;
        if (goal <= above) low = high, high = INFINITY, sift<false>();
        else if (low > 0 && goal > above + within()) high = low, low = 0, sift<false>();
    }
    // Of what is near, weights that the cut leaves out become 0, and the others are added to their runs' sums. Returns
    // the sum of all that is kept.
    double keep(Cut cut) {
        int64_t count = first[alive];
        for (int64_t i = 0; i < count; i += W) store(near + i, only(load(near + i), ~over(splat(cut.at), load(near + i))));
        for (int64_t i = (count - 1) / W * W; cut.dropped > 0 && i >= 0; i -= W) {
            if (!number(same(load(near + i), splat(cut.at)))) continue;
            for (int64_t j = i + W; cut.dropped > 0 && j-- > i;)
                if (near[j] == cut.at) near[j] = 0, cut.dropped--;
        }
        double kept = 0;
        for (int64_t i = 0; i < alive; i++) {
            vd some[2] = {};
            for (int64_t j = first[i]; j < first[i + 1]; j += W) {
                int64_t left = first[i + 1] - j;
                vf v = load(near + j);
                add(some, left < W ? (vf)((vi)v & first_lanes((int)left)) : v);
            }
            kept += sums[i] += total(some);
        }
        return kept;
    }
    // Keeps a share; false where sums may depend on their order, and are not the rule's. All weights that are kept are
    // multiples of the last digit of the least one: a double has 53 digits, and so have the sums of some of them.
    bool find(double share) {
        part(share);
        Cut cut = Cutting<false>{share * all, above, within(), near, first[alive], {spare[0], spare[1]}, low}.find();
        return keep(cut) <= (double)(beside(cut.at, 1) - cut.at) * 0x1p53;
    }
    // The weights of a run that are kept, and 0 for the others.
    void kept(int64_t index, float* to) const {
        const float *from = run_of(logits, vocab, live[index], to), *next = near + first[index];
        weigh_some(from, RUN, to);
        for (int i = 0; i < RUN; i++)
            if (!(to[i] > high)) to[i] = to[i] > low ? *next++ : 0;
    }
};

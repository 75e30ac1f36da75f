// Chooses tokens of rows of logits: bias, bans, penalties and masks, then the highest or a draw, and log probabilities.
// The rule is stated in moonpool/engine/sampling/random_sampler.py, whose torch code is the reference for the token chosen.
//
// A row's logits are looked at in runs; those without a token that may be chosen cost nothing but a look at the mask.
#include "nucleus.h"
#include "parallel.h"
#include "sample.h"

enum Failure { FINE = 0, NOTHING_LEFT = 1, NOT_FINITE = 2 };

// Scratch memory of one row.
struct Scratch {
    float *weights, *spare[2], *copy, *best, *best_before, *crests;
    double* sums;
    int32_t *live, *first;
    bool take(Memory& memory, int64_t vocab) {
        int64_t runs = (vocab + RUN - 1) / RUN, n = runs * RUN + 2 * W, few = (runs + 63) / 64 * 64;
        float* p = (float*)memory.get(sizeof(float) * (4 * n + 7 * few + 16));
        if (!p) return false;
        weights = p, spare[0] = p + n, spare[1] = p + 2 * n, copy = p + 3 * n, p += 4 * n;
        sums = (double*)p, best = p + 2 * few, best_before = p + 3 * few, live = (int32_t*)(p + 4 * few);
        crests = p + 5 * few, first = (int32_t*)(p + 6 * few);
        return true;
    }
};

struct RowSampler {
    const Sampling& s;
    const Row& row;
    int64_t r, runs;
    float* logits;
    Scratch& scratch;
    int64_t alive = 0;    // runs that may be drawn from, in scratch.live; their weights lie one after the other
    float* weights = nullptr;
    float least = 0;      // lower weights do not count,
    int64_t strict = 0;   // nor equal ones in the runs from this one on
    float greatest = 0;

    RowSampler(const Sampling& sampling, int64_t index, Scratch& memory)
        : s(sampling), row(sampling.row[index]), r(index), runs((sampling.vocab + RUN - 1) / RUN),
          logits(sampling.logits + index * sampling.vocab), scratch(memory) {}
    const float* run(const float* from, int64_t index, float* room) const { return run_of(from, s.vocab, index, room); }
    float best_of_run(int64_t index) const {
        float room[RUN];
        const float* from = run(logits, index, room);
        vf most = load(from);
        vi odd = most != most;
        for (int i = W; i < RUN; i += W) {
            vf v = load(from + i);
            odd |= v != v;
            most = vmax(v, most);
        }
        return best(most, odd);
    }
    static float best(vf most, vi odd) {
        int32_t any = 0;
        for (int i = 0; i < W; i++) any |= odd[i];
        return any ? NAN : max_of(most);
    }
    void find_run_maxima() {
        for (int64_t i = 0; i < runs; i++) scratch.best[i] = best_of_run(i);
    }
    // The highest of all; NaN where there is one.
    float highest() const {
        float most = -INFINITY;
        for (int64_t i = 0; i < runs; i++) {
            if (scratch.best[i] != scratch.best[i]) return NAN;
            if (scratch.best[i] > most) most = scratch.best[i];
        }
        return most;
    }
    bool known(int32_t token) const { return token >= 0 && token < s.vocab; }
    const int32_t* tokens(int64_t at) const { return (const int32_t*)(s.data + at); }

    void adjust();
    void mask();
    float mask_run(int64_t run, const uint32_t* words);
    int32_t lowest_of_highest() const;
    void find_live_runs();
    void weigh_all();
    void keep(Cut cut);
    void cut(float least_kept);
    void kept(int64_t run, float* to) const;
    float threshold(int64_t run) const;
    int64_t drop_last(int64_t run, int64_t most);
    void compact();
    double add_up();
    void draw();
    void write_logprobs(const float* untouched, double normaliser);
    double most_likely();
    int choose();
};

// In the order and with the roundings of moonpool/engine/sampling/processors.py.
void RowSampler::adjust() {
    const int32_t* biased = tokens(row.bias);
    const float* values = (const float*)(biased + row.bias_count);
    for (int i = 0; i < row.bias_count; i++) if (known(biased[i])) logits[biased[i]] += values[i];
    const int32_t* banned = tokens(row.banned);
    for (int i = 0; i < row.banned_count; i++) if (known(banned[i])) logits[banned[i]] = -INFINITY;
    // Counts lie where weights will.
    if (changes_logits(row.options)) {
        const int32_t* history = tokens(row.history);
        process_logits(row.options, logits, s.vocab, history, row.history_count, row.prompt_tokens, (int32_t*)scratch.weights);
    }
}

// Logits of tokens whose bit is set, the lowest for the first, and minus infinity for the others.
INLINE vf permitted(vf v, uint32_t bits) {
    vf none = splat(-INFINITY);
#if defined(MP_AVX512)
    return (vf)_mm512_mask_mov_ps((__m512)none, (__mmask16)bits, (__m512)v);
#else
    vu lanes;
    for (int i = 0; i < W; i++) lanes[i] = 1u << i;
    vi out = (vi)((((vu){} + bits) & lanes) == 0);
    return (vf)(((vi)v & ~out) | ((vi)none & out));
#endif
}
// Minus infinity where words of 32 tokens each say so; the highest of the others, NaN where one of them is.
float RowSampler::mask_run(int64_t index, const uint32_t* words) {
    float* to = logits + index * RUN;
    int64_t left = s.vocab - index * RUN;
    if (left < RUN) {
        for (int64_t i = 0; i < left; i++) if (!(words[i / 32] >> i % 32 & 1)) to[i] = -INFINITY;
        return best_of_run(index);
    }
    vf most = splat(-INFINITY);
    vi odd = {};
    for (int i = 0; i < RUN; i += W) {
        vf v = permitted(load(to + i), words[i / 32] >> i % 32);
        store(to + i, v);
        odd |= v != v;
        most = vmax(v, most);
    }
    return best(most, odd);
}
void RowSampler::mask() {
    int64_t size = (s.vocab + 7) / 8;
    if (row.mask_bytes < size) size = row.mask_bytes;
    for (int64_t i = 0; i < runs; i++) {
        uint32_t words[RUN / 32] = {};
        int64_t left = size - i * (RUN / 8);
        if (left >= RUN / 8) memcpy(words, row.mask + i * (RUN / 8), RUN / 8);
        else if (left > 0) memcpy(words, row.mask + i * (RUN / 8), left);
        uint32_t any = 0, all = ~0u;
        for (uint32_t word : words) any |= word, all &= word;
        scratch.best[i] = !any ? -INFINITY : all == ~0u ? best_of_run(i) : mask_run(i, words);
    }
}

int32_t RowSampler::lowest_of_highest() const {
    int64_t i = 0;
    while (scratch.best[i] != greatest) i++;
    int64_t token = i * RUN;
    while (logits[token] != greatest) token++;
    return (int32_t)token;
}

// Runs that have a weight which is not 0.
void RowSampler::find_live_runs() {
    alive = 0;
    for (int64_t i = 0; i < runs; i++)
        if ((scratch.best[i] - greatest) * row.scale >= -126.0f) scratch.live[alive++] = (int32_t)i;
}
// Their weights and sums. Weights replace the logits if these are no longer needed: a row's memory then stays in the
// second-level cache from pass to pass.
void RowSampler::weigh_all() {
    bool over = logits == scratch.copy || (row.top < 0 && s.vocab % RUN == 0);
    weights = over ? logits : scratch.weights;
    vf most = splat(greatest), scale = splat(row.scale);
    for (int64_t i = 0; i < alive; i++) {
        float room[RUN];
        const float* from = run(logits, scratch.live[i], room);
        float* to = weights + i * RUN;
        scratch.sums[i] = sum_of_run([&](int j, vf* some) {
            weigh<TOGETHER>(from + j * W, most, scale, some);
            for (int k = 0; k < TOGETHER; k++) store(to + (j + k) * W, some[k]);
        });
    }
}
// The least weight that counts in a run.
float RowSampler::threshold(int64_t index) const { return index < strict ? least : beside(least, 1); }
// Sums up the weights that are kept; the others are left where they are, and count no more.
void RowSampler::keep(Cut cut) {
    least = cut.at, strict = alive;
    for (int64_t i = alive - 1; cut.dropped > 0; i--) cut.dropped -= drop_last(i, cut.dropped);
    for (int64_t i = 0; i < alive; i++) {
        const float* w = weights + i * RUN;
        vf from = splat(threshold(i));
        scratch.sums[i] = sum_of_run([&](int j, vf* some) {
            for (int k = 0; k < TOGETHER; k++) some[k] = load(w + (j + k) * W), some[k] = only(some[k], ~over(from, some[k]));
        });
    }
}
// Of a run's weights that are `least`, the last ones, at most so many, count no more; returns how many. Logits that were
// rounded to bfloat16 have many equal ones: where these are all of the run's, nothing is written.
int64_t RowSampler::drop_last(int64_t index, int64_t most) {
    float* w = weights + index * RUN;
    vi same = {};
    for (int i = 0; i < RUN; i += W) same -= load(w + i) == splat(least);
    int64_t equal = 0, dropped = 0;
    for (int i = 0; i < W; i++) equal += same[i];
    if (equal <= most) return strict = index, equal;
    for (int i = RUN - 1; dropped < most; i--)
        if (w[i] == least) w[i] = 0, dropped++;
    return dropped;
}
// Before another cut: leaves out runs of which nothing is kept, and sets to 0 what is not kept of the others.
void RowSampler::compact() {
    int64_t count = 0;
    for (int64_t i = 0; i < alive; i++) {
        if (!(scratch.sums[i] > 0)) continue;
        vf from = splat(threshold(i));
        for (int j = 0; j < RUN; j += W) {
            vf v = load(weights + i * RUN + j);
            store(weights + count * RUN + j, (vf)((vi)v & (v >= from)));
        }
        scratch.sums[count] = scratch.sums[i], scratch.live[count++] = scratch.live[i];
    }
    alive = strict = count;
}
// Sums of runs become those up to and with each run; returns the whole.
double RowSampler::add_up() {
    double all = 0;
    for (int64_t i = 0; i < alive; i++) scratch.sums[i] = all += scratch.sums[i];
    return all;
}
void RowSampler::cut(float least_kept) {
    float** spare = scratch.spare;
    if (row.top_k > 0 && row.top_k < alive * RUN) {
        double n = (double)(alive * RUN);
        Cut cut = Cutting<true>{(double)row.top_k, 0, n, weights, alive * RUN, {spare[0], spare[1]}}.find();
        if (cut.at > 0) keep(cut), compact();
    }
    Cut cut{0, 0};
    if (row.top_p < 1) {
        double all = 0;
        for (int64_t i = 0; i < alive; i++) all += scratch.sums[i];
        cut = Cutting<false>{row.top_p * all, 0, all, weights, alive * RUN, {spare[0], spare[1]}}.find();
    }
    if (least_kept > cut.at) cut = {least_kept, 0};
    if (cut.at > 0) keep(cut);
}
// The weights of a run that count, and 0 for the others.
void RowSampler::kept(int64_t index, float* to) const {
    vf from = splat(least > 0 ? threshold(index) : 0);
    for (int j = 0; j < RUN; j += W) {
        vf v = load(weights + index * RUN + j);
        store(to + j, only(v, ~over(from, v)));
    }
}
void RowSampler::draw() {
    find_live_runs();
    Nucleus nucleus{logits,      s.vocab,   greatest,     row.scale,  scratch.live, alive, scratch.best,
                    scratch.crests, scratch.sums, scratch.weights, scratch.first, {scratch.spare[0], scratch.spare[1]}};
    float least_kept = least_weight({row.options, logits, s.vocab, greatest, row.scale});  // before weights replace logits
    bool by_nucleus = row.top_p < 1 && !row.top_k && !least_kept && nucleus.find(row.top_p);
    if (!by_nucleus) weigh_all(), cut(least_kept);
    double whole = add_up(), most = nextafter(whole, 0.0);
    for (int d = row.draw; d < row.draw + row.draws; d++) {
        double goal = s.numbers[d] * whole;
        if (goal > most) goal = most;
        int64_t found = std::upper_bound(scratch.sums, scratch.sums + alive, goal) - scratch.sums;
        double before_ = found ? scratch.sums[found - 1] : 0, sum_ = 0;
        float w[RUN];
        if (by_nucleus) nucleus.kept(found, w);
        else kept(found, w);
        int at = 0, last = 0;
        for (; at < RUN; at++) {
            if (w[at] == 0) continue;
            last = at;
            if ((sum_ += w[at]) + before_ > goal) break;
        }
        s.tokens[d] = scratch.live[found] * RUN + (at < RUN ? at : last);  // rounding may lead past the last
    }
}

// Writes the most likely tokens' logits; returns the logarithm of the sum of all exponentials.
double RowSampler::most_likely() {
    float greatest_ = highest(), least = -INFINITY;
    float* values = s.top_logprobs + r * s.most;
    int32_t* ids = s.top_tokens + r * s.most;
    int count = 0;
    double all = 0;
    vf most = splat(greatest_), scale = splat(LOG2E);
    for (int64_t i = 0; i < runs; i++) {
        float room[RUN];
        const float* from = run(logits, i, room);
        all += sum_of_run([&](int j, vf* some) { weigh<TOGETHER>(from + j * W, most, scale, some); });
        if (!row.top || (count == row.top && !(scratch.best[i] > least))) continue;
        for (int64_t j = 0; j < RUN && i * RUN + j < s.vocab; j++) {
            if (count == row.top && !(from[j] > least)) continue;
            int at = count < row.top ? count++ : count - 1;
            for (; at > 0 && values[at - 1] < from[j]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
            values[at] = from[j], ids[at] = (int32_t)(i * RUN + j);
            least = values[count - 1];
        }
    }
    return greatest_ + log(all);
}
void RowSampler::write_logprobs(const float* untouched, double normaliser) {
    for (int d = row.draw; d < row.draw + row.draws; d++) {
        float value = untouched[s.tokens[d]];
        int64_t higher = 0;
        vi number = {};
        for (int64_t at = 0; at < runs; at++) {
            if (!(scratch.best_before[at] > value)) continue;
            float room[RUN];
            const float* from = run(untouched, at, room);
            for (int j = 0; j < RUN; j += W) number -= load(from + j) > splat(value);
        }
        for (int i = 0; i < W; i++) higher += number[i];
        s.logprobs[d] = (float)(value - normaliser), s.ranks[d] = (uint32_t)(higher + 1);
    }
    for (int i = 0; i < row.top; i++) s.top_logprobs[r * s.most + i] -= (float)normaliser;
}

int RowSampler::choose() {
    const float* untouched = logits;
    double normaliser = 0;
    bool changed = row.adjusted(), scored = row.top >= 0;
    if (scored || !(changed || row.mask)) find_run_maxima();
    if (scored) {
        normaliser = most_likely();
        memcpy(scratch.best_before, scratch.best, runs * sizeof(float));
        if (changed || row.mask) logits = (float*)memcpy(scratch.copy, logits, s.vocab * sizeof(float));
    }
    if (changed) adjust();
    if (row.mask) mask();
    else if (changed) find_run_maxima();
    greatest = highest();
    if (greatest == -INFINITY) return NOTHING_LEFT;
    if (!isfinite(greatest)) return NOT_FINITE;
    if (row.scale < 0) {
        int32_t token = lowest_of_highest();
        for (int d = row.draw; d < row.draw + row.draws; d++) s.tokens[d] = token;
    } else {
        draw();
    }
    if (scored) write_logprobs(untouched, normaliser);
    return FINE;
}

#define X(name) #name " "
extern "C" const char* mp_sampling_options() { return SAMPLING_OPTIONS(X); }
#undef X

// How many rows failed; -1: no memory to work in.
extern "C" int mp_sample(const Sampling* s, int threads) {
    std::atomic<int> odd{0}, failed{0};
    parallel(s->rows, worth(s->rows * s->vocab, threads), [&](int64_t r) {
        static thread_local Memory memory;
        Scratch scratch;
        if (!scratch.take(memory, s->vocab)) { odd = 1; return; }
        if ((s->failed[r] = RowSampler(*s, r, scratch).choose())) failed++;
    });
    return odd ? -1 : (int)failed;
}

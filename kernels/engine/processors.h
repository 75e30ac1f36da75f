// What sampling options do to a row of logits. To add one, see docs/extend/sampling_option.md.
//
// The torch implementation is the reference: moonpool/engine/sampling/processors.py (logits), moonpool/engine/sampling/filters.py
// (weights). Both give the same bits.
#pragma once
#include "token_weights.h"

// Options that are one number, by their names in SamplingParams. Python packs each row's values in this order.
#define SAMPLING_OPTIONS(X) X(repetition_penalty) X(frequency_penalty) X(presence_penalty) X(min_p)

struct Options {
#define X(name) float name;
    SAMPLING_OPTIONS(X)
#undef X
};

// Whether an option changes logits: `process_logits` is called, and the int8 head alone does not choose the token.
INLINE bool changes_logits(const Options& options) {
    return options.repetition_penalty != 1.0f || options.frequency_penalty != 0 || options.presence_penalty != 0;
}

// Changes a row's logits. Penalises tokens of `history`, of which the first `prompt` are the prompt's: repetition over
// all of them, frequency and presence over the output. `times` [vocab] is memory to count in, with any contents.
INLINE void process_logits(const Options& options, float* logits, int64_t vocab, const int32_t* history, int count,
                           int prompt, int32_t* times) {
    auto known = [&](int32_t token) { return token >= 0 && token < vocab; };
    auto each_once = [&](int from, auto&& f) {
        for (int i = from; i < count; i++) if (known(history[i])) times[history[i]] = 0;
        for (int i = from; i < count; i++) if (known(history[i])) times[history[i]]++;
        for (int i = from; i < count; i++)
            if (known(history[i]) && times[history[i]]) f(logits[history[i]], times[history[i]]), times[history[i]] = 0;
    };
    float repetition = options.repetition_penalty;
    if (repetition != 1.0f) each_once(0, [&](float& it, int) { it = it > 0 ? it / repetition : it * repetition; });
    if (options.frequency_penalty != 0 || options.presence_penalty != 0)
        each_once(prompt, [&](float& it, int seen) {
            it -= unfused(splat((float)seen * options.frequency_penalty))[0];
            it -= options.presence_penalty;
        });
}

// A row after its penalties and masks, as filters see it.
struct FilterInput {
    const Options& options;
    const float* logits;  // [vocab]; minus infinity: the token must not be chosen
    int64_t vocab;
    float greatest;       // the highest logit, finite
    float scale;          // a token's weight is 2 ^ (scale * (logit - greatest))
};

// The least weight that a token needs by all filters; 0: every token is kept. Top-k and top-p are no part of it. While
// it is above 0, the shortcut for top-p alone (nucleus.h) is not taken: no filter can be skipped.
INLINE float least_weight(const FilterInput& row) {
    float least = 0;
    if (row.options.min_p > least) least = row.options.min_p;
    return least;
}

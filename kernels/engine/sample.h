// What the sampler is given; see sample.cpp. Mirrored in moonpool/engine/kernels/native/structures.py.
#pragma once
#include "processors.h"

struct Row {
    double top_p;                           // 1: all
    const char* mask;                       // a bit for each token that may be chosen; null: all may
    int64_t history, banned, bias;          // where they lie in `data`
    int32_t history_count, prompt_tokens;   // tokens; those of them that are the prompt's
    int32_t banned_count, bias_count;       // tokens; biases are as many floats behind their tokens
    int32_t draw, draws;                    // of `numbers` and `tokens`
    int32_t top_k;                          // 0: all
    int32_t top;                            // likely tokens that are told; -1: no log probabilities
    float scale;                            // of logits, for powers of two; negative: the highest is chosen
    Options options;
    int32_t mask_bytes;                     // tokens behind them may not be chosen

    // Whether logits change before a token is chosen, but for the mask.
    bool adjusted() const { return bias_count || banned_count || changes_logits(options); }
};
struct Sampling {
    float* logits; int64_t rows, vocab;     // overwritten
    const Row* row;
    const char* data;
    const double* numbers;                  // in [0, 1), for each draw
    int32_t* tokens;                        // of each draw
    int32_t* failed;                        // of each row, see Failure
    float* logprobs; uint32_t* ranks;       // of each draw, where they are wanted
    int32_t* top_tokens; float* top_logprobs; int64_t most;  // [rows, most]
};

// The names of SAMPLING_OPTIONS, each followed by a space.
extern "C" const char* mp_sampling_options();
extern "C" int mp_sample(const Sampling* s, int threads);
extern "C" int mp_uniform(const uint64_t* seeds, const uint64_t* positions, uint64_t later, int64_t count, double* numbers);

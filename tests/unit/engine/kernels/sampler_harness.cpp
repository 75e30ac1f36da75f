// Chooses tokens of many made-up rows, and prints a hash of them, their ranks and the likely ones: the same by all
// instructions and on all processors.
#include "draws.cpp"
#include "sample.cpp"

#include <stdio.h>
#include <vector>

void run_team(void (*work)(void*), void* job, int) { work(job); }

static uint64_t state = 12345;
static double uniform() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}

enum { ROWS = 4, DRAWS = 8, TOP = 5, BEFORE = 48, BANNED = 8, BIASED = 8 };
static const int64_t vocabularies[] = {128, 1000, 4096, 20011, 151936};
static const double sizes[] = {0.3, 1, 4, 9};

struct Case {
    std::vector<float> logits;
    std::vector<char> mask;
    std::vector<int32_t> data;  // tokens before, banned ones, biased ones, and their biases
    Row rows[ROWS] = {};
    uint64_t seeds[ROWS * DRAWS], positions[ROWS * DRAWS];

    Case(int number, int64_t vocab) : logits(ROWS * vocab), mask(vocab / 8 + 1), data(BEFORE + BANNED + 2 * BIASED) {
        for (float& it : logits) {
            double sum = -3;
            for (int i = 0; i < 6; i++) sum += uniform();
            it = (float)(sum * sizes[number % 4]);
            if (number % 3 == 0) it = (float)(int)(it * 4) / 4;  // many equal ones
        }
        for (char& it : mask) it = (char)(uniform() * 256);
        for (int32_t& it : data) it = (int32_t)(uniform() * (double)(number % 2 ? vocab : 20));  // 20: many come again
        float biases[BIASED];
        for (float& it : biases) it = (float)(uniform() * 8 - 4);
        memcpy(&data[BEFORE + BANNED + BIASED], biases, sizeof biases);
        for (int r = 0; r < ROWS; r++) fill(rows[r], r, number);
        for (int i = 0; i < ROWS * DRAWS; i++) seeds[i] = (uint64_t)(uniform() * 1e18), positions[i] = number * 100 + i;
    }
    void fill(Row& row, int r, int number) {
        row.top_p = r == 1 ? 0.95 : r == 2 ? 0.5 : 1, row.top_k = r == 3 ? 40 : 0;
        row.options.min_p = number % 2 && r == 0 ? 0.02f : 0;
        int changed = (number + r) % 6;  // 0: nothing; 5: all of it
        row.options.repetition_penalty = changed == 1 || changed == 5 ? 1.3f : 1;
        row.options.frequency_penalty = changed == 2 || changed == 5 ? 0.4f : 0;
        row.options.presence_penalty = changed == 3 || changed == 5 ? -0.7f : 0;
        row.history_count = changed ? BEFORE : 0, row.prompt_tokens = BEFORE / 3;
        row.banned = 4 * BEFORE, row.banned_count = changed > 3 ? BANNED : 0;
        row.bias = 4 * (BEFORE + BANNED), row.bias_count = changed > 3 ? BIASED : 0;
        row.scale = number % 7 == 6 && r == 0 ? -1 : LOG2E / (float)(0.5 + uniform());
        row.top = r == 0 ? TOP : -1, row.draw = r * DRAWS, row.draws = DRAWS;
        if (number % 4 == 3) row.mask = mask.data(), row.mask_bytes = (int)mask.size();
    }
};

int main() {
    uint64_t hash = 14695981039346656037u;
    auto note = [&](uint32_t x) { hash = (hash ^ x) * 1099511628211u; };
    for (int number = 0; number < 40; number++) {
        int64_t vocab = vocabularies[number % 5];
        Case its(number, vocab);
        double numbers[ROWS * DRAWS];
        int32_t tokens[ROWS * DRAWS], failed[ROWS], likely[ROWS * TOP];
        uint32_t ranks[ROWS * DRAWS];
        float logprobs[ROWS * DRAWS], top[ROWS * TOP];
        mp_uniform(its.seeds, its.positions, 0, ROWS * DRAWS, numbers);
        Sampling s{its.logits.data(), ROWS, vocab, its.rows, (const char*)its.data.data(), numbers, tokens, failed, logprobs, ranks, likely, top, TOP};
        if (mp_sample(&s, 1)) return 1;
        for (int32_t it : failed) if (it) return 2;
        for (int32_t it : tokens) note(it);
        for (int i = 0; i < DRAWS; i++) note(ranks[i]);
        for (int i = 0; i < TOP; i++) note(likely[i]);
    }
    printf("%016llx\n", (unsigned long long)hash);
}

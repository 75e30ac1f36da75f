// Rows by the adapters' first matrices: neighbours with the same adapter together.
#include "lora.h"

enum { LORA_ROWS = 32 };  // that are one piece of work
struct Piece { int64_t begin, rows; const LowRank* its; };

template <class T>
int prepare_loras(const Loras& l, int64_t layer, LoraPlace place, const int64_t* wanted, const T* x, int64_t stride, int64_t rows,
                  Memory& memory, LowRankRows& to, int threads) {
    typedef Read<T> C;
    auto its = [&](int64_t row) -> const LowRank* {
        int32_t adapter = l.of[wanted ? wanted[row] : row];
        const LowRank* found = adapter < 0 ? nullptr : l.adapters[adapter] + layer * LORA_PLACES + place;
        return found && found->down.outputs ? found : nullptr;
    };
    int64_t ranks = 0, elements = 0;
    for (int64_t row = 0; row < rows; row++)
        if (const LowRank* found = its(row)) {
            if (found->down.outputs > ranks) ranks = found->down.outputs;
            elements += found->down.outputs * found->down.inputs;
        }
    to = {nullptr, ranks, nullptr};
    if (!ranks) return 0;
    char* room = (char*)memory.get(rows * (ranks * sizeof(C) + sizeof(Panels*) + sizeof(Piece)));
    if (!room) return 1;
    Piece* pieces = (Piece*)room;
    const Panels** ups = (const Panels**)(pieces + rows);
    C* narrow_rows = (C*)(ups + rows);
    int64_t count = 0;
    for (int64_t row = 0; row < rows; row++) {
        const LowRank* found = its(row);
        ups[row] = found ? &found->up : nullptr;
        if (!found) continue;
        Piece* last = count ? &pieces[count - 1] : nullptr;
        if (last && last->its == found && last->begin + last->rows == row && last->rows < LORA_ROWS) last->rows++;
        else pieces[count++] = {row, 1, found};
    }
    std::atomic<int> failed{0};
    parallel(count, worth(elements, threads), [&](int64_t i) {
        const Piece& p = pieces[i];
        const Panels& down = p.its->down;
        Result r{narrow_rows + p.begin * ranks, ranks, __is_same(C, T) ? PLAIN : WIDE, 0, down.outputs};
        if (product<T>(down, x + p.begin * stride, stride, p.rows, r, 1)) failed = 1;
    });
    to.x = narrow_rows, to.ups = ups;
    return failed;
}
template int prepare_loras<float>(const Loras&, int64_t, LoraPlace, const int64_t*, const float*, int64_t, int64_t, Memory&, LowRankRows&, int);
template int prepare_loras<bf16>(const Loras&, int64_t, LoraPlace, const int64_t*, const bf16*, int64_t, int64_t, Memory&, LowRankRows&, int);
template int prepare_loras<f16>(const Loras&, int64_t, LoraPlace, const int64_t*, const f16*, int64_t, int64_t, Memory&, LowRankRows&, int);

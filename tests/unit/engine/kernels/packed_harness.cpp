// Products with packed weights on made-up numbers, for every kind of codes: prints what came out, bit by bit.
// Usage: packed_harness LIBRARY. On processors with fused multiplication all libraries print the same.
#include <dlfcn.h>
#include <stdio.h>

#include <vector>

#include "packed.h"

static uint64_t state = 7;
static uint32_t number() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33);
}
static float real() { return (float)(number() % 20001) / 10000 - 1; }
struct Kind { int bits, group, zero, offsets, values; };

int main(int, char** argv) {
    void* library = dlopen(argv[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
    auto bytes = (int64_t(*)(const Panels*))dlsym(library, "mp_panels_bytes");
    auto arrange = (void (*)(const Panels*, const PackedMatrix*, int))dlsym(library, "mp_arrange_packed");
    auto product = (int (*)(const Panels*, const void*, int64_t, int64_t, void*, int, int))dlsym(library, "mp_product");
    const Kind kinds[] = {{4, 32, 8, 0, WHOLE}, {4, 16, 0, 1, WHOLE}, {4, 128, 0, 1, WHOLE}, {5, 32, 16, 0, WHOLE}, {6, 16, 32, 0, WHOLE},
                          {6, 32, 0, 1, WHOLE}, {8, 32, 128, 0, WHOLE}, {8, 16, 128, 1, WHOLE}, {8, 64, 7, 0, WHOLE}, {4, 32, 128, 0, BYTE_TABLE},
                          {4, 64, 0, 0, FLOAT_TABLE}, {8, 128, 0, 0, FLOAT_E4M3}, {8, 16, 0, 0, FLOAT_E5M2}};
    const int64_t outputs = 70, inputs = 384, most = 40;
    for (const Kind& kind : kinds) {
        int64_t groups = inputs / kind.group, stored = kind.bits == 4 ? inputs / 2 : inputs;
        std::vector<uint8_t> codes(outputs * stored);
        std::vector<float> scales(outputs * groups), offsets(outputs * groups), x(most * inputs), out(most * outputs);
        for (uint8_t& code : codes) code = (uint8_t)(number() & (kind.bits == 4 ? 255 : (1 << kind.bits) - 1));
        if (kind.values >= FLOAT_E4M3) for (uint8_t& code : codes) if ((code & 127) >= 124) code = 1;
        for (float& scale : scales) scale = real() / 64;
        for (float& offset : offsets) offset = real();
        for (float& its : x) its = real() * 3;
        Panels p{};
        p.outputs = outputs, p.inputs = inputs, p.bits = kind.bits, p.zero = kind.zero, p.group = p.block = kind.group;
        p.scale_bytes = 4, p.offset_bytes = kind.offsets ? 4 : 0, p.values = kind.values;
        for (int i = 0; i < 16; i++) p.table[i] = (uint8_t)number(), p.floats[i] = real();
        std::vector<char> memory(bytes(&p) + 64);
        p.weight = (const char*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
        PackedMatrix from{codes.data(), (const char*)scales.data(), (const char*)offsets.data(), nullptr, nullptr};
        arrange(&p, &from, 1);
        for (int64_t rows : {1, 2, 5, 8, 14, 16, 19, 40}) {
            if (product(&p, x.data(), inputs, rows, out.data(), PLAIN, 1)) return 3;
            uint64_t found = 14695981039346656037ull;
            for (int64_t i = 0; i < rows * outputs; i++) {
                uint32_t its;
                memcpy(&its, &out[i], 4);
                found = (found ^ its) * 1099511628211ull;
            }
            printf("%d bits, groups of %d, values %d, %d rows: %016llx\n", kind.bits, kind.group, kind.values, (int)rows, (unsigned long long)found);
        }
    }
}

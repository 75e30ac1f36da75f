// The number in [0, 1) by which a token is drawn: a hash of its sequence's seed and its position, and of nothing else.
// The rule is stated, and hashed by Python's own BLAKE2b, in moonpool/engine/sampling/random_sampler.py (`uniform`).
#include <stdint.h>
#include <string.h>

// BLAKE2b (RFC 7693) of one block, without a key.
struct Blake2b {
    uint64_t h[8];
    static constexpr uint64_t start[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                          0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
    static constexpr uint8_t order[10][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
        {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
        {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
        {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
        {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

    // For digests of `digest` bytes, personalised by 16 bytes.
    Blake2b(int digest, const uint64_t* person) {
        memcpy(h, start, sizeof h);
        h[0] ^= 0x01010000 ^ digest;  // sequential, no key
        h[6] ^= person[0], h[7] ^= person[1];
    }
    static uint64_t right(uint64_t x, int n) { return x >> n | x << (64 - n); }
    // Hashes the only block, of which `bytes` are the message and the rest 0.
    void hash(const uint64_t* m, uint64_t bytes) {
        uint64_t v[16];
        memcpy(v, h, sizeof h), memcpy(v + 8, start, sizeof start);
        v[12] ^= bytes, v[14] = ~v[14];
        auto mix = [&](int a, int b, int c, int d, uint64_t x, uint64_t y) {
            v[a] += v[b] + x, v[d] = right(v[d] ^ v[a], 32), v[c] += v[d], v[b] = right(v[b] ^ v[c], 24);
            v[a] += v[b] + y, v[d] = right(v[d] ^ v[a], 16), v[c] += v[d], v[b] = right(v[b] ^ v[c], 63);
        };
#pragma GCC unroll 12
        for (int round = 0; round < 12; round++) {
            const uint8_t* s = order[round % 10];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) mix(i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
        }
        for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
    }
};

// numbers[i] of seeds[i] and positions[i] + later.
extern "C" int mp_uniform(const uint64_t* seeds, const uint64_t* positions, uint64_t later, int64_t count, double* numbers) {
    uint64_t person[2];
    memcpy(person, "moonpool sample", 16);  // with its final 0; words are little-endian here, as on every target
    for (int64_t i = 0; i < count; i++) {
        uint64_t block[16] = {seeds[i], 0, positions[i] + later};
        Blake2b hash(8, person);
        hash.hash(block, 24);
        numbers[i] = (double)(hash.h[0] >> 11) * 0x1p-53;
    }
    return 0;
}

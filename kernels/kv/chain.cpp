// Keys of a chain's blocks, and whether all tokens are ones that the model has: see moonpool/base/kv/native_library.py. Needs no lock of Python's.
// BLAKE3 of at most one chunk (1,024 bytes), as its authors' paper has it (section 2), without SIMD: each key needs the
// one before it, so there is nothing to be done side by side.

#include <cstdint>
#include <cstring>

namespace {

constexpr size_t kKey = 32, kBlock = 64, kChunk = 1024;
constexpr uint32_t kStart = 1, kEnd = 2, kRoot = 8;
constexpr uint32_t kIv[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                             0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
constexpr int kOrder[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};

inline uint32_t turned(uint32_t word, int bits) { return (word >> bits) | (word << (32 - bits)); }

inline void mix(uint32_t* s, int a, int b, int c, int d, uint32_t x, uint32_t y) {
    s[a] += s[b] + x;
    s[d] = turned(s[d] ^ s[a], 16);
    s[c] += s[d];
    s[b] = turned(s[b] ^ s[c], 12);
    s[a] += s[b] + y;
    s[d] = turned(s[d] ^ s[a], 8);
    s[c] += s[d];
    s[b] = turned(s[b] ^ s[c], 7);
}

// Compresses a block of `nbytes` bytes, zeros behind them, into the chaining value.
void compress(uint32_t value[8], const uint8_t block[kBlock], uint32_t nbytes, uint32_t flags) {
    uint32_t words[16], next[16];
    memcpy(words, block, kBlock);  // little-endian, as are all machines that this is built for
    uint32_t s[16] = {value[0], value[1], value[2], value[3], value[4], value[5], value[6], value[7],
                      kIv[0],   kIv[1],   kIv[2],   kIv[3],   0,        0,        nbytes,   flags};
    for (int round = 0;; round++) {
        mix(s, 0, 4, 8, 12, words[0], words[1]);
        mix(s, 1, 5, 9, 13, words[2], words[3]);
        mix(s, 2, 6, 10, 14, words[4], words[5]);
        mix(s, 3, 7, 11, 15, words[6], words[7]);
        mix(s, 0, 5, 10, 15, words[8], words[9]);
        mix(s, 1, 6, 11, 12, words[10], words[11]);
        mix(s, 2, 7, 8, 13, words[12], words[13]);
        mix(s, 3, 4, 9, 14, words[14], words[15]);
        if (round == 6) break;
        for (int at = 0; at < 16; at++) next[at] = words[kOrder[at]];
        memcpy(words, next, sizeof(words));
    }
    for (int at = 0; at < 8; at++) value[at] = s[at] ^ s[at + 8];
}

// The hash of at most one chunk, at least one byte.
void hash(const uint8_t* data, size_t nbytes, uint8_t* key) {
    uint32_t value[8];
    memcpy(value, kIv, sizeof(value));
    for (size_t at = 0; at < nbytes; at += kBlock) {
        const size_t left = nbytes - at, size = left < kBlock ? left : kBlock;
        uint8_t block[kBlock] = {};
        memcpy(block, data + at, size);
        compress(value, block, size, (at == 0 ? kStart : 0) | (size == left ? kEnd | kRoot : 0));
    }
    memcpy(key, value, kKey);
}

}  // namespace

// Writes the keys of `blocks` blocks of `nbytes` bytes each behind the 32 bytes of the first one's parent, which `keys`
// begins with. False when a key and a block are more than a chunk.
extern "C" int mp_chain(const uint8_t* data, size_t nbytes, size_t blocks, uint8_t* keys) {
    if (kKey + nbytes > kChunk) return 0;
    uint8_t hashed[kChunk];
    for (size_t number = 0; number < blocks; number++, keys += kKey) {
        memcpy(hashed, keys, kKey);
        memcpy(hashed + kKey, data + number * nbytes, nbytes);
        hash(hashed, kKey + nbytes, keys + kKey);
    }
    return 1;
}

// Whether `count` tokens are all in [0, vocab).
extern "C" int mp_tokens(const uint8_t* data, size_t count, uint32_t vocab) {
    uint32_t wrong = 0;
    for (size_t at = 0; at < count; at++) {
        uint32_t token;
        memcpy(&token, data + at * sizeof(token), sizeof(token));
        wrong |= token >= vocab;
    }
    return !wrong;
}

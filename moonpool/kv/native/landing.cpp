// Slices that arrive are copied to where they belong and hashed there, piece by piece, so that the second pass finds
// its bytes in the processor's cache. Called with Python's lock held (ctypes.PyDLL). Nothing is linked: the hash is
// that of the xxhash package, the buffers are got from the interpreter, all by pointers which `mp_init` is given.

#include <cstdint>
#include <cstring>

namespace {

// Py_buffer of Python's stable ABI (since 3.11).
struct Buffer {
    void* data;
    void* owner;
    intptr_t nbytes;
    intptr_t item_bytes;
    int read_only;
    int dimensions;
    char* format;
    intptr_t* shape;
    intptr_t* strides;
    intptr_t* suboffsets;
    void* internal;
};

struct Functions {
    int (*get_buffer)(void* object, Buffer* buffer, int flags);
    void (*release_buffer)(Buffer* buffer);
    intptr_t (*list_size)(void* list);
    void* (*list_item)(void* list, intptr_t index);  // borrowed
    uint64_t (*hash)(const void* data, size_t nbytes);
    int (*reset)(void* state);
    int (*update)(void* state, const void* data, size_t nbytes);
    uint64_t (*digest)(const void* state);
    void* state;  // of a hash that is made in pieces
};

constexpr int kWritable = 1;  // PyBUF_WRITABLE
constexpr size_t kPiece = 32 << 10;

Functions functions;

class View {
public:
    View(void* object, int flags) : got_(functions.get_buffer(object, &buffer_, flags) == 0) {}
    ~View() {
        if (got_) functions.release_buffer(&buffer_);
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    bool got() const { return got_; }
    size_t nbytes() const { return static_cast<size_t>(buffer_.nbytes); }
    char* data() const { return static_cast<char*>(buffer_.data); }

private:
    Buffer buffer_{};
    bool got_;
};

uint64_t copy_and_hash(char* target, const char* data, size_t nbytes) {
    if (nbytes <= kPiece) {
        memcpy(target, data, nbytes);
        return functions.hash(target, nbytes);
    }
    functions.reset(functions.state);
    for (size_t at = 0; at < nbytes; at += kPiece) {
        const size_t size = nbytes - at < kPiece ? nbytes - at : kPiece;
        memcpy(target + at, data + at, size);
        functions.update(functions.state, target + at, size);
    }
    return functions.digest(functions.state);
}

}  // namespace

extern "C" void mp_init(const Functions* given) { functions = *given; }

// Cuts `data` into pieces as long as the targets, and copies each to its target as long as it has its hash there
// (`hashes`, 64 bits each). Returns how many leading pieces have; -1 when the numbers or sizes do not fit, or with
// Python's error set.
extern "C" int64_t mp_land(void* targets, void* data, void* hashes) {
    const View from(data, 0), wanted(hashes, 0);
    if (!from.got() || !wanted.got()) return -1;
    const intptr_t count = wanted.nbytes() / sizeof(uint64_t);
    if (functions.list_size(targets) != count) return -1;
    size_t at = 0;
    for (intptr_t number = 0; number < count; number++) {
        const View to(functions.list_item(targets, number), kWritable);
        if (!to.got() || to.nbytes() > from.nbytes() - at) return -1;
        uint64_t value;
        memcpy(&value, wanted.data() + number * sizeof(value), sizeof(value));
        if (copy_and_hash(to.data(), from.data() + at, to.nbytes()) != value) return number;
        at += to.nbytes();
    }
    return at == from.nbytes() ? count : -1;
}

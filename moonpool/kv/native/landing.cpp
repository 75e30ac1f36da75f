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

// Bytes that lie in parts (a list of views), read one after the other.
class Source {
public:
    explicit Source(void* parts) : parts_(parts), count_(functions.list_size(parts)) {}
    ~Source() { release(); }
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;

    // Copies the next bytes; false when there are not so many, or with Python's error set.
    bool copy(char* target, size_t nbytes) {
        while (nbytes > 0) {
            if (!next()) return false;
            const size_t left = static_cast<size_t>(part_.nbytes) - at_;
            const size_t size = left < nbytes ? left : nbytes;
            memcpy(target, static_cast<const char*>(part_.data) + at_, size);
            at_ += size;
            target += size;
            nbytes -= size;
        }
        return true;
    }

    // Whether all bytes have been read.
    bool done() {
        return !next() && !failed_;
    }

private:
    // Goes to the part with the next byte.
    bool next() {
        while (!got_ || at_ == static_cast<size_t>(part_.nbytes)) {
            release();
            if (failed_ || index_ >= count_) return false;
            failed_ = functions.get_buffer(functions.list_item(parts_, index_++), &part_, 0) != 0;
            got_ = !failed_;
            at_ = 0;
        }
        return true;
    }
    void release() {
        if (got_) functions.release_buffer(&part_);
        got_ = false;
    }

    void* parts_;
    intptr_t count_;
    intptr_t index_ = 0;
    Buffer part_{};
    size_t at_ = 0;
    bool got_ = false;
    bool failed_ = false;
};

// Fills a target and makes its hash; false as `Source::copy`.
bool copy_and_hash(char* target, Source& source, size_t nbytes, uint64_t* value) {
    if (nbytes <= kPiece) {
        if (!source.copy(target, nbytes)) return false;
        *value = functions.hash(target, nbytes);
        return true;
    }
    functions.reset(functions.state);
    for (size_t at = 0; at < nbytes; at += kPiece) {
        const size_t size = nbytes - at < kPiece ? nbytes - at : kPiece;
        if (!source.copy(target + at, size)) return false;
        functions.update(functions.state, target + at, size);
    }
    *value = functions.digest(functions.state);
    return true;
}

}  // namespace

extern "C" void mp_init(const Functions* given) { functions = *given; }

// Cuts `parts`, bytes one behind the other, into pieces as long as the targets, and copies each to its target as long as
// it has its hash there (`hashes`, 64 bits each). Returns how many leading pieces have; -1 when the numbers or sizes do
// not fit, or with Python's error set.
extern "C" int64_t mp_land(void* targets, void* parts, void* hashes) {
    const View wanted(hashes, 0);
    if (!wanted.got()) return -1;
    const intptr_t count = wanted.nbytes() / sizeof(uint64_t);
    if (functions.list_size(targets) != count) return -1;
    Source source(parts);
    for (intptr_t number = 0; number < count; number++) {
        const View to(functions.list_item(targets, number), kWritable);
        uint64_t value, expected;
        if (!to.got() || !copy_and_hash(to.data(), source, to.nbytes(), &value)) return -1;
        memcpy(&expected, wanted.data() + number * sizeof(expected), sizeof(expected));
        if (value != expected) return number;
    }
    return source.done() ? count : -1;
}

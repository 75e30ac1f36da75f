// Slices that arrive are copied to where they belong and hashed there, piece by piece, so that the second pass finds
// its bytes in the processor's cache. Buffers are taken and given back with Python's lock held (ctypes.PyDLL); what is
// between, `mp_run`, needs no lock. Neither is linked: the hash is that of the xxhash package, the buffers are got from
// the interpreter, all by pointers which `mp_init` is given.

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

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
    void* (*create)();  // the state of a hash that is made in pieces
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

// Slices on their way, with all their memory held.
class Job {
public:
    // False when numbers or sizes do not fit, or with Python's error set. Without parts the bytes lie there already.
    bool take(void* targets, void* parts, void* hashes) {
        const View wanted(hashes, 0);
        if (!wanted.got() || functions.list_size(targets) != static_cast<intptr_t>(wanted.nbytes() / sizeof(uint64_t)))
            return false;
        hashes_.resize(wanted.nbytes() / sizeof(uint64_t));
        if (!hashes_.empty()) memcpy(hashes_.data(), wanted.data(), hashes_.size() * sizeof(uint64_t));
        size_t room = 0, bytes = 0;
        if (!hold(targets, kWritable, &targets_, &room)) return false;
        copies_ = parts != nullptr;
        return !copies_ || (hold(parts, 0, &parts_, &bytes) && bytes == room);
    }

    // How many leading slices have their hash.
    int64_t run() {
        for (size_t number = 0; number < targets_.size(); number++) {
            if (land(targets_[number].data(), targets_[number].nbytes()) != hashes_[number]) return number;
        }
        return targets_.size();
    }

private:
    static bool hold(void* list, int flags, std::deque<View>* views, size_t* nbytes) {
        const intptr_t count = functions.list_size(list);
        for (intptr_t index = 0; index < count; index++) {
            views->emplace_back(functions.list_item(list, index), flags);
            if (!views->back().got()) return false;
            *nbytes += views->back().nbytes();
        }
        return true;
    }

    // Fills a target and makes its hash.
    uint64_t land(char* target, size_t nbytes) {
        if (nbytes <= kPiece) {
            copy(target, nbytes);
            return functions.hash(target, nbytes);
        }
        thread_local void* const state = functions.create();
        functions.reset(state);
        for (size_t at = 0; at < nbytes; at += kPiece) {
            const size_t size = nbytes - at < kPiece ? nbytes - at : kPiece;
            copy(target + at, size);
            functions.update(state, target + at, size);
        }
        return functions.digest(state);
    }

    // Copies the next bytes of the parts, which have as many as the targets.
    void copy(char* target, size_t nbytes) {
        while (copies_ && nbytes > 0) {
            const View& part = parts_[part_];
            const size_t left = part.nbytes() - at_, size = left < nbytes ? left : nbytes;
            memcpy(target, part.data() + at_, size);
            target += size;
            nbytes -= size;
            at_ += size;
            if (size == left) part_++, at_ = 0;
        }
    }

    std::deque<View> targets_, parts_;
    std::vector<uint64_t> hashes_;
    bool copies_ = false;
    size_t part_ = 0, at_ = 0;
};

}  // namespace

extern "C" void mp_init(const Functions* given) { functions = *given; }

// Cuts `parts` (a list; null: the bytes lie in the targets already), bytes one behind the other, into pieces as long as
// the targets, to be copied there as long as each has its hash there (`hashes`, 64 bits each). Holds all memory until
// `mp_end`. Null when the numbers or sizes do not fit, or with Python's error set.
extern "C" void* mp_begin(void* targets, void* parts, void* hashes) {
    auto job = std::make_unique<Job>();
    return job->take(targets, parts, hashes) ? job.release() : nullptr;
}

// Copies and verifies, once: how many leading pieces have their hash. Needs no lock.
extern "C" int64_t mp_run(void* job) { return static_cast<Job*>(job)->run(); }

extern "C" void mp_end(void* job) { delete static_cast<Job*>(job); }

// All three in one; -1 where there is no job.
extern "C" int64_t mp_land(void* targets, void* parts, void* hashes) {
    Job job;
    return job.take(targets, parts, hashes) ? job.run() : -1;
}

// Slices of a file are read straight to where they belong, and hashed there. Called without Python's lock (ctypes.CDLL):
// for all of many slices other threads run Python.

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace {

struct Span {
    int64_t offset;
    char* out;
    int64_t nbytes;
    int64_t slice_bytes;
};

using Hash = uint64_t (*)(const void* data, size_t nbytes);

constexpr int64_t kParts = 64;  // of one call of the system

// What one call reads: how many leading spans lie one behind the other, and how many bytes they have.
struct Run {
    int64_t spans;
    int64_t nbytes;
};

Run run_of(const Span* spans, int64_t count) {
    Run run{1, spans[0].nbytes};
    while (run.spans < count && run.spans < kParts && spans[run.spans].offset == spans[0].offset + run.nbytes) {
        run.nbytes += spans[run.spans++].nbytes;
    }
    return run;
}

bool is_aligned(const Span* spans, int64_t count, int64_t sector) {
    for (int64_t number = 0; number < count; number++) {
        const Span& span = spans[number];
        if ((span.offset | span.nbytes | reinterpret_cast<intptr_t>(span.out)) % sector) return false;
    }
    return true;
}

// Both return how many bytes have come: fewer at the end of the file, or with `error`.

int64_t read_into(int fd, const Span* spans, const Run& run, int* error) {
    iovec parts[kParts];
    for (int64_t number = 0; number < run.spans; number++) {
        parts[number] = {spans[number].out, static_cast<size_t>(spans[number].nbytes)};
    }
    int64_t done = 0;
    int first = 0;
    while (done < run.nbytes) {
        const ssize_t got = preadv(fd, parts + first, static_cast<int>(run.spans) - first, spans[0].offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) *error = errno;
        if (got <= 0) break;
        done += got;
        size_t left = static_cast<size_t>(got);
        while (first < run.spans && left >= parts[first].iov_len) left -= parts[first++].iov_len;
        if (left) {
            parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + left;
            parts[first].iov_len -= left;
        }
    }
    return done;
}

// Through `scratch`, whole sectors at a time.
int64_t read_through(int fd, const Span* spans, const Run& run, int64_t sector, char* scratch, int64_t size,
                     int* error) {
    const int64_t begin = spans[0].offset, end = begin + run.nbytes;
    int64_t position = begin, within = 0;
    while (position < end) {
        const int64_t base = position - position % sector;
        const int64_t needed = (end - base + sector - 1) / sector * sector;
        const ssize_t got = pread(fd, scratch, static_cast<size_t>(needed < size ? needed : size), base);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) *error = errno;
        const int64_t stop = base + got < end ? base + got : end;
        if (got <= 0 || stop <= position) break;
        while (position < stop) {
            if (within == spans->nbytes) {
                spans++;
                within = 0;
                continue;
            }
            const int64_t left = spans->nbytes - within;
            const int64_t count = left < stop - position ? left : stop - position;
            memcpy(spans->out + within, scratch + (position - base), static_cast<size_t>(count));
            within += count;
            position += count;
        }
    }
    return position - begin;
}

}  // namespace

// Reads spans of a file; returns how many leading ones have come whole. `hashes` gets those of the slices in them, where
// these have a size, `error` what kept the next one from being read, 0 at the end of the file. Where `sector` is not 0,
// the file is open for direct reads: offsets, lengths and memory of each must be multiples of it, `scratch` is.
extern "C" int64_t mp_read(int fd, int64_t sector, const Span* spans, int64_t count, char* scratch, int64_t size,
                           Hash hash, uint64_t* hashes, int* error) {
    *error = 0;
    for (int64_t done = 0; done < count;) {
        const Span* next = spans + done;
        const Run run = run_of(next, count - done);
        const bool straight = !sector || is_aligned(next, run.spans, sector);
        int64_t got = straight ? read_into(fd, next, run, error)
                               : read_through(fd, next, run, sector, scratch, size, error);
        for (int64_t number = 0; number < run.spans; number++) {
            const Span& span = next[number];
            if (got < span.nbytes) return done;
            got -= span.nbytes;
            const int64_t size = span.slice_bytes;
            for (int64_t at = 0; size && at < span.nbytes; at += size) {
                *hashes++ = hash(span.out + at, static_cast<size_t>(size));
            }
            done++;
        }
    }
    return count;
}

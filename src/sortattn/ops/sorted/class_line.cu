// What the walks along lines of sixteen-bit coordinates have in common, see ascend.cu.
//
// Macros: those of track.cu and half.cu, and SMALL.

#include "half.cu"
#include "track.cu"

// a row as it is given, of a lane
#if VEC == 1
struct Packed {
    half_t at;

    __device__ Row row() const { return {widen(at)}; }
};
#else
struct alignas(2 * VEC) Packed {
    unsigned at[VEC / 2];

    __device__ Row row() const {
        Row row;
#pragma unroll
        for (int c = 0; c < VEC; c += 2) widen(at[c / 2], row.at[c], row.at[c + 1]);
        return row;
    }
};
#endif

// a row of the table
#if SMALL
typedef Packed Kept;
typedef half_t kept_t;
__device__ inline Row open(const Kept &kept) { return kept.row(); }
__device__ inline Kept close(const Row &row) {
    Kept kept;
#if VEC == 1
    kept.at = half_t(narrow(row.at[0], real(0)));
#else
#pragma unroll
    for (int c = 0; c < VEC; c += 2) kept.at[c / 2] = narrow(row.at[c], row.at[c + 1]);
#endif
    return kept;
}
#else
typedef Row Kept;
typedef real kept_t;
__device__ inline Row open(const Kept &kept) { return kept; }
__device__ inline Kept close(const Row &row) { return row; }
#endif

// the keys of a line, or of a run of it, from one end or the other
struct Keys {
    const entry_t *entries;
    int count, step;

    __device__ Keys(const entry_t *entries, int count, bool down)
        : entries(down ? entries + count - 1 : entries), count(count), step(down ? -1 : 1) {}
    __device__ entry_t at(int i) const { return entries[i * step]; }
    __device__ real place(entry_t entry) const {
        real place = number_of(unsigned(entry >> INDEX));
        return step < 0 ? -place : place;
    }
    __device__ int index(entry_t entry) const { return int(entry & ((entry_t(1) << INDEX) - 1)); }
};

struct Classes {
    const half_t *codes;
    int count, step;

    __device__ Classes(const half_t *codes, int count, bool down)
        : codes(down ? codes + count - 1 : codes), count(count), step(down ? -1 : 1) {}
    __device__ real place(int i) const {
        real place = number_of(codes[i * step]);
        return step < 0 ? -place : place;
    }
};

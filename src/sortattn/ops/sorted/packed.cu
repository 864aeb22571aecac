// Rows of sixteen bits.
//
// Macros: those of half.cu and track.cu, which come before.

// What a lane has of a row.
#if VEC == 1
struct Packed {
    half_t at;

    __device__ Row row() const { return {widen(at)}; }
    __device__ static Packed of(const Row &row) { return {half_t(narrow(row.at[0], real(0)))}; }
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
    __device__ static Packed of(const Row &row) {
        Packed packed;
#pragma unroll
        for (int c = 0; c < VEC; c += 2) packed.at[c / 2] = narrow(row.at[c], row.at[c + 1]);
        return packed;
    }
};
#endif

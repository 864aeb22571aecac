// Sums of extra scalars over those lanes of a warp that are alike.

__device__ inline Pair shuffled(const Pair &pair, int from) {
    return {__shfl_sync(ALL, pair.plain, from), __shfl_sync(ALL, pair.weighted, from)};
}
__device__ inline void add_pair(Pair &to, const Pair &pair, real factor = real(1)) {
    to.plain += factor * pair.plain, to.weighted += factor * pair.weighted;
}
// The first `some` lanes.
__device__ inline unsigned first_lanes(int some) { return some < 32 ? (1u << some) - 1 : ALL; }
// The last lane of `some` before `lane`, or -1.
__device__ inline int last_before(unsigned some, int lane) { return 31 - __clz(some & first_lanes(lane)); }
// Add to the pair of each lane those of all lanes before it that are alike, of which `nearest` is the last, or -1: by
// doubling how far each has looked back.
__device__ inline void add_alike(Pair &pair, int nearest) {
#pragma unroll
    for (int i = 0; i < 5; i++) {
        Pair other = shuffled(pair, max(nearest, 0));
        int farther = __shfl_sync(ALL, nearest, max(nearest, 0));
        if (nearest >= 0) add_pair(pair, other), nearest = farther;
    }
}

// Neighbours in a warp that are nearly in order are put in order.
//
// search.cu comes before.

// Whether one key, the first, belongs behind another; equal ones, if `TIES`, by their indices.
template <bool TIES> __device__ inline bool behind(float key, int index, float other, int other_index) {
    return key > other || (TIES && key == other && index > other_index);
}

// Of MANY neighbours a thread, every other pair, from the first or the second on, across threads too.
template <bool TIES, int MANY> __device__ inline void exchange(float (&key)[MANY], int (&index)[MANY], int first) {
#pragma unroll
    for (int i = first; i + 1 < MANY; i += 2) {
        bool swap = behind<TIES>(key[i], index[i], key[i + 1], index[i + 1]);
        float low = swap ? key[i + 1] : key[i], high = swap ? key[i] : key[i + 1];
        int low_index = swap ? index[i + 1] : index[i], high_index = swap ? index[i] : index[i + 1];
        key[i] = low, key[i + 1] = high, index[i] = low_index, index[i + 1] = high_index;
    }
    if (!first) return;
    int lane = threadIdx.x % 32;
    float after = __shfl_down_sync(ALL, key[0], 1), before = __shfl_up_sync(ALL, key[MANY - 1], 1);
    int index_after = __shfl_down_sync(ALL, index[0], 1), index_before = __shfl_up_sync(ALL, index[MANY - 1], 1);
    if (lane > 0 && behind<TIES>(before, index_before, key[0], index[0])) key[0] = before, index[0] = index_before;
    if (lane < 31 && behind<TIES>(key[MANY - 1], index[MANY - 1], after, index_after))
        key[MANY - 1] = after, index[MANY - 1] = index_after;
}

// Exchange neighbours until all are in order: as many steps as the farthest key is away from its place.
template <bool TIES, int MANY> __device__ inline void settle_by(float (&key)[MANY], int (&index)[MANY]) {
    bool more;
#pragma unroll 1
    do {
        exchange<TIES>(key, index, 0);
        exchange<TIES>(key, index, 1);
        // the other pairs are in order now
        more = false;
#pragma unroll
        for (int i = 0; i < MANY; i += 2) {
            more = more || behind<TIES>(key[i], index[i], key[i + 1], index[i + 1]);
        }
    } while (__any_sync(ALL, more));
}

// Sort MANY neighbours of every thread of a warp; equal ones by their indices, if these `matter`.
template <int MANY> __device__ inline void settle(float (&key)[MANY], int (&index)[MANY], bool matter) {
    static_assert(MANY % 2 == 0, "pairs");
    settle_by<false>(key, index);
    if (!matter) return;
    // hardly any are equal: they are looked for once, instead of by every step
    float after = __shfl_down_sync(ALL, key[0], 1);
    int index_after = __shfl_down_sync(ALL, index[0], 1);
    // the last lane has nothing behind it; without branches
    bool more = (threadIdx.x % 32 < 31) & (key[MANY - 1] == after) & (index[MANY - 1] > index_after);
#pragma unroll
    for (int i = 0; i + 1 < MANY; i++) more |= (key[i] == key[i + 1]) & (index[i] > index[i + 1]);
    if (__any_sync(ALL, more)) settle_by<true>(key, index);
}

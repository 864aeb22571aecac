// A search by the lanes of a warp together.

constexpr unsigned ALL = 0xffffffffu;

// The first of `low ... high - 1` that does not hold, or `high`, where those that do come first.
template <typename F> __device__ inline int first_without(int low, int high, F holds) {
    int lane = threadIdx.x % 32;
    while (low < high) {
        int step = (high - low + 31) / 32, probe = low + (lane + 1) * step - 1;
        int whole = __popc(__ballot_sync(ALL, probe < high && holds(probe)));
        high = min(high, low + (whole + 1) * step - 1);
        low = min(low + whole * step, high);
    }
    return low;
}

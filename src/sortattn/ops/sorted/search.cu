// What the lanes of a warp have in common, and a search by all of them.

constexpr unsigned ALL = 0xffffffffu;

// The number of this thread's warp. By the shuffle the compiler knows that all lanes have the same, so that they go
// together wherever that decides: without it a ninth of the instructions of coil.cu brought them together again.
__device__ inline int own_warp() { return __shfl_sync(ALL, int(threadIdx.x) / 32, 0); }

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

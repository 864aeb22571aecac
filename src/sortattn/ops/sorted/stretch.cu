// What walks have in common that go along whole tracks by stretches of thirty-two sources, a warp each; see relay.cu.
//
// Macros: those of given.cu, which comes before, and CREW (warps of a block).

// What a lane brings of rows: pieces of sixteen bytes.
constexpr int PIECES = sizeof(Given) * 32 / 16;
// Its piece of the first row; as in `Rows`, the compiler is not told what that is made of.
__device__ inline const char *piece_of(const given_t *rows, int lane) {
    const char *start = reinterpret_cast<const char *>(rows) + lane % PIECES * 16;
#ifdef __CUDA_ARCH__
    asm("" : "+l"(start));
#endif
    return start;
}
// Rows that lanes want, one each, on their way to shared memory; `start` is this lane's piece of the first one.
__device__ inline void bring(Given *rows, const char *start, int index, int lane) {
    char *to = reinterpret_cast<char *>(rows) + lane * 16;
#pragma unroll
    for (int i = 0; i < 32; i += 32 / PIECES, to += 512) {
        int which = __shfl_sync(ALL, index, i + lane / PIECES);
        const char *piece = start + index_t(unsigned(which)) * (STRIDE * sizeof(given_t));
#if defined __CUDA_ARCH__ && PASSING
        unsigned place = unsigned(__cvta_generic_to_shared(to));
        asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(place), "l"(piece),
                     "l"(passing())
                     : "memory");
#else
        begin_copy<16>(to, piece);
#endif
    }
}

// The last of every so many targets, among which a search begins: one from end to end would wait for each step.
template <typename T> struct Marks {
    T at[32 * CREW];

    // by all threads of a block; behind the last target is `behind`
    template <typename F> __device__ void fill(int count, F place, T behind) {
        int i = (int(threadIdx.x) + 1) * pitch(count) - 1;
        at[threadIdx.x] = i < count ? place(i) : behind;
    }
    // lane by lane, the first target that has passed something, as `behind` has
    template <typename F, typename G> __device__ int find(int count, F place, G passed) const {
        // pitch * 32 * CREW is more than there are: the last mark is passed
        int some = pitch(count), low = some * search(0, 32 * CREW - 1, [&](int i) { return passed(at[i]); });
        return search(min(low, count), min(low + some - 1, count), [&](int i) { return passed(place(i)); });
    }

  private:
    __device__ static int pitch(int count) { return count / (32 * CREW) + 1; }
    template <typename F> __device__ static int search(int low, int high, F holds) {
        while (low < high) {
            int half = (low + high) / 2;
            if (holds(half))
                high = half;
            else
                low = half + 1;
        }
        return low;
    }
};

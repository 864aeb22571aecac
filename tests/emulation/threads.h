// A block of CUDA threads on one CPU thread: every thread is a fibre that runs until it waits for others.
//
// Enough of CUDA for the kernels of this package, which are compiled behind this header.
#include <cmath>
#include <cstring>

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Coordinates {
    unsigned x, y, z;
};
struct int2 {
    int x, y;
};
struct uint2 {
    unsigned x, y;
};

// Leaves one stack for another, with the registers that a function has to keep. `swapcontext` also asks the system for
// the mask of signals, every time: with it kernels of single warps took eight times as long.
extern "C" void change_stacks(void **from, void *to);
asm(".text\n"
    "change_stacks:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    "ret\n");

namespace emulator {
constexpr int MOST = 1024, STACK = 1 << 17;
// the barrier of the whole block; those before belong to warps
constexpr int BLOCK = MOST / 32;
// where the stacks of those that wait end
void *fibres[MOST], *host;
bool alive[MOST];
int me, threads, arrived[BLOCK + 1], turn[BLOCK + 1];
unsigned long long words[MOST];
bool flags[MOST];
const void *kernel;
void (*run)(const void *);
} // namespace emulator

static Coordinates threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
inline void switch_to(int next) { me = next, threadIdx.x = next; }
inline int next_alive() {
    int next = me;
    do next = (next + 1) % threads;
    while (!alive[next] && next != me);
    return next;
}
inline void wait(int barrier, int number) {
    int now = turn[barrier];
    if (++arrived[barrier] == number) {
        arrived[barrier] = 0, turn[barrier]++;
        return;
    }
    while (turn[barrier] == now) {
        int from = me, to = next_alive();
        switch_to(to);
        change_stacks(&fibres[from], fibres[to]);
    }
}
inline void wait_for_warp() { wait(me / 32, 32); }
inline void wait_for_block() { wait(BLOCK, threads); }
inline int lane() { return me % 32; }
// What a lane of the same warp holds.
template <typename T> T take(T mine, int from) {
    std::memcpy(words + me, &mine, sizeof mine);
    wait_for_warp();
    T result;
    std::memcpy(&result, words + me / 32 * 32 + (from & 31), sizeof result);
    wait_for_warp();
    return result;
}
template <typename T, typename F> T fold(T mine, F combine) {
    words[me] = mine;
    wait_for_warp();
    T result = T(words[me / 32 * 32]);
    for (int i = 1; i < 32; i++) result = combine(result, T(words[me / 32 * 32 + i]));
    wait_for_warp();
    return result;
}
inline void begin() {
    run(kernel);
    alive[me] = false;
    int next = next_alive();
    int from = me;
    switch_to(next);
    change_stacks(&fibres[from], alive[next] ? fibres[next] : host);
}
// A stack that `change_stacks` goes on with at the start of `begin`: six registers, and where to return to.
inline void *fresh(char *stack) {
    void **end = reinterpret_cast<void **>((reinterpret_cast<size_t>(stack) + STACK) / 16 * 16);
    end[-2] = reinterpret_cast<void *>(begin);
    return end - 8;
}
template <class Body> void launch(long width, long height, int block, Body body) {
    kernel = &body, run = [](const void *body) { (*static_cast<const Body *>(body))(); };
    threads = block;
    // not filled: what is never written takes no memory
    char *stacks = new char[size_t(block) * STACK];
    gridDim = {unsigned(width), unsigned(height), 1}, blockDim = {unsigned(block), 1, 1};
    for (long y = 0; y < height; y++) {
        for (long x = 0; x < width; x++) {
            blockIdx = {unsigned(x), unsigned(y), 0};
            std::memset(arrived, 0, sizeof arrived);
            for (int i = 0; i < block; i++) {
                alive[i] = true;
                fibres[i] = fresh(stacks + size_t(i) * STACK);
            }
            switch_to(0);
            change_stacks(&host, fibres[0]);
        }
    }
    delete[] stacks;
}
} // namespace emulator

inline void __syncthreads() { emulator::wait_for_block(); }
inline void __syncwarp(unsigned = 0) { emulator::wait_for_warp(); }
inline bool __syncthreads_or(bool mine) {
    emulator::flags[emulator::me] = mine;
    emulator::wait_for_block();
    bool any = false;
    for (int i = 0; i < emulator::threads; i++) any = any || emulator::flags[i];
    emulator::wait_for_block();
    return any;
}
template <typename T> T __shfl_sync(unsigned, T x, int from) { return emulator::take(x, from); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int bits) { return emulator::take(x, emulator::lane() ^ bits); }
template <typename T> T __shfl_up_sync(unsigned, T x, int by) {
    return emulator::take(x, emulator::lane() < by ? emulator::lane() : emulator::lane() - by);
}
template <typename T> T __shfl_down_sync(unsigned, T x, int by) {
    return emulator::take(x, emulator::lane() + by > 31 ? emulator::lane() : emulator::lane() + by);
}
inline unsigned __ballot_sync(unsigned, bool mine) {
    return emulator::fold(unsigned(mine) << emulator::lane(), [](unsigned a, unsigned b) { return a | b; });
}
inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
template <typename T> T __reduce_min_sync(unsigned, T x) {
    return emulator::fold(x, [](T a, T b) { return a < b ? a : b; });
}
template <typename T> T __reduce_max_sync(unsigned, T x) {
    return emulator::fold(x, [](T a, T b) { return a < b ? b : a; });
}
template <typename T> T __reduce_add_sync(unsigned, T x) {
    return emulator::fold(x, [](T a, T b) { return a + b; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
    return emulator::fold(x, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned, unsigned x) {
    return emulator::fold(x, [](unsigned a, unsigned b) { return a & b; });
}
template <typename T, typename U> T atomicAdd(T *place, U x) {
    T before = *place;
    *place += x;
    return before;
}
template <typename T, typename U> T atomicOr(T *place, U x) {
    T before = *place;
    *place |= x;
    return before;
}
template <typename T, typename U> T atomicMax(T *place, U x) {
    T before = *place;
    if (before < T(x)) *place = x;
    return before;
}
template <typename T, typename U> T atomicExch(T *place, U x) {
    T before = *place;
    *place = x;
    return before;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
template <typename To, typename From> To reinterpret(From x) {
    To result;
    std::memcpy(&result, &x, sizeof result);
    return result;
}
inline float __int_as_float(int x) { return reinterpret<float>(x); }
inline float __uint_as_float(unsigned x) { return reinterpret<float>(x); }
inline unsigned __float_as_uint(float x) { return reinterpret<unsigned>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsub_rn(float a, float b) { return a - b; }
template <typename T> T min(T a, T b) { return b < a ? b : a; }
template <typename T> T max(T a, T b) { return a < b ? b : a; }

// From sums to attention: look for what is no number, and divide.
//
// Macros: REAL and NARROW (points, values and rows have sixteen bits; then also those of half.cu).

#if NARROW
#include "half.cu"
typedef half_t given_t;
__device__ inline bool is_finite(half_t x) { return !unfit_bits(x); }
__device__ inline half_t narrowed(REAL x) { return half_t(narrow(x, REAL(0))); }
#else
typedef REAL given_t;
__device__ inline bool is_finite(REAL x) { return x - x == REAL(0); }
__device__ inline REAL narrowed(REAL x) { return x; }
#endif

typedef REAL real;
typedef long long index_t;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// rows of a thread that divides
constexpr int ROWS = 2;

// What a row of sums is multiplied with: the reciprocal of the total, clamped to a positive floor; without a floor a
// total below all normal numbers, whose reciprocal is infinite, counts as none.
__device__ inline real reciprocal(real total, real floor) {
    if (floor > real(0)) return real(1) / (total < floor ? floor : total);
    real tiny = sizeof(real) == 4 ? real(1.17549435e-38) : real(2.2250738585072014e-308);
    return (total < real(0) ? -total : total) < tiny ? real(0) : real(1) / total;
}

__device__ inline real not_a_number() { return real(__int_as_float(0x7fffffff)); }

// Numbers that are read at a time.
struct alignas(16) Some {
    given_t at[16 / sizeof(given_t)];
};
struct alignas(16) Four {
    real at[4];
};
struct alignas(4 * sizeof(given_t) < 16 ? 4 * sizeof(given_t) : 16) FourGiven {
    given_t at[4];
};

// Count what is no finite number: `unfit (heads, group)` of the queries of every head in a group, and of what they
// share, but for the first `skipped` of these kinds. A block has one of `slices` parts of the queries of one of them,
// of the keys or of the values.
extern "C" __global__ void __launch_bounds__(THREADS)
    look(const given_t *query, const given_t *key, const given_t *value, int *unfit, index_t queries, index_t keys,
         index_t values, index_t group, index_t slices, index_t skipped) {
    index_t part = blockIdx.x / slices, slice = blockIdx.x % slices, kinds = group + 2 - skipped, p = part / kinds,
            kind = skipped + part % kinds;
    const given_t *numbers = kind < group    ? query + (p * group + kind) * queries
                             : kind == group ? key + p * keys
                                             : value + p * values;
    index_t count = kind < group ? queries : kind == group ? keys : values;
    index_t share = (count + slices - 1) / slices, begin = min(slice * share, count), end = min(begin + share, count);
    // sixteen bytes at a time, from the first place that these divide
    constexpr index_t SOME = 16 / sizeof(given_t);
    index_t first =
        begin + index_t((16 - reinterpret_cast<unsigned long long>(numbers + begin) % 16) % 16 / sizeof(given_t));
    index_t whole = first < end ? (end - first) / SOME : 0;
    const Some *several = reinterpret_cast<const Some *>(numbers + first);
    bool found = false;
#pragma unroll 4
    for (index_t i = threadIdx.x; i < whole; i += THREADS) {
        Some some = several[i];
#pragma unroll
        for (int k = 0; k < SOME; k++) found = found || !is_finite(some.at[k]);
    }
    // what is before and behind
    for (index_t i = begin + threadIdx.x; i < min(first, end); i += THREADS) found = found || !is_finite(numbers[i]);
    for (index_t i = first + whole * SOME + threadIdx.x; i < end; i += THREADS) found = found || !is_finite(numbers[i]);
    if (!__syncthreads_or(found) || threadIdx.x) return;
    for (index_t g = 0; g < group; g++) {
        if (kind >= group || g == kind) atomicAdd(unfit + p * group + g, 1);
    }
}

// `rows = sums / total`, a row of `channels` for `lanes` threads, 16 or 32, which have ROWS of them, so that both are
// on their way at a time; NaN in heads that are unfit. The rows may be where the sums are.
extern "C" __global__ void __launch_bounds__(THREADS)
    divide(const real *sums, const real *total, const int *unfit, given_t *rows, index_t number, index_t each,
           index_t channels, index_t stride, index_t lanes, double floor) {
    int apart = THREADS / int(lanes);
    index_t first = blockIdx.x * index_t(ROWS * apart) + threadIdx.x / lanes;
    real factor[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        index_t row = min(first + i * apart, number - 1);
        factor[i] = unfit[row / each] ? not_a_number() : reciprocal(total[row], real(floor));
    }
    bool whole = channels % 4 == 0 && stride % 4 == 0;
    for (index_t c = threadIdx.x % lanes * 4; c < channels; c += lanes * 4) {
        Four four[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            index_t row = first + i * apart;
            if (whole && row < number) four[i] = *reinterpret_cast<const Four *>(sums + row * stride + c);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            index_t row = first + i * apart;
            if (row >= number) break;
            given_t *to = rows + row * channels;
            if (whole) {
                FourGiven narrow = {narrowed(factor[i] * four[i].at[0]), narrowed(factor[i] * four[i].at[1]),
                                    narrowed(factor[i] * four[i].at[2]), narrowed(factor[i] * four[i].at[3])};
                *reinterpret_cast<FourGiven *>(to + c) = narrow;
                continue;
            }
            for (index_t k = c; k < min(c + 4, channels); k++) to[k] = narrowed(factor[i] * sums[row * stride + k]);
        }
    }
}

// The gradients of sums and total from that of the rows `sums / total`.
extern "C" __global__ void __launch_bounds__(THREADS)
    divide_backward(const real *grad, const real *sums, const real *total, const int *unfit, real *by_sums,
                    real *by_total, index_t number, index_t each, index_t channels, double floor) {
    index_t row = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    if (row >= number) return;
    real here = total[row], product = real(0);
    real factor = unfit[row / each] ? not_a_number() : reciprocal(here, real(floor));
    for (index_t c = threadIdx.x % 32; c < channels; c += 32) {
        real g = grad[row * channels + c];
        by_sums[row * channels + c] = factor * g;
        product += g * factor * sums[row * channels + c];
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) product += __shfl_xor_sync(0xffffffffu, product, offset);
    // a total below the floor has no gradient
    if (threadIdx.x % 32 == 0) by_total[row] = floor > 0.0 && here < real(floor) ? real(0) : -product * factor;
}

// From sums to attention: look for what is no number, and divide.
//
// Macros: REAL.

typedef REAL real;
typedef long long index_t;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// What a row of sums is multiplied with: the reciprocal of the total, clamped to a positive floor; without a floor a
// total below all normal numbers, whose reciprocal is infinite, counts as none.
__device__ inline real reciprocal(real total, real floor) {
    if (floor > real(0)) return real(1) / (total < floor ? floor : total);
    real tiny = sizeof(real) == 4 ? real(1.17549435e-38) : real(2.2250738585072014e-308);
    return (total < real(0) ? -total : total) < tiny ? real(0) : real(1) / total;
}

__device__ inline real not_a_number() { return real(__int_as_float(0x7fffffff)); }

// Count what is no finite number: `unfit (heads, group)` of the queries of every head in a group, and of what they
// share. A block has one of `slices` parts of the queries of one of them, of the keys or of the values.
extern "C" __global__ void __launch_bounds__(THREADS)
    look(const real *query, const real *key, const real *value, int *unfit, index_t queries, index_t keys,
         index_t values, index_t group, index_t slices) {
    index_t part = blockIdx.x / slices, slice = blockIdx.x % slices, p = part / (group + 2), kind = part % (group + 2);
    const real *numbers = kind < group    ? query + (p * group + kind) * queries
                          : kind == group ? key + p * keys
                                          : value + p * values;
    index_t count = kind < group ? queries : kind == group ? keys : values;
    index_t share = (count + slices - 1) / slices, end = min((slice + 1) * share, count);
    bool found = false;
#pragma unroll 8
    for (index_t i = slice * share + threadIdx.x; i < end; i += THREADS) {
        real x = numbers[i];
        found = found || !(x - x == real(0));
    }
    if (!__syncthreads_or(found) || threadIdx.x) return;
    for (index_t g = 0; g < group; g++) {
        if (kind >= group || g == kind) atomicAdd(unfit + p * group + g, 1);
    }
}

// `rows = sums / total`, one row of `channels` a warp; NaN in heads that are unfit.
extern "C" __global__ void __launch_bounds__(THREADS)
    divide(const real *sums, const real *total, const int *unfit, real *rows, index_t number, index_t each,
           index_t channels, index_t stride, double floor) {
    index_t row = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    if (row >= number) return;
    real factor = unfit[row / each] ? not_a_number() : reciprocal(total[row], real(floor));
    for (index_t c = threadIdx.x % 32; c < channels; c += 32) {
        rows[row * channels + c] = factor * sums[row * stride + c];
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

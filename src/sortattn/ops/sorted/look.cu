// Look for what is no finite number.
//
// Macros: NUMBER (unsigned short for those of 16 bits), EXPONENT (the bits of a 16-bit exponent).

typedef NUMBER number;
typedef long long index_t;

constexpr int THREADS = 256;

__device__ inline bool is_number(float x) { return x - x == 0.0f; }
__device__ inline bool is_number(double x) { return x - x == 0.0; }
__device__ inline bool is_number(unsigned short x) { return (x & EXPONENT) != EXPONENT; }

// Count what is no finite number: `unfit (heads, group)` of the queries of every head in a group, and of what they
// share. A block has one of `slices` parts of the queries of one of them, of the keys or of the values.
extern "C" __global__ void __launch_bounds__(THREADS)
    look(const number *query, const number *key, const number *value, int *unfit, index_t queries, index_t keys,
         index_t values, index_t group, index_t slices) {
    index_t part = blockIdx.x / slices, slice = blockIdx.x % slices, p = part / (group + 2), kind = part % (group + 2);
    const number *numbers = kind < group    ? query + (p * group + kind) * queries
                            : kind == group ? key + p * keys
                                            : value + p * values;
    index_t count = kind < group ? queries : kind == group ? keys : values;
    index_t share = (count + slices - 1) / slices, end = min((slice + 1) * share, count);
    bool found = false;
#pragma unroll 8
    for (index_t i = slice * share + threadIdx.x; i < end; i += THREADS) {
        found = found || !is_number(numbers[i]);
    }
    if (!__syncthreads_or(found) || threadIdx.x) return;
    for (index_t g = 0; g < group; g++) {
        if (kind >= group || g == kind) atomicAdd(unfit + p * group + g, 1);
    }
}

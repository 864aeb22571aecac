// Coordinates in sorted order.
//
// Macros: REAL.

typedef REAL real;
typedef long long index_t;

// From points (heads, count, dims) and their order (heads, dims, count) to places (heads, dims, count).
extern "C" __global__ void arrange(const real *points, const int *order, real *places, index_t total, index_t count,
                                   index_t dims) {
    for (index_t i = blockIdx.x * index_t(blockDim.x) + threadIdx.x; i < total; i += index_t(gridDim.x) * blockDim.x) {
        index_t line = i / count;
        real x = points[(line / dims * count + order[i]) * dims + line % dims];
        // what is no finite number stands at zero, as in the sort
        places[i] = x - x == real(0) ? x : real(0);
    }
}

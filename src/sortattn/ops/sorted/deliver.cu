// Numbers that stand along lines, in the order of their points, to where the points are.
//
// Macros: EACH (points of a thread).

typedef long long index_t;

// From `along (heads, dims, count)` to `out (heads, count, dims)`, zero before; `order` are the indices of the points.
// Blocks at work at a time have neighbouring dimensions, which share sectors of `out`. These are added to, as parts of
// sectors that are written take longer: 18 instead of 11 ms for both sides of 131,072 points.
extern "C" __global__ void __launch_bounds__(256)
    deliver(const float *along, const int *order, float *out, index_t count, index_t dims) {
    constexpr int BLOCK = 256 * EACH;
    index_t pieces = (count + BLOCK - 1) / BLOCK, line = blockIdx.x / pieces;
    int first = int(blockIdx.x % pieces * BLOCK) + threadIdx.x;
    along += line * count, order += line * count;
    out += line / dims * count * dims + line % dims;
    float number[EACH];
    int index[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int n = first + i * 256;
        number[i] = n < count ? along[n] : 0.0f;
        index[i] = n < count ? order[n] : -1;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (index[i] >= 0) atomicAdd(out + index[i] * dims, number[i]);
    }
}

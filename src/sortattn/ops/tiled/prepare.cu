// What is made ready for slopes.cu, and for the gradients of the values: vectors as halves, a look at the numbers.
//
// Set by cuda_kernels.py: NUMBER (float), KERNEL (a name of Kind), EPSILON (of the Riesz kernels), SLICE (rows that a
// block prepares).

#include "kinds.cu"

#include "packed.cu"

// From the gradient by the quotient, `normalised`, or by the sums: the gradients by the sums and by the total of a row,
// the first also as halves, and the values as halves. A warp has a row at a time, of queries or of keys. And how far
// the numbers reach that the gradients of the values are made of, as survey.cu has it: there keys see queries.
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare(const float *query, const float *key, const float *value, const float *grad, const float *quotient,
            const float *total, float *grad_sums, float *grad_total, unsigned *grad_halves, float *grad_scale,
            unsigned *value_halves, float *value_scale, Found *found, long long rows, long long columns, long long dims,
            long long channels, long long normalised, long long slices) {
    long long p = blockIdx.x / (2 * slices);
    int slice = blockIdx.x % slices, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool keys = blockIdx.x / slices % 2 == 0;
    long long count = keys ? columns : rows;
    const float *origin = query + p * rows * dims;
    // of points; of the gradients by the sums
    Found parts[2] = {};
#pragma unroll 1
    for (int i = warp; i < SLICE && slice * SLICE + i < count; i += THREADS / 32) {
        long long row = p * count + slice * SLICE + i;
        for (int d = lane; d < dims; d += 32)
            look((keys ? key : query)[row * dims + d], DECAY && rows ? origin[d] : 0.0f, parts[0]);
        if (keys) {
            Found unused = {};
            float scale = write_halves(value + row * channels, channels, 1, value_halves + row * PACKED, unused);
            if (lane == 0) value_scale[row] = scale;
            continue;
        }
        float inverse = 1, sum = 0;
        if (normalised) {
            float whole = total[row];
            inverse = fabsf(whole) < 0x1p-126f ? 0.0f : 1 / whole;
            for (long long at = row * channels + lane; at < (row + 1) * channels; at += 32) {
                sum += grad[at] * quotient[at];
                grad_sums[at] = grad[at] * inverse;
            }
            for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
        }
        float scale = write_halves(grad + row * channels, channels, inverse, grad_halves + row * PACKED, parts[1]);
        if (lane == 0) grad_scale[row] = scale, grad_total[row] = -sum * inverse;
    }

    __shared__ Found all[2][THREADS / 32];
    for (int part = 0; part < 2; ++part) {
        parts[part] = join_lanes(parts[part]);
        if (lane == 0) all[part][warp] = parts[part];
    }
    __syncthreads();
    if (lane || warp > !keys) return;
    Found mine = {};
    for (int w = 0; w < THREADS / 32; ++w) join(mine, all[warp][w]);
    found[(p * 3 + (keys ? 0 : 1 + warp)) * slices + slice] = mine;
}

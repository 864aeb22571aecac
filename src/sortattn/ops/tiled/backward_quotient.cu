// The backward pass of a quotient, which comes before backward.cu.
//
// Set by cuda_kernels.py: NUMBER (float or double), KERNEL (a name of Kind), EPSILON (of the Riesz kernels).

#include "kinds.cu"

constexpr int THREADS = 128;

// The gradients by the sums and by the total of a row, from that by their quotient; a warp has a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_quotient(const T *grad, const T *quotient, const T *total, T *grad_sums, T *grad_total, long long count,
                      long long channels) {
    long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= count) return;
    T whole = total[row], inverse = fabs(whole) < T(SINGLE ? 0x1p-126 : 0x1p-1022) ? T(0) : 1 / whole, sum = 0;
    for (long long i = row * channels + threadIdx.x % 32; i < (row + 1) * channels; i += 32) {
        sum += grad[i] * quotient[i];
        grad_sums[i] = grad[i] * inverse;
    }
    for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (threadIdx.x % 32 == 0) grad_total[row] = -sum * inverse;
}

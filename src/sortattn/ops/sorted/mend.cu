// Queries whose sums around wound lines cancel, see cells.cu and spool.cu, are summed key by key: few, as lines with
// many are not wound.
//
// Macros: those of given.cu.

#include "given.cu"

static_assert(PARTS == 1, "all channels of a row at a time");
// threads of a block, each for a key of a tile, and its queries, of which it looks for those; threads of a channel
constexpr int THREADS = 256, QUERIES = 64, SHARES = THREADS / WIDTH;
// dimensions of a query in shared memory, at a time
constexpr int DIMS = 64;

// For every query of `points (heads, number, dims)` that is `unsure (heads, number)`: its sums, in place of what is in
// `out (heads, number, channels)` and `out_extra (heads, number)`, of the spline of height `scale` whose ends are
// `pitch` bandwidths away; of sixteen bits the mean alone.
extern "C" __global__ void __launch_bounds__(THREADS)
    mend(const given_t *points, const given_t *keys, const given_t *rows, const real *weights, const double *taus,
         double tau, double pitch, double scale, const bool *unsure, given_t *out, real *out_extra, index_t number,
         index_t count, index_t dims, index_t channels) {
    __shared__ real query[DIMS], scores[THREADS], sums[THREADS];
    index_t blocks = (number + QUERIES - 1) / QUERIES, p = blockIdx.x / blocks, first = blockIdx.x % blocks * QUERIES;
    int column = threadIdx.x % WIDTH, share = threadIdx.x / WIDTH;
    index_t last = min(first + QUERIES, number);
    bool mine = first + threadIdx.x < last && unsure[p * number + first + threadIdx.x];
    if (!__syncthreads_or(mine)) return;
    Scalars scalars(weights, p * count);
    double period = pitch * (taus ? taus[p] : tau), inverse = 1.0 / period;
    rows += p * count * STRIDE, keys += p * count * dims;
    for (index_t m = first; m < last; m++) {
        if (!unsure[p * number + m]) continue;
        real total = real(0), sum = real(0);
        for (index_t tile = 0; tile < count; tile += THREADS) {
            index_t n = tile + threadIdx.x;
            real score = real(0);
            for (index_t d = 0; d < dims; d += DIMS) {
                __syncthreads();
                if (threadIdx.x < min(dims - d, index_t(DIMS)))
                    query[threadIdx.x] = widen(points[(p * number + m) * dims + d + threadIdx.x]);
                __syncthreads();
                for (int k = 0; n < count && k < min(dims - d, index_t(DIMS)); k++) {
                    // little may be left of the period
                    double left = period - fabs(double(query[k]) - double(widen(keys[n * dims + d + k])));
                    if (left > 0.0) score += real(left * inverse);
                }
            }
            scores[threadIdx.x] = score *= real(scale);
            if (score != real(0)) total += score * scalars[int(n)];
            __syncthreads();
            for (int i = share; i < THREADS && tile + i < count; i += SHARES) {
                // a row that is not seen may be anything
                if (scores[i] != real(0)) sum += scores[i] * widen(rows[(tile + i) * STRIDE + column]);
            }
        }
        auto reduced = [&](real x, int some) {
            __syncthreads();
            sums[threadIdx.x] = x;
            __syncthreads();
            real all = real(0);
            for (int i = int(threadIdx.x) % some; i < THREADS; i += some) all += sums[i];
            return all;
        };
        sum = reduced(sum, WIDTH);
        total = reduced(total, 1);
#if NARROW
        real mean = total < real(1.17549435e-38) ? real(0) : sum / total;
        if (share == 0 && column < channels) out[(p * number + m) * channels + column] = given_t(narrow(mean, real(0)));
#else
        if (share == 0) out[(p * number + m) * channels + column] = sum;
        if (threadIdx.x == 0) out_extra[p * number + m] = total;
#endif
    }
}

// The gradients of queries and keys of an additive kernel whose slope is made of steps, in float32:
// sum over n of dS[m][n] slope(q[m][d] - k[n][d]), tile by tile; nothing of size M x N leaves the chip.
//
// A block has 64 rows of its own, queries or keys, and walks over the rows of the other kind, 64 at a time; two warps
// have 16 of its own, each of them half of the dimensions. The own rows are sorted in every dimension, once; a
// coordinate of another row is then a place among them, and a step one addition of halves that saturates: two at a
// time, exact, with its mean at a tie. The steps of one own row, 16 dimensions and 16 other rows are an operand of
// tensor cores; the other is dS, a large and a small half in columns side by side, so that the product has the digits
// of float32. The same call has the same bits.
//
// Set by cuda_kernels.py: NUMBER (float), KERNEL (a name of Kind), SHARED (bytes), BLOCKS (at least, on a
// multiprocessor), EPSILON (of the Riesz kernels), COARSE (1 for inputs of 16 bits: of two halves the large ones
// alone). What prepare.cu makes of the vectors comes first.

#include "kinds.cu"

#include "packed.cu"

#include "slope_block.cu"

#include "places.cu"

#include "steps.cu"

#include "score_gradients.cu"

#include "single_slopes.cu"

inline void slopes_of(const Problem &problem, const Side &own, const Side &other, int first, const Numbers &numbers,
                      Gradients gradients, double *moment) {
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    Lane lane;
    int dims = problem.dims, left = own.count - first;
    if (left <= FEW) return slopes_of_few(problem, own, other, first, numbers, gradients, moment);
    if (threadIdx.x < OWN) shared.own_mark[threadIdx.x] = problem.mark(problem.keys, first + threadIdx.x);
    sort_own(shared, own.points + (long long)first * dims, left, dims, numbers.scale);
    __syncthreads();
    int reach = shared.own_mark[0];
    for (int i = 1; i < OWN; ++i) reach = max(reach, shared.own_mark[i]);

    Scores scores(shared, problem, own, first);
    float running[SUMS][2][4][2] = {};
    // of tiles that factors do not serve
    float apart[DECAY ? 16 : 1] = {};
    // a point in the middle of the own ones
    float origin = DECAY ? shared.sorted[min(left, OWN) / 2 * WIDTH + threadIdx.x % WIDTH] : 0.0f;
    int now = next_tile(shared, problem, other, 0, reach);
    if (now < other.count) fetch(shared, other, now, dims);
#pragma unroll 1
    while (now < other.count) {
        arrive();
        __syncthreads();
        int here = min(other.count - now, OTHER);
        float score[OTHER / 16][4];
        scores.make(shared, left, here, score);
        int filled = (here + 15) / 16 * 16;
        find_places<0>(shared, numbers, filled);
        if constexpr (STEPS > 1) find_places<1>(shared, numbers, filled), find_places<2>(shared, numbers, filled);
        bool far = DECAY && find_factors(shared, origin, numbers.rate, here);
        far = __syncthreads_or(far);
        if (far) {
            add_apart(shared, own, score, first, dims, numbers, apart);
            __syncthreads();
        } else
            keep_weights(shared, score);
        now = next_tile(shared, problem, other, now + OTHER, reach);
        if (now < other.count) fetch(shared, other, now, dims);
        if (far) continue;
        __syncthreads();

        // nothing to do for a warp beyond the last own row
        if (lane.base >= left) continue;
        float back[4];
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
            float up;
            reach_of(fmaxf(shared.most[0][lane.row(quad)], shared.most[1][lane.row(quad)]), up, back[quad]);
        }
        if (here <= 16)
            add_rows<1>(shared, 0, back, running);
        else
#pragma unroll 1
            for (int start = 0; 16 * start < here; start += TOGETHER) add_rows<TOGETHER>(shared, start, back, running);
    }

    join_totals(shared, scores);
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
        int row = first + lane.row(quad);
        float total = shared.totals[lane.row(quad)];
        if (row < own.count)
#pragma unroll
            for (int b = 0; b < 2; ++b)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int d = lane.dim(b, h);
                    if (d >= dims) continue;
                    float sum = running[0][b][quad][h], gradient = SIGNS ? total - 2 * sum : sum;
                    if constexpr (DECAY) {
                        // an own point far away from all others has no sums, and its factor may be infinite
                        float middle = shared.sorted[min(left, OWN) / 2 * WIDTH + d];
                        float x = (own.points[(long long)row * dims + d] - middle) * numbers.rate;
                        x = fminf(fmaxf(x, -100.0f), 100.0f);
                        gradient = power_of_two(x) * running[1][b][quad][h] - power_of_two(-x) * sum;
                        gradient = gradient / 2 + apart[8 * b + 2 * quad + h];
                    }
                    gradients.write(own, row, d, dims, gradient, total, numbers);
                }
    }
    gradients.leave(moment);
}

// Blocks of queries come first, problem by problem, then those of keys. `moments`, if there are any: per block the sum
// of (point - origin) gradient.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    slopes(const float *query, const float *key, const unsigned *grad_halves, const float *grad_scale,
           const float *grad_total, const unsigned *value_halves, const float *value_scale, const float *weight,
           const float *bandwidth, float *grad_query, float *grad_key, double *moments, long long problems,
           long long rows, long long columns, long long dims, long long each, long long causal, double tau) {
    unsigned down = (rows + OWN - 1) / OWN, across = (columns + OWN - 1) / OWN, block = blockIdx.x;
    bool keys = block >= problems * down;
    if (keys) block -= problems * down;
    long long p = block / (keys ? across : down);
    int tile = block % (keys ? across : down);
    Problem problem{int(rows),
                    int(columns),
                    int(dims),
                    int(each),
                    causal != 0,
                    weight ? weight + p * columns : nullptr,
                    grad_total + p * rows,
                    keys};
    auto side = [&](bool of_keys) {
        long long start = p * (of_keys ? columns : rows);
        return Side{(of_keys ? key : query) + start * dims, (of_keys ? value_halves : grad_halves) + start * PACKED,
                    (of_keys ? value_scale : grad_scale) + start, int(of_keys ? columns : rows)};
    };
    Side own = side(keys), other = side(!keys);
    Numbers numbers(bandwidth ? bandwidth[p] : float(tau), nullptr, 0);
    if (!bandwidth) numbers.rest = float(tau * numbers.scale - numbers.edge);
    // the last queries first: with a causal mask they have the most to do
    int first = (keys ? tile : int(down) - 1 - tile) * OWN;
    float *grad = keys ? grad_key + p * columns * dims : grad_query + p * rows * dims;
    slopes_of(problem, own, other, first, numbers, {grad, columns ? key + p * columns * dims : nullptr},
              moments ? moments + blockIdx.x : nullptr);
}

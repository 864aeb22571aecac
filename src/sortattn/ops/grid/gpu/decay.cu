// From nodes to nodes for exponentials, without a product: a walk down the nodes of a dimension, and one up.
//
// With S_i what the keys have left at node i, f_i the fall of the kernel from node i to the next one, and
//
//     L_i = S_i + f_i-1 L_i-1,    R_i = S_i + f_i R_i+1,
//
// all keys up to node i, and all from it on, the sum F_i = L_i + R_i - S_i changes by (1 - f_i) (R_i+1 - L_i), which
// keeps its digits in narrow cells. A thread has a channel, and one more than channels the sums of weights.
//
// Set by decay.py: GP, STATS, CHANNELS (of a block), ROW (channels in all), APART (see transform.py).

#include "halves.cu"

constexpr int THREADS = CHANNELS + 32, COLUMNS = CHANNELS + 1;

struct Cell {
    // the fall to the next node, and one less that
    float fall, rest;
    // what is added at the node on the diagonal
    float extra;
};

// A channel: what it is at every node, and from it on, are COLUMNS numbers apart, as others have theirs between.
struct Channel {
    float *shares, *behind;
    const Cell *cells;
    float size;
    int count;

    // F at the first node, from ramps that are `STEP` numbers apart, of which the last is one everywhere
    template <int STEP> float walk_down(const float *ramps) const {
        float sum = 0, ramp = 0, everything = ramps[(GP - 1) * STEP];
#pragma unroll 32
        for (int i = GP - 1; i >= 0; --i) {
            float before = i == 0 ? everything : i < count ? ramps[(i - 1) * STEP] : 0;
            float share = before - ramp;
            sum = fmaf(cells[i].fall, sum, share);
            shares[i * COLUMNS] = share, behind[i * COLUMNS] = sum;
            ramp = before;
        }
        return fmaf(size, sum, cells[0].extra * shares[0]);
    }

    // Hands F at every node and the change behind it to `take`: of weights above zero F is a sum of such, however
    // small.
    template <class Take> void walk_up(Take take) const {
        float upto = shares[0], extra = cells[0].extra * upto;
#pragma unroll 8
        for (int i = 0; i < GP; ++i) {
            bool last = i == GP - 1;
            float share = last ? 0 : shares[(i + 1) * COLUMNS], next = last ? 0 : cells[i + 1].extra * share;
            float rest = last ? 0 : behind[(i + 1) * COLUMNS];
            float change = fmaf(size * cells[i].rest, rest - upto, next - extra);
            take(i, fmaf(size, fmaf(cells[i].fall, rest, upto), extra), i < count - 1 ? change : 0);
            upto = fmaf(cells[i].fall, upto, share), extra = next;
        }
    }
};

// Rounds changes such that F is right at every node, see `_rounded` in transform.py: behind a node when that behind
// the next one is known.
struct Levels {
    float sum, level, change;

    Levels(float first) : sum(first), level(first), change(0) {}
    float next(float coming) {
        float most = fmaxf(fabsf(change), fabsf(coming));
        float unit = 2 * fmaxf(power_below(most) * 0.0009765625f, 5.960464477539063e-8f);
        sum += change, change = coming;
        float last = level;
        level = __fadd_rn(__fadd_rn(sum, unit * 12582912.0f), unit * -12582912.0f);
        return level - last;
    }
};

// Of line x of all dimensions of all heads, and channels of block y, from `table (heads, dims, GP, ROW)` and `counts
// (heads, dims, GP)` what transform.py's kernel makes of them. `jumps` numbers of `kinks` are where slopes jump, then
// by how much. `factor (heads)` multiplies everything, if it is given.
extern "C" __global__ void __launch_bounds__(THREADS)
    change_levels(const float *table, const float *counts, const float *nodes, const float *stats,
                  const float *bandwidth, const float *numbers, const float *kinks, const int *largest,
                  const float *factor, unsigned short *out, float *base, float *normaliser, float *unscale,
                  long long jumps, long long dims, long long counted) {
    __shared__ Cell cells[GP];
    __shared__ float shares[GP * COLUMNS], behind[GP * COLUMNS];
    long long line = blockIdx.x, head = line / dims;
    int thread = threadIdx.x, channel = blockIdx.y * CHANNELS + thread, count = counted;
    float scalar = factor ? factor[head] : 1, size = numbers[0], jump = 0;
    for (int k = 0; k < jumps; ++k) jump += kinks[k] == 0 ? kinks[jumps + k] : 0;
    for (int i = thread; i < GP; i += THREADS) {
        const float *node = nodes + line * GP + i;
        float step = i < count - 1 ? (node[0] - node[1]) / bandwidth[head] : 0;
        cells[i] = {expf(step), -expm1f(step), i < count ? -jump * stats[(line * STATS + STATS - 1) * GP + i] : 0};
    }
    // a number that nothing of the head exceeds, see `bound` in matrix.py
    float most = 2 * fabsf(size) * __int_as_float(largest[head]) * fabsf(scalar) * (2.0f * GP);
    float scale = exp2f(floorf(14 - log2f(fmaxf(most, 1e-30f))));
    if (!(most < __int_as_float(0x7f800000))) scale = __int_as_float(0x7fffffff);
    __syncthreads();
    Channel own{shares + thread, behind + thread, cells, size, count};
    if (thread < CHANNELS && channel < ROW) {
        float first = own.walk_down<ROW>(table + line * GP * ROW + channel) * scalar;
        base[line * ROW + channel] = first;
        unsigned short *to = out + line * GP * ROW + channel;
        // behind the last node there is no change: F at the first one stands there
        unsigned start = pack(first * scale, 0);
        Levels levels(unpack(start).x);
        own.walk_up([&](int i, float, float change) {
            change *= scalar * scale;
            if (APART)
                to[i * ROW] = pack(change, 0);
            else if (i)
                to[(i - 1) * ROW] = i < count ? pack(levels.next(change), 0) : 0;
            else
                levels.change = change;
        });
        to[(GP - 1) * ROW] = start;
    } else if (thread == CHANNELS && blockIdx.y == 0) {
        if (line % dims == 0) unscale[head] = 1 / scale;
        float2 *to = reinterpret_cast<float2 *>(normaliser + line * GP * 2);
        own.walk_down<1>(counts + line * GP);
        own.walk_up([&](int i, float level, float change) { to[i] = {level * scalar, change * scalar}; });
    }
}

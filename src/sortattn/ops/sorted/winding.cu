// How lines are wound, which the data decide.
//
// Macros: CELLS (how many a line may have), STRAYS (keys that may be in others) and, for points of sixteen bits, NARROW
// and those of half.cu.

#include "wind.cu"

#if NARROW
#include "half.cu"
typedef half_t point_t;
#else
typedef float point_t;
typedef long long index_t;
__device__ inline float widen(float x) { return x; }
#endif

// threads of a block, and lines, what it reads of a sector of float32
constexpr int THREADS = 512, LINES = 8, EACH = THREADS / LINES;
// keys and queries of a sample; of these so many may be close to the edge of all they see, and so many pairs tied
constexpr int KEYS = 256, QUERIES = 64, FEW = 4, FEW_TIES = 2;
// nothing is near it
constexpr float FAR_AWAY = 3e38f;

// The i-th of `some` points of a sample of `all`, of which no period hides any.
__device__ inline index_t sampled(int i, int some, index_t all) { return (i * all / some + i * 37) % all; }
__device__ inline float finite_or_zero(float x) { return x - x == 0.0f ? x : 0.0f; }

// Wind the lines of `keys (heads, count, dims)` in cells of `pitch` bandwidths, if these are at most CELLS and if few
// of the queries are so far from all keys that the sums of cells would cancel: these lose as many digits as what a
// query sees is less than what is in the cells around. Keys of which the `weights (heads, count)`, if there are any,
// are zero are not seen. Of `slopes`, which ties and what rounding took from the bandwidth would change, lines are
// wound only if there are no such among the sample. With STRAYS, which slopes do not have, keys may be in more cells:
// those around most of a sample are taken, if no more are in others.
extern "C" __global__ void __launch_bounds__(THREADS)
    wind(const point_t *keys, const point_t *queries, const float *weights, const double *taus, double tau,
         double pitch, Winding *windings, index_t count, index_t number, index_t dims, index_t slopes) {
    __shared__ float ends[2][THREADS];
    // lines begin in different banks
    __shared__ float sample[LINES][KEYS + 1];
    __shared__ word parts[LINES][KEYS + 1];
    __shared__ int at_edge[LINES], tied[LINES], best[LINES], strays[LINES];
    index_t groups = (dims + LINES - 1) / LINES, head = blockIdx.x / groups, d = blockIdx.x % groups * LINES;
    int mine = threadIdx.x % LINES, thread = threadIdx.x / LINES;
    bool here = d + mine < dims;
    keys += head * count * dims + d + mine, queries += head * number * dims + d + mine;
    float least = __uint_as_float(0x7f800000u), most = -least;
    if (here) {
#pragma unroll 16
        for (index_t n = thread; n < count; n += EACH) {
            float x = finite_or_zero(widen(keys[n * dims]));
            least = fminf(least, x), most = fmaxf(most, x);
        }
    }
    ends[0][threadIdx.x] = least, ends[1][threadIdx.x] = most;
    if (threadIdx.x < LINES) at_edge[threadIdx.x] = tied[threadIdx.x] = best[threadIdx.x] = strays[threadIdx.x] = 0;
    __syncthreads();
    for (int i = mine; i < THREADS; i += LINES) least = fminf(least, ends[0][i]), most = fmaxf(most, ends[1][i]);
    Winding winding;
    double period = pitch * (taus ? taus[head] : tau);
    winding.period = float(period), winding.inverse = 1.0f / winding.period;
    float part, first = winding.cell(least, part), last = winding.cell(most, part);
    // farther out cells could not be told apart
    bool near = winding.period > 0.0f && fmaxf(fabsf(first), fabsf(last)) < 4194304.0f && last - first < float(CELLS);
    if (slopes && double(winding.period) != period) near = false;
    winding.first = near ? int(first) : 0, winding.cells = near ? int(last - first) + 1 : 0;
    for (int i = thread; here && i < KEYS; i += EACH) {
        index_t n = sampled(i, KEYS, count);
        bool there = !weights || weights[head * count + n] != 0.0f;
        float x = finite_or_zero(widen(keys[n * dims]));
        sample[mine][i] = there ? x * winding.inverse : FAR_AWAY;
        parts[mine][i] = winding.wound(x) >> CELL_BITS;
    }
    __syncthreads();
    static_assert(KEYS % EACH == 0 && QUERIES % EACH == 0, "as many for every thread");
    if (STRAYS) {
        // the cells around one of the sample, those with most of the others
        auto begin_at = [&](int i) { return floorf(sample[mine][i * (KEYS / EACH)]) - float(CELLS / 2); };
        // the farthest keys have cells that are integers
        bool open = here && !near && winding.period > 0.0f && fmaxf(fabsf(first), fabsf(last)) < 1e9f;
        int inside = 0;
        for (int i = 0; open && i < KEYS; i++) {
            if (sample[mine][i] == FAR_AWAY) continue;
            float beyond = fmaxf(fminf(floorf(sample[mine][i]) - begin_at(thread), float(CELLS)), -1.0f);
            // those in the middle count most, as the sample does not have the farthest
            inside += max(0, min(int(beyond), CELLS - 1 - int(beyond)) + 1);
        }
        if (open) atomicMax(best + mine, inside * EACH + thread);
        __syncthreads();
        float begin = begin_at(best[mine] % EACH), end = begin + float(CELLS);
        open = open && fabsf(begin) < 4194304.0f;
        int missed = 0;
#pragma unroll 16
        for (index_t n = thread; n < (open ? count : 0); n += EACH) {
            // as `cell` finds it, by the sign of what is left
            float x = finite_or_zero(widen(keys[n * dims]));
            missed += __fmaf_rn(-begin, winding.period, x) < 0.0f || __fmaf_rn(-end, winding.period, x) >= 0.0f;
        }
        if (missed) atomicAdd(strays + mine, missed);
        __syncthreads();
        if (open && strays[mine] <= STRAYS) near = true, winding.first = int(begin), winding.cells = CELLS;
    }
    for (int m = thread; here && near && m < QUERIES; m += EACH) {
        float x = finite_or_zero(widen(queries[sampled(m, QUERIES, number) * dims])), seen = 0.0f, around = 0.0f;
        word part = winding.wound(x) >> CELL_BITS;
        int equal = 0;
        x *= winding.inverse;
        for (int i = 0; i < KEYS; i++) {
            float t = sample[mine][i];
            seen += fmaxf(1.0f - fabsf(x - t), 0.0f);
            around += fabsf(floorf(x) - floorf(t)) <= 1.0f ? 1.0f : 0.0f;
            equal += parts[mine][i] == part;
        }
        // with strays, those too that see nothing
        if (seen < EDGE * around || (STRAYS && seen == 0.0f)) atomicAdd(at_edge + mine, 1);
        if (slopes && equal) atomicAdd(tied + mine, equal);
    }
    __syncthreads();
    if (at_edge[mine] > FEW || tied[mine] > FEW_TIES) winding.cells = 0;
    if (here && thread == 0) windings[head * dims + d + mine] = winding;
}

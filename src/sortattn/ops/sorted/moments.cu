// What comes before a walk that begins in the middle of a track: moments of blocks of sources.

#include "track.cu"

// Moments of every block of sources around the first source behind it, and with BOTH around its own first source too:
// (channel blocks, tracks, moment_places, SIZE).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    summarise(const real *places, const int *order, const real *rows, const real *weights, const double *table,
              const double *taus, double tau, real *moments, index_t tracks, index_t sides, index_t count, index_t dims,
              index_t stride, index_t mirrored, const Winding *windings) {
    __shared__ Source lists[WARPS][32];
    index_t blocks = (count + BLOCK - 1) / BLOCK;
    index_t job = blockIdx.x * index_t(WARPS) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (job >= tracks * blocks) return;
    Source *list = lists[threadIdx.x / 32];
    index_t block = job % blocks, track = job / blocks, p = track / dims / sides, side = track / dims % sides;
    if (is_wound(windings, p * dims + track % dims)) return;
    Line line(places, order, p * dims + track % dims, count, mirrored >> side & 1);
    if (FOLDED) line.keep_half(false);
    // not `Rows`: where an address takes less time the compiler has fewer rows on their way, 2.1 instead of 1.5 ms
    const char *source_rows =
        reinterpret_cast<const char *>(rows + p * count * stride + blockIdx.y * WIDTH + lane * VEC);
    unsigned step = unsigned(stride * sizeof(real));
    auto load = [&](int index) {
        return *reinterpret_cast<const Row *>(source_rows + index_t(unsigned(index)) * step);
    };
    real rate = real(table[TABLE - 1] / (taus ? taus[p] : tau));
    int start = int(block * BLOCK), stop = min(start + BLOCK, line.count);
    if (start >= stop) return;
    real origin = line.place(min(stop, line.count - 1)), begin = line.place(start);
    Numbers<double> total;
    total.clear();
    for (int first = start; first < stop; first += 32) {
        // behind the last source the weight is zero
        bool there = first + lane < stop;
        int index = there ? line.index(first + lane) : 0;
        real place = there ? line.place(first + lane) : origin, extra[SUMS];
        real scalar = there ? Scalars(weights, p * count)[index] : real(0);
        __syncwarp();
        list[lane].index = index;
#pragma unroll
        for (int half = 0; half < SUMS; half += POWERS) {
            real z = half ? place - begin : origin - place;
            real weight = !there ? real(0) : RATE ? exponential(-rate * z) : real(1);
#pragma unroll
            for (int l = half; l < half + POWERS; l++, weight *= z) {
                list[lane].weight[l] = weight;
                extra[l] = weight * scalar;
            }
        }
        __syncwarp();
        Numbers<real> sum;
        sum.clear();
#pragma unroll
        for (int i = 0; i < 32; i += CHUNK) {
            Row some[CHUNK];
#pragma unroll
            for (int k = 0; k < CHUNK; k++) some[k] = load(list[i + k].index);
#pragma unroll
            for (int k = 0; k < CHUNK; k++) sum.add_row(list[i + k].weight, some[k]);
        }
        total.add_rows(sum);
#pragma unroll
        for (int l = 0; l < SUMS; l++) total.extra[l] += double(sum_lanes(extra[l]));
    }
    total.store(moments + ((blockIdx.y * tracks + track) * moment_places(blocks) + block) * SIZE, lane);
}

// From the moments of every block to those of all sources before it, around its first source; in place. What stands
// behind the last block are those of all sources. With BOTH, other warps go down from the top, to those of all sources
// from its first one on. Of a compact kernel, each warp sums a group of blocks, around the first source behind it.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    accumulate(const real *places, const int *order, const double *table, const double *taus, double tau, real *moments,
               index_t tracks, index_t sides, index_t count, index_t dims, index_t mirrored, const Winding *windings) {
    index_t blocks = (count + BLOCK - 1) / BLOCK;
    index_t groups = (blocks + GROUP - 1) / GROUP, jobs = COMPACT ? groups : BOTH ? 2 : 1;
    index_t job = blockIdx.x * index_t(WARPS) + threadIdx.x / 32, track = job / jobs;
    int lane = threadIdx.x % 32;
    if (track >= tracks) return;
    index_t p = track / dims / sides, side = track / dims % sides;
    if (is_wound(windings, p * dims + track % dims)) return;
    Line line(places, order, p * dims + track % dims, count, mirrored >> side & 1);
    if (FOLDED) line.keep_half(false);
    double rate = table[TABLE - 1] / (taus ? taus[p] : tau);
    real *start = moments + (blockIdx.y * tracks + track) * moment_places(blocks) * SIZE;
    int number = (line.count + BLOCK - 1) / BLOCK;
    int first = COMPACT ? int(job % jobs) * GROUP : 0, last = COMPACT ? min(first + GROUP, number) : number;
    bool down = BOTH && job % 2;
    auto place = [&](int block) { return start + block * SIZE + (down ? HALF : 0); };
    // what the moments before and after this block are around
    auto origin = [&](int block) { return double(line.place(min(block * BLOCK, line.count - 1))); };
    auto block_of = [&](int i) { return down ? number - 1 - i : i; };
    Numbers<double, POWERS> state;
    // the next blocks are on their way while one is added
    Numbers<real, POWERS> next[AHEAD];
    state.clear();
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        if (first + k < last) next[k].load(place(block_of(first + k)), lane);
    }
    // lane by lane, those of thirty-two blocks
    double distances = 0.0;
    for (int several = first; several < last; several += AHEAD) {
        if ((several - first) % 32 == 0) {
            int block = block_of(min(several + lane, last - 1));
            distances = origin(block + 1) - origin(block);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int i = several + k, block = block_of(i);
            if (i >= last) break;
            double distance = __shfl_sync(ALL, distances, (i - first) % 32);
            Numbers<real, POWERS> here = next[k];
            if (i + AHEAD < last) next[k].load(place(block_of(i + AHEAD)), lane);
            __syncwarp();
            if (!down && !COMPACT) state.store(place(block), lane);
            move_side<true, 0>(state, distance, rate);
            state.add_rows(here);
#pragma unroll
            for (int l = 0; l < POWERS; l++) state.extra[l] += double(here.extra[l]);
            if (down) state.store(place(block), lane);
        }
    }
    if (!down) state.store(start + (blocks + (COMPACT ? 1 + job % jobs : 0)) * SIZE, lane);
}

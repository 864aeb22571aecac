// Runs of stretches of a line, which warps of a block take one by one, as fade.cu and relax.cu walk along them.
//
// Macros: those of class_line.cu and tensor.cu, which come before, and CELLS (runs for each warp).

constexpr int RUNS = CREW * CELLS;
// a class that is as far from the first key of its stretch may be far from all; beyond the other a weight is zero
constexpr float NEAR = 8.0f, FARTHEST = 300.0f;

struct Coordinate {
    __device__ real operator()(half_t code) const { return number_of(code); }
};

// The first stretch of a run.
__device__ inline int begin_of(int run, int stretches) { return int(index_t(stretches) * run / RUNS); }

// The next run that nobody has taken.
__device__ inline int take_run(int &next, int lane) {
    int run = lane == 0 ? atomicAdd(&next, 1) : 0;
    return __shfl_sync(ALL, run, 0);
}

// Where runs begin, and behind the last one, and the first class of each, for all threads of a block.
__device__ inline void find_runs(const Route &along, int stretches, real (&edges)[RUNS + 1], int (&firsts)[RUNS + 1]) {
    for (int i = threadIdx.x; i <= RUNS; i += 32 * CREW) {
        int first = begin_of(i, stretches), low = 0, high = along.classes.count;
        real t = edges[i] = number_of(along.points.code(along.points.entry(first * KEYS)));
        while (low < high) {
            int half = (low + high) / 2;
            if (along.classes.place(half) >= t)
                high = half;
            else
                low = half + 1;
        }
        firsts[i] = first == 0 ? 0 : first == stretches ? along.classes.count : low;
    }
}

// a rate of e^-x as that of 2^-x
constexpr double NATURAL = 1.4426950408889634;

// The factor of distances by which the exponential is 2^-x: a number, however large or small bandwidths are.
__device__ inline real unit_of(double rate, double tau) {
    return min(max(real(rate / tau), real(1.17549435e-38)), real(3e38));
}

// The samples that nodes are placed along, in order: one block sorts a line, in registers where it can.
//
// Set by order.py: POWER, lines have up to 2^POWER numbers, EACH, of which a thread has so many.

constexpr int SIZE = 1 << POWER, THREADS = SIZE / EACH;

// Numbers i and i ^ j, the lesser one first where `up`.
inline void exchange(float &one, float &other, bool up) {
    float least = fminf(one, other), most = fmaxf(one, other);
    one = up ? least : most, other = up ? most : least;
}

// What a thread keeps of its number and another one, which another thread has.
inline float chosen(float own, float other, bool least) { return least ? fminf(own, other) : fmaxf(own, other); }

// Line x of `lines (number, room)`, whose first `used` numbers go to the first 2^POWER, ascending, then infinities.
extern "C" __global__ void __launch_bounds__(THREADS) sort_lines(float *lines, long long room, long long used) {
    __shared__ float shared[SIZE];
    float *line = lines + blockIdx.x * room;
    int thread = threadIdx.x;
    float own[EACH];
    // in any order, so neighbours have neighbours
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int at = i * THREADS + thread;
        own[i] = at < used ? line[at] : __int_as_float(0x7f800000);
    }
    // sorted runs become twice as long, every other one the other way round; a thread has neighbours
#pragma unroll
    for (int run = 2; run <= SIZE; run *= 2) {
#pragma unroll
        for (int step = run / 2; step > 0; step /= 2) {
            if (step < EACH) {
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    if ((i & step) == 0) exchange(own[i], own[i ^ step], ((thread * EACH + i) & run) == 0);
            } else {
                bool least = ((thread * EACH & run) == 0) == ((thread * EACH & step) == 0);
                int distance = step / EACH;
                if (distance < 32) {
#pragma unroll
                    for (int i = 0; i < EACH; ++i)
                        own[i] = chosen(own[i], __shfl_xor_sync(~0u, own[i], distance), least);
                } else {
                    __syncthreads();
#pragma unroll
                    for (int i = 0; i < EACH; ++i) shared[i * THREADS + thread] = own[i];
                    __syncthreads();
#pragma unroll
                    for (int i = 0; i < EACH; ++i)
                        own[i] = chosen(own[i], shared[i * THREADS + (thread ^ distance)], least);
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) shared[thread * EACH + i] = own[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) line[i * THREADS + thread] = shared[i * THREADS + thread];
}

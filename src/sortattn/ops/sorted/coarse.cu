// Points of 16 bits: a line of them has few distinct values, and what is the same for all points of one value is
// computed once.
//
// Macros: HALF_PRECISION (1 bfloat16, 2 float16), WIDTH (channels that a warp takes: 32, 64 or 128).

typedef long long index_t;
typedef float real;

#include "narrow.cu"
#include "reciprocal.cu"

constexpr unsigned ALL = 0xffffffffu;
constexpr int THREADS = 1024;
// lines of a block that classifies
constexpr int LINES = 8;
// words with a bit for each of the values
constexpr int WORDS = 65536 / 32;

// Bits that sort as an unsigned integer: negative ones are flipped whole and others in the sign.
__device__ inline unsigned pattern(unsigned short x) {
    // -0.0 ties with 0.0, and what is no finite number stands at zero
    if ((x & EXPONENT) == EXPONENT || x == 0x8000) x = 0;
    return x & 0x8000 ? 0xffffu ^ x : 0x8000u ^ x;
}
__device__ inline float value(unsigned pattern) {
    return widen(static_cast<unsigned short>(pattern & 0x8000 ? pattern ^ 0x8000 : ~pattern));
}

// The distinct values of every dimension of `points (heads, count, dims)`: how many they are, `distinct (heads, dims)`,
// in order `places (heads, dims, capacity)`, and which of them a point has, `classes (heads, count, dims)`.
extern "C" __global__ void __launch_bounds__(THREADS)
    classify(const unsigned short *points, int *distinct, float *places, unsigned short *classes, index_t count,
             index_t dims, index_t capacity) {
    extern __shared__ unsigned bits[];
    unsigned short *before = reinterpret_cast<unsigned short *>(bits + LINES * WORDS);
    index_t groups = (dims + LINES - 1) / LINES, p = blockIdx.x / groups, first = blockIdx.x % groups * LINES;
    int lines = int(min(dims - first, index_t(LINES))), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    points += p * count * dims + first, classes += p * count * dims + first;
    for (int i = threadIdx.x; i < LINES * WORDS; i += THREADS) bits[i] = 0;
    __syncthreads();
    // neighbouring threads have neighbouring dimensions
    int line = threadIdx.x % LINES;
    if (line < lines) {
#pragma unroll 8
        for (index_t n = threadIdx.x / LINES; n < count; n += THREADS / LINES) {
            unsigned x = pattern(points[n * dims + line]);
            unsigned *word = bits + line * WORDS + x / 32, bit = 1u << x % 32;
            // most have been there before
            if (!(*word & bit)) atomicOr(word, bit);
        }
    }
    __syncthreads();
    if (warp < lines) {
        int sum = 0;
        for (int i = lane; i < WORDS; i += 32) {
            int mine = __popc(bits[warp * WORDS + i]), here = mine;
#pragma unroll
            for (int offset = 1; offset < 32; offset <<= 1) {
                int other = __shfl_up_sync(ALL, here, offset);
                if (lane >= offset) here += other;
            }
            before[warp * WORDS + i] = sum + here - mine;
            sum += __shfl_sync(ALL, here, 31);
        }
        if (lane == 0) distinct[p * dims + first + warp] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < lines * WORDS; i += THREADS) {
        float *place = places + (p * dims + first + i / WORDS) * capacity + before[i];
        for (unsigned left = bits[i]; left; left &= left - 1) *place++ = value(i % WORDS * 32 + __ffs(left) - 1);
    }
    if (line < lines) {
#pragma unroll 8
        for (index_t n = threadIdx.x / LINES; n < count; n += THREADS / LINES) {
            unsigned x = pattern(points[n * dims + line]);
            int word = line * WORDS + x / 32;
            classes[n * dims + line] = before[word] + __popc(bits[word] & ((1u << x % 32) - 1));
        }
    }
}

constexpr int WARPS = 8;
// a lane has four channels of a row, so a warp has some rows at a time
constexpr int LANES = WIDTH / 4;
constexpr int TOGETHER = 32 / LANES;

struct alignas(16) Four {
    float at[4];
};

// Sum over the dimensions the rows `table (heads, dims, room, stride)` and scalars `extras` of every query's classes,
// and divide. They are those of classes `first ... first + room - 1`; `sums (heads, number, stride)` and `totals` hold
// what is not complete between two launches. `base (heads, stride)` and `base_total` are added to all, if not null.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    collect(const float *table, const float *extras, const unsigned short *classes, const int *distinct,
            const float *base, const float *base_total, const int *unfit, float *sums, float *totals,
            unsigned short *out, index_t number, index_t each, index_t dims, index_t room, index_t first,
            index_t channels, index_t stride, double floor) {
    index_t p = blockIdx.y, m = blockIdx.x * index_t(WARPS) + threadIdx.x / 32, row = p * number + m;
    int lane = threadIdx.x % 32, sub = lane / LANES, channel = lane % LANES * 4;
    if (m >= number) return;
    int most = 0;
    for (index_t d = lane; d < dims; d += 32) most = max(most, distinct[p * dims + d]);
    most = __reduce_max_sync(ALL, most);
    // complete before
    if (first && most <= first) return;
    bool complete = most <= first + room;
    table += p * dims * room * stride, extras += p * dims * room, classes += row * dims;
    float total = 0.0f;
    for (index_t part = 0; part < stride; part += WIDTH) {
        Four sum = {};
        for (index_t d = 0; d < dims; d += 32) {
            // of a dimension that is not there, or of another launch: none
            int mine = d + lane < dims ? int(classes[d + lane] - first) : -1;
            if (mine < 0 || mine >= room) mine = -1;
            if (part == 0 && mine >= 0) total += extras[(d + lane) * room + mine];
            // rows on their way at a time
            constexpr int CHUNK = TOGETHER < 4 ? 8 : 32 / TOGETHER;
            for (int k = 0; k < 32; k += CHUNK * TOGETHER) {
                Four rows[CHUNK];
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    index_t from = k + i * TOGETHER + sub;
                    int place = __shfl_sync(ALL, mine, int(from));
                    rows[i] = {};
                    if (place >= 0) {
                        rows[i] = *reinterpret_cast<const Four *>(table + ((d + from) * room + place) * stride + part +
                                                                  channel);
                    }
                }
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
#pragma unroll
                    for (int c = 0; c < 4; c++) sum.at[c] += rows[i].at[c];
                }
            }
        }
#pragma unroll
        for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
            for (int c = 0; c < 4; c++) sum.at[c] += __shfl_xor_sync(ALL, sum.at[c], offset);
        }
        if (part == 0) {
#pragma unroll
            for (int offset = 16; offset; offset >>= 1) total += __shfl_xor_sync(ALL, total, offset);
            if (first)
                total += totals[row];
            else if (base)
                total += base_total[p];
            __syncwarp();
            if (!complete && lane == 0) totals[row] = total;
        }
        float factor = unfit[row / each] ? not_a_number() : reciprocal(total, real(floor));
        const float *start = first ? sums + row * stride : base ? base + p * stride : nullptr;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            index_t to = part + channel + c;
            if (start) sum.at[c] += start[to];
            if (sub == 0 && !complete) sums[row * stride + to] = sum.at[c];
            if (sub == 0 && complete && to < channels) out[row * channels + to] = narrow(factor * sum.at[c]);
        }
    }
}

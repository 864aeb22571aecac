// From the means of every class, see class_line.cu, to queries: each adds up one row of every dimension, by its weight.
//
// Macros: those of half.cu, VEC (channels of a lane), PARTS (of the channels, each for a warp), WARPS (of a block),
// QUERIES (of a warp), those of order.cu and MARKED (extra scalars say which classes have lost digits, see spool.cu).

#include "half.cu"
#include "order.cu"
#include "search.cu"

typedef float real;
constexpr int WIDTH = 32 * VEC;
constexpr index_t STRIDE = index_t(PARTS) * WIDTH;

// a row of the table, of a lane
#if VEC == 1
struct Packed {
    half_t at;

    __device__ void add_to(real (&sum)[VEC], real weight) const { sum[0] += weight * widen(at); }
};
#else
struct alignas(2 * VEC) Packed {
    unsigned at[VEC / 2];

    __device__ void add_to(real (&sum)[VEC], real weight) const {
#pragma unroll
        for (int c = 0; c < VEC; c += 2) {
            real low, high;
            widen(at[c / 2], low, high);
            sum[c] += weight * low, sum[c + 1] += weight * high;
        }
    }
};
#endif
// numbers of classes of neighbouring queries, as they are read
struct alignas(2 * QUERIES) Some {
    unsigned word[QUERIES / 2];
};

// as in quotient.cu
__device__ inline real reciprocal(real total, real floor) {
    if (floor > real(0)) return real(1) / (total < floor ? floor : total);
    return (total < real(0) ? -total : total) < real(1.17549435e-38) ? real(0) : real(1) / total;
}

// Queries of the heads of a round: `out (heads, number, channels)`, the mean of their rows by the extras, NaN in heads
// that are `unfit (heads, group)`. `ranks (heads, dims, pitch)` are the classes. A query is `unsure (heads, number)` if
// it has less than `enough` for every class that has lost digits, of which there are `marks (heads, number)`.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gather(const half_t *ranks, const index_t *offsets, const int *rounds, const half_t *table, const real *extras,
           const int *unfit, half_t *out, const int *marks, bool *unsure, index_t round, index_t number, index_t dims,
           index_t pitch, index_t channels, index_t each, double floor, double enough) {
    int lane = threadIdx.x % 32, warp = own_warp();
    index_t tiles = (number + QUERIES * WARPS - 1) / (QUERIES * WARPS), begin = rounds[round];
    index_t jobs = (rounds[round + 1] - begin) * tiles;
    const char *rows = reinterpret_cast<const char *>(table + blockIdx.y * WIDTH + lane * VEC);
    for (index_t job = blockIdx.x; job < jobs; job += gridDim.x) {
        index_t p = begin + job / tiles, first = (job % tiles * WARPS + warp) * QUERIES;
        if (first >= number) continue;
        real sum[QUERIES][VEC] = {};
        real total[QUERIES] = {};
        for (index_t several = 0; several < dims; several += 32) {
            // a lane has the classes of one dimension
            bool there = several + lane < dims;
            Some mine = {};
            index_t offset = 0;
            real extra[QUERIES] = {};
            if (there) {
                index_t line = p * dims + several + lane;
                mine = *reinterpret_cast<const Some *>(ranks + line * pitch + first);
                offset = offsets[line];
#pragma unroll
                for (int q = 0; q < QUERIES; q++) {
                    extra[q] = extras[offset + (mine.word[q / 2] >> q % 2 * 16 & 0xffffu)];
                    total[q] += extra[q];
                }
            }
            int some = int(min(dims - several, index_t(32)));
#pragma unroll 2
            for (int d = 0; d < some; d++) {
                const char *line = rows + __shfl_sync(ALL, offset, d) * (STRIDE * sizeof(half_t));
                Packed row[QUERIES];
#pragma unroll
                for (int q = 0; q < QUERIES; q += 2) {
                    unsigned two = __shfl_sync(ALL, mine.word[q / 2], d);
                    row[q] =
                        *reinterpret_cast<const Packed *>(line + (two & 0xffffu) * unsigned(STRIDE * sizeof(half_t)));
                    row[q + 1] =
                        *reinterpret_cast<const Packed *>(line + (two >> 16) * unsigned(STRIDE * sizeof(half_t)));
                }
#pragma unroll
                for (int q = 0; q < QUERIES; q++) row[q].add_to(sum[q], __shfl_sync(ALL, extra[q], d));
            }
        }
#pragma unroll
        for (int q = 0; q < QUERIES; q++) {
            real all = total[q];
#pragma unroll
            for (int offset = 16; offset; offset >>= 1) all += __shfl_xor_sync(ALL, all, offset);
            if (first + q >= number) continue;
            bool spoilt = unfit[p * ((number + each - 1) / each) + (first + q) / each];
            if (MARKED && lane == 0 && blockIdx.y == 0) {
                index_t m = p * number + first + q;
                unsure[m] = all < real(enough) * marks[m] && !spoilt;
            }
            real factor = spoilt ? __int_as_float(0x7fffffff) : reciprocal(all, real(floor));
            half_t *row = out + (p * number + first + q) * channels;
#if VEC == 1
            index_t c = blockIdx.y * WIDTH + turned(lane);
            if (c < channels) row[c] = half_t(narrow(factor * sum[q][0], real(0)));
#else
#pragma unroll
            for (int i = 0; i < VEC; i += 2) {
                index_t c = blockIdx.y * WIDTH + turned(lane * VEC + i);
                unsigned two = narrow(factor * sum[q][i], factor * sum[q][i + 1]);
                if (channels % 2 == 0 && c < channels) {
                    *reinterpret_cast<unsigned *>(row + c) = two;
                } else {
                    if (c < channels) row[c] = half_t(two);
                    if (c + 1 < channels) row[c + 1] = half_t(two >> 16);
                }
            }
#endif
        }
    }
}

// Count in `marks (heads, number)`, of every query of the heads of a round, classes that have lost digits, on lines
// that are `doubtful`.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    doubt(const half_t *ranks, const index_t *offsets, const int *rounds, const real *extras, const int *doubtful,
          int *marks, index_t round, index_t number, index_t dims, index_t pitch) {
    index_t stop = rounds[round + 1] * dims;
    for (index_t line = rounds[round] * dims + blockIdx.x; line < stop; line += gridDim.x) {
        if (!doubtful[line]) continue;
        for (index_t m = threadIdx.x; m < number; m += 32 * WARPS) {
            real extra = extras[offsets[line] + ranks[line * pitch + m]];
            if (__float_as_uint(extra) & 1u) atomicAdd(marks + line / dims * number + m, 1);
        }
    }
}

// From the means of every class, see class_line.cu, to queries: each adds up one row of every dimension, by its weight.
//
// A lane has eight channels, sixteen bytes, and a few lanes side by side a row, so that a warp reads the rows of
// several queries at a time; those of the next dimension are on their way while these are added.
//
// Macros: those of half.cu, WIDTH (channels of a warp), PARTS (of the channels, each for a warp), WARPS (of a block),
// QUERIES (of a warp), RESIDENT (blocks of a multiprocessor), those of order.cu and MARKED (extra scalars say which
// classes have lost digits, see spool.cu).

#include "half.cu"
#include "order.cu"
#include "search.cu"

typedef float real;
constexpr index_t STRIDE = index_t(PARTS) * WIDTH;
// channels of a lane, lanes that have a row, and queries of each of them
constexpr int EIGHT = 8, ACROSS = WIDTH / EIGHT, EACH = QUERIES * ACROSS / 32;
static_assert(EACH * 32 == QUERIES * ACROSS && EACH % 2 == 0, "as many queries for every lane");

// a row of the table, of a lane
struct alignas(16) Packed {
    unsigned at[EIGHT / 2];

    __device__ void add_to(real (&sum)[EIGHT], real weight) const {
#pragma unroll
        for (int c = 0; c < EIGHT; c += 2) {
            real low, high;
            widen(at[c / 2], low, high);
            sum[c] += weight * low, sum[c + 1] += weight * high;
        }
    }
};
// numbers of classes of neighbouring queries, as they are read, and where the rows of their line begin
struct alignas(2 * EACH) Some {
    unsigned word[EACH / 2];

    __device__ unsigned at(int q) const { return word[q / 2] >> q % 2 * 16 & 0xffffu; }
};
struct Ranks {
    Some some;
    index_t offset;
};
struct Rows {
    Packed row[EACH];
    real extra[EACH];
};

// as in quotient.cu
__device__ inline real reciprocal(real total, real floor) {
    if (floor > real(0)) return real(1) / (total < floor ? floor : total);
    return (total < real(0) ? -total : total) < real(1.17549435e-38) ? real(0) : real(1) / total;
}

// Queries of the heads of a round: `out (heads, number, channels)`, the mean of their rows by the extras, NaN in heads
// that are `unfit (heads, group)`. `ranks (heads, dims, pitch)` are the classes. A query is `unsure (heads, number)` if
// it has less than `enough` for every class that has lost digits.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    gather(const half_t *ranks, const index_t *offsets, const int *rounds, const half_t *table, const real *extras,
           const int *unfit, half_t *out, bool *unsure, index_t round, index_t number, index_t dims, index_t pitch,
           index_t channels, index_t each, double floor, double enough) {
    int lane = threadIdx.x % 32, warp = own_warp(), place = lane % ACROSS * EIGHT;
    unsigned tiles = unsigned((number + QUERIES * WARPS - 1) / (QUERIES * WARPS)), begin = rounds[round];
    unsigned jobs = (rounds[round + 1] - begin) * tiles, group = unsigned((number + each - 1) / each);
    const char *rows = reinterpret_cast<const char *>(table + blockIdx.y * WIDTH + place);
    for (unsigned job = blockIdx.x; job < jobs; job += gridDim.x) {
        index_t p = begin + job / tiles, first = (job % tiles * WARPS + warp) * QUERIES;
        if (first >= number) continue;
        first += lane / ACROSS * EACH;
        auto ranks_of = [&](index_t d) {
            index_t line = p * dims + min(d, dims - 1);
            return Ranks{*reinterpret_cast<const Some *>(ranks + line * pitch + first), offsets[line]};
        };
        auto rows_of = [&](const Ranks &which) {
            Rows found;
            const char *line = rows + which.offset * (STRIDE * sizeof(half_t));
            const real *scalars = extras + which.offset;
#pragma unroll
            for (int q = 0; q < EACH; q++) {
                unsigned rank = which.some.at(q);
                found.row[q] =
                    *reinterpret_cast<const Packed *>(line + (unsigned long long)(rank) * (STRIDE * sizeof(half_t)));
                found.extra[q] = scalars[rank];
            }
            return found;
        };
        real sum[EACH][EIGHT] = {};
        real total[EACH] = {};
        int marks[EACH] = {};
        Ranks next = ranks_of(0);
        Rows now = rows_of(next);
        next = ranks_of(1);
#pragma unroll 2
        for (index_t d = 0; d < dims; d++) {
            Rows coming = rows_of(next);
            next = ranks_of(d + 2);
#pragma unroll
            for (int q = 0; q < EACH; q++) {
                now.row[q].add_to(sum[q], now.extra[q]);
                total[q] += now.extra[q];
                if (MARKED) marks[q] += int(__float_as_uint(now.extra[q]) & 1u);
            }
            now = coming;
        }
#pragma unroll
        for (int q = 0; q < EACH; q++) {
            if (first + q >= number) continue;
            bool spoilt = unfit[p * group + unsigned(first + q) / unsigned(each)];
            if (MARKED && place == 0 && blockIdx.y == 0)
                unsure[p * number + first + q] = total[q] < real(enough) * marks[q] && !spoilt;
            real factor = spoilt ? __int_as_float(0x7fffffff) : reciprocal(total[q], real(floor));
            half_t *row = out + (p * number + first + q) * channels;
#pragma unroll
            for (int i = 0; i < EIGHT; i += 2) {
                index_t c = blockIdx.y * WIDTH + turned(place + i);
                unsigned two = narrow(factor * sum[q][i], factor * sum[q][i + 1]);
                if (channels % 2 == 0 && c < channels) {
                    *reinterpret_cast<unsigned *>(row + c) = two;
                } else {
                    if (c < channels) row[c] = half_t(two);
                    if (c + 1 < channels) row[c + 1] = half_t(two >> 16);
                }
            }
        }
    }
}

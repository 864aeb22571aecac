// The sums that reel.cu keeps, how items are classed by what they are added to, and how warps hand them on.
//
// Macros: those of wheel.cu, and CREW (warps of a block).

#include "wheel.cu"

__device__ inline void add_row(Row &to, const Row &row) {
#pragma unroll
    for (int v = 0; v < VEC; v++) to.at[v] += row.at[v];
}
// one instruction for each channel, whatever the factor is
__device__ inline void add_row(Row &to, const Row &row, real factor) {
#pragma unroll
    for (int v = 0; v < VEC; v++) to.at[v] = __fmaf_rn(row.at[v], factor, to.at[v]);
}

// Classes of items: those of keys are numbered by their cells from 1 on, those of queries from QUERY on, where cell -1
// is first; NOBODY is what no key sees. Where there are fewer cells than CELLS, they are those in the middle.
constexpr int QUERY = 16, NOBODY = 31;
static_assert(CELLS == 8 && QUERY + CELLS + 2 < NOBODY, "cases for eight cells, and a lane for every class");
// the first of two cells in the middle, which have most items
constexpr int MIDDLE = CELLS / 2 - 1;

__device__ inline int class_of(word point, int first, bool asks) {
    int cell = int(point & CELL_MASK) - FIRST_CELL;
    return cell < -1 ? NOBODY : first + cell + 1 + (asks ? QUERY : 0);
}
// The number of a class among those of keys and of queries, without gaps.
__device__ constexpr int number_of(int kind) {
    return kind < QUERY ? kind - 1 : kind == NOBODY ? 2 * CELLS + 2 : kind - QUERY + CELLS;
}
__device__ constexpr int number_of_key(int cell) { return number_of(cell + 1); }
__device__ constexpr int number_of_query(int cell) { return number_of(QUERY + cell + 1); }

// What is to be done with a key or a query of a cell that is not in the middle, the number of its class being known.
template <typename F, typename G> __device__ inline void with_class(int number, F key, G query) {
    // clang-format off
    switch (number) {
    case number_of_key(0): key(Int<0>()); break;
    case number_of_key(1): key(Int<1>()); break;
    case number_of_key(2): key(Int<2>()); break;
    case number_of_key(5): key(Int<5>()); break;
    case number_of_key(6): key(Int<6>()); break;
    case number_of_key(7): key(Int<7>()); break;
    case number_of_query(-1): query(Int<-1>()); break;
    case number_of_query(0): query(Int<0>()); break;
    case number_of_query(1): query(Int<1>()); break;
    case number_of_query(2): query(Int<2>()); break;
    case number_of_query(5): query(Int<5>()); break;
    case number_of_query(6): query(Int<6>()); break;
    case number_of_query(7): query(Int<7>()); break;
    case number_of_query(8): query(Int<8>()); break;
    }
    // clang-format on
}
// The same number, of which the compiler knows nothing: it would make one search of tests that are to come first.
__device__ inline int unknown(int number) {
#ifdef __CUDA_ARCH__
    asm("" : "+r"(number));
#endif
    return number;
}

// Sums by twos, as they are read: for cells of queries those of keys, and for cells of keys both of queries.
constexpr int TWOS = STARTS / 2;
struct alignas(2 * sizeof(Row)) Two {
    Row at[2];
};
// What is handed on. The sums of all items before are those that this round of the warps began with, `base`, and what
// was `added` since, which is small and loses little; the first warp adds that to them, and keeps what is `lost`.
struct Baton {
    Two base[TWOS][32], added[TWOS][32], lost[TWOS][32];
    // those of the extra scalars, in the lanes of the classes that they are made of
    Pair extra_base[32], extra_added[32], extra_lost[32];
    Turn turn;

    // by all warps, with what walks begin with, times the height of the spline for queries
    __device__ void begin(const double *starts, int first_cell, double height, int lane, int warp) {
        for (int c = warp; c < STARTS; c += CREW) {
            bool of_queries = c >= CELLS + 2;
            int from = c - first_cell * (of_queries ? 2 : 1);
            bool there = from >= (of_queries ? CELLS + 2 : 0);
            double factor = !there ? 0.0 : of_queries ? height : 1.0;
            const double *numbers = starts + (there ? from : 0) * (WIDTH + 1) + lane * VEC;
#pragma unroll
            for (int v = 0; v < VEC; v++) {
                auto mine = [&](Two(&sums)[TWOS][32]) -> real & { return sums[c / 2][lane].at[c % 2].at[v]; };
                set(mine(base), mine(added), mine(lost), factor * numbers[v]);
            }
        }
        if (warp == 0) {
            int cell = lane % QUERY - first_cell;
            bool of_queries = lane >= QUERY,
                 there = of_queries ? cell > 0 && cell <= CELLS : cell >= 0 && cell < CELLS + 2;
            const double *from = starts + WIDTH;
            if (there) from += (of_queries ? CELLS + 2 + 2 * (cell - 1) : cell) * (WIDTH + 1);
            double factor = !there ? 0.0 : of_queries ? height : 1.0;
            set(extra_base[lane].plain, extra_added[lane].plain, extra_lost[lane].plain, factor * from[0]);
            set(extra_base[lane].weighted, extra_added[lane].weighted, extra_lost[lane].weighted,
                of_queries ? factor * from[WIDTH + 1] : 0.0);
        }
        turn.begin();
    }
    // by the first warp, before another round
    __device__ void fold(int lane) {
#pragma unroll
        for (int i = 0; i < TWOS; i++) {
            Two sum = base[i][lane], more = added[i][lane], rest = lost[i][lane];
#pragma unroll
            for (int v = 0; v < 2 * VEC; v++)
                fold(sum.at[v / VEC].at[v % VEC], more.at[v / VEC].at[v % VEC], rest.at[v / VEC].at[v % VEC]);
            base[i][lane] = sum, added[i][lane] = more, lost[i][lane] = rest;
        }
        fold(extra_base[lane].plain, extra_added[lane].plain, extra_lost[lane].plain);
        fold(extra_base[lane].weighted, extra_added[lane].weighted, extra_lost[lane].weighted);
    }
    // in one's turn: add these sums, which become those of all items before; and the same of the extra scalars
    __device__ Pair exchange(Row (&sums)[STARTS], const Pair &extra, int lane) {
        Pair all = extra_base[lane], more = extra_added[lane];
        add_pair(all, more), add_pair(more, extra);
        extra_added[lane] = more;
#pragma unroll
        for (int i = 0; i < TWOS; i++) {
            Two before = added[i][lane], sum = base[i][lane], after = before;
#pragma unroll
            for (int l = 0; l < 2; l++) {
                add_row(after.at[l], sums[2 * i + l]);
                add_row(sum.at[l], before.at[l]);
                sums[2 * i + l] = sum.at[l];
            }
            added[i][lane] = after;
        }
        return all;
    }

  private:
    __device__ static void set(real &base, real &added, real &lost, double number) {
        base = real(number), added = real(0), lost = real(number - double(base));
    }
    __device__ static void fold(real &base, real &added, real &lost) {
        real more = added + lost, now = base + more;
        lost = more - (now - base), base = now, added = real(0);
    }
};

// Lines that are wound around a circle: a point is a cell, which is once around, and what it is beyond its begin.
//
// A kernel whose nodes are a cell apart has all of them at the same place of the circle, so a walk around it passes a
// key once, where a walk along the line passes it at every node.

typedef unsigned int word;

// A wound point is a word: its part of the circle, above its cell in the lower bits. As a float it is finite and
// positive, and sorts alike.
constexpr int CELL_BITS = 6;
constexpr word AROUND = 33000000u, HALF_AROUND = AROUND / 2 << CELL_BITS, CELL_MASK = (1u << CELL_BITS) - 1;
static_assert((AROUND << CELL_BITS | CELL_MASK) < 0x7f800000u, "a finite float");
// cells of keys begin at this number: queries may be one before them and one behind; zero is far from all keys
constexpr int FIRST_CELL = 2;
// how much of what is in the cells around it a query has to see: with less, sums of whole cells would cancel
constexpr float EDGE = 1.0f / 32.0f;

// How a line is wound: the length of a cell, that of the first key, and how many have keys; none if it is not.
struct alignas(16) Winding {
    float period, inverse;
    int first, cells;

    // The cell of a point, and `beyond`, from 0 to 1, what it is beyond its begin; one rounding, however far it is. The
    // product may be rounded across a boundary, which the sign of what is left, unlike its size, says exactly.
    __device__ float cell(float x, float &beyond) const {
        float i = floorf(x * inverse);
        if (__fmaf_rn(-i, period, x) < 0.0f) i -= 1.0f;
        if (__fmaf_rn(-(i + 1.0f), period, x) >= 0.0f) i += 1.0f;
        beyond = fminf(fmaxf(__fmaf_rn(-i, period, x) * inverse, 0.0f), 1.0f);
        return i;
    }
    __device__ word wound(float x) const {
        float beyond, i = cell(x, beyond) - float(first);
        int code = i < -1.0f || i > float(cells) ? 0 : int(i) + FIRST_CELL;
        // rounded alike in all kernels, which take halves of the circle by it
        return word(__fmaf_rn(beyond, float(AROUND), 0.5f)) << CELL_BITS | word(code);
    }
    // As if the line went the other way.
    __device__ word mirrored(word point) const {
        word code = point & CELL_MASK;
        return AROUND - (point >> CELL_BITS) << CELL_BITS | (code ? word(cells + 2 * FIRST_CELL - 1) - code : 0);
    }
};
// Whether a line, of some that may be wound, is.
__device__ inline bool is_wound(const Winding *windings, long long line) { return windings && windings[line].cells; }
__device__ inline float part_of(word point) { return float(point >> CELL_BITS) * (1.0f / float(AROUND)); }

// Two sums over keys of a cell: of rows, and of rows times the parts of their keys.
struct alignas(8) Pair {
    float plain, weighted;
};

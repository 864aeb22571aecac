// Where a point stands between the nodes of a dimension: what locate.py does, for a part of collect.cu.
//
// Needs GP, STATS (lines of what is known of a dimension), FACTORED (exponentials: a point has a factor), SHORT
// (inputs in bfloat16) and UNIT, the codes of a cell: 512 or 256.

constexpr int BINS = 4 * GP;

// A code, and the factor times 2^15.
struct Place {
    int code;
    float factor;
};

// Of one dimension, where `nodes_kernel` has left it.
struct Line {
    const float *nodes, *stats;
    int count;

    // pairs of cells, the last of which says how wide bins are and how many steps a search in them takes
    const float *index() const { return stats + 3 * GP; }
    // two words for every bin, and behind those two numbers for every cell, see nodes.py
    const uint2 *look_ups() const { return reinterpret_cast<const uint2 *>(stats + 6 * GP); }
    float per_bin() const { return index()[2 * (count - 1)]; }
    // what is added to a point, times `per_bin`, so that the last bits are its bin
    float zero() const { return fmaf(-nodes[0], per_bin(), 8388608.0f); }
    int steps() const { return int(index()[2 * (count - 1) + 1]); }
    // that of a dimension some further on
    Line beside(int dim) const { return {nodes + dim * GP, stats + dim * STATS * GP, count}; }
};

// Two numbers of the inputs.
inline float2 widen(unsigned both) { return SHORT ? unpack_short(both) : unpack(both); }

// Codes of cells that there are, whatever the point was.
inline int bounded(int code, int count) {
    int most = UNIT * (count - 1);
    return min(max(int(short(code)), 0), most < 32255 ? most : 32255);
}

// Where no bin of a dimension has two nodes, a code is in one look-up: what the bin of a point says of it.
struct Piece {
    uint2 words;
    // from the middle of the bin
    float distance;

    void load(float x, const uint2 *bins, float per_bin, float zero) {
        float place = fmaf(x, per_bin, zero);
        words = bins[__float_as_uint(place) & (BINS - 1)];
        distance = fmaf(x, per_bin, zero - place);
    }
    int code(int count) const {
        float apart = distance - unpack(words.x).y;
        float2 slopes = unpack(words.y);
        int code = words.x + __float_as_uint(fmaf(apart, apart < 0 ? slopes.x : slopes.y, 12582912.0f));
        if (UNIT == 256) code = ((code & 0xffff) + 1) >> 1;
        return bounded(code, count);
    }
};
// And of exponentials the factor in another one, in the cell; what is no number has some factor.
inline float factor_in(float2 cell, float x, float rate) {
    float apart = fmaf(x, rate, -cell.x);
    return fminf((power_of_two(apart) + power_of_two(-apart)) * cell.y, 32768);
}

// Of the weights `sinh(end) / sinh(h)` and `sinh(begin) / sinh(h)`, h their sum: the second's share, and both.
inline float2 share_and_sum(float begin, float end) {
    float width = begin + end, least = fminf(begin, end), whole = expf(-width), inner = expf(2 * least - width);
    float part = 0.5f * (1 - inner) * (1 + whole) / ((1 + inner) * fmaxf(1 - whole, 1e-30f));
    float share = width < 0.05f ? begin / fmaxf(width, 1e-37f) : 0.5f + (begin < end ? -part : part);
    return {share, expf(-least) * (1 + inner) / (1 + whole)};
}

// Otherwise by a search from the first cell of a bin on.
inline Place search_place(float x, const Line &line, float tau) {
    const float *index = line.index();
    const signed char *cells = reinterpret_cast<const signed char *>(index + 2 * GP);
    int last = line.count - 1, steps = line.steps();
    float bin = fminf(fmaxf(fmaf(x, line.per_bin(), line.zero()), 8388608.0f), 8388607.0f + BINS);
    int cell = cells[__float_as_uint(bin) & (BINS - 1)];
    for (int turn = 1; turn <= steps; ++turn) {
        int probe = cell + (1 << (steps - turn));
        if (probe < last && line.nodes[probe] <= x) cell = probe;
    }
    float start = line.nodes[cell], share = (x - start) * index[2 * cell + 1], factor = 1;
    if (FACTORED) {
        float width = line.nodes[cell + 1] - start, distance = fminf(fmaxf(x - start, 0), width);
        float2 both = share_and_sum(distance / tau, (width - distance) / tau);
        share = both.x, factor = both.y;
    }
    share = fminf(fmaxf(share, 0), 1);
    return {bounded(cell * UNIT + int(share * UNIT + 0.5f), line.count), factor * 32768};
}

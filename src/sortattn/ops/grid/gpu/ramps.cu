// Tables of changes of F from node to node, for add_riesz; a part of march.cu.
//
// In ramps the kernel of add_riesz is diagonal, and its correction adds neighbours, see riesz.py: to the change of F
// behind node i a key with ramps r adds
//
//     (p_i + n_i + c_i + c_i+1) r_i - c_i r_i-1 - c_i+1 r_i+1 - n_i
//
// times its row. F at the first node comes from starts.py. Places of keys and queries are codes, by dimension.

// of the codes of a dimension: with 32 bytes more, threads of two dimensions have banks of their own
constexpr int LINE = 2 * CHUNK + 32, KEYS = DIMS * LINE, QUERIES = KEYS, KNOWN_BYTES = 0;
constexpr float RATE = 2;

// of the cell behind a node, twice what is above zero and what is below, in bandwidths
inline float above_zero(const Head &head, int dim, int i) {
    const float *line = head.nodes + dim * GP + i;
    return i < head.count - 1 ? (fmaxf(line[1], 0) - fmaxf(line[0], 0)) * head.rate : 0;
}
inline float below_zero(const Head &head, int dim, int i) {
    const float *line = head.nodes + dim * GP + i;
    return i < head.count - 1 ? (fmaxf(-line[0], 0) - fmaxf(-line[1], 0)) * head.rate : 0;
}
inline float own_factor(const Head &head, int dim, int i) {
    return i < head.count - 1 ? above_zero(head, dim, i) + below_zero(head, dim, i) + head.correction(dim, i) +
                                    head.correction(dim, i + 1)
                              : 0;
}

// Powers of two: what weights of keys are multiplied with, what tables are as halves, what the rows of all keys hold
// for a sum of weights, and what sums are multiplied with as halves. Every warp finds them by itself.
struct Scales {
    float weight, table, one, sum;

    Scales(const Head &head, const float *line, float most, float epsilon) {
        int lane = threadIdx.x % 32;
        float cell = 0, reach = 0;
        for (int i = lane; i < ROWS; i += 32) cell = fmaxf(cell, own_factor(head, i / GP, i % GP));
        cell = fmaxf(largest_of_warp(cell), 1e-30f);
        for (int d = lane; d < head.dims; d += 32)
            reach += fmaxf(fabsf(line[d * GP]), fabsf(line[d * GP + head.count - 1])) * head.rate * 2 + epsilon;
        reach = sum_of_warp(reach);
        one = most > 0 ? power_below(fmaxf(most, 6e-8f)) : 1;
        // a weight is at most one, and the sum of all keys at most 2^15; both at once would take the weights' digits
        // where values are large or many
        weight = 1 / (2 * power_below(cell));
        table = 32768 / (2 * power_below(2 * one * head.length));
        sum = 32768 / (2 * power_below(fmaxf(reach * 2 * one * head.length, 1e-30f)));
        if (!(most == most)) sum = __int_as_float(0x7fffffff);
    }
    // what products of weights and tables are multiplied with
    float weights() const { return 32768 / (weight * table); }
};

inline void know(const Head &, unsigned char *) {}

// How eight nodes weigh a key. Two numbers lie in a register: 25 registers would be too many.
struct Keys;
struct Weights {
    // of a node its factor and what is added; of two nodes what is taken off for neighbours
    unsigned own[8], correction[5];
    // the ramps of the node before the first one are places less that node
    unsigned shift, limit;

    Weights(const Head &head, const Slab &slab, const Scales &scales, const unsigned char *) {
        // ramps are 2^-15 for one
        float up = scales.weight * 32768;
        int dim = slab.dim, node = slab.node;
#pragma unroll
        for (int x = 0; x < 8; ++x)
            own[x] = pack(own_factor(head, dim, node + x) * up, -below_zero(head, dim, node + x) * scales.weight);
#pragma unroll
        for (int x = 0; x < 10; x += 2)
            correction[x / 2] = pack(-head.correction(dim, node + x) * up, -head.correction(dim, node + x + 1) * up);
        shift = kept(unsigned(0x10000 + 512 - 512 * node) % 0x10000 * 0x10001u), limit = kept(0x02000200);
    }
    template <int M> void make(unsigned (&weights)[4], const Keys &keys) const;
};

// The places of four keys, two that are neighbours and two that are eight on, and of those sixteen on.
struct Keys {
    const unsigned *codes;
    unsigned next, other, low, high;

    Keys(const unsigned char *brought, const Slab &slab, const Weights &) {
        codes = reinterpret_cast<const unsigned *>(brought + slab.dim * LINE + slab.t * 4);
        next = codes[0], other = codes[4];
    }
    void step(const Weights &weights) {
        low = add_places(next, weights.shift), high = add_places(other, weights.shift);
        // behind the last ones are others, which are not used
        codes += 8;
        next = codes[0], other = codes[4];
    }
};

// Those of the nodes 2 M and 2 M + 1 for four keys: rows eight apart of a product, and keys eight apart. Nodes are
// counted from the one before the first, so that places less the nodes are those of the next ones too.
template <int M> inline void Weights::make(unsigned (&weights)[4], const Keys &keys) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        unsigned r[4], place = part ? keys.high : keys.low;
#pragma unroll
        for (int x = 0; x < 4; ++x) r[x] = ramps(place, (0x10000 - 512 * (2 * M + x)) % 0x10000 * 0x10001u, limit);
        unsigned one = multiply_add(own[2 * M], r[1]), two = multiply_add(own[2 * M + 1], r[2]);
        one = multiply_add_low(correction[M], r[0], one), two = multiply_add_high(correction[M], r[1], two);
        one = multiply_add_high(correction[M], r[2], one), two = multiply_add_low(correction[M + 1], r[3], two);
        weights[part * 2] = one, weights[part * 2 + 1] = two;
    }
}

// The codes of two queries, and how a thread makes their ramps: those of its first node and of the one eight on.
typedef unsigned Pair;
struct Reader {
    unsigned shift, limit;
    Reader(int node) {
        limit = kept(0x02000200);
        shift = kept(unsigned(0x10000 - 512 * node) % 0x10000 | unsigned(0x10000 - 512 * (node + 8)) % 0x10000 << 16);
    }
};
struct Two {
    unsigned low, high;
    // as pairs of the same, less the first node
    Two(Pair codes, const Reader &reader) {
        low = add_places(__byte_perm(codes, 0, 0x1010), reader.shift);
        high = add_places(__byte_perm(codes, 0, 0x3232), reader.shift);
    }
    void weigh(unsigned (&weights)[4], int part, const Reader &reader) const {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            // and that of the node eight on
            unsigned node = (0x10000 - 512 * (2 * part + x)) % 0x10000 * 0x10001u;
            weights[2 * x] = ramps(low, node, reader.limit), weights[2 * x + 1] = ramps(high, node, reader.limit);
        }
    }
};

inline void copy_points(const Head &head, int first, unsigned to) {
    const short *keys = static_cast<const short *>(head.keys);
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < DIMS * (CHUNK / 8); i += 128) {
        int dim = i / (CHUNK / 8), n = i % (CHUNK / 8) * 8;
        bool there = first + n < head.length;
        long long at = (long long)dim * head.length + (there ? first + n : 0);
        copy(to + dim * LINE + n * 2, keys + at, there);
        copy(to + KEYS + dim * LINE + n * 2, head.queries + at, there);
    }
}

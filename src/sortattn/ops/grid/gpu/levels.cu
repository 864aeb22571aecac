// Tables of F at the nodes, for add_bump and add_laplace; a part of march.cu.
//
// To F at the node x a key t adds f(x - t), as it is, and the correction, times its row. So F is right at all nodes,
// and only between them it is interpolated, at the queries: by hats, of exponentials times the factor of a query, see
// language.py. That leaves pairs in one cell as wrong as weights of keys do, and those at a kink beside zero less so.
// The correction, a hat at every node, is a triangle of the same area there, whose slope is a sixth of that of f,
//
//     max(f - f(e), 0) / 6,
//
// as that takes two instructions for two keys. Keys are points as they came, by key; places of queries are codes, by
// dimension, of exponentials words of a code and a factor.

constexpr bool FACTORED = KIND == LAPLACE;
// of what is known of a query in a dimension, in bytes; with some more, threads of two dimensions have banks of their
// own
constexpr int PLACE = FACTORED ? 4 : 2, LINE = PLACE * (CHUNK + 16);
constexpr int KEY = 2 * DIMS, KEYS = CHUNK * KEY, QUERIES = DIMS * LINE;
// of a node where it stands, and what is taken off for the correction
constexpr int KNOWN_BYTES = ROWS * 6;
// of exponentials those of two
constexpr float RATE = FACTORED ? 1.44269504f : 1;
// f at zero: small weights of exponentials should have all digits of a half
constexpr float TOP = FACTORED ? 32768 : 1, SLOPE = 1.0f / 6;

// Powers of two: what tables are as halves, what the rows of all keys hold for a sum of weights, and what sums are
// multiplied with as halves.
struct Scales {
    float table, one, sum;

    Scales(const Head &head, const float *, float most, float) {
        one = most > 0 ? power_below(fmaxf(most, 6e-8f)) : 1;
        // with its correction a weight is below 1.25
        table = 32768 / (2 * power_below(2.5f * TOP * one * head.length));
        sum = 32768 / (2 * power_below(2.5f * DIMS * one * head.length));
        if (!(most == most)) sum = __int_as_float(0x7fffffff);
    }
    // what products of weights and tables are multiplied with: hats are 2^-15 for one, factors 2^15
    float weights() const { return (FACTORED ? 1 : 32768) / (TOP * table); }
};

// f at u, in bandwidths times RATE
inline float value(float u) { return FACTORED ? power_of_two(15 - fabsf(u)) : __saturatef(1 - fabsf(u)); }
// x and max(SLOPE x + z, 0), z the lower or the upper half of a word: minus what is taken off
inline unsigned corrected_low(unsigned x, unsigned less) {
    unsigned result;
    asm("{.reg .b16 l, h; .reg .b32 z, s; mov.b32 {l, h}, %2; mov.b32 z, {l, l}; mov.b32 s, 0x31553155; "
        "fma.rn.relu.f16x2 z, s, %1, z; add.f16x2 %0, z, %1;}"
        : "=r"(result)
        : "r"(x), "r"(less));
    return result;
}
inline unsigned corrected_high(unsigned x, unsigned less) {
    unsigned result;
    asm("{.reg .b16 l, h; .reg .b32 z, s; mov.b32 {l, h}, %2; mov.b32 z, {h, h}; mov.b32 s, 0x31553155; "
        "fma.rn.relu.f16x2 z, s, %1, z; add.f16x2 %0, z, %1;}"
        : "=r"(result)
        : "r"(x), "r"(less));
    return result;
}

// Minus SLOPE f(e) at a node, for the area of the correction there.
inline float taken_off(const Head &head, int dim, int i) {
    if (i < 1 || i >= head.count - 1) return -SLOPE * TOP;
    const float *node = head.nodes + dim * GP + i;
    // a hat of height c is as large as a triangle of slope 1/6 with a width of the root of 6 c h
    float width = (node[1] - node[-1]) / 2 * head.rate / RATE;
    float reach = sqrtf(head.correction(dim, i) * width / SLOPE);
    // that of an exponential is bent
    if (FACTORED) return -SLOPE * TOP * exp2f(-RATE * (reach + reach * reach / 3));
    return -SLOPE * TOP * fmaxf(1 - reach, 0);
}

// The nodes of this block, two of the same dimension side by side, and what is taken off there.
inline void know(const Head &head, unsigned char *to) {
    for (int i = threadIdx.x; i < ROWS / 2; i += THREADS) {
        int dim = 2 * i / GP, node = 2 * i % GP;
        const float *from = head.nodes + dim * GP + node;
        float *both = reinterpret_cast<float *>(to) + 2 * i;
        both[0] = from[0] * head.rate, both[1] = from[1] * head.rate;
        reinterpret_cast<unsigned *>(to + ROWS * 4)[i] =
            pack(taken_off(head, dim, node), taken_off(head, dim, node + 1));
    }
}

// Two nodes.
struct Nodes {
    float2 places;
    unsigned less;
};

// How eight nodes weigh a key: they are loaded one product ahead, as there are too few registers for all.
struct Keys;
struct Weights {
    const unsigned char *places, *less;
    float rate;

    Weights(const Head &head, const Slab &slab, const Scales &, const unsigned char *known) {
        int first = (slab.dim * GP + slab.node) / 2;
        places = known + first * 8, less = known + ROWS * 4 + first * 4, rate = head.rate;
    }
    Nodes load(int two) const {
        return {reinterpret_cast<const float2 *>(places)[two], reinterpret_cast<const unsigned *>(less)[two]};
    }
    template <int M> void make(unsigned (&weights)[4], Keys &keys) const;
};

// Four keys, two that are neighbours and two that are eight on, and those sixteen on.
struct Keys {
    const unsigned short *at;
    unsigned short next[4];
    float points[4];
    Nodes nodes;

    Keys(const unsigned char *brought, const Slab &slab, const Weights &weights) {
        at = reinterpret_cast<const unsigned short *>(brought + slab.t * 2 * KEY) + slab.dim;
        load();
        nodes = weights.load(0);
    }
    void load() {
#pragma unroll
        for (int i = 0; i < 4; ++i) next[i] = at[(i / 2 * 8 + i % 2) * DIMS];
    }
    void step(const Weights &weights) {
#pragma unroll
        for (int i = 0; i < 4; ++i) points[i] = (SHORT ? unpack_short(next[i]).x : unpack(next[i]).x) * weights.rate;
        // behind the last ones are others, which are not used
        at += 16 * DIMS;
        load();
    }
};

// Those of the nodes 2 M and 2 M + 1 for four keys: rows eight apart of a product, and keys eight apart.
template <int M> inline void Weights::make(unsigned (&weights)[4], Keys &keys) const {
    Nodes two = keys.nodes;
    keys.nodes = load((M + 1) % 4);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        float x = keys.points[2 * part], y = keys.points[2 * part + 1];
        unsigned one = pack(value(x - two.places.x), value(y - two.places.x));
        unsigned other = pack(value(x - two.places.y), value(y - two.places.y));
        weights[part * 2] = corrected_low(one, two.less), weights[part * 2 + 1] = corrected_high(other, two.less);
    }
}

// The places of two queries, and how a thread makes their hats: at its first node and the one eight on.
#if KIND == LAPLACE
typedef uint2 Pair;
#else
typedef unsigned Pair;
#endif
struct Reader {
    unsigned shift;
    Reader(int node) {
        shift = kept(unsigned(0x10000 - 512 * node) % 0x10000 | unsigned(0x10000 - 512 * (node + 8)) % 0x10000 << 16);
    }
};
struct Two {
    // codes less the first node, as pairs of the same, and minus that; factors
    unsigned codes[2], minus[2], factors[2];

    Two(Pair places, const Reader &reader) {
#if KIND == LAPLACE
        codes[0] = __byte_perm(places.x, 0, 0x1010), codes[1] = __byte_perm(places.y, 0, 0x1010);
        factors[0] = __byte_perm(places.x, 0, 0x3232), factors[1] = __byte_perm(places.y, 0, 0x3232);
#else
        codes[0] = __byte_perm(places, 0, 0x1010), codes[1] = __byte_perm(places, 0, 0x3232);
#endif
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            codes[h] = add_places(codes[h], reader.shift);
            minus[h] = add_places(~codes[h], 0x00010001);
        }
    }
    void weigh(unsigned (&weights)[4], int part, const Reader &) const {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            int node = 512 * (2 * part + x);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // up to the node and down from it
                unsigned up = add_places(codes[h], (0x10000 + 512 - node) % 0x10000 * 0x10001u);
                unsigned hat = ramps(minus[h], (512 + node) * 0x10001u, up);
                weights[2 * x + h] = FACTORED ? times(hat, factors[h]) : hat;
            }
        }
    }
};

inline void copy_points(const Head &head, int first, unsigned to) {
    int thread = threadIdx.x % 128;
    constexpr int PIECE = KEY < 16 ? KEY : 16, PIECES = KEY / PIECE;
    const unsigned short *keys = static_cast<const unsigned short *>(head.keys);
#pragma unroll 1
    for (int i = thread; i < CHUNK * PIECES; i += 128) {
        int n = i / PIECES, part = i % PIECES * (PIECE / 2);
        bool there = first + n < head.length;
        copy_some<PIECE>(to + n * KEY + part * 2, keys + (long long)(there ? first + n : 0) * head.dims + part, there);
    }
    constexpr int EACH = 16 / PLACE;
#pragma unroll 1
    for (int i = thread; i < DIMS * (CHUNK / EACH); i += 128) {
        int dim = i / (CHUNK / EACH), n = i % (CHUNK / EACH) * EACH;
        bool there = first + n < head.length;
        long long at = (long long)dim * head.length + (there ? first + n : 0);
        copy(to + KEYS + dim * LINE + n * PLACE, head.queries + at * (PLACE / 2), there);
    }
}

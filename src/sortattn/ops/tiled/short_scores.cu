// Points as the scores want them, and the scores of all pairs; a part of short.cu.

// of a row of points, which may be two factors, in two halves of it
constexpr int POINTS = (FACTORS ? 2 * WIDTH : WIDTH) + 4;
// of four dimensions one is left as a point, whose exponential a third pipe takes; gradients need the factors of all
constexpr bool MIXED = FACTORS && FORWARD;

// What a block knows of its head's points.
struct Points {
    Numbers numbers;
    int dims;
    // distances are measured from the first key, those of the thread's columns
    Vector origin = {};
    // of exponents
    float largest = 0;
    // factors are out of reach
    bool far = false;

    Vector exponents(const Vector &x) const {
        Vector found;
        for (int e = 0; e < 4; ++e) found.x[e] = (x.x[e] - origin.x[e]) * numbers.rate;
        return found;
    }
    // Rows as the scores want them; OTHER ones are far away in dimensions that are not there. What is no number makes
    // `spoilt` one too.
    template <bool OTHER> void load(float *tile, const Matrix<Stored> &matrix, int rows, float &spoilt) {
        each(matrix, rows, [&](int row, const Vector &x) {
            Vector found = x;
#pragma unroll
            for (int e = 0; e < 4; ++e) spoilt = fmaf(x.x[e], 0.0f, spoilt);
            if constexpr (FACTORS) {
                Vector exponent = exponents(x), minus;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    bool inside = column() + e < dims;
                    // the zeros beyond the last row may be farther away than any point
                    if (row < matrix.count) largest = fmaxf(largest, fabsf(exponent.x[e]));
                    found.x[e] = inside ? power_of_two(exponent.x[e]) : 0.0f;
                    minus.x[e] = inside ? power_of_two(-exponent.x[e]) : 0.0f;
                    if (MIXED && e == 3) found.x[e] = inside ? exponent.x[e] : OTHER ? infinity() : 0.0f;
                }
                *reinterpret_cast<Vector *>(tile + row * POINTS + WIDTH + column()) = minus;
            }
            if constexpr (KIND == ADD_BUMP)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    // the edge is below one
                    found.x[e] = column() + e < dims ? x.x[e] * numbers.scale : OTHER ? 4.0f : 0.0f;
            *reinterpret_cast<Vector *>(tile + row * POINTS + column()) = found;
        });
    }
    // the same where factors do not serve
    template <bool OTHER> void load_far(float *tile, const Matrix<Stored> &matrix, int rows) const {
        each(matrix, rows, [&](int row, const Vector &x) {
            Vector found = x;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (OTHER && column() + e >= dims) found.x[e] = infinity();
            *reinterpret_cast<Vector *>(tile + row * POINTS + column()) = found;
        });
    }
};

inline Points points_of(const Matrix<Stored> &keys, int dims, double tau) {
    Points points{Numbers(float(tau), nullptr, 0), dims};
    if constexpr (FACTORS) points.origin = keys.get(0, column());
    if constexpr (KIND == ADD_BUMP) points.numbers.rest = float(tau * points.numbers.scale - points.numbers.edge);
    return points;
}

// Sums of the terms of all pairs; tiles are free to be written. Returns whether there is what is no number.
inline bool scores_of(float *own, float *other, Points &points, const Matrix<Stored> &mine,
                      const Matrix<Stored> &others, const Place &place, float (&sums)[TM][TN]) {
    float spoilt = 0;
    points.load<false>(own, mine, place.rows(), spoilt);
    points.load<true>(other, others, place.others(), spoilt);
    bool bad = __syncthreads_or(spoilt != 0);
    int columns = (points.dims + 3) / 4 * 4;
    if constexpr (FACTORS) {
        points.far = __syncthreads_or(points.largest > REACH);
        if (!points.far) {
            // e^-|s - t| is the lesser of e^s and e^t times the lesser of e^-s and e^-t
            auto add = [](float &sum, const Vector *own, const Vector *other) {
#pragma unroll
                for (int e = 0; e < (MIXED ? 3 : 4); ++e)
                    sum = fmaf(fminf(own[0].x[e], other[0].x[e]), fminf(own[1].x[e], other[1].x[e]), sum);
                if (MIXED) sum += power_of_two(-fabsf(own[0].x[3] - other[0].x[3]));
            };
            pairs<2>(own, other, POINTS, columns, place, sums, add);
            return bad;
        }
        points.load_far<false>(own, mine, place.rows());
        points.load_far<true>(other, others, place.others());
        __syncthreads();
    }
    pairs<1>(own, other, POINTS, columns, place, sums, [&](float &sum, const Vector *own, const Vector *other) {
        // a few terms first: fewer additions to a number that is larger than they are
        float fresh[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) fresh[e] = term_of(own[0].x[e], other[0].x[e], points.numbers);
        sum += (fresh[0] + fresh[1]) + (fresh[2] + fresh[3]);
    });
    return bad;
}

// a score in units of `unit`
inline float score_of(float sum, const Points &points) {
    return KIND == ADD_RIESZ ? fmaf(2, sum, float(EPSILON) * points.dims * points.numbers.tau) : sum;
}

// The kernels: what one dimension adds to a score, how a score is made of that, and the derivative.
//
// Set by cuda_kernels.py: NUMBER (float or double), KERNEL (a name of Kind), EPSILON (of the Riesz kernels), and of a
// kernel made by the user LISTED (its nodes or coefficients, zero if there are too many for registers).

#include "found.cu"

enum Kind { ADD_RIESZ, ADD_LAPLACE, ADD_BUMP, SPLINE, POLYNOMIAL_EXPONENTIAL, LAPLACE, RIESZ };

using T = NUMBER;
constexpr Kind KIND = KERNEL;
constexpr bool SINGLE = sizeof(T) == 4;
constexpr bool ADDITIVE = KIND != LAPLACE && KIND != RIESZ;
constexpr bool STATIONARY = KIND != ADD_RIESZ && KIND != RIESZ;
// kernels with a table have no neutral number to fill up a tile with, and take one dimension at a time
constexpr bool TABLE = KIND == SPLINE || KIND == POLYNOMIAL_EXPONENTIAL;
#ifdef LISTED
constexpr int KEPT = LISTED;
#else
constexpr int KEPT = 0;
#endif
// the derivative is a sign, 1 - 2 step: the ones are summed apart
constexpr bool SIGNS = KIND == ADD_RIESZ || KIND == LAPLACE;
// e^-|s - t| as the lesser of e^s e^-t and e^-s e^t: a point is two numbers then
constexpr bool FACTORS = KIND == ADD_LAPLACE && SINGLE;
// beyond 2^28 on either side a factor has lost digits of its point
constexpr float REACH = 28.0f;
// of numbers below, tensor cores do not see the small parts: then all are multiplied
constexpr float TINY = 0x1p-80f, LIFT = 0x1p80f;
constexpr int NOWHERE = 0x7fffffff;

// ---- scalars

inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
inline double power_of_two(double x) { return exp2(x); }

// one where x > 0, zero where x < 0, half at zero; without a branch, so numbers below 2^-127 count as zero in part
inline float step(float x) { return __saturatef(fmaf(x, 0x1p126f, 0.5f)); }
inline double step(double x) { return x > 0 ? 1.0 : x < 0 ? 0.0 : 0.5; }

inline float sign(float x) { return 2.0f * step(x) - 1.0f; }
inline double sign(double x) { return 2.0 * step(x) - 1.0; }

inline float positive_part(float x) { return __saturatef(x); }
inline double positive_part(double x) { return x > 0 ? x : 0.0; }

// ---- tensor cores

// a 16 x 8 tile += 16 x 8 times 8 x 8, of numbers with 11 digits
inline void multiply(float &s, float &t, float &u, float &v, const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(s), "+f"(t), "+f"(u), "+f"(v)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// x as a number with 11 digits, rounded, and the rest of it
inline void split(float x, unsigned &large, unsigned &small) {
    large = (__float_as_uint(x) + 0x1000) & 0xffffe000;
    small = __float_as_uint(x - __uint_as_float(large));
}

// the same with 16 x 16 times 16 x 8, of halves, two to a word
inline void multiply_halves(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

inline unsigned pack(float x, float y) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}

// two numbers as halves, and the rests of them
inline void split(float x, float y, unsigned &large, unsigned &small) {
    large = pack(x, y);
    float found[2];
    asm("{.reg .f16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}"
        : "=f"(found[0]), "=f"(found[1])
        : "r"(large));
    small = pack(x - found[0], y - found[1]);
}

// ---- kernels

// what a kernel knows of its problem
struct Numbers {
    T tau;
    // points are multiplied by this power of two, and tau with them: exact, and the bump's height is below one
    T scale = 1, edge = 0;
    // what rounding took from the edge
    T rest = 0;
    // of e^-|u| as a power of two
    T rate = 0;
    // splines: a line for every piece and every node between them, then the nodes; else coefficients
    const T *table;
    int count;
    // one over tau; the nodes or coefficients
    T inverse, own[KEPT ? KEPT : 1];

    Numbers(T bandwidth, const T *table, int count)
        : tau(bandwidth), table(table), count(count), inverse(1 / bandwidth) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) own[i] = list()[i];
        if constexpr (KIND == ADD_BUMP) {
            int exponent;
            edge = frexp(tau, &exponent);
            scale = ldexp(T(1), -exponent);
        }
        if constexpr (KIND == ADD_LAPLACE || KIND == POLYNOMIAL_EXPONENTIAL) rate = T(1.4426950408889634) / tau;
    }
    const T *list() const { return KIND == SPLINE ? table + 4 * (2 * count + 1) : table; }
    // op(x) of all nodes or coefficients, the last one first
    template <class Op> void each(Op op) const {
        if constexpr (KEPT > 0)
#pragma unroll
            for (int i = KEPT - 1; i >= 0; --i) op(own[i]);
        else
#pragma unroll 1
            for (int i = count - 1; i >= 0; --i) op(list()[i]);
    }
};

// the pieces of a spline left and right of u, the same but at a node
struct Pieces {
    int at = 0, past = 0;
    Pieces(T u, const Numbers &numbers) {
        numbers.each([&](T node) { at += node < u, past += node <= u; });
    }
};

// what a spline is: of piece i line 2 i, at node i line 2 i + 1, the mean of those of both sides
struct alignas(4 * sizeof(T)) Line {
    T anchor, height, incline, unused;
};
inline Line line(const Numbers &numbers, int which) { return reinterpret_cast<const Line *>(numbers.table)[which]; }
inline Line line_at(const Numbers &numbers, double u) {
    Pieces pieces(u, numbers);
    return line(numbers, pieces.at + pieces.past);
}
// of float without comparisons, which take longer; the last bits are the integer
inline Line line_at(const Numbers &numbers, float u) {
    float passed = 0;
    numbers.each([&](T node) { passed += step(u - float(node)); });
    return line(numbers, __float_as_int(fmaf(passed, 2, 12582912.0f)) & 0x3fffff);
}

// A difference in bandwidths, rounded once: a node is to be met exactly.
inline double in_bandwidths(double difference, const Numbers &numbers) { return difference / numbers.tau; }
inline float in_bandwidths(float difference, const Numbers &numbers) {
    float near = difference * float(numbers.inverse);
    return fmaf(fmaf(-near, float(numbers.tau), difference), float(numbers.inverse), near);
}

// as in splines.py: beyond, e^-x is zero, and a power of x might be infinite
inline T distance(T difference, const Numbers &numbers) {
    return fmin(SINGLE ? fabs(difference) * numbers.inverse : fabs(difference) / numbers.tau, T(1000));
}
// e^-x of that
inline double decay(double x, double, const Numbers &) { return exp(-x); }
inline float decay(float, float difference, const Numbers &numbers) {
    return power_of_two(-fabsf(difference) * float(numbers.rate));
}

// what one dimension adds to a tile, for a difference of query and key
inline T term(T difference, const Numbers &numbers) {
    if constexpr (KIND == ADD_RIESZ || KIND == LAPLACE) return fabs(difference);
    if constexpr (KIND == RIESZ) return difference * difference;
    if constexpr (KIND == ADD_BUMP) return positive_part(numbers.edge - fabs(difference));
    if constexpr (KIND == ADD_LAPLACE) return power_of_two(-fabs(difference) * numbers.rate);
    if constexpr (KIND == SPLINE) {
        T u = in_bandwidths(difference, numbers);
        Line here = line_at(numbers, u);
        return here.height + here.incline * (u - here.anchor);
    }
    if constexpr (KIND == POLYNOMIAL_EXPONENTIAL) {
        T x = distance(difference, numbers), value = 0;
        numbers.each([&](T coefficient) { value = value * x + coefficient; });
        return value * decay(x, difference, numbers);
    }
}

// What one dimension adds; of `add_riesz` half of |s| + |t| - |s - t|, which is the lesser of |s| and |t|, or zero if
// the signs differ: no digit is lost, not even where a query shares next to nothing with a key.
inline T term_of(T own, T other, const Numbers &numbers) {
    if constexpr (KIND == ADD_RIESZ) return fabs(fmax(fmin(own, fmax(other, T(0))), fmin(other, T(0))));
    return term(own - other, numbers);
}

// Phi from the sum of the terms; for `laplace` its logarithm
inline T whole(T sum, T own_norm, T other_norm, const Numbers &numbers, int dims) {
    if constexpr (KIND == ADD_RIESZ) return (own_norm + other_norm - sum) / numbers.tau + T(EPSILON) * dims;
    if constexpr (KIND == RIESZ) return (sqrt(own_norm) + sqrt(other_norm) - sqrt(sum)) / numbers.tau + T(EPSILON);
    if constexpr (KIND == ADD_BUMP) return sum / numbers.edge;
    if constexpr (KIND == LAPLACE) return -sum / numbers.tau;
    return sum;
}

// what scores that are not divided yet are multiplied by
inline T unit(const Numbers &numbers) {
    return KIND == ADD_RIESZ || KIND == RIESZ ? 1 / numbers.tau : KIND == ADD_BUMP ? 1 / numbers.edge : T(1);
}

// the derivative of a term by the query, in units of 1 / tau; at a kink the mean of both sides; with SIGNS, its step
inline T slope(T difference, const Numbers &numbers) {
    if constexpr (SIGNS) return step(difference);
    // the factor 1 / |q - k| is in the scores already
    if constexpr (KIND == RIESZ) return -difference;
    if constexpr (KIND == ADD_BUMP) return -sign(difference) * step(numbers.edge - fabs(difference));
    if constexpr (KIND == ADD_LAPLACE) return -sign(difference) * power_of_two(-fabs(difference) * numbers.rate);
    if constexpr (KIND == SPLINE) return line_at(numbers, in_bandwidths(difference, numbers)).incline;
    if constexpr (KIND == POLYNOMIAL_EXPONENTIAL) {
        T x = distance(difference, numbers), value = 0, derivative = 0;
        numbers.each([&](T coefficient) {
            derivative = derivative * x + value;
            value = value * x + coefficient;
        });
        return x < 1000 ? sign(difference) * (derivative - value) * decay(x, difference, numbers) : T(0);
    }
}

// the derivative of the norm of a point by one of its coordinates, where Phi has such a term
inline T norm_slope(T point, T squares) {
    if constexpr (KIND == ADD_RIESZ) return sign(point);
    if constexpr (KIND == RIESZ) return squares > 0 ? point / sqrt(squares) : T(0);
    return 0;
}

inline T norm_term(T point) { return KIND == RIESZ ? point * point : fabs(point); }

// ---- who sees whom: a query sees a key if the key's mark is below its own

inline int query_mark(int m, int rows, int columns, int each, bool causal) {
    if (m >= rows) return 0;
    if (!causal) return columns;
    int seen = m % each + 1 + columns - each;
    return seen > 0 ? seen : 0;
}

inline int key_mark(long long n, long long columns, const T *weight) {
    return n < columns && !(weight && weight[n] == 0) ? n : NOWHERE;
}

template <bool KEYS> inline bool seen(int own, int other) { return KEYS ? own < other : other < own; }

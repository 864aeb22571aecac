// Matrices as they lie in global memory, in 16 bits or 32, and copies of them in shared memory; a part of short.cu.

// loads of a thread that are on their way at a time
constexpr int BATCH = 6;

// ---- numbers of 16 bits

inline float half_of(unsigned both, int which) {
    float found[2];
    asm("{.reg .f16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}"
        : "=f"(found[0]), "=f"(found[1])
        : "r"(both));
    return found[which];
}
inline float widen(float x) { return x; }
inline float widen(unsigned short x) { return TYPE == BFLOAT16 ? __uint_as_float(unsigned(x) << 16) : half_of(x, 0); }
inline void narrow(float x, float &to) { to = x; }
inline void narrow(float x, unsigned short &to) {
    unsigned bits = __float_as_uint(x);
    // to the nearest, of two equally near to the even one
    bits = x == x ? bits + 0x7fff + (bits >> 16 & 1) : 0x7fff0000;
    to = TYPE == BFLOAT16 ? bits >> 16 : pack(x, 0);
}
template <bool WIDE> struct Choose {
    using Type = float;
};
template <> struct Choose<false> {
    using Type = unsigned short;
};
using Stored = Choose<!NARROW>::Type;

// ---- matrices

template <class N, int COUNT> struct alignas(COUNT * sizeof(N)) Several {
    N x[COUNT];
};
template <class N> using Four = Several<N, 4>;
using Vector = Four<float>;

inline Vector read(const float *from) { return *reinterpret_cast<const Vector *>(from); }

// some rows of a head's matrix in global memory
template <class N> struct Matrix {
    N *start;
    long long stride;
    int count, width;
    bool whole;

    // `place` is of the head, in numbers
    Matrix(const N *tensor, long long place, long long stride, int first, int count, int width)
        : start(const_cast<N *>(tensor) + place + first * stride), stride(stride), count(count), width(width) {
        whole = (reinterpret_cast<unsigned long long>(start) % sizeof(Four<N>)) == 0 && (stride | width) % 4 == 0;
    }
    // four numbers of a row, zeros beyond the last; WHOLE ones can be read at once
    template <bool WHOLE = false> Vector get(int row, int column) const {
        Vector found = {};
        const N *from = start + row * stride + column;
        if (WHOLE && row < count && column < width) {
            Four<N> raw = *reinterpret_cast<const Four<N> *>(from);
            for (int e = 0; e < 4; ++e) found.x[e] = widen(raw.x[e]);
        }
        if (!WHOLE && row < count)
            for (int e = 0; e < 4; ++e)
                if (column + e < width) found.x[e] = widen(from[e]);
        return found;
    }
    void put(int row, int column, const float (&x)[4]) const {
        if (row >= count) return;
        Four<N> raw;
        for (int e = 0; e < 4; ++e) narrow(x[e], raw.x[e]);
        N *to = start + row * stride + column;
        if (whole && column < width)
            *reinterpret_cast<Four<N> *>(to) = raw;
        else
            for (int e = 0; e < 4; ++e)
                if (column + e < width) to[e] = raw.x[e];
    }
};

// the four columns of a thread, the same whatever it does
inline int column() { return threadIdx.x % COLUMNS * 4; }

// op(row, numbers) for `rows` rows of a matrix, zeros beyond; WHOLE ones are read some at a time
template <bool WHOLE, class Op> inline void each_of(const Matrix<Stored> &matrix, int rows, Op op) {
    constexpr int N = WHOLE ? BATCH : 1;
#pragma unroll 1
    for (int row = threadIdx.x / COLUMNS; row < rows; row += N * GROUPS) {
        Vector found[N];
#pragma unroll
        for (int b = 0; b < N; ++b) found[b] = matrix.get<WHOLE>(row + b * GROUPS, column());
#pragma unroll
        for (int b = 0; b < N; ++b)
            if (row + b * GROUPS < rows) op(row + b * GROUPS, found[b]);
    }
}
template <class Op> inline void each(const Matrix<Stored> &matrix, int rows, Op op) {
    if (matrix.whole)
        each_of<true>(matrix, rows, op);
    else
        each_of<false>(matrix, rows, op);
}

inline void load(float *tile, const Matrix<Stored> &matrix, int rows) {
    each(matrix, rows,
         [&](int row, const Vector &x) { *reinterpret_cast<Vector *>(tile + row * STRIDE + column()) = x; });
}

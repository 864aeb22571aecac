// Sums over the other rows of a tile, TM rows x 4 columns of a thread, and of whole rows; a part of tiled.cu and
// backward.cu.

template <bool TENSOR> inline void keep(Shared &shared, const T (&scores)[TM][TN]) {
    using Here = Cell<TENSOR>;
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) shared.scores[Here::column(i, j) * ACROSS_STRIDE + Here::row(i, j)] = scores[i][j];
}

// fresh[i][c] = op(fresh[i][c], score of own row i, column c of the other row), over all other rows
template <class Op> inline void spread(const Shared &shared, T (&fresh)[TM][4], Op op) {
    Place place;
    for (int i = 0; i < TM; ++i)
        for (int c = 0; c < 4; ++c) fresh[i][c] = 0;
#pragma unroll(TABLE ? 1 : 4)
    for (int n = 0; n < OTHER; ++n) {
        auto score = *reinterpret_cast<const Vector<TM> *>(shared.scores + n * ACROSS_STRIDE + place.down * TM);
        auto row = *reinterpret_cast<const Vector<4> *>(shared.second + n * STRIDE + place.across * 4);
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) op(fresh[i][c], score.x[i], row.x[c], i, c);
    }
}

// Where a thread's TM x 4 numbers lie in a tile of OWN rows x 64 columns: in a rectangle, or as tensor cores hold them.
template <bool TENSOR> struct Held {
    static int row(int i, int c) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return TENSOR ? warp % 2 * 32 + i / 4 * 16 + c / 2 * 8 + lane / 4 : Place().down * TM + i;
    }
    static int column(int i, int c) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return TENSOR ? warp / 2 * 32 + i % 4 * 8 + lane % 4 * 2 + c % 2 : Place().across * 4 + c;
    }
};

// running += scores times rows, on tensor cores. Three products of halves lose no more digits than float32 does. As the
// cores truncate their sums, these are short, and those of the small parts apart.
inline void add_rows(const Shared &shared, float (&running)[8][4], bool ordinary) {
    float lift = ordinary ? 1.0f : LIFT, drop = 1 / lift;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // any order of the other rows is right: this one meets every bank once
    const T *scores = shared.scores + lane % 4 * 2 * ACROSS_STRIDE + warp % 2 * 32 + lane / 4;
    const T *rows = shared.second + lane % 4 * 2 * STRIDE + warp / 2 * 32 + lane / 4;
#pragma unroll 1
    for (int start = 0; start < OTHER; start += OTHER / 2) {
        float large[8][4] = {}, small[8][4] = {};
#pragma unroll 1
        for (int n = start; n < start + OTHER / 2; n += 8) {
            unsigned a[2][2][4], b[4][2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    T score = scores[(n + e / 2) * ACROSS_STRIDE + i * 16 + e % 2 * 8];
                    split(score, a[i][0][e], a[i][1][e]);
                }
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) split(rows[(n + e) * STRIDE + j * 8] * lift, b[j][0][e], b[j][1][e]);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float (&more)[4] = large[i * 4 + j], (&less)[4] = small[i * 4 + j];
                    multiply(more[0], more[1], more[2], more[3], a[i][0], b[j][0]);
                    multiply(less[0], less[1], less[2], less[3], a[i][0], b[j][1]);
                    multiply(less[0], less[1], less[2], less[3], a[i][1], b[j][0]);
                }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) running[i][c] += (large[i][c] + small[i][c]) * drop;
    }
}

inline void add_rows(const Shared &shared, double (&running)[TM][4], bool) {
    T fresh[TM][4];
    spread(shared, fresh, [](T &sum, T score, T value, int, int) { sum += score * value; });
    for (int i = 0; i < TM; ++i)
        for (int c = 0; c < 4; ++c) running[i][c] += fresh[i][c];
}

// This thread's part of the sum of a row of the scores; after the last tile they are put together.
struct RowSum {
    int row = threadIdx.x % OWN, part = threadIdx.x / OWN;
    T running = 0;

    void add(const Shared &shared) {
        T fresh[4] = {};
#pragma unroll 4
        for (int n = 0; n < OTHER / PARTS; ++n)
            fresh[n % 4] += shared.scores[(part * (OTHER / PARTS) + n) * ACROSS_STRIDE + row];
        running += fresh[0] + fresh[1] + (fresh[2] + fresh[3]);
    }
    void leave(Shared &shared) const { shared.parts[part][row] = running; }
    static T whole(const Shared &shared, int row) {
        T sum = 0;
        for (int part = 0; part < PARTS; ++part) sum += shared.parts[part][row];
        return sum;
    }
};

// what a thread holds of every chunk
template <bool TENSOR> inline void put(T *matrix, int first, int count, int width, const T (&sums)[CHUNKS][TM][4]) {
    using Here = Held<TENSOR>;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                int row = first + Here::row(i, c), column = chunk * WIDTH + Here::column(i, c);
                if (row < count && column < width) matrix[(long long)row * width + column] = sums[chunk][i][c];
            }
}

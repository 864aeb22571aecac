// What kernels of the backward pass have in common beside tiled_block.cu: their inputs, the gradients by the scores.

struct Inputs {
    const T *grad, *grad_total, *query, *key, *value, *weight, *bandwidth, *table, *shift;
    long long rows, columns, dims, channels, each, causal, count;
    double tau;

    Numbers numbers(long long p) const { return Numbers(bandwidth ? bandwidth[p] : T(tau), table, count); }
};

// the gradients by the scores, sum over c of grad[m][c] value[n][c] + grad_total[m], zero for pairs that are not seen
template <bool KEYS, bool TENSOR> inline void score_gradients(Shared &shared, const Rows &own, const Rows &other,
                                                              int own_first, int other_first, T (&scores)[TM][TN]) {
    products<TENSOR>(shared, own, other, own_first, other_first, scores);
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            int m = Cell<TENSOR>::row(i, j), n = Cell<TENSOR>::column(i, j);
            T sum = scores[i][j] + shared.query_total[KEYS ? n : m];
            scores[i][j] = seen<KEYS>(shared.own_mark[m], shared.other_mark[n]) ? sum : T(0);
        }
}

template <bool KEYS> inline int mark(const Inputs &in, long long p, long long row) {
    if constexpr (KEYS) return key_mark(row, in.columns, in.weight ? in.weight + p * in.columns : nullptr);
    return query_mark(row, in.rows, in.columns, in.each, in.causal);
}

// what belongs to a query beside its points and gradients
inline void load_query(Shared &shared, const Inputs &in, long long p, int first, int place) {
    bool inside = first + place < in.rows;
    shared.query_total[place] = inside ? in.grad_total[p * in.rows + first + place] : T(0);
    shared.query_shift[place] = inside && in.shift ? in.shift[p * in.rows + first + place] : T(0);
}

// the sum of a number of every thread, for the first one; all shared memory is free to be written
inline double block_sum(double number) {
    double *numbers = reinterpret_cast<double *>(memory);
    numbers[threadIdx.x] = number;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) numbers[threadIdx.x] += numbers[threadIdx.x + half];
        __syncthreads();
    }
    return numbers[0];
}

#define INPUTS                                                                                                         \
    const T *grad, const T *grad_total, const T *query, const T *key, const T *value, const T *weight,                 \
        const T *bandwidth, const T *table, const T *shift, long long rows, long long columns, long long dims,         \
        long long channels, long long each, long long causal, long long count, double tau
#define AS_STRUCT                                                                                                      \
    Inputs {                                                                                                           \
        grad, grad_total, query, key, value, weight, bandwidth, table, shift, rows, columns, dims, channels, each,     \
            causal, count, tau                                                                                         \
    }

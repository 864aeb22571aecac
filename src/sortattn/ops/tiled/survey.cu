// How far the numbers of every head reach: one look at queries, keys and values before they are summed.
//
// Set by cuda_kernels.py: NUMBER (float or double), EARLY (1 if the launch behind may begin before this one ends).

#include "found.cu"

constexpr int THREADS = 256;

// A block has one of `slices` parts of the queries of a head, of the keys or of the values of a problem. With
// `centred`, distances are measured from the first key.
extern "C" __global__ void __launch_bounds__(THREADS)
    survey(const NUMBER *query, const NUMBER *key, const NUMBER *value, Found *found, long long each, long long columns,
           long long dims, long long channels, long long group, long long slices, long long centred) {
    let_next_begin();
    long long part = blockIdx.x / slices, slice = blockIdx.x % slices, p = part / (group + 2);
    int kind = part % (group + 2);
    const NUMBER *origin = key + p * columns * dims, *rows = origin;
    long long count = columns, width = dims;
    if (kind < group)
        rows = query + (p * group + kind) * each * dims, count = each;
    else if (kind > group)
        rows = value + p * columns * channels, width = channels;
    bool moved = centred && kind <= group && columns;
    long long share = (count + slices - 1) / slices, start = min(slice * share, count) * width;
    long long end = min((slice + 1) * share, count) * width;
    Found mine = {};
    constexpr int N = 16 / sizeof(NUMBER);
    struct alignas(16) Vector {
        NUMBER x[N];
    };
    bool whole = (reinterpret_cast<unsigned long long>(rows) | width * sizeof(NUMBER)) % 16 == 0;
    if (whole)
#pragma unroll 4
        for (long long i = start + threadIdx.x * N; i < end; i += THREADS * N) {
            Vector found = *reinterpret_cast<const Vector *>(rows + i);
            int column = moved ? unsigned(i) % unsigned(width) : 0;
            for (int e = 0; e < N; ++e) look(found.x[e], moved ? origin[column + e] : NUMBER(0), mine);
        }
    else
        for (long long i = start + threadIdx.x; i < end; i += THREADS)
            look(rows[i], moved ? origin[i % width] : NUMBER(0), mine);

    __shared__ Found parts[THREADS / 32];
    report(mine, parts, THREADS / 32, found[blockIdx.x]);
}

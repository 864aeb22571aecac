// One look at queries, keys and values as that of survey.cu, which leaves factors of the keys of `add_laplace` and
// halves of the values where stream.cu finds them: so they are made once, and not by every block of a head.
//
// Set by cuda.py: NUMBER (float), KERNEL (ADD_LAPLACE), EPSILON (which no kernel here has), EARLY (1 if the launch
// behind may begin before this one ends).

#include "kinds.cu"

#include "layout.cu"

constexpr int THREADS = 256, ROWS = 64;

struct Points {
    const float *start;
    int count, width;
    bool whole;

    Points(const float *start, long long count, long long width) : start(start), count(count), width(width) {
        whole = (reinterpret_cast<unsigned long long>(start) | width * 4) % 16 == 0;
    }
    bool has(int row, int column) const { return row < count && column < width; }
    // four numbers of a row, zero where there are none
    float4 read(int row, int column) const {
        float x[4] = {};
        const float *from = start + (long long)row * width + column;
        if (whole) return has(row, column) ? *reinterpret_cast<const float4 *>(from) : float4{0, 0, 0, 0};
        for (int e = 0; e < 4; ++e)
            if (has(row, column + e)) x[e] = from[e];
        return {x[0], x[1], x[2], x[3]};
    }
};

// 64 rows from `first` on; of keys, their factors
template <bool KEYS> inline void look_at_points(const Points &points, int first, const float *origin, int dims,
                                                float rate, float4 *to, Found &mine) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 8 + lane % 8, four = lane / 8 * 4;
    // as a warp writes them, eight rows and four dimensions side by side are a line of memory
    float4 found[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) found[i] = points.read(first + row, i * CHUNK_DIMS + four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int column = i * CHUNK_DIMS + four;
        float x[4] = {found[i].x, found[i].y, found[i].z, found[i].w}, y[8];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            bool inside = points.has(first + row, column + e);
            float from = inside ? origin[column + e] : 0.0f;
            if (inside) look(x[e], from, mine);
            if (!KEYS) continue;
            float place = (x[e] - from) * rate;
            // e^-2t and e^t; what is not there adds nothing
            y[2 * e] = inside ? power_of_two(-2 * place) : 0.0f, y[2 * e + 1] = inside ? power_of_two(place) : 0.0f;
        }
        if (!KEYS || i >= key_chunks(dims)) continue;
        to[factors_at(column, row)] = {y[0], y[1], y[2], y[3]};
        to[factors_at(column + 2, row)] = {y[4], y[5], y[6], y[7]};
    }
}

// the halves of 64 values from `first` on
inline void look_at_values(const Points &values, int first, uint4 *to, Found &mine) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int s = warp % 4, t = lane % 4, channel = warp / 4 * 32 + lane / 4 * 4;
    float x[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float4 found = values.read(first + s * 16 + 2 * t + k / 2 * 8 + k % 2, channel);
        x[k][0] = found.x, x[k][1] = found.y, x[k][2] = found.z, x[k][3] = found.w;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        // what is not there is zero
#pragma unroll
        for (int k = 0; k < 4; ++k) look(x[k][e], 0.0f, mine);
        uint4 words;
        split(x[0][e], x[1][e], words.x, words.z), split(x[2][e], x[3][e], words.y, words.w);
        to[halves_at(s, channel + e, t)] = words;
    }
}

// Blocks have parts as in survey.cu, and of a part every so many times 64 rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    chunks(const float *query, const float *key, const float *value, const float *bandwidth, Found *found, float *to,
           long long each, long long columns, long long dims, long long channels, long long group, long long slices,
           double tau) {
    let_next_begin();
    long long part = blockIdx.x / slices, p = part / (group + 2);
    int slice = blockIdx.x % slices, kind = part % (group + 2), size = chunks_of(dims) * CHUNK;
    const float *origin = key + p * columns * dims;
    to += p * ((columns + ROWS - 1) / ROWS) * size;
    Found mine = {};
    if (kind < group) {
        Points queries(query + (p * group + kind) * each * dims, each, dims);
        for (int first = slice * ROWS; columns && first < each; first += slices * ROWS)
            look_at_points<false>(queries, first, origin, dims, 0, nullptr, mine);
    } else if (kind == group) {
        Points keys(origin, columns, dims);
        Numbers numbers(bandwidth ? bandwidth[p] : float(tau), nullptr, 0);
        for (int tile = slice; tile * ROWS < columns; tile += slices)
            look_at_points<true>(keys, tile * ROWS, origin, dims, numbers.rate,
                                 reinterpret_cast<float4 *>(to + (long long)tile * size), mine);
    } else {
        Points values(value + p * columns * channels, columns, channels);
        for (int tile = slice; tile * ROWS < columns; tile += slices)
            look_at_values(values, tile * ROWS,
                           reinterpret_cast<uint4 *>(to + (long long)tile * size + key_chunks(dims) * CHUNK), mine);
    }
    __shared__ Found parts[THREADS / 32];
    report(mine, parts, THREADS / 32, found[blockIdx.x]);
}

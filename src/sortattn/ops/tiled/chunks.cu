// Keys as the sums of their terms want them and halves of values, where stream.cu finds them: so they are made once,
// and not by every block of a head. They are looked through as by survey.cu, and in its place.
//
// Set by cuda_kernels.py: NUMBER (float), KERNEL (a name of Kind), EPSILON (of the Riesz kernels), EARLY (1 if the
// launch behind may begin before this one ends).

#include "kinds.cu"

#include "points.cu"

#include "layout.cu"

static_assert(!FIXED, "fixed points need to know what is found here");

// blocks on a multiprocessor: with as many registers as they take it would have four, and six have too few
constexpr int THREADS = 256, BLOCKS = 5, ROWS = 64;

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

// 64 rows from `first` on; of keys, their units
template <bool KEYS> inline void look_at_points(const Points &points, int first, const float *origin,
                                                const Setting &setting, float4 *to, Found &mine) {
    // as a warp writes them, units of eight rows are a line of memory
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 8 + lane % 8, four = lane / 8 * 4;
    float4 found[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) found[i] = points.read(first + row, i * 16 + four);
    // the first key, if there is one
    Points origins(origin, ORIGIN && origin && first + row < points.count ? 1 : 0, points.width);
    float4 origin_of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) origin_of[i] = origins.read(0, i * 16 + four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int column = i * 16 + four;
        float from[4] = {origin_of[i].x, origin_of[i].y, origin_of[i].z, origin_of[i].w};
        float x[4] = {found[i].x, found[i].y, found[i].z, found[i].w}, y[FOUR];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            bool inside = points.has(first + row, column + e);
            if (inside) look(x[e], from[e], mine);
            x[e] -= from[e];
        }
        if (!KEYS || column / CHUNK_DIMS >= key_chunks(setting.dims)) continue;
        make_quick<true>(x, column, setting, y);
#pragma unroll
        for (int e = 0; e < FOUR; e += 4) to[unit_at(column, row) + e / 4 * 64] = {y[e], y[e + 1], y[e + 2], y[e + 3]};
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
        for (int k = 0; k < 4; ++k) {
            look(x[k][e], 0.0f, mine);
            x[k][e] *= float(1 << LIFTED);
        }
        uint4 words;
        split(x[0][e], x[1][e], words.x, words.z), split(x[2][e], x[3][e], words.y, words.w);
        to[halves_at(s, channel + e, t)] = words;
    }
}

// Blocks have parts as in survey.cu, and of a part every so many times 64 rows.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    chunks(const float *query, const float *key, const float *value, const float *bandwidth, Found *found, float *to,
           long long each, long long columns, long long dims, long long channels, long long group, long long slices,
           double tau) {
    long long part = blockIdx.x / slices, p = part / (group + 2);
    int slice = blockIdx.x % slices, kind = part % (group + 2), size = chunks_of(dims) * CHUNK;
    const float *origin = key + p * columns * dims;
    to += p * ((columns + ROWS - 1) / ROWS) * size;
    Setting setting{Numbers(bandwidth ? bandwidth[p] : float(tau), nullptr, 0), true, 1, 1, int(dims)};
    let_next_begin();
    Found mine = {};
    if (kind < group) {
        Points queries(query + (p * group + kind) * each * dims, each, dims);
        for (int first = slice * ROWS; first < each; first += slices * ROWS)
            look_at_points<false>(queries, first, columns ? origin : nullptr, setting, nullptr, mine);
    } else if (kind == group) {
        Points keys(origin, columns, dims);
        for (int tile = slice; tile * ROWS < columns; tile += slices)
            look_at_points<true>(keys, tile * ROWS, origin, setting,
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

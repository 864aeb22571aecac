// Sorted runs of long lines are merged, where these could not be split.
//
// sort.cu comes before.

// a thread of a block that merges writes MERGED places
constexpr int MERGERS = 256;
constexpr int MERGED = 8;
constexpr int TILE = MERGERS * MERGED;

// Neighbours that fall into the same bank are kept apart.
__device__ inline int apart(int i) { return i + i / 32; }

// A tile of a line, from place `out` on.
__device__ inline void merge_tile(const int *order, const float *places, int *merged_order, float *merged_places,
                                  index_t out, index_t count, index_t length) {
    __shared__ float numbers[TILE + TILE / 32];
    __shared__ int indices[TILE + TILE / 32];
    __shared__ int bounds[2];
    // the length of a run is a multiple of TILE: the places of a block are in one pair of runs
    index_t start = out / (2 * length) * (2 * length), middle = min(start + length, count),
            stop = min(start + 2 * length, count);
    int left_length = int(middle - start), right_length = int(stop - middle), warp = threadIdx.x / 32;
    int number = int(min(index_t(TILE), stop - out)), from = int(out - start);
    if (warp < 2) {
        int diagonal = from + warp * number;
        // of the places before, those of the left one
        int left = first_without(max(diagonal - right_length, 0), min(diagonal, left_length), [&](int half) {
            return places[start + half] <= places[middle + diagonal - half - 1];
        });
        if (threadIdx.x % 32 == 0) bounds[warp] = left;
    }
    __syncthreads();
    int left = bounds[0], lefts = bounds[1] - left, right = from - left;
    for (int i = threadIdx.x; i < number; i += MERGERS) {
        index_t at = i < lefts ? start + left + i : middle + right + i - lefts;
        numbers[apart(i)] = places[at];
        indices[apart(i)] = order[at];
    }
    __syncthreads();
    int diagonal = min(int(threadIdx.x) * MERGED, number), rights = number - lefts;
    int low = max(diagonal - rights, 0), high = min(diagonal, lefts);
    while (low < high) {
        int half = (low + high) / 2;
        if (numbers[apart(half)] <= numbers[apart(lefts + diagonal - half - 1)])
            low = half + 1;
        else
            high = half;
    }
    int a = low, b = lefts + diagonal - low;
    float merged[MERGED];
    int merged_indices[MERGED];
#pragma unroll
    for (int i = 0; i < MERGED; i++) {
        bool from_left = b >= number || (a < lefts && numbers[apart(a)] <= numbers[apart(b)]);
        int next = diagonal + i < number ? apart(from_left ? a++ : b++) : 0;
        merged[i] = numbers[next];
        merged_indices[i] = indices[next];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MERGED; i++) {
        if (diagonal + i < number) {
            numbers[apart(diagonal + i)] = merged[i];
            indices[apart(diagonal + i)] = merged_indices[i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < number; i += MERGERS) {
        merged_order[out + i] = indices[apart(i)];
        merged_places[out + i] = numbers[apart(i)];
    }
}

// Merge neighbouring sorted runs of `length` into runs twice as long, TILE places at a time, of all `lines`.
extern "C" __global__ void __launch_bounds__(MERGERS)
    merge_runs(const int *order, const float *places, int *merged_order, float *merged_places, const int *sorted,
               index_t lines, index_t count, index_t length) {
    for_unsorted(sorted, lines, (count + TILE - 1) / TILE, [&](index_t line, index_t tile) {
        index_t first = line * count;
        merge_tile(order + first, places + first, merged_order + first, merged_places + first, tile * TILE, count,
                   length);
        __syncthreads();
    });
}

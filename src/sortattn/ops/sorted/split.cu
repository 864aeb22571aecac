// The keys of long lines are put into stretches that fit into shared memory, between keys of a sorted sample.
//
// sort.cu comes before.

// threads of a block that splits, and keys of each that are on their way at a time
constexpr int SPLITTERS = 512, SOME = 8;
// lines of a block: what it reads of a sector; points of each, all of them and those of a tile
constexpr int LINES = 8, EACH = SPLITTERS / LINES;
constexpr int SEGMENT = 4096, TILED = SOME * EACH;
// pieces of a line between which its stretches are looked for
constexpr int PIECES = 256;
// one of so many neighbours in a sample is looked at for ties
constexpr int LOOKED = 8;

// The stretches of a line, of which all but the first begin at `bounds[1 ... parts - 1]`, and none at the next one,
// found by a table of pieces of equal width: how many begin before a piece, and above the lower sixteen bits how many
// in it.
struct Stretches {
    float low, scale;
    const float *bounds;
    word *pieces;
    Keys keys;

    // from the ends of a sample; if these are equal or too far apart for a float there is one piece
    __device__ Stretches(float least, float most, const float *bounds, word *pieces, const Keys &keys)
        : low(keys.along(least)), scale(float(PIECES - 1) / (keys.along(most) - low)), bounds(bounds), pieces(pieces),
          keys(keys) {
        if (!(scale < 1e30f)) scale = 0.0f;
    }
    __device__ int piece(float x) const {
        float where = fminf(fmaxf(__fmul_rn(keys.along(x) - low, scale), 0.0f), float(PIECES - 1));
        return Buckets::integer(Buckets::closest(where));
    }
    __device__ void fill(int piece, int parts) const {
        int before = 0, some = 0;
        for (int i = 1; i < parts; i++) {
            int other = this->piece(bounds[i]);
            before += other < piece;
            some += other == piece;
        }
        pieces[piece] = word(before) | word(some) << 16;
    }
    // the last stretch that does not begin behind, where several begin in a piece
    __device__ int search(float x, word piece) const {
        int low = piece & 0xffff, high = low + int(piece >> 16);
        while (low < high) {
            int half = (low + high + 1) / 2;
            if (bounds[half] <= x)
                low = half;
            else
                high = half - 1;
        }
        return low;
    }
    // those of several keys, whose reads are on their way together
    __device__ void find(const float (&key)[SOME], word (&stretch)[SOME]) const {
        word all = 0;
#pragma unroll
        for (int i = 0; i < SOME; i++) stretch[i] = pieces[piece(key[i])], all |= stretch[i];
        if (all < 0x20000) {
#pragma unroll
            for (int i = 0; i < SOME; i++) {
                word before = stretch[i] & 0xffff;
                stretch[i] = before + (bounds[before + 1] <= key[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < SOME; i++) stretch[i] = search(key[i], stretch[i]);
        }
    }
};

// Whether every other neighbour in a sample is equal, of those that all threads of a line look at.
__device__ inline bool crowded(const float *sample, index_t sampled, bool here, int *ties) {
    int mine = threadIdx.x % LINES, equal = 0, seen = 0;
    if (threadIdx.x < LINES) ties[mine] = 0;
    __syncthreads();
    for (index_t i = threadIdx.x / LINES * LOOKED + 1; here && i < sampled; i += EACH * LOOKED, seen++)
        equal += sample[i] == sample[i - 1];
    if (2 * equal - seen) atomicAdd(ties + mine, 2 * equal - seen);
    __syncthreads();
    return ties[mine] >= 0;
}

// By one warp a line: where the keys of every stretch begin in a tile, with their number in the lower sixteen bits, and
// where they go to, behind the `sizes` that are there; `counts` are zero again.
__device__ inline void reserve(int *counts, word *runs, int *bases, int *sizes, int parts, int first) {
    int lane = threadIdx.x % 32;
    for (int part = lane; part - lane < parts; part += 32) {
        int some = part < parts ? counts[part] : 0, sum = some;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            int other = __shfl_up_sync(ALL, sum, offset);
            if (lane >= offset) sum += other;
        }
        if (part < parts) {
            runs[part] = word(first + sum - some) << 16 | word(some);
            counts[part] = 0;
            if (some) bases[part] = atomicAdd(sizes + part, some);
        }
        first += __shfl_sync(ALL, sum, 31);
    }
}

// Put the keys of every dimension of `points (heads, count, dims)` into one of `parts` stretches, with their indices:
// `pairs (heads * dims, parts, RUN)`, of which there are `sizes (heads * dims, parts)`, zero before. They are split at
// keys of a sample of every line, `sample (heads * dims, sampled)` in order. `sorted`, one before, becomes zero for
// lines with too long a stretch and, if equal keys are to keep their order, for those with so many ties in the sample
// that stretches would be crowded. What is no finite number is counted as in `Unfit`.
extern "C" __global__ void __launch_bounds__(SPLITTERS, 3)
    split(const given_t *points, const float *sample, uint2 *pairs, int *sizes, int *sorted, index_t count,
          index_t dims, index_t parts_of, index_t sampled, index_t stable, int *unfit, index_t group_of, index_t each,
          const Winding *windings) {
    extern __shared__ __align__(16) char shared[];
    __shared__ int ties[LINES];
    // of 32 bits, as divisions of 64 take their time
    word segments = word((count + SEGMENT - 1) / SEGMENT), groups = word((dims + LINES - 1) / LINES);
    word group = blockIdx.x / segments, start = blockIdx.x % segments * SEGMENT;
    index_t head = group / groups, d = group % groups * LINES, line = head * dims + d;
    int mine = threadIdx.x % LINES, thread = threadIdx.x / LINES, lines = int(min(dims - d, index_t(LINES)));
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = int(parts_of), all = parts * LINES;
    // the keys of a tile in the order of their stretches; of the stretches of every line: the number of keys in a tile,
    // where they are and where they go to, and the first key; then the pieces of every line
    uint2 *staged = reinterpret_cast<uint2 *>(shared);
    int *counts = reinterpret_cast<int *>(staged + LINES * TILED), *bases = counts + all;
    word *runs = reinterpret_cast<word *>(bases + all);
    float *bounds = reinterpret_cast<float *>(runs + all);
    word *pieces = reinterpret_cast<word *>(bounds + all + LINES);
    bool here = mine < lines;
    sample += (line + (here ? mine : 0)) * sampled;
    Keys line_keys(windings, line + (here ? mine : 0));
    Stretches stretches(sample[0], sample[sampled - 1], bounds + mine * (parts + 1), pieces + mine * PIECES, line_keys);
    for (int i = thread; i <= parts; i += EACH) {
        if (i < parts) counts[mine * parts + i] = 0;
        bounds[mine * (parts + 1) + i] =
            i < parts ? sample[word(sampled) * word(i) / word(parts)] : __uint_as_float(BEHIND_ALL);
    }
    if (stable && crowded(sample, sampled, here, ties)) {
        if (here) sorted[line + mine] = 0;
        here = false;
    }
    __syncthreads();
    for (int i = thread; i < PIECES; i += EACH) stretches.fill(i, parts);
    __syncthreads();

    // no longer, if a key of this thread is no finite number
    float zero = 0.0f;
    int number_of = int(min(count - start, index_t(SEGMENT)));
    // those of this thread
    int some_keys = here ? (number_of - thread + EACH - 1) / EACH : 0;
    const given_t *keys = points + (head * count + start + thread) * dims + d + mine;
    index_t step = EACH * dims;
    int *counts_here = counts + mine * parts;
    const word *runs_here = runs + mine * parts;
    for (int tile = 0; tile * EACH < number_of; tile += SOME) {
        float key[SOME];
        // above the lower sixteen bits, in the end, which count the keys that came before
        word stretch[SOME];
        // without a branch for each, all of them are on their way at a time
        auto for_keys_there = [&](auto body) {
            if (tile + SOME <= some_keys) {
#pragma unroll
                for (int i = 0; i < SOME; i++) body(i);
                return;
            }
#pragma unroll
            for (int i = 0; i < SOME; i++) {
                if (tile + i < some_keys) body(i);
            }
        };
#pragma unroll
        for (int i = 0; i < SOME; i++) key[i] = 0.0f;
        for_keys_there([&](int i) { key[i] = widen(keys[i * step]); });
        keys += SOME * step;
#pragma unroll
        for (int i = 0; i < SOME; i++) zero += 0.0f * key[i], key[i] += 0.0f;
        if (zero != 0.0f) {
#pragma unroll
            for (int i = 0; i < SOME; i++) key[i] = clean(key[i]);
        }
#pragma unroll
        for (int i = 0; i < SOME; i++) key[i] = line_keys.of(key[i]);
        stretches.find(key, stretch);
        for_keys_there([&](int i) { stretch[i] = stretch[i] << 16 | word(atomicAdd(counts_here + stretch[i], 1)); });
        __syncthreads();
        int total = min(TILED, number_of - tile * EACH);
        if (warp < lines) {
            int first = warp * parts;
            reserve(counts + first, runs + first, bases + first, sizes + line * parts + first, parts, warp * total);
        }
        __syncthreads();
        for_keys_there([&](int i) {
            word at = (runs_here[stretch[i] >> 16] >> 16) + (stretch[i] & 0xffff);
            staged[at] = {__float_as_uint(key[i]), start + (tile + i) * EACH + thread};
        });
        __syncthreads();
        // a warp writes the keys of a stretch
        for (int i = warp; i < lines * parts; i += SPLITTERS / 32) {
            int some = runs[i] & 0xffff, from = runs[i] >> 16, base = some ? bases[i] : 0;
            if (base + some > RUN) {
                if (lane == 0) sorted[line + i / parts] = 0;
                continue;
            }
            uint2 *to = pairs + (line * parts + i) * RUN + base;
#pragma unroll 4
            for (int k = lane; k < some; k += 32) to[k] = staged[from + k];
        }
    }
    if (zero == 0.0f) return;
    Unfit looking = {unfit, group_of, each};
    keys = points + (head * count + start + thread) * dims + d + mine;
    for (int i = 0; i < some_keys; i++, keys += step) {
        if (!finite(widen(*keys))) looking.mark(head, start + i * EACH + thread);
    }
}

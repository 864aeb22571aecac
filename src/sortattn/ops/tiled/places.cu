// Own points in order, and the places of the others among them, as halves; a part of slopes.cu.

// of powers of two that halves hold
constexpr float MOST = 14.0f;

// halves from `x` up to 2 x, of which there are 1024: x, and so many of these steps more
constexpr unsigned HALF_512 = 0x6000, HALF_513 = 0x6002;
inline unsigned subtract(unsigned one, unsigned other) {
    unsigned result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(one), "r"(other));
    return result;
}

// whether an own coordinate is below the step that another one makes, or at it, but for rounding
template <int STEP> inline bool below(float own, float other, const Numbers &numbers) {
    if constexpr (KIND == ADD_BUMP && STEP) return own - other < (STEP == 1 ? -numbers.edge : numbers.edge);
    return own < other;
}
template <int STEP> inline bool level(float own, float other, const Numbers &numbers) {
    if constexpr (KIND == ADD_BUMP && STEP) return own - other == (STEP == 1 ? -numbers.edge : numbers.edge);
    return own == other;
}
// how far it is beyond it where rounding says that it is level: what the difference has lost, which no rounding
// touches, and what the edge has
template <int STEP> inline float lost(float own, float other, const Numbers &numbers) {
    if constexpr (KIND == ADD_BUMP && STEP) {
        float difference = own - other, minus = difference - own;
        return ((own - (difference - minus)) - (other + minus)) - (STEP == 1 ? -numbers.rest : numbers.rest);
    }
    return 0.0f;
}

// How many of COUNT sorted numbers of a column of `tile` are below, for N at a time, whose reads overlap; in bytes from
// the start of the column, as addresses are made of it.
constexpr int BYTES = WIDTH * sizeof(float);
inline float at(const float *tile, int bytes) {
    return *reinterpret_cast<const float *>(reinterpret_cast<const char *>(tile) + bytes);
}
template <int COUNT, int N, class Below>
inline void search(const float *tile, int column, int (&found)[N], Below below) {
    // the first two of these are the same numbers for all
    float middle = tile[(COUNT / 2 - 1) * WIDTH + column];
    float low = tile[(COUNT / 4 - 1) * WIDTH + column], high = tile[(COUNT / 4 * 3 - 1) * WIDTH + column];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        bool up = below(middle, k);
        found[k] = 4 * column + (up ? COUNT / 2 * BYTES : 0);
        if (below(up ? high : low, k)) found[k] += COUNT / 4 * BYTES;
    }
#pragma unroll
    for (int step = COUNT / 8; step; step /= 2)
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (below(at(tile, found[k] + (step - 1) * BYTES), k)) found[k] += step * BYTES;
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (below(at(tile, found[k]), k)) found[k] += BYTES;
}

// a thread has a dimension, and a part of the `count` other rows
template <int STEP> inline void find_places(Shared &shared, const Numbers &numbers, int count) {
    int d = threadIdx.x % WIDTH, start = threadIdx.x / WIDTH * (OTHER * WIDTH / THREADS);
    constexpr int N = 8;
#pragma unroll 1
    for (int i = start; i < min(start + OTHER * WIDTH / THREADS, count); i += N) {
        float others[N];
        int found[N];
#pragma unroll
        for (int k = 0; k < N; ++k) others[k] = shared.points[(i + k) * WIDTH + d] * numbers.scale;
        search<OWN>(shared.sorted, d, found, [&](float own, int k) { return below<STEP>(own, others[k], numbers); });
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            // twice the number of own coordinates below, and one more if the next is level
            unsigned both[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float other = others[k + e], own = at(shared.sorted, found[k + e]), rest = 1.0f;
                // rounding keeps the order, so those that it makes level are neighbours; hardly ever there are any
                while (level<STEP>(own, other, numbers) && (rest = lost<STEP>(own, other, numbers)) < 0.0f)
                    own = at(shared.sorted, found[k + e] += BYTES);
                both[e] = unsigned(found[k + e]) / BYTES * 2 + (level<STEP>(own, other, numbers) && rest == 0.0f);
            }
            // one less that number, and half less at a tie: this and a rank are above zero behind the step, a half at
            // it
            unsigned halves = (HALF_512 | HALF_512 << 16) + (both[0] | both[1] << 16);
            shared.places[STEP][d * PLACES + (i + k) / 2] = subtract(HALF_513 | HALF_513 << 16, halves);
        }
    }
}

// e^t and e^-t of the other rows, as powers of two from an own point in the middle; returns whether one is out of reach
inline bool find_factors(Shared &shared, float origin, float rate, int count) {
    bool far = false;
    int d = threadIdx.x % WIDTH, start = threadIdx.x / WIDTH * (OTHER * WIDTH / THREADS);
#pragma unroll 4
    for (int i = 0; i < OTHER * WIDTH / THREADS; i += 2) {
        float rise[2], fall[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float x = (shared.points[(start + i + e) * WIDTH + d] - origin) * rate;
            // not `>`, which is false for a NaN
            far |= start + i + e < count && !(fabsf(x) <= MOST);
            x = fminf(fmaxf(x, -MOST), MOST);
            // twice as large as they are, for the sake of the smallest
            rise[e] = power_of_two(x + 1), fall[e] = power_of_two(1 - x);
        }
        int place = d * PLACES + (start + i) / 2;
        unsigned small[2];
        split(rise[0], rise[1], shared.places[1][place], small[0]);
        split(fall[0], fall[1], shared.places[1 + PARTS][place], small[1]);
        if (PARTS > 1) shared.places[2][place] = small[0], shared.places[2 + PARTS][place] = small[1];
    }
    return far;
}

// sorts 32 numbers that a thread holds
inline void sort(float (&x)[32]) {
#pragma unroll
    for (int size = 0; size < 5; ++size)
#pragma unroll
        for (int stride = size; stride >= 0; --stride)
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (!(i >> stride & 1)) {
                    int j = i | 1 << stride;
                    float low = fminf(x[i], x[j]), high = fmaxf(x[i], x[j]);
                    bool up = size == 4 || !(i >> (size + 1) & 1);
                    x[i] = up ? low : high, x[j] = up ? high : low;
                }
}

// own points in order, and the ranks; first two threads have a dimension, and then four
inline void sort_own(Shared &shared, const float *points, int count, int dims, float scale) {
    int d = threadIdx.x % WIDTH, part = threadIdx.x / WIDTH;
    auto point = [&](int row) {
        return row >= count ? infinity() : d < dims ? points[(long long)row * dims + d] * scale : 0.0f;
    };
    if (part < 2) {
        float x[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = point(part * 32 + i);
        sort(x);
#pragma unroll
        for (int i = 0; i < 32; ++i) shared.runs[(part * 32 + i) * WIDTH + d] = x[i];
    }
    __syncthreads();
    const float *yours = shared.runs + (1 - part) * 32 * WIDTH;
    constexpr int N = 8;
#pragma unroll 1
    for (int i = part < 2 ? 0 : 32; i < 32; i += N) {
        float own[N];
        int found[N];
#pragma unroll
        for (int k = 0; k < N; ++k) own[k] = shared.runs[(part * 32 + i + k) * WIDTH + d];
        // of equal numbers those of the first part come first
        search<32>(yours, d, found, [&](float x, int k) { return x < own[k] || (part && x == own[k]); });
#pragma unroll
        for (int k = 0; k < N; ++k) shared.sorted[found[k] / 4 + (i + k) * WIDTH] = own[k];
    }
    if (part == 0) shared.sorted[OWN * WIDTH + d] = infinity() - infinity();
    __syncthreads();
    unsigned short *ranks = reinterpret_cast<unsigned short *>(shared.ranks);
#pragma unroll 1
    for (int i = part * 16; i < part * 16 + 16; i += N) {
        float own[N];
        int found[N];
#pragma unroll
        for (int k = 0; k < N; ++k) own[k] = point(i + k);
        search<OWN>(shared.sorted, d, found, [&](float x, int k) { return x < own[k]; });
#pragma unroll
        for (int k = 0; k < N; ++k) {
            unsigned twice = unsigned(found[k]) / BYTES * 2;
            unsigned short rank = subtract(HALF_512 + twice, HALF_512);
            ranks[(((i + k) * 4 + d / 16) * 8 + d % 8) * 2 + d % 16 / 8] = rank;
        }
    }
}

// Points as quick sums of terms want them; a part of forward.cu and of chunks.cu.

// |s - t| of integers is one instruction with its sum, on another pipe than float's two: of four dimensions three are
// taken so, which keeps both pipes busy
constexpr bool FIXED = KIND == ADD_RIESZ || KIND == LAPLACE;
constexpr int FIXED_DIMS = 3;
// points this much farther out than the mean leave the others too few digits
constexpr float OUTLIER = KIND == ADD_RIESZ ? 32.0f : 64.0f;
constexpr int FEWEST_DIMS = 32;
// sums of e^-|s - t| as factors and distances of fixed points are measured from the first key
constexpr bool ORIGIN = KIND == ADD_LAPLACE || KIND == LAPLACE;

// what the block knows of its head
struct Setting {
    Numbers numbers;
    // scores are sums of fixed points, or of factors
    bool quick;
    // of a fixed point
    float scale, back;
    int dims;
    // of a bump, as small as the points
    float edge = 0;
};

inline void settle_fixed(Setting &setting, float reach, float mean) {
    setting.quick = setting.dims >= FEWEST_DIMS && reach <= OUTLIER * mean && reach > 0x1p-60f && reach < 0x1p60f;
    int exponent;
    frexp(reach, &exponent);
    // two of these differ by less than 2^25, and 64 such differences fit into 32 bits
    setting.scale = ldexp(1.0f, 24 - exponent);
    setting.back = ldexp(1.0f, exponent - 24);
}

// Registers lie in two banks, by their numbers, and an instruction that reads two of one bank takes a cycle more. Four
// numbers that are read from shared memory at once begin at a multiple of four, so neighbours of keys are exchanged:
// then numbers of a query and of a key that belong together are in different banks. Of instructions with three
// registers two are in one bank anyway, so sums of distances gain nothing.
constexpr bool EXCHANGED = KIND == ADD_BUMP || KIND == ADD_LAPLACE;
constexpr int beside(int e) { return EXCHANGED ? e ^ 1 : e; }

// four dimensions are so many numbers
constexpr int FOUR = FACTORS ? 8 : 4;

// of a point measured from the origin, the four dimensions from `column` on
template <bool KEYS> inline void make_quick(const float (&x)[4], int column, const Setting &setting, float (&y)[FOUR]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        bool inside = column + i < setting.dims;
        if constexpr (FACTORS) {
            float place = x[i] * setting.numbers.rate;
            // e^-s and e^2s of a query, e^-2t and e^t of a key; a dimension beyond the last adds nothing
            y[2 * i] = inside ? power_of_two(KEYS ? -2 * place : -place) : 0.0f;
            y[2 * i + 1] = inside ? power_of_two(KEYS ? place : 2 * place) : 0.0f;
            continue;
        }
        float &to = y[KEYS ? beside(i) : i];
        to = x[i];
        if constexpr (FIXED) {
            // |s - t| is 2 max(s - t, 0) - (s - t), in the last of four dimensions
            if (i < FIXED_DIMS)
                to = __int_as_float(__float2int_rn(x[i] * setting.scale));
            else if (KIND == ADD_RIESZ)
                to = x[i] * setting.scale * 0x1p-75f * 0x1p-75f;
        }
        // far from the zeros beyond the last dimension of a query
        if constexpr (KIND == ADD_BUMP) to = (KEYS && !inside ? 4 : x[i] * setting.numbers.scale) * 0x1p-125f;
    }
}

// what four dimensions add to the norm of a point, and where the last of them is a sum of its sign's
template <bool KEYS> inline float norm_of(const float (&x)[4], bool quick) {
    float norm = (norm_term(x[0]) + norm_term(x[1])) + (norm_term(x[2]) + norm_term(x[3]));
    if (KIND == ADD_RIESZ && quick) norm += KEYS ? -x[FIXED_DIMS] : x[FIXED_DIMS];
    return norm;
}

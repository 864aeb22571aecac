// What prepare.cu and slopes.cu have in common: vectors as halves, large ones and small ones.

// whether slopes are steps times e^-|s - t|, in factors
constexpr bool DECAY = KIND == ADD_LAPLACE;
constexpr int THREADS = 256, WIDTH = 64;
// words of a row of halves in global memory, large ones and then small ones
constexpr int PACKED = WIDTH;

// The power of two that brings numbers up to `most` into the reach of halves, and the one that undoes it.
inline void reach_of(float most, float &up, float &down) {
    // not below 14, so that both are normal numbers
    int exponent = max(__float_as_int(most) >> 23, 14);
    up = __int_as_float((2 * 127 + 13 - exponent) << 23), down = __int_as_float((exponent - 13) << 23);
}

// A row of a matrix of at most 64 columns times `factor`, scaled to what halves hold, as large and small halves;
// returns what undoes the scale. A warp has a row.
inline float write_halves(const float *row, int width, float factor, unsigned *to, Found &found) {
    int lane = threadIdx.x % 32, column = 2 * lane;
    float x = column < width ? row[column] * factor : 0.0f, y = column + 1 < width ? row[column + 1] * factor : 0.0f;
    look(x, 0.0f, found), look(y, 0.0f, found);
    float most = fmaxf(fabsf(x), fabsf(y));
    for (int other = 16; other; other /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
    float up, down;
    reach_of(most, up, down);
    unsigned large, small;
    split(x * up, y * up, large, small);
    to[lane] = large;
    to[32 + lane] = small;
    return down;
}

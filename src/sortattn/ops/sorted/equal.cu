// Equal points of a track, which are summed and multiplied by themselves. Included behind track.cu.

// Rows that are on their way at a time.
constexpr int SOME = 8;

// Inner products of SOME rows, of which a lane has a part each; lane 4 k has that of row k.
__device__ inline real sum_parts(real (&part)[SOME], int lane) {
#pragma unroll
    for (int half = SOME / 2, offset = 16; half; half /= 2, offset /= 2) {
#pragma unroll
        for (int k = 0; k < half; k++) {
            bool upper = lane & offset;
            real mine = upper ? part[k + half] : part[k], other = upper ? part[k] : part[k + half];
            part[k] = mine + __shfl_xor_sync(ALL, other, offset);
        }
    }
    real sum = part[0] + __shfl_xor_sync(ALL, part[0], 2);
    return sum + __shfl_xor_sync(ALL, sum, 1);
}

// Go through the points from `first` on that are at `place`: add them up, and add to `products` those with the sum of
// the others, if there are any, times a share; with the extra scalar if it is wanted.
__device__ inline void go_through(const Line &line, const Rows &rows, const Scalars &scalars, int first, real place,
                                  Numbers<real, 1> *sum, const Numbers<real, 1> *others, real share,
                                  const Column &products, bool with_extra, int lane) {
    for (int some = 32; some == 32; first += 32) {
        bool equal = first + lane < line.count && line.place(first + lane) == place;
        some = __popc(__ballot_sync(ALL, equal));
        int index = equal ? line.index(first + lane) : 0;
        real scalar = equal ? scalars[index] : real(0), product = real(0);
        if (sum) sum->extra[0] += sum_lanes(scalar);
#pragma unroll 1
        for (int i = 0; i < some; i += SOME) {
            Row row[SOME];
            real part[SOME];
#pragma unroll
            for (int k = 0; k < SOME; k++) row[k] = rows.load(__shfl_sync(ALL, index, i + k));
#pragma unroll
            for (int k = 0; k < SOME; k++) {
                part[k] = real(0);
#pragma unroll
                for (int c = 0; c < VEC; c++) {
                    if (sum && i + k < some) sum->at[0][c] += row[k].at[c];
                    if (others) part[k] += others->at[0][c] * row[k].at[c];
                }
            }
            if (!others) continue;
            real mine = __shfl_sync(ALL, sum_parts(part, lane), lane % SOME * (32 / SOME));
            if (lane / SOME == i / SOME) product = mine;
        }
        if (others && equal) {
            if (with_extra) product += others->extra[0] * scalar;
            add_to(products.of(line, first + lane, index), share * product);
        }
    }
}

// A side of a kernel as tracks have it, see track.cu, which brings this.

// A side of the kernel: H(u - x_j) b_j(u - x_j) e^(-rate (u - x_j)), summed over the nodes j; with BOTH, of the only
// node at zero the other side too.
struct Side {
    real node[NODES];
    // what rounding took from the nodes
    real rest[NODES];
    real below[NODES][POWERS];
    real above[POWERS];
    // with an exponential, the coefficients of the derivative by s
    real slope_below[POWERS];
    real slope_above[POWERS];
    real rate;
    // whether a tie counts
    bool closed;

    // table: nodes, coefficients, rate; all for a bandwidth of one
    __device__ void read(const double *table, double tau, bool ties) {
        closed = ties;
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            node[j] = real(table[j] * tau);
            rest[j] = real(table[j] * tau - double(node[j]));
            double scale = 1.0;
#pragma unroll
            for (int i = 0; i < POWERS; i++, scale /= tau) {
                below[j][i] = real(table[NODES + j * POWERS + i] * scale);
                if (BOTH) above[i] = real(table[NODES + POWERS + i] * scale);
                if (RATE) {
                    // here and not from what is rounded: of p' - rate p little may be left
                    slope_below[i] = real(derivative(table + NODES, i, table[TABLE - 1]) * scale / tau);
                    slope_above[i] =
                        BOTH ? real(-derivative(table + NODES + POWERS, i, table[TABLE - 1]) * scale / tau) : real(0);
                }
            }
        }
        rate = real(table[TABLE - 1] / tau);
    }

    // the sign of s - t - x_j, which rounding must not decide where the two sides of the node differ
    __device__ real beyond(int j, real s, real t) const {
        real u = s - t, beyond = u - node[j];
        if (HALVES && sizeof(real) == 4 && beyond == real(0)) {
            // what the difference has lost, which no rounding touches
            real minus_t = u - s, lost = (s - (u - minus_t)) - (t + minus_t);
            beyond = lost - rest[j];
        }
        return beyond;
    }
    // whether a source at t counts for a target at s, at node j
    __device__ bool passed(int j, bool closed, real s, real t) const {
        real u = beyond(j, s, t);
        return u > real(0) || (closed && u == real(0));
    }
    // the kernel itself, where there is no exponential
    __device__ real value(real s, real t) const {
        real sum = real(0);
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            real z = s - t - node[j], u = beyond(j, s, t), term = below[j][POWERS - 1];
#pragma unroll
            for (int i = POWERS - 2; i >= 0; i--) term = term * z + below[j][i];
            real share = u > real(0) ? real(1) : u < real(0) ? real(0) : HALVES ? real(0.5) : real(closed);
            sum += share * term;
        }
        return sum;
    }
    // its derivative
    __device__ real slope(real s, real t) const {
        real sum = real(0);
#pragma unroll
        for (int j = 0; j < NODES; j++) {
            real z = s - t - node[j], u = beyond(j, s, t), term = real(0);
#pragma unroll
            for (int i = POWERS - 1; i >= 1; i--) term = term * z + real(i) * below[j][i];
            real share = u > real(0) ? real(1) : u < real(0) ? real(0) : real(0.5);
            sum += share * term;
        }
        return sum;
    }
    // what a source at z below the origin gives to the sums, and at -z above it to those above, with shares
    __device__ void weights(int j, real z, real (&weight)[SUMS], real share_below, real share_above) const {
        weigh(below[j], z, weight, share_below);
        if (BOTH) weigh(above, -z, weight + (SUMS - POWERS), share_above);
    }
    // what each of the sums gives to a target at y above the origin, with a share, and the derivative of that
    __device__ void factors(real y, real (&factor)[SUMS], real (&slope)[SUMS], real share) const {
#pragma unroll
        for (int half = 0; half < SUMS; half += POWERS) {
            real sign = half ? real(-1) : real(1), fading = fade(sign * y, share);
            if (RATE) {
                expand(half ? above : below[0], sign * y, factor + half, fading);
                expand(half ? slope_above : slope_below, sign * y, slope + half, fading);
            } else {
                raise(sign * y, factor + half, fading);
#pragma unroll
                for (int l = 0; l < POWERS; l++) slope[half + l] = l ? sign * real(l) * factor[half + l - 1] : real(0);
            }
        }
    }

  private:
    // coefficient i of p' - rate p
    __device__ static double derivative(const double *coefficients, int i, double rate) {
        return (i + 1 < POWERS ? (i + 1) * coefficients[i + 1] : 0.0) - rate * coefficients[i];
    }
    // e^(-rate z), which may be infinite for what has no share
    __device__ real fade(real z, real share) const {
        return share == real(0) ? real(0) : RATE ? share * exponential(-rate * z) : share;
    }
    __device__ void weigh(const real (&coefficients)[POWERS], real z, real *weight, real share) const {
        if (RATE)
            raise(z, weight, fade(z, share));
        else
            expand(coefficients, z, weight, share);
    }
    // z^l, times what fades
    __device__ static void raise(real z, real *weight, real fading) {
#pragma unroll
        for (int l = 0; l < POWERS; l++, fading *= z) weight[l] = fading;
    }
    // the factors of y^l of a polynomial at z + y, times what fades
    __device__ static void expand(const real (&coefficients)[POWERS], real z, real *weight, real fading) {
#pragma unroll
        for (int l = 0; l < POWERS; l++) {
            real sum = coefficients[POWERS - 1] * real(binomial(POWERS - 1, l));
#pragma unroll
            for (int i = POWERS - 2; i >= l; i--) sum = sum * z + coefficients[i] * real(binomial(i, l));
            // so far away that the polynomial may overflow
            weight[l] = fading == real(0) ? real(0) : sum * fading;
        }
    }
};

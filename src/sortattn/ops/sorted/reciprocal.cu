// How sums become attention, for those who include it: `real` is the type of the sums.

// What a row of sums is multiplied with: the reciprocal of the total, clamped to a positive floor; without a floor a
// total below all normal numbers, whose reciprocal is infinite, counts as none.
__device__ inline real reciprocal(real total, real floor) {
    if (floor > real(0)) return real(1) / (total < floor ? floor : total);
    real tiny = sizeof(real) == 4 ? real(1.17549435e-38) : real(2.2250738585072014e-308);
    return (total < real(0) ? -total : total) < tiny ? real(0) : real(1) / total;
}

__device__ inline real not_a_number() { return real(__int_as_float(0x7fffffff)); }

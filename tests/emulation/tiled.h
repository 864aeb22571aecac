// What the tiled kernels need of CUDA beside threads, and twins of their functions with assembly.
#include <algorithm>

using std::exp, std::exp2, std::fabs, std::fmax, std::fmin, std::frexp, std::ldexp, std::sqrt;

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

// ---- numbers

static int __float_as_int(float x) { return reinterpret<int>(x); }
static float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
static long long __double_as_longlong(double x) { return reinterpret<long long>(x); }
static int __float2int_rn(float x) { return lrintf(x); }

// ---- in place of functions with assembly

static float power_of_two(float x) { return exp2f(x); }
template <class N> void copy(N *to, const N *from, int bytes) {
    for (int i = 0; i < 4; ++i) to[i] = i * 4 < bytes ? from[i] : 0;
}
template <class N> void copy_one(N *to, const N *from, int bytes) { *to = bytes ? *from : 0; }
static void arrive() {}
// of some warps: the last numbers belong to warps that no block of these kernels has
static void barrier(int number, int threads) { emulator::wait(24 + number, threads); }
static int distance_and_sum(float s, float t, int sum) { return sum + std::abs(__float_as_int(s) - __float_as_int(t)); }

// a barrier of eight bytes, as in `warpgroup.h`; what is brought is there at once
struct Counts {
    unsigned short arrivals, missing;
    int passed;
};
template <class Turns> Counts &counts(Turns &turns) { return reinterpret_cast<Counts &>(turns); }
template <class Turns> void make(Turns &turns, int arrivals) {
    counts(turns) = {(unsigned short)arrivals, (unsigned short)arrivals, 0};
}
static void let_copies_see() {}
template <class Turns> void arrive_at(Turns &turns) {
    Counts &found = counts(turns);
    if (--found.missing == 0) found.missing = found.arrivals, found.passed++;
}
template <class Turns> void bring(float *to, const float *from, int bytes, Turns &turns) {
    std::memcpy(to, from, bytes);
    arrive_at(turns);
}
template <class Turns> void wait_for(Turns &turns, int odd) {
    while (counts(turns).passed % 2 == odd) {
        int from = emulator::me, to = emulator::next_alive();
        emulator::switch_to(to);
        change_stacks(&emulator::fibres[from], emulator::fibres[to]);
    }
}

static unsigned pack(float x, float y) {
    return reinterpret<unsigned short>(_Float16(x)) | unsigned(reinterpret<unsigned short>(_Float16(y))) << 16;
}
static float half_of(unsigned both, int which) { return reinterpret<_Float16>((unsigned short)(both >> 16 * which)); }
static void split(float x, float y, unsigned &large, unsigned &small) {
    large = pack(x, y);
    small = pack(x - half_of(large, 0), y - half_of(large, 1));
}

static unsigned subtract(unsigned one, unsigned other) {
    return pack(half_of(one, 0) - half_of(other, 0), half_of(one, 1) - half_of(other, 1));
}
static unsigned times(unsigned one, unsigned other) {
    return pack(half_of(one, 0) * half_of(other, 0), half_of(one, 1) * half_of(other, 1));
}
static unsigned rest(unsigned part, unsigned x) {
    return pack((1 - half_of(part, 0)) * half_of(x, 0), (1 - half_of(part, 1)) * half_of(x, 1));
}
static unsigned add_halves(unsigned one, unsigned other) {
    return pack(__saturatef(half_of(one, 0) + half_of(other, 0)), __saturatef(half_of(one, 1) + half_of(other, 1)));
}
static unsigned __byte_perm(unsigned x, unsigned, unsigned which) {
    unsigned half = which == 0x3232 ? x >> 16 : x & 0xffff;
    return half | half << 16;
}

// Tensor cores add a sum and the products to it with one exponent, the largest of theirs, and cut off what is below so
// many digits of that; products are not normalised, so those of a half below 2^-14 lose the digits that it lacks.
constexpr int DIGITS = 25;
static int exponent_of_float(float x) { return x ? (__float_as_int(x) >> 23 & 255) - 127 : -1000; }
static int exponent_of_half(float x) { return x ? std::max(exponent_of_float(x), -14) : -1000; }
static float sum_of_products(float sum, const float (&left)[16], const float (&right)[16]) {
    int most = exponent_of_float(sum);
    for (int k = 0; k < 16; ++k) most = std::max(most, exponent_of_half(left[k]) + exponent_of_half(right[k]));
    if (most < -500) return sum;
    double up = ldexp(1.0, DIGITS - most), down = ldexp(1.0, most - DIGITS);
    auto cut = [=](double x) { return std::trunc(x * up) * down; };
    double total = cut(sum);
    for (int k = 0; k < 16; ++k) total += cut(double(left[k]) * right[k]);
    float near = total;
    return std::fabs(near) > std::fabs(total) ? std::nextafterf(near, 0) : near;
}

static unsigned fragments[32][32][6];

template <class Number>
void add_product(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], Number number) {
    unsigned (&warp)[32][6] = fragments[emulator::me / 32];
    int lane = emulator::me % 32;
    std::copy(a, a + 4, warp[lane]);
    std::copy(b, b + 2, warp[lane] + 4);
    emulator::wait_for_warp();
    for (int e = 0; e < 4; ++e) {
        int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        float left[16], right[16];
        for (int k = 0; k < 16; ++k) {
            left[k] = number(warp[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16);
            right[k] = number(warp[column * 4 + k % 8 / 2][4 + k / 8] >> k % 2 * 16);
        }
        sums[e] = sum_of_products(sums[e], left, right);
    }
    emulator::wait_for_warp();
}
static float as_half(unsigned bits) { return half_of(bits, 0); }
static void multiply_halves(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    add_product(sums, a, b, as_half);
}
// of numbers with 11 digits: what tensor cores do not read is cut off
static void multiply(float &s, float &t, float &u, float &v, const unsigned (&a)[4], const unsigned (&b)[2]) {
    unsigned (&warp)[32][6] = fragments[emulator::me / 32];
    int lane = emulator::me % 32;
    std::copy(a, a + 4, warp[lane]);
    std::copy(b, b + 2, warp[lane] + 4);
    emulator::wait_for_warp();
    float *sums[4] = {&s, &t, &u, &v};
    for (int e = 0; e < 4; ++e) {
        int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        double sum = *sums[e];
        for (int k = 0; k < 8; ++k) {
            unsigned left = warp[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2], right = warp[column * 4 + k % 4][4 + k / 4];
            sum += double(__uint_as_float(left & 0xffffe000)) * __uint_as_float(right & 0xffffe000);
        }
        *sums[e] = sum;
    }
    emulator::wait_for_warp();
}

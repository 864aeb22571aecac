// Twins of warpgroup.cu and halves.cu: products are made at once, and whoever waits for a barrier lets others run.
#include "tiled.h"

static unsigned char *shared_memory;
static unsigned shared_address(const void *memory) {
    shared_memory = (unsigned char *)memory;
    return 0;
}

static int half_word(unsigned both, int which) { return short(both >> 16 * which); }
static unsigned both_words(int x, int y) { return (unsigned short)x | unsigned((unsigned short)y) << 16; }
static unsigned ramps(unsigned places, unsigned shift, unsigned limit) {
    int found[2];
    for (int i = 0; i < 2; ++i)
        found[i] = std::max(std::min(int(short(half_word(places, i) + half_word(shift, i))), half_word(limit, i)), 0);
    return both_words(found[0], found[1]);
}
static unsigned add_places(unsigned one, unsigned other) {
    return both_words(half_word(one, 0) + half_word(other, 0), half_word(one, 1) + half_word(other, 1));
}
static unsigned fused(float factor, unsigned x, float z, float other) {
    return pack(double(factor) * half_of(x, 0) + z, double(factor) * half_of(x, 1) + other);
}
static unsigned multiply_add(unsigned factors, unsigned x) {
    return fused(half_of(factors, 0), x, half_of(factors, 1), half_of(factors, 1));
}
static unsigned multiply_add_low(unsigned factors, unsigned x, unsigned z) {
    return fused(half_of(factors, 0), x, half_of(z, 0), half_of(z, 1));
}
static unsigned multiply_add_high(unsigned factors, unsigned x, unsigned z) {
    return fused(half_of(factors, 1), x, half_of(z, 0), half_of(z, 1));
}

static float2 unpack(unsigned both) { return {half_of(both, 0), half_of(both, 1)}; }
static unsigned pack_short(float x, float y) {
    auto rounded = [](float x) {
        unsigned bits = reinterpret<unsigned>(x);
        return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
    };
    return rounded(x) | rounded(y) << 16;
}
static float as_short(unsigned bits) { return reinterpret<float>(bits << 16); }
static unsigned times_short(unsigned x, unsigned y) {
    return pack_short(as_short(x) * as_short(y), as_short(x >> 16) * as_short(y >> 16));
}
static unsigned smaller_ratio(unsigned s, unsigned one_by_s, unsigned t, unsigned one_by_t) {
    unsigned one = times_short(s, one_by_t), other = times_short(one_by_s, t);
    auto smaller = [=](int shift) { return std::min(as_short(one >> shift), as_short(other >> shift)); };
    return pack_short(smaller(0), smaller(16));
}
static unsigned bump(unsigned s, unsigned t) {
    unsigned apart = subtract(s, t);
    auto rest = [=](int i) { return __saturatef(1 - std::fabs(half_of(apart, i))); };
    return pack(rest(0), rest(1));
}
static unsigned corrected(unsigned x, float less) {
    // a sixth as a half
    auto more = [=](int i) { return std::max(half_of(fused(0.16662598f, x, less, less), i), 0.0f) + half_of(x, i); };
    return pack(more(0), more(1));
}
static unsigned corrected_low(unsigned x, unsigned less) { return corrected(x, half_of(less, 0)); }
static unsigned corrected_high(unsigned x, unsigned less) { return corrected(x, half_of(less, 1)); }
static unsigned above(unsigned s, unsigned t) {
    return pack(std::max(half_of(s, 0) - half_of(t, 0), 0.0f), std::max(half_of(s, 1) - half_of(t, 1), 0.0f));
}
static unsigned larger(unsigned s, unsigned t) {
    return pack(std::max(half_of(s, 0), half_of(t, 0)), std::max(half_of(s, 1), half_of(t, 1)));
}

static void multiply_shorts(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    add_product(sums, a, b, as_short);
}

static void copy(unsigned to, const void *from, bool there) {
    if (there) std::memcpy(shared_memory + to, from, 16);
    else std::memset(shared_memory + to, 0, 16);
}
template <int BYTES> void copy_some(unsigned to, const void *from, bool there) {
    if (there) std::memcpy(shared_memory + to, from, BYTES);
    else std::memset(shared_memory + to, 0, BYTES);
}
static void end_copies() {}
static void wait_for_all_copies() {}
static void wait_for_copies() {}
static void store_blocks(unsigned to, const unsigned *words, int number) {
    // lane l has the address of row l % 8 of block l / 8
    for (int block = 0; block < number; ++block) {
        unsigned at = emulator::take(to, block * 8 + emulator::lane() / 4);
        std::memcpy(shared_memory + at + emulator::lane() % 4 * 4, words + block, 4);
    }
}
static void store_four(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    unsigned words[] = {a, b, c, d};
    store_blocks(to, words, 4);
}
static void store_two(unsigned to, unsigned a, unsigned b) {
    unsigned words[] = {a, b};
    store_blocks(to, words, 2);
}
static void load_turned(unsigned (&to)[4], unsigned from) {
    for (int block = 0; block < 4; ++block) {
        unsigned short found[2];
        for (int i = 0; i < 2; ++i) {
            unsigned at = emulator::take(from, block * 8 + emulator::lane() % 4 * 2 + i);
            std::memcpy(found + i, shared_memory + at + emulator::lane() / 4 * 2, 2);
        }
        to[block] = found[0] | unsigned(found[1]) << 16;
    }
}
static void show() {}
// of a map here the words are where the tensor begins, its rows by head, and those of a box
template <class Map> void bring_rows(unsigned to, const Map &map, int row, int head, unsigned barrier) {
    const unsigned char *from = reinterpret_cast<const unsigned char *>(map.words[0]);
    for (int i = 0; i < int(map.words[2]); ++i)
        for (int block = 0; block < 8; ++block) {
            unsigned char *place = shared_memory + to + i * 128 + (block ^ i % 8) * 16;
            if (row + i < int(map.words[1]))
                std::memcpy(place, from + (head * map.words[1] + row + i) * 128 + block * 16, 16);
            else
                std::memset(place, 0, 16);
        }
}

struct Counted {
    unsigned short arrivals, missing;
    int passed;
};
static Counted &counted(unsigned at) { return *reinterpret_cast<Counted *>(shared_memory + at); }
static void make_barrier(unsigned at, int arrivals) {
    counted(at) = {(unsigned short)arrivals, (unsigned short)arrivals, 0};
}
static void arrive(unsigned at) {
    Counted &found = counted(at);
    if (--found.missing == 0) found.missing = found.arrivals, found.passed++;
}
static void arrive_expecting(unsigned at, int bytes) { arrive(at); }
static void wait(unsigned at, int parity) {
    while (counted(at).passed % 2 == parity) {
        int from = emulator::me, to = emulator::next_alive();
        emulator::switch_to(to);
        change_stacks(&emulator::fibres[from], emulator::fibres[to]);
    }
}
template <int NUMBER> void take_registers() {}
template <int NUMBER> void leave_registers() {}

static void begin_products() {}
static void end_products() {}
template <int LAST> void wait_for_products() {}
template <class N> void hold(N &) {}
template <class Number> void add_products(float (&sums)[36], const unsigned (&a)[4], unsigned long long rows, Number number) {
    unsigned (&warp)[32][6] = fragments[emulator::me / 32];
    int lane = emulator::me % 32;
    std::copy(a, a + 4, warp[lane]);
    emulator::wait_for_warp();
    auto field = [=](int shift) { return int(rows >> shift & 0x3fff) * 16; };
    const unsigned char *start = shared_memory + field(0);
    bool turned = rows >> 62 == 1;
    // of turned rows, to 64 columns on and to eight rows on
    int down = field(turned ? 32 : 16), across = field(turned ? 16 : 32);
    auto place = [=](int k, int block) {
        if (turned) return k / 8 * down + k % 8 * 128 + block / 8 * across + (block % 8 ^ k % 8) * 16;
        return k / 8 * down + k % 8 * 16 + block * across;
    };
    for (int e = 0; e < 36; ++e) {
        int row = lane / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
        float left[16], right[16];
        for (int k = 0; k < 16; ++k) {
            left[k] = number(warp[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16);
            unsigned short bits;
            std::memcpy(&bits, start + place(k, column / 8) + column % 8 * 2, 2);
            right[k] = number(bits);
        }
        sums[e] = sum_of_products(sums[e], left, right);
    }
    emulator::wait_for_warp();
}
static void multiply(float (&sums)[36], const unsigned (&a)[4], unsigned long long rows) {
    add_products(sums, a, rows, as_half);
}
static void multiply_short(float (&sums)[36], const unsigned (&a)[4], unsigned long long rows) {
    add_products(sums, a, rows, as_short);
}

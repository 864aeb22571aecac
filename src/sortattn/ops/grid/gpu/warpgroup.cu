// Hopper's instructions for four warps at a time, in assembly; a part of march.cu and collect.cu. Needs
// sm_90a.

#include "halves.cu"

// ---- two numbers of 16 bits

// Two ramps: places less nodes, from 0 to a limit, 512; as bits of halves 2^-24 times as large.
inline unsigned ramps(unsigned places, unsigned shift, unsigned limit) {
    unsigned result;
    asm("{.reg .b32 t; add.s16x2 t, %1, %2; min.relu.s16x2 %0, t, %3;}"
        : "=r"(result)
        : "r"(places), "r"(shift), "r"(limit));
    return result;
}
inline unsigned add_places(unsigned one, unsigned other) {
    unsigned result;
    asm("add.s16x2 %0, %1, %2;" : "=r"(result) : "r"(one), "r"(other));
    return result;
}
// Two products with the lower half of `factors`, to which the upper one is added; and with either half, to which z is.
inline unsigned multiply_add(unsigned factors, unsigned x) {
    unsigned result;
    asm("{.reg .b16 l, h; .reg .b32 f, z; mov.b32 {l, h}, %1; mov.b32 f, {l, l}; mov.b32 z, {h, h}; "
        "fma.rn.f16x2 %0, f, %2, z;}"
        : "=r"(result)
        : "r"(factors), "r"(x));
    return result;
}
inline unsigned multiply_add_low(unsigned factors, unsigned x, unsigned z) {
    unsigned result;
    asm("{.reg .b16 l, h; .reg .b32 f; mov.b32 {l, h}, %1; mov.b32 f, {l, l}; fma.rn.f16x2 %0, f, %2, %3;}"
        : "=r"(result)
        : "r"(factors), "r"(x), "r"(z));
    return result;
}
inline unsigned multiply_add_high(unsigned factors, unsigned x, unsigned z) {
    unsigned result;
    asm("{.reg .b16 l, h; .reg .b32 f; mov.b32 {l, h}, %1; mov.b32 f, {h, h}; fma.rn.f16x2 %0, f, %2, %3;}"
        : "=r"(result)
        : "r"(factors), "r"(x), "r"(z));
    return result;
}
// Two products, of halves and of bfloat16.
inline unsigned times(unsigned x, unsigned y) {
    unsigned result;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
    return result;
}
inline unsigned times_short(unsigned x, unsigned y) {
    unsigned result;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
    return result;
}
// ---- barriers

// what this thread has written is seen by tensor cores
inline void show() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

inline void make_barrier(unsigned at, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
inline void arrive(unsigned at) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(at) : "memory");
}
// until the barrier has been passed an odd number of times (parity 0), or an even one
inline void wait(unsigned at, int parity) {
    asm volatile("{\n.reg .pred p;\nagain:\n"
                 "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@p bra done;\nbra again;\ndone:\n}" ::"r"(at),
                 "r"(parity)
                 : "memory");
}
// ---- registers

// A number that stays in a register: one that the assembler knows it would make again for every use. Of the depth of
// the grid, which is one, it knows nothing.
inline unsigned kept(unsigned x) { return x * gridDim.z; }

// So many for a thread: more than before, or fewer.
template <int NUMBER> inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUMBER));
}
template <int NUMBER> inline void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUMBER));
}

// ---- products

inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// all but the last ones that were begun
template <int LAST> inline void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LAST) : "memory");
}
// Nothing is read from or written to these registers by what stands on the other side of this line.
inline void hold(unsigned (&x)[4]) { asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])::"memory"); }
inline void hold(float (&x)[36]) {
    asm volatile(""
                 : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                   "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                   "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]),
                   "+f"(x[23]), "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]),
                   "+f"(x[30]), "+f"(x[31]), "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35])::"memory");
}

// `sums (64, 72)` and `a (64, 16)` times 16 rows of 72 halves in shared memory, which lie in blocks of 8 x 8.
inline void multiply(float (&sums)[36], const unsigned (&a)[4], unsigned long long rows) {
    asm volatile(
        "{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35}, {%36, %37, %38, %39}, %40, p, 1, 1, 1;}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
          "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]),
          "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
          "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
// the same of bfloat16
inline void multiply_short(float (&sums)[36], const unsigned (&a)[4], unsigned long long rows) {
    asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
                 "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
                 "%35}, {%36, %37, %38, %39}, %40, p, 1, 1, 1;}"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),
                   "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
                   "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]),
                   "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
                   "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),
                   "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
}
// Where rows begin that lie so: `down` bytes from 8 rows to the next ones, 128 from 8 columns to the next.
inline unsigned long long rows_at(unsigned at, int down) {
    return (unsigned long long)(128 >> 4) << 32 | (unsigned long long)(down >> 4) << 16 | (at & 0x3ffff) >> 4;
}
// The same of rows of 64 that lie turned, as the copy engine leaves them: 16 of them, with 8 columns behind from 16
// others; row n has its eight columns c where row 0 has c ^ n % 8. Both begin at multiples of 1024 bytes.
constexpr int ROW = 128, EIGHT_ROWS = 8 * ROW;
inline unsigned long long turned_rows_at(unsigned at, unsigned behind) {
    return 1ull << 62 | (unsigned long long)(EIGHT_ROWS >> 4) << 32 | (unsigned long long)(behind - at >> 4) << 16 |
           (at & 0x3ffff) >> 4;
}
// to the next 16 rows, with the same behind them
constexpr unsigned long long TURNED_STEP = (2 * EIGHT_ROWS >> 4) - ((unsigned long long)(2 * EIGHT_ROWS >> 4) << 16);

// ---- the copy engine

// What it knows of a tensor, see boxes.py.
struct __align__(64) Map {
    unsigned long long words[16];
};
// arrives at a barrier, which is passed when so many bytes have come too
inline void arrive_expecting(unsigned at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
// A box of rows from `row` of a head on, with zeros for those behind its last one.
inline void bring_rows(unsigned to, const Map &map, int row, int head, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(&map), "r"(0), "r"(row), "r"(head), "r"(barrier)
                 : "memory");
}

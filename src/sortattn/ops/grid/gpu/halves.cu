// Numbers of 16 bits, two in a register, and shared memory, in assembly; a part of march.cu, finish.cu and others.

inline unsigned shared_address(const void *memory) {
    unsigned result;
    asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(result) : "l"(memory));
    return result;
}

// x is in the lower half
inline unsigned pack(float x, float y) {
    unsigned result;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(x), "f"(y));
    return result;
}

inline float2 unpack(unsigned both) {
    float2 result;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(result.x), "=f"(result.y)
        : "r"(both));
    return result;
}
// the same of bfloat16, which are the upper halves of floats
inline unsigned pack_short(float x, float y) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(x), "f"(y));
    return result;
}
inline float2 unpack_short(unsigned both) { return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)}; }
// max(s - t, 0), by the unit for floats
inline unsigned above(unsigned s, unsigned t) {
    unsigned result;
    asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(t), "r"(0xbc00bc00), "r"(s));
    return result;
}
// max(s, t), by that for integers
inline unsigned larger(unsigned s, unsigned t) {
    unsigned result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(s), "r"(t));
    return result;
}

inline float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
// A power of two, not above x.
inline float power_below(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000); }

// ---- copies

// 16 bytes to shared memory, zeros if they are not `there`
inline void copy(unsigned to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// the same of 8 or 16 bytes
template <int BYTES> inline void copy_some(unsigned to, const void *from, bool there) {
    if (BYTES == 16) return copy(to, from, there);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
}
inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// all of them, or but those that were begun last
inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
inline void wait_for_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
// four blocks of 8 rows of 16 bytes, or two; a lane has the address of a row
inline void store_four(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
inline void store_two(unsigned to, unsigned a, unsigned b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
// what 8 lanes have the addresses of, 8 rows of 8 halves, with rows and columns exchanged; four of such blocks
inline void load_turned(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// ---- warps

// a 16 x 8 tile += 16 x 16 times 16 x 8
inline void multiply_halves(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// A number that all lanes have: by the shuffle the compiler knows that, and that they go together where it decides.
inline int of_warp(int x) { return __shfl_sync(~0u, x, 0); }
inline float largest_of_warp(float x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
    return x;
}
inline float sum_of_warp(float x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}

// What is found in a part of a head's queries, of the keys or of the values: the largest number, infinite if one is no
// number; the largest distance from the origin; the sum of these.
struct Found {
    float largest, reach, sum, unused;
};

inline float infinity() { return __int_as_float(0x7f800000); }

template <class N> inline void look(N x, N origin, Found &found) {
    float size = fabs(x) < infinity() ? float(fmin(fabs(x), N(0x1.fffffep127f))) : infinity();
    found.largest = fmaxf(found.largest, size);
    float distance = fabs(x - origin);
    found.reach = fmaxf(found.reach, distance);
    found.sum += distance;
}

inline void join(Found &one, const Found &other) {
    one.largest = fmaxf(one.largest, other.largest);
    one.reach = fmaxf(one.reach, other.reach);
    one.sum += other.sum;
}

// for all lanes, what all of them found
inline Found join_lanes(Found found) {
    for (int lane = 16; lane; lane /= 2)
        join(found, {__shfl_xor_sync(~0u, found.largest, lane), __shfl_xor_sync(~0u, found.reach, lane),
                     __shfl_xor_sync(~0u, found.sum, lane)});
    return found;
}

// what all threads of a block found, by way of `parts`, which have room for what its warps did
inline void report(Found mine, Found *parts, int warps, Found &to) {
    mine = join_lanes(mine);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < warps; ++w) join(mine, parts[w]);
    to = mine;
}

inline float largest(const Found *found, int slices) {
    float most = 0;
    for (int s = 0; s < slices; ++s) most = fmaxf(most, found[s].largest);
    return most;
}

inline float poison(float most) { return most < infinity() ? 1.0f : infinity() - infinity(); }

// ---- a launch that begins before the one before it ends

#if EARLY
inline void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
inline void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
inline void let_next_begin() {}
inline void wait_for_launch_before() {}
#endif

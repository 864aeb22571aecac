// How warps hand sums on, and how rows come into shared memory; see track.cu, which brings this.

#ifdef CREW
// Whose turn it is to take what the warps of a block hand on, in shared memory: every warp waits at a barrier of its
// own until all lanes of the warp before it have arrived there. That orders what these have written before what is read
// then, without a fence, which waits for sums on their way to global memory as well and takes 0.3 ms of 5. One lane
// could arrive for all, in the same time, but racecheck would not follow it.
struct Turn {
#ifdef __CUDA_ARCH__
    unsigned long long barriers[CREW];

    // One thread, in a loop: the instruction has one address at a time anyway. As a condition alone it is predicated,
    // and racecheck does not see the predicate: it takes what other threads have in that register for an address.
    __device__ void begin() {
        if (threadIdx.x != 0) return;
#pragma unroll 1
        for (int warp = 0; warp < CREW; warp++)
            asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(of(warp)) : "memory");
    }
    __device__ void wait(int mine) {
        if (mine == 0) return;
        // the first warp has not waited at first
        unsigned done, parity = (mine / CREW + (mine % CREW == 0)) & 1;
        do {
            asm volatile("{\n.reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
                         "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
                         "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
                         "selp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done)
                         : "r"(of(mine % CREW)), "r"(parity)
                         : "memory");
        } while (!done);
        __syncwarp();
    }
    // by all lanes, once they have written
    __device__ void pass(int mine) {
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(of((mine + 1) % CREW))
                     : "memory");
    }

  private:
    __device__ unsigned of(int warp) const { return unsigned(__cvta_generic_to_shared(barriers + warp)); }
#else
    int now;

    void begin() { now = 0; }
    void wait(int mine) const {
        while (__any_sync(ALL, now != mine)) {
        }
    }
    void pass(int mine) {
        __syncwarp();
        now = mine + 1;
    }
#endif
};
#endif

// Launches that begin before the one before them ends: what comes behind the last of them waits for that one alone, so
// each of them ends, and lets the next one begin, only when the one before has ended.
__device__ inline void wait_for_launch_before() {
#if defined __CUDA_ARCH__ && EARLY
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_next_begin() {
    wait_for_launch_before();
#if defined __CUDA_ARCH__ && EARLY
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Rows on their way to shared memory, for all lanes of a warp together.
struct Copies {
    static constexpr int BYTES = sizeof(Row) * 32;
#if __CUDA_ARCH__ >= 900 && (NODES > 1 || defined CREW)
    // one instruction a row, which arrives at a barrier; in a walk with a single node that is no faster
    unsigned barrier, turn;

    __device__ Copies(unsigned long long *place, int lane)
        : barrier(unsigned(__cvta_generic_to_shared(place))), turn(0) {
        if (MULTIPLIED && lane == 0) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }
    // The rows of lanes that are in `some`, each with a row of its own to bring `to` its place.
    __device__ void start(unsigned some, int lane, Row *to, const Row *from) {
        if (!some) return;
        // what has been read and written there before
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                         "r"(__popc(some) * BYTES)
                         : "memory");
        }
        __syncwarp();
        if (some >> lane & 1) {
            unsigned place = unsigned(__cvta_generic_to_shared(to));
#if PASSING
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                         "[%0], [%1], %2, [%3], %4;" ::"r"(place),
                         "l"(from), "r"(BYTES), "r"(barrier), "l"(passing())
                         : "memory");
#else
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(place),
                "l"(from), "r"(BYTES), "r"(barrier)
                : "memory");
#endif
        }
    }
    __device__ void wait(unsigned some) {
        if (!some) return;
        unsigned done;
        do {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                         "selp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done)
                         : "r"(barrier), "r"(turn)
                         : "memory");
        } while (!done);
        turn ^= 1;
    }
#else
    __device__ Copies(unsigned long long *, int) {}
    // sixteen bytes at a time
    __device__ void start(unsigned some, int lane, Row *to, const Row *from) {
        constexpr int PIECES = BYTES / 16;
#pragma unroll
        for (int i = 0; i < 32; i += 32 / PIECES) {
            int l = i + lane / PIECES;
            Row *there = reinterpret_cast<Row *>(__shfl_sync(ALL, reinterpret_cast<unsigned long long>(to), l));
            const char *here =
                reinterpret_cast<const char *>(__shfl_sync(ALL, reinterpret_cast<unsigned long long>(from), l));
            if (some >> l & 1)
                begin_copy_around(reinterpret_cast<char *>(there) + lane % PIECES * 16, here + lane % PIECES * 16);
        }
    }
    __device__ void wait(unsigned) { wait_for_copies(); }
#endif
};

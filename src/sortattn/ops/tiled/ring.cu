// A ring of chunks in shared memory; a part of forward.cu. One thread has them brought, a few ahead, and warps take
// them one after the other, each as fast as it can.

#include "layout.cu"

constexpr int SLOTS = STREAM ? 5 : 1;
// the slot that is filled again was left by the last warp some time ago
constexpr int LAG = 2;

struct Streamed {
    float query[OWN * WIDTH * FOUR / 4];
    float ring[SLOTS][CHUNK];
};

// ---- a barrier in shared memory: so many arrivals, and bytes that were announced, end a turn of it

struct Turns {
    unsigned long long state;
};
inline void make(Turns &turns, int arrivals) {
    unsigned place = __cvta_generic_to_shared(&turns);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place), "r"(arrivals) : "memory");
}
inline void let_copies_see() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
inline void arrive_at(Turns &turns) {
    unsigned place = __cvta_generic_to_shared(&turns);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place) : "memory");
}
inline void bring(float *to, const float *from, int bytes, Turns &turns) {
    unsigned place = __cvta_generic_to_shared(&turns), there = __cvta_generic_to_shared(to);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(there),
                 "l"(from), "r"(bytes), "r"(place)
                 : "memory");
}
// for the end of a turn, of which every other one is even
inline void wait_for(Turns &turns, int odd) {
    unsigned place = __cvta_generic_to_shared(&turns), done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(place), "r"(odd)
                     : "memory");
    } while (!done);
}

// ---- the ring

struct Ring {
    Turns full[SLOTS], empty[SLOTS];
};

inline void make(Ring &ring) {
    if (threadIdx.x == 0)
        for (int i = 0; i < SLOTS; ++i) make(ring.full[i], 1), make(ring.empty[i], THREADS);
}

// the chunks of a head that a block walks over, and how far a warp is
struct Walk {
    Streamed &streamed;
    Ring &ring;
    const float *from;
    int count, now = 0;

    void send(int chunk) const {
        int slot = chunk % SLOTS;
        bring(streamed.ring[slot], from + (long long)chunk * CHUNK, CHUNK * 4, ring.full[slot]);
    }
    void begin() const {
        if (threadIdx.x == 0)
            for (int i = 0; i < min(SLOTS, count); ++i) send(i);
    }
    // the next chunk, where it lies
    const float4 *take() {
        int before = now - LAG, next = before + SLOTS;
        if (threadIdx.x == 0 && before >= 0 && next < count) {
            wait_for(ring.empty[before % SLOTS], before / SLOTS % 2);
            send(next);
        }
        __syncwarp();
        wait_for(ring.full[now % SLOTS], now / SLOTS % 2);
        return reinterpret_cast<const float4 *>(streamed.ring[now++ % SLOTS]);
    }
    // the chunk that was taken so many times ago
    void leave(int ago = 1) const {
        // one lane could arrive for all, but racecheck would not follow it
        arrive_at(ring.empty[(now - ago) % SLOTS]);
    }
};

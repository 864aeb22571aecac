// Copies to shared memory that are on their way while a thread goes on; they are there after `wait_for_copies`.

// By way of the first-level cache, or around it.
template <int BYTES> __device__ inline void begin_copy(void *to, const void *from) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from),
                 "n"(BYTES)
                 : "memory");
#else
    memcpy(to, from, BYTES);
#endif
}
__device__ inline void begin_copy_around(void *to, const void *from) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
#else
    memcpy(to, from, 16);
#endif
}
__device__ inline void wait_for_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

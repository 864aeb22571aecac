// Rows of a matrix in global memory, and asynchronous copies of them into tiles; a part of forward.cu.

inline void copy(float *to, const float *from, int bytes) {
    unsigned place = __cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
inline void copy_one(float *to, const float *from, int bytes) {
    unsigned place = __cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(bytes));
}
inline void arrive() { asm volatile("cp.async.wait_all;"); }

// rows of a matrix in global memory
struct Rows {
    const float *start;
    int count, width;
    bool whole;

    Rows(const float *start, long long count, long long width) : start(start), count(count), width(width) {
        whole = (reinterpret_cast<unsigned long long>(start) | width * 4) % 16 == 0;
    }
    // 64 rows from `first` on, 64 columns from `column` on; zero where there is nothing
    void fetch(float *tile, int first, int column) const {
        if (whole) {
            int row = thread() / 16, at = thread() % 16 * 4;
            const float *from = start + (long long)(first + row) * width + column + at;
            constexpr int STEP = THREADS / 16;
            // fewer instructions for what is common
            if (width == WIDTH && first + OTHER <= count) {
#pragma unroll
                for (int i = 0; i < OTHER; i += STEP) copy(tile + (row + i) * STRIDE + at, from + i * WIDTH, 16);
                return;
            }
            int left = column + at < width ? count - first - row : 0;
#pragma unroll
            for (int i = 0; i < OTHER; i += STEP, from += STEP * width)
                // of what is beyond the last nothing is read
                copy(tile + (row + i) * STRIDE + at, from, i < left ? 16 : 0);
        } else {
            int row = thread() / WIDTH, at = thread() % WIDTH;
#pragma unroll 1
            for (; row < OTHER; row += THREADS / WIDTH) {
                bool there = column + at < width && first + row < count;
                const float *from = start + (long long)(first + row) * width + column + at;
                copy_one(tile + row * STRIDE + at, there ? from : start, there ? 4 : 0);
            }
        }
    }
};

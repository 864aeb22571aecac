// What kernels for short sequences have in common, short_forward.cu and short_backward.cu: a block has some rows of a
// head, queries or keys, and all the others at once.
//
// Scores, or the gradients by them, are made pair by pair, TM x TN by a thread, and left in shared memory; what they
// are multiplied with is summed row by row, ROWS x 4 columns by a thread. Tensors are read where they lie and as they
// are, in 16 bits or 32; all sums are float32. There are no atomics: the same call has the same bits.
//
// Set by short.py: NUMBER (float), KERNEL (a name of Kind, of an additive kernel without a table), EPSILON (of the
// Riesz kernels), INPUT (a name of Type), MOST (rows of a head), THREADS, TM, TN, ROWS, BLOCKS (at least, on a
// multiprocessor), FORWARD (1 for the forward pass).

#include "kinds.cu"

enum Type { FLOAT32, FLOAT16, BFLOAT16 };
constexpr Type TYPE = INPUT;
constexpr bool NARROW = TYPE != FLOAT32;

constexpr int COLUMNS = 16, GROUPS = THREADS / COLUMNS, OWN = GROUPS * ROWS;
// four more keep the rows of neighbouring threads in different banks
constexpr int WIDTH = 64, STRIDE = WIDTH + 4;

extern __shared__ __align__(16) unsigned char memory[];

#include "short_matrices.cu"

#include "short_pairs.cu"

#include "short_scores.cu"

#include "short_rows.cu"

// where a head of a tensor begins
inline long long place_of(unsigned problem, unsigned heads, long long batch, long long head) {
    return problem / heads * batch + problem % heads * head;
}

// as in normalise.py
inline float reciprocal(float total) { return fabsf(total) < 0x1p-126f ? 0.0f : 1 / total; }

// Points and rows as they are given: of the working precision, or of sixteen bits.
//
// Macros: those of track.cu and, for sixteen bits, NARROW and those of half.cu.

#if NARROW
#include "half.cu"
#endif
#include "track.cu"

// a number as it is given, and what a lane has of a row
#if NARROW
#include "packed.cu"
typedef half_t given_t;
typedef Packed Given;
__device__ inline Row widened(const Packed &row) { return row.row(); }
#else
typedef real given_t;
typedef Row Given;
__device__ inline real widen(real x) { return x; }
__device__ inline const Row &widened(const Row &row) { return row; }
#endif

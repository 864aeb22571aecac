// What walks around whole wound lines have in common.
//
// Macros: those of track.cu, and CELLS.

#include "track.cu"

#include "alike.cu"

// rows of a line that walks begin with: for cells of queries one, from that before the first of the keys to that behind
// the last one, and for cells of keys two
constexpr int STARTS = CELLS + 2 + 2 * CELLS;

// A wound line, as words.
struct Wheel {
    const int *points, *order;
    int count;

    __device__ Wheel(const real *places, const int *indices, index_t line, index_t all)
        : points(reinterpret_cast<const int *>(places) + line * all), order(indices + line * all), count(int(all)) {}
    __device__ word at(int i) const { return word(read_once(points + i)); }
    __device__ int index(int i) const { return read_once(order + i); }
};

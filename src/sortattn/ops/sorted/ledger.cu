// What a batch of trade.cu writes down: sources, keys and inner products, in shared memory.

#include "begin.cu"

// sources of a batch: as many as all nodes have in most of them, and those of one node
constexpr int ROOM = 44 * NODES > 32 * SPREAD ? 44 * NODES : 32 * SPREAD;
// sources whose inner products are summed by the lanes side by side
constexpr int TOGETHER = 16;
// from a row in shared memory to the next: such that lanes which read down a column meet in few banks
constexpr int ACROSS = 33;

// A source; as in walk.cu, its weights stand CHUNK places behind.
struct alignas(16) Event {
    real weight[SUMS];
    int index;
    // of the extra scalars, what is added to its inner product
    real extra;
};
static_assert(sizeof(Event) == sizeof(Source), "a list of either");
// A key: how far it is from the origin, and its index, or what is left of -1 without it if it is summed by itself.
struct alignas(8) Aim {
    real distance;
    int index;
};
// What a lane has found of a source.
struct Found {
    // whether there is one, its place in the list, and how many keys have not passed it
    bool here;
    int where, before;
    // its coordinate, where on its line it is, and its index
    real place;
    int spot, index;
    // its node, and the step of the slope there
    real node, step;
};
// What the channels of each lane give to an inner product; as wide as lets lanes meet in few banks.
struct alignas(16) Part {
    real of[36];
};

// How chunks.cu leaves keys and values for stream.cu, 64 of them after the other: in chunks that are copied to shared
// memory as they are, first some dimensions of the keys each, then the values of 32 keys each.

// numbers of a chunk; a unit of four of them has so many dimensions of a key, and a chunk so many
constexpr int CHUNK = 2048, UNIT_DIMS = 16 / FOUR, CHUNK_DIMS = CHUNK / 64 / 4 * UNIT_DIMS, CHUNK_KEYS = 32;
constexpr int VALUE_CHUNKS = 64 / CHUNK_KEYS;
// values are left times this power of two: halves keep the digits of heads whose largest is from 1/64 to 512
constexpr int LIFTED = 6;
inline int key_chunks(int dims) { return (dims + CHUNK_DIMS - 1) / CHUNK_DIMS; }
inline int chunks_of(int dims) { return key_chunks(dims) + VALUE_CHUNKS; }

// Units of the same dimensions of 64 rows lie side by side: threads that read different rows at a time read different
// banks.
inline int unit_at(int dimension, int row) { return dimension / UNIT_DIMS * 64 + row; }

// Of four keys as a thread of a product has them, two and two of them neighbours, all halves of one channel: those of a
// warp's threads lie in their order. `s` is which 16 of the keys, `t` which of these four times four.
inline int halves_at(int s, int channel, int t) { return (s * 8 + channel / 8) * 32 + channel % 8 * 4 + t; }

// In which order channels stand in a table of means. Tensor cores leave a lane with two channels of every eight, which
// it writes side by side: of thirty-two channels the first eight places have the first two of all eights, and so on.
//
// That is its own inverse: the channel at a place, and the place of a channel, are found alike.
//
// Macros: TURNED (whether they stand so, or as they are).

__device__ inline int turned(int channel) {
    return TURNED ? channel / 32 * 32 + channel % 8 / 2 * 8 + channel % 32 / 8 * 2 + channel % 2 : channel;
}

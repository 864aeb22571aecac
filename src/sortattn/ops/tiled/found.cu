// What survey.cu finds of a slice of a head's queries, of the keys or of the values: the largest number, infinite if
// one is no number; the largest distance from the origin; the sum of these.
struct Found {
    float largest, reach, sum, unused;
};

inline float infinity() { return __int_as_float(0x7f800000); }

inline float largest(const Found *found, int slices) {
    float most = 0;
    for (int s = 0; s < slices; ++s) most = fmaxf(most, found[s].largest);
    return most;
}

// one, or NaN if the queries of this head, the keys or the values are not all finite
inline float poison(const Found *found, int head, int group, int slices) {
    float most = fmaxf(largest(found + head * slices, slices), largest(found + group * slices, 2 * slices));
    return most < infinity() ? 1.0f : infinity() - infinity();
}

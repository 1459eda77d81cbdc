// Arrow columns to keys, straight from Arrow's own buffers. Bags are counted first, then every slot puts its keys in place.
#include "slot.cuh"

// Which rows of a column have a value, and which values each row has.
struct Rows {
    const uint8_t* valid;   // Arrow's bitmap, or 0 where every row is valid
    int64_t bit_offset;     // of row 0 in it
    const int64_t* lists;   // (rows + 1,) values of each row of a list column, or 0: value i belongs to row i

    bool has(int64_t row) const {
        int64_t bit = bit_offset + row;
        return !valid || (valid[bit >> 3] >> (bit & 7) & 1);
    }
};

// The number of keys of each row in `slot`; a bad row has none. `counts` is (rows, slots).
NATIVE(void, data_count_bags, int64_t rows, int64_t slots, int64_t slot, const int32_t* status, const uint8_t* valid,
       int64_t bit_offset, const int64_t* lists, int32_t missing_key, int64_t* counts) {
    const Rows column = {valid, bit_offset, lists};
    for (int64_t row = 0; row < rows; ++row) {
        int64_t here = lists ? lists[row + 1] - lists[row] : 1;
        if (!column.has(row)) here = 0;
        if (here == 0 && missing_key) here = 1;
        counts[row * slots + slot] = status[row] ? 0 : here;
    }
}

// Counts to ends, counted from `key_base`; returns the number of keys.
NATIVE(int64_t, data_sum_bags, int64_t bags, int64_t key_base, int64_t* ends) {
    int64_t end = key_base;
    for (int64_t bag = 0; bag < bags; ++bag) ends[bag] = end += ends[bag];
    return end - key_base;
}

// Where the keys of one slot go.
struct Place {
    int64_t rows, slots, slot, key_base;
    const int64_t* ends;  // (rows, slots)
    uint64_t* keys;       // key_base is at 0
    uint64_t missing;     // the key of a missing value

    int64_t start(int64_t row) const {
        int64_t bag = row * slots + slot;
        return (bag ? ends[bag - 1] : key_base) - key_base;
    }
    int64_t count(int64_t row) const { return ends[row * slots + slot] - key_base - start(row); }
};

// Puts key_at(value) of every value in place. A row whose only key stands for a missing value is told by its lack of one.
template <typename KeyAt>
static inline void place_keys(const Place& place, const Rows& column, KeyAt key_at) {
    for (int64_t row = 0; row < place.rows; ++row) {
        int64_t count = place.count(row);
        if (!count) continue;
        uint64_t* out = place.keys + place.start(row);
        int64_t first = column.lists ? column.lists[row] : row;
        bool empty = !column.has(row) || (column.lists && column.lists[row + 1] == first);
        if (empty)
            *out = place.missing;
        else
            for (int64_t k = 0; k < count; ++k) out[k] = key_at(first + k);
    }
}

NATIVE(void, data_place_text32, int64_t rows, int64_t slots, int64_t slot, int64_t key_base, const int64_t* ends,
       uint64_t* keys, const uint8_t* valid, int64_t bit_offset, const int64_t* lists, uint64_t seed,
       const int32_t* offsets, const uint8_t* bytes) {
    place_keys({rows, slots, slot, key_base, ends, keys, xxh64(bytes, 0, seed)}, {valid, bit_offset, lists},
               [=](int64_t i) { return xxh64(bytes + offsets[i], offsets[i + 1] - offsets[i], seed); });
}

NATIVE(void, data_place_text64, int64_t rows, int64_t slots, int64_t slot, int64_t key_base, const int64_t* ends,
       uint64_t* keys, const uint8_t* valid, int64_t bit_offset, const int64_t* lists, uint64_t seed,
       const int64_t* offsets, const uint8_t* bytes) {
    place_keys({rows, slots, slot, key_base, ends, keys, xxh64(bytes, 0, seed)}, {valid, bit_offset, lists},
               [=](int64_t i) { return xxh64(bytes + offsets[i], offsets[i + 1] - offsets[i], seed); });
}

// `values` are the bits of int64 or uint64.
NATIVE(void, data_place_integers, int64_t rows, int64_t slots, int64_t slot, int64_t key_base, const int64_t* ends,
       uint64_t* keys, const uint8_t* valid, int64_t bit_offset, const int64_t* lists, uint64_t seed, int32_t kind,
       int32_t is_signed, const uint64_t* values, const int64_t* least, const uint8_t* small, int64_t buckets,
       const uint64_t* bucket_keys) {
    const Place place = {rows, slots, slot, key_base, ends, keys, xxh64(0, 0, seed)};
    const Rows column = {valid, bit_offset, lists};
    const Buckets table = {least, small, bucket_keys, buckets};
    if (kind == RAW)
        place_keys(place, column, [=](int64_t i) { return values[i]; });
    else if (kind == HASHED)
        place_keys(place, column, [=](int64_t i) { return hash_integer(values[i], is_signed, seed); });
    else
        place_keys(place, column, [=](int64_t i) { return bucket_key((int64_t)values[i], table, bucket_keys, seed); });
}

// `dictionary` holds the keys of the column's distinct values.
NATIVE(void, data_place_indices, int64_t rows, int64_t slots, int64_t slot, int64_t key_base, const int64_t* ends,
       uint64_t* keys, const uint8_t* valid, int64_t bit_offset, const int64_t* lists, uint64_t seed,
       const int32_t* indices, const uint64_t* dictionary) {
    place_keys({rows, slots, slot, key_base, ends, keys, xxh64(0, 0, seed)}, {valid, bit_offset, lists},
               [=](int64_t i) { return dictionary[indices[i]]; });
}

// The weights of a slot's keys, from a list column of the same lengths.
NATIVE(void, data_place_weights, int64_t rows, int64_t slots, int64_t slot, int64_t key_base, const int64_t* ends,
       float* weights, const int64_t* key_lists, const int64_t* lists, const float* values) {
    const Place place = {rows, slots, slot, key_base, ends, 0, 0};
    for (int64_t row = 0; row < rows; ++row)
        if (key_lists[row + 1] > key_lists[row])
            for (int64_t k = 0; k < place.count(row); ++k) weights[place.start(row) + k] = values[lists[row] + k];
}

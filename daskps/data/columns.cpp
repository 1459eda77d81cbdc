// Turns Arrow columns into keys, directly from Arrow's buffers. Works in tiles of examples, slot by slot within a tile, so
// that the keys and bags of a tile stay in the L1 cache while 39 columns write into them (slot by slot over all examples
// took 4 times as long).
#include "slot.cuh"

enum Source { TEXT32 = 0, TEXT64 = 1, INTEGERS = 2, INDICES = 3 };

// Values of one slot in a block. daskps/data/columns.py has a structured dtype with the same fields. All pointers refer to
// example 0 of the block.
struct KeyColumn {
    int32_t source;
    int32_t kind;
    int32_t missing_key;
    int32_t is_signed;           // INTEGERS: int64, else uint64
    int32_t key_rule;            // of text
    uint64_t seed;
    const uint8_t* valid;        // Arrow's bitmap of the examples that have a value; null: all have
    int64_t bit_offset;          // of example 0 in `valid`
    const int64_t* lists;        // (examples + 1,) where each example's values begin; null: one value each
    const void* values;          // offsets of text, integers, or indices
    const void* data;            // bytes of text, or keys of the distinct values
    const uint64_t* bucket_keys;

    bool has(int64_t example) const {
        int64_t bit = bit_offset + example;
        return !valid || (valid[bit >> 3] >> (bit & 7) & 1);
    }
    int64_t first(int64_t example) const { return lists ? lists[example] : example; }
    int64_t count(int64_t example) const { return !has(example) ? 0 : lists ? lists[example + 1] - lists[example] : 1; }
};

// Examples [start, stop) of a block, and where their keys and bags are written.
struct Tile {
    int64_t start, stop, slots;
    int64_t base;          // end of the bag before the tile
    const int32_t* status; // (examples,), from example `start` on
    int64_t* ends;         // (examples, slots), from example `start` on
    uint64_t* keys;        // of the whole piece
    int64_t key_base;      // number of the piece's first key in `ends`
    bool fixed;            // every bag of the tile has exactly one key
};

// Writes the keys of one slot in the common case: no lists, no bad examples, and a missing value has a key of its own.
template <typename KeyAt>
static inline void place_single_keys(const Tile& tile, const KeyColumn& column, int64_t slot, KeyAt key_at) {
    const uint64_t missing = xxh64((const uint8_t*)"", 0, column.seed);
    const uint8_t* valid = column.valid;
    const int64_t slots = tile.slots, bit_offset = column.bit_offset, stop = tile.stop;
    uint64_t* out = tile.keys + (tile.base - tile.key_base) + slot;
    if (!valid) {
        for (int64_t example = tile.start; example < stop; ++example, out += slots) *out = key_at(example);
        return;
    }
    for (int64_t example = tile.start; example < stop; ++example, out += slots) {
        int64_t bit = bit_offset + example;
        *out = valid[bit >> 3] >> (bit & 7) & 1 ? key_at(example) : missing;
    }
}

// Writes the keys of one slot, key_at(i) for value number i. A good example without values gets one key or none.
template <typename KeyAt>
static inline void place_keys(const Tile& tile, const KeyColumn& column, int64_t slot, KeyAt key_at) {
    if (tile.fixed) return place_single_keys(tile, column, slot, key_at);
    const uint64_t missing = xxh64((const uint8_t*)"", 0, column.seed);
    for (int64_t example = tile.start; example < tile.stop; ++example) {
        int64_t bag = (example - tile.start) * tile.slots + slot;
        int64_t from = bag ? tile.ends[bag - 1] : tile.base, to = tile.ends[bag];
        uint64_t* out = tile.keys + (from - tile.key_base);
        if (from == to) continue;
        int64_t first = column.first(example);
        if (!column.count(example))
            *out = missing;
        else
            for (int64_t k = 0; k < to - from; ++k) out[k] = key_at(first + k);
    }
}

template <typename Offset>
static inline void place_text(const Tile& tile, const KeyColumn& column, int64_t slot) {
    const Offset* offsets = (const Offset*)column.values;
    const uint8_t* bytes = (const uint8_t*)column.data;
    const uint64_t seed = column.seed;
    const int32_t key_rule = column.key_rule;
    place_keys(tile, column, slot,
               [=](int64_t i) { return hash_text(bytes + offsets[i], bytes + offsets[i + 1], key_rule, seed); });
}

static void place_integers(const Tile& tile, const KeyColumn& column, int64_t slot, const Buckets& buckets) {
    const uint64_t* values = (const uint64_t*)column.values;
    const uint64_t seed = column.seed, *bucket_keys = column.bucket_keys;
    const bool is_signed = column.is_signed;
    if (column.kind == RAW)
        place_keys(tile, column, slot, [=](int64_t i) { return values[i]; });
    else if (column.kind == HASHED)
        place_keys(tile, column, slot, [=](int64_t i) { return hash_integer(values[i], is_signed, seed); });
    else
        place_keys(tile, column, slot, [=](int64_t i) {
            return bucket_key((int64_t)values[i], buckets, bucket_keys, seed);
        });
}

static void place_column(const Tile& tile, const KeyColumn& column, int64_t slot, const Buckets& buckets) {
    if (column.source == TEXT32) return place_text<int32_t>(tile, column, slot);
    if (column.source == TEXT64) return place_text<int64_t>(tile, column, slot);
    if (column.source == INTEGERS) return place_integers(tile, column, slot, buckets);
    const int32_t* indices = (const int32_t*)column.values;
    const uint64_t* dictionary = (const uint64_t*)column.data;
    place_keys(tile, column, slot, [=](int64_t i) { return dictionary[indices[i]]; });
}

DEVICE bool all_single(const KeyColumn* columns, int64_t slots) {
    for (int64_t slot = 0; slot < slots; ++slot)
        if (columns[slot].lists || !columns[slot].missing_key) return false;
    return true;
}

DEVICE bool all_fine(const int32_t* status, int64_t examples) {
    int32_t any = 0;
    for (int64_t example = 0; example < examples; ++example) any |= status[example];
    return !any;
}

// Writes the ends of the tile's bags; those of a bad example are empty. Returns the last end.
static int64_t count_tile(const Tile& tile, const KeyColumn* columns) {
    int64_t end = tile.base, *out = tile.ends;
    if (tile.fixed) {
        int64_t bags = (tile.stop - tile.start) * tile.slots;
        for (int64_t bag = 0; bag < bags; ++bag) out[bag] = end + bag + 1;
        return end + bags;
    }
    for (int64_t example = tile.start; example < tile.stop; ++example) {
        bool bad = tile.status[example - tile.start];
        for (int64_t slot = 0; slot < tile.slots; ++slot) {
            int64_t here = bad ? 0 : columns[slot].count(example);
            if (!here && !bad && columns[slot].missing_key) here = 1;
            *out++ = end += here;
        }
    }
    return end;
}

// Parses examples [first, last) of a block; `status` and `ends` begin with example `first`. Returns the number of keys.
NATIVE(int64_t, data_parse_columns, int64_t first, int64_t last, int64_t slots, const void* columns,
       const int64_t* least, const uint8_t* small, int64_t buckets, const int32_t* status, int64_t key_base,
       uint64_t* keys, int64_t* ends) {
    const KeyColumn* plan = (const KeyColumn*)columns;
    const Buckets table = {least, small, 0, buckets};
    const int64_t tile_examples = 32;
    const bool single = all_single(plan, slots);
    int64_t end = key_base;
    for (int64_t start = first; start < last; start += tile_examples) {
        int64_t stop = start + tile_examples < last ? start + tile_examples : last, done = start - first;
        const bool fixed = single && all_fine(status + done, stop - start);
        const Tile tile = {start, stop, slots, end, status + done, ends + done * slots, keys, key_base, fixed};
        end = count_tile(tile, plan);
        for (int64_t slot = 0; slot < slots; ++slot) place_column(tile, plan[slot], slot, table);
    }
    return end - key_base;
}

// Writes the weights of a slot's keys in examples [first, last), from a list column with lists of the same lengths.
NATIVE(void, data_place_weights, int64_t first, int64_t last, int64_t slots, int64_t slot, int64_t key_base,
       const int64_t* ends, const int64_t* key_lists, const int64_t* lists, const float* values, float* weights) {
    for (int64_t example = first; example < last; ++example) {
        int64_t bag = (example - first) * slots + slot;
        int64_t from = bag ? ends[bag - 1] : key_base;
        if (key_lists[example + 1] == key_lists[example]) continue;  // the key of a missing value weighs 1
        for (int64_t k = 0; k < ends[bag] - from; ++k) weights[from - key_base + k] = values[lists[example] + k];
    }
}

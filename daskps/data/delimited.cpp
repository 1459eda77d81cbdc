// Parses lines of delimited fields (Criteo's TSV, CSV) into labels, keys and dense features.
// A line is first cut into fields, then every slot reads its column, so two slots may read the same column.
#include "scan.cuh"
#include "slot.cuh"

struct DensePlan {
    int32_t column;
    float missing;
};

struct Columns {
    int32_t count;
    int32_t label;  // or -1: every label is 0
    int32_t example_weight;  // or -1
    int32_t delimiter;
    int32_t slots;
    int32_t dense;
    int32_t refuse_quotes;  // 1: a field that starts with a quote makes the example bad
    int32_t label_needed;   // 0: an example with a bad label is kept, with the label NaN
};

// The schema, as the parser needs it.
struct Plan {
    Columns columns;
    const SlotPlan* slots;
    const DensePlan* dense;
    Buckets buckets;
};

struct Line {
    const uint8_t* text;
    const int64_t* stops;  // (columns + 1,) field c is text[stops[c] + 1 : stops[c + 1]]

    const uint8_t* begin(int64_t column) const { return text + stops[column] + 1; }
    const uint8_t* end(int64_t column) const { return text + stops[column + 1]; }
};

// Appends the keys of one field at *keys.
DEVICE Reason read_slot(
    const uint8_t* p, const uint8_t* end, const SlotPlan& slot, const Plan& plan, uint64_t** keys) {
    if (p == end) {
        if (slot.missing_key) *(*keys)++ = xxh64(p, 0, slot.seed);
        return FINE;
    }
    if (slot.separator < 0) return key_of(p, end, slot, plan.buckets, (*keys)++);
    while (true) {
        const uint8_t* stop = p;
        while (stop < end && *stop != (uint8_t)slot.separator) ++stop;
        Reason reason = stop == p ? MISSING_VALUE : key_of(p, stop, slot, plan.buckets, (*keys)++);
        if (reason != FINE || stop == end) return reason;
        p = stop + 1;
    }
}

// Resets the label of a bad line and returns its status.
DEVICE int32_t spoil(float* label, Reason reason, int64_t column) {
    *label = 0;
    return status_of(reason, column + 1);
}

// Parses one line. Returns its status: 0, or that of the first bad field. If only the label is bad and not needed, the
// label is NaN. `ends` gets the end of every bag, counted from `base`.
DEVICE int32_t read_line(const Line& line, const Plan& plan, float* label, uint64_t** keys, const uint64_t* base,
                         int64_t* ends, float* dense, float* weight) {
    const Columns& columns = plan.columns;
    int32_t status = 0;
    *label = 0;
    if (columns.label >= 0) {
        int64_t c = columns.label;
        if (read_label(line.begin(c), line.end(c), false, label) != FINE) status = status_of(BAD_LABEL, c + 1);
        if (status && columns.label_needed) return status;
        if (status) *label = __builtin_nanf("");
    }
    for (int64_t s = 0; s < columns.slots; ++s) {
        int64_t c = plan.slots[s].column;
        Reason reason = read_slot(line.begin(c), line.end(c), plan.slots[s], plan, keys);
        if (reason != FINE) return spoil(label, reason, c);
        ends[s] = *keys - base;
    }
    for (int64_t d = 0; d < columns.dense; ++d) {
        int64_t c = plan.dense[d].column;
        dense[d] = plan.dense[d].missing;
        if (line.begin(c) == line.end(c)) continue;
        Reason reason = read_float(line.begin(c), line.end(c), &dense[d]);
        if (reason != FINE) return spoil(label, reason, c);
    }
    if (columns.example_weight >= 0) {
        int64_t c = columns.example_weight;
        Reason reason = read_example_weight(line.begin(c), line.end(c), weight);
        if (reason != FINE) return spoil(label, reason, c);
    }
    return status;
}

// Returns the number (from 1) of the first field that starts with a quote, or 0. Explains a wrong number of columns: a
// delimiter inside quotes makes two fields of one.
DEVICE int64_t quoted_column(const uint8_t* text, int64_t start, int64_t stop, const Columns& columns) {
    int64_t column = 1;
    for (int64_t at = start; at < stop; ++at) {
        if (text[at] == '"' && (at == start || text[at - 1] == (uint8_t)columns.delimiter)) return column;
        column += text[at] == (uint8_t)columns.delimiter;
    }
    return 0;
}

// Cuts the next line into fields and moves the scanner behind it. Returns the line's status.
DEVICE int32_t cut_line(Scanner<2>* scanner, const Columns& columns, int64_t* stops) {
    int64_t found = 0;
    const uint8_t* text = scanner->text;
    stops[0] = scanner->line_start - 1;
    while (true) {
        int64_t stop = scanner->next();
        ++found;
        if (found <= columns.count) stops[found] = stop;
        if (stop < scanner->size && text[stop] != '\n') continue;
        scanner->line_start = stop + 1;
        break;
    }
    if (found != columns.count) {
        int64_t quoted = columns.refuse_quotes ? quoted_column(text, stops[0] + 1, scanner->line_start - 1, columns) : 0;
        return quoted ? status_of(QUOTED, quoted) : status_of(WRONG_COLUMN_COUNT, found);
    }
    if (stops[found] > stops[found - 1] + 1 && text[stops[found] - 1] == '\r') --stops[found];
    if (columns.refuse_quotes)
        for (int64_t c = 0; c < columns.count; ++c)
            if (stops[c + 1] > stops[c] + 1 && text[stops[c] + 1] == '"') return status_of(QUOTED, c + 1);
    return 0;
}

// Parses `examples` lines of `text` after the first `skip`. A bad line gets a status and no keys. Returns the number of
// keys. `text` must be readable 64 bytes past `size`. `ends` gets the ends of examples * slots bags, counted from
// `key_base`.
NATIVE(int64_t, data_parse_delimited, const uint8_t* text, int64_t size, int64_t skip, int64_t examples,
       const void* columns, const void* slots, const void* dense_columns, const int64_t* least, const uint8_t* small,
       int64_t buckets, const uint64_t* bucket_keys, int64_t key_base, int64_t* stops, float* labels, uint64_t* keys,
       int64_t* ends, float* dense, float* weights, int32_t* status) {
    const Plan plan = {*(const Columns*)columns, (const SlotPlan*)slots, (const DensePlan*)dense_columns,
                       {least, small, bucket_keys, buckets}};
    Scanner<2> scanner(text, size, skip_lines(text, size, skip), (uint8_t)plan.columns.delimiter, (uint8_t)'\n');
    uint64_t* next = keys;
    const uint64_t* base = keys - key_base;
    for (int64_t example = 0; example < examples; ++example) {
        uint64_t* start = next;
        int64_t* bag_ends = ends + example * plan.columns.slots;
        float* features = dense + example * plan.columns.dense;
        float* weight = weights ? weights + example : 0;
        labels[example] = 0;
        status[example] = cut_line(&scanner, plan.columns, stops);
        if (!status[example])
            status[example] = read_line({text, stops}, plan, labels + example, &next, base, bag_ends, features, weight);
        if (!status[example] || labels[example] != labels[example]) continue;
        next = start;
        labels[example] = 0;
        if (weight) *weight = 0;
        for (int64_t s = 0; s < plan.columns.slots; ++s) bag_ends[s] = next - base;
        for (int64_t d = 0; d < plan.columns.dense; ++d) features[d] = 0;
    }
    return next - keys;
}

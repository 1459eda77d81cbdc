// Parses lines of a label and tokens: libsvm (index:value), libffm (field:index:value), multislot (slot:key[:weight]).
// Tokens may come in any order. Within a bag, keys keep the order of the line.
#include "scan.cuh"
#include "slot.cuh"

enum Style { LIBSVM = 0, LIBFFM = 1, MULTISLOT = 2 };

struct Tokens {
    int32_t style;
    int32_t slots;
    int32_t ignore_unknown;
    int32_t lookup_mask;  // size of the lookup table - 1
    int32_t label_needed;  // 0: an example with a bad label is kept, with the label NaN
};

struct TokenPlan {
    Tokens tokens;
    const SlotPlan* slots;
    Buckets buckets;
    const uint8_t* names;       // of all slots, concatenated
    const int64_t* name_ends;   // (slots + 1,)
    const int32_t* lookup;      // hash table of names: slot + 1, 0 for an empty entry
};

// The tokens of the current line.
struct LineTokens {
    int32_t* slot;
    uint64_t* key;
    float* weight;
    int64_t count;
};

struct Token {
    const uint8_t* begin;
    const uint8_t* end;
    const uint8_t* colon[2];
    int64_t colons;
};

DEVICE bool is_slot(const TokenPlan& plan, int64_t slot, const uint8_t* name, int64_t size) {
    int64_t start = plan.name_ends[slot];
    return plan.name_ends[slot + 1] - start == size && !__builtin_memcmp(plan.names + start, name, (size_t)size);
}

// Returns the number of the slot, or -1. Tokens mostly come in the order of the slots, so the slot of the last token
// (`hint`) and the next one are tried first.
DEVICE int64_t find_slot(const TokenPlan& plan, const uint8_t* name, int64_t size, int64_t hint) {
    if (is_slot(plan, hint, name, size)) return hint;
    if (hint + 1 < plan.tokens.slots && is_slot(plan, hint + 1, name, size)) return hint + 1;
    uint32_t mask = (uint32_t)plan.tokens.lookup_mask;
    for (uint32_t place = (uint32_t)xxh64(name, size, 0) & mask; plan.lookup[place]; place = (place + 1) & mask)
        if (is_slot(plan, plan.lookup[place] - 1, name, size)) return plan.lookup[place] - 1;
    return -1;
}

DEVICE bool all_digits(const uint8_t* p, const uint8_t* end) {
    for (; p < end; ++p)
        if (!is_digit(*p)) return false;
    return true;
}

// Parses a token and appends it to `line`.
DEVICE Reason read_token(const Token& token, const TokenPlan& plan, int64_t* hint, LineTokens* line) {
    int32_t style = plan.tokens.style;
    bool has_slot = style != LIBSVM, has_weight = style == MULTISLOT ? token.colons == 2 : true;
    if (token.colons != has_slot + has_weight) return BAD_TOKEN;
    const uint8_t* key = has_slot ? token.colon[0] + 1 : token.begin;
    const uint8_t* key_end = has_weight ? token.colon[token.colons - 1] : token.end;
    int64_t slot = has_slot ? find_slot(plan, token.begin, token.colon[0] - token.begin, *hint) : 0;
    if (slot < 0 && !plan.tokens.ignore_unknown) return UNKNOWN_SLOT;
    if (key == key_end) return BAD_TOKEN;
    if (style != MULTISLOT && !all_digits(key, key_end)) return NOT_AN_INTEGER;
    float weight = 1;
    Reason reason = has_weight ? read_float(key_end + 1, token.end, &weight) : FINE;
    if (reason != FINE || slot < 0) return reason;
    *hint = slot;
    line->slot[line->count] = (int32_t)slot;
    line->weight[line->count] = weight;
    return key_of(key, key_end, plan.slots[slot], plan.buckets, &line->key[line->count++]);
}

// Finds the next token of the line that is not empty. Returns false at the end of the line. `start` moves behind it.
DEVICE bool next_token(Scanner<4>* scanner, int64_t* start, bool* ended, Token* token) {
    const uint8_t* text = scanner->text;
    while (!*ended) {
        token->colons = 0;
        int64_t stop = scanner->next();
        for (; stop < scanner->size && text[stop] == ':'; stop = scanner->next()) {
            if (token->colons < 2) token->colon[token->colons] = text + stop;
            ++token->colons;
        }
        *ended = stop >= scanner->size || text[stop] == '\n';
        int64_t end = stop;
        if (*ended && end > *start && text[end - 1] == '\r') --end;
        token->begin = text + *start;
        token->end = text + end;
        *start = stop + 1;
        if (end > token->begin - text) return true;
    }
    return false;
}

DEVICE int32_t read_tokens(Scanner<4>* scanner, const TokenPlan& plan, float* label, LineTokens* line) {
    Token token;
    bool ended = false;
    int64_t start = scanner->line_start, number = 1, hint = 0;
    int32_t status = 0, bad_label = 0;
    bool comments = plan.tokens.style != MULTISLOT, comment = false;
    line->count = 0;
    bool any = next_token(scanner, &start, &ended, &token);
    if (comments && any && *token.begin == '#')
        status = status_of(COMMENT, 1);
    else if (!any || read_label(token.begin, token.end, plan.tokens.style != MULTISLOT, label) != FINE)
        bad_label = status_of(BAD_LABEL, 1);
    if (bad_label && (plan.tokens.label_needed || token.colons)) status = bad_label;  // a token where the label should be is always bad
    while (next_token(scanner, &start, &ended, &token)) {
        ++number;
        comment |= comments && *token.begin == '#';
        if (status || comment) continue;  // the line is still scanned to its end
        Reason reason = read_token(token, plan, &hint, line);
        if (reason != FINE) status = status_of(reason, number);
    }
    scanner->line_start = start;
    *label = status ? 0 : bad_label ? __builtin_nanf("") : *label;
    return status ? status : bad_label;
}

// Sorts the tokens of a good line into its bags (counting sort; `places` (slots,) is scratch). Returns the number of keys.
DEVICE int64_t place_tokens(const LineTokens& line, const TokenPlan& plan, int64_t first, int64_t* places,
                            int64_t* ends, uint64_t* keys, float* weights) {
    int64_t slots = plan.tokens.slots, at = 0;
    for (int64_t s = 0; s < slots; ++s) places[s] = 0;
    for (int64_t t = 0; t < line.count; ++t) ++places[line.slot[t]];
    for (int64_t s = 0; s < slots; ++s) {
        int64_t count = places[s];
        places[s] = at;
        if (!count && plan.slots[s].missing_key) {
            keys[at] = xxh64(plan.names, 0, plan.slots[s].seed);
            if (weights) weights[at] = 1;
            count = 1;
        }
        at += count;
        ends[s] = first + at;
    }
    for (int64_t t = 0; t < line.count; ++t) {
        int64_t place = places[line.slot[t]]++;
        keys[place] = line.key[t];
        if (weights) weights[place] = line.weight[t];
    }
    return at;
}

// Parses `examples` lines of `text` after the first `skip`. A bad line gets a status and no keys. Returns the number of
// keys. `text` must be readable 64 bytes past `size`. `ends` gets the ends of examples * slots bags, counted from
// `key_base`. The token arrays are scratch with one entry for each colon of the block.
NATIVE(int64_t, data_parse_tokens, const uint8_t* text, int64_t size, int64_t skip, int64_t examples, const void* tokens,
       const void* slots, const int64_t* least, const uint8_t* small, int64_t buckets, const uint64_t* bucket_keys,
       const uint8_t* names, const int64_t* name_ends, const int32_t* lookup, int64_t key_base, int64_t* places,
       int32_t* token_slots, uint64_t* token_keys, float* token_weights, float* labels, uint64_t* keys, int64_t* ends,
       float* weights, int32_t* status) {
    const TokenPlan plan = {*(const Tokens*)tokens, (const SlotPlan*)slots, {least, small, bucket_keys, buckets},
                            names, name_ends, lookup};
    Scanner<4> scanner(text, size, skip_lines(text, size, skip), (uint8_t)' ', (uint8_t)'\t', (uint8_t)':',
                       (uint8_t)'\n');
    LineTokens line = {token_slots, token_keys, token_weights, 0};
    int64_t used = 0;
    for (int64_t example = 0; example < examples; ++example) {
        int64_t* bag_ends = ends + example * plan.tokens.slots;
        status[example] = read_tokens(&scanner, plan, labels + example, &line);
        if (!status[example] || labels[example] != labels[example]) {
            used += place_tokens(line, plan, key_base + used, places, bag_ends, keys + used, weights ? weights + used : 0);
            continue;
        }
        labels[example] = 0;
        for (int64_t s = 0; s < plan.tokens.slots; ++s) bag_ends[s] = key_base + used;
    }
    return used;
}

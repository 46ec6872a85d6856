// Rows of tensors in any dtype, and the lists of keys (or queries) of a row of the pattern.

INLINE float from_bfloat16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
}

INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value == value ? uint16_t(rounded) : uint16_t(0x7fc0);
}

INLINE float from_float16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    // Exponent moved by a multiplication, which also makes normal numbers of subnormal ones.
    const uint32_t shifted = magnitude << 13;
    float value;
    __builtin_memcpy(&value, &shifted, 4);
    value *= 5.192296858534827628530496329220096e33f;  // 2^112
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    bits |= magnitude >= 0x7c00 ? 0x7f800000u : 0u;
    bits |= sign;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t to_float16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
    if (magnitude < 0x38800000) {                                 // subnormal: the addition rounds
        float small;
        __builtin_memcpy(&small, &magnitude, 4);
        small += 0.5f;
        uint32_t rounded;
        __builtin_memcpy(&rounded, &small, 4);
        return uint16_t(sign | (rounded - 0x3f000000));
    }
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

// Reads a row and pads it with zeros.
template <typename T>
void read_row(int64_t dtype, const void* data, int64_t start, T* row, int64_t dim, int64_t padded) {
    if (dtype == kFloat32) {
        const float* from = static_cast<const float*>(data) + start;
        for (int64_t d = 0; d < dim; ++d) row[d] = T(from[d]);
    } else if (dtype == kFloat64) {
        const double* from = static_cast<const double*>(data) + start;
        for (int64_t d = 0; d < dim; ++d) row[d] = T(from[d]);
    } else if (dtype == kBfloat16) {
        const uint16_t* from = static_cast<const uint16_t*>(data) + start;
        for (int64_t d = 0; d < dim; ++d) row[d] = T(from_bfloat16(from[d]));
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(data) + start;
        for (int64_t d = 0; d < dim; ++d) row[d] = T(from_float16(from[d]));
    }
    for (int64_t d = dim; d < padded; ++d) row[d] = T(0);
}

template <typename T>
void write_row(int64_t dtype, void* data, int64_t start, const T* row, int64_t dim) {
    if (dtype == kFloat32) {
        float* to = static_cast<float*>(data) + start;
        for (int64_t d = 0; d < dim; ++d) to[d] = float(row[d]);
    } else if (dtype == kFloat64) {
        double* to = static_cast<double*>(data) + start;
        for (int64_t d = 0; d < dim; ++d) to[d] = double(row[d]);
    } else if (dtype == kBfloat16) {
        uint16_t* to = static_cast<uint16_t*>(data) + start;
        for (int64_t d = 0; d < dim; ++d) to[d] = to_bfloat16(float(row[d]));
    } else {
        uint16_t* to = static_cast<uint16_t*>(data) + start;
        for (int64_t d = 0; d < dim; ++d) to[d] = to_float16(float(row[d]));
    }
}

template <typename T>
INLINE void copy(T* to, const T* from, int64_t count) {
    constexpr int L = kLanes<T>;
    int64_t i = 0;
    for (; i + L <= count; i += L) store<T>(to + i, load<T>(from + i));
    for (; i < count; ++i) to[i] = from[i];
}

// One row (or column) of a tile: its list lies at `slot` of the tile's buffers.
struct Row {
    int64_t token;
    int64_t slot;
    int64_t count;
    int64_t first_pair;  // rows only: number of its first pair
};

// The rows of a tile, in a tensor (by token) or in a buffer (one after the other), and their lists.
template <typename T>
struct Tile {
    T* data;
    int64_t stride;
    bool by_token;
    int64_t dim;  // padded to whole vectors
    const Row* rows;
    int64_t count;
    const int32_t* lists;

    T* row(int64_t r) const { return data + (by_token ? rows[r].token : r) * stride; }
};

// The lists of one head of one image.
struct Lists {
    const PatternTables& p;
    int64_t batch, head;
    int64_t stored;        // which stored head
    int64_t block;         // which block of pairs within the image
    int64_t index;         // (image, head) as one number
    int64_t pairs_offset;  // first pair of this image's block
    int64_t first_patch;   // patch pairs before this stored head
    int64_t low = 0, high = 0;  // offsets inside the sequence, moved along from row to row

    Lists(const PatternTables& pattern, int64_t index)
        : p(pattern), batch(index / pattern.heads), head(index % pattern.heads), index(index) {
        stored = p.stored_heads == 1 ? 0 : head;
        block = p.stored_heads == 1 ? head : 0;
        pairs_offset = (batch * (p.heads / p.stored_heads) + block) * p.pairs;
        first_patch = p.row_starts[stored * p.tokens];
    }

    int64_t length() const { return p.prefix + p.tokens; }

    // Pairs of prefix tokens before patch query i, its own included up to its first patch key.
    int64_t prefix_pairs(int64_t i) const {
        return stored * p.prefix * (length() + p.tokens) + p.prefix * length() + (i + 1) * p.prefix;
    }

    int64_t prefix_row(int64_t token) const {
        return stored * p.prefix * (length() + p.tokens) + first_patch + token * length();
    }

    // Number among the patch pairs of the first patch pair of a row that starts at `first_pair`.
    int64_t patch_pair(int64_t first_pair, int64_t token) const {
        return first_pair + p.prefix - prefix_pairs(token - p.prefix);
    }

    // Moves the window to the offsets o with least <= o < limit.
    void window(int64_t least, int64_t limit) {
        const int32_t* offsets = p.offsets + p.offset_starts[stored];
        const int64_t count = p.offset_starts[stored + 1] - p.offset_starts[stored];
        while (low > 0 && offsets[low - 1] >= least) --low;
        while (low < count && offsets[low] < least) ++low;
        while (high > 0 && offsets[high - 1] >= limit) --high;
        while (high < count && offsets[high] < limit) ++high;
        if (high < low) high = low;
    }

    // First patch pair of patch query i.
    int64_t patch_row(int64_t i) const {
        return p.row_starts[stored * p.tokens + i];
    }

    // Keys of a query. Sets the row's count and first pair.
    void keys_of(Row& row, int32_t* keys) {
        if (row.token < p.prefix) {
            row.count = length();
            row.first_pair = prefix_row(row.token);
            for (int64_t j = 0; j < row.count; ++j) keys[j] = int32_t(j);
            return;
        }
        const int64_t i = row.token - p.prefix, first = patch_row(i);
        row.first_pair = first + prefix_pairs(i) - p.prefix;
        for (int64_t j = 0; j < p.prefix; ++j) keys[j] = int32_t(j);
        keys += p.prefix;
        int64_t count;
        if (p.offsets) {
            window(-i, p.tokens - i);
            const int32_t* offsets = p.offsets + p.offset_starts[stored] + low;
            count = high - low;
            for (int64_t n = 0; n < count; n += 8)
                for (int64_t m = n; m < n + 8; ++m) keys[m] = int32_t(row.token) + offsets[m];
        } else {
            count = p.row_starts[stored * p.tokens + i + 1] - first;
            for (int64_t n = 0; n < count; ++n) keys[n] = int32_t(p.prefix) + p.row_keys[first + n];
        }
        row.count = p.prefix + count;
    }

    // Queries that see a key, and the number of each pair.
    void queries_of(Row& row, int32_t* queries, int64_t* pairs) {
        const int64_t j = row.token - p.prefix;
        for (int64_t i = 0; i < p.prefix; ++i) {
            queries[i] = int32_t(i);
            pairs[i] = prefix_row(i) + row.token;
        }
        row.count = p.prefix;
        queries += p.prefix;
        pairs += p.prefix;
        if (row.token < p.prefix) {
            for (int64_t i = 0; i < p.tokens; ++i) {
                queries[i] = int32_t(p.prefix + i);
                pairs[i] = patch_row(i) + prefix_pairs(i) - p.prefix + row.token;
            }
            row.count += p.tokens;
            return;
        }
        if (p.offsets) {
            const int32_t* offsets = p.offsets + p.offset_starts[stored];
            const int64_t* base = p.row_base + stored * p.tokens;
            window(j - p.tokens + 1, j + 1);
            for (int64_t t = high - 1; t >= low; --t) {
                const int64_t i = j - offsets[t];
                *queries++ = int32_t(p.prefix + i);
                *pairs++ = base[i] + t + prefix_pairs(i);
            }
            row.count += high - low;
        } else {
            const int64_t start = p.column_starts[stored * p.tokens + j];
            const int64_t count = p.column_starts[stored * p.tokens + j + 1] - start;
            for (int64_t n = 0; n < count; ++n) {
                const int64_t i = p.column_queries[start + n];
                queries[n] = int32_t(p.prefix + i);
                pairs[n] = p.column_pairs[start + n] + prefix_pairs(i);
            }
            row.count += count;
        }
    }
};

// The two inner loops: dot products of each row of a tile with the rows of its list, and weighted sums of these.
//
// Rows are whole vectors long; what is padded is zero. Up to eight vectors are handled at a time, so that they fit into
// the registers; longer rows are cut into pieces. The number of vectors is chosen once for a whole tile.

constexpr int kPiece = 8;

// out[i] (+)= sum of x * rows[keys[i]] over V vectors, for kRows rows. Four numbers are written whatever kRows is.
template <typename T, int V, bool kAdd, int kRows>
INLINE void dots_group(const Vector<T>* x, const T* rows, int64_t stride, const int32_t* keys, T* out) {
    constexpr int L = kLanes<T>;
    const T* row[kRows];
    Vector<T> sums[kRows];
    for (int r = 0; r < kRows; ++r) {
        row[r] = rows + keys[r] * stride;
        sums[r] = x[0] * load<T>(row[r]);
    }
    for (int v = 1; v < V; ++v)
        for (int r = 0; r < kRows; ++r) sums[r] += x[v] * load<T>(row[r] + v * L);
    constexpr int last = kRows - 1;
    if constexpr (kAdd) {
        T four[4];
        store_sums(four, sums[0], sums[smaller(1, last)], sums[smaller(2, last)], sums[last]);
        for (int r = 0; r < kRows; ++r) out[r] += four[r];
    } else {
        store_sums(out, sums[0], sums[smaller(1, last)], sums[smaller(2, last)], sums[last]);
    }
}

template <typename T, int V, bool kAdd>
void dots_piece(const Tile<T>& tile, T factor, const T* rows, int64_t stride, int64_t start, T* scores) {
    for (int64_t r = 0; r < tile.count; ++r) {
        const T* const x = tile.row(r) + start;
        Vector<T> fixed[V];
        for (int v = 0; v < V; ++v) fixed[v] = factor * load<T>(x + v * kLanes<T>);
        const int64_t count = tile.rows[r].count;
        const int32_t* keys = tile.lists + tile.rows[r].slot;
        T* out = scores + tile.rows[r].slot;
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) dots_group<T, V, kAdd, 4>(fixed, rows, stride, keys + i, out + i);
        switch (count - i) {
            case 1: dots_group<T, V, kAdd, 1>(fixed, rows, stride, keys + i, out + i); break;
            case 2: dots_group<T, V, kAdd, 2>(fixed, rows, stride, keys + i, out + i); break;
            case 3: dots_group<T, V, kAdd, 3>(fixed, rows, stride, keys + i, out + i); break;
        }
        // Spills into the next row's place, which is still to be filled; a later piece must leave it alone.
        if constexpr (!kAdd) store<T>(out + count, broadcast<T>(T(-__builtin_inf())));
    }
}

template <typename T, int V>
void weighted_piece(const Tile<T>& tile, const T* weights, const T* rows, int64_t stride, int64_t start) {
    constexpr int L = kLanes<T>;
    for (int64_t r = 0; r < tile.count; ++r) {
        const int64_t count = tile.rows[r].count;
        const int32_t* keys = tile.lists + tile.rows[r].slot;
        const T* const own = weights + tile.rows[r].slot;
        Vector<T> sums[V];
        for (int v = 0; v < V; ++v) sums[v] = Vector<T>{};
        for (int64_t i = 0; i < count; ++i) {
            const T* const row = rows + keys[i] * stride;
            const T weight = own[i];
            for (int v = 0; v < V; ++v) sums[v] += weight * load<T>(row + v * L);
        }
        T* const to = tile.row(r) + start;
        for (int v = 0; v < V; ++v) store<T>(to + v * L, sums[v]);
    }
}

#define FOR_EACH_SIZE(CALL) \
    switch (vectors) {      \
        case 1: CALL(1);    \
        case 2: CALL(2);    \
        case 3: CALL(3);    \
        case 4: CALL(4);    \
        case 5: CALL(5);    \
        case 6: CALL(6);    \
        case 7: CALL(7);    \
        default: CALL(8);   \
    }

// scores[slot + i] = factor * dot product of row r of the tile with rows[list[i]], padded with -inf to whole vectors.
template <typename T>
void dots(const Tile<T>& tile, T factor, const T* rows, int64_t stride, T* scores) {
    for (int64_t start = 0; start < tile.dim; start += kPiece * kLanes<T>) {
        const int64_t vectors = (tile.dim - start) / kLanes<T>;
#define CALL(V)                                                                        \
    start ? dots_piece<T, V, true>(tile, factor, rows + start, stride, start, scores)  \
          : dots_piece<T, V, false>(tile, factor, rows + start, stride, start, scores); \
    break
        FOR_EACH_SIZE(CALL)
#undef CALL
    }
}

// Row r of the tile = sum of weights[slot + i] * rows[list[i]].
template <typename T>
void weighted(const Tile<T>& tile, const T* weights, const T* rows, int64_t stride) {
    for (int64_t start = 0; start < tile.dim; start += kPiece * kLanes<T>) {
        const int64_t vectors = (tile.dim - start) / kLanes<T>;
#define CALL(V)                                                       \
    weighted_piece<T, V>(tile, weights, rows + start, stride, start); \
    break
        FOR_EACH_SIZE(CALL)
#undef CALL
    }
}

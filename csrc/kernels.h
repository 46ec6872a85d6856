// The two inner loops: dot products of one row with a list of rows, and a weighted sum of a list of rows.
//
// Rows are whole vectors long; what is padded is zero. Up to eight vectors are handled at a time, so that they fit into
// the registers; longer rows are cut into pieces.

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
void dots_piece(const T* x, T scale, const T* rows, int64_t stride, const int32_t* keys, int64_t count, T* out) {
    Vector<T> fixed[V];
    for (int v = 0; v < V; ++v) fixed[v] = scale * load<T>(x + v * kLanes<T>);
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) dots_group<T, V, kAdd, 4>(fixed, rows, stride, keys + i, out + i);
    switch (count - i) {
        case 1: dots_group<T, V, kAdd, 1>(fixed, rows, stride, keys + i, out + i); break;
        case 2: dots_group<T, V, kAdd, 2>(fixed, rows, stride, keys + i, out + i); break;
        case 3: dots_group<T, V, kAdd, 3>(fixed, rows, stride, keys + i, out + i); break;
    }
}

// out = sum of weights[i] * rows[keys[i]] over V vectors.
template <typename T, int V>
void weighted_piece(const T* weights, const T* rows, int64_t stride, const int32_t* keys, int64_t count, T* out) {
    constexpr int L = kLanes<T>;
    Vector<T> sums[V];
    for (int v = 0; v < V; ++v) sums[v] = Vector<T>{};
    for (int64_t i = 0; i < count; ++i) {
        const T* const row = rows + keys[i] * stride;
        const T weight = weights[i];
        for (int v = 0; v < V; ++v) sums[v] += weight * load<T>(row + v * L);
    }
    for (int v = 0; v < V; ++v) store<T>(out + v * L, sums[v]);
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

template <typename T>
void dots(const T* x, T scale, const T* rows, int64_t stride, int64_t dim, const int32_t* keys, int64_t count, T* out) {
    constexpr int L = kLanes<T>;
    for (int64_t start = 0; start < dim; start += kPiece * L) {
        const int64_t vectors = (dim - start) / L;
#define CALL(V)                                                                                            \
    start ? dots_piece<T, V, true>(x + start, scale, rows + start, stride, keys, count, out)    \
          : dots_piece<T, V, false>(x + start, scale, rows + start, stride, keys, count, out);  \
    break
        FOR_EACH_SIZE(CALL)
#undef CALL
    }
}

template <typename T>
void weighted(const T* weights, const T* rows, int64_t stride, int64_t dim, const int32_t* keys, int64_t count,
              T* out) {
    constexpr int L = kLanes<T>;
    for (int64_t start = 0; start < dim; start += kPiece * L) {
        const int64_t vectors = (dim - start) / L;
#define CALL(V)                                                                      \
    weighted_piece<T, V>(weights, rows + start, stride, keys, count, out + start);   \
    break
        FOR_EACH_SIZE(CALL)
#undef CALL
    }
}

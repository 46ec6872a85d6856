// Attention over just the kept pairs, forward and backward. Compiled once for each instruction set.
//
// A row (a query) is handled as a list of keys, whatever the pattern's form. Rows are taken in tiles of some hundred
// pairs and each step runs over the whole tile before the next (dot products, softmax, weighted sums), so that the
// steps of different rows overlap in the processor. Each row is summed in one fixed order by one thread, so results do
// not depend on the number of threads.
//
// The backward pass reads the saved probabilities. Over the queries it makes the gradient of the scores and of q; over
// the keys, with the transposed lists, those of k and v. So no two threads ever add to the same number.
#include "attention.h"

#include <cstdlib>
#include <utility>

#ifndef FIBOTTENTION_ISA
#define FIBOTTENTION_ISA isa_baseline
#endif

namespace FIBOTTENTION_ISA {

namespace {

#include "vectors.h"
#include "pairs.h"
#include "kernels.h"
#include "work.h"

// A row whose every score is -inf has no weights at all.
template <typename T>
INLINE Vector<T> one_over(Vector<T> total) {
    return total == 0 ? Vector<T>{} : T(1) / total;
}

// Softmax of the scores of a row, padded with -inf to V vectors that stay in registers. Returns the weight of each of
// `missing` pairs with score 0.
template <typename T, int V>
INLINE Vector<T> softmax_of(T* scores, int64_t missing) {
    constexpr int L = kLanes<T>;
    const T infinity = T(__builtin_inf());
    Vector<T> x[V];
    Vector<T> top = broadcast<T>(missing ? T(0) : -infinity);
    for (int v = 0; v < V; ++v) {
        x[v] = load<T>(scores + v * L);
        top = x[v] > top ? x[v] : top;
    }
    top = largest_lane<T>(top);
    const Vector<T> shift = top == -infinity ? Vector<T>{} : top;
    Vector<T> total{};
    for (int v = 0; v < V; ++v) {
        x[v] = exponential<T>(x[v] - shift);
        total += x[v];
    }
    const Vector<T> rest = missing ? exponential<T>(-shift) : Vector<T>{};
    const Vector<T> factor = one_over<T>(sum_of_lanes<T>(total) + T(missing) * rest);
    for (int v = 0; v < V; ++v) store<T>(scores + v * L, x[v] * factor);
    return rest * factor;
}

// The same for a row of any length.
template <typename T>
INLINE T softmax(T* scores, int64_t count, int64_t missing) {
    constexpr int L = kLanes<T>;
    switch ((count + L - 1) / L) {
        case 1: return softmax_of<T, 1>(scores, missing)[0];
        case 2: return softmax_of<T, 2>(scores, missing)[0];
        case 3: return softmax_of<T, 3>(scores, missing)[0];
        case 4: return softmax_of<T, 4>(scores, missing)[0];
    }
    const T infinity = T(__builtin_inf());
    Vector<T> top = broadcast<T>(missing ? T(0) : -infinity);
    for (int64_t i = 0; i < count; i += L) {
        const Vector<T> x = load<T>(scores + i);
        top = x > top ? x : top;
    }
    top = largest_lane<T>(top);
    const Vector<T> shift = top == -infinity ? Vector<T>{} : top;
    Vector<T> total{};
    for (int64_t i = 0; i < count; i += L) {
        const Vector<T> e = exponential<T>(load<T>(scores + i) - shift);
        store<T>(scores + i, e);
        total += e;
    }
    const Vector<T> rest = missing ? exponential<T>(-shift) : Vector<T>{};
    const Vector<T> factor = one_over<T>(sum_of_lanes<T>(total) + T(missing) * rest);
    for (int64_t i = 0; i < count; i += L) store<T>(scores + i, load<T>(scores + i) * factor);
    return (rest * factor)[0];
}

// Threshold and sum of the trivial weights of a row (Twist: suppressed where weight <= limit).
template <typename T>
struct Trivial {
    T limit, sum;
};

template <typename T>
Trivial<T> find_trivial(const AttentionArguments& a, const T* weights, int64_t count) {
    T limit = T(a.twist_threshold);
    if (a.twist == kTwistRelative) {
        T top = 0;
        for (int64_t i = 0; i < count; ++i) top = larger(top, weights[i]);
        limit *= top;
    }
    T sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += weights[i] <= limit ? weights[i] : T(0);
    return {limit, sum};
}

template <typename T>
void twist(const AttentionArguments& a, T* weights, int64_t count) {
    const Trivial<T> trivial = find_trivial<T>(a, weights, count);
    if (!(trivial.sum >= Simd<T>::kTiny)) return;
    const T strength = *static_cast<const T*>(a.twist_scale);
    for (int64_t i = 0; i < count; ++i)
        if (weights[i] <= trivial.limit) weights[i] *= strength * (weights[i] / trivial.sum);
}

// Replaces the gradient of the transformed weights by that of the probabilities; returns that of the scale.
template <typename T>
T twist_backward(const AttentionArguments& a, const T* weights, T* grad, int64_t count) {
    const Trivial<T> trivial = find_trivial<T>(a, weights, count);
    if (!(trivial.sum >= Simd<T>::kTiny)) return 0;
    const T strength = *static_cast<const T*>(a.twist_scale);
    T moved = 0;  // sum of share * weight * gradient over the trivial weights
    for (int64_t i = 0; i < count; ++i)
        if (weights[i] <= trivial.limit) moved += weights[i] / trivial.sum * weights[i] * grad[i];
    const T common = moved / trivial.sum;
    for (int64_t i = 0; i < count; ++i)
        if (weights[i] <= trivial.limit) grad[i] = strength * (2 * (weights[i] / trivial.sum) * grad[i] - common);
    return moved;
}

// Multiplies by 0 or 1 / (1 - p), as a hash of the seed and the pair's number decides.
template <typename T>
void dropout(const AttentionArguments& a, T* weights, int64_t first, int64_t count) {
    const T kept = T(1 / (1 - a.dropout_p));
    const uint64_t limit = uint64_t(a.dropout_p * double(uint64_t(1) << 32));
    for (int64_t i = 0; i < count; ++i) {
        uint64_t z = uint64_t(a.seed) + uint64_t(first + i + 1) * 0x9e3779b97f4a7c15u;  // splitmix64
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        weights[i] *= (z >> 32) < limit ? T(0) : kept;
    }
}

template <typename T>
void add_bias(const AttentionArguments& a, const Lists& lists, T* scores, const Row& row) {
    const PatternTables& p = *a.pattern;
    const T* bias = static_cast<const T*>(a.bias);
    if (!a.bias_batch) {
        if (row.token < p.prefix) return;
        const int32_t* bucket = p.relation + lists.patch_pair(row.first_pair, row.token);
        bias += lists.head * p.buckets;
        for (int64_t i = p.prefix; i < row.count; ++i) scores[i] += bias[bucket[i - p.prefix]];
        return;
    }
    const int64_t block = lists.batch % a.bias_batch * (p.heads / p.stored_heads) + lists.block;
    bias += block * p.pairs + row.first_pair;
    for (int64_t i = 0; i < row.count; ++i) scores[i] += bias[i];
}

// What works on the queries, each with its list of keys.
template <typename T>
struct OverQueries : Work<T> {
    using Work<T>::Work;

    bool prepare() {
        const AttentionArguments& a = this->a;
        return this->allocate(a.pattern->longest_row, false, a.k, a.head_dim, a.v, a.value_dim);
    }
    void list(Lists& lists, Row& row) { lists.keys_of(row, this->lists + row.slot); }
};

template <typename T>
struct Forward : OverQueries<T> {
    using OverQueries<T>::OverQueries;

    void tile(const Lists& lists) {
        const AttentionArguments& a = this->a;
        const PatternTables& p = *a.pattern;
        const int64_t length = p.prefix + p.tokens;
        T* const scores = this->first;
        this->dots_with(this->read(a.q, a.head_dim, lists), T(a.scale), 0, scores);
        for (int64_t r = 0; r < this->row_count; ++r) {
            const Row& row = this->rows[r];
            T* s = scores + row.slot;
            if (a.bias) add_bias<T>(a, lists, s, row);
            const int64_t missing = a.zero_fill ? length - row.count : 0;
            const T rest = softmax<T>(s, row.count, missing);
            const int64_t pair = lists.pairs_offset + row.first_pair;
            if (a.probabilities) copy(static_cast<T*>(a.probabilities) + pair, s, row.count);
            if (a.twist) twist<T>(a, s, row.count);
            if (a.dropout_p > 0) dropout<T>(a, s, pair, row.count);
            if (a.weights) copy(static_cast<T*>(a.weights) + pair, s, row.count);
            if (a.zero_fill) {
                static_cast<T*>(a.rest)[lists.index * length + row.token] = rest;
                for (int64_t i = 0; i < row.count; ++i) s[i] -= rest;
            }
        }
        const Tile<T> out = this->tile_of(a.out, a.value_dim, lists);
        this->weighted_by(scores, 1, out);
        if (a.zero_fill) {
            const T* sums = static_cast<const T*>(a.value_sums) + lists.index * a.value_dim;
            for (int64_t r = 0; r < this->row_count; ++r) {
                const T rest = static_cast<const T*>(a.rest)[lists.index * length + this->rows[r].token];
                for (int64_t d = 0; d < a.value_dim; ++d) out.row(r)[d] += rest * sums[d];
            }
        }
        this->write(out, a.out, a.value_dim, lists);
    }
};

// Gradients of the scores and of q, and the weights that multiply the gradient of the output.
template <typename T>
struct BackwardRows : OverQueries<T> {
    using OverQueries<T>::OverQueries;

    void tile(const Lists& lists) {
        const AttentionArguments& a = this->a;
        const PatternTables& p = *a.pattern;
        const int64_t length = p.prefix + p.tokens;
        T* const grads = this->first;
        T* const other = this->second;
        const Tile<T> grad_out = this->read(a.grad_out, a.value_dim, lists);
        this->dots_with(grad_out, T(1), 1, grads);
        if (a.zero_fill) {
            const T* sums = static_cast<const T*>(a.value_sums) + lists.index * a.value_dim;
            for (int64_t r = 0; r < this->row_count; ++r) {
                T dot = 0;
                for (int64_t d = 0; d < a.value_dim; ++d) dot += grad_out.row(r)[d] * sums[d];
                other[this->rows[r].slot] = dot;
            }
        }
        for (int64_t r = 0; r < this->row_count; ++r) {
            const Row& row = this->rows[r];
            T* g = grads + row.slot;
            const int64_t pair = lists.pairs_offset + row.first_pair;
            const T* probabilities = static_cast<const T*>(a.probabilities) + pair;
            T mean = 0;
            if (a.zero_fill) {
                T outside = other[row.slot];
                for (int64_t i = 0; i < row.count; ++i) outside -= g[i];
                mean = outside * static_cast<const T*>(a.rest)[lists.index * length + row.token];
            }
            if (a.grad_weights) {
                const T* extra = static_cast<const T*>(a.grad_weights) + pair;
                for (int64_t i = 0; i < row.count; ++i) g[i] += extra[i];
            }
            if (a.dropout_p > 0) dropout<T>(a, g, pair, row.count);
            if (a.twist) {
                const T strength = twist_backward<T>(a, probabilities, g, row.count);
                static_cast<T*>(a.grad_twist_scale)[lists.index * length + row.token] = strength;
            }
            for (int64_t i = 0; i < row.count; ++i) mean += probabilities[i] * g[i];
            for (int64_t i = 0; i < row.count; ++i) g[i] = probabilities[i] * (g[i] - mean);
            copy(static_cast<T*>(a.grad_scores) + pair, g, row.count);
            const T scale = T(a.scale);
            for (int64_t i = 0; i < row.count; ++i) g[i] *= scale;
            if (a.weights && (a.twist || a.dropout_p > 0)) {
                T* weights = static_cast<T*>(a.weights) + pair;
                copy(weights, probabilities, row.count);
                if (a.twist) twist<T>(a, weights, row.count);
                if (a.dropout_p > 0) dropout<T>(a, weights, pair, row.count);
            }
        }
        if (!a.grad_q.data) return;
        const Tile<T> out = this->tile_of(a.grad_q, a.head_dim, lists);
        this->weighted_by(grads, 0, out);
        this->write(out, a.grad_q, a.head_dim, lists);
    }
};

// Gradients of k and v: sums over the queries that see each key.
template <typename T>
struct BackwardColumns : Work<T> {
    using Work<T>::Work;

    bool prepare() {
        const AttentionArguments& a = this->a;
        return this->allocate(a.pattern->longest_column, true, a.q, a.head_dim, a.grad_out, a.value_dim);
    }
    void list(Lists& lists, Row& row) { lists.queries_of(row, this->lists + row.slot, this->positions + row.slot); }

    void tile(const Lists& lists) {
        const AttentionArguments& a = this->a;
        const PatternTables& p = *a.pattern;
        const int64_t length = p.prefix + p.tokens;
        const T* const scores = static_cast<const T*>(a.grad_scores) + lists.pairs_offset;
        const T* const weights = static_cast<const T*>(a.weights) + lists.pairs_offset;
        const T scale = T(a.scale);
        if (a.grad_k.data)
            for (int64_t r = 0; r < this->row_count; ++r) {
                const Row& row = this->rows[r];
                const int64_t* pairs = this->positions + row.slot;
                for (int64_t i = 0; i < row.count; ++i) this->first[row.slot + i] = scale * scores[pairs[i]];
            }
        if (a.grad_v.data)
            for (int64_t r = 0; r < this->row_count; ++r) {
                const Row& row = this->rows[r];
                const int64_t* pairs = this->positions + row.slot;
                for (int64_t i = 0; i < row.count; ++i) this->second[row.slot + i] = weights[pairs[i]];
                if (a.zero_fill) {
                    const T* rest = static_cast<const T*>(a.rest) + lists.index * length;
                    const int32_t* queries = this->lists + row.slot;
                    for (int64_t i = 0; i < row.count; ++i) this->second[row.slot + i] -= rest[queries[i]];
                }
            }
        if (a.grad_k.data) {
            const Tile<T> out = this->tile_of(a.grad_k, a.head_dim, lists);
            this->weighted_by(this->first, 0, out);
            this->write(out, a.grad_k, a.head_dim, lists);
        }
        if (!a.grad_v.data) return;
        const Tile<T> out = this->tile_of(a.grad_v, a.value_dim, lists);
        this->weighted_by(this->second, 1, out);
        if (a.zero_fill) {
            const T* sums = static_cast<const T*>(a.grad_sums) + lists.index * a.value_dim;
            for (int64_t r = 0; r < this->row_count; ++r)
                for (int64_t d = 0; d < a.value_dim; ++d) out.row(r)[d] += sums[d];
        }
        this->write(out, a.grad_v, a.value_dim, lists);
    }
};

// Sums of a (B, H, T, D) tensor over the tokens, each row times a weight: (B, H, D).
template <typename T>
int32_t sum_tokens(const AttentionArguments& a, const Heads& heads, const T* weights, T* sums) {
    const int64_t length = a.pattern->prefix + a.pattern->tokens, dim = a.value_dim;
    return parallel(a, a.batch * a.pattern->heads, a.threads, [&](int64_t index) {
        T* row = static_cast<T*>(std::malloc(size_t(dim) * sizeof(T)));
        if (!row) return int32_t(kOutOfMemory);
        T* out = sums + index * dim;
        for (int64_t d = 0; d < dim; ++d) out[d] = 0;
        const int64_t start = index / a.pattern->heads * heads.batch_stride + index % a.pattern->heads * heads.head_stride;
        for (int64_t token = 0; token < length; ++token) {
            read_row<T>(a.dtype, heads.data, start + token * heads.token_stride, row, dim, dim);
            const T weight = weights ? weights[index * length + token] : T(1);
            for (int64_t d = 0; d < dim; ++d) out[d] += weight * row[d];
        }
        std::free(row);
        return int32_t(kOk);
    });
}

template <typename T>
int32_t forward_of(const AttentionArguments& a) {
    if (a.zero_fill)
        if (const int32_t status = sum_tokens<T>(a, a.v, nullptr, static_cast<T*>(a.value_sums))) return status;
    return run<Forward<T>>(a);
}

template <typename T>
int32_t backward_of(const AttentionArguments& a) {
    if (a.zero_fill) {
        if (const int32_t status = sum_tokens<T>(a, a.v, nullptr, static_cast<T*>(a.value_sums))) return status;
        const T* rest = static_cast<const T*>(a.rest);
        if (const int32_t status = sum_tokens<T>(a, a.grad_out, rest, static_cast<T*>(a.grad_sums))) return status;
    }
    if (const int32_t status = run<BackwardRows<T>>(a)) return status;
    if (!a.grad_k.data && !a.grad_v.data) return kOk;
    return run<BackwardColumns<T>>(a);
}

}  // namespace

int32_t forward(const AttentionArguments& a) {
    return a.dtype == kFloat64 ? forward_of<double>(a) : forward_of<float>(a);
}

int32_t backward(const AttentionArguments& a) {
    return a.dtype == kFloat64 ? backward_of<double>(a) : backward_of<float>(a);
}

}  // namespace FIBOTTENTION_ISA

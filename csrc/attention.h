// The C interface of the CPU kernel: plain numbers and pointers, no torch types. ops/cpu.py mirrors these structures.
#pragma once
#include <cstdint>

extern "C" {

// at::parallel_for of the stable ABI of torch (torch_parallel_for).
typedef void (*ParallelBody)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);

enum Dtype : int64_t { kFloat32 = 0, kFloat64 = 1, kBfloat16 = 2, kFloat16 = 3 };
enum TwistMode : int64_t { kNoTwist = 0, kTwistRelative = 1, kTwistAbsolute = 2 };
enum Status : int32_t { kOk = 0, kOutOfMemory = 1, kUnknownIsa = 2, kParallelFailed = 3 };

// Pairs among the patch tokens. The pairs of prefix tokens are implied: they see and are seen by all tokens.
//
// Pairs are numbered over the whole sequence, row by row: head, query, key.
struct PatternTables {
    int64_t heads;         // H
    int64_t stored_heads;  // 1 where all heads are the same, else H
    int64_t tokens;        // N, patch tokens
    int64_t prefix;        // P, prefix tokens
    int64_t pairs;         // kept pairs of all stored heads, prefix tokens included
    int64_t longest_row;
    int64_t longest_column;
    const int64_t* head_pairs;  // (stored_heads,) kept patch pairs of each head
    const int64_t* row_starts;  // (stored_heads * N + 1,) first patch pair of each row

    // Offset form: sorted offsets of each stored head. Else null.
    const int32_t* offsets;
    const int64_t* offset_starts;  // (stored_heads + 1,)
    // (stored_heads * N,) row_starts less the number of offsets that lie left of the sequence: the patch pair of query i
    // and offset number t is row_base[i] + t.
    const int64_t* row_base;

    // Row form: the keys of each row, and compressed columns. Else null.
    const int32_t* row_keys;
    const int64_t* column_starts;
    const int32_t* column_queries;
    const int64_t* column_pairs;  // patch pair of each entry

    const int32_t* relation;  // bucket of each patch pair in the bias table, or null
    int64_t buckets;
};

// A (B, H, T, D) tensor with strides in elements; the last axis is contiguous.
struct Heads {
    void* data;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t token_stride;
};

struct AttentionArguments {
    const PatternTables* pattern;
    int64_t isa;    // 0 baseline, 1 AVX2, 2 AVX-512
    int64_t dtype;  // of q, k, v, out and their gradients; sums are float64 for float64, else float32
    int64_t batch;
    int64_t head_dim;
    int64_t value_dim;
    Heads q, k, v, out;
    double scale;

    // Bias by pair (bias_batch, heads / stored_heads, pairs), or, if bias_batch is 0, by bucket (heads, buckets); in the
    // dtype of the sums. May be null.
    const void* bias;
    int64_t bias_batch;

    int64_t zero_fill;
    int64_t twist;
    double twist_threshold;
    const void* twist_scale;  // one number in the dtype of the sums
    double dropout_p;
    int64_t seed;

    void* probabilities;  // (B, H / stored_heads, pairs) after the softmax; out, may be null in the forward pass
    void* weights;        // the same after transform and dropout; out, may be null
    void* rest;           // (B, H, T) weight of each pair outside the pattern, with zero_fill
    void* value_sums;     // (B, H, Dv) scratch, with zero_fill

    // Backward only.
    Heads grad_out, grad_q, grad_k, grad_v;  // data of a gradient that is not needed is null
    const void* grad_weights;                // like weights; may be null
    void* grad_scores;                       // (B, H / stored_heads, pairs) out: also the gradient of a bias by pair
    void* grad_sums;                         // (B, H, Dv) scratch, with zero_fill
    void* grad_twist_scale;                  // (B, H, T) out: to be summed

    int64_t threads;
    ParallelFor parallel_for;
};

// To be raised with every change of the structures or functions above and below; ops/kernel.py has the same number.
enum Interface : int64_t { kInterface = 1 };

// kInterface and the sizes of the structures, so that a library of another version is not used by mistake.
int64_t fibottention_interface();
// Highest isa that this machine can run.
int64_t fibottention_best_isa();
int32_t fibottention_forward(const AttentionArguments* arguments);
int32_t fibottention_backward(const AttentionArguments* arguments);
// Sum of values (B, H / stored_heads, pairs) over the batch and over the patch pairs of each bucket: (heads, buckets).
int32_t fibottention_bucket_sums(const PatternTables* pattern, int64_t is_double, int64_t batch, const void* values,
                                 void* sums, ParallelFor parallel_for);
}

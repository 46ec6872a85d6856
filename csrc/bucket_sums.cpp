// Gradient of a bias table: sums of the pairs' gradients over the batch and over the pairs of each bucket.
#include "attention.h"

#include <utility>

namespace {

#include "vectors.h"
#include "pairs.h"

template <typename T>
void head_sums(const PatternTables& p, int64_t head, int64_t batch, const T* values, T* sums) {
    for (int64_t b = 0; b < p.buckets; ++b) sums[b] = 0;
    for (int64_t image = 0; image < batch; ++image) {
        const Lists lists(p, image * p.heads + head);
        for (int64_t i = 0; i < p.tokens; ++i) {
            const T* from = values + lists.pairs_offset + lists.prefix_pairs(i);
            for (int64_t pair = lists.patch_row(i); pair < lists.patch_row(i + 1); ++pair)
                sums[p.relation[pair]] += from[pair];
        }
    }
}

struct Context {
    const PatternTables& pattern;
    bool is_double;
    int64_t batch;
    const void* values;
    void* sums;
};

void sum_heads(int64_t begin, int64_t end, void* pointer) {
    const Context& c = *static_cast<const Context*>(pointer);
    for (int64_t head = begin; head < end; ++head) {
        const int64_t start = head * c.pattern.buckets;
        if (c.is_double)
            head_sums(c.pattern, head, c.batch, static_cast<const double*>(c.values),
                      static_cast<double*>(c.sums) + start);
        else
            head_sums(c.pattern, head, c.batch, static_cast<const float*>(c.values),
                      static_cast<float*>(c.sums) + start);
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int32_t fibottention_bucket_sums(
    const PatternTables* pattern, int64_t is_double, int64_t batch, const void* values, void* sums,
    ParallelFor parallel_for) {
    Context context{*pattern, is_double != 0, batch, values, sums};
    return parallel_for(0, pattern->heads, 1, sum_heads, &context) ? kParallelFailed : kOk;
}

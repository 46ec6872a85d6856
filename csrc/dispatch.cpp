// Chooses between the builds of the kernel for different instruction sets.
#include "attention.h"

#define DECLARE(ISA)                                       \
    namespace ISA {                                        \
    int32_t forward(const AttentionArguments& arguments);  \
    int32_t backward(const AttentionArguments& arguments); \
    }

DECLARE(isa_baseline)
#ifdef FIBOTTENTION_X86
DECLARE(isa_avx2)
DECLARE(isa_avx512)
#define RUN_X86(PASS)                                              \
    if (arguments->isa == 2) return isa_avx512::PASS(*arguments); \
    if (arguments->isa == 1) return isa_avx2::PASS(*arguments);
#else
#define RUN_X86(PASS)
#endif

#define RUN(PASS)                                                                               \
    if (arguments->isa < 0 || arguments->isa > fibottention_best_isa()) return kUnknownIsa;    \
    RUN_X86(PASS)                                                                               \
    return isa_baseline::PASS(*arguments);

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT int64_t fibottention_interface() {
    return kInterface * 1000000 + int64_t(sizeof(PatternTables)) * 1000 + int64_t(sizeof(AttentionArguments));
}

EXPORT int64_t fibottention_best_isa() {
#ifdef FIBOTTENTION_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        return 2;
    if (avx2) return 1;
#endif
    return 0;
}

EXPORT int32_t fibottention_forward(const AttentionArguments* arguments) { RUN(forward) }

EXPORT int32_t fibottention_backward(const AttentionArguments* arguments) { RUN(backward) }
}

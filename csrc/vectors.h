// SIMD by compiler vector extensions: one source for SSE2, AVX2, AVX-512 and NEON.
//
// Included inside the namespace of one instruction set. Nothing here may be a template of the standard library: the
// linker keeps one copy of those for all instruction sets.

#ifndef FIBOTTENTION_VECTOR_BYTES
#define FIBOTTENTION_VECTOR_BYTES 16
#endif

#define INLINE inline __attribute__((always_inline))

template <typename T>
struct Simd;

template <>
struct Simd<float> {
    typedef float Vector __attribute__((vector_size(FIBOTTENTION_VECTOR_BYTES)));
    typedef float Unaligned __attribute__((vector_size(FIBOTTENTION_VECTOR_BYTES), aligned(4), may_alias));
    typedef uint32_t Bits __attribute__((vector_size(FIBOTTENTION_VECTOR_BYTES)));
    static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
    static constexpr int kMantissa = 23;
    static constexpr float kLog2e = 1.44269504088896341f;
    static constexpr float kLn2High = 0.693145751953125f;
    static constexpr float kLn2Low = 1.42860682030941723e-6f;
    static constexpr float kLowest = -87.3f;   // exp of less is taken as zero
    static constexpr float kTiny = 1.17549435e-38f;  // smallest normal number
};

template <>
struct Simd<double> {
    typedef double Vector __attribute__((vector_size(FIBOTTENTION_VECTOR_BYTES)));
    typedef double Unaligned __attribute__((vector_size(FIBOTTENTION_VECTOR_BYTES), aligned(8), may_alias));
    typedef uint64_t Bits __attribute__((vector_size(FIBOTTENTION_VECTOR_BYTES)));
    static constexpr double kRound = 6755399441055744.0;
    static constexpr int kMantissa = 52;
    static constexpr double kLog2e = 1.44269504088896340736;
    static constexpr double kLn2High = 0.693147180369123816490;
    static constexpr double kLn2Low = 1.90821492927058770002e-10;
    static constexpr double kLowest = -708.0;
    static constexpr double kTiny = 2.2250738585072014e-308;
};

template <typename T>
using Vector = typename Simd<T>::Vector;

template <typename T>
constexpr int kLanes = FIBOTTENTION_VECTOR_BYTES / int(sizeof(T));

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

template <typename T>
INLINE T smaller(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
INLINE T larger(T a, T b) {
    return a > b ? a : b;
}

template <typename T>
INLINE Vector<T> load(const T* from) {
    return *reinterpret_cast<const typename Simd<T>::Unaligned*>(from);
}

template <typename T>
INLINE void store(T* to, Vector<T> value) {
    *reinterpret_cast<typename Simd<T>::Unaligned*>(to) = value;
}

template <typename T>
INLINE Vector<T> broadcast(T value) {
    return value - Vector<T>{};
}

// exp(x) for x at most 0; what is below the range of normal numbers gives 0. NaN stays NaN, unless the lowest bits of its
// payload are set, which no arithmetic does.
template <typename T>
INLINE Vector<T> exponential(Vector<T> x) {
    using S = Simd<T>;
    const Vector<T> shifted = x * S::kLog2e + S::kRound;
    const Vector<T> whole = shifted - S::kRound;
    const Vector<T> r = (x - whole * S::kLn2High) - whole * S::kLn2Low;
    Vector<T> series;
    if constexpr (sizeof(T) == 4) {
        // Coefficients of Cephes' expf.
        series = broadcast<T>(1.9875691500e-4f);
        series = series * r + 1.3981999507e-3f;
        series = series * r + 8.3334519073e-3f;
        series = series * r + 4.1665795894e-2f;
        series = series * r + 1.6666665459e-1f;
        series = series * r + 5.0000001201e-1f;
    } else {
        // Taylor's series, |r| < 0.35: the first term left out is below 1e-17.
        series = broadcast<T>(1.0 / 6227020800.0);
        series = series * r + 1.0 / 479001600.0;
        series = series * r + 1.0 / 39916800.0;
        series = series * r + 1.0 / 3628800.0;
        series = series * r + 1.0 / 362880.0;
        series = series * r + 1.0 / 40320.0;
        series = series * r + 1.0 / 5040.0;
        series = series * r + 1.0 / 720.0;
        series = series * r + 1.0 / 120.0;
        series = series * r + 1.0 / 24.0;
        series = series * r + 1.0 / 6.0;
        series = series * r + 0.5;
    }
    const Vector<T> power = series * r * r + r + T(1);
    // C casts between vector types keep the bits.
    const Vector<T> result = (Vector<T>)((typename S::Bits)power + ((typename S::Bits)shifted << S::kMantissa));
    return x < S::kLowest ? Vector<T>{} : result;
}

#if defined(__clang__)
#define SHUFFLE(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(V, a, b, ...) __builtin_shuffle(a, b, V{__VA_ARGS__})
#endif

// Lanes i and i ^ kStep exchanged.
template <int kStep, typename T, int... I>
INLINE Vector<T> exchanged(Vector<T> v, std::integer_sequence<int, I...>) {
    return SHUFFLE(typename Simd<T>::Bits, v, v, (I ^ kStep)...);
}

// The sum of all lanes, or the largest, in every lane.
template <typename T, int kStep = kLanes<T> / 2>
INLINE Vector<T> sum_of_lanes(Vector<T> v) {
    if constexpr (kStep > 0)
        return sum_of_lanes<T, kStep / 2>(v + exchanged<kStep, T>(v, std::make_integer_sequence<int, kLanes<T>>()));
    return v;
}

template <typename T, int kStep = kLanes<T> / 2>
INLINE Vector<T> largest_lane(Vector<T> v) {
    if constexpr (kStep > 0) {
        const Vector<T> other = exchanged<kStep, T>(v, std::make_integer_sequence<int, kLanes<T>>());
        return largest_lane<T, kStep / 2>(v > other ? v : other);
    }
    return v;
}

typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t Bits4 __attribute__((vector_size(16)));

// Four numbers, each the sum of the lanes of one vector.
INLINE void store_sums(float* to, Vector<float> a, Vector<float> b, Vector<float> c, Vector<float> d) {
    const Vector<float> all[4] = {a, b, c, d};
    Float4 four[4];
    for (int i = 0; i < 4; ++i) {
        Float4 parts[FIBOTTENTION_VECTOR_BYTES / 16];
        __builtin_memcpy(parts, &all[i], sizeof(parts));
        four[i] = parts[0];
        for (int j = 1; j < FIBOTTENTION_VECTOR_BYTES / 16; ++j) four[i] += parts[j];
    }
    const Float4 ab =
        SHUFFLE(Bits4, four[0], four[1], 0, 4, 1, 5) + SHUFFLE(Bits4, four[0], four[1], 2, 6, 3, 7);
    const Float4 cd =
        SHUFFLE(Bits4, four[2], four[3], 0, 4, 1, 5) + SHUFFLE(Bits4, four[2], four[3], 2, 6, 3, 7);
    const Float4 sums = SHUFFLE(Bits4, ab, cd, 0, 1, 4, 5) + SHUFFLE(Bits4, ab, cd, 2, 3, 6, 7);
    __builtin_memcpy(to, &sums, 16);
}

INLINE void store_sums(double* to, Vector<double> a, Vector<double> b, Vector<double> c, Vector<double> d) {
    to[0] = sum_of_lanes<double>(a)[0];
    to[1] = sum_of_lanes<double>(b)[0];
    to[2] = sum_of_lanes<double>(c)[0];
    to[3] = sum_of_lanes<double>(d)[0];
}

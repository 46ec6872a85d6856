// Sharing the rows among threads, and what each thread needs for its part.

// Pairs after which a tile takes no more rows.
constexpr int64_t kTilePairs = 2048;

template <typename T>
struct Work {
    // The rows of one head of a tensor: used where they are, or read and written through a buffer.
    struct Rows {
        T* direct;  // null for a buffer
        int64_t stride;
        void* data;
        int64_t start;
        int64_t dim;
    };
    // Rows that the inner loops read: whole vectors, padded with zeros.
    struct Input {
        const T* data;
        int64_t stride;
        int64_t dim;
    };

    static constexpr int64_t kMostRows = 128;
    static constexpr int64_t kAlign = kLanes<T>;

    const AttentionArguments& a;
    T *first = nullptr, *second = nullptr;  // one number per pair of the tile
    int32_t* lists = nullptr;
    int64_t* positions = nullptr;
    Rows query{}, result[2]{};
    Input input[2]{};
    Row rows[kMostRows];

    explicit Work(const AttentionArguments& arguments) : a(arguments) {}
    Work(const Work&) = delete;
    ~Work() { std::free(memory); }

    bool allocate(int64_t longest, bool columns, int64_t dim0, int64_t dim1) {
        const int64_t length = a.pattern->prefix + a.pattern->tokens;
        const int64_t pairs = round_up(kTilePairs + longest + kMostRows * kLanes<T> + 64, 64);
        const int64_t row = round_up(larger(a.head_dim, a.value_dim), 64);
        const int64_t packed0 = direct(dim0) ? 0 : round_up(length * round_up(dim0, kLanes<T>), 64);
        const int64_t packed1 = direct(dim1) ? 0 : round_up(length * round_up(dim1, kLanes<T>), 64);
        const int64_t numbers = 2 * pairs + row + packed0 + packed1;
        const int64_t bytes = numbers * int64_t(sizeof(T)) + pairs * 4 + (columns ? pairs * 8 : 0);
        memory = std::malloc(size_t(bytes + 64));
        if (!memory) return false;
        first = reinterpret_cast<T*>(round_up(reinterpret_cast<intptr_t>(memory), 64));
        second = first + pairs;
        buffer = second + pairs;
        packed[0] = buffer + row;
        packed[1] = packed[0] + packed0;
        positions = reinterpret_cast<int64_t*>(packed[1] + packed1);
        lists = reinterpret_cast<int32_t*>(positions + (columns ? pairs : 0));
        return true;
    }

    Rows rows_of(const Heads& heads, int64_t dim, const Lists& of) const {
        const int64_t start = of.batch * heads.batch_stride + of.head * heads.head_stride;
        T* const data = direct(dim) && heads.data ? static_cast<T*>(heads.data) + start : nullptr;
        return {data, heads.token_stride, heads.data, start, dim};
    }

    // Makes one tensor of one head ready for the inner loops, packed if it cannot be used where it is.
    void take(int which, const Heads& heads, int64_t dim, const Lists& of) {
        const Rows from = rows_of(heads, dim, of);
        if (from.direct) {
            input[which] = {from.direct, from.stride, dim};
            return;
        }
        const int64_t padded = round_up(dim, kLanes<T>);
        input[which] = {packed[which], padded, padded};
        if (packed_head == of.index) return;
        for (int64_t token = 0; token < of.length(); ++token)
            read_row<T>(a.dtype, from.data, from.start + token * from.stride, packed[which] + token * padded, dim,
                        padded);
    }

    const T* read(const Rows& from, int64_t token) {
        if (from.direct) return from.direct + token * from.stride;
        read_row<T>(a.dtype, from.data, from.start + token * from.stride, buffer, from.dim,
                    round_up(from.dim, kLanes<T>));
        return buffer;
    }

    T* output(const Rows& to, int64_t token) { return to.direct ? to.direct + token * to.stride : buffer; }

    void finish(const Rows& to, int64_t token) {
        if (!to.direct) write_row<T>(a.dtype, to.data, to.start + token * to.stride, buffer, to.dim);
    }

    const int32_t* list_of(const Row& row) const { return lists + row.slot; }

    // Dot products with each row of the list, padded with -inf to whole vectors.
    void dots_with(const T* x, T scale, int which, const Row& row, T* out) {
        const Input& rows = input[which];
        dots<T>(x, scale, rows.data, rows.stride, rows.dim, list_of(row), row.count, out);
        store<T>(out + row.count, broadcast<T>(T(-__builtin_inf())));
    }

    void weighted_by(const T* weights, int which, const Row& row, T* out) {
        const Input& rows = input[which];
        weighted<T>(weights, rows.data, rows.stride, rows.dim, list_of(row), row.count, out);
    }

    // Called when both inputs of a head have been taken.
    void head_is_packed(const Lists& of) { packed_head = of.index; }

   private:
    void* memory = nullptr;
    T* buffer = nullptr;  // one row
    T* packed[2] = {nullptr, nullptr};
    int64_t packed_head = -1;

    // Whether rows of this size can be used where they are.
    bool direct(int64_t dim) const {
        return a.dtype == (sizeof(T) == 8 ? kFloat64 : kFloat32) && dim % kLanes<T> == 0;
    }
};

template <typename Body>
int32_t parallel(const AttentionArguments& a, int64_t count, int64_t workers, const Body& body) {
    struct Shared {
        const Body& body;
        int32_t status;
    } shared{body, kOk};
    const ParallelBody run = [](int64_t begin, int64_t end, void* context) {
        Shared& shared = *static_cast<Shared*>(context);
        for (int64_t i = begin; i < end; ++i)
            if (const int32_t status = shared.body(i)) __atomic_store_n(&shared.status, status, __ATOMIC_RELAXED);
    };
    if (workers <= 1 || count <= 1) {
        run(0, count, &shared);
    } else if (a.parallel_for(0, count, (count + workers - 1) / workers, run, &shared)) {
        return kParallelFailed;
    }
    return shared.status;
}

// A row costs its pairs and about as much as this many more.
constexpr double kRowCost = 4;
// Work (pairs times channels) below which another thread does not pay.
constexpr double kLeastWork = 1 << 17;

// Splits the rows of all images and heads into parts of equal cost.
struct Split {
    const PatternTables& p;
    int64_t batch;
    double length, image = 0;

    Split(const PatternTables& pattern, int64_t batch)
        : p(pattern), batch(batch), length(double(pattern.prefix + pattern.tokens)) {
        for (int64_t h = 0; h < p.heads; ++h) image += head_cost(h);
    }

    double prefix_cost() const { return length + kRowCost; }
    double patch_cost(int64_t head) const {
        return double(p.head_pairs[p.stored_heads == 1 ? 0 : head]) / double(p.tokens) + double(p.prefix) + kRowCost;
    }
    double head_cost(int64_t head) const {
        return double(p.prefix) * prefix_cost() + double(p.tokens) * patch_cost(head);
    }

    int64_t workers(const AttentionArguments& a) const {
        const double work = image * double(batch) * double(larger(a.head_dim, a.value_dim)) / kLeastWork;
        return work <= 1 ? 1 : work >= double(a.threads) ? a.threads : int64_t(work);
    }

    // First row, counted over images and heads, of part `part` of `parts`.
    int64_t start(int64_t part, int64_t parts) const {
        const int64_t rows = p.prefix + p.tokens;
        if (part >= parts) return batch * p.heads * rows;
        double left = image * double(batch) * double(part) / double(parts);
        int64_t index = int64_t(left / image) * p.heads;
        left -= double(index / p.heads) * image;
        int64_t head = 0;
        while (head + 1 < p.heads && left >= head_cost(head)) left -= head_cost(head++);
        const double prefix = double(p.prefix) * prefix_cost();
        const double row = left < prefix ? left / prefix_cost() : double(p.prefix) + (left - prefix) / patch_cost(head);
        return smaller((index + head) * rows + smaller(int64_t(row), rows), batch * p.heads * rows);
    }
};

// Parts per thread: a thread that is slowed down leaves more of them to the others.
constexpr int64_t kPartsPerThread = 8;

template <typename Job>
int32_t run(const AttentionArguments& a) {
    const PatternTables& p = *a.pattern;
    const Split split(p, a.batch);
    const int64_t length = p.prefix + p.tokens, workers = split.workers(a);
    const int64_t parts = workers == 1 ? 1 : workers * kPartsPerThread;
    int64_t next_part = 0;
    return parallel(a, workers, workers, [&](int64_t) {
        Job job(a);
        if (!job.prepare()) return int32_t(kOutOfMemory);
        for (;;) {
            const int64_t part = __atomic_fetch_add(&next_part, 1, __ATOMIC_RELAXED);
            if (part >= parts) return int32_t(kOk);
            int64_t row = split.start(part, parts);
            const int64_t stop = split.start(part + 1, parts);
            while (row < stop) {
                Lists lists(p, row / length);
                int64_t token = row % length;
                const int64_t last = smaller(length, token + stop - row);
                row += last - token;
                job.take_head(lists);
                job.head_is_packed(lists);
                while (token < last) {
                    int64_t count = 0, slot = 0;
                    while (token < last && count < Job::kMostRows && slot < kTilePairs) {
                        Row& next = job.rows[count++];
                        next.token = token++;
                        next.slot = slot;
                        job.list(lists, next);
                        slot += round_up(next.count, Job::kAlign);
                    }
                    job.tile(lists, count);
                }
            }
        }
    });
}

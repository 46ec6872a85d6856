// Sharing the rows among threads, and what each thread needs for its part.

// Pairs after which a tile takes no more rows.
constexpr int64_t kTilePairs = 2048;
// Rows from which it pays to copy them next to each other.
constexpr int64_t kManyRows = 2048;

template <typename T>
struct Work {
    // Rows that the inner loops read: whole vectors, padded with zeros.
    struct Input {
        const T* data;
        int64_t stride;
    };

    static constexpr int64_t kMostRows = 128;
    static constexpr int64_t kAlign = kLanes<T>;

    const AttentionArguments& a;
    T *first = nullptr, *second = nullptr;  // one number per pair of the tile
    int32_t* lists = nullptr;
    int64_t* positions = nullptr;
    Input input[2]{};
    Row rows[kMostRows];
    int64_t row_count = 0;

    explicit Work(const AttentionArguments& arguments) : a(arguments) {}
    Work(const Work&) = delete;
    ~Work() { std::free(memory); }

    // Scratch for a tile, and for the two tensors of which the inner loops read the rows of a whole head.
    bool allocate(int64_t longest, bool columns, const Heads& heads0, int64_t dim0, const Heads& heads1, int64_t dim1) {
        source[0] = {heads0, dim0};
        source[1] = {heads1, dim1};
        const int64_t length = a.pattern->prefix + a.pattern->tokens;
        const int64_t pairs = round_up(kTilePairs + longest + kMostRows * kLanes<T> + 64, 64);
        const int64_t tile_rows = kMostRows * round_up(larger(a.head_dim, a.value_dim), kLanes<T>);
        const int64_t packed0 = packs(heads0, dim0) ? round_up(length * round_up(dim0, kLanes<T>), 64) : 0;
        const int64_t packed1 = packs(heads1, dim1) ? round_up(length * round_up(dim1, kLanes<T>), 64) : 0;
        const int64_t numbers = 2 * pairs + tile_rows + packed0 + packed1;
        const int64_t bytes = numbers * int64_t(sizeof(T)) + pairs * 4 + (columns ? pairs * 8 : 0);
        memory = std::malloc(size_t(bytes + 64));
        if (!memory) return false;
        first = reinterpret_cast<T*>(round_up(reinterpret_cast<intptr_t>(memory), 64));
        second = first + pairs;
        buffer = second + pairs;
        packed[0] = buffer + tile_rows;
        packed[1] = packed[0] + packed0;
        positions = reinterpret_cast<int64_t*>(packed[1] + packed1);
        lists = reinterpret_cast<int32_t*>(positions + (columns ? pairs : 0));
        return true;
    }

    // Makes a head ready for the inner loops.
    void take_head(const Lists& of) {
        take(0, of);
        take(1, of);
        packed_head = of.index;
    }

    // The tile's rows of a tensor, where they are if that can be, else in the buffer.
    Tile<T> tile_of(const Heads& heads, int64_t dim, const Lists& of) const {
        const int64_t padded = round_up(dim, kLanes<T>);
        if (!direct(dim)) return {buffer, padded, false, padded, rows, row_count, lists};
        T* const data = static_cast<T*>(heads.data) + start_of(heads, of);
        return {data, heads.token_stride, true, padded, rows, row_count, lists};
    }

    Tile<T> read(const Heads& heads, int64_t dim, const Lists& of) const {
        const Tile<T> tile = tile_of(heads, dim, of);
        if (tile.by_token) return tile;
        const int64_t start = start_of(heads, of);
        for (int64_t r = 0; r < row_count; ++r)
            read_row<T>(a.dtype, heads.data, start + rows[r].token * heads.token_stride, tile.row(r), dim, tile.dim);
        return tile;
    }

    void write(const Tile<T>& tile, const Heads& heads, int64_t dim, const Lists& of) const {
        if (tile.by_token) return;
        const int64_t start = start_of(heads, of);
        for (int64_t r = 0; r < row_count; ++r)
            write_row<T>(a.dtype, heads.data, start + rows[r].token * heads.token_stride, tile.row(r), dim);
    }

    void dots_with(const Tile<T>& tile, T factor, int which, T* scores) const {
        dots<T>(tile, factor, input[which].data, input[which].stride, scores);
    }

    void weighted_by(const T* weights, int which, const Tile<T>& out) const {
        weighted<T>(out, weights, input[which].data, input[which].stride);
    }

   private:
    void* memory = nullptr;
    T* buffer = nullptr;  // the tile
    T* packed[2] = {nullptr, nullptr};
    int64_t packed_head = -1;
    struct {
        Heads heads;
        int64_t dim;
    } source[2];

    static int64_t start_of(const Heads& heads, const Lists& of) {
        return of.batch * heads.batch_stride + of.head * heads.head_stride;
    }

    void take(int which, const Lists& of) {
        const Heads& heads = source[which].heads;
        const int64_t dim = source[which].dim, start = start_of(heads, of);
        if (!packs(heads, dim)) {
            input[which] = {static_cast<const T*>(heads.data) + start, heads.token_stride};
            return;
        }
        const int64_t padded = round_up(dim, kLanes<T>), size = a.dtype == kFloat64 ? 8 : a.dtype == kFloat32 ? 4 : 2;
        input[which] = {packed[which], padded};
        if (packed_head == of.index) return;
        for (int64_t token = 0; token < of.length(); ++token) {
            const int64_t row = start + token * heads.token_stride;
            const char* ahead = static_cast<const char*>(heads.data) + (row + 12 * heads.token_stride) * size;
            for (int64_t byte = 0; byte < dim * size; byte += 64) __builtin_prefetch(ahead + byte);
            read_row<T>(a.dtype, heads.data, row, packed[which] + token * padded, dim, padded);
        }
    }

    // Whether the rows of a head are copied before the inner loops read them: if these need another dtype or whole
    // vectors, or if each of many rows lies in a page of its own, as in timm's q, k and v.
    bool packs(const Heads& heads, int64_t dim) const {
        return !direct(dim) || (heads.token_stride >= 4 * dim && a.pattern->prefix + a.pattern->tokens >= kManyRows);
    }

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
                while (token < last) {
                    int64_t slot = 0;
                    job.row_count = 0;
                    while (token < last && job.row_count < Job::kMostRows && slot < kTilePairs) {
                        Row& next = job.rows[job.row_count++];
                        next.token = token++;
                        next.slot = slot;
                        job.list(lists, next);
                        slot += round_up(next.count, Job::kAlign);
                    }
                    job.tile(lists);
                }
            }
        }
    });
}

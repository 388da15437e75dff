// Scores one sample on several threads while generations are made live, and closes the model under
// its callers. Prints `generation SCORE_BITS` for each generation that answered. tests/c.rs compiles
// this program, once for each sanitizer, and runs it.
// usage: follow TARGET FLASH SAMPLE
// SAMPLE has the dense features, the shared ones last, then for each sparse feature the number of its
// keys and the keys. The program ends when its input ends.
#include "hatchback.hpp"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <thread>

namespace {

constexpr int THREADS = 3;

/// A sample in the layout of a request.
struct sample {
    std::vector<float> dense;
    std::vector<std::vector<std::uint64_t>> keys;
    std::vector<std::vector<std::uint32_t>> offsets;
    std::vector<hatchback::bags> sparse;

    sample(std::ifstream &file, const hatchback::shape &shape)
        : dense(shape.dense_features + shape.shared_dense_features) {
        for (auto &value : dense) file >> value;
        for (std::uint32_t f = 0; f < shape.sparse_features; f++) {
            std::uint32_t count = 0;
            file >> count;
            keys.emplace_back(count);
            for (auto &key : keys.back()) file >> key;
            offsets.push_back({0, count});
        }
        for (std::size_t f = 0; f < keys.size(); f++) sparse.push_back({keys[f].data(), offsets[f].data(), nullptr});
    }
};

/// The scores of each generation, which must always be the same.
class observed {
public:
    void add(std::uint64_t generation, const std::vector<float> &scores) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto found = seen_.emplace(generation, scores);
        if (std::memcmp(found.first->second.data(), scores.data(), scores.size() * sizeof(float)) != 0)
            differs_ = true;
        if (!found.second) return;
        std::printf("%llu", static_cast<unsigned long long>(generation));
        for (const float score : scores) {
            std::uint32_t bits = 0;
            std::memcpy(&bits, &score, sizeof bits);
            std::printf(" %u", bits);
        }
        std::printf("\n");
        std::fflush(stdout);
    }
    bool differs() {
        const std::lock_guard<std::mutex> guard(mutex_);
        return differs_;
    }

private:
    std::mutex mutex_;
    std::map<std::uint64_t, std::vector<float>> seen_;
    bool differs_ = false;
};

/// A caller that uses the handle until it is closed. Returns the result that ended it.
hatchback::result score_until_closed(hatchback_model model, const hatchback::shape &shape, const sample &from,
                                     observed &seen) {
    std::vector<float> scores(shape.outputs);
    std::vector<hatchback::status> statuses(1);
    for (;;) {
        std::uint64_t generation = 0;
        const auto result = hatchback_score(model, 1, from.dense.data(), from.sparse.data(), 0, scores.data(),
                                            statuses.data(), &generation);
        if (result == HATCHBACK_BUSY) continue;
        if (result != HATCHBACK_OK) return result;
        if (statuses[0].defaulted + statuses[0].absent + statuses[0].damaged != 0) return HATCHBACK_FAILED;
        seen.add(generation, scores);
    }
}

/// Closes the process of `context` on another thread, while this one loads a model.
void close_during_load(int, const char *message, void *context) {
    if (!std::strstr(message, "dense network of")) return;
    const auto process = *static_cast<const hatchback_process *>(context);
    std::thread([process] { (void)hatchback_close(process); }).join();
}

/// Whether a model whose process is closed during its load is closed too.
bool is_closed_during_load(char **arguments) {
    hatchback_process process{0};
    hatchback_model model{7};
    if (hatchback_open(arguments[1], &process) != HATCHBACK_OK) return false;
    hatchback_set_logger(close_during_load, &process);
    const auto loaded = hatchback_load(process, arguments[2], nullptr, &model);
    hatchback_set_logger(nullptr, nullptr);
    return loaded == HATCHBACK_CLOSED && model.handle == 0;
}

int run(char **arguments) {
    if (!is_closed_during_load(arguments)) return 3;
    const hatchback::process process(arguments[1]);
    hatchback::model model = process.load(arguments[2], "followed");
    const hatchback::shape shape = model.describe();
    std::ifstream file(arguments[3]);
    const sample one(file, shape);
    observed seen;
    const std::vector<std::string> names = model.output_names();
    if (names.size() != shape.outputs) return 3;
    for (std::uint32_t column = 0; column < shape.outputs; column++)
        if (model.output(names[column]) > column) return 3;

    // The C++ calls give the same answer as those of C.
    std::vector<float> scores(shape.outputs);
    hatchback::answer answer;
    answer.scores = scores;
    hatchback::request request;
    request.samples = 1;
    request.dense = one.dense;
    request.sparse = one.sparse;
    model.score(request, answer);
    seen.add(answer.generation, scores);
    request.timeout = std::chrono::microseconds(-1);
    if (model.try_score(request, answer) != HATCHBACK_DEADLINE_EXCEEDED) return 3;
    request.samples = 2;
    if (model.try_score(request, answer) != HATCHBACK_REQUEST) return 3;
    try {
        model.score(request, answer);
        return 3;
    } catch (const std::invalid_argument &) {
    }
    try {
        (void)process.load(arguments[2], "followed");
        return 3;
    } catch (const hatchback::error &e) {
        if (e.code() != HATCHBACK_OPEN || !std::strstr(e.what(), "is served already")) return 3;
    }

    std::vector<std::thread> callers;
    std::atomic<int> closed{0};
    for (int i = 0; i < THREADS; i++)
        callers.emplace_back([&, handle = model.handle()] {
            if (score_until_closed(handle, shape, one, seen) == HATCHBACK_CLOSED) closed++;
        });
    std::atomic<bool> stop{false};
    std::thread watcher([&] {
        while (!stop) {
            (void)model.prefetch(0, one.keys[0]);
            if (model.get_statistics().failed != 0 || process.memory().empty()) std::abort();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    });
    while (std::cin.get() != EOF) {}
    stop = true;
    watcher.join();

    // The model is closed while the callers use it.
    { const hatchback::model ended = std::move(model); }
    for (auto &caller : callers) caller.join();
    return closed == THREADS && !seen.differs() ? 0 : 3;
}

} // namespace

int main(int count, char **arguments) {
    if (count != 4) return 2;
    try {
        return run(arguments);
    } catch (const std::exception &e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}

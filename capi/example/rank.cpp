// Ranks candidates for one request: the shape of an application in a car. Each candidate is a sample.
// All samples have the same dense features, and a key of their own in the first sparse feature.
// usage: rank TARGET FLASH FEATURE KEY...
#include <hatchback.hpp>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <numeric>

namespace {

void log_message(int level, const char *message, void *) {
    std::cerr << (level == 1 ? "error: " : level == 2 ? "warning: " : "") << message << '\n';
}

int rank(const std::string &target, const std::string &flash, const std::string &feature,
         const std::vector<std::uint64_t> &candidates) {
    const hatchback::process process(target);
    const hatchback::model model = process.load(flash);
    const hatchback::shape shape = model.describe();
    const std::uint32_t ranked = model.feature(feature);

    // The keys of all samples are next to each other; offsets say where each sample's keys are.
    const auto samples = static_cast<std::uint32_t>(candidates.size());
    std::vector<std::uint32_t> one_each(samples + 1), none(samples + 1, 0);
    std::iota(one_each.begin(), one_each.end(), 0);
    std::vector<hatchback::bags> sparse(shape.sparse_features, hatchback::bags{nullptr, none.data(), nullptr});
    sparse[ranked] = {candidates.data(), one_each.data(), nullptr};
    const std::size_t numbers = std::size_t{samples} * shape.dense_features + shape.shared_dense_features;
    const std::vector<float> dense(numbers, 0.0F);

    std::vector<float> scores(std::size_t{samples} * shape.outputs);
    std::vector<hatchback::status> statuses(samples);
    hatchback::answer answer{scores, statuses, 0};
    hatchback::request request;
    request.samples = samples;
    request.dense = dense;
    request.sparse = sparse;
    request.timeout = std::chrono::milliseconds(50);
    model.score(request, answer);

    std::vector<std::uint32_t> order(samples);
    std::iota(order.begin(), order.end(), 0);
    const auto score = [&](std::uint32_t sample) { return scores[std::size_t{sample} * shape.outputs]; };
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return score(a) > score(b); });
    std::cout << "generation " << answer.generation << '\n';
    for (const std::uint32_t sample : order) {
        const bool is_fresh = statuses[sample].fresh == 1;
        std::cout << candidates[sample] << ' ' << score(sample) << (is_fresh ? "" : " (default row)") << '\n';
    }
    return 0;
}

} // namespace

int main(int count, char **arguments) {
    if (count < 5) {
        std::cerr << "usage: rank TARGET FLASH FEATURE KEY...\n";
        return 2;
    }
    hatchback_set_logger(log_message, nullptr);
    try {
        std::vector<std::uint64_t> keys;
        for (int i = 4; i < count; i++) keys.push_back(std::stoull(arguments[i]));
        return rank(arguments[1], arguments[2], arguments[3], keys);
    } catch (const std::exception &e) {
        std::cerr << e.what() << '\n';
        return 1;
    }
}

// libhatchback for C++17: the calls of hatchback.h with handles that close themselves, spans, and
// errors as exceptions or as values. Header only.
//
// Each call that can fail has two forms. `model.score(...)` throws hatchback::error.
// `model.try_score(...)` returns the result and never throws. With -fno-exceptions a call that would
// throw prints the message and aborts; use try_score, or the calls of hatchback.h.
#ifndef HATCHBACK_HPP
#define HATCHBACK_HPP

#include "hatchback.h"

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

static_assert(HATCHBACK_ABI == 1, "hatchback.hpp is for version 1 of the interface");

// The layouts and numbers of version 1. capi/src/lib.rs asserts the same of the library.
#define HATCHBACK_SIZE(type, size) static_assert(sizeof(::type) == (size), #type " has another size")
#define HATCHBACK_AT(type, field, at) static_assert(offsetof(::type, field) == (at), #type "." #field " has moved")
HATCHBACK_SIZE(hatchback_process, 8);
HATCHBACK_AT(hatchback_process, handle, 0);
HATCHBACK_SIZE(hatchback_model, 8);
HATCHBACK_AT(hatchback_model, handle, 0);
HATCHBACK_SIZE(hatchback_shape, 20);
HATCHBACK_AT(hatchback_shape, dense_features, 0);
HATCHBACK_AT(hatchback_shape, sparse_features, 4);
HATCHBACK_AT(hatchback_shape, outputs, 8);
HATCHBACK_AT(hatchback_shape, batch_max, 12);
HATCHBACK_AT(hatchback_shape, shared_dense_features, 16);
HATCHBACK_SIZE(hatchback_bags, 3 * sizeof(void *));
HATCHBACK_AT(hatchback_bags, keys, 0);
HATCHBACK_AT(hatchback_bags, offsets, sizeof(void *));
HATCHBACK_AT(hatchback_bags, weights, 2 * sizeof(void *));
HATCHBACK_SIZE(hatchback_value, 32);
HATCHBACK_AT(hatchback_value, kind, 24);
HATCHBACK_SIZE(hatchback_status, 20);
HATCHBACK_AT(hatchback_status, fresh, 0);
HATCHBACK_AT(hatchback_status, defaulted, 4);
HATCHBACK_AT(hatchback_status, absent, 8);
HATCHBACK_AT(hatchback_status, damaged, 12);
HATCHBACK_AT(hatchback_status, late, 16);
HATCHBACK_SIZE(hatchback_statistics, 112);
HATCHBACK_AT(hatchback_statistics, generation, 0);
HATCHBACK_AT(hatchback_statistics, requests, 8);
HATCHBACK_AT(hatchback_statistics, batches, 16);
HATCHBACK_AT(hatchback_statistics, busy, 24);
HATCHBACK_AT(hatchback_statistics, failed, 32);
HATCHBACK_AT(hatchback_statistics, expired, 40);
HATCHBACK_AT(hatchback_statistics, waiting, 48);
HATCHBACK_AT(hatchback_statistics, lookups, 56);
HATCHBACK_AT(hatchback_statistics, cached_lookups, 64);
HATCHBACK_AT(hatchback_statistics, missed_lookups, 72);
HATCHBACK_AT(hatchback_statistics, pages_read, 80);
HATCHBACK_AT(hatchback_statistics, pages_damaged, 88);
HATCHBACK_AT(hatchback_statistics, prefetch_waiting, 96);
HATCHBACK_AT(hatchback_statistics, prefetch_dropped, 104);
HATCHBACK_SIZE(hatchback_memory_line, 136);
HATCHBACK_AT(hatchback_memory_line, model, 0);
HATCHBACK_AT(hatchback_memory_line, part, 64);
HATCHBACK_AT(hatchback_memory_line, bytes, 128);
#undef HATCHBACK_SIZE
#undef HATCHBACK_AT
static_assert(HATCHBACK_OK == 0 && HATCHBACK_BUSY == 1 && HATCHBACK_REQUEST == 2 && HATCHBACK_OPEN == 3 &&
                  HATCHBACK_FAILED == 4 && HATCHBACK_NOT_FINITE == 5 && HATCHBACK_DEADLINE_EXCEEDED == 6 &&
                  HATCHBACK_CLOSED == 7,
              "the numbers of results are frozen");

namespace hatchback {

using result = ::hatchback_result;
using shape = ::hatchback_shape;
using bags = ::hatchback_bags;
using status = ::hatchback_status;
using statistics = ::hatchback_statistics;

/// A call that failed: its result, and the text of the library.
class error : public std::runtime_error {
public:
    explicit error(result code, const char *text = ::hatchback_error()) : std::runtime_error(text), code_(code) {}

    /// The result of the call.
    result code() const noexcept { return code_; }

private:
    result code_;
};

/// Throws `problem`; without exceptions prints it and aborts.
template <typename E>
[[noreturn]] inline void fail(const E &problem) {
#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
    throw problem;
#else
    std::fprintf(stderr, "hatchback: %s\n", problem.what());
    std::abort();
#endif
}

/// Throws `error` unless `code` is HATCHBACK_OK.
inline void check(result code) {
    if (code != HATCHBACK_OK) fail(error(code));
}

/// A view of contiguous values that it does not own.
template <typename T>
class span {
public:
    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    /// The values of a vector, an array or another container of this kind.
    template <typename C, typename = decltype(std::declval<C &>().data())>
    constexpr span(C &container) noexcept : data_(container.data()), size_(container.size()) {}

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

/// A line of the memory plan.
struct memory_line {
    std::string model, part;
    std::uint64_t bytes;
};

/// The samples of a request.
struct request {
    std::uint32_t samples = 0;
    span<const float> dense; ///< [samples, dense features], then [shared dense features]
    span<const bags> sparse; ///< one for each sparse feature
    std::chrono::microseconds timeout{0}; ///< 0 waits as long as it takes; below 0 is too late already
};

/// Where the answer to a request is written.
struct answer {
    span<float> scores;    ///< [samples, outputs]
    span<status> statuses; ///< [samples], or empty
    std::uint64_t generation = 0; ///< the generation that scored the request
};

/// A served model. The destructor ends serving it. Any number of threads may use it.
class model {
public:
    model() noexcept = default;
    model(const model &) = delete;
    model &operator=(const model &) = delete;
    model(model &&from) noexcept : handle_(std::exchange(from.handle_, {0})), shape_(from.shape_) {}
    model &operator=(model &&from) noexcept {
        if (this != &from) {
            unload();
            handle_ = std::exchange(from.handle_, {0});
            shape_ = from.shape_;
        }
        return *this;
    }
    ~model() { unload(); }

    /// The shape of requests.
    const shape &describe() const noexcept { return shape_; }

    /// The number of a sparse feature in a request.
    std::uint32_t feature(const std::string &name) const {
        const std::int32_t number = ::hatchback_feature(handle_, name.c_str());
        if (number < 0) fail(error(HATCHBACK_REQUEST));
        return static_cast<std::uint32_t>(number);
    }

    /// The first column of an output in the scores.
    std::uint32_t output(const std::string &name) const {
        const std::int32_t column = ::hatchback_output(handle_, name.c_str());
        if (column < 0) fail(error(HATCHBACK_REQUEST));
        return static_cast<std::uint32_t>(column);
    }

    /// The name of the output of each column of the scores.
    std::vector<std::string> output_names() const {
        std::vector<std::string> names;
        for (std::uint32_t column = 0; column < shape_.outputs; column++) {
            std::vector<char> name(64);
            result code = HATCHBACK_OK;
            while ((code = ::hatchback_output_name(handle_, column, name.data(),
                                                   static_cast<std::uint32_t>(name.size()))) == HATCHBACK_REQUEST)
                name.resize(2 * name.size()); // the name did not fit
            check(code);
            names.emplace_back(name.data());
        }
        return names;
    }

    /// Scores `from` into `to`. Returns HATCHBACK_REQUEST if a span does not have the size that the
    /// shape and the number of samples require, and HATCHBACK_DEADLINE_EXCEEDED if the timeout is
    /// below 0. hatchback_error() does not describe these two.
    result try_score(const request &from, answer &to) const noexcept {
        const std::size_t samples = from.samples;
        if (from.dense.size() != dense_size(samples) ||
            from.sparse.size() != shape_.sparse_features ||
            to.scores.size() != samples * shape_.outputs ||
            (to.statuses.size() != 0 && to.statuses.size() != samples))
            return HATCHBACK_REQUEST;
        // As an unsigned number it would be no limit at all.
        if (from.timeout.count() < 0) return HATCHBACK_DEADLINE_EXCEEDED;
        return ::hatchback_score(handle_, from.samples, from.dense.data(), from.sparse.data(),
                                 static_cast<std::uint64_t>(from.timeout.count()), to.scores.data(),
                                 to.statuses.size() == 0 ? nullptr : to.statuses.data(), &to.generation);
    }

    /// Scores `from` into `to`. Throws std::invalid_argument if a span has the wrong size, and
    /// hatchback::error if the call fails.
    void score(const request &from, answer &to) const {
        const std::size_t samples = from.samples;
        if (from.dense.size() != dense_size(samples)) fail(size_error("dense"));
        if (from.sparse.size() != shape_.sparse_features) fail(size_error("sparse"));
        if (to.scores.size() != samples * shape_.outputs) fail(size_error("scores"));
        if (to.statuses.size() != 0 && to.statuses.size() != samples) fail(size_error("statuses"));
        if (from.timeout.count() < 0) fail(error(HATCHBACK_DEADLINE_EXCEEDED, "timeout: below 0"));
        check(try_score(from, to));
    }

    /// The positions of the `k` best samples of `from`, an answer's scores, by column `column`: the
    /// best first, of equal scores the first; all positions if there are fewer samples.
    std::vector<std::uint32_t> top_k(span<const float> from, std::uint32_t k,
                                     std::uint32_t column = 0) const {
        const auto samples = static_cast<std::uint32_t>(from.size() / shape_.outputs);
        std::vector<std::uint32_t> positions(k < samples ? k : samples);
        check(::hatchback_top_k(from.data(), samples, shape_.outputs, column, k, positions.data()));
        return positions;
    }

    /// The key of a raw value of a feature, by the key function of the model's schema.
    std::uint64_t key(std::uint32_t feature, const std::string &value) const {
        std::uint64_t key = 0;
        check(::hatchback_key_of_text(handle_, feature, value.c_str(), &key));
        return key;
    }
    std::uint64_t key(std::uint32_t feature, std::int64_t value) const {
        std::uint64_t key = 0;
        check(::hatchback_key_of_integer(handle_, feature, value, &key));
        return key;
    }
    std::uint64_t key(std::uint32_t feature, double value) const {
        std::uint64_t key = 0;
        check(::hatchback_key_of_number(handle_, feature, value, &key));
        return key;
    }
    /// The key of a cross, for one raw value of each of its columns.
    std::uint64_t key(std::uint32_t feature, span<const hatchback_value> values) const {
        std::uint64_t key = 0;
        const auto count = static_cast<std::uint32_t>(values.size());
        check(::hatchback_key_of_cross(handle_, feature, values.data(), count, &key));
        return key;
    }

    /// Queues keys that a later request will look up. Returns how many fit into the queue.
    std::uint32_t prefetch(std::uint32_t feature, span<const std::uint64_t> keys) const {
        std::uint32_t queued = 0;
        const auto count = static_cast<std::uint32_t>(keys.size());
        check(::hatchback_prefetch(handle_, feature, keys.data(), count, &queued));
        return queued;
    }

    /// Why `sample`, a line of JSON, has its score: the JSON of `hatchback explain`.
    std::string explain(const std::string &sample) const {
        const char *report = nullptr;
        check(::hatchback_explain(handle_, sample.c_str(), &report));
        return report;
    }

    /// What the model did since its generation was loaded or swapped in.
    statistics get_statistics() const {
        statistics found{};
        check(::hatchback_get_statistics(handle_, &found));
        return found;
    }

    /// The handle, for calls of hatchback.h.
    ::hatchback_model handle() const noexcept { return handle_; }

private:
    friend class process;
    explicit model(::hatchback_model handle) : handle_(handle) {
        check(::hatchback_describe(handle_, &shape_));
    }
    static std::invalid_argument size_error(const char *field) {
        return std::invalid_argument(std::string(field) + ": its size does not fit the samples and the model");
    }
    void unload() noexcept {
        if (handle_.handle != 0) ::hatchback_unload(std::exchange(handle_, {0}));
    }

    ::hatchback_model handle_{0};
    /// The values of `dense` in a request.
    std::size_t dense_size(std::size_t samples) const noexcept {
        return samples * shape_.dense_features + shape_.shared_dense_features;
    }

    shape shape_{};
};

/// A memory budget with its models. It must outlive the models that it loaded.
class process {
public:
    /// Opens the budget of a target file.
    explicit process(const std::string &target) { check(::hatchback_open(target.c_str(), &handle_)); }
    process(const process &) = delete;
    process &operator=(const process &) = delete;
    process(process &&from) noexcept : handle_(std::exchange(from.handle_, {0})) {}
    process &operator=(process &&from) noexcept {
        if (this != &from) {
            close();
            handle_ = std::exchange(from.handle_, {0});
        }
        return *this;
    }
    ~process() { close(); }

    /// Serves the live generation of a flash directory, under the name of its lineage.
    model load(const std::string &flash) const { return load_as(flash, nullptr); }

    /// Serves the live generation of a flash directory as `name`.
    model load(const std::string &flash, const std::string &name) const {
        return load_as(flash, name.c_str());
    }

    /// The memory of all models, line by line.
    std::vector<memory_line> memory() const {
        std::uint32_t count = 0;
        check(::hatchback_get_memory(handle_, nullptr, 0, &count));
        std::vector<::hatchback_memory_line> lines(count);
        check(::hatchback_get_memory(handle_, lines.data(), count, &count));
        // A model may have been loaded or unloaded between the two calls.
        if (count < lines.size()) lines.resize(count);
        std::vector<memory_line> found;
        for (const auto &line : lines) found.push_back({line.model, line.part, line.bytes});
        return found;
    }

    /// The handle, for calls of hatchback.h.
    ::hatchback_process handle() const noexcept { return handle_; }

private:
    model load_as(const std::string &flash, const char *name) const {
        ::hatchback_model loaded{0};
        check(::hatchback_load(handle_, flash.c_str(), name, &loaded));
        return model(loaded);
    }
    void close() noexcept {
        if (handle_.handle != 0) ::hatchback_close(std::exchange(handle_, {0}));
    }

    ::hatchback_process handle_{0};
};

} // namespace hatchback

#endif

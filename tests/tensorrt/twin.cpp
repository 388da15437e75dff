// A twin of libnvinfer and its ONNX parser in one library, for tests of the shim and its callers. For
// every network, a score is the sum of the sample's inputs; in FP16 its last 13 bits are cut off. With
// TWIN_REFUSES_HALF it builds no network with inputs of f16, which a thread of its own reports. With
// TWIN_AWAITS, the name of a FIFO, a build lasts until the FIFO has a letter: `g` for a good plan, `u` for
// a GPU that it does not know, `d` for a plan that the library refuses, `w` for wrong scores of samples
// with a value above 1.5, `s` for a wait for the whole GPU on a thread of its own: if the driver refuses
// that, the build fails at the next letter. `l` is for a plan whose loads await a letter too. Plans are text. It accepts and refuses the same calls as
// TensorRT, as far as the shim can observe. It never computes a network.
#include "NvInfer.h"
#include "NvOnnxParser.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>
using namespace nvinfer1;

// Bytes that a runtime takes.
#ifndef TWIN_RUNTIME_BYTES
#define TWIN_RUNTIME_BYTES 0
#endif
// Bytes in which a context runs.
constexpr int64_t RUN_BYTES = 4096;

// The first logger is that of the process. TensorRT ignores any other, and its caller would not know.
static ILogger* said_to;
static void take_logger(void* log) {
    if (!said_to) said_to = (ILogger*)log;
    if (said_to == log) return;
    fprintf(stderr, "twin: another logger than the first, which may be gone by now\n");
    abort();
}
static bool say(char const* text) {
    said_to->log(ILogger::Severity::kERROR, text);
    return false;
}

// Finds a function of the driver.
template <class T> static T of_driver(char const* name) {
    void* driver = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver ? (T)dlsym(driver, name) : nullptr;
}

struct Text : IHostMemory {
    std::string text;
    void* data() const noexcept override { return const_cast<char*>(text.data()); }
    size_t size() const noexcept override { return text.size(); }
};
struct Tensor : ITensor {
    std::string name;
    bool is_half = false, is_linear = false;
    char const* getName() const noexcept override { return name.c_str(); }
    void setType(DataType type) noexcept override { is_half = type == DataType::kHALF; }
    void setAllowedFormats(uint32_t formats) noexcept override { is_linear = formats == 1u << (int)TensorFormat::kLINEAR; }
};
struct Network : INetworkDefinition {
    bool parser_lives = false;
    std::vector<std::unique_ptr<Tensor>> inputs, outputs;
    ITensor* getInput(int32_t i) const noexcept override { return inputs[i].get(); }
    int32_t getNbInputs() const noexcept override { return (int32_t)inputs.size(); }
    int32_t getNbOutputs() const noexcept override { return (int32_t)outputs.size(); }
    ITensor* getOutput(int32_t i) const noexcept override { return outputs[i].get(); }
    void unmarkOutput(ITensor& tensor) noexcept override {
        for (size_t i = 0; i < outputs.size(); i++)
            if (outputs[i].get() == &tensor) { outputs.erase(outputs.begin() + i); return; }
    }
};
struct Profile : IOptimizationProfile {
    std::vector<std::pair<std::string, Dims>> most;
    int64_t least = 0, typical = 0;
    bool setDimensions(char const* input, OptProfileSelector which, Dims const& dims) noexcept override {
        if (which == OptProfileSelector::kMIN) least = dims.d[0];
        if (which == OptProfileSelector::kOPT) typical = dims.d[0];
        if (which == OptProfileSelector::kMAX) most.emplace_back(input, dims);
        return which != OptProfileSelector::kMAX || (least >= 1 && least <= typical && typical <= dims.d[0]);
    }
};
// Counts the builds that it was used in. A cache of another release is refused.
struct TimingCache : ITimingCache {
    int version = NV_TENSORRT_VERSION;
    mutable int builds = 0;
    IHostMemory* serialize() const noexcept override {
        auto text = std::make_unique<Text>();
        text->text = "timings " + std::to_string(version) + ' ' + std::to_string(builds);
        return text.release();
    }
};
struct Config : IBuilderConfig {
    TimingCache const* cache = nullptr;
    ITimingCache* createTimingCache(void const* blob, size_t size) const noexcept override {
        auto made = std::make_unique<TimingCache>();
        std::istringstream text(std::string((char const*)blob, size));
        std::string magic;
        if (size && !(text >> magic >> made->version >> made->builds && magic == "timings")) return nullptr;
        return made.release();
    }
    bool setTimingCache(ITimingCache const& given, bool) noexcept override {
        auto const* timings = (TimingCache const*)&given;
        if (timings->version != NV_TENSORRT_VERSION) return say("the timings are of another release");
        cache = timings;
        return true;
    }
    bool fp16 = false, shares = TWIN_MAJOR >= 10;
    std::vector<Profile*> profiles;
#if TWIN_MAJOR < 10 && (TWIN_MAJOR > 8 || TWIN_MINOR >= 6)
    void setPreviewFeature(PreviewFeature, bool enable) noexcept override { shares = enable; }
#endif
    void setMemoryPoolLimit(MemoryPoolType, size_t) noexcept override {}
    void setFlag(BuilderFlag flag) noexcept override { fp16 |= flag == BuilderFlag::kFP16; }
    void clearFlag(BuilderFlag) noexcept override {}
    int32_t addOptimizationProfile(IOptimizationProfile* p) noexcept override { profiles.push_back((Profile*)p); return (int32_t)profiles.size() - 1; }
};
#ifdef TWIN_AWAITS
static int next_letter() {
    int letter = EOF;
    // The end of the file is that of a writer whose letter was the one before.
    while (letter == EOF) {
        FILE* fifo = fopen(TWIN_AWAITS, "r");
        letter = fgetc(fifo);
        fclose(fifo);
    }
    return letter;
}
// Waits for the whole GPU, on a thread of its own as TensorRT does.
static bool waits_for_gpu() {
    void* context = nullptr;
    of_driver<int (*)(void**)>("cuCtxGetCurrent")(&context);
    bool waited = false;
    std::thread([&] {
        of_driver<int (*)(void*)>("cuCtxSetCurrent")(context);
        waited = of_driver<int (*)()>("standin_wait_for_all")() == 0 || say("cudaDeviceSynchronize");
    }).join();
    return waited;
}
#endif
struct Builder : IBuilder {
    std::vector<std::unique_ptr<Profile>> profiles;
    INetworkDefinition* createNetworkV2(uint32_t) noexcept override { return new Network; }
    IBuilderConfig* createBuilderConfig() noexcept override { return new Config; }
    IOptimizationProfile* createOptimizationProfile() noexcept override {
        profiles.push_back(std::make_unique<Profile>());
        return profiles.back().get();
    }
    IHostMemory* buildSerializedNetwork(INetworkDefinition& n, IBuilderConfig& c) noexcept override {
        auto& network = (Network&)n;
        if (!network.parser_lives) { say("the parser was freed before the network was built"); return nullptr; }
        auto& config = (Config&)c;
        std::ostringstream plan;
        if (config.cache) config.cache->builds++;
        int letter = 'g';
#ifdef TWIN_AWAITS
        letter = next_letter();
        if (letter == 's' && !waits_for_gpu()) { next_letter(); return nullptr; }
        if (letter == 'u') { say("Target GPU SM 87 is not supported by this TensorRT release."); return nullptr; }
        if (letter == 'd') plan << "damaged ";
#endif
        plan << "twin " << NV_TENSORRT_VERSION << ' ' << config.fp16 << ' ' << (letter == 'w') << ' ' << (letter == 'l') << ' ' << config.shares << ' ' << network.outputs[0]->name << ' ' << network.inputs.size();
        for (auto& [name, dims] : config.profiles[0]->most) {
            int64_t width = 1;
            for (int i = 1; i < dims.nbDims; i++) width *= dims.d[i];
            bool is_half = false;
            for (auto& input : network.inputs) is_half |= input->name == name && input->is_half && input->is_linear;
#ifdef TWIN_REFUSES_HALF
            if (is_half) { std::thread(say, "no kernel takes this input").join(); return nullptr; }
#endif
            plan << ' ' << name << ' ' << width << ' ' << is_half;
        }
        plan << ' ' << config.profiles.size();
        for (auto* profile : config.profiles) plan << ' ' << profile->least << ' ' << profile->most[0].second.d[0];
        auto text = std::make_unique<Text>();
        text->text = plan.str();
        return text.release();
    }
};

// The names in a protobuf's fields 11 (inputs) and 12 (outputs) of field 7 (graph).
struct Parser final : nvonnxparser::IParser, nvonnxparser::IParserError {
    Network* network;
    explicit Parser(Network* n) : network(n) { network->parser_lives = true; }
    ~Parser() { network->parser_lives = false; }
    bool walk(unsigned char const* p, size_t n, int depth) {
        for (size_t i = 0; i < n;) {
            auto number = [&] {
                uint64_t v = 0;
                for (int shift = 0; i < n; shift += 7) {
                    v |= (uint64_t)(p[i] & 127) << shift;
                    if (p[i++] < 128) break;
                }
                return v;
            };
            uint64_t const field = number();
            if ((field & 7) == 0) { number(); continue; }
            if ((field & 7) == 5) { i += 4; continue; }
            if ((field & 7) != 2) return false;
            size_t const size = number();
            if (size > n - i) return false;
            auto const id = field >> 3;
            if (depth == 0 && id == 7 && !walk(p + i, size, 1)) return false;
            if (depth == 1 && (id == 11 || id == 12) && !walk(p + i, size, (int)id)) return false;
            if (depth > 1 && id == 1) {
                std::string name((char const*)p + i, size);
                auto& tensors = depth == 11 ? network->inputs : network->outputs;
                tensors.push_back(std::make_unique<Tensor>());
                tensors.back()->name = name;
            }
            i += size;
        }
        return true;
    }
    bool parse(void const* onnx, size_t bytes, char const*) noexcept override { return bytes > 0 && walk((unsigned char const*)onnx, bytes, 0); }
    int32_t getNbErrors() const noexcept override { return 1; }
    IParserError const* getError(int32_t) const noexcept override { return this; }
    char const* desc() const noexcept override { return "not a network"; }
};

struct Input {
    std::string name;
    int64_t width;
    bool is_half;
    int64_t batch;
    void const* address;
    float value(int64_t i) const {
        if (!is_half) return ((float const*)address)[i];
        uint16_t const half = ((uint16_t const*)address)[i];
        int const exponent = half >> 10 & 31, mantissa = half & 1023;
        float const size = exponent ? ldexpf((float)(mantissa + 1024), exponent - 25) : ldexpf((float)mantissa, -24);
        return half & 0x8000 ? -size : size;
    }
};
struct Plan {
    bool fp16, is_wrong, awaits, shares;
    std::string output;
    std::vector<Input> inputs;
    std::vector<std::pair<int64_t, int64_t>> profiles;
};
// Profiles that contexts of one engine have chosen.
using Chosen = std::multiset<int32_t>;
struct Context : IExecutionContext {
    Plan plan;
    float* out = nullptr;
    void* memory = nullptr;
    int32_t profile = -1;
    Chosen* chosen;
    // Whether a profile or a shape was set after the last run outside of a recording.
    bool changed = true;
    void choose(int32_t to) {
        if (profile >= 0) chosen->erase(chosen->find(profile));
        if ((profile = to) >= 0) chosen->insert(to);
    }
    ~Context() { choose(-1); }
    bool setOptimizationProfileAsync(int32_t to, cudaStream_t) noexcept override {
        if (to < 0 || (size_t)to >= plan.profiles.size()) return say("no such profile");
        if (!plan.shares && to != profile && chosen->count(to)) return say("the profile is in use by another context");
        choose(to);
        return changed = true;
    }
    bool setInputShape(char const* name, Dims const& dims) noexcept override {
        for (auto& input : plan.inputs)
            if (input.name == name) {
                int64_t width = 1;
                for (int i = 1; i < dims.nbDims; i++) width *= dims.d[i];
                input.batch = dims.d[0];
                changed = true;
                if (profile < 0) return say("no profile is chosen");
                auto const [least, most] = plan.profiles[profile];
                return (width == input.width && dims.d[0] >= least && dims.d[0] <= most) || say("shape beyond the profile");
            }
        return say("no such input");
    }
    bool setTensorAddress(char const* name, void* address) noexcept override {
        if (plan.output == name) { out = (float*)address; return true; }
        for (auto& input : plan.inputs)
            if (input.name == name) { input.address = address; return true; }
        return say("no such tensor");
    }
#if TWIN_MAJOR >= 11
    void setDeviceMemoryV2(void* to, int64_t bytes) noexcept override { memory = bytes < RUN_BYTES ? nullptr : to; }
#else
    void setDeviceMemory(void* to) noexcept override { memory = to; }
#endif
    bool enqueueV3(cudaStream_t stream) noexcept override {
        if (!memory) return say("the context has no memory");
        auto const launch = of_driver<int (*)(cudaStream_t, void (*)(void*), void*)>("cuLaunchHostFunc");
        auto const is_recorded = of_driver<int (*)(cudaStream_t, int*)>("cuStreamIsCapturing");
        int recorded = 0;
        if (!launch || !is_recorded || is_recorded(stream, &recorded) != 0) return say("no driver");
        if (recorded && changed) return say("the shape was set after the last run outside of a recording");
        changed = false;
        return launch(stream, run, this) == 0 || say("cuLaunchHostFunc");
    }
    // A run, in the order of the stream. A graph has no copy of the context: each launch takes the shapes and the addresses
    // that the context has then, so two graphs cannot share one.
    static void run(void* context) { ((Context*)context)->compute(); }
    void compute() {
        // Another context that runs in the same memory at the same time would overwrite it.
        auto* const words = (int64_t*)memory;
        for (int64_t i = 0; i < RUN_BYTES / 8; i++) words[i] = (int64_t)this;
        for (int64_t b = 0; b < plan.inputs[0].batch; b++) {
            float sum = 0;
            for (auto& input : plan.inputs)
                for (int64_t i = 0; i < input.width; i++) {
                    float const value = input.value(b * input.width + i);
                    sum += plan.is_wrong && value > 1.5f ? 2 * value : value;
                }
            uint32_t bits;
            memcpy(&bits, &sum, 4);
            if (plan.fp16) bits &= ~0x1fffu;
            memcpy(out + b, &bits, 4);
        }
        for (int64_t i = 0; i < RUN_BYTES / 8; i++)
            if (words[i] != (int64_t)this) abort();
    }
};
struct Engine : ICudaEngine {
    Plan plan;
    Chosen chosen;
    int32_t getNbIOTensors() const noexcept override { return (int32_t)plan.inputs.size() + 1; }
    TensorIOMode getTensorIOMode(char const* name) const noexcept override {
        if (plan.output == name) return TensorIOMode::kOUTPUT;
        for (auto& input : plan.inputs)
            if (input.name == name) return TensorIOMode::kINPUT;
        return TensorIOMode::kNONE;
    }
    DataType getTensorDataType(char const* name) const noexcept override {
        for (auto& input : plan.inputs)
            if (input.name == name && input.is_half) return DataType::kHALF;
        return DataType::kFLOAT;
    }
#if TWIN_MAJOR >= 11
    int64_t getDeviceMemorySizeV2() const noexcept override { return RUN_BYTES; }
#else
    size_t getDeviceMemorySize() const noexcept override { return RUN_BYTES; }
#endif
#if TWIN_MAJOR >= 10
    IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy) noexcept override {
#else
    IExecutionContext* createExecutionContextWithoutDeviceMemory() noexcept override {
#endif
        auto context = new Context;
        context->plan = plan;
        context->chosen = &chosen;
        // Only the first context has a profile from the start.
        if (!chosen.count(0)) context->choose(0);
        return context;
    }
};
struct Runtime : IRuntime {
    // Written, so that the process has it.
    std::vector<char> own = std::vector<char>(TWIN_RUNTIME_BYTES, 1);
    bool host_code = true;
    void setEngineHostCodeAllowed(bool allowed) noexcept override { host_code = allowed; }
    ICudaEngine* deserializeCudaEngine(void const* data, size_t bytes) noexcept override {
        std::istringstream text(std::string((char const*)data, bytes));
        std::string magic;
        int version = 0;
        size_t inputs = 0;
        auto engine = std::make_unique<Engine>();
        text >> magic >> version >> engine->plan.fp16 >> engine->plan.is_wrong >> engine->plan.awaits >> engine->plan.shares >> engine->plan.output >> inputs;
        if (magic != "twin" || version != NV_TENSORRT_VERSION) { say("the plan is of another release"); return nullptr; }
        for (size_t i = 0; i < inputs; i++) {
            Input input{};
            text >> input.name >> input.width >> input.is_half;
            engine->plan.inputs.push_back(input);
        }
        size_t profiles = 0;
        text >> profiles;
        engine->plan.profiles.resize(profiles);
        for (auto& [least, most] : engine->plan.profiles) text >> least >> most;
#ifdef TWIN_AWAITS
        if (engine->plan.awaits && next_letter() == 's' && !waits_for_gpu()) { next_letter(); return nullptr; }
#endif
#if TWIN_MAJOR > 8 || TWIN_MINOR >= 6
        if (host_code) { say("host code is allowed"); return nullptr; }
#endif
        return engine.release();
    }
};

#define API extern "C" __attribute__((visibility("default")))
API int32_t getInferLibVersion() { return NV_TENSORRT_VERSION; }
#ifndef TWIN_LACKS_BUILDER
API void* createInferBuilder_INTERNAL(void* log, int32_t) { take_logger(log); return static_cast<IBuilder*>(new Builder); }
#endif
API void* createInferRuntime_INTERNAL(void* log, int32_t) { take_logger(log); return static_cast<IRuntime*>(new Runtime); }
API void* createNvOnnxParser_INTERNAL(void* network, void*, int) {
    return static_cast<nvonnxparser::IParser*>(new Parser((Network*)network));
}

// A C interface to TensorRT: one source for the headers of 8.5 to 11.x and of TensorRT for RTX 1.x.
// Four entry points of TensorRT are looked up by name; all other calls are virtual, so the shim is
// not linked with TensorRT. `make` in this folder builds it; its only caller is
// ../src/gpu/tensorrt/shim.rs.
//
// The shim never starts CUDA, never throws, and never calls a library of another version than the
// headers. The headers give the order of virtual functions, and a wrong order would call wrong
// functions silently.
#include <NvInfer.h>
#include <NvOnnxParser.h>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <string>

#if !defined(TRT_MAJOR_RTX) && (NV_TENSORRT_MAJOR < 8 || (NV_TENSORRT_MAJOR == 8 && NV_TENSORRT_MINOR < 5))
#error "TensorRT 8.5 is the oldest whose tensors have names"
#endif
// From 11 on, and in TensorRT for RTX, a network computes in the types that its ONNX file states.
#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR >= 11
#define TYPES_FROM_FILE 1
#else
#define TYPES_FROM_FILE 0
#endif

// Before 8.6 each execution context of an engine needs its own optimization profile, so each
// context gets its own engine. From 8.6 on contexts can share profiles. In 8.6 this must be
// requested, and in 9 the request has no effect.
#if !defined(TRT_MAJOR_RTX) && NV_TENSORRT_MAJOR == 8 && NV_TENSORRT_MINOR < 6
#define SHARES_PROFILES 0
#else
#define SHARES_PROFILES 1
#endif

using namespace nvinfer1;

namespace {

// Version of this interface; shim.rs refuses any other.
constexpr int32_t INTERFACE = 8;

// Return codes; shim.rs has the same list.
enum Outcome : int32_t {
    DONE = 0,
    NO_LIBRARY = 1,    // the loader did not find or accept the library
    NO_ENTRY = 2,      // the library lacks an entry point
    VERSION = 3,       // the library is of another version than the headers
    REFUSED = 4,       // TensorRT refused; `problem` has its text
    NO_FP16 = 5,       // this TensorRT takes the types from the ONNX file
    INTERFACE_OF = 6,  // the network does not have such an input or output
};

// The caller's buffer for an error text.
struct Problem {
    char* text;
    size_t size;
    void say(char const* format, ...) const __attribute__((format(printf, 2, 3))) {
        va_list list;
        va_start(list, format);
        if (size > 0) vsnprintf(text, size, format, list);
        va_end(list);
    }
    // Writes the text and returns `outcome`.
    int32_t fail(Outcome outcome, char const* format, ...) const __attribute__((format(printf, 3, 4))) {
        va_list list;
        va_start(list, format);
        if (size > 0) vsnprintf(text, size, format, list);
        va_end(list);
        return outcome;
    }
};

// Keeps the errors that TensorRT reports in a call. Any thread may log. Those that TensorRT starts for a build have no
// caller, so the last error of all of them stands beside the first of the calling thread.
struct Log final : ILogger {
    // Begins a call of this thread: only later errors explain its refusal.
    void begin() {
        std::lock_guard<std::mutex> const guard(lock);
        calls = true;
        first[0] = 0;
        others_before = others;
    }
    void log(Severity severity, AsciiChar const* text) noexcept override {
        if (severity > Severity::kERROR) return;
        if (calls) {
            // Later errors of a call are consequences.
            if (first[0] == 0) snprintf(first, sizeof first, "%s", text);
            return;
        }
        std::lock_guard<std::mutex> const guard(lock);
        others++;
        snprintf(last, sizeof last, "%s", text);
    }
    int32_t refused(char const* what, Problem problem) {
        std::lock_guard<std::mutex> const guard(lock);
        if (others == others_before) return problem.fail(REFUSED, "%s: %s", what, first[0] ? first : "no reason given");
        return problem.fail(REFUSED, "%s: %s%s%s", what, first, first[0] ? "; another thread: " : "", last);
    }

  private:
    std::mutex lock;
    char last[200] = "";
    uint64_t others = 0;
    static thread_local bool calls;
    static thread_local char first[200];
    static thread_local uint64_t others_before;
};
thread_local bool Log::calls;
thread_local char Log::first[200];
thread_local uint64_t Log::others_before;

// TensorRT keeps the first logger of a process, ignores all later ones, and may log until the process ends. So there
// is one, which is never freed.
Log& log_of_process() {
    static Log& log = *new Log;
    return log;
}

// The log, in a call that begins now.
Log& begin_call() {
    Log& log = log_of_process();
    log.begin();
    return log;
}

// Drops the patch number, which does not change the classes. 8601 is 8.6.1; from 10 on 101000 is
// 10.10.0; RTX 1.7.1 is 10701.
int32_t release(int32_t version) { return version < 10000 ? version / 100 : version / 100 + 1000000; }

// Loads a library; loading one again only counts a reference.
void* load(char const* path, Problem problem) {
    void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) problem.say("%s", dlerror());
    return library;
}

template <class T> T find(void* library, char const* name) { return reinterpret_cast<T>(dlsym(library, name)); }

} // namespace

struct Library {
    void* (*make_builder)(void*, int32_t);
    void* (*make_runtime)(void*, int32_t);
    std::string parser; // the path or the name of the ONNX parser
    std::unique_ptr<IRuntime> runtime;
};

struct Engine {
    std::unique_ptr<ICudaEngine> engine;
    std::string plan; // empty where contexts share profiles
    size_t plan_bytes;
};

struct Context {
    std::unique_ptr<ICudaEngine> own; // null where contexts share profiles
    std::unique_ptr<IExecutionContext> context;
    int32_t profile = -1;
};

// Device memory.
struct RunMemory {
    void* address;
    uint64_t bytes;
};

// One input of a network: `[batch, shape]`.
struct InputShape {
    char const* name;
    int64_t const* shape;
    int32_t rank;
    int32_t is_f16; // otherwise f32
};

// Batches of one optimization profile, which is fastest for the largest.
struct Batches {
    int64_t least;
    int64_t most;
};

struct Build {
    void const* onnx;
    size_t onnx_bytes;
    InputShape const* inputs;
    int32_t input_count;
    char const* output;
    Batches const* batches;
    int32_t batch_count;
    uint64_t workspace_bytes_max;
    int32_t types; // 0: F32, 1: FP16, 2: TF32
    int32_t compute_capability; // TensorRT for RTX only: 86 for 8.6; 0 is this machine's GPU
    void const* timings; // the timing cache of earlier builds; TensorRT for RTX has none
    size_t timing_bytes;
};

#define API extern "C" __attribute__((visibility("default")))

API int32_t hatchback_trt_interface() { return INTERFACE; }

API int32_t hatchback_trt_header_version() { return NV_TENSORRT_VERSION; }

// Loads TensorRT (`nullptr`: by the name of the headers' release) and compares versions. `*version` receives the
// library's version as soon as it is known. Only a build needs `parser`, and loads it. Libraries stay loaded until the
// process ends, because TensorRT registers state that it cannot remove.
API int32_t hatchback_trt_open(char const* nvinfer, char const* parser, Library** out, int32_t* version, char* text, size_t size) {
    Problem const problem{text, size};
    char names[2][64];
#if defined(TRT_MAJOR_RTX)
    snprintf(names[0], sizeof names[0], "libtensorrt_rtx.so.%d", NV_TENSORRT_MAJOR);
    snprintf(names[1], sizeof names[1], "libtensorrt_onnxparser_rtx.so.%d", NV_TENSORRT_MAJOR);
#else
    snprintf(names[0], sizeof names[0], "libnvinfer.so.%d", NV_TENSORRT_MAJOR);
    snprintf(names[1], sizeof names[1], "libnvonnxparser.so.%d", NV_TENSORRT_MAJOR);
#endif
    void* core = load(nvinfer ? nvinfer : names[0], problem);
    if (!core) return NO_LIBRARY;
    auto const version_of = find<int32_t (*)()>(core, "getInferLibVersion");
    if (!version_of) return problem.fail(NO_ENTRY, "getInferLibVersion");
    *version = version_of();
    if (release(*version) != release(NV_TENSORRT_VERSION)) return VERSION;
    auto library = std::make_unique<Library>();
    library->make_builder = find<void* (*)(void*, int32_t)>(core, "createInferBuilder_INTERNAL");
    library->make_runtime = find<void* (*)(void*, int32_t)>(core, "createInferRuntime_INTERNAL");
    if (!library->make_builder || !library->make_runtime) return problem.fail(NO_ENTRY, "createInfer..._INTERNAL");
    library->parser = parser ? parser : names[1];
    *out = library.release();
    return DONE;
}

API void hatchback_trt_close(Library* library) { delete library; }

static int32_t parse(nvonnxparser::IParser& parser, Log& log, Build const& build, INetworkDefinition& network, Problem problem) {
    if (!parser.parse(build.onnx, build.onnx_bytes)) {
        if (parser.getNbErrors() > 0) return problem.fail(REFUSED, "ONNX: %s", parser.getError(0)->desc());
        return log.refused("ONNX", problem);
    }
    bool found = false;
    for (int32_t i = network.getNbOutputs() - 1; i >= 0; i--) {
        ITensor* output = network.getOutput(i);
        if (strcmp(output->getName(), build.output) == 0) found = true;
        else network.unmarkOutput(*output);
    }
    if (!found) return problem.fail(INTERFACE_OF, "no output `%s`", build.output);
    if (network.getNbInputs() != build.input_count)
        return problem.fail(INTERFACE_OF, "%d inputs, %d are fed", network.getNbInputs(), build.input_count);
    return DONE;
}

#if !TYPES_FROM_FILE
// Sets the type f16, and the linear format, for the inputs that have it.
static void set_types(Build const& build, INetworkDefinition& network) {
    for (int32_t i = 0; i < network.getNbInputs(); i++) {
        ITensor* input = network.getInput(i);
        for (int32_t fed = 0; fed < build.input_count; fed++) {
            if (!build.inputs[fed].is_f16 || strcmp(input->getName(), build.inputs[fed].name) != 0) continue;
            input->setType(DataType::kHALF);
            input->setAllowedFormats(1u << static_cast<uint32_t>(TensorFormat::kLINEAR));
        }
    }
}
#endif

// Adds the optimization profile of some batches.
static int32_t add_profile(IBuilder& builder, IBuilderConfig& config, Build const& build, Batches batches, Log& log, Problem problem) {
    IOptimizationProfile* profile = builder.createOptimizationProfile();
    if (!profile) return log.refused("no profile", problem);
    for (int32_t i = 0; i < build.input_count; i++) {
        InputShape const& input = build.inputs[i];
        auto const dims = [&](int64_t batch) {
            Dims dims{};
            dims.nbDims = input.rank + 1;
            dims.d[0] = static_cast<decltype(+dims.d[0])>(batch);
            for (int32_t a = 0; a < input.rank; a++) dims.d[a + 1] = static_cast<decltype(+dims.d[0])>(input.shape[a]);
            return dims;
        };
        if (input.rank + 1 > Dims::MAX_DIMS) return problem.fail(INTERFACE_OF, "input `%s`: %d axes", input.name, input.rank);
        bool const set = profile->setDimensions(input.name, OptProfileSelector::kMIN, dims(batches.least))
            && profile->setDimensions(input.name, OptProfileSelector::kOPT, dims(batches.most))
            && profile->setDimensions(input.name, OptProfileSelector::kMAX, dims(batches.most));
        if (!set) return log.refused(input.name, problem);
    }
    return config.addOptimizationProfile(profile) < 0 ? log.refused("profile", problem) : int32_t{DONE};
}

// Builds a plan for this GPU. The caller frees `*plan` with `hatchback_trt_drop_plan`, and `*timings`, the timing cache
// for later builds, if it is not null.
API int32_t hatchback_trt_build(Library* library, Build const* build, IHostMemory** plan, IHostMemory** timings, char* text, size_t size) {
    Problem const problem{text, size};
    Log& log = begin_call();
    void* onnx = load(library->parser.c_str(), problem);
    if (!onnx) return NO_LIBRARY;
    auto const make_parser = find<void* (*)(void*, void*, int)>(onnx, "createNvOnnxParser_INTERNAL");
    if (!make_parser) return problem.fail(NO_ENTRY, "createNvOnnxParser_INTERNAL");
    std::unique_ptr<IBuilder> builder{static_cast<IBuilder*>(library->make_builder(&log, NV_TENSORRT_VERSION))};
    if (!builder) return log.refused("no builder", problem);
#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR >= 10
    uint32_t const flags = 0;
#else
    uint32_t const flags = 1u << static_cast<uint32_t>(NetworkDefinitionCreationFlag::kEXPLICIT_BATCH);
#endif
    std::unique_ptr<INetworkDefinition> network{builder->createNetworkV2(flags)};
    if (!network) return log.refused("no network", problem);
    // The parser owns the network's constants, so it must live until the plan is built.
    std::unique_ptr<nvonnxparser::IParser> parser{static_cast<nvonnxparser::IParser*>(
        make_parser(network.get(), &log, static_cast<int>(NV_ONNX_PARSER_VERSION)))};
    if (!parser) return log.refused("no ONNX parser", problem);
    if (int32_t const outcome = parse(*parser, log, *build, *network, problem)) return outcome;
    std::unique_ptr<IBuilderConfig> config{builder->createBuilderConfig()};
    if (!config) return log.refused("no configuration", problem);
    config->setMemoryPoolLimit(MemoryPoolType::kWORKSPACE, build->workspace_bytes_max);
#if TYPES_FROM_FILE
    if (build->types == 1) return NO_FP16;
#else
    if (build->types == 1) config->setFlag(BuilderFlag::kFP16);
    set_types(*build, *network);
#endif
#if !defined(TRT_MAJOR_RTX) && NV_TENSORRT_MAJOR < 10 && SHARES_PROFILES
    config->setPreviewFeature(PreviewFeature::kPROFILE_SHARING_0806, true);
#endif
#if !defined(TRT_MAJOR_RTX)
    // Set by default. Its 11 bits are less than f32.
    if (build->types != 2) config->clearFlag(BuilderFlag::kTF32);
#else
    if (build->compute_capability != 0) {
        config->setNbComputeCapabilities(1);
        if (!config->setComputeCapability(static_cast<ComputeCapability>(build->compute_capability), 0))
            return log.refused("compute capability", problem);
    }
#endif
    for (int32_t i = 0; i < build->batch_count; i++)
        if (int32_t const outcome = add_profile(*builder, *config, *build, build->batches[i], log, problem)) return outcome;
#if !defined(TRT_MAJOR_RTX)
    // A network of the same shapes is then built in seconds. TensorRT refuses a cache of another release or GPU: the build
    // begins with an empty one.
    std::unique_ptr<ITimingCache> cache{config->createTimingCache(build->timings, build->timing_bytes)};
    if (!cache || !config->setTimingCache(*cache, false)) {
        std::unique_ptr<ITimingCache> empty{config->createTimingCache(nullptr, 0)};
        if (empty && !config->setTimingCache(*empty, false)) empty.reset();
        cache = std::move(empty);
    }
    log.begin(); // A refused cache is no reason of a refused build.
#endif
    *plan = builder->buildSerializedNetwork(*network, *config);
    if (!*plan) return log.refused("build", problem);
#if !defined(TRT_MAJOR_RTX)
    *timings = cache ? cache->serialize() : nullptr;
#endif
    return DONE;
}

API void const* hatchback_trt_plan_data(IHostMemory const* plan) { return plan->data(); }

API size_t hatchback_trt_plan_bytes(IHostMemory const* plan) { return plan->size(); }

API void hatchback_trt_drop_plan(IHostMemory* plan) { delete plan; }

// Creates the runtime, unless the library has one. CUDA must be initialized: without a driver some releases crash here.
API int32_t hatchback_trt_start(Library* library, char* text, size_t size) {
    Problem const problem{text, size};
    Log& log = begin_call();
    if (!library->runtime) library->runtime.reset(static_cast<IRuntime*>(library->make_runtime(&log, NV_TENSORRT_VERSION)));
    return library->runtime ? int32_t{DONE} : log.refused("no runtime", problem);
}

// Loads a plan into the runtime.
API int32_t hatchback_trt_load(Library* library, void const* plan, size_t bytes, Engine** out, char* text, size_t size) {
    Problem const problem{text, size};
    Log& log = begin_call();
#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR > 8 || NV_TENSORRT_MINOR >= 6
    library->runtime->setEngineHostCodeAllowed(false); // the default, made explicit; 8.5 has no such plans
#endif
    std::unique_ptr<ICudaEngine> engine{library->runtime->deserializeCudaEngine(plan, bytes)};
    if (!engine) return log.refused("plan", problem);
#if SHARES_PROFILES
    *out = new Engine{std::move(engine), {}, bytes};
#else
    *out = new Engine{std::move(engine), std::string(static_cast<char const*>(plan), bytes), bytes};
#endif
    return DONE;
}

API void hatchback_trt_drop_engine(Engine* engine) { delete engine; }

// Checks that the engine has exactly these inputs, in their types, and this output, in f32.
API int32_t hatchback_trt_check(Engine const* engine, InputShape const* inputs, int32_t count, char const* output, char* text, size_t size) {
    Problem const problem{text, size};
    ICudaEngine const& e = *engine->engine;
    if (e.getNbIOTensors() != count + 1)
        return problem.fail(INTERFACE_OF, "%d tensors, %d expected", e.getNbIOTensors(), count + 1);
    for (int32_t i = 0; i <= count; i++) {
        char const* name = i < count ? inputs[i].name : output;
        bool const is_f16 = i < count && inputs[i].is_f16;
        auto const mode = i < count ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
        if (e.getTensorIOMode(name) != mode) return problem.fail(INTERFACE_OF, "no tensor `%s`", name);
        if (e.getTensorDataType(name) != (is_f16 ? DataType::kHALF : DataType::kFLOAT))
            return problem.fail(INTERFACE_OF, "`%s` is not %s", name, is_f16 ? "f16" : "f32");
    }
    return DONE;
}

// Returns the bytes that an engine takes: its weights, counted as the bytes of its plan, which contains them, and the
// plan itself where it is kept. TensorRT does not report them.
API uint64_t hatchback_trt_engine_bytes(Engine const* engine) { return engine->plan_bytes + engine->plan.size(); }

// Returns the bytes of device memory in which contexts run.
API uint64_t hatchback_trt_run_bytes(Engine const* engine) {
#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR >= 11
    return static_cast<uint64_t>(engine->engine->getDeviceMemorySizeV2());
#else
    return engine->engine->getDeviceMemorySize();
#endif
}

// Returns the bytes that a context takes beside that: its own weights where contexts do not share profiles.
API uint64_t hatchback_trt_context_bytes(Engine const* engine) { return engine->plan.size(); }

// Creates one worker's context, which runs in `memory`. All contexts of a worker can run in the same memory, one
// at a time.
API int32_t hatchback_trt_context(
    Library* library, Engine* engine, RunMemory const* memory, Context** out, char* text, size_t size) {
    Problem const problem{text, size};
    Log& log = begin_call();
    std::unique_ptr<ICudaEngine> own;
#if SHARES_PROFILES
    (void)library;
#else
    own.reset(library->runtime->deserializeCudaEngine(engine->plan.data(), engine->plan.size()));
    if (!own) return log.refused("plan", problem);
#endif
    ICudaEngine& of = own ? *own : *engine->engine;
#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR >= 10
    std::unique_ptr<IExecutionContext> context{of.createExecutionContext(ExecutionContextAllocationStrategy::kUSER_MANAGED)};
#else
    std::unique_ptr<IExecutionContext> context{of.createExecutionContextWithoutDeviceMemory()};
#endif
    if (!context) return log.refused("context", problem);
#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR >= 11
    context->setDeviceMemoryV2(memory->address, static_cast<int64_t>(memory->bytes));
#else
    context->setDeviceMemory(memory->address);
#endif
    *out = new Context{std::move(own), std::move(context)};
    return DONE;
}

API void hatchback_trt_drop_context(Context* context) { delete context; }

// Chooses the optimization profile of the runs to come on `stream`. The caller binds all tensors after it.
API int32_t hatchback_trt_choose(Context* context, int32_t profile, void* stream) {
    if (context->profile == profile) return DONE;
    if (!context->context->setOptimizationProfileAsync(profile, static_cast<cudaStream_t>(stream))) return REFUSED;
    context->profile = profile;
    return DONE;
}

// Sets the device address of a tensor, and the shape of an input (`shape` null: the address alone).
API int32_t hatchback_trt_bind(Context* context, InputShape const* tensor, int64_t batch, void* address) {
    if (tensor->shape) {
        Dims dims{};
        dims.nbDims = tensor->rank + 1;
        if (dims.nbDims > Dims::MAX_DIMS) return INTERFACE_OF;
        dims.d[0] = static_cast<decltype(+dims.d[0])>(batch);
        for (int32_t a = 0; a < tensor->rank; a++) dims.d[a + 1] = static_cast<decltype(+dims.d[0])>(tensor->shape[a]);
        if (!context->context->setInputShape(tensor->name, dims)) return REFUSED;
    }
    return context->context->setTensorAddress(tensor->name, address) ? DONE : REFUSED;
}

// Puts a run of the network onto `stream` (a `CUstream`); does not wait.
API int32_t hatchback_trt_enqueue(Context* context, void* stream) {
    return context->context->enqueueV3(static_cast<cudaStream_t>(stream)) ? DONE : REFUSED;
}

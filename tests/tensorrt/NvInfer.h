// A twin of the part of TensorRT's interface that the shim calls: enough to build
// `kernels/tensorrt/shim.cpp` without TensorRT, and to run it on `twin.cpp`. -DTWIN_MAJOR and
// -DTWIN_MINOR set the release. The order of its virtual functions is not TensorRT's, so the two can
// never be mixed.
#pragma once
#include <cstddef>
#include <cstdint>
#define NV_TENSORRT_MAJOR TWIN_MAJOR
#define NV_TENSORRT_MINOR TWIN_MINOR
#define NV_TENSORRT_VERSION (TWIN_MAJOR * (TWIN_MAJOR < 10 ? 1000 : 10000) + TWIN_MINOR * 100 + 3)

typedef struct CUstream_st* cudaStream_t;

namespace nvinfer1 {
using AsciiChar = char;
enum class DataType { kFLOAT, kHALF };
enum class TensorIOMode { kNONE, kINPUT, kOUTPUT };
enum class OptProfileSelector { kMIN, kOPT, kMAX };
enum class MemoryPoolType { kWORKSPACE };
enum class BuilderFlag { kFP16, kTF32 };
enum class NetworkDefinitionCreationFlag { kEXPLICIT_BATCH };
enum class TensorFormat { kLINEAR };
enum class ExecutionContextAllocationStrategy { kSTATIC, kON_PROFILE_CHANGE, kUSER_MANAGED };
#if TWIN_MAJOR < 10 && (TWIN_MAJOR > 8 || TWIN_MINOR >= 6)
enum class PreviewFeature { kPROFILE_SHARING_0806 };
#endif
struct Dims {
    static constexpr int32_t MAX_DIMS = 8;
    int32_t nbDims;
#if TWIN_MAJOR < 10
    int32_t d[MAX_DIMS];
#else
    int64_t d[MAX_DIMS];
#endif
};
struct Base {
    virtual ~Base() = default;
};
struct ILogger {
    enum class Severity { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
    virtual void log(Severity severity, AsciiChar const* text) noexcept = 0;
    virtual ~ILogger() = default;
};
struct IHostMemory : Base {
    virtual void* data() const noexcept = 0;
    virtual size_t size() const noexcept = 0;
};
struct ITensor : Base {
    virtual char const* getName() const noexcept = 0;
    virtual void setType(DataType type) noexcept = 0;
    virtual void setAllowedFormats(uint32_t formats) noexcept = 0;
};
struct INetworkDefinition : Base {
    virtual int32_t getNbInputs() const noexcept = 0;
    virtual ITensor* getInput(int32_t i) const noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual ITensor* getOutput(int32_t i) const noexcept = 0;
    virtual void unmarkOutput(ITensor& tensor) noexcept = 0;
};
struct IOptimizationProfile : Base {
    virtual bool setDimensions(char const* input, OptProfileSelector which, Dims const& dims) noexcept = 0;
};
struct ITimingCache : Base {
    virtual IHostMemory* serialize() const noexcept = 0;
};
struct IBuilderConfig : Base {
    virtual ITimingCache* createTimingCache(void const* blob, size_t size) const noexcept = 0;
    virtual bool setTimingCache(ITimingCache const& cache, bool ignore_mismatch) noexcept = 0;
    virtual void setMemoryPoolLimit(MemoryPoolType pool, size_t bytes) noexcept = 0;
    virtual void setFlag(BuilderFlag flag) noexcept = 0;
    virtual void clearFlag(BuilderFlag flag) noexcept = 0;
#if TWIN_MAJOR < 10 && (TWIN_MAJOR > 8 || TWIN_MINOR >= 6)
    virtual void setPreviewFeature(PreviewFeature feature, bool enable) noexcept = 0;
#endif
    virtual int32_t addOptimizationProfile(IOptimizationProfile* profile) noexcept = 0;
};
struct IBuilder : Base {
    virtual INetworkDefinition* createNetworkV2(uint32_t flags) noexcept = 0;
    virtual IBuilderConfig* createBuilderConfig() noexcept = 0;
    virtual IOptimizationProfile* createOptimizationProfile() noexcept = 0;
    virtual IHostMemory* buildSerializedNetwork(INetworkDefinition& network, IBuilderConfig& config) noexcept = 0;
};
struct IExecutionContext : Base {
    virtual bool setOptimizationProfileAsync(int32_t profile, cudaStream_t stream) noexcept = 0;
    virtual bool setInputShape(char const* name, Dims const& dims) noexcept = 0;
    virtual bool setTensorAddress(char const* name, void* address) noexcept = 0;
#if TWIN_MAJOR >= 11
    virtual void setDeviceMemoryV2(void* memory, int64_t bytes) noexcept = 0;
#else
    virtual void setDeviceMemory(void* memory) noexcept = 0;
#endif
    virtual bool enqueueV3(cudaStream_t stream) noexcept = 0;
};
struct ICudaEngine : Base {
    virtual int32_t getNbIOTensors() const noexcept = 0;
    virtual TensorIOMode getTensorIOMode(char const* name) const noexcept = 0;
    virtual DataType getTensorDataType(char const* name) const noexcept = 0;
#if TWIN_MAJOR >= 11
    virtual int64_t getDeviceMemorySizeV2() const noexcept = 0;
#else
    virtual size_t getDeviceMemorySize() const noexcept = 0;
#endif
#if TWIN_MAJOR >= 10
    virtual IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy strategy) noexcept = 0;
#else
    virtual IExecutionContext* createExecutionContextWithoutDeviceMemory() noexcept = 0;
#endif
};
struct IRuntime : Base {
    virtual void setEngineHostCodeAllowed(bool allowed) noexcept = 0;
    virtual ICudaEngine* deserializeCudaEngine(void const* plan, size_t bytes) noexcept = 0;
};
} // namespace nvinfer1

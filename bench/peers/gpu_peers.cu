// The calls of gpu.py into cuEmbed (-DWITH_CUEMBED) and into the gpu_cache of HugeCTR
// (-DWITH_GPU_CACHE), whose sources are not in this tree. All pointers are of GPU memory. Nothing
// here waits or measures.
#include <cstddef>
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#ifdef WITH_CUEMBED
#include "cuembed/include/embedding_lookup.cuh"

// `out[bags, dim]`: the sums of `hotness` rows of `table` each, in the type of the rows.
template <class T>
static void look_up(
    const void* table, const void* places, int dim, int bags, int hotness, void* out,
    void* stream) {
    cuembed::EmbeddingForward<T, T, int, int>(
        (const T*)table, dim, (const int*)places, nullptr, nullptr, bags, hotness,
        cuembed::CombineMode::kSum, (T*)out, (cudaStream_t)stream);
}
extern "C" void peer_cuembed_f32(
    const void* table, const void* places, int dim, int bags, int hotness, void* out,
    void* stream) {
    look_up<float>(table, places, dim, bags, hotness, out, stream);
}
extern "C" void peer_cuembed_f16(
    const void* table, const void* places, int dim, int bags, int hotness, void* out,
    void* stream) {
    look_up<__half>(table, places, dim, bags, hotness, out, stream);
}
#endif

#ifdef WITH_GPU_CACHE
#include <limits>
#include <nv_gpu_cache.hpp>

using Key = long long;
const Key EMPTY = std::numeric_limits<Key>::max();
using Cache = gpu_cache::gpu_cache<Key, uint64_t, EMPTY, SET_ASSOCIATIVITY, SLAB_SIZE>;
// Rows that one call inserts.
static const size_t FILLED_AT_ONCE = 1 << 16;

extern "C" void* peer_gpu_cache_new(size_t slots, size_t dim) {
    const size_t slots_of_set = SET_ASSOCIATIVITY * SLAB_SIZE;
    return new Cache((slots + slots_of_set - 1) / slots_of_set, dim);
}
extern "C" void peer_gpu_cache_delete(void* cache) { delete (Cache*)cache; }
// Inserts `keys` with the rows `values[count, dim]`.
extern "C" void peer_gpu_cache_fill(
    void* cache, const void* keys, size_t count, const void* values, size_t dim, void* stream) {
    for (size_t first = 0; first < count; first += FILLED_AT_ONCE) {
        const size_t some = count - first < FILLED_AT_ONCE ? count - first : FILLED_AT_ONCE;
        const float* rows = (const float*)values + first * dim;
        ((Cache*)cache)->Replace((const Key*)keys + first, some, rows, (cudaStream_t)stream);
    }
}
// `out[count, dim]`: the rows of `keys` that are cached. The numbers and keys of the others go to
// `missing` and `missing_keys`, and their count to `missed`.
extern "C" void peer_gpu_cache_query(
    void* cache, const void* keys, size_t count, void* out, void* missing, void* missing_keys,
    void* missed, void* stream) {
    ((Cache*)cache)->Query(
        (const Key*)keys, count, (float*)out, (uint64_t*)missing, (Key*)missing_keys,
        (size_t*)missed, (cudaStream_t)stream);
}
#endif

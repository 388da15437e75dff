// Shared memory and its rule: an access of one lane is ordered before another lane's only by a
// `__syncwarp` or a barrier between both. A shuffle or a vote orders none, although all lanes meet in it.
// Two accesses to a word that are not ordered, one of them a write, end the run. A write that changes
// nothing is exempt, because all lanes of a warp often store the same value. The bytes of a word count
// as one, and the exemption holds within a warp: no kernel needs more.
//
// The compiler calls a function before each access to memory (`-fsanitize=thread`). The functions
// here take the place of that sanitizer's own library. Sometimes they let another lane run first.
#include "host.h"
#include <set>
#include <tuple>

// Where the linker puts the variables that are declared with `__shared__`.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_gpu_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) char __stop_gpu_shared[];

namespace sim {

// A warp number for accesses of several warps.
constexpr unsigned MANY = ~0u;

static inline bool is_shared(uintptr_t at) {
    return at - (uintptr_t)block->shared_at < block->shared_bytes ||
           at - (uintptr_t)__start_gpu_shared < (uintptr_t)(__stop_gpu_shared - __start_gpu_shared);
}

// Returns the record of the word at `at`; null if that is not shared memory of the running block.
static Word* word_at(uintptr_t at) {
    Block& b = *block;
    uintptr_t offset = at - (uintptr_t)b.shared_at;
    if (offset < b.shared_bytes) return &b.words[offset / 4];

    offset = at - (uintptr_t)__start_gpu_shared;
    if (offset >= (uintptr_t)(__stop_gpu_shared - __start_gpu_shared)) return nullptr;
    // These variables have one address for all blocks. Their kernels run one block at a time.
    static std::vector<Word> words((__stop_gpu_shared - __start_gpu_shared + 3) / 4);
    static const Block* owner = nullptr;
    static uint64_t number = 0;
    if (owner != block || number != b.number) {
        std::fill(words.begin(), words.end(), Word{});
        owner = block, number = b.number;
    }
    return &words[offset / 4];
}

static bool is_before(const Access& access, const Fiber& me) {
    if (!access.lanes) return true;
    return access.warp == me.warp ? access.syncs < me.syncs : access.barriers < me.barriers;
}

static bool is_only(const Access& access, const Fiber& me) {
    return access.warp == me.warp && access.lanes == 1u << me.lane;
}

static void fail_unordered(const Access& other) {
    const Fiber& me = *block->current;
    bool is_mine = other.warp == me.warp;
    fail("lanes %u and %u access a word of shared memory, one writes, and no __syncwarp is between",
         __builtin_ctz(is_mine ? other.lanes & ~(1u << me.lane) : other.lanes), me.lane);
}

static void note_read(Word& word, Fiber& me) {
    bool wrote = word.write.warp == me.warp && word.write.lanes >> me.lane & 1;
    if (!wrote && !is_before(word.write, me)) fail_unordered(word.write);

    Access& read = word.read;
    bool same_barrier = read.lanes && read.barriers == me.barriers;
    if (same_barrier && read.warp != me.warp) read.warp = MANY;
    else if (same_barrier && read.syncs == me.syncs) read.lanes |= 1u << me.lane;
    else read = {1u << me.lane, me.warp, me.syncs, me.barriers};
}

static void note_write(Word& word, Fiber& me, const uint32_t* at) {
    bool alone = is_only(word.write, me) || is_before(word.write, me);
    bool unread = is_only(word.read, me) || is_before(word.read, me);
    if (alone && unread) word.write = {1u << me.lane, me.warp, me.syncs, me.barriers};
    else me.unordered.push_back({&word, at, *at});
}

void end_writes() {
    Fiber& me = *block->current;
    for (const Unordered& write : me.unordered) {
        Word& word = *write.word;
        if (*write.at != write.before) {
            bool was_read = !is_only(word.read, me) && !is_before(word.read, me);
            fail_unordered(was_read ? word.read : word.write);
        }
        if (word.write.warp == me.warp && word.write.syncs == me.syncs) word.write.lanes |= 1u << me.lane;
    }
    me.unordered.clear();
}

static void note(uintptr_t at, size_t bytes, bool writes) {
    end_writes();
    if (random() % 64 == 0) yield();
    for (uintptr_t word = at & ~(uintptr_t)3; word < at + bytes; word += 4) {
        Word* record = word_at(word);
        if (!record) fail("an access crosses the end of shared memory");
        if (writes) note_write(*record, *block->current, (const uint32_t*)word);
        else note_read(*record, *block->current);
    }
}

static inline void access(const void* at, size_t bytes, bool writes) {
    if (block && is_shared((uintptr_t)at)) note((uintptr_t)at, bytes, writes);
    else count_bus(at, bytes, writes);
}

bool counts_bus = false;
uint64_t bus_bytes[2];
static std::set<std::tuple<uint64_t, unsigned, uintptr_t, bool>> sectors;
void forget_sectors() { sectors.clear(); }

void count_bus(const void* at, size_t bytes, bool writes) {
    if (!counts_bus || !block || !is_pinned(at)) return;
    for (uintptr_t sector = (uintptr_t)at / 32; sector <= ((uintptr_t)at + bytes - 1) / 32; sector++)
        if (sectors.insert({block->number, block->current->warp, sector, writes}).second) bus_bytes[writes] += 32;
}

}  // namespace sim

#define HOOK(name, bytes) \
    extern "C" void __tsan_read##name(const void* at) { sim::access(at, bytes, false); } \
    extern "C" void __tsan_write##name(void* at) { sim::access(at, bytes, true); }
HOOK(1, 1)
HOOK(2, 2)
HOOK(4, 4)
HOOK(8, 8)
HOOK(16, 16)
#define UNALIGNED_HOOK(bytes) \
    extern "C" void __tsan_unaligned_read##bytes(const void* at) { sim::access(at, bytes, false); } \
    extern "C" void __tsan_unaligned_write##bytes(void* at) { sim::access(at, bytes, true); }
UNALIGNED_HOOK(2)
UNALIGNED_HOOK(4)
UNALIGNED_HOOK(8)
UNALIGNED_HOOK(16)
extern "C" void __tsan_read_range(const void* at, size_t bytes) { sim::access(at, bytes, false); }
extern "C" void __tsan_write_range(void* at, size_t bytes) { sim::access(at, bytes, true); }
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

// A stand-in for the CUDA driver library: the entry points that Hatchback calls, on the host machine of
// host.h. Work on a stream is queued until the program waits. Then the heads of all streams run in an
// order that the seed decides, with up to two kernels interleaved. Device memory is host memory of
// exactly the requested size, filled with garbage. Kernels are looked up by name in the image that the
// product loads, and run as the same source compiled for the host. For tests only; the device's name
// says so.
//
// It is stricter than a driver where a driver would hide a mistake. There is no legacy stream, because
// that is not ordered with other streams. Copies must stay inside one allocation. A block must not be
// larger than its kernel was built for. What invalidates a recording on a GPU invalidates it here.
// STANDIN_DEVICE chooses the GPU: see `devices`.
#include "host.h"

#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#define API extern "C" __attribute__((visibility("default")))
typedef int Result;
typedef unsigned long long Address;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209, NEWER_PTX = 222,
       NOT_FOUND = 500, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNJOINED = 904,
       CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908 };

namespace {

std::recursive_mutex lock;
#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)

// Whether frees are held, those that came since, and those that were let go.
std::atomic<int> frees_hold, frees_come, frees_let;

std::vector<sim::Named>& table() { static std::vector<sim::Named> t; return t; }

// The GPUs: the board's, a desk's, one with little memory, one whose driver refuses later PTX, and two
// that are too old. A name such as sm_121 is a desk's GPU of that capability.
struct Device { const char* name; int sm, driver, integrated, processors; size_t mib = 4096; };
const Device devices[] = {{"board", 87, 11040, 1, 1}, {"desk", 90, 13000, 0, 1}, {"small", 90, 13000, 0, 1, 512}, {"ptx", 89, 12040, 0, 132},
                          {"old driver", 87, 11020, 1, 2}, {"old GPU", 75, 13000, 0, 2}};
const Device* device_named(const char* name) {
    static Device other = {"", 0, 13000, 0, 1};
    if (name && sscanf(name, "sm_%d", &other.sm) == 1) return &other;
    for (auto& d : devices) if (!name || !strcmp(d.name, name)) return &d;
    sim::fail("STANDIN_DEVICE names none of its devices");
}
const Device*& device() { static const Device* d = device_named(getenv("STANDIN_DEVICE")); return d; }

// `capture` is the recording in which the event was recorded last, or 0, and `after` its place in that.
struct Event { uint64_t recorded = 0, done = 0, capture = 0; std::set<size_t> after; };

struct Op {
    enum Kind { HOST, KERNEL, RECORD, WAIT } kind;
    std::function<void()> run;  // what it does, or a kernel's body
    dim3 blocks, threads;
    bool exclusive = false, copies = false, each_launch = false;
    std::shared_ptr<Event> event;
    uint64_t number = 0;  // of the recording; 0 if it counts only when it runs
    std::shared_ptr<sim::Grid> grid;  // while it runs
};

// One piece of recorded work, and the numbers of those that it follows.
struct Node { Op op; std::set<size_t> after; };

// `longest` is the number of nodes in the longest chain, each of which follows the one before.
struct Graph { std::vector<Node> nodes; size_t longest = 0; };

struct Stream;
// What one thread records, on the stream that it began with and on those that wait for its events.
struct Capture {
    uint64_t id = 0;
    Stream* origin = nullptr;
    std::thread::id by;
    bool spoiled = false;
    Graph graph;
};

struct Stream {
    std::deque<Op> ops;
    // The recording that it takes part in, and the nodes that its next node follows.
    Capture* captured = nullptr;
    std::set<size_t> after;
    std::vector<Stream*> branches;  // run the other branches of its graphs
};

std::set<Stream*> streams;
std::map<uint64_t, Capture*> captures;
uint64_t last_capture, last_nodes, last_longest;
uint64_t launches, waits, copies, live_bytes, loaded, last_image, modules;
struct Memory { size_t bytes; bool pinned; };
std::map<Address, Memory> memories;

// Runs the head of one stream for a while; returns false if none can run.
bool advance() {
    std::vector<Stream*> ready;
    unsigned running = 0;
    bool exclusive = false;
    auto all = [&](auto each) { for (Stream* s : streams) each(s); };
    all([&](Stream* s) { if (!s->ops.empty() && s->ops.front().grid) running++, exclusive |= s->ops.front().exclusive; });
    all([&](Stream* s) {
        if (s->ops.empty()) return;
        Op& op = s->ops.front();
        if (op.kind == Op::WAIT && op.event->done < op.number) return;
        if (op.kind == Op::KERNEL && !op.grid && running && (running > 1 || exclusive || op.exclusive)) return;
        ready.push_back(s);
    });
    if (ready.empty()) return false;
    // Sometimes one stream is slower than all others for a while.
    static Stream* slow = nullptr;
    if (sim::random() % 1024 == 0) slow = sim::random() % 4 ? nullptr : ready[sim::random() % ready.size()];
    if (ready.size() > 1) ready.erase(std::remove(ready.begin(), ready.end(), slow), ready.end());
    Stream* s = ready[sim::random() % ready.size()];
    Op& op = s->ops.front();
    switch (op.kind) {
    case Op::HOST: copies += op.copies; op.run(); break;
    case Op::RECORD:
        if (!op.number) op.number = ++op.event->recorded;
        op.event->done = std::max(op.event->done, op.number);
        break;
    case Op::WAIT: break;
    case Op::KERNEL:
        sim::racing = running > (op.grid ? 1 : 0);
        if (!op.grid) op.grid = sim::begin(op.run, op.blocks, op.threads, op.exclusive);
        for (int i = 0; i < 8 && !op.grid->done(); i++) sim::step(*op.grid);
        if (!op.grid->done()) return true;
    }
    s->ops.pop_front();
    return true;
}

template <class Until> void run(Until until) {
    while (!until())
        if (!advance()) sim::fail("deadlock: every stream waits for an event that nothing will record");
}

bool idle() {
    for (Stream* s : streams) if (!s->ops.empty()) return false;
    return true;
}

Stream* of(void* stream) {
    if (!streams.count((Stream*)stream)) sim::fail("work on the legacy stream, or on a destroyed stream");
    return (Stream*)stream;
}

Result give(void* stream, Op op) {
    Stream* s = of(stream);
    if (s->captured) {
        std::vector<Node>& nodes = s->captured->graph.nodes;
        nodes.push_back({std::move(op), s->after});
        s->after = {nodes.size() - 1};
    } else {
        s->ops.push_back(std::move(op));
    }
    return SUCCESS;
}

Result host(void* stream, std::function<void()> run) {
    Op op{Op::HOST};
    op.run = std::move(run);
    return give(stream, std::move(op));
}

Result copy(void* stream, std::function<void()> run) {
    Op op{Op::HOST};
    op.run = std::move(run);
    op.copies = true;
    return give(stream, std::move(op));
}

bool spoil(Stream* s) { return s->captured && (s->captured->spoiled = true); }

// Memory, modules and waits for events are not for a thread that records.
bool recording_here() {
    bool found = false;
    for (auto& [id, c] : captures) if (c->by == std::this_thread::get_id()) found = c->spoiled = true;
    return found;
}
#define NOT_WHILE_RECORDING if (recording_here()) return CAPTURE_UNSUPPORTED

// The context that the calling thread has bound; without one a driver does nothing.
thread_local void* current;
#define BOUND if (!current) return INVALID_CONTEXT
// Without a bound context, memory and handles would never be released.
#define BOUND_TO_GIVE_BACK if (!current) sim::fail("something is given back by a thread that has not bound the context")

// Calls that fail as those do that leave the GPU in order: what they are of, a kernel's name or one of those below, how many before them
// do not, and how many do.
std::string fault;
unsigned fault_after, fault_times;
Result fault_code = OUT_OF_MEMORY;
bool fails(const char* what) {
    if (fault != what || !fault_times) return false;
    return fault_after ? fault_after--, false : (fault_times--, true);
}

// What a module takes of the device's memory, large enough to be seen beside everything else.
const uint64_t MODULE_BYTES = 64 << 20;
// And what the context takes.
const uint64_t CONTEXT_BYTES = 32 << 20;
uint64_t free_bytes() {
    const uint64_t all = device()->mib << 20, taken = CONTEXT_BYTES + live_bytes + modules * MODULE_BYTES;
    return taken < all ? all - taken : 0;
}

Result allocate(Address* p, size_t n, size_t alignment, bool pinned) {
    BOUND;
    LOCKED;
    NOT_WHILE_RECORDING;
    if (!n) return INVALID_VALUE;
    if (!pinned && n > free_bytes()) return OUT_OF_MEMORY;
    void* memory;
    if (pinned && fails("pinned memory")) return fault_code;
    if (posix_memalign(&memory, alignment, n)) return OUT_OF_MEMORY;
    memset(memory, 0xa5, n);
    *p = (Address)memory;
    memories[*p] = {n, pinned};
    live_bytes += n;
    return SUCCESS;
}

// Whether `n` bytes from `p` on are one allocation's.
const Memory* within(Address p, size_t n) {
    auto at = memories.upper_bound(p);
    if (at == memories.begin()) return nullptr;
    --at;
    return p - at->first <= at->second.bytes && n <= at->second.bytes - (p - at->first) ? &at->second : nullptr;
}

void check_device(Address p, size_t n) {
    const Memory* memory = within(p, n);
    if (!memory || memory->pinned) sim::fail("a copy leaves the device memory that was allocated");
}

// Memory is freed immediately, even if the device still uses it: NVIDIA only says that a free may wait.
Result release(Address p, bool pinned) {
    BOUND_TO_GIVE_BACK;
    LOCKED;
    NOT_WHILE_RECORDING;
    auto at = memories.find(p);
    if (at == memories.end() || at->second.pinned != pinned) sim::fail("memory is freed that was not allocated so");
    live_bytes -= at->second.bytes;
    memset((void*)p, 0x5a, at->second.bytes);
    memories.erase(at);
    free((void*)p);
    return SUCCESS;
}

// `entry` is the text before a kernel's name in the image.
struct Module { std::string image, entry; };
struct Function { sim::Named kernel; bool ran = false; };
int context;
bool spins = false;

}  // namespace

bool sim::is_pinned(const void* at) {
    const Memory* memory = within((Address)at, 1);
    return memory && memory->pinned;
}

void sim::add(sim::Named kernel) { table().push_back(kernel); }

// For the tests themselves.
API void standin_device(const char* name) { LOCKED; device() = device_named(name), sim::counts_bus = false; }
API void standin_seed(uint64_t seed) { LOCKED; sim::seed(seed); }
API void standin_counts(uint64_t* out) { LOCKED; out[0] = launches; out[1] = waits; out[2] = copies; out[3] = live_bytes; out[4] = idle() ? 0 : 1; out[5] = loaded; out[6] = sim::blocks; out[7] = last_nodes; out[8] = last_longest; out[9] = last_image; }
API void standin_fault(const char* what, unsigned after, unsigned times) { LOCKED; fault = what, fault_after = after, fault_times = times; }
// Counts the bytes over the bus from here on; writes those read and written since the last call.
API void standin_bus(uint64_t* out) {
    LOCKED;
    memcpy(out, sim::bus_bytes, sizeof sim::bus_bytes);
    sim::counts_bus = true, sim::bus_bytes[0] = sim::bus_bytes[1] = 0, sim::forget_sectors();
}
API void standin_hold_frees(int hold) { frees_come = frees_let = 0, frees_hold = hold; }
API int standin_frees_held() { return frees_hold ? frees_come - frees_let : 0; }
API void standin_let_free() { frees_let++; }
API void standin_fault_code(int code) { LOCKED; fault_code = (Result)code; }

API Result cuInit(unsigned) { return SUCCESS; }
API Result cuDriverGetVersion(int* v) { *v = device()->driver; return SUCCESS; }
API Result cuDeviceGetCount(int* n) { *n = 1; return SUCCESS; }
API Result cuDeviceGet(int* d, int i) { *d = 0; return i ? INVALID_DEVICE : SUCCESS; }
API Result cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "stand-in (no GPU: kernels run on the host)"); return SUCCESS; }
API Result cuDeviceGetUuid(char* u, int) { memset(u, 7, 16); return SUCCESS; }
API Result cuDeviceGetUuid_v2(char* u, int) { return cuDeviceGetUuid(u, 0); }
API Result cuDeviceTotalMem_v2(size_t* n, int) { *n = device()->mib << 20; return SUCCESS; }
API Result cuDeviceGetAttribute(int* v, int a, int) {
    // Blocks of 1024, warps of 32; no pools, no managed memory.
    const Device& d = *device();
    const std::map<int, int> known = {{1, 1024}, {10, 32}, {16, d.processors}, {18, d.integrated}, {75, d.sm / 10}, {76, d.sm % 10}};
    auto at = known.find(a);
    *v = at == known.end() ? 0 : at->second;
    return SUCCESS;
}
API Result cuDevicePrimaryCtxSetFlags_v2(int, unsigned flags) {
    if (flags != 1) sim::fail("a context whose waits do not spin");
    spins = true;
    return SUCCESS;
}
API Result cuCtxGetStreamPriorityRange(int* least, int* greatest) { BOUND; *least = 0; *greatest = -5; return SUCCESS; }
API Result cuDevicePrimaryCtxRetain(void** c, int) {
    if (!spins) sim::fail("a context that was opened before its flags were set");
    *c = &context;
    return SUCCESS;
}
API Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API Result cuCtxGetCurrent(void** c) { *c = current; return SUCCESS; }
API Result cuCtxSetCurrent(void* c) { current = c; return SUCCESS; }
// There is no cuCtxSynchronize: in a process that serves, nothing may wait for the work of all workers. cuBLAS
// does so when it gives back a handle.
API Result standin_wait_for_all() {
    BOUND;
    LOCKED;
    // Of all streams, so it spoils every recording, whoever makes it.
    bool spoiled = false;
    for (Stream* s : streams) spoiled |= spoil(s);
    if (spoiled) return CAPTURE_UNSUPPORTED;
    waits++;
    run(idle);
    return SUCCESS;
}
API Result cuMemGetInfo_v2(size_t* left, size_t* all) { LOCKED; *all = device()->mib << 20, *left = free_bytes(); return SUCCESS; }
API Result cuGetErrorName(Result r, const char** s) {
    bool known = (unsigned)r < 1000;
    *s = known ? "CUDA_ERROR (stand-in)" : nullptr;
    return known ? SUCCESS : INVALID_VALUE;
}
API Result cuGetErrorString(Result r, const char** s) {
    *s = r == NO_BINARY ? "no binary for this GPU" : r == NEWER_PTX ? "the PTX is newer than the driver" : r == CAPTURE_UNSUPPORTED ? "not permitted while a stream is captured" : "stand-in error";
    return SUCCESS;
}

API Result cuStreamCreate(void** s, unsigned flags) {
    BOUND;
    LOCKED;
    if (flags != 1) sim::fail("a stream that waits for the legacy stream");
    *s = *streams.insert(new Stream).first;
    return SUCCESS;
}
API Result cuStreamCreateWithPriority(void** s, unsigned flags, int) { return cuStreamCreate(s, flags); }
API Result cuStreamDestroy_v2(void* s) {
    BOUND_TO_GIVE_BACK;
    LOCKED;
    Stream* gone = of(s);
    // The driver does not wait for it, and its owner frees next what the work uses.
    if (!gone->ops.empty()) sim::fail("a stream that is destroyed before its work is done");
    gone->branches.push_back(gone);
    for (Stream* each : std::vector<Stream*>(gone->branches)) streams.erase(each), delete each;
    return SUCCESS;
}
API Result cuStreamSynchronize(void* s) { BOUND; LOCKED; if (spoil(of(s))) return CAPTURE_UNSUPPORTED; if (fails("wait")) return fault_code; waits++; run([&] { return of(s)->ops.empty(); }); return SUCCESS; }
API Result cuStreamQuery(void* s) { BOUND; LOCKED; if (spoil(of(s))) return CAPTURE_UNSUPPORTED; advance(); return of(s)->ops.empty() ? SUCCESS : NOT_READY; }

API Result cuEventCreate(void** e, unsigned) { BOUND; *e = new std::shared_ptr<Event>(new Event); return SUCCESS; }
API Result cuEventDestroy_v2(void* e) { BOUND_TO_GIVE_BACK; LOCKED; delete (std::shared_ptr<Event>*)e; return SUCCESS; }
API Result cuEventRecord(void* e, void* s) {
    BOUND;
    LOCKED;
    Op op{Op::RECORD};
    op.event = *(std::shared_ptr<Event>*)e;
    if (Capture* c = of(s)->captured) {
        // Marks a place in the recording, and is no node of it.
        op.event->capture = c->id, op.event->after = of(s)->after;
        return SUCCESS;
    }
    op.event->capture = 0;
    op.number = ++op.event->recorded;
    return give(s, std::move(op));
}
API Result cuEventRecordWithFlags(void* e, void* s, unsigned flags) {
    if (!flags) return cuEventRecord(e, s);
    BOUND;
    LOCKED;
    // An event outside of the recording, which every launch of the graph records.
    if (flags != 1 || !of(s)->captured) sim::fail("an event is recorded outside of a recording as if in one");
    Op op{Op::RECORD};
    op.event = *(std::shared_ptr<Event>*)e;
    op.each_launch = true;
    return give(s, std::move(op));
}
API Result cuStreamWaitEvent(void* s, void* e, unsigned) {
    BOUND;
    LOCKED;
    // A test shows what happens without the order.
    if (fails("wait for an event")) return SUCCESS;
    Op op{Op::WAIT};
    op.event = *(std::shared_ptr<Event>*)e;
    op.number = op.event->recorded;
    const Event& event = *op.event;
    Stream* stream = of(s);
    if (!event.capture && !stream->captured) return give(s, std::move(op));
    // A recording must not depend on anything outside the recording.
    if (stream->captured && stream->captured->id != event.capture) return spoil(stream), CAPTURE_ISOLATION;
    // A stream that waits for a recorded event takes part in the recording.
    if (!captures.count(event.capture)) return CAPTURED_EVENT;
    if (!stream->captured) stream->captured = captures[event.capture], stream->after.clear();
    stream->after.insert(event.after.begin(), event.after.end());
    return SUCCESS;
}
API Result cuEventSynchronize(void* e) {
    BOUND;
    LOCKED;
    NOT_WHILE_RECORDING;
    waits++;
    Event& event = **(std::shared_ptr<Event>*)e;
    uint64_t number = event.recorded;
    run([&] { return event.done >= number; });
    return SUCCESS;
}
API Result cuEventQuery(void* e) {
    BOUND;
    LOCKED;
    NOT_WHILE_RECORDING;
    Event& event = **(std::shared_ptr<Event>*)e;
    if (event.done < event.recorded) advance();
    return event.done < event.recorded ? NOT_READY : SUCCESS;
}
API Result cuEventElapsedTime(float* ms, void*, void*) { *ms = 0; return SUCCESS; }

API Result cuMemAlloc_v2(Address* p, size_t n) { return allocate(p, n, 256, false); }
// Waits, if the test holds frees, without the lock of the other calls.
static void hold_free() {
    int const number = frees_come++;
    while (frees_hold && frees_let <= number) std::this_thread::yield();
}
API Result cuMemFree_v2(Address p) { hold_free(); return release(p, false); }
API Result cuMemHostAlloc(void** p, size_t n, unsigned flags) {
    if (flags != 2) sim::fail("pinned memory that is not mapped, or that the host reads slowly");
    return allocate((Address*)p, n, 4096, true);
}
API Result cuMemFreeHost(void* p) { hold_free(); return release((Address)p, true); }
API Result cuMemHostGetDevicePointer_v2(Address* d, void* p, unsigned) { *d = (Address)p; return SUCCESS; }
API Result cuMemcpyHtoDAsync_v2(Address d, const void* p, size_t n, void* s) {
    BOUND;
    LOCKED;
    check_device(d, n);
    const Memory* from = within((Address)p, n);
    if (of(s)->captured && !(from && from->pinned)) sim::fail("a recording copies from memory that is not pinned");
    return copy(s, [=] { sim::bus_bytes[0] += n, memcpy((void*)d, p, n); });
}
API Result cuMemcpyDtoHAsync_v2(void* p, Address d, size_t n, void* s) { BOUND; LOCKED; check_device(d, n); return copy(s, [=] { sim::bus_bytes[1] += n, memcpy(p, (void*)d, n); }); }
API Result cuMemcpyDtoDAsync_v2(Address d, Address p, size_t n, void* s) {
    BOUND;
    LOCKED;
    check_device(d, n);
    check_device(p, n);
    return copy(s, [=] { memmove((void*)d, (void*)p, n); });
}
API Result cuMemsetD8Async(Address d, unsigned char v, size_t n, void* s) { BOUND; LOCKED; check_device(d, n); return host(s, [=] { memset((void*)d, v, n); }); }

API Result cuLaunchHostFunc(void* s, void (*run)(void*), void* with) { LOCKED; return host(s, [=] { run(with); }); }

// Loads PTX, which a driver compiles if it knows the ISA version and the target is not a later GPU.
static Result load_ptx(void** m, const char* text) {
    const char *version = strstr(text, "\n.version "), *target = strstr(text, "\n.target sm_");
    int major, minor, sm;
    if (!version || !target || sscanf(version, "\n.version %d.%d", &major, &minor) != 2 || sscanf(target, "\n.target sm_%d", &sm) != 1)
        return INVALID_IMAGE;
    // CUDA 11.4 is ISA 7.4, 12.0 is 8.0.
    if (10 * major + minor > (device()->driver / 1000 - 4) * 10 + device()->driver % 1000 / 10) return NEWER_PTX;
    if (sm > device()->sm) return NO_BINARY;
    *m = new Module{text, ".entry "}, last_image = 0, modules++;
    return SUCCESS;
}
API Result cuModuleLoadData(void** m, const void* image) {
    BOUND;
    LOCKED;
    NOT_WHILE_RECORDING;
    const unsigned char* p = (const unsigned char*)image;
    if (!memcmp(p, "//", 2)) return load_ptx(m, (const char*)image);
    // Machine code for CUDA (EM_CUDA), for the compute capability that this device says it has.
    if (memcmp(p, "\177ELF", 4) || p[18] != 190) return INVALID_IMAGE;
    if ((Address)image % 8) sim::fail("an image that does not begin on a multiple of 8");
    unsigned flags;
    memcpy(&flags, p + 48, 4);
    // CUDA 13 has the capability in the second byte of the flags.
    int const sm = p[8] == 8 ? flags >> 8 & 0xff : flags & 0xff;
    if (sm / 10 != device()->sm / 10 || sm > device()->sm) return NO_BINARY;
    uint64_t sections, programs;
    uint16_t size, count, psize, pcount;
    memcpy(&programs, p + 32, 8), memcpy(&sections, p + 40, 8);
    memcpy(&psize, p + 54, 2), memcpy(&pcount, p + 56, 2), memcpy(&size, p + 58, 2), memcpy(&count, p + 60, 2);
    size_t bytes = std::max(sections + (size_t)size * count, programs + (size_t)psize * pcount);
    *m = new Module{std::string((const char*)p, bytes), ".text."}, last_image = sm, modules++;
    return SUCCESS;
}
API Result cuModuleUnload(void* m) { BOUND_TO_GIVE_BACK; LOCKED; NOT_WHILE_RECORDING; delete (Module*)m, modules--; return SUCCESS; }
API Result cuModuleGetFunction(void** f, void* m, const char* name) {
    BOUND;
    // The image must have the kernel too: the tests check what was built for the device.
    const Module& module = *(Module*)m;
    const std::string there = module.entry + name + (module.entry == ".text." ? '\0' : '(');
    if (module.image.find(there) == std::string::npos) return NOT_FOUND;
    for (auto& kernel : table()) if (!strcmp(kernel.name, name)) { *f = new Function{kernel}; return SUCCESS; }
    return NOT_FOUND;
}
// Adds the name of a kernel that is launched to the file that a profiler's double reads, if there is one.
static void note_launched(const char* name) {
    const char* path = getenv("STANDIN_LAUNCHED");
    FILE* file = path ? fopen(path, "a") : nullptr;
    if (file) fprintf(file, "%s\n", name), fclose(file);
}
API Result cuFuncGetAttribute(int* v, int, void*) { *v = 0; return SUCCESS; }
API Result cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, void* s, void** arguments, void**) {
    BOUND;
    LOCKED;
    sim::Named& kernel = ((Function*)f)->kernel;
    // No more threads than the kernel was built for: there would not be enough registers.
    if (!gx || !gy || !gz || gx > 0x7fffffff || gy > 65535 || gz > 65535 || !bx || !by || !bz || bx * by * bz > kernel.threads) return INVALID_VALUE;
    // A driver loads a kernel, and allocates memory for it, at the kernel's first launch.
    if (of(s)->captured && !((Function*)f)->ran) return spoil(of(s)), CAPTURE_UNSUPPORTED;
    if (!((Function*)f)->ran) note_launched(kernel.name);
    loaded += !((Function*)f)->ran;
    ((Function*)f)->ran = true;
    if (fails(kernel.name)) return fault_code;
    if (!of(s)->captured) launches++;
    Op op{Op::KERNEL};
    op.run = kernel.bind(arguments);
    op.blocks = {gx, gy, gz};
    op.threads = {bx, by, bz};
    op.exclusive = kernel.exclusive;
    return give(s, std::move(op));
}

API Result cuStreamBeginCapture_v2(void* s, int mode) {
    BOUND;
    LOCKED;
    if (mode != 1) sim::fail("a recording that other threads may spoil");
    if (of(s)->captured) return CAPTURE_UNSUPPORTED;
    Capture* c = new Capture{++last_capture, of(s), std::this_thread::get_id(), false, {}};
    captures[c->id] = of(s)->captured = c, of(s)->after.clear();
    return SUCCESS;
}
API Result cuStreamEndCapture(void* s, void** g) {
    BOUND;
    LOCKED;
    Stream* stream = of(s);
    Capture* c = stream->captured;
    *g = nullptr;
    if (!c || c->origin != stream) return CAPTURE_UNSUPPORTED;
    if (c->by != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    // The stream must have waited for the last work of every branch.
    std::vector<Node>& nodes = c->graph.nodes;
    std::set<size_t> ends;
    std::vector<size_t> chains;
    for (size_t i = 0; i < nodes.size(); i++) {
        size_t before = 0;
        for (size_t other : nodes[i].after) before = std::max(before, chains[other]), ends.erase(other);
        chains.push_back(before + 1), ends.insert(i);
        c->graph.longest = std::max(c->graph.longest, before + 1);
    }
    const bool joined = std::includes(stream->after.begin(), stream->after.end(), ends.begin(), ends.end());
    for (Stream* each : streams) if (each->captured == c) each->captured = nullptr;
    captures.erase(c->id);
    std::unique_ptr<Capture> gone(c);
    if (fails("recording")) return CAPTURE_UNSUPPORTED;
    if (c->spoiled) return CAPTURE_INVALIDATED;
    if (!joined) return CAPTURE_UNJOINED;
    *g = new Graph(std::move(c->graph));
    return SUCCESS;
}
API Result cuStreamIsCapturing(void* s, int* c) { LOCKED; *c = of(s)->captured ? 1 : 0; return SUCCESS; }
API Result cuGraphInstantiateWithFlags(void** x, void* g, unsigned long long) { BOUND; *x = new Graph(*(Graph*)g); return SUCCESS; }
API Result cuGraphGetEdges(void* g, const Node** from, const Node** to, size_t* count) {
    BOUND;
    const std::vector<Node>& nodes = ((Graph*)g)->nodes;
    size_t edges = 0;
    for (const Node& node : nodes) for (size_t before : node.after) {
        if (from && edges < *count) from[edges] = &nodes[before], to[edges] = &node;
        edges++;
    }
    *count = edges;
    return SUCCESS;
}
API Result cuGraphUpload(void*, void*) { BOUND; return SUCCESS; }
API Result cuGraphLaunch(void* x, void* s) {
    BOUND;
    LOCKED;
    if (fails("graph")) return fault_code;
    launches++;
    const Graph& graph = *(Graph*)x;
    last_nodes = graph.nodes.size(), last_longest = graph.longest;
    // A branch is a chain of nodes on a stream of its own; events order the branches.
    Stream* stream = of(s);
    if (stream->captured) sim::fail("a graph is launched while its stream records");
    std::vector<size_t> branch_of, last;
    std::vector<std::shared_ptr<Event>> ended;
    auto on = [&](size_t branch) {
        if (!branch) return stream;
        while (stream->branches.size() < branch) stream->branches.push_back(*streams.insert(new Stream).first);
        return stream->branches[branch - 1];
    };
    auto order = [&](size_t branch, Op::Kind kind, std::shared_ptr<Event> event) {
        Op op{kind};
        op.event = event, op.number = event->recorded = 1;
        on(branch)->ops.push_back(std::move(op));
    };
    auto start = std::make_shared<Event>();
    order(0, Op::RECORD, start);
    for (size_t i = 0; i < graph.nodes.size(); i++) {
        const Node& node = graph.nodes[i];
        size_t branch = 0;
        while (branch < last.size() && !node.after.count(last[branch])) branch++;
        if (branch == last.size()) {
            last.push_back(i);
            if (branch) order(branch, Op::WAIT, start);
        }
        for (size_t before : node.after) if (branch_of[before] != branch) order(branch, Op::WAIT, ended[before]);
        Op op = node.op;
        // A test shows what happens if a wait does not see the record of a launched graph.
        if (op.each_launch) op.number = fails("record of a graph") ? 0 : ++op.event->recorded;
        on(branch)->ops.push_back(std::move(op));
        last[branch] = i, branch_of.push_back(branch);
        ended.push_back(std::make_shared<Event>());
        order(branch, Op::RECORD, ended[i]);
    }
    for (size_t branch = 1; branch < last.size(); branch++) order(0, Op::WAIT, ended[last[branch]]);
    return SUCCESS;
}
API Result cuGraphDestroy(void* g) { BOUND_TO_GIVE_BACK; delete (Graph*)g; return SUCCESS; }
API Result cuGraphExecDestroy(void* x) { BOUND_TO_GIVE_BACK; LOCKED; delete (Graph*)x; return SUCCESS; }

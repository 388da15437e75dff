// A stand-in for the CUDA driver library: the entry points that this project calls, over the host machine of host.h. Work on a
// stream is queued until someone waits; then the heads of all streams go on in an order of the seed, two kernels at a time among
// each other. Device memory is host memory of exactly the size asked for, filled with rubbish. Kernels are found by name in the
// cubin that the product loads, and run as the same source compiled for the host. For tests alone; the device's name says so.
#include "host.h"

#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>

#define API extern "C" __attribute__((visibility("default")))
typedef int Result;
typedef unsigned long long Address;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, NO_BINARY = 209, NOT_FOUND = 500,
       NOT_READY = 600, CAPTURE_UNSUPPORTED = 900 };

namespace {

std::recursive_mutex lock;
#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)

std::vector<sim::Named>& table() { static std::vector<sim::Named> t; return t; }

struct Event { uint64_t recorded = 0, done = 0; };

struct Op {
    enum Kind { HOST, KERNEL, RECORD, WAIT } kind;
    std::function<void()> run;  // what it does, or a kernel's body
    dim3 blocks, threads;
    bool exclusive = false;
    std::shared_ptr<Event> event;
    uint64_t number = 0;
    std::shared_ptr<sim::Grid> grid;  // while it runs
};

struct Stream {
    std::deque<Op> ops;
    std::vector<Op>* captured = nullptr;
};

std::set<Stream*> streams;
Stream null_stream;
uint64_t launches, waits, copies, live_bytes;
std::map<Address, size_t> sizes;

// Lets the head of one stream go on; false if none can.
bool advance() {
    std::vector<Stream*> ready;
    unsigned running = 0;
    bool exclusive = false;
    auto all = [&](auto each) { each(&null_stream); for (Stream* s : streams) each(s); };
    all([&](Stream* s) { if (!s->ops.empty() && s->ops.front().grid) running++, exclusive |= s->ops.front().exclusive; });
    all([&](Stream* s) {
        if (s->ops.empty()) return;
        Op& op = s->ops.front();
        if (op.kind == Op::WAIT && op.event->done < op.number) return;
        if (op.kind == Op::KERNEL && !op.grid && running && (running > 1 || exclusive || op.exclusive)) return;
        ready.push_back(s);
    });
    if (ready.empty()) return false;
    Stream* s = ready[sim::random() % ready.size()];
    Op& op = s->ops.front();
    switch (op.kind) {
    case Op::HOST: op.run(); break;
    case Op::RECORD: op.event->done = std::max(op.event->done, op.number); break;
    case Op::WAIT: break;
    case Op::KERNEL:
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
    return null_stream.ops.empty();
}

Stream* of(void* stream) { return stream ? (Stream*)stream : &null_stream; }

Result give(void* stream, Op op) {
    Stream* s = of(stream);
    if (s->captured) s->captured->push_back(std::move(op));
    else s->ops.push_back(std::move(op));
    return SUCCESS;
}

Result host(void* stream, std::function<void()> run) {
    Op op{Op::HOST};
    op.run = std::move(run);
    return give(stream, std::move(op));
}

bool capturing() {
    for (Stream* s : streams) if (s->captured) return true;
    return false;
}

// Host waits end a capture, as they do in the real driver.
#define NOT_IN_CAPTURE if (capturing()) return CAPTURE_UNSUPPORTED

Result allocate(Address* p, size_t n, size_t alignment) {
    LOCKED;
    if (!n) return INVALID_VALUE;
    void* memory;
    if (posix_memalign(&memory, alignment, n)) return OUT_OF_MEMORY;
    memset(memory, 0xa5, n);
    *p = (Address)memory;
    sizes[*p] = n;
    live_bytes += n;
    return SUCCESS;
}

Result release(Address p) {
    LOCKED;
    run(idle);
    auto at = sizes.find(p);
    if (at == sizes.end()) sim::fail("memory is freed that was not allocated");
    live_bytes -= at->second;
    sizes.erase(at);
    free((void*)p);
    return SUCCESS;
}

struct Module { std::string image; };
struct Function { sim::Named kernel; };
typedef std::vector<Op> Graph;
int context;
thread_local void* current;

}  // namespace

void sim::add(sim::Named kernel) { table().push_back(kernel); }

// For the tests themselves.
API void standin_seed(uint64_t seed) { LOCKED; sim::seed(seed); }
API void standin_counts(uint64_t* out) { LOCKED; out[0] = launches; out[1] = waits; out[2] = copies; out[3] = live_bytes; }

API Result cuInit(unsigned) { return SUCCESS; }
API Result cuDriverGetVersion(int* v) { *v = 11040; return SUCCESS; }
API Result cuDeviceGetCount(int* n) { *n = 1; return SUCCESS; }
API Result cuDeviceGet(int* d, int i) { *d = 0; return i ? INVALID_DEVICE : SUCCESS; }
API Result cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "stand-in (no GPU: kernels run on the host)"); return SUCCESS; }
API Result cuDeviceGetUuid(char* u, int) { memset(u, 7, 16); return SUCCESS; }
API Result cuDeviceGetUuid_v2(char* u, int) { return cuDeviceGetUuid(u, 0); }
API Result cuDeviceTotalMem_v2(size_t* n, int) { *n = 4ull << 30; return SUCCESS; }
API Result cuDeviceGetAttribute(int* v, int a, int) {
    // Compute capability 8.7, integrated, 2 multiprocessors, warps of 32, blocks of 1024; no pools, no managed memory.
    static const std::map<int, int> known = {{1, 1024}, {10, 32}, {16, 2}, {18, 1}, {75, 8}, {76, 7}};
    auto at = known.find(a);
    *v = at == known.end() ? 0 : at->second;
    return SUCCESS;
}
API Result cuDevicePrimaryCtxRetain(void** c, int) { *c = &context; return SUCCESS; }
API Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API Result cuCtxGetCurrent(void** c) { *c = current; return SUCCESS; }
API Result cuCtxSetCurrent(void* c) { current = c; return SUCCESS; }
API Result cuCtxSynchronize() { LOCKED; NOT_IN_CAPTURE; waits++; run(idle); return SUCCESS; }
API Result cuMemGetInfo_v2(size_t* left, size_t* all) { *all = 4ull << 30; *left = *all - live_bytes; return SUCCESS; }
API Result cuGetErrorName(Result, const char** s) { *s = "CUDA_ERROR (stand-in)"; return SUCCESS; }
API Result cuGetErrorString(Result r, const char** s) {
    *s = r == NO_BINARY ? "no binary for this GPU" : r == CAPTURE_UNSUPPORTED ? "not permitted while a stream is captured" : "stand-in error";
    return SUCCESS;
}

API Result cuStreamCreate(void** s, unsigned) { LOCKED; *s = *streams.insert(new Stream).first; return SUCCESS; }
API Result cuStreamCreateWithPriority(void** s, unsigned flags, int) { return cuStreamCreate(s, flags); }
API Result cuStreamDestroy_v2(void* s) { LOCKED; run([&] { return of(s)->ops.empty(); }); streams.erase(of(s)); delete of(s); return SUCCESS; }
API Result cuStreamSynchronize(void* s) { LOCKED; NOT_IN_CAPTURE; waits++; run([&] { return of(s)->ops.empty(); }); return SUCCESS; }
API Result cuStreamQuery(void* s) { LOCKED; NOT_IN_CAPTURE; advance(); return of(s)->ops.empty() ? SUCCESS : NOT_READY; }

API Result cuEventCreate(void** e, unsigned) { *e = new std::shared_ptr<Event>(new Event); return SUCCESS; }
API Result cuEventDestroy_v2(void* e) { LOCKED; delete (std::shared_ptr<Event>*)e; return SUCCESS; }
API Result cuEventRecord(void* e, void* s) {
    LOCKED;
    Op op{Op::RECORD};
    op.event = *(std::shared_ptr<Event>*)e;
    op.number = ++op.event->recorded;
    return give(s, std::move(op));
}
API Result cuStreamWaitEvent(void* s, void* e, unsigned) {
    LOCKED;
    Op op{Op::WAIT};
    op.event = *(std::shared_ptr<Event>*)e;
    op.number = op.event->recorded;
    return give(s, std::move(op));
}
API Result cuEventSynchronize(void* e) {
    LOCKED;
    NOT_IN_CAPTURE;
    waits++;
    Event& event = **(std::shared_ptr<Event>*)e;
    uint64_t number = event.recorded;
    run([&] { return event.done >= number; });
    return SUCCESS;
}
API Result cuEventQuery(void* e) {
    LOCKED;
    NOT_IN_CAPTURE;
    Event& event = **(std::shared_ptr<Event>*)e;
    if (event.done < event.recorded) advance();
    return event.done < event.recorded ? NOT_READY : SUCCESS;
}
API Result cuEventElapsedTime(float* ms, void*, void*) { *ms = 0; return SUCCESS; }

API Result cuMemAlloc_v2(Address* p, size_t n) { return allocate(p, n, 256); }
API Result cuMemFree_v2(Address p) { LOCKED; NOT_IN_CAPTURE; return release(p); }
API Result cuMemHostAlloc(void** p, size_t n, unsigned) { return allocate((Address*)p, n, 4096); }
API Result cuMemFreeHost(void* p) { LOCKED; NOT_IN_CAPTURE; return release((Address)p); }
API Result cuMemHostGetDevicePointer_v2(Address* d, void* p, unsigned) { *d = (Address)p; return SUCCESS; }
API Result cuMemcpyHtoDAsync_v2(Address d, const void* p, size_t n, void* s) { LOCKED; copies++; return host(s, [=] { memcpy((void*)d, p, n); }); }
API Result cuMemcpyDtoHAsync_v2(void* p, Address d, size_t n, void* s) { LOCKED; copies++; return host(s, [=] { memcpy(p, (void*)d, n); }); }
API Result cuMemcpyDtoDAsync_v2(Address d, Address p, size_t n, void* s) { LOCKED; copies++; return host(s, [=] { memmove((void*)d, (void*)p, n); }); }
API Result cuMemsetD8Async(Address d, unsigned char v, size_t n, void* s) { LOCKED; return host(s, [=] { memset((void*)d, v, n); }); }
API Result cuMemsetD8_v2(Address d, unsigned char v, size_t n) { LOCKED; NOT_IN_CAPTURE; run(idle); memset((void*)d, v, n); return SUCCESS; }

API Result cuLaunchHostFunc(void* s, void (*run)(void*), void* with) { LOCKED; return host(s, [=] { run(with); }); }

API Result cuModuleLoadData(void** m, const void* image) {
    const unsigned char* p = (const unsigned char*)image;
    // Machine code for CUDA (EM_CUDA), for the compute capability that this device says it has.
    if (memcmp(p, "\177ELF", 4) || p[18] != 190) return INVALID_IMAGE;
    unsigned flags;
    memcpy(&flags, p + 48, 4);
    if ((flags & 0xff) != 87) return NO_BINARY;
    uint64_t sections, programs;
    uint16_t size, count, psize, pcount;
    memcpy(&programs, p + 32, 8), memcpy(&sections, p + 40, 8);
    memcpy(&psize, p + 54, 2), memcpy(&pcount, p + 56, 2), memcpy(&size, p + 58, 2), memcpy(&count, p + 60, 2);
    size_t bytes = std::max(sections + (size_t)size * count, programs + (size_t)psize * pcount);
    *m = new Module{std::string((const char*)p, bytes)};
    return SUCCESS;
}
API Result cuModuleUnload(void* m) { delete (Module*)m; return SUCCESS; }
API Result cuModuleGetFunction(void** f, void* m, const char* name) {
    // The image must have it too: what is tested here is what was built for the device.
    if (((Module*)m)->image.find(std::string(".text.") + name + '\0') == std::string::npos) return NOT_FOUND;
    for (auto& kernel : table()) if (!strcmp(kernel.name, name)) { *f = new Function{kernel}; return SUCCESS; }
    return NOT_FOUND;
}
API Result cuFuncGetAttribute(int* v, int, void*) { *v = 0; return SUCCESS; }
API Result cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, void* s, void** arguments, void**) {
    LOCKED;
    if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024) return INVALID_VALUE;
    if (!of(s)->captured) launches++;
    sim::Named& kernel = ((Function*)f)->kernel;
    Op op{Op::KERNEL};
    op.run = kernel.bind(arguments);
    op.blocks = {gx, gy, gz};
    op.threads = {bx, by, bz};
    op.exclusive = kernel.exclusive;
    return give(s, std::move(op));
}

API Result cuStreamBeginCapture_v2(void* s, int) { LOCKED; of(s)->captured = new Graph; return SUCCESS; }
API Result cuStreamEndCapture(void* s, void** g) { LOCKED; *g = of(s)->captured; of(s)->captured = nullptr; return SUCCESS; }
API Result cuStreamIsCapturing(void* s, int* c) { LOCKED; *c = of(s)->captured ? 1 : 0; return SUCCESS; }
API Result cuGraphInstantiateWithFlags(void** x, void* g, unsigned long long) { *x = new Graph(*(Graph*)g); return SUCCESS; }
API Result cuGraphUpload(void*, void*) { return SUCCESS; }
API Result cuGraphLaunch(void* x, void* s) {
    LOCKED;
    launches++;
    for (Op op : *(Graph*)x) give(s, std::move(op));
    return SUCCESS;
}
API Result cuGraphDestroy(void* g) { delete (Graph*)g; return SUCCESS; }
API Result cuGraphExecDestroy(void* x) { LOCKED; run(idle); delete (Graph*)x; return SUCCESS; }

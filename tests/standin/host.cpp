// The scheduler of host.h: fibers, meetings of lanes, barriers, the seeded choice of the next lane, and
// the values of memory that each lane sees.
#include "host.h"

namespace sim {

Block* block = nullptr;
uint64_t progress = 0, blocks = 0;
bool racing = false;
static uint64_t state = 1, steps = 0;
static Context scheduler;

void seed(uint64_t seed) { state = seed * 2 + 1; }

uint64_t random() {  // SplitMix64
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

void fail(const char* what, unsigned a, unsigned b) {
    fprintf(stderr, "stand-in GPU: ");
    fprintf(stderr, what, a, b);
    fprintf(stderr, "\n");
    abort();
}

#if defined(__x86_64__)
extern "C" void sim_switch(void** save, void* to);
asm(".text\n.globl sim_switch\nsim_switch:\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  mov %rsp, (%rdi)\n  mov %rsi, %rsp\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n  ret\n");
static void switch_to(Context& from, Context& to) { sim_switch(&from.sp, to.sp); }
#else
static void switch_to(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#endif

constexpr size_t STACK = 64 << 10;
static std::vector<char*> stacks;

void yield() {
    end_writes();
    switch_to(block->current->context, scheduler);
}

static void leave(Warp& warp) {
    for (auto& m : warp.meetings)
        for (int turn = 0; turn < 2; turn++)
            if (m->arrived[turn] && (m->arrived[turn] & warp.alive) == (m->mask & warp.alive)) {
                m->who[turn] = m->arrived[turn];
                m->arrived[turn] = 0;
                m->met++;
            }
}

static void pass_barrier(Block& b) {
    if (b.at_barrier == b.alive) b.at_barrier = 0, b.barriers++;
}

static Warp& warp_here() { return block->warps[block->current->warp]; }

// Lets other lanes or warps run, possibly for long.
static void pause() {
    unsigned chance = racing ? random() % 512 : 512;
    if (chance >= 32) return;
    Fiber& me = *block->current;
    if (chance < 8) me.wakes = steps + random() % 512;
    if (chance == 0)
        for (Fiber& f : block->fibers) if (f.warp == me.warp) f.wakes = me.wakes;
    yield();
}

template <class Words, class At>
static auto find(Words& words, At at) {
    return std::find_if(words.begin(), words.end(), [at](auto& word) { return word.first == at; });
}

static void perform(std::pair<uint32_t*, uint32_t> write) { *(volatile uint32_t*)write.first = write.second; }

static void perform_all(Warp& warp) {
    for (auto& write : warp.written) perform(write);
    warp.written.clear();
}

uint32_t load(const uint32_t* at) {
    pause();
    count_bus(at, 4, false);
    auto& written = warp_here().written;
    auto mine = find(written, at);
    if (mine != written.end()) return mine->second;
    uint32_t now = *(const volatile uint32_t*)at;
    if (!racing) return now;
    auto& seen = block->current->seen;
    auto before = find(seen, at);
    if (before == seen.end()) return seen.emplace_back(at, now).second;
    return random() % 2 ? before->second : before->second = now;
}

void store(uint32_t* at, uint32_t value) {
    pause();
    count_bus(at, 4, true);
    settle(at);
    if (racing && random() % 2) warp_here().written.emplace_back(at, value);
    else perform({at, value});
}

void settle(const void* at) {
    auto& written = warp_here().written;
    auto write = find(written, (const uint32_t*)at);
    if (write != written.end()) perform(*write), written.erase(write);
    unsigned first = block->current->warp * 32, end = std::min<unsigned>(first + 32, block->fibers.size());
    for (unsigned i = first; i < end; i++) {
        auto& seen = block->fibers[i].seen;
        auto before = find(seen, (const uint32_t*)at);
        if (before != seen.end()) seen.erase(before);
    }
}

void fence() {
    pause();
    perform_all(warp_here());
    block->current->seen.clear();
    block->current->fenced = true;
    yield();
}

void met(bool fenced) {
    if (fenced) block->current->seen.clear();
    block->current->fenced = false;
}

void synced(uint32_t mask) {
    Fiber& me = *block->current;
    uint32_t alive = block->warps[me.warp].alive;
    // No kernel synchronises a part of a warp, so one count for all lanes is enough.
    if ((mask & alive) != alive) fail("a __syncwarp of mask %08x, and the warp has lanes %08x", mask, alive);
    me.syncs++;
}

void* shared(size_t bytes) {
    if (block->shared.empty()) {
        block->shared.resize((bytes + 23) / 8, 0xa5a5a5a5a5a5a5a5);
        // Aligned to 16 bytes, as on a GPU.
        block->shared_at = (char*)(((size_t)block->shared.data() + 15) & ~(size_t)15);
        block->shared_bytes = bytes;
        block->words.resize((bytes + 3) / 4);
    }
    return block->shared_at;
}

// Never returns, so its frame must hold nothing that AddressSanitizer would leave marked.
__attribute__((no_sanitize_address, noinline)) static void run_fiber() {
    block->grid->body();
    end_writes();
    Fiber* me = block->current;
    me->done = true;
    block->alive--;
    Warp& warp = block->warps[me->warp];
    warp.alive &= ~(1u << me->lane);
    if (!warp.alive) perform_all(warp);
    leave(warp);
    if (block->alive) pass_barrier(*block);
    progress++;
    for (;;) yield();
}

static void prepare(Fiber& fiber) {
    if (stacks.empty()) stacks.push_back((char*)malloc(STACK));
    fiber.stack = stacks.back();
    stacks.pop_back();
#if defined(__x86_64__)
    // The function is entered as if called: the stack is 8 bytes off a multiple of 16.
    void** top = (void**)(fiber.stack + STACK);
    *--top = nullptr;
    *--top = (void*)run_fiber;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.context.sp = top;
#else
    getcontext(&fiber.context.context);
    fiber.context.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.context.uc_stack.ss_size = STACK;
    fiber.context.context.uc_link = nullptr;
    makecontext(&fiber.context.context, run_fiber, 0);
#endif
}

Meeting& meet(uint32_t mask, uint64_t value, unsigned& turn) {
    end_writes();
    Fiber* me = block->current;
    Warp& warp = block->warps[me->warp];
    uint32_t bit = 1u << me->lane;
    if (!(mask & bit)) fail("lane %u takes part in a warp operation whose mask %08x leaves it out", me->lane, mask);
    Meeting* m = nullptr;
    for (auto& other : warp.meetings)
        if (other->mask == mask) m = other.get();
    if (!m) {
        warp.meetings.push_back(std::make_unique<Meeting>());
        m = warp.meetings.back().get();
        m->mask = mask;
        for (auto& t : m->turns) t = m->met;
    }
    uint32_t number = m->turns[me->lane]++;
    turn = number & 1;
    m->slots[turn][me->lane] = value;
    m->arrived[turn] |= bit;
    progress++;
    if ((m->arrived[turn] & warp.alive) == (mask & warp.alive)) {
        m->who[turn] = m->arrived[turn];
        m->arrived[turn] = 0;
        m->met++;
    }
    while (m->met == number) yield();
    return *m;
}

void barrier() {
    end_writes();
    Block* b = block;
    perform_all(warp_here());
    b->current->seen.clear();
    unsigned before = b->barriers;
    b->at_barrier++;
    progress++;
    pass_barrier(*b);
    while (b->barriers == before) yield();
    b->current->syncs++;
    b->current->barriers++;
}

std::unique_ptr<Grid> begin(std::function<void()> body, dim3 blocks, dim3 threads, bool exclusive) {
    auto grid = std::make_unique<Grid>();
    grid->body = std::move(body);
    grid->blocks = blocks;
    grid->threads = threads;
    grid->exclusive = exclusive;
    grid->order.resize(blocks.x * blocks.y * blocks.z);
    for (size_t i = 0; i < grid->order.size(); i++) grid->order[i] = i;
    for (size_t i = grid->order.size(); i > 1; i--) std::swap(grid->order[i - 1], grid->order[random() % i]);
    return grid;
}

static void begin_block(Grid& grid) {
    unsigned i = grid.order.back(), threads = grid.threads.x * grid.threads.y * grid.threads.z;
    grid.order.pop_back();
    auto b = std::make_unique<Block>();
    b->grid = &grid;
    b->index = {i % grid.blocks.x, i / grid.blocks.x % grid.blocks.y, i / (grid.blocks.x * grid.blocks.y)};
    b->alive = threads;
    b->fibers.resize(threads);
    b->warps.resize((threads + 31) / 32);
    for (unsigned t = 0; t < threads; t++) {
        Fiber& f = b->fibers[t];
        f.thread = {t % grid.threads.x, t / grid.threads.x % grid.threads.y, t / (grid.threads.x * grid.threads.y)};
        f.lane = t & 31;
        f.warp = t >> 5;
        b->warps[f.warp].alive |= 1u << f.lane;
        prepare(f);
    }
    b->number = ++blocks;
    grid.resident.push_back(std::move(b));
}

// Runs lanes of a warp until each has yielded: all lanes, or some, so that others see the work of half
// a warp.
static void run_warp(Block& b, unsigned warp) {
    unsigned from = warp * 32, lanes = std::min<unsigned>(32, b.fibers.size() - from), first = random() % lanes;
    unsigned count = random() % 4 ? lanes : 1 + random() % lanes;
    for (unsigned i = 0; i < count; i++) {
        Fiber& f = b.fibers[from + (first + i) % lanes];
        if (f.done || f.wakes > steps) continue;
        block = &b;
        b.current = &f;
        switch_to(scheduler, f.context);
    }
    block = nullptr;
}

void step(Grid& grid) {
    steps++;
    size_t most = grid.exclusive ? 1 : 3;
    while (grid.resident.size() < most && !grid.order.empty()) begin_block(grid);
    size_t at = random() % grid.resident.size();
    Block& b = *grid.resident[at];
    unsigned warps = b.warps.size(), warp = random() % warps;
    while (!b.warps[warp].alive) warp = (warp + 1) % warps;
    // In a deadlock no warp of the block makes progress.
    uint64_t before = progress;
    run_warp(b, warp);
    auto& written = b.warps[warp].written;
    if (!written.empty() && random() % 16 == 0) {
        std::swap(written.back(), written[random() % written.size()]);
        perform(written.back());
        written.pop_back();
    }
    static unsigned idle = 0;
    idle = progress == before ? idle + 1 : 0;
    if (idle > 100000) fail("deadlock: no thread of the resident blocks makes progress");
    if (b.alive) return;
    for (Fiber& f : b.fibers) stacks.push_back(f.stack);
    grid.resident.erase(grid.resident.begin() + at);
}

}  // namespace sim

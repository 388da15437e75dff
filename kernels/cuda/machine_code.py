"""Reads the disassembled kernels and counts the instructions, fences and loads of every kernel.
Also counts the instructions a warp issues for one key of `query_tables` where every row is cached.

The count follows one path through the kernel's control flow. This path is the shortest one that
loads the headers and the rows. Where rows are written one by one, the path also stores them.
Whatever only a missing row or an unfinished use count needs is not on that path. Predicated
instructions count, executed or not. The waits of a warp for rows are counted too. A warp waits
where an instruction reads a register whose load is under way."""
import re

# Each of these occurs in only one part of `query_tables` (prelude.cuh). They are the load of a
# header, the second half of a wide tag, a factor of the 64-bit hash, and U4's mask of codes.
HEADER = "LDG.E.128.STRONG.GPU"
HIGH_TAG, HASH, MASK = "LDG.E.STRONG.GPU", "-0x3b314602", "0xf0f0f0f"
BITS = {"f32": 32, "f16": 16, "u8": 8, "u4": 4}
# Columns that a lane has of a row (pool.cuh), and the loads of a lane for one row: of rows that are
# written one by one, as f32 and as f16, and of rows that are pooled.
COLUMNS = {"f32": 4, "f16": 8, "u8": 16, "u4": 16}
LISTED_LOADS = {
    "f32": {"f32": 1, "f16": 2, "u8": 5, "u4": 5}, "f16": {"f32": 1, "f16": 2, "u8": 5, "u4": 3}
}
POOLED_LOADS = {"f32": 1, "f16": 2, "u8": 5, "u4": 3}
# Figures of one multiprocessor of an H100. ISSUE_RATE is the instructions a cycle that can be
# reached. CONVERSION is the cycles of a warp's conversion. LATENCY is the cycles of a load from
# memory (0.65 us at 1.755 GHz). MEMORY is the bytes of memory a cycle (3.35 TB/s).
ISSUE_RATE, CONVERSION, LATENCY, MEMORY = 2.4, 2, 1140, 14.46
# Shared memory of one multiprocessor, less 1 KiB that each block takes, in KiB.
SHARED_KIB = {"sm_80": 160, "sm_86": 97, "sm_87": 160, "sm_89": 97, "sm_90": 222}
WARPS_MAX = {"sm_80": 64, "sm_86": 48, "sm_87": 48, "sm_89": 48, "sm_90": 64}


class Block:
    def __init__(self, start):
        self.start, self.ops, self.texts, self.to = start, [], [], []

    def count(self, op):
        return self.ops.count(op)


def kernels(sass):
    """Returns the lines of each kernel of a disassembly."""
    found, lines = {}, None
    for line in sass.splitlines():
        start = re.match(r"\.text\.(\w+):", line)
        if start:
            lines = found.setdefault(start.group(1), [])
        elif lines is not None:
            lines.append(line)
    return found


def instructions(lines):
    """Yields labels as (label, None), and instructions as (None, text)."""
    for line in lines:
        label = re.match(r"(\.L_x_\d+):", line)
        text = re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", line)
        if label:
            yield label.group(1), None
        elif text:
            yield None, text.group(1)


def operation(text):
    """Returns the operation of an instruction. A call of a label of the kernel is a branch."""
    op = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
    return "BRA" if op == "CALL.REL.NOINC" and "`(.L_x" in text else op


def blocks_of(lines):
    """Returns the basic blocks of a kernel. All lanes of a warp agree: no branch is for lanes that
    diverge (`BRA.DIV`), and one for lanes that agree is taken (`BRA.CONV`)."""
    items = list(instructions(lines))
    used = {m.group(1) for _, t in items if t and operation(t) in ("BRA", "BRA.CONV")
            for m in re.finditer(r"`\((\.L_x_\d+)\)", t)}
    blocks, at = [Block(None)], {}
    for label, text in items:
        if label in used:
            if blocks[-1].ops:
                blocks.append(Block(label))
            at[label] = len(blocks) - 1
        if text is None:
            continue
        blocks[-1].ops.append(operation(text))
        blocks[-1].texts.append(text)
        if blocks[-1].ops[-1] in ("BRA", "BRA.CONV", "EXIT", "BRX", "RET.REL.NODEC"):
            blocks.append(Block(None))
    for i, block in enumerate(blocks):
        if not block.ops:
            continue
        last, text = block.ops[-1], block.texts[-1]
        if last == "BRX":
            raise ValueError("a jump table: its targets are unknown")
        if last in ("BRA", "BRA.CONV"):
            block.to.append(at[re.search(r"`\((\.L_x_\d+)\)", text).group(1)])
        always = not text.startswith("@") and not re.match(r"BRA\s+!?U?P", text)
        if (
            not (last in ("BRA", "BRA.CONV", "EXIT", "RET.REL.NODEC") and always)
            and i + 1 < len(blocks)
        ):
            block.to.append(i + 1)
    return blocks


def loops_of(blocks):
    """Returns the natural loops, as sets of block numbers by header."""
    reached, order, stack = {0}, [], [(0, iter(blocks[0].to))]
    while stack:
        node, rest = stack[-1]
        following = next((n for n in rest if n not in reached), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            reached.add(following)
            stack.append((following, iter(blocks[following].to)))
    order.reverse()
    before = {n: [] for n in order}
    for n in order:
        for to in blocks[n].to:
            before[to].append(n)
    everything = set(order)
    dominators = {n: set(everything) for n in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for n in order[1:]:
            new = set.intersection(*(dominators[p] for p in before[n])) | {n}
            changed |= new != dominators[n]
            dominators[n] = new
    loops = {}
    for n in order:
        for header in blocks[n].to:
            if header not in dominators[n]:
                continue
            body, work = loops.setdefault(header, {header}), [n]
            while work:
                node = work.pop()
                if node not in body:
                    body.add(node)
                    work.extend(before[node])
    return loops


def shortest(blocks, loops, header, inner, needed):
    """Returns the instructions of the shortest way once round a loop, without those of the loop
    `inner`, which the way passes. `needed`: sets of blocks; the way passes one block of each."""
    body = loops[header]
    inside = loops[inner] if inner is not None else set()
    needed = [n - inside for n in needed if not n & inside] + ([{inner}] if inside else [])
    name = {b: inner if b in inside else b for b in body}
    goal = (1 << len(needed)) - 1

    def passes(node):
        return sum(1 << i for i, n in enumerate(needed) if node in n)

    def weight(node):
        return 0 if node == inner else len(blocks[node].ops)

    best, work, ends = {}, [], []
    start = (name[header], passes(name[header]))
    best[start] = weight(start[0])
    work.append(start)
    # Every step costs something, so a state improves a finite number of times.
    while work:
        state = work.pop()
        node, mask = state
        members = inside if node == inner else [node]
        for to in {t for m in members for t in blocks[m].to}:
            if to == header and header not in inside:
                if mask == goal:
                    ends.append(best[state])
                continue
            if to not in body or name[to] == node:
                continue
            new = (name[to], mask | passes(name[to]))
            cost = best[state] + weight(name[to])
            if cost < best.get(new, 1 << 30):
                best[new] = cost
                work.append(new)
    if not ends:
        raise ValueError("a loop of query_tables has no way past its loads")
    return min(ends)


def registers_of(operand, count):
    """Returns the registers of an operand, `count` from the first on."""
    found = re.search(r"\bR(\d+)\b", operand)
    return set(range(int(found.group(1)), int(found.group(1)) + count)) if found else set()


def waits_of(texts):
    """Returns how often the instructions wait for loads: each time, for all that are under way."""
    waits, loading = 0, set()
    for text in texts:
        op, _, rest = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
        operands = rest.split(", ")
        words = 4 if ".128" in op else 2 if ".64" in op else 1
        stores = op.startswith("ST")
        read = set()
        for i, operand in enumerate(operands if stores else operands[1:]):
            wide = words if stores and i == 1 else 2 if ".64" in operand else 1
            read |= registers_of(operand, wide)
        if read & loading:
            waits += 1
            loading = set()
        if op.startswith("LDG"):
            loading |= registers_of(operands[0], words)
    return waits


class Path:
    """The hot path of one codec: the costs of its loops, the innermost first.

    A path has one of three kinds. `list`: rows are written one by one, as `out` (f32 or f16).
    `together`: the warp finds the keys of several bags, then pools them. `apart`: each team finds
    the keys of its own bag.
    """

    def __init__(self, blocks, loops, codec, group):
        self.codec, self.group = codec, group
        body = loops[group]
        loads = {b for b in body if any(is_row_load(op) for op in blocks[b].ops)}
        ops = {op for b in body for op in blocks[b].ops}
        self.out = "f16" if any(is_narrowing(op) for op in ops) else "f32"
        stores = {b for b in body if any(op.startswith("STG") for op in blocks[b].ops)}
        count = sum(is_row_load(op) for b in body for op in blocks[b].ops)
        self.rows = count // (LISTED_LOADS[self.out] if stores else POOLED_LOADS)[codec]
        texts = [text for b in sorted(body) for text in blocks[b].texts]
        self.waits = waits_of(texts)
        self.conversions = sum(operation(text).startswith("I2F") for text in texts)
        nest = sorted((h for h in loops if body <= loops[h]), key=lambda h: len(loops[h]))
        self.costs, at = {}, None
        for tags in ("indexed", "hashed"):
            costs, inner = [], None
            for header in nest:
                needed = [{b} for b in loads]
                if inner is not None:
                    own = loops[header] - loops[inner]
                    probes = at is None and any(HEADER in blocks[b].ops for b in own)
                    at = len(costs) if probes else at
                    # The rare path, which is further out, probes too.
                    needed = self.needed(blocks, own, tags) if at == len(costs) else []
                else:
                    needed += [{b} for b in stores]
                costs.append(shortest(blocks, loops, header, inner, needed))
                inner = header
            self.costs[tags] = costs
        self.kind = "list" if stores else "apart" if at == 1 else "together"

    @staticmethod
    def needed(blocks, own, tags):
        """Returns what a way through the blocks `own`, which find rows, must pass."""
        def having(op):
            return {b for b in own if op in blocks[b].ops}

        hashes = {b for b in own if any(HASH in t for t in blocks[b].texts)}
        return (
            [{b} for b in having(HEADER)] + ([having(HIGH_TAG), hashes] if tags == "hashed" else [])
        )

    def serves(self, lanes, keys_of_bag):
        """Whether the kernel pools such bags on this path (`are_together` of query.cuh)."""
        return (
            self.kind == "list"
            or (self.kind == "together") == (lanes >= 16 and keys_of_bag <= lanes)
        )

    def tile(self, tags, lanes, keys_of_bag):
        """Returns the instructions, groups of rows, keys and dependent loads of a warp's
        tile: of 32 keys, or of 32 bags. A warp waits for its keys, for their headers, and
        for groups of rows."""
        costs, teams = self.costs[tags], 32 // lanes
        if self.kind == "list":
            group, piece, chunk, tile = costs
            groups = -(-32 // (self.rows * teams))
            return groups * group + piece + chunk + tile, groups, 32, 2 + groups * self.waits
        if self.kind == "together":
            group, piece, step, a_round, tile = costs
            bags = 32 // keys_of_bag
            steps = -(-bags // teams)
            groups = steps * -(-keys_of_bag // self.rows)
            rounds = -(-32 // bags)
            instructions = groups * group + steps * (piece + step) + a_round
            return (rounds * instructions + tile, rounds * groups, 32 * keys_of_bag,
                    rounds * (2 + groups * self.waits))
        group, chunk, piece, bags, tile = costs
        chunks = -(-keys_of_bag // lanes)
        groups = -(-min(keys_of_bag, lanes) // self.rows)
        a_round = chunks * (groups * group + chunk) + piece + bags
        return (lanes * a_round + tile, lanes * chunks * groups, 32 * keys_of_bag,
                lanes * chunks * (2 + groups * self.waits))

    def per_key(self, tags, lanes, keys_of_bag):
        instructions, _, keys, _ = self.tile(tags, lanes, keys_of_bag)
        return instructions / keys

    def keys_a_cycle(self, lanes, keys_of_bag, warps):
        """Returns the keys that a multiprocessor takes in one cycle, memory aside. The warps take
        turns to issue and to convert, and each waits for its loads."""
        instructions, groups, keys, trips = self.tile("indexed", lanes, keys_of_bag)
        work = max(instructions / ISSUE_RATE, groups * self.conversions * CONVERSION)
        return warps * keys / (trips * LATENCY + work * warps)


def is_narrowing(op):
    return op.startswith("F2FP")


def is_row_load(op):
    return op.startswith("LDG") and op.endswith("CONSTANT") and "NA" not in op


def codec_of(blocks, body):
    """Returns the codec that a loop over rows decodes."""
    ops = {operation(t).split(".")[0] for b in body for t in blocks[b].texts}
    if "I2F" in ops:
        return "u4" if any(MASK in t for b in body for t in blocks[b].texts) else "u8"
    return "f16" if "HADD2" in ops else "f32"


def hot_paths(lines):
    """Returns the hot paths of `query_tables`."""
    blocks = blocks_of(lines)
    loops = loops_of(blocks)
    paths = []
    for header, body in loops.items():
        innermost = not any(h != header and h in body for h in loops)
        if innermost and any(is_row_load(op) for b in body for op in blocks[b].ops):
            stores = {op for b in body for op in blocks[b].ops if op.startswith("STG")}
            # Outputs of any form, with stores of single columns, are not counted.
            if "STG.E" not in stores:
                paths.append(Path(blocks, loops, codec_of(blocks, body), header))
    return sorted(paths, key=lambda p: (list(BITS).index(p.codec), p.kind, p.out))


def warps_of(arch, registers, shared, threads):
    """Returns the warps that one multiprocessor runs at the same time."""
    warps = 65536 // (-(-registers // 8) * 8 * 32)
    blocks = min(
        min(warps, WARPS_MAX[arch]) // (threads // 32), SHARED_KIB[arch] * 1024 // max(shared, 1)
    )
    return blocks * (threads // 32)


def row_bytes_of(codec, dim):
    return dim * BITS[codec] // 8 + (4 if codec in ("u8", "u4") else 0)


def query_lines(arch, lines, warps):
    """Yields the report's lines about the hot paths of `query_tables`."""
    paths = hot_paths(lines)
    if len(paths) != 16:
        raise ValueError(f"{len(paths)} hot loops of query_tables instead of 16")
    for path in paths:
        kind = (
            "8 rows a bag" if path.kind != "list"
            else "one row a bag" + " as f16" * (path.out == "f16")
        )
        bytes_of_column = {"f32": 4, "f16": 2}[path.out]
        for data_bytes in (64, 128, 256, 512):
            dim = data_bytes * 8 // BITS[path.codec]
            lanes = max(1 << (-(-dim // COLUMNS[path.codec]) - 1).bit_length(), 4)
            if lanes > 32 or not path.serves(lanes, 8):
                continue
            row_bytes = row_bytes_of(path.codec, dim)
            indexed, hashed = (path.per_key(t, lanes, 8) for t in ("indexed", "hashed"))
            keys = path.keys_a_cycle(lanes, 8, warps)
            # A lookup reads a key, a header and a row, and writes its part of the output.
            read, written = (
                8 + 64 + row_bytes, bytes_of_column * dim / (1 if path.kind == "list" else 8)
            )
            share = 100 * keys * (read + written) / MEMORY
            yield (f"query_tables {arch} {path.codec} dim {dim} ({row_bytes} bytes) {kind}: "
                   f"{indexed:.1f} instructions a key, {hashed:.1f} hashed, "
                   f"{keys * read * LATENCY / 1024:.1f} KiB in flight, "
                   f"{share:.0f} % of the memory")


def loop_fences(lines):
    """Returns the fences, and the loads of parameters, inside the loops over keys."""
    blocks = blocks_of(lines)
    loops = loops_of(blocks)
    found = set()
    for path in hot_paths(lines):
        nest = sorted((h for h in loops if path.group in loops[h]), key=lambda h: len(loops[h]))
        # The outermost loop is over tiles.
        for header in nest[:-1]:
            found |= loops[header]
    ops = [op for b in found for op in blocks[b].ops]
    return sum(is_fence(op) for op in ops)


def is_fence(op):
    return op.startswith(("MEMBAR", "CCTL", "ERRBAR"))


def counts(lines):
    """Returns the counts of one kernel: instructions, fences, loads of memory that may change."""
    ops = [operation(t) for _, t in instructions(lines) if t]
    plain = sum(op.startswith("LDG") and "CONSTANT" not in op and "STRONG" not in op for op in ops)
    return len(ops), sum(is_fence(op) for op in ops), plain

"""Cuts a captured graph at its lookups: sparse features in front, the dense network behind.

A lookup whose row numbers are columns of the batch becomes a vector that the car looks up. Masks of
a column become masks of its feature. What else the network reads of the batch becomes dense.
"""

import operator

import torch

from .elements import (
    Column, Part, compared_with, elements_of, integer_made, overlaps, runs_of, samples_axis
)
from .graph import ATEN, FILLED, LEAF, ROW, Lookup, op_name, source_line
from .rewrites import (
    bucket_of, filled_by_mask, in_range, put_in_each, row_of_each, same_of_each, scattered,
    subtracted
)

KEPT_VALUES_MAX = 1 << 20  # values of a table that stays in the network because of its row numbers


class Cut:
    """What a captured graph becomes: `columns`, `parts` of each lookup, `dense` columns, `masks`,
    and `network`, the graph behind them."""

    def __init__(self, followed, leaves, calls, names, note):
        self.followed, self.leaves, self.names, self.note = followed, leaves, names, note
        self.columns, self.tables, self.parts, self.kept = [], {}, {}, {}
        self.renamed = {}  # further features of a column: their names, and the column's
        self.lengths = {}  # nodes with the numbers of keys of a feature
        self.positions = {}  # lookups of one key of a bag: where a position is computed
        self.puts = {}  # lookups with a mask in `positions`: the row that it puts, and where
        self.outputs = next(n for n in followed.graph.nodes if n.op == "output").args[0]
        given = iter(followed.placeholders[len(leaves):])
        self.calls = [(call, [next(given) for _ in call.tensors]) for call in calls]
        self.find_lookups()
        self.find_reads()
        self.build()

    # --- lookups ---

    def needed(self, stop):
        """Returns the nodes that the outputs need, in the graph's order. `stop` ends a search."""
        seen, rest = set(), list(self.outputs)
        while rest:
            node = rest.pop()
            if node not in seen:
                seen.add(node)
                rest += [] if stop(node) else node.all_input_nodes
                rest += [self.positions[node]] if node in self.positions else []
        return [node for node in self.followed.graph.nodes if node in seen]

    def table_name(self, node):
        """Returns the name of a table, and keeps its rows `[rows, dim]`."""
        rows = self.followed.value[node]
        for name, known in self.tables.items():
            if known.data_ptr() == rows.data_ptr() and known.shape == rows.shape and (
                    known.stride() == rows.stride()):
                return name
        name = str(node.target) if node.op == "get_attr" else node.name
        name = name.removeprefix("model.").removesuffix(".weight")
        self.tables[name] = rows.detach().reshape(len(rows), -1)
        return name

    def find_lookups(self):
        found = []
        for node in self.needed(lambda node: self.followed.lookup_of(node) is not None):
            lookup = self.followed.lookup_of(node)
            if lookup is None:
                continue
            if lookup.weights is not None:
                raise ValueError(
                    f"{source_line(node)}: per_sample_weights beside offsets need a "
                    "KeyedJaggedTensor; multiply the rows of an nn.Embedding instead"
                )
            if lookup.bounds is not None and not self.followed.is_constant(lookup.bounds):
                self.cut_jagged(lookup)
                continue
            elements = elements_of(self.followed, lookup)
            if elements is None:
                elements = self.chosen(lookup)
            if elements is None:
                elements = self.put_by_mask(lookup)
            if elements is None:
                self.keep(lookup)
            else:
                found.append((lookup, runs_of(elements, self.names.separate)))
        alone = overlaps([
            (run[0].leaf, tuple(one.column for one in run)) for _, runs in found for run in runs
        ])
        for lookup, runs in found:
            self.cut_lookup(lookup, runs, alone)
        for call, nodes in self.calls:
            self.cut_call(call, *nodes)
        self.bound_sizes()
        for number, column in enumerate(self.columns):  # two features never get one name
            same = [one for one in self.columns[:number] if one.name == column.name]
            if same:
                first, column.name = column.name, f"{column.name}_{len(same) + 1}"
                self.note(
                    f"the model takes `{first}` a second time, with other bags, pooling or keys: a "
                    f"request sends `{column.name}` too"
                )
                if column.call is None and column.leaf == same[0].leaf:
                    self.renamed[column.name] = first

    def chosen(self, lookup):
        """Returns the elements of a bag of which the network chooses some by position, such as the
        last key: then all rows of the bag are looked up, and the network chooses among them."""
        node = lookup.index
        while op_name(node) in ("squeeze", "unsqueeze", "view", "reshape", "_to_copy", "to"):
            node = node.args[0]
        bag, position = self.gathered(node)
        if bag is None or not self.moved(bag):
            return None
        elements = elements_of(self.followed, Lookup(lookup.node, lookup.table, bag))
        if elements is None or len(runs_of(elements, self.names.separate)) > 1:
            return None
        self.positions[lookup.node] = position
        return elements

    def put_by_mask(self, lookup):
        """Returns the elements of a lookup for some of whose keys a mask puts one row number: the
        network then puts that row."""
        if lookup.pooling is not None:
            return None  # a bag may leave the row out
        name, args = op_name(lookup.index), lookup.index.args
        constant = lambda one: not isinstance(one, torch.fx.Node) or self.followed.is_constant(one)
        if name == "masked_fill":
            keys, mask, row, where = *args, True
        elif name == "where" and len(args) == 3:
            where = constant(args[1])
            (mask, row, keys) = args if where else (args[0], args[2], args[1])
        elif name == "index_put" and self.fills_by_mask(lookup.index):
            keys, (mask,), row, where = *args[:3], True
        else:
            return None
        if not constant(row) or not isinstance(keys, torch.fx.Node):
            return None
        if self.followed.value[mask].dim() != self.followed.value[keys].dim():
            return None
        row = self.followed.value[row] if isinstance(row, torch.fx.Node) else row
        row = torch.as_tensor(row).flatten()
        if bool((row != row[:1]).any()) or self.axis_of(keys) or (
                self.followed.value[keys].shape != self.followed.value[lookup.index].shape):
            return None
        elements = elements_of(self.followed, Lookup(lookup.node, lookup.table, keys))
        if elements is not None:
            self.positions[lookup.node], self.puts[lookup.node] = mask, (int(row[0]), where)
        return elements

    def gathered(self, node):
        """Returns the keys and the positions of a choice of keys of each sample."""
        if op_name(node) == "index":
            position = None if None in node.args[1] else self.beside_samples(node)
            return (None, None) if position is None else (node.args[0], position)
        if op_name(node) != "gather" or self.followed.value[node].dim() != 2:
            return None, None
        bag, axis, position = node.args[:3]
        return (bag, position) if axis % 2 == 1 else (None, None)

    def beside_samples(self, node):
        """Returns the computed indices of `x[numbers of the samples, indices]`; None for any other
        index. `gather` can read at such indices, and ONNX has no better operator."""
        index = [one for one in node.args[1] if one is not None]
        if len(index) != 2 or node.args[1][0] is None or self.followed.is_constant(index[1]):
            return None
        samples, places = (self.followed.value[one] for one in index)
        count = len(self.followed.value[node.args[0]])
        if not self.followed.is_constant(index[0]) or places.dtype == torch.bool or (
                torch.broadcast_shapes(samples.shape, places.shape) != places.shape
                or len(places) % count):
            return None
        rows = samples.expand(places.shape).reshape(count, -1)
        return index[1] if bool((rows == torch.arange(count)[:, None]).all()) else None

    def takes_same_places(self, node):
        """Returns whether a node is `x[n, ..., places]`, with the numbers `n` of the samples on an
        axis of their own and constant places, as transformers read a mask."""
        index = node.args[1]
        if len(index) != 2 or None in index or not all(map(self.followed.is_constant, index)):
            return False
        samples, places = (self.followed.value[one] for one in index)
        count = torch.arange(len(self.followed.value[node.args[0]]))
        return (samples.dim() == places.dim() > 1 and len(samples) == len(count)
                and len(places) == 1 and torch.equal(samples.flatten(), count))

    def bound_sizes(self):
        """Ends each column's range of rows where that of the next column begins, for tables that
        hold the rows of several columns one after the other.

        A vector of constants that is added to different columns says so. Constants alone, as in
        `e(u) + e(u + 1)`, do not: any column may then reach all rows behind its constant.
        """
        whole = [one for one in self.columns if one.spread]
        for table in self.tables:
            ones = [one for one in self.columns if table in one.tables]
            places = [(one.leaf, place) for one in ones for place in one.columns]
            shifts = sorted({one.shift for one in ones})
            if not all(one in whole for one in ones) or len(set(places)) < len(places):
                continue
            for one in ones:
                more = [shift for shift in shifts if shift > one.shift]
                one.size = min([one.size, *(shift - one.shift for shift in more[:1])])

    def keep(self, lookup):
        """Leaves a lookup in the network, whose row numbers are computed."""
        rows = self.followed.value[lookup.table]
        if rows.numel() > KEPT_VALUES_MAX and integer_made(self.followed, lookup.index):
            inputs = ", ".join(f"`{self.leaves[one].name}`" for one in sorted(
                self.followed.needs[lookup.index]) if one < len(self.leaves))
            raise ValueError(
                f"{source_line(lookup.node)}: the row number of a table of {len(rows)} rows is "
                f"computed from {inputs}; give the row number as a column of the batch"
            )
        self.kept[lookup.node] = lookup

    def cut_lookup(self, lookup, runs, alone):
        table, parts = self.table_name(lookup.table), []
        split = [
            [one] if run[0].leaf in alone else run
            for run in runs for one in (run if run[0].leaf in alone else run[:1])
        ]
        for run in split:
            pooling = lookup.pooling or ("none" if len(run) > 1 else "sum")
            if len(split) > 1 and lookup.pooling is not None:
                raise ValueError(
                    f"{source_line(lookup.node)}: one bag of an EmbeddingBag has values of several "
                    "columns; look each column up by itself"
                )
            rows = len(self.followed.value[lookup.table])
            size = run[0].modulus or rows - run[0].shift
            skipped = skipped_by(lookup, run[0].shift)
            column = self.column(run, "sum" if len(run) == 1 else pooling, skipped, table)
            column.size = min(column.size or size, size)
            column.spread = column.spread or run[0].spread
            parts.append(Part(column, table, len(run)))
        self.parts[lookup.node] = parts

    def column(self, run, pooling, skipped, table):
        key = (run[0].leaf, tuple(one.column for one in run), run[0].shift, run[0].modulus, pooling)
        for known in self.columns:
            same = (known.leaf, known.columns, known.shift, known.modulus, known.pooling) == key
            if same and known.skipped == skipped:
                break
        else:
            known = Column(self.names.feature(key[0], key[1]), *key, skipped=skipped)
            self.columns.append(known)
        if table not in known.tables:
            known.tables.append(table)
        return known

    def cut_jagged(self, lookup):
        """Cuts an `embedding_bag` with offsets: its keys are one whole argument."""
        source, shift = self.followed.shift_of(lookup.index)
        if source is None or shift < 0:
            raise ValueError(
                f"{source_line(lookup.node)}: the keys of a bag must be an argument of the model, "
                "as it is or plus a constant"
            )
        place, table = self.followed.placeholders.index(source), self.table_name(lookup.table)
        column = Column(
            self.leaves[place].name, place, (), shift, None, lookup.pooling, None, [table], None,
            lookup, len(self.followed.value[lookup.table]) - shift,
            skipped=skipped_by(lookup, shift)
        )
        self.columns.append(column)
        self.parts[lookup.node] = [Part(column, table, 1)]

    def cut_call(self, call, node, lengths=None):
        self.tables[call.table] = call.weight
        for known in self.columns:
            same = known.call and known.call.feature == call.feature
            bags = (call.bags, call.weights, call.pooling)
            if same and (known.call.bags, known.call.weights, known.pooling) == bags:
                column = known
                break
        else:
            keys = call.output.shape[1] if call.pooling == "none" else 0
            column = Column(call.feature, -1, tuple(range(keys)), pooling=call.pooling, call=call)
            self.columns.append(column)
        column.tables.append(call.table)
        self.parts[node] = [Part(column, call.table, max(1, column.hotness))]
        if lengths is not None and lengths in self.needed(self.is_end):
            self.lengths[lengths] = column

    # --- what the network reads of the batch ---

    def moved(self, node):
        origin = self.followed.origin.get(node)
        return origin is not None and not isinstance(origin, list) and origin.moved

    def is_end(self, node):
        """Returns whether the network takes a node as it is: a vector, a constant or a read."""
        constant = self.followed.is_constant(node) and node not in self.followed.by_shape
        return node in self.parts or node in self.lengths or constant or self.moved(node)

    def find_reads(self):
        """Decides for each column that the network reads whether it is a mask or dense."""
        self.reads, uses = [], {}
        for node in self.needed(self.is_end):
            if not self.is_end(node):
                if not op_name(node).startswith("sym_size") and not self.fills(node):
                    self.reads += [(one, node) for one in node.all_input_nodes if self.moved(one)]
            elif node in self.positions and self.moved(self.positions[node]):
                self.reads.append((self.positions[node], node))
        self.reads += [(one, None) for one in self.outputs if self.moved(one)]
        owner = {
            (one.leaf, place): one for one in self.columns if one.call is None
            for place in one.columns
        }
        for node, user in self.reads:
            places = self.places(node)
            compared = compared_with(user, node, self.followed)
            for place in places:
                column = owner.get(place)
                if column is not None:
                    uses.setdefault(id(column), (column, set()))[1].add(compared)
        for column, values in uses.values():
            value = next(iter(values))
            # A car leaves the padding out of a bag that it pools, and the model may not.
            fits = column.keeps_rows or column.skipped == value
            if len(values) == 1 and value is not None and column.modulus is None and fits and (
                    0 <= value < column.size):
                column.padding = value
            else:
                self.note(
                    f"the network computes with the values of `{column.name}` themselves: a "
                    f"request sends them as dense features too, and they must be row numbers"
                )
        self.dense, self.masked = [], set()
        for node, user in self.reads:
            columns = [owner.get(place) for place in self.places(node)]
            compared = compared_with(user, node, self.followed)
            padded = all(one is not None and one.padding is not None for one in columns)
            if compared is not None and padded:
                self.masked.add((node, user))
            else:
                self.dense += self.places(node)
        self.dense = sorted(set(self.dense))
        self.owner = owner
        used = {leaf for leaf, _ in self.dense} | {one.leaf for one in self.columns}
        used |= {
            place for one in self.columns if one.jagged
            for place in self.followed.needs[one.jagged.bounds]
        }
        for place, leaf in enumerate(self.leaves):
            if place not in used:
                self.note(f"`{leaf.name}` does not reach the scores and is left out")

    def fills(self, node):
        """Returns whether a node makes a constant of the shape of a value of the batch."""
        return op_name(node) in FILLED and self.moved(node.args[0])

    def axis_of(self, node):
        """Returns the axis of the samples of a moved node, or of row numbers."""
        origin = self.followed.origin.get(node)
        is_one = origin is not None and not isinstance(origin, list)
        return samples_axis(origin.code, self.followed.samples) if is_one else 0

    def places(self, node):
        """Returns leaf and column of each value of one sample of a moved node."""
        code, count = self.followed.origin[node].code, self.followed.samples
        # The values may also be those of the samples one by one, `[samples * values]`.
        if not code.dim() or not code.numel():
            count = 1
        elif code.numel() % count:
            count = len(code)
        code = code.movedim(self.axis_of(node), 0) if code.dim() else code
        samples = code.reshape(count, -1)
        rows = torch.arange(len(samples)).reshape(-1, 1) * ROW
        if not bool((samples == samples[:1] + rows).all()):
            names = {self.leaves[int(one) // LEAF].name for one in samples[0]}
            raise ValueError(
                f"{source_line(node)}: `{', '.join(names)}`: the samples must be on the first axis "
                "and must not reach each other"
            )
        return [(value // LEAF, value % ROW) for value in samples[0].tolist()]

    # --- the network ---

    def build(self):
        self.graph, self.made, self.buffers = torch.fx.Graph(), {}, {}
        self.inputs = {}  # name -> width
        self.refs = {}
        if self.dense:
            self.inputs["dense"] = len(self.dense)
        for parts in self.parts.values():
            for part in parts:
                rows = self.tables[part.table]
                count = part.count if part.column.pooling == "none" else 1
                self.refs[f"emb_{reference(part)}"] = part
                self.inputs[f"emb_{reference(part)}"] = count * rows.shape[1]
        for column in self.columns:
            if column.padding is not None:
                self.inputs[f"mask_{column.name}"] = column.hotness
        self.inputs |= {f"length_{column.name}": 1 for column in self.lengths.values()}
        if not self.inputs:
            raise ValueError("the scores depend on no input")
        self.placeholders = {
            name: self.graph.placeholder(f"in_{number}") for number, name in enumerate(self.inputs)
        }
        self.samples = self.call(ATEN.sym_size.int, next(iter(self.placeholders.values())), 0)
        for node in self.needed(self.is_end):
            if not self.is_end(node):
                self.copy(node)
        outputs = [self.take(node, None) for node in self.outputs]
        outputs = [self.call(ATEN.view.default, one, [self.samples, -1]) for one in outputs]
        self.graph.output(tuple(outputs))
        self.graph.eliminate_dead_code()
        root = torch.nn.Module()
        for name, value in self.buffers.items():
            root.register_buffer(name, value)
        self.network = torch.fx.GraphModule(root, self.graph)

    def call(self, target, *args, **kwargs):
        return self.graph.call_function(target, args, kwargs)

    def copy(self, node):
        name, sizes = op_name(node), node.all_input_nodes
        if name.startswith(("_assert", "sym_constrain")):
            return
        if name.startswith("sym_size") and sizes[0] in self.followed.placeholders:
            place = self.followed.placeholders.index(sizes[0])
            if place < len(self.leaves) and not self.leaves[place].per_sample:
                raise ValueError(
                    f"{source_line(node)}: the network depends on the size of "
                    f"`{self.leaves[place].name}`, whose first axis is not the samples"
                )
            self.made[node] = self.samples
            return
        if self.fills(node):
            self.made[node] = self.filled(node, name)
            return
        if name == "squeeze":
            self.made[node] = self.squeeze(node)
            return
        if name in ("chunk", "split") and len(self.followed.value[node]) == 1:
            # Parts of a fixed size are those of the sample batch: a car has one whole batch.
            self.made[node] = [self.take(node.args[0], node)]
            return
        self.refuse_sizes_of_values(node, name)
        if node in self.kept:
            self.note_kept(self.kept[node])
        change = lambda one: self.take(one, node)
        target, args = self.rewritten(node, name)
        if target is not None:
            self.made[node] = self.call(target, *torch.fx.map_arg(args, change))
            return
        self.made[node] = self.graph.node_copy(node, change)

    def refuse_sizes_of_values(self, node, name):
        """Refuses an operation whose number of results follows from values of the batch."""
        masks = [one for one in node.all_input_nodes[1:] if (
            torch.is_tensor(self.followed.value[one])
            and self.followed.value[one].dtype == torch.bool)]
        if name.startswith(("nonzero", "masked_select", "unique")) or name == "index" and masks:
            raise ValueError(
                f"{source_line(node)}: how many values `{name}` gives follows from values of the "
                "batch: give each sample a fixed number, with torch.where, a mask or topk"
            )

    def rewritten(self, node, name):
        """Returns the function and the arguments that take the place of an operation which the car
        lacks; None for any other operation."""
        args, value = node.args, self.followed.value
        if name == "index":
            places = self.beside_samples(node)
            if places is None and self.takes_same_places(node):
                return same_of_each, (args[0], args[1][1])
            return (None, ()) if places is None else (
                row_of_each, (args[0], places, args[1].index(places)))
        if name == "index_put" and self.fills_by_mask(node):
            return filled_by_mask, (args[0], args[1][0], args[2])
        if name == "index_put":
            places = self.beside_samples(node) if value[args[0]].dim() == 2 else None
            return (None, ()) if places is None else (put_in_each, (args[0], places, *args[2:]))
        if name == "rsub" and isinstance(args[1], float) and not (
                value[args[0]].is_floating_point()):
            return subtracted, args[:2]
        if name in ("bucketize", "searchsorted"):
            given, edges = args[:2] if name == "bucketize" else args[1::-1]
            # Other boundaries for each sample, and options of an order, are left to ONNX.
            plain = value[edges].dim() == 1 and not set(node.kwargs) - {"right", "out_int32"}
            right = node.kwargs.get("right", False)
            return (bucket_of, (given, edges, right)) if plain else (None, ())
        if not name.startswith("scatter") or len(args) < 4:
            return None, ()
        how = node.kwargs.get("reduce", args[4] if len(args) > 4 else "set")
        how = "sum" if name == "scatter_add" or how == "add" else how
        whole, places = value[args[0]], value[args[2]]
        beside = lambda shape: [n for a, n in enumerate(shape) if a != args[1] % whole.dim()]
        fits = beside(whole.shape) == beside(places.shape) and node.kwargs.get("include_self", True)
        if isinstance(args[3], torch.fx.Node):
            fits = fits and value[args[3]].shape == places.shape
        is_known = how == "set" and self.followed.is_constant(args[2])
        if is_known or not fits or how not in ("set", "sum", "amax", "amin"):
            return None, ()
        return scattered, (*args[:4], how)

    def note_kept(self, lookup):
        rows = self.followed.value[lookup.table]
        self.note(
            f"{source_line(lookup.node)}: the network computes row numbers of a table of "
            f"{len(rows)} rows; the table stays in the network, {4 * rows.numel():,} bytes"
        )

    def fills_by_mask(self, node):
        """Returns whether a node is `x[mask] = number`."""
        whole, index, given = (torch.fx.map_arg(one, self.followed.value.get)
                               for one in node.args[:3])
        return (len(index) == 1 and torch.is_tensor(index[0]) and index[0].dtype == torch.bool
                and index[0].shape == whole.shape[:index[0].dim()] and given.numel() == 1
                and not (node.args[3:] and node.args[3]))

    def filled(self, node, name):
        """Returns a constant, whose shape follows from the number of samples alone."""
        made, given = self.followed.value[node], FILLED[name]
        value = given if given is not None else node.args[-1]
        size = [self.samples, *made.shape[1:]] if name.endswith("like") else [
            self.take(one, node) if isinstance(one, torch.fx.Node) else one for one in node.args[1]]
        return self.call(ATEN.full.default, size, value, dtype=made.dtype)

    def squeeze(self, node):
        """Squeezes only axes that have one value in every batch."""
        value, before = self.take(node.args[0], node), self.followed.value[node.args[0]]
        given = node.args[1] if len(node.args) > 1 else list(range(before.dim()))
        given = [given] if isinstance(given, int) else given
        meta = node.args[0].meta.get("val")
        sizes = before.shape if meta is None else meta.shape
        axes = [axis % before.dim() for axis in given if before.dim()]
        axes = [axis for axis in axes if isinstance(sizes[axis], int) and sizes[axis] == 1]
        return self.call(ATEN.squeeze.dims, value, axes) if axes else value

    def take(self, node, user):
        """Returns the new node that stands for `node`, which `user` reads."""
        if node in self.made:
            return self.made[node]
        if node in self.parts:
            self.made[node] = self.vectors(node)
            return self.made[node]
        if node in self.lengths:
            given = self.placeholders[f"length_{self.lengths[node].name}"]
            given = self.call(ATEN.view.default, given, [self.samples])
            dtype = self.followed.value[node].dtype
            self.made[node] = self.call(ATEN._to_copy.default, given, dtype=dtype)
            return self.made[node]
        if self.moved(node):
            if (node, user) in self.masked:
                return self.mask(node)
            return self.read(node)
        return self.constant(node)

    def constant(self, node):
        value = self.followed.value[node]
        if not torch.is_tensor(value):
            return value
        name = f"constant_{len(self.buffers)}"
        self.buffers[name] = value.detach().clone()
        if value.numel() > KEPT_VALUES_MAX:
            label = str(node.target).removeprefix("model.")
            self.note(f"the network carries `{label}`, {4 * value.numel():,} bytes")
        self.made[node] = self.graph.get_attr(name)
        return self.made[node]

    def shaped(self, made, value, axis=0):
        """Gives the values of each sample the shape of `value`, whose axis `axis` is the samples,
        or whose first axes have one value."""
        if axis:
            sizes = [self.samples, *value.movedim(axis, 0).shape[1:]]
            order = [*range(1, axis + 1), 0, *range(axis + 1, value.dim())]
            made = self.call(ATEN.reshape.default, made, sizes)
            return self.call(ATEN.permute.default, made, order)
        sizes = list(value.shape)
        axis = next((place for place, size in enumerate(sizes) if size != 1), 0)
        own = sizes[axis] // self.followed.samples
        sizes[axis] = self.samples if own == 1 else self.call(operator.mul, self.samples, own)
        return self.call(ATEN.reshape.default, made, sizes)

    def read(self, node):
        """Returns dense columns in the form of a moved node."""
        value = self.followed.value[node]
        at = [self.dense.index(place) for place in self.places(node)]
        dense = self.placeholders["dense"]
        if at == list(range(at[0], at[0] + len(at))):
            chosen = self.call(ATEN.slice.Tensor, dense, 1, at[0], at[0] + len(at))
        else:
            name = f"columns_{len(self.buffers)}"
            self.buffers[name] = torch.tensor(at)
            chosen = self.call(ATEN.index_select.default, dense, 1, self.graph.get_attr(name))
        shaped = self.shaped(chosen, value, self.axis_of(node))
        if not value.is_floating_point():
            shaped = self.call(ATEN._to_copy.default, shaped, dtype=value.dtype)
        self.made[node] = shaped
        return shaped

    def mask(self, node):
        """Returns a value that the user's own comparison takes as it takes the moved node: the
        padding for no key, and the padding plus 1 for a key."""
        parts, padding = [], 0
        for place in self.places(node):
            column = self.owner[place]
            mask = self.placeholders[f"mask_{column.name}"]
            at = column.columns.index(place[1])
            if parts and parts[-1][0] is column and parts[-1][2] == at:
                parts[-1][2] = at + 1
            else:
                parts.append([column, at, at + 1, mask])
            padding = column.padding
        chosen = [self.call(ATEN.slice.Tensor, mask, 1, a, b) for _, a, b, mask in parts]
        whole = chosen[0] if len(chosen) == 1 else self.call(ATEN.cat.default, chosen, 1)
        if padding:
            whole = self.call(ATEN.add.Scalar, whole, padding)
        return self.shaped(whole, self.followed.value[node], self.axis_of(node))

    def vectors(self, node):
        """Returns the looked up vectors in the form of the lookup's result."""
        result = self.followed.value[node]
        result = result[0] if isinstance(result, (tuple, list)) else result
        made = [self.part(part) for part in self.parts[node]]
        whole = made[0] if len(made) == 1 else self.call(ATEN.cat.default, made, 1)
        if node in self.positions and node not in self.puts:
            width, keys = self.tables[self.parts[node][0].table].shape[1], self.parts[node][0].count
            rows = self.call(ATEN.view.default, whole, [self.samples, keys, width])
            at = self.call(in_range, self.take(self.positions[node], node), keys)
            whole = self.call(row_of_each, rows, at)
        lookup = self.followed.lookup_of(node)
        axis = self.axis_of(lookup.index) if lookup is not None else 0
        shaped = self.shaped(whole, result, axis)
        if node in self.puts:
            row, where = self.puts[node]
            kept = self.copy_of(
                f"{source_line(node)}: a mask puts", row, self.followed.value[lookup.table][row])
            mask = self.call(ATEN.unsqueeze.default, self.take(self.positions[node], node), -1)
            both = (kept, shaped)
            shaped = self.call(ATEN.where.self, mask, *(both if where else both[::-1]))
        return [shaped] if op_name(node) == "embedding_bag" else shaped

    def part(self, part):
        vector = self.placeholders[f"emb_{reference(part)}"]
        column, rows = part.column, self.tables[part.table]
        if column.padding is None or not column.keeps_rows:
            return vector
        padding = rows[column.padding + column.shift]
        if not bool(padding.any()):
            return vector
        # A request may leave the padding out: its rows are then zeros, not the table's row.
        mask = self.call(ATEN.gt.Scalar, self.placeholders[f"mask_{column.name}"], 0.5)
        mask = self.call(ATEN.unsqueeze.default, mask, 2)
        shaped = self.call(ATEN.view.default, vector, [self.samples, column.hotness, rows.shape[1]])
        row = column.padding + column.shift
        kept = self.copy_of(f"`{column.name}`: its padding takes", row, padding)
        filled = self.call(ATEN.where.self, mask, shaped, kept)
        return self.call(ATEN.view.default, filled, [self.samples, column.hotness * rows.shape[1]])

    def copy_of(self, what, row, values):
        """Returns a constant with the values of a row of a table. A delta of rows alone does not
        reach it, so a note names the row."""
        self.note(
            f"{what} row {row} of a table, so the network has a copy of it: export again before a "
            "delta changes that row"
        )
        name = f"row_{len(self.buffers)}"
        self.buffers[name] = values.detach().clone()
        return self.graph.get_attr(name)


def skipped_by(lookup, shift):
    """Returns the value of a column that an EmbeddingBag leaves out; None if there is none."""
    padding = -1 if lookup.padding is None else lookup.padding
    return padding - shift if padding >= shift else None


def reference(part):
    """Returns how model.toml names the vector of a column in a table."""
    several = len(part.column.tables) > 1
    return f"{part.column.name}@{part.table}" if several else part.column.name

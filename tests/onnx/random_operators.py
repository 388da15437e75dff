"""The operators of random networks on windows, sequences, integers, indices and angles.

random_graphs.py joins them to its own. Needs numpy and onnx.
"""

import numpy
from onnx import TensorProto, helper, numpy_helper

B = "B"


class Operators:
    """One method for each group of operators; `Network` has what they are made of."""

    # ---- windows

    def windows(self, sizes, kernels, pools):
        """Returns attributes of a window over axes of `sizes`, and how many windows there are."""
        r = self.random
        strides = [r.randint(1, 2) for _ in sizes]
        dilations = [1 if pools and self.opset < 19 else r.randint(1, 2) for _ in sizes]
        spans = [(k - 1) * d + 1 for k, d in zip(kernels, dilations)]
        auto = r.choice(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
        if any(d > 1 for d in dilations) and auto.startswith("SAME"):
            auto = "NOTSET"
        attributes = {"strides": strides, "kernel_shape": kernels, "auto_pad": auto}
        if any(d > 1 for d in dilations):
            attributes["dilations"] = dilations
        if auto.startswith("SAME"):
            return attributes, [-(-n // s) for n, s in zip(sizes, strides)]
        most = [(k - 1) if pools else 2 for k in kernels]
        pads = [[r.randint(0, m), r.randint(0, m)] for m in most]
        if auto == "VALID":
            pads = [[0, 0] for _ in sizes]
        else:
            attributes["pads"] = [p[end] for end in range(2) for p in pads]
        room = [n + sum(p) - s for n, p, s in zip(sizes, pads, spans)]
        if min(room) < 0:
            return None, None
        counts = [q // s + 1 for q, s in zip(room, strides)]
        if pools and self.opset >= 10 and auto == "NOTSET" and r.random() < 0.3:
            attributes["ceil_mode"] = 1
            for i, s in enumerate(strides):
                if room[i] % s and counts[i] * s < sizes[i] + pads[i][0]:
                    counts[i] += 1
        return attributes, counts

    def image(self):
        """Returns a value `[B, channels, ..]` of one or two axes after the channels."""
        v = self.any(fits=lambda v: len(v.shape) in (2, 3, 4) and v.batch == 0)
        if not v:
            return None
        if len(v.shape) == 4:
            return v
        width = int(numpy.prod(v.shape[1:]))
        parts = [d for d in range(1, width + 1) if width % d == 0]
        channels = self.random.choice(parts)
        if self.random.random() < 0.5:
            shape = [channels, width // channels]
        else:
            rest = width // channels
            high = self.random.choice([d for d in range(1, rest + 1) if rest % d == 0])
            shape = [channels, high, rest // high]
        name = self.node("Reshape", [v, self.ints([-1, *shape])])
        return type(v)(name, [B, *shape], v.kind, v.exact)

    def op_windows(self):
        v = self.image()
        if not v:
            return
        channels, sizes = v.shape[1], v.shape[2:]
        kernels = [self.random.randint(1, min(3, n)) for n in sizes]
        form = self.random.choice(["Conv", "Conv", "MaxPool", "AveragePool", "Global"])
        if form == "Global":
            op = self.random.choice(["GlobalMaxPool", "GlobalAveragePool"])
            return self.add(self.node(op, [v]), [B, channels, *[1 for _ in sizes]])
        attributes, counts = self.windows(sizes, kernels, form != "Conv")
        if attributes is None:
            return
        if form == "Conv":
            groups = self.random.choice([g for g in range(1, channels + 1) if channels % g == 0])
            n = groups * self.random.randint(1, 3)
            inputs = [v, self.floats([n, channels // groups, *kernels])]
            if self.random.random() < 0.6:
                inputs.append(self.floats([n]))
            if self.random.random() < 0.3:
                del attributes["kernel_shape"]
            name = self.node("Conv", inputs, group=groups, **attributes)
            return self.add(name, [B, n, *counts])
        if form == "AveragePool" and self.random.random() < 0.5:
            attributes["count_include_pad"] = 1
        if form == "AveragePool" and self.opset < 19:
            attributes.pop("dilations", None)
        self.add(self.node(form, [v], **attributes), [B, channels, *counts])

    # ---- sequences

    def op_recurrent(self):
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0 and v.shape[1] <= 6)
        if not v:
            return
        (_, t, d), h, r = v.shape, self.random.randint(1, 4), self.random
        op = r.choice(["GRU", "LSTM", "LSTM", "RNN"])
        way = r.choice(["forward", "reverse", "bidirectional"])
        n, gates = (2 if way == "bidirectional" else 1), {"GRU": 3, "LSTM": 4, "RNN": 1}[op]
        x = self.transpose(v, [1, 0, 2])
        inputs = [x, self.floats([n, gates * h, d]), self.floats([n, gates * h, h])]
        inputs.append(self.floats([n, 2 * gates * h]) if r.random() < 0.7 else "")
        inputs.append(self.lengths(t) if r.random() < 0.6 else "")
        states = 2 if op == "LSTM" else 1
        for _ in range(states if r.random() < 0.5 else 0):
            flat = self.node("MatMul", ["x", self.floats([4, n * h])])
            shaped = self.node("Reshape", [flat, self.ints([-1, n, h])])
            inputs.append(self.node("Transpose", [shaped], perm=[1, 0, 2]))
        attributes = {"hidden_size": h, "direction": way}
        if op == "GRU":
            attributes["linear_before_reset"] = r.randint(0, 1)
        if op == "RNN" and r.random() < 0.5:
            attributes["activations"] = ["Relu"] * n
        names = self.node(op, inputs, outputs=1 + states, **attributes)
        if r.random() < 0.7:
            self.add(names[0], [t, n, B, h])
        self.add(names[1], [n, B, h])
        if states == 2 and r.random() < 0.5:
            self.add(names[2], [n, B, h])

    def lengths(self, most):
        """Returns lengths up to `most` of the samples, int32 `[B]`, computed from an input."""
        column = self.node("Gather", ["x", self.ints([self.random.randrange(4)])], axis=1)
        bounded = self.node("Abs", [self.node("Reshape", [column, self.ints([-1])])])
        whole = self.node("Cast", [bounded], to=TensorProto.INT64)
        parts = [whole, self.constant(numpy.int64(most))]
        rest = self.node("Sub", [whole, self.node("Mul", [self.node("Div", parts), parts[1]])])
        if self.random.random() < 0.7:
            rest = self.node("Add", [rest, self.constant(numpy.int64(1))])
        return self.node("Cast", [rest], to=TensorProto.INT32)

    # ---- integers

    def op_integers(self):
        v = self.any(self.random.choice(["int64", "int64", "int32"]))
        if not v:
            return
        kind = numpy.int64 if v.kind == "int64" else numpy.int32
        op = self.random.choice(["Add", "Sub", "Mul", "Div", "Mod", "ReduceSum", "ReduceMax", "Min",
                                 "Where"])
        if op == "Where":
            mask = self.any("bool", fits=lambda m: m.shape == v.shape)
            if not mask:
                return
            other = self.constant(self.numpy.integers(-3, 4, self.narrow(v)).astype(kind))
            return self.add(self.node(op, [mask, v, other]), v.shape, v.kind, True)
        if op == "Min" and self.opset < 12 or op == "Mod" and self.opset < 10:
            op = "Add"
        if op.startswith("Reduce"):
            axis = self.axis(v)
            if axis is None:
                return
            keep = self.random.randint(0, 1)
            name = self.reduce(op, v, [axis], keep)
            shape = [1 if a == axis else s for a, s in enumerate(v.shape) if keep or a != axis]
            return self.add(name, shape, v.kind, True) if len(shape) > 1 else None
        if op in ("Div", "Mod"):
            numbers = self.numpy.choice([-4, -3, -2, -1, 1, 2, 3, 5], self.narrow(v))
        else:
            numbers = self.numpy.integers(-3, 4, self.narrow(v))
        pair = [v, self.constant(numbers.astype(kind))]
        if op not in ("Div", "Mod") and self.random.random() < 0.4:
            pair.reverse()
        fmod = 1 if op == "Mod" and self.random.random() < 0.3 else None
        self.add(self.node(op, pair, fmod=fmod), v.shape, v.kind, True)

    def op_count(self):
        """The number of values that are not 0, as a mask of lengths is summed."""
        v = self.any(fits=lambda v: len(v.shape) == 2 and v.batch == 0 and v.exact)
        if not v:
            return
        zero = self.constant(numpy.zeros([1], numpy.float32))
        mask = self.node("Not", [self.node("Equal", [v, zero])])
        counted = self.node("Cast", [mask], to=TensorProto.INT64)
        name = self.reduce("ReduceSum", type(v)(counted, v.shape), [1], 1)
        self.add(name, [B, 1], "int64", True)

    # ---- indices

    def indices(self, n, shape):
        """Returns indices from `-n` to `n - 1` of each sample, int64 `[B, *shape]`."""
        width = int(numpy.prod(shape))
        picks = self.ints(self.numpy.integers(0, 4, [width]))
        columns = self.node("Gather", ["x", picks], axis=1)
        whole = self.node("Cast", [self.node("Mul", [columns, self.constant(numpy.float32(4))])],
                          to=TensorProto.INT64)
        size = self.constant(numpy.int64(n))
        quotient = self.node("Div", [whole, size])
        rest = self.node("Sub", [whole, self.node("Mul", [quotient, size])])
        if self.random.random() < 0.3:
            bounds = [self.node("Less", [rest, self.constant(numpy.int64(0))])]
            rest = self.node("Where", [*bounds, rest, self.node("Sub", [
                rest, self.constant(numpy.int64(n))])]) if self.opset >= 9 else rest
        return self.node("Reshape", [rest, self.ints([-1, *shape])])

    def op_lookup(self):
        form = self.random.choice(["Gather", "GatherElements", "GatherND"])
        if form == "Gather":
            n, width = self.random.randint(1, 6), self.random.randint(1, 3)
            table = self.floats([n, width])
            shape = self.random.choice([[1], [2], [2, 2]])
            axis = self.random.randint(0, 1)
            index = self.indices([n, width][axis], shape)
            out = [B, *shape, width] if axis == 0 else [n, B, *shape]
            return self.add(self.node("Gather", [table, index], axis=axis), out)
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0)
        if not v or self.opset < 12:
            return
        if form == "GatherElements":
            axis = self.random.randint(1, 2)
            shape = [self.random.randint(1, n) for n in v.shape[1:]]
            shape[axis - 1] = self.random.randint(1, 3)
            index = self.indices(v.shape[axis], shape)
            name = self.node(form, [v, index], axis=self.signed(axis, 3))
            return self.add(name, [B, *shape], exact=v.exact)
        depth = self.random.randint(1, 2)
        limits = v.shape[1:1 + depth]
        rows = self.random.choice([[], [2]])
        columns = [self.indices(n, [*rows, 1]) for n in limits]
        index = self.node("Concat", columns, axis=-1) if depth > 1 else columns[0]
        name = self.node(form, [v, index], batch_dims=1)
        self.add(name, [B, *rows, *v.shape[1 + depth:]], exact=v.exact)

    def op_one_hot(self):
        depth, shape = self.random.randint(1, 5), self.random.choice([[1], [2], [1, 2]])
        index = self.indices(depth, shape)
        if self.random.random() < 0.3:
            index = self.node("Add", [index, self.constant(numpy.int64(1))])
        axis = self.random.randint(1, 1 + len(shape))
        out = [B, *shape]
        out.insert(axis, depth)
        name = self.node("OneHot", [index, self.ints([depth]), self.floats([2])],
                         axis=self.signed(axis, len(out)))
        self.add(name, out)

    def op_masked_select(self):
        """Values by a constant mask that the batch repeats."""
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0)
        if not v or self.opset < 11:
            return
        mask = self.numpy.integers(0, 2, v.shape[1:]).astype(bool)
        mask[0, 0] = True
        spread = self.node("Expand", [self.constant(mask), self.node("Shape", [v])])
        index = self.node("Transpose", [self.node("NonZero", [spread])], perm=[1, 0])
        flat = self.node("GatherND", [v, index])
        count = int(mask.sum())
        self.add(self.node("Reshape", [flat, self.ints([-1, count])]), [B, count], exact=v.exact)

    def op_top(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2 and v.exact)
        axis = self.axis(v) if v else None
        if axis is None:
            return
        n, given = v.shape[axis], self.signed(axis, len(v.shape))
        if self.random.random() < 0.5:
            op, keep = self.random.choice(["ArgMax", "ArgMin"]), self.random.randint(0, 1)
            last = self.random.randint(0, 1) if self.opset >= 12 else None
            given = given if self.opset >= 11 else axis
            name = self.node(op, [v], axis=given, keepdims=keep, select_last_index=last)
            shape = [1 if a == axis else s for a, s in enumerate(v.shape) if keep or a != axis]
            return self.add(name, shape, "int64", True) if len(shape) > 1 else None
        k = self.random.randint(1, n)
        if self.opset < 10:
            names = self.node("TopK", [v], outputs=2, axis=axis, k=k)
        else:
            largest = self.random.randint(0, 1) if self.opset >= 11 else None
            given = given if self.opset >= 11 else axis
            names = self.node("TopK", [v, self.ints([k])], outputs=2, axis=given, largest=largest)
        shape = [k if a == axis else s for a, s in enumerate(v.shape)]
        self.add(names[0], shape, exact=True)
        self.add(names[1], shape, "int64", True)

    def op_scatter(self):
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0)
        if not v or self.opset < 11:
            return
        _, t, d = v.shape
        if self.random.random() < 0.5:
            rows = self.transpose(v, [1, 0, 2])
            n = self.random.randint(1, t)
            index = self.ints(self.numpy.permutation(t)[:n, None])
            update = self.node("Gather", [rows, self.ints(self.numpy.integers(0, t, n))], axis=0)
            name = self.node("ScatterND", [rows, index, self.node("Neg", [update])])
            return self.add(name, [t, B, d], exact=v.exact)
        n = self.random.randint(1, d)
        index = self.constant(numpy.stack([self.numpy.permutation(d)[:n] for _ in range(t)])[None])
        size = self.node("Gather", [self.node("Shape", [v]), self.ints([0])], axis=0)
        shape = self.node("Concat", [size, self.ints([t, n])], axis=0)
        index = self.node("Expand", [index, shape])
        update = self.node("Gather", [v, self.ints(self.numpy.integers(0, d, n))], axis=2)
        name = self.node("ScatterElements", [v, index, self.node("Neg", [update])], axis=2)
        self.add(name, v.shape, exact=v.exact)

    def op_running_sum(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        axis = self.axis(v)
        if axis is None or self.opset < 11:
            return
        axis_name = self.constant(numpy.int64(self.signed(axis, len(v.shape))))
        name = self.node("CumSum", [v, axis_name], exclusive=self.random.randint(0, 1),
                         reverse=self.random.randint(0, 1))
        self.add(name, v.shape, exact=v.exact)

    def op_empty_part(self):
        """A split with a part of nothing, as `torch.split` writes it."""
        v = self.any(fits=lambda v: any(s != B and s >= 2 for s in v.shape))
        if not v or self.opset < 13:
            return
        axis = self.axis(v, lambda v, a: v.shape[a] != B and v.shape[a] >= 2)
        n = v.shape[axis]
        parts = self.random.choice([[0, n], [1, 0, n - 1], [n, 0]])
        names = self.node("Split", [v, self.ints(parts)], outputs=len(parts), axis=axis)
        self.add(self.node("Concat", names[::-1], axis=axis), v.shape, v.kind, v.exact)

    # ---- functions and constants

    def op_angle(self):
        v = self.any()
        op = self.random.choice(["Sin", "Cos", "Atan", "Asin", "Acos", "Sinh", "Cosh", "Asinh",
                                 "Acosh", "Atanh", "Tan"])
        if op not in ("Sin", "Cos", "Atan"):
            v = type(v)(self.node("Tanh", [v]), v.shape)
        if op in ("Asin", "Acos", "Atanh", "Tan"):
            v = type(v)(self.node("Mul", [v, self.constant(numpy.float32(0.75))]), v.shape)
        if op == "Acosh":
            v = type(v)(self.node("Add", [v, self.constant(numpy.float32(2.5))]), v.shape)
        self.add(self.node(op, [v]), v.shape)

    def op_normal(self):
        """Normalisations of channels, and the functions of newer opsets."""
        form = self.random.choice(["Instance", "Group", "Swish", "IsInf"])
        v = self.any()
        if form == "Swish" and self.opset >= 24:
            return self.add(self.node("Swish", [v]), v.shape)
        if form == "IsInf" and self.opset >= 10:
            ends = {f"detect_{end}": 1 for end in ["negative", "positive"]}
            ends[self.random.choice([*ends, "detect_negative"])] = self.random.randint(0, 1)
            zero = self.constant(numpy.zeros([1], numpy.float32))
            name = self.node("IsInf", [self.node("Div", [v, zero])], **ends)
            return self.add(name, v.shape, kind="bool", exact=True) if v.exact else None
        v = self.image()
        if not v or form not in ("Instance", "Group"):
            return
        c = v.shape[1]
        inputs = [v, self.floats([c]), self.floats([c])]
        if form == "Instance":
            name = self.node("InstanceNormalization", inputs, epsilon=1e-2)
        elif self.opset >= 21:
            groups = self.random.choice([g for g in range(1, c + 1) if c % g == 0])
            name = self.node("GroupNormalization", inputs, epsilon=1e-2, num_groups=groups)
        else:
            return
        self.add(name, v.shape)

    def op_wide(self):
        """A computation in double."""
        v = self.any()
        wide = self.node("Cast", [v], to=TensorProto.DOUBLE)
        term = self.constant(self.numpy.normal(0, 0.5, self.narrow(v)))
        total = self.node("Add", [wide, term])
        self.add(self.node("Cast", [total], to=TensorProto.FLOAT), v.shape)

    def op_brain(self):
        """Weights of bfloat16."""
        v = self.any(fits=lambda v: len(v.shape) == 2 and v.batch == 0)
        if not v or self.opset < 13:
            return
        n = self.random.randint(1, 4)
        w = self.numpy.normal(0, 0.5, [v.shape[1], n]).astype(numpy.float32)
        name = self.name()
        bits = (w.view(numpy.uint32) >> 16).astype(numpy.uint16)
        self.initializers.append(
            helper.make_tensor(name, TensorProto.BFLOAT16, w.shape, bits.tobytes(), raw=True))
        weights = self.node("Cast", [name], to=TensorProto.FLOAT)
        self.add(self.node("MatMul", [v, weights]), [B, n])

    def op_if(self):
        """`squeeze(1)` as PyTorch writes it: an `If` by the size of the axis."""
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0)
        if not v or self.opset < 13:
            return
        size = self.node("Gather", [self.node("Shape", [v]), self.ints([1])], axis=0)
        condition = self.node("Equal", [size, self.ints([1])])
        branches = []
        # ONNX Runtime infers the shapes of the branch that is not taken, too.
        for op in ["Squeeze" if v.shape[1] == 1 else "Neg", "Identity"]:
            name, axes = self.name(), self.name()
            inputs = [v.name, axes] if op == "Squeeze" else [v.name]
            stored = [numpy_helper.from_array(numpy.array([1]), axes)] if op == "Squeeze" else []
            output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            branches.append(helper.make_graph([helper.make_node(op, inputs, [name])], op, [],
                                              [output], stored))
        name = self.node("If", [condition], then_branch=branches[0], else_branch=branches[1])
        self.add(name, [B, v.shape[2]] if v.shape[1] == 1 else v.shape, exact=v.exact)

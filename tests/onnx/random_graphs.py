"""Random networks over the operators, types, attributes and opsets that Hatchback's engine claims.

    python3 tests/onnx/random_graphs.py --count 5000 --out cases.bin
    cargo run --release -p hatchback-kernels --example onnx_cases -- cases.bin

Every network keeps its samples apart, on whatever axis the batch is. A function with a jump is
applied only to values that are exact in any arithmetic. Needs numpy, onnx and onnxruntime.
"""

import argparse
import random
import sys

import numpy
from onnx import TensorProto, helper, numpy_helper

import cases
from random_operators import B, Operators

BATCH = 5
INPUTS = {"x": [4], "y": [3, 4], "z": [6]}
WIDTH_MAX = 400
OPSET_MAX = 28


class Value:
    """A tensor of the network: its name, its shape with B in it, and how it may be used."""

    def __init__(self, name, shape, kind="float", exact=False):
        self.name, self.shape, self.kind, self.exact = name, shape, kind, exact

    @property
    def batch(self):
        return self.shape.index(B)


class Network(Operators):
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.numpy = numpy.random.default_rng(seed)
        self.opset = self.random.randint(7, OPSET_MAX)
        self.nodes, self.initializers, self.values, self.count = [], [], [], 0
        for name, shape in INPUTS.items():
            self.values.append(Value(name, [B, *shape], exact=True))

    # ---- building blocks

    def name(self):
        self.count += 1
        return f"v{self.count}"

    def node(self, op, inputs, outputs=1, **attributes):
        names = [self.name() for _ in range(outputs)]
        inputs = [i.name if isinstance(i, Value) else i for i in inputs]
        attributes = {k: v for k, v in attributes.items() if v is not None}
        self.nodes.append(helper.make_node(op, inputs, names, name=f"n{self.count}", **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, array):
        """Adds a constant in one of the forms that exporters use."""
        array = numpy.asarray(array)
        name = self.name()
        form = self.random.randrange(6)
        if array.dtype == numpy.float32 and form in (0, 1):
            # Stored in another type and cast when the file is loaded.
            other = (numpy.float16, numpy.float64)[form]
            array[...] = array.astype(other).astype(numpy.float32)
            self.initializers.append(numpy_helper.from_array(array.astype(other), name))
            return self.node("Cast", [name], to=TensorProto.FLOAT)
        if form == 2:
            tensor = numpy_helper.from_array(array, name)
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        elif form == 3 and array.dtype == numpy.float32:
            tensor = helper.make_tensor(name, TensorProto.FLOAT, array.shape, array.flatten())
            self.initializers.append(tensor)
        elif form == 3 and array.dtype == numpy.int64:
            tensor = helper.make_tensor(name, TensorProto.INT64, array.shape, array.flatten())
            self.initializers.append(tensor)
        else:
            self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def floats(self, shape, exact=False):
        if exact:
            return self.constant(self.numpy.integers(-8, 9, shape).astype(numpy.float32) / 4)
        return self.constant(self.numpy.normal(0, 0.5, shape).astype(numpy.float32))

    def ints(self, values):
        return self.constant(numpy.array(values, dtype=numpy.int64))

    def add(self, name, shape, kind="float", exact=False):
        width = numpy.prod([1 if s == B else s for s in shape])
        if 1 <= width <= WIDTH_MAX:
            self.values.append(Value(name, list(shape), kind, exact))
        return self.values[-1]

    def any(self, kind="float", fits=lambda v: True):
        """Returns a value, the last ones more often."""
        found = [v for v in self.values if v.kind == kind and fits(v)]
        if not found:
            return None
        return found[-1 - min(int(self.random.expovariate(0.4)), len(found) - 1)]

    def axis(self, value, fits=lambda v, a: v.shape[a] != B):
        found = [a for a in range(len(value.shape)) if fits(value, a)]
        return self.random.choice(found) if found else None

    def signed(self, axis, rank):
        return axis - rank if self.random.random() < 0.4 else axis

    def transpose(self, value, perm):
        name = self.node("Transpose", [value], perm=list(perm))
        shape = [value.shape[p] for p in perm]
        return Value(name, shape, value.kind, value.exact)

    def batch_first(self, value):
        at = value.batch
        if at == 0:
            return value
        rest = [a for a in range(len(value.shape)) if a != at]
        return self.transpose(value, [at, *rest])

    # ---- operators, one method each

    def op_function(self):
        v = self.any()
        since = {"HardSwish": 14, "Mish": 18, "Gelu": 20, "Celu": 12}
        plain = ["Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Erf", "Softplus", "Softsign",
                 "HardSwish", "Mish", "Reciprocal", "Sqrt", "Log", "Exp", "Identity", "Dropout"]
        alpha = ["LeakyRelu", "Elu", "Celu", "ThresholdedRelu", "HardSigmoid", "Selu"]
        op = self.random.choice(plain + alpha + ["Gelu", "Clip"])
        if since.get(op, 0) > self.opset or (op == "ThresholdedRelu" and not v.exact):
            op = "Relu"
        exact = v.exact and op in ("Relu", "Abs", "Neg", "Identity", "Dropout")
        if op == "Clip" and self.opset < 11:
            bounds = {"min": self.random.uniform(-1, 0), "max": self.random.uniform(0, 1)}
            return self.add(self.node("Clip", [v], **bounds), v.shape)
        if op == "Clip":
            bounds = [self.floats([]) if self.random.random() < 0.7 else "" for _ in range(2)]
            return self.add(self.node("Clip", [v, *bounds]), v.shape)
        if op in ("Reciprocal", "Sqrt", "Log"):
            one = self.constant(numpy.float32(0.5))
            positive = self.node("Add", [self.node("Abs", [v]), one])
            return self.add(self.node(op, [positive]), v.shape)
        if op == "Exp":
            v = Value(self.node("Tanh", [v]), v.shape)
        attributes = {}
        if op in alpha and self.random.random() < 0.7:
            attributes["alpha"] = self.random.uniform(0.1, 1.5)
            if op == "HardSigmoid":
                attributes["beta"] = self.random.uniform(0.1, 0.9)
            if op == "Selu":
                attributes["gamma"] = self.random.uniform(0.5, 1.5)
        if op == "Gelu" and self.random.random() < 0.5:
            attributes["approximate"] = self.random.choice(["tanh", "none"])
        result = self.node(op, [v], **attributes)
        if op == "Sigmoid" and self.random.random() < 0.5:
            factors = self.random.sample([v, result], 2)
            self.add(self.node("Mul", factors), v.shape)
        self.add(result, v.shape, exact=exact)

    def op_jump(self):
        """Functions that jump: on exact values only."""
        v = self.any(fits=lambda v: v.exact)
        op = self.random.choice(["Floor", "Ceil", "Round", "Sign", "ThresholdedRelu", "IsNaN"])
        name = self.node(op, [v])
        if op == "IsNaN":
            return self.add(name, v.shape, kind="bool", exact=True)
        self.add(name, v.shape, exact=True)

    def op_cast(self):
        v = self.any(fits=lambda v: v.exact)
        to = self.random.choice([TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL])
        name = self.node("Cast", [v], to=to)
        if self.random.random() < 0.5:
            return self.add(self.node("Cast", [name], to=TensorProto.FLOAT), v.shape, exact=True)
        kinds = {TensorProto.INT64: "int64", TensorProto.INT32: "int32", TensorProto.BOOL: "bool"}
        self.add(name, v.shape, kind=kinds[to], exact=True)

    def op_back(self):
        kind = self.random.choice(["int64", "int32", "bool"])
        v = self.any(kind)
        if v:
            self.add(self.node("Cast", [v], to=TensorProto.FLOAT), v.shape, exact=True)

    def op_compare(self):
        v = self.any(fits=lambda v: v.exact) if self.random.random() < 0.7 else self.any("int64")
        if not v:
            return
        ops = ["Equal", "Less", "Greater"]
        if self.opset >= 12:
            ops += ["LessOrEqual", "GreaterOrEqual"]
        if v.kind == "int64":
            other = self.ints(self.numpy.integers(-2, 3, self.narrow(v)))
        elif self.random.random() < 0.6:
            other = self.floats(self.narrow(v), exact=True)
        else:
            other = self.node("Neg", [v])
        pair = [v, other]
        if self.random.random() < 0.4:
            pair.reverse()
        self.add(self.node(self.random.choice(ops), pair), v.shape, kind="bool", exact=True)

    def op_logic(self):
        v = self.any("bool")
        if not v:
            return
        if self.random.random() < 0.4:
            return self.add(self.node("Not", [v]), v.shape, kind="bool", exact=True)
        other = self.constant(self.numpy.integers(0, 2, self.narrow(v)).astype(bool))
        op = self.random.choice(["And", "Or", "Xor"])
        self.add(self.node(op, [v, other]), v.shape, kind="bool", exact=True)

    def op_where(self):
        c = self.any("bool")
        if not c:
            return
        same = self.any(fits=lambda v: v.shape == c.shape)
        sides = [same or self.floats(self.narrow(c)), self.floats(self.narrow(c))]
        if self.random.random() < 0.3:
            sides[1] = self.constant(numpy.float32(-1e4))
        if self.random.random() < 0.5:
            sides.reverse()
        self.add(self.node("Where", [c, *sides]), c.shape)

    def narrow(self, v):
        """Returns a shape that broadcasts to that of `v`, with one value for all samples."""
        shape = [1 if s == B or self.random.random() < 0.4 else s for s in v.shape]
        return shape[self.random.randrange(v.batch + 1):] if self.random.random() < 0.5 else shape

    def op_zip(self):
        v = self.any()
        op = self.random.choice(["Add", "Sub", "Mul", "Div", "Min", "Max", "PRelu", "Sum", "Mean"])
        same = self.any(fits=lambda o: o.shape == v.shape)
        exact = v.exact and op in ("Add", "Sub", "Min", "Max")
        if op == "PRelu":
            slope = [1 if s == B else s for s in v.shape]
            return self.add(self.node(op, [v, self.floats(slope[v.batch + 1:] or [1])]), v.shape)
        if op == "Div":
            one = self.constant(numpy.float32(0.5))
            base = same if same and self.random.random() < 0.5 else None
            other = self.node("Add", [self.node("Abs", [base or self.floats(self.narrow(v))]), one])
        elif same and self.random.random() < 0.5:
            other, exact = same, exact and same.exact
        else:
            other = self.floats(self.narrow(v), exact=exact)
        pair = [v, other]
        if self.random.random() < 0.4 and op != "Div":
            pair.reverse()
        if op in ("Min", "Max", "Sum", "Mean") and self.random.random() < 0.3:
            pair.append(v)
        self.add(self.node(op, pair), v.shape, exact=exact)

    def op_broadcast(self):
        """Two computed values of different shapes."""
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        axis = self.axis(v)
        if axis is None:
            return
        mean = self.reduce("ReduceMean", v, [axis], 1)
        op = self.random.choice(["Add", "Sub", "Mul"])
        self.add(self.node(op, [v, mean]), v.shape)

    def op_pow(self):
        v = self.any()
        power = self.random.choice([2.0, 3.0, 0.5, -1.0, 1.7, 1.0, -0.5, 4.0])
        base = self.node("Tanh", [v])
        if power not in (2.0, 3.0, 1.0, 4.0):
            base = self.node("Add", [self.node("Abs", [base]), self.constant(numpy.float32(0.3))])
        if self.random.random() < 0.3:
            other = self.constant(numpy.full(self.narrow(v), power, dtype=numpy.float32))
        else:
            other = self.constant(numpy.float32(power))
        self.add(self.node("Pow", [base, other]), v.shape)

    def op_gemm(self):
        v = self.any(fits=lambda v: len(v.shape) == 2)
        if not v:
            return
        n = self.random.randint(1, 7)
        turned = v.batch == 1
        k = v.shape[0] if turned else v.shape[1]
        by_row = self.random.random() < 0.5
        w = self.floats([n, k] if by_row else [k, n])
        bias = self.random.choice([None, [n], [1, n], [1]])
        inputs = [v, w] + ([self.floats(bias)] if bias else [])
        attributes = {"transA": 1} if turned else {}
        if by_row:
            attributes["transB"] = 1
        if self.random.random() < 0.4:
            attributes["alpha"] = self.random.uniform(0.2, 2)
            attributes["beta"] = self.random.uniform(0.2, 2)
        self.add(self.node("Gemm", inputs, **attributes), [B, n])

    def op_matmul(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        rank = len(v.shape)
        form = self.random.choice(["weights", "left", "vector", "groups", "self"])
        n = self.random.randint(1, 6)
        if form == "left" and v.batch < rank - 2:
            m = self.random.randint(1, 5)
            name = self.node("MatMul", [self.floats([m, v.shape[-2]]), v])
            return self.add(name, [*v.shape[:-2], m, v.shape[-1]])
        if v.batch == rank - 1:
            return
        if form == "vector":
            return self.add(self.node("MatMul", [v, self.floats([v.shape[-1]])]), v.shape[:-1])
        if form == "groups" and rank >= 2:
            groups = self.random.randint(2, 4)
            w = self.floats([groups, v.shape[-1], n])
            if rank == 2 and v.batch == 0:
                name = self.node("MatMul", [v, w])
                return self.add(name, [groups, B, n])
            if rank == 3 and v.batch != 0:
                w = self.floats([v.shape[0], v.shape[-1], n])
                return self.add(self.node("MatMul", [v, w]), [*v.shape[:-1], n])
        if form == "self" and v.batch < rank - 2:
            perm = [*range(rank - 2), rank - 1, rank - 2]
            other = self.transpose(v, perm)
            name = self.node("MatMul", [v, other])
            v = self.add(name, [*v.shape[:-1], v.shape[-2]])
            return self.add(self.node("Tanh", [v]), v.shape)
        self.add(self.node("MatMul", [v, self.floats([v.shape[-1], n])]), [*v.shape[:-1], n])

    def op_einsum(self):
        if self.opset < 12:
            return
        y = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0)
        x = self.any(fits=lambda v: len(v.shape) == 2 and v.batch == 0)
        if not y or not x:
            return
        (_, t, d), n = y.shape, self.random.randint(1, 5)
        forms = {
            "btd,bsd->bts": ([y, y], [B, t, t]),
            "btd,bte->bde": ([y, y], [B, d, d]),
            "btd,dn->btn": ([y, self.floats([d, n])], [B, t, n]),
            "btd,tdn->btn": ([y, self.floats([t, d, n])], [B, t, n]),
            "bk,ekn->ben": ([x, self.floats([3, x.shape[1], n])], [B, 3, n]),
            "btd,ndt->bn": ([y, self.floats([n, d, t])], [B, n]),
            "btd->bd": ([y], [B, d]),
            "btd->dbt": ([y], [d, B, t]),
            "bi,bj->bij": ([x, x], [B, x.shape[1], x.shape[1]]),
            "bi,bi->b": ([x, x], [B]),
            "btd,td->bt": ([y, self.floats([t, d])], [B, t]),
        }
        equation = self.random.choice(list(forms))
        inputs, shape = forms[equation]
        self.add(self.node("Einsum", inputs, equation=equation), shape)

    def op_conv(self):
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0)
        if not v:
            return
        n = self.random.randint(1, 5)
        inputs = [v, self.floats([n, v.shape[1], 1])]
        if self.random.random() < 0.6:
            inputs.append(self.floats([n]))
        self.add(self.node("Conv", inputs, kernel_shape=[1]), [B, n, v.shape[2]])

    def op_gru(self):
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0 and v.shape[1] <= 6)
        if not v:
            return
        (_, t, d), h = v.shape, self.random.randint(1, 4)
        way = self.random.choice(["forward", "reverse", "bidirectional"])
        n = 2 if way == "bidirectional" else 1
        x = self.transpose(v, [1, 0, 2])
        inputs = [x, self.floats([n, 3 * h, d]), self.floats([n, 3 * h, h])]
        inputs.append(self.floats([n, 6 * h]) if self.random.random() < 0.8 else "")
        if self.random.random() < 0.5:
            # A first state that is expanded over the batch.
            shape = self.node("Shape", [v])
            size = self.node("Gather", [shape, self.ints([0])], axis=0)
            full = self.node("Concat", [self.ints([n]), size, self.ints([h])], axis=0)
            if self.random.random() < 0.5:
                state = self.node("ConstantOfShape", [full])
            else:
                state = self.node("Expand", [self.floats([n, 1, h]), full])
            inputs += ["", state]
        names = self.node("GRU", inputs, outputs=2, hidden_size=h, linear_before_reset=1,
                          direction=way)
        if self.random.random() < 0.5:
            self.add(names[0], [t, n, B, h])
        self.add(names[1], [n, B, h])

    def op_attention(self):
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0)
        if not v or self.opset < 23:
            return
        q = self.node("Unsqueeze", [v, self.ints([1])])
        mask = self.floats([v.shape[1], v.shape[1]])
        name = self.node("Attention", [q, q, q, mask])
        self.add(name, [B, 1, *v.shape[1:]])

    def op_softmax(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        op = self.random.choice(["Softmax", "Softmax", "LogSoftmax"])
        if self.opset < 13:
            if v.batch == len(v.shape) - 1:
                return
            axis = self.random.randint(v.batch + 1, len(v.shape) - 1)
        else:
            axis = self.axis(v)
        self.add(self.node(op, [v], axis=self.signed(axis, len(v.shape))), v.shape)

    def op_norm(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        rank = len(v.shape)
        form = self.random.choice(["batch", "layer", "rms", "by hand"])
        if form == "batch" and v.shape[1] != B:
            c = v.shape[1]
            spread = self.constant(self.numpy.uniform(0.2, 2, [c]).astype(numpy.float32))
            inputs = [v, self.floats([c]), self.floats([c]), self.floats([c]), spread]
            return self.add(self.node("BatchNormalization", inputs, epsilon=1e-3), v.shape)
        if v.batch == rank - 1 or v.shape[-1] < 3:
            return
        if form == "layer" and self.opset >= 17:
            inputs = [v, self.floats([v.shape[-1]])]
            if self.random.random() < 0.7:
                inputs.append(self.floats([v.shape[-1]]))
            name = self.node("LayerNormalization", inputs, epsilon=1e-2)
            return self.add(name, v.shape)
        if form == "rms" and self.opset >= 23:
            inputs = [v, self.floats([v.shape[-1]])]
            return self.add(self.node("RMSNormalization", inputs, epsilon=1e-2), v.shape)
        norm = self.reduce("ReduceL2", v, [rank - 1], 1)
        norm = self.node("Add", [norm, self.constant(numpy.float32(0.1))])
        self.add(self.node("Div", [v, norm]), v.shape)

    def reduce(self, op, v, axes, keep):
        """Adds a reduction with its axes where the opset has them."""
        axes = [self.signed(a, len(v.shape)) for a in axes]
        as_input = self.opset >= (13 if op == "ReduceSum" else 18)
        if as_input:
            return self.node(op, [v, self.ints(axes)], keepdims=keep)
        return self.node(op, [v], axes=axes, keepdims=keep)

    def op_reduce(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        op = self.random.choice(["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare",
                                 "LogSumExp"])
        free = [a for a in range(len(v.shape)) if v.shape[a] != B]
        axes = sorted(self.random.sample(free, self.random.randint(1, len(free))))
        keep = self.random.randint(0, 1)
        if op == "Prod":
            v = Value(self.node("Tanh", [v]), v.shape)
        name = self.reduce(f"Reduce{op}", v, axes, keep)
        shape = [1 if a in axes else s for a, s in enumerate(v.shape) if keep or a not in axes]
        self.add(name, shape, exact=v.exact and op in ("Max", "Min", "Sum", "L1"))

    # ---- shapes

    def op_flatten(self):
        v = self.any(fits=lambda v: v.batch == 0)
        width = int(numpy.prod([s for s in v.shape if s != B]))
        self.add(self.node("Flatten", [v], axis=1), [B, width], v.kind, v.exact)

    def op_reshape(self):
        v = self.any(self.random.choice(["float", "float", "bool"]))
        if not v or v.batch != 0:
            return
        width = int(numpy.prod([s for s in v.shape if s != B]))
        first = self.random.choice([d for d in range(1, width + 1) if width % d == 0])
        shape = [B, first, width // first]
        form = self.random.choice(["open", "zero", "computed", "allowzero"])
        if form == "computed":
            size = self.node("Gather", [self.node("Shape", [v]), self.ints([0])], axis=0)
            half = self.ints([first]) if self.random.random() < 0.5 else self.node(
                "Div", [self.node("Mul", [self.ints([first]), self.ints([6])]), self.ints([6])])
            target = self.node("Concat", [size, half, self.ints([-1])], axis=0)
            return self.add(self.node("Reshape", [v, target]), shape, v.kind, v.exact)
        flag = 1 if form == "allowzero" and self.opset >= 14 else None
        target = [0 if form == "zero" else -1, first, width // first]
        name = self.node("Reshape", [v, self.ints(target)], allowzero=flag)
        self.add(name, shape, v.kind, v.exact)

    def op_merge(self):
        """Joins the batch with another axis, works there, and divides them again."""
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch < 2)
        if not v:
            return
        k = v.shape[2]
        n = self.random.randint(1, 5)
        shape = self.node("Shape", [v])
        flat = self.node("Reshape", [v, self.ints([-1, k])])
        out = self.node("MatMul", [flat, self.floats([k, n])])
        if self.random.random() < 0.5:
            out = self.node("Relu", [self.node("Add", [out, self.floats([n])])])
        head = self.node("Gather", [shape, self.ints([0, 1])], axis=0)
        target = self.node("Concat", [head, self.ints([n])], axis=0)
        self.add(self.node("Reshape", [out, target]), [*v.shape[:2], n])

    def op_heads(self):
        """Attention's views: the batch joined with the heads, time first."""
        v = self.any(fits=lambda v: len(v.shape) == 3 and v.batch == 0 and v.shape[2] % 2 == 0)
        if not v:
            return
        _, t, d = v.shape
        first = self.transpose(v, [1, 0, 2])
        size = self.node("Gather", [self.node("Shape", [v]), self.ints([0])], axis=0)
        joined = self.node("Mul", [size, self.ints([2])])
        target = self.node("Concat", [self.ints([t]), joined, self.ints([d // 2])], axis=0)
        heads = self.node("Reshape", [first, target])
        heads = self.node("Transpose", [heads], perm=[1, 0, 2])
        other = self.node("Transpose", [heads], perm=[0, 2, 1])
        scores = self.node("Softmax", [self.node("MatMul", [heads, other])], axis=2)
        mixed = self.node("Transpose", [self.node("MatMul", [scores, heads])], perm=[1, 0, 2])
        back = self.node("Concat", [self.ints([t]), size, self.ints([d])], axis=0)
        name = self.node("Reshape", [mixed, back])
        self.add(name, [t, B, d])

    def op_axes(self):
        v = self.any(self.random.choice(["float", "float", "bool", "int64"]))
        if not v:
            return
        rank = len(v.shape)
        ones = [a for a in range(rank) if v.shape[a] == 1]
        if ones and self.random.random() < 0.5:
            axis = self.random.choice(ones)
            op, given = "Squeeze", self.signed(axis, rank)
            shape = [s for a, s in enumerate(v.shape) if a != axis]
        elif rank < 4:
            axis = self.random.randint(0, rank)
            op, given = "Unsqueeze", self.signed(axis, rank + 1)
            shape = [*v.shape[:axis], 1, *v.shape[axis:]]
        else:
            return
        if self.opset >= 13:
            name = self.node(op, [v, self.ints([given])])
        else:
            name = self.node(op, [v], axes=[given])
        self.add(name, shape, v.kind, v.exact)

    def op_transpose(self):
        v = self.any(self.random.choice(["float", "float", "bool"]))
        if v:
            perm = self.random.sample(range(len(v.shape)), len(v.shape))
            turned = self.transpose(v, perm)
            self.add(turned.name, turned.shape, v.kind, v.exact)

    def op_expand(self):
        v = self.any()
        ones = [a for a in range(len(v.shape)) if v.shape[a] == 1]
        times = {a: self.random.randint(2, 3) for a in ones}
        shape = [times.get(a, s) for a, s in enumerate(v.shape)]
        if self.random.random() < 0.5:
            target = self.ints([1 if s == B else s for s in shape])
            return self.add(self.node("Expand", [v, target]), shape, v.kind, v.exact)
        repeats = [times.get(a, 1) for a in range(len(shape))]
        free = self.axis(v)
        if free is not None and free not in times:
            repeats[free], shape[free] = 2, shape[free] * 2
        self.add(self.node("Tile", [v, self.ints(repeats)]), shape, v.kind, v.exact)

    def op_concat(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        axis = self.axis(v)
        others = [o for o in self.values if o.kind == v.kind and len(o.shape) == len(v.shape)
                  and all(o.shape[a] == v.shape[a] for a in range(len(v.shape)) if a != axis)]
        parts = [v, *self.random.choices(others, k=self.random.randint(1, 2))]
        exact = all(p.exact for p in parts)
        if v.batch == 0 and self.random.random() < 0.3:
            # A constant that is expanded over the batch.
            shape = self.node("Shape", [v])
            parts[-1] = Value(self.node("Expand", [self.floats([1, *v.shape[1:]]), shape]), v.shape)
            exact = False
        out = list(v.shape)
        out[axis] = sum(p.shape[axis] for p in parts)
        name = self.node("Concat", parts, axis=self.signed(axis, len(v.shape)))
        self.add(name, out, v.kind, exact)

    def op_pad(self):
        """Pads of each mode; constant ones may also be negative."""
        kind = self.random.choice(["float", "float", "int64"]) if self.opset >= 11 else "float"
        v = self.any(kind, fits=lambda v: len(v.shape) >= 2)
        if not v:
            return
        modes = ["constant", "constant", "reflect", "edge"] + ["wrap"] * (self.opset >= 19)
        mode = self.random.choice(modes)
        axes = [a for a in range(len(v.shape)) if v.shape[a] != B]
        axes = sorted(self.random.sample(axes, self.random.randint(1, len(axes))))
        pads, shape = {}, list(v.shape)
        for axis in axes:
            n = v.shape[axis]
            least = -((n - 1) // 2) if mode == "constant" else 0
            most = {"reflect": n - 1, "wrap": n}.get(mode, 3)
            pads[axis] = [self.random.randint(least, most) for _ in range(2)]
            shape[axis] += sum(pads[axis])
        value, exact = self.random.choice([-2.5, 0.0, 3.0]), v.exact
        every = [pads.get(a, [0, 0]) for a in range(len(v.shape))]
        if self.opset < 11:
            flat = [p[end] for end in range(2) for p in every]
            name = self.node("Pad", [v], pads=flat, mode=mode, value=value)
            return self.add(name, shape, exact=exact)
        by_axis = self.opset >= 18 and self.random.random() < 0.5
        flat = [p[end] for end in range(2) for p in (pads.values() if by_axis else every)]
        number = numpy.int64(value) if kind == "int64" else numpy.float32(value)
        inputs = [v, self.ints(flat), self.constant(number) if self.random.random() < 0.7 else ""]
        if by_axis:
            inputs.append(self.ints([self.signed(a, len(v.shape)) for a in axes]))
        self.add(self.node("Pad", inputs, mode=mode), shape, kind, exact)

    def op_slice(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        free = [a for a in range(len(v.shape)) if v.shape[a] != B]
        axes = self.random.sample(free, self.random.randint(1, len(free)))
        starts, ends, steps, shape = [], [], [], list(v.shape)
        for axis in axes:
            n, step = v.shape[axis], self.random.choice([1, 1, 2, -1])
            step = step if self.opset >= 10 else 1
            start = self.random.randint(0, n - 1)
            end = self.random.choice([2**63 - 1, n]) if step > 0 else -(2**31)
            if start and self.random.random() < 0.3:
                start -= n
            starts.append(start)
            ends.append(end)
            steps.append(step)
            shape[axis] = len(range(n)[slice(start, None if step < 0 else n, step)])
        if self.opset < 10:
            name = self.node("Slice", [v], starts=starts, ends=ends, axes=axes)
            return self.add(name, shape, v.kind, v.exact)
        inputs = [v, self.ints(starts), self.ints(ends), self.ints(axes)]
        if any(s != 1 for s in steps) or self.random.random() < 0.5:
            inputs.append(self.ints(steps))
        self.add(self.node("Slice", inputs), shape, v.kind, v.exact)

    def op_gather(self):
        v = self.any(fits=lambda v: len(v.shape) >= 2)
        axis = self.axis(v)
        n = v.shape[axis]
        shape = self.random.choice([[], [1], [3], [2, 2]])
        indices = self.ints(self.numpy.integers(-n, n, shape))
        name = self.node("Gather", [v, indices], axis=self.signed(axis, len(v.shape)))
        self.add(name, [*v.shape[:axis], *shape, *v.shape[axis + 1:]], v.kind, v.exact)

    def op_gather_nd(self):
        v = self.any(fits=lambda v: len(v.shape) == 3)
        if not v:
            return
        rest = [a for a in range(3) if a != v.batch]
        v = self.transpose(v, [*rest, v.batch])
        pairs = self.numpy.integers(0, [v.shape[0], v.shape[1]], [4, 2])
        self.add(self.node("GatherND", [v, self.ints(pairs)]), [4, B], v.kind, v.exact)

    def op_split(self):
        v = self.any(fits=lambda v: any(s != B and s >= 2 for s in v.shape))
        if not v:
            return
        axis = self.axis(v, lambda v, a: v.shape[a] != B and v.shape[a] >= 2)
        n = v.shape[axis]
        parts = self.random.choice([[n // 2, n - n // 2], [1, n - 1]])
        given = self.signed(axis, len(v.shape))
        attributes, inputs = {"axis": given}, [v]
        if self.opset >= 18 and self.random.random() < 0.3:
            attributes["num_outputs"], parts = 2, [-(-n // 2), n - -(-n // 2)]
        elif self.opset >= 13:
            inputs.append(self.ints(parts))
        else:
            attributes["split"] = parts
        if min(parts) < 1:
            return
        names = self.node("Split", inputs, outputs=2, **attributes)
        for name, part in zip(names, parts):
            shape = list(v.shape)
            shape[axis] = part
            self.add(name, shape, v.kind, v.exact)

    def op_triangle(self):
        v = self.any(fits=lambda v: len(v.shape) >= 3 and v.batch < len(v.shape) - 2)
        if not v or self.opset < 14:
            return
        diagonal = self.constant(numpy.int64(self.random.randint(-1, 1)))
        name = self.node("Trilu", [v, diagonal], upper=self.random.randint(0, 1))
        self.add(name, v.shape, exact=v.exact)

    def op_positions(self):
        """Positions that a network computes from constants: a mask of lengths."""
        v = self.any(fits=lambda v: len(v.shape) == 2 and v.batch == 0 and v.exact)
        if not v:
            return
        limit = self.constant(numpy.int64(v.shape[1]))
        bounds = [self.constant(numpy.int64(0)), limit, self.constant(numpy.int64(1))]
        steps = self.node("Range", bounds)
        length = self.node("Cast", [v], to=TensorProto.INT64)
        mask = self.node("Less", [steps, length])
        self.add(mask, v.shape, kind="bool", exact=True)

    # ---- the whole

    def finish(self):
        """Joins the last values to the output `out`."""
        used = {i for n in self.nodes for i in n.input}
        ends = [v for v in self.values if v.name not in used] or [self.values[-1]]
        flat = []
        for value in ends:
            if value.kind != "float":
                name = self.node("Cast", [value], to=TensorProto.FLOAT)
                value = Value(name, value.shape)
            flat.append(self.node("Flatten", [self.batch_first(value)], axis=1))
        self.nodes.append(helper.make_node("Concat", flat, ["out"], axis=1))
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", *s])
                  for n, s in INPUTS.items()]
        output = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", None])
        graph = helper.make_graph(self.nodes, "graph", inputs, [output], self.initializers)
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def network(seed):
    """Returns the ONNX file, and the name of its operators."""
    made = Network(seed)
    operators = [getattr(made, n) for n in sorted(dir(made)) if n.startswith("op_")]
    for _ in range(made.random.randint(2, 9)):
        made.random.choice(operators)()
    return made.finish()


def feeds(seed):
    """Returns inputs of quarters, zeros among them."""
    generator = numpy.random.default_rng(seed)
    quarters = lambda shape: generator.integers(-8, 9, [BATCH, *shape]).astype(numpy.float32) / 4
    return {name: quarters(shape) for name, shape in INPUTS.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    refused, written = {}, 0
    with open(args.out, "wb") as out:
        seed = args.seed
        while written < args.count:
            seed += 1
            onnx_bytes = network(seed)
            given = feeds(seed)
            try:
                outputs = cases.expected(onnx_bytes, given, "out")
            except Exception as error:  # An opset lacks an operator, or a form of it.
                reason = type(error).__name__
                refused[reason] = refused.get(reason, 0) + 1
                continue
            if numpy.abs(outputs[numpy.isfinite(outputs)]).max(initial=0) > 1e6:
                continue
            out.write(cases.encode(f"seed {seed}", onnx_bytes, given, "out", outputs))
            written += 1
    print(f"{written} networks; ONNX Runtime refused {sum(refused.values())}", file=sys.stderr)
    for reason, count in sorted(refused.items(), key=lambda r: -r[1])[:8]:
        print(f"  {count} x {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""The architectures of the field as PyTorch modules, small and with random weights.

Each takes pooled embeddings and dense features, and gives scores. Needs torch.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

# Fields, their width, positions of a history, and width of a hidden layer.
FIELDS, DIM, TIME, HIDDEN = 5, 8, 6, 16
if os.environ.get("ZOO") == "large":
    FIELDS, DIM, TIME, HIDDEN = 20, 32, 20, 256


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    inputs = {"dense": [7], "emb": [FIELDS * DIM]}

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.bottom = mlp(7, HIDDEN, DIM)
        n = FIELDS + 1
        pairs = [(i, j) for i in range(n) for j in range(i)]
        self.li, self.lj = [i for i, _ in pairs], [j for _, j in pairs]
        self.register_buffer("flat", torch.tensor([i * n + j for i, j in pairs]))
        self.top = mlp(DIM + len(pairs), HIDDEN, 1)

    def forward(self, dense, emb):
        x = self.bottom(dense)
        t = torch.cat([x.unsqueeze(1), emb.view(-1, FIELDS, DIM)], dim=1)
        z = torch.bmm(t, t.transpose(1, 2))
        if self.form == "index":
            li, lj = torch.tensor(self.li), torch.tensor(self.lj)
            flat = z[:, li, lj]
        else:
            flat = torch.index_select(z.flatten(1), 1, self.flat)
        return self.top(torch.cat([x, flat], dim=1))


class Padded(Dlrm):
    """Pads its layers with zeros, as the DLRM of NVIDIA's recipe, and a sequence in other modes."""

    def forward(self, dense, emb):
        x = F.pad(self.bottom(F.pad(dense, (0, 1))), (2, 1))[:, 2:-1]
        t = torch.cat([x.unsqueeze(1), emb.view(-1, FIELDS, DIM)], dim=1)
        t = F.pad(F.pad(t, (1, 2), mode="reflect"), (2, 0), mode="replicate")
        z = torch.bmm(t, t.transpose(1, 2))
        flat = torch.index_select(z.flatten(1), 1, self.flat)
        return self.top(F.pad(torch.cat([x, flat], dim=1), (0, 3)))

    def __init__(self):
        super().__init__("flat")
        self.bottom, n = mlp(8, HIDDEN, DIM), DIM + self.flat.numel() + 3
        self.top = mlp(n, HIDDEN, 1)


class Cross(nn.Module):
    inputs = {"dense": [7], "emb": [FIELDS * DIM]}

    def __init__(self, form, low=4, experts=3):
        super().__init__()
        self.form, d = form, 7 + FIELDS * DIM
        if form == "v1":
            self.w = nn.ParameterList([nn.Parameter(torch.randn(d, 1) * 0.1) for _ in range(3)])
        else:
            shape = [experts] if form == "mix" else []
            self.u = nn.ParameterList(
                [nn.Parameter(torch.randn(*shape, d, low) * 0.1) for _ in range(3)]
            )
            self.v = nn.ParameterList(
                [nn.Parameter(torch.randn(*shape, d, low) * 0.1) for _ in range(3)]
            )
            self.c = nn.ParameterList(
                [nn.Parameter(torch.randn(*shape, low, low) * 0.3) for _ in range(3)]
            )
            self.gate = nn.Linear(d, experts)
        self.b = nn.ParameterList([nn.Parameter(torch.randn(d) * 0.1) for _ in range(3)])
        self.deep = mlp(d, HIDDEN, 8)
        self.last = nn.Linear(d + 8, 1)

    def forward(self, dense, emb):
        x0 = x = torch.cat([dense, emb], dim=1)
        for i in range(3):
            if self.form == "v1":
                x = x0 * (x @ self.w[i]) + self.b[i] + x
            elif self.form == "low":
                x = x0 * ((x @ self.v[i]) @ self.u[i].t() + self.b[i]) + x
            else:
                gate = torch.softmax(self.gate(x), dim=1)
                low = torch.tanh(torch.einsum("bd,edr->ber", x, self.v[i]))
                low = torch.tanh(torch.einsum("ber,ers->bes", low, self.c[i]))
                each = torch.einsum("ber,edr->bed", low, self.u[i])
                each = x0.unsqueeze(1) * (each + self.b[i])
                x = torch.einsum("bed,be->bd", each, gate) + x
        return self.last(torch.cat([x, self.deep(x0)], dim=1))


class DeepFm(nn.Module):
    inputs = {"dense": [7], "first": [FIELDS], "second": [FIELDS * DIM]}

    def __init__(self):
        super().__init__()
        self.deep = mlp(7 + FIELDS * DIM, HIDDEN, 1)
        self.linear = nn.Linear(7, 1)

    def forward(self, dense, first, second):
        v = second.view(-1, FIELDS, DIM)
        fm = 0.5 * ((v.sum(1) ** 2) - (v ** 2).sum(1)).sum(1, keepdim=True)
        deep = self.deep(torch.cat([dense, second], dim=1))
        return fm + first.sum(1, keepdim=True) + self.linear(dense) + deep


class Fields(nn.Module):
    """PNN, SENet, AFM, xDeepFM, AutoInt and MaxPool over the fields' vectors."""

    inputs = {"emb": [FIELDS * DIM]}

    def __init__(self, form):
        super().__init__()
        self.form = form
        pairs = [(i, j) for i in range(FIELDS) for j in range(i)]
        self.register_buffer("i", torch.tensor([i for i, _ in pairs]))
        self.register_buffer("j", torch.tensor([j for _, j in pairs]))
        width = {"pnn": FIELDS * DIM + len(pairs), "afm": DIM, "xdeepfm": 11,
                 "autoint": FIELDS * DIM, "max": DIM}.get(form, FIELDS * DIM)
        self.top = mlp(width, HIDDEN, 1)
        if form == "senet":
            self.squeeze = mlp(FIELDS, 3, FIELDS)
        if form == "afm":
            self.att, self.h = nn.Linear(DIM, 4), nn.Linear(4, 1, bias=False)
        if form == "xdeepfm":
            self.conv1 = nn.Conv1d(FIELDS * FIELDS, 6, 1)
            self.conv2 = nn.Conv1d(FIELDS * 6, 5, 1)
        if form == "autoint":
            self.att = nn.MultiheadAttention(DIM, 2, batch_first=True)
            self.res = nn.Linear(DIM, DIM)

    def forward(self, emb):
        v = emb.view(-1, FIELDS, DIM)
        if self.form == "pnn":
            return self.top(torch.cat([emb, (v[:, self.i] * v[:, self.j]).sum(-1)], dim=1))
        if self.form == "senet":
            weight = torch.relu(self.squeeze(v.mean(dim=2)))
            return self.top((v * weight.unsqueeze(2)).flatten(1))
        if self.form == "afm":
            p = v[:, self.i] * v[:, self.j]
            a = torch.softmax(self.h(torch.relu(self.att(p))), dim=1)
            return self.top((a * p).sum(1))
        if self.form == "xdeepfm":
            z = torch.einsum("bhd,bmd->bhmd", v, v).reshape(-1, FIELDS * FIELDS, DIM)
            one = torch.relu(self.conv1(z))
            z = torch.einsum("bhd,bmd->bhmd", one, v).reshape(-1, 6 * FIELDS, DIM)
            two = torch.relu(self.conv2(z))
            return self.top(torch.cat([one.sum(-1), two.sum(-1)], dim=1))
        if self.form == "autoint":
            a, _ = self.att(v, v, v)
            return self.top(torch.relu(a + self.res(v)).flatten(1))
        return self.top(v.max(dim=1).values)


class Towers(nn.Module):
    inputs = {"user": [12], "item": [10]}

    def __init__(self, normal):
        super().__init__()
        self.normal = normal
        self.user, self.item = mlp(12, HIDDEN, 8), mlp(10, HIDDEN, 8)

    def forward(self, user, item):
        u, i = self.user(user), self.item(item)
        if self.normal:
            u, i = F.normalize(u, dim=1), F.normalize(i, dim=1)
        return (u * i).sum(1, keepdim=True)


class Activated(nn.Module):
    """An MLP with one function."""

    inputs = {"dense": [7]}

    def __init__(self, act):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(7, HIDDEN), nn.Linear(HIDDEN, 1), act

    def forward(self, dense):
        return self.b(self.act(self.a(dense)))


class Log1p(nn.Module):
    inputs = {"dense": [7]}

    def __init__(self):
        super().__init__()
        self.net = mlp(7, HIDDEN, 1)

    def forward(self, dense):
        return self.net(torch.log1p(torch.clamp(dense, min=0)))


class Truncated(nn.Module):
    inputs = {"dense": [7]}

    def __init__(self):
        super().__init__()
        self.net = mlp(7, HIDDEN, 1)

    def forward(self, dense):
        return self.net((dense * 4).long().float())


class HalfInside(nn.Module):
    inputs = {"dense": [7]}

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, dense):
        return self.b(torch.relu(self.a(dense)).half().float())


class HalfWeights(nn.Module):
    inputs = {"dense": [7]}

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(HIDDEN, 7).half())
        self.b = nn.Linear(HIDDEN, 1)

    def forward(self, dense):
        return self.b(torch.relu(F.linear(dense, self.w.float())))


class Multi(nn.Module):
    """Shared bottom, MMoE and ESMM."""

    inputs = {"dense": [7], "emb": [FIELDS * DIM]}

    def __init__(self, form):
        super().__init__()
        self.form, d = form, 7 + FIELDS * DIM
        self.outputs = ["ctr", "cvr"] if form in ("shared", "mmoe2", "esmm") else ["out"]
        self.shared = mlp(d, HIDDEN, 8)
        self.experts = nn.ModuleList([mlp(d, 12, 8) for _ in range(3)])
        self.gates = nn.ModuleList([nn.Linear(d, 3) for _ in range(2)])
        self.towers = nn.ModuleList([mlp(8, 6, 1) for _ in range(2)])
        self.whole = nn.ModuleList([mlp(d, 12, 1) for _ in range(2)])

    def forward(self, dense, emb):
        x = torch.cat([dense, emb], dim=1)
        if self.form == "shared":
            y = self.shared(x)
            return self.towers[0](y), self.towers[1](y)
        if self.form == "esmm":
            ctr = torch.sigmoid(self.whole[0](x))
            return ctr, ctr * torch.softmax(torch.cat([self.whole[1](x), ctr], 1), 1)[:, :1]
        experts = torch.stack([e(x) for e in self.experts], dim=1)
        out = []
        for gate, tower in zip(self.gates, self.towers):
            weight = torch.softmax(gate(x), dim=1).unsqueeze(1)
            out.append(tower(torch.bmm(weight, experts).squeeze(1)))
        return tuple(out) if self.form == "mmoe2" else torch.cat(out, dim=1)


class Dice(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bn, self.alpha = (
            nn.BatchNorm1d(n, eps=1e-3, affine=False), nn.Parameter(torch.zeros(n))
        )
        self.prelu = nn.PReLU(n)

    def forward(self, x):
        p = torch.sigmoid(self.bn(x))
        return self.prelu(p * x + (1 - p) * self.alpha * x)


class Normed(nn.Module):
    inputs = {"dense": [7], "emb": [FIELDS * DIM]}

    def __init__(self, form):
        super().__init__()
        d = 7 + FIELDS * DIM
        layers = {
            "first": [nn.BatchNorm1d(d), nn.Linear(d, HIDDEN), nn.ReLU()],
            "after": [nn.Linear(d, HIDDEN), nn.ReLU(), nn.BatchNorm1d(HIDDEN)],
            "layer": [nn.Linear(d, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU()],
            "dice": [nn.Linear(d, HIDDEN), Dice(HIDDEN)],
        }[form]
        self.net = nn.Sequential(*layers, nn.Linear(HIDDEN, 1))
        for m in self.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.running_mean.normal_(0, 0.5)
                m.running_var.uniform_(0.5, 2)

    def forward(self, dense, emb):
        return self.net(torch.cat([dense, emb], dim=1))


class Din(nn.Module):
    """DIN, and DIEN with its GRUs; the history is masked by its length or by its zero rows."""

    inputs = {"dense": [3], "target": [DIM], "history": [TIME * DIM]}

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.att = mlp(4 * DIM, HIDDEN, 1, act=nn.Sigmoid)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.cell = nn.Linear(2 * DIM, 2 * DIM)
        self.new = nn.Linear(2 * DIM, DIM)
        self.top = mlp(3 + 2 * DIM, HIDDEN, 1)

    def forward(self, dense, target, history):
        h = history.view(-1, TIME, DIM)
        if self.form == "length":
            mask = torch.arange(TIME).unsqueeze(0) < dense[:, :1] * 4
        else:
            mask = h.abs().sum(-1) > 0
        if self.form == "dien":
            h, _ = self.gru(h)
        t = target.unsqueeze(1).expand(-1, TIME, -1)
        score = self.att(torch.cat([t, h, t - h, t * h], dim=-1)).squeeze(-1)
        if self.form == "length":
            score = torch.softmax(score.masked_fill(~mask, -1e9), dim=1)
        elif self.form == "dien":
            score = torch.softmax(torch.where(mask, score, torch.full_like(score, -1e4)), dim=1)
        else:
            score = score * mask.float()
        if self.form == "dien":
            state = torch.zeros_like(target)
            for i in range(TIME):
                both = torch.cat([h[:, i], state], dim=1)
                update, reset = torch.sigmoid(self.cell(both)).chunk(2, dim=1)
                new = torch.tanh(self.new(torch.cat([h[:, i], reset * state], dim=1)))
                update = update * score[:, i:i + 1]
                state = (1 - update) * state + update * new
            pooled = state
        else:
            pooled = torch.bmm(score.unsqueeze(1), h).squeeze(1)
        return self.top(torch.cat([dense, target, pooled], dim=1))


class Recurrent(nn.Module):
    inputs = {"history": [TIME * DIM]}

    def __init__(self):
        super().__init__()
        self.gru, self.top = nn.GRU(DIM, 10, batch_first=True), nn.Linear(10, 1)

    def forward(self, history):
        out, _ = self.gru(history.view(-1, TIME, DIM))
        return self.top(out[:, -1])


class Transformer(nn.Module):
    """BST by PyTorch's encoder, a transformer by hand, and a block of HSTU."""

    inputs = {"dense": [3], "target": [DIM], "history": [TIME * DIM]}

    def __init__(self, form):
        super().__init__()
        self.form = form
        layer = nn.TransformerEncoderLayer(DIM, 2, HIDDEN, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.position = nn.Parameter(torch.randn(1, TIME + 1, DIM) * 0.1)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.uvqk, self.norm = nn.Linear(DIM, 4 * DIM), nn.LayerNorm(DIM)
        self.norm2, self.bias = (
            nn.LayerNorm(DIM), nn.Parameter(torch.randn(1, 1, TIME + 1, TIME + 1) * 0.1)
        )
        self.ff = mlp(DIM, HIDDEN, DIM)
        self.top = mlp(3 + (TIME + 1) * DIM, HIDDEN, 1)

    def heads(self, x):
        return x.view(-1, TIME + 1, 2, DIM // 2).transpose(1, 2)

    def forward(self, dense, target, history):
        x = torch.cat([history.view(-1, TIME, DIM), target.unsqueeze(1)], dim=1) + self.position
        if self.form == "bst":
            x = self.encoder(x)
        elif self.form == "hstu":
            u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=-1)
            weight = F.silu(self.heads(q) @ self.heads(k).transpose(-1, -2) + self.bias)
            weight = weight * torch.tril(torch.ones(TIME + 1, TIME + 1)) / (TIME + 1)
            mixed = (weight @ self.heads(v)).transpose(1, 2).reshape(-1, TIME + 1, DIM)
            x = x + self.out(self.norm2(mixed) * u)
        else:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            a = self.heads(q) @ self.heads(k).transpose(-1, -2) / (DIM // 2) ** 0.5
            a = torch.softmax(a, dim=-1) @ self.heads(v)
            x = self.norm(x + self.out(a.transpose(1, 2).reshape(-1, TIME + 1, DIM)))
            x = self.norm2(x + self.ff(x))
        return self.top(torch.cat([dense, x.flatten(1)], dim=1))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def activated(function):
    return lambda: Activated(Function(function))


ZOO = {
    "dlrm_index_select": lambda: Dlrm("select"),
    "dlrm_facebook": lambda: Dlrm("index"),
    "dcn_v1": lambda: Cross("v1"),
    "dcn_v2_low_rank": lambda: Cross("low"),
    "dcn_mix": lambda: Cross("mix"),
    "deepfm": DeepFm,
    "pnn": lambda: Fields("pnn"),
    "senet": lambda: Fields("senet"),
    "afm": lambda: Fields("afm"),
    "xdeepfm": lambda: Fields("xdeepfm"),
    "autoint": lambda: Fields("autoint"),
    "max_pooling": lambda: Fields("max"),
    "two_tower_dot": lambda: Towers(False),
    "two_tower_l2": lambda: Towers(True),
    "shared_bottom": lambda: Multi("shared"),
    "mmoe": lambda: Multi("mmoe"),
    "mmoe_two_outputs": lambda: Multi("mmoe2"),
    "esmm": lambda: Multi("esmm"),
    "batch_norm_first": lambda: Normed("first"),
    "batch_norm_after_relu": lambda: Normed("after"),
    "layer_norm": lambda: Normed("layer"),
    "dice_prelu": lambda: Normed("dice"),
    "din_length_mask": lambda: Din("length"),
    "din_zero_mask": lambda: Din("zero"),
    "gru": Recurrent,
    "bst": lambda: Transformer("bst"),
    "transformer": lambda: Transformer("hand"),
    "mlp_sigmoid": activated(torch.sigmoid),
    "mlp_tanh": activated(torch.tanh),
    "mlp_silu": activated(F.silu),
    "mlp_gelu_tanh": activated(lambda x: F.gelu(x, approximate="tanh")),
    "mlp_gelu": activated(F.gelu),
    "mlp_leaky_relu": activated(lambda x: F.leaky_relu(x, 0.1)),
    "mlp_elu": activated(F.elu),
    "mlp_selu": activated(F.selu),
    "mlp_softplus": activated(F.softplus),
    "mlp_hardswish": activated(F.hardswish),
    "mlp_relu6": activated(F.relu6),
    "mlp_mish": activated(F.mish),
    "mlp_exp": activated(lambda x: torch.exp(-x.abs())),
    "mlp_abs": activated(torch.abs),
    "mlp_cube": activated(lambda x: x ** 3),
    "mlp_sqrt": activated(lambda x: torch.sqrt(x.abs() + 0.1)),
    "log1p_clip": Log1p,
    "truncated": Truncated,
    "fp16_inside": HalfInside,
    # Beyond the 46 architectures.
    "fp16_weights": HalfWeights,
    "dien": lambda: Din("dien"),
    "hstu": lambda: Transformer("hstu"),
    "padded": Padded,
}


def make(name):
    """Returns the module with its random weights, which depend on the name only."""
    torch.manual_seed(sum(map(ord, name)))
    return ZOO[name]().eval()

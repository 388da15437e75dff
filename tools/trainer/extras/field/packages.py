"""The model classes of public packages, built with their own calls and random weights.

A function for each package returns its cases. The one line that a user needs beside building and
training is the `export` of the caller.
"""

import inspect
import os
import sys
import types
from importlib.machinery import ModuleSpec

import torch

from data import DIM, LENGTH, ROWS, Case
from data import rows as data_rows

SPARSE = ("user", "item", "city")


class Anything(types.ModuleType):
    """A module whose every name is an empty class."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandIns:
    """Lets packages import what they do not need for a model."""

    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.split(".")[0] in self.roots else None

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module):
        pass


def stand_in(*roots):
    """Returns the stand-ins of these packages, which are imported from now on."""
    sys.meta_path.append(StandIns(roots))
    return sys.meta_path[-1]


def torchfm():
    from torchfm.model import afi, afm, afn, dcn, dfm, ffm, fm, fnfm
    from torchfm.model import fnn, lr, ncf, nfm, pnn, wd, xdfm

    dims = [ROWS[name] for name in SPARSE]
    batch = lambda rows: torch.stack([rows[name] for name in SPARSE], dim=1)
    mlp, drop = (16,), (0.0, 0.0)
    made = {
        "LR": lambda: lr.LogisticRegressionModel(dims),
        "FM": lambda: fm.FactorizationMachineModel(dims, DIM),
        "FFM": lambda: ffm.FieldAwareFactorizationMachineModel(dims, 4),
        "FNN": lambda: fnn.FactorizationSupportedNeuralNetworkModel(dims, DIM, mlp, 0.0),
        "WD": lambda: wd.WideAndDeepModel(dims, DIM, mlp, 0.0),
        "IPNN": lambda: pnn.ProductNeuralNetworkModel(dims, DIM, mlp, 0.0, method="inner"),
        "OPNN": lambda: pnn.ProductNeuralNetworkModel(dims, DIM, mlp, 0.0, method="outer"),
        "DCN": lambda: dcn.DeepCrossNetworkModel(dims, DIM, 3, mlp, 0.0),
        "NFM": lambda: nfm.NeuralFactorizationMachineModel(dims, DIM, mlp, drop),
        "NCF": lambda: ncf.NeuralCollaborativeFiltering(dims, [0], [1], DIM, (16, 8), 0.0),
        "FNFM": lambda: fnfm.FieldAwareNeuralFactorizationMachineModel(dims, 4, mlp, drop),
        "DFM": lambda: dfm.DeepFactorizationMachineModel(dims, DIM, mlp, 0.0),
        "XDFM": lambda: xdfm.ExtremeDeepFactorizationMachineModel(dims, DIM, mlp, 0.0, (8, 8)),
        "AFM": lambda: afm.AttentionalFactorizationMachineModel(dims, DIM, 8, drop),
        "AFI": lambda: afi.AutomaticFeatureInteractionModel(
            dims, DIM, 16, 2, 2, mlp, (0.0, 0.0, 0.0)),
        "AFN": lambda: afn.AdaptiveFactorizationNetwork(dims, DIM, 30, mlp, drop),
    }
    return [Case("torchfm", name, build, batch) for name, build in made.items()]


def deepctr():
    tensorflow = stand_in("tensorflow")
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat, get_feature_names
    from deepctr_torch.models.multitask import ESMM, MMOE, PLE, SharedBottom

    # TensorBoard, which another package imports, would take the stand-in for TensorFlow.
    sys.meta_path.remove(tensorflow)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorflow"]:
        del sys.modules[name]

    plain = [SparseFeat(name, ROWS[name], DIM) for name in SPARSE] + [
        DenseFeat("age", 1), DenseFeat("price", 1)]
    lists = [VarLenSparseFeat(
        SparseFeat("genres", ROWS["genres"], DIM), maxlen=LENGTH["genres"], combiner="mean")]
    wide = plain + lists
    history = plain[:3] + [VarLenSparseFeat(
        SparseFeat("hist_item", ROWS["item"], DIM, embedding_name="item"),
        maxlen=LENGTH["history"], length_name="hist_length")]

    def matrix(features):
        def batch(rows):
            given = rows | {"hist_item": rows["history"], "hist_length": rows["history_length"]}
            names = get_feature_names(features)
            return torch.cat(
                [given[name].reshape(len(rows["user"]), -1).float() for name in names], dim=1)

        return batch

    both = {name: getattr(models, name) for name in (
        "AFM", "AFN", "AutoInt", "CCPM", "DCN", "DCNMix", "DeepFM", "DIFM", "FiBiNET", "IFM", "NFM",
        "ONN", "WDL", "xDeepFM")}
    cases = [
        Case("deepctr-torch", name, lambda kind=kind: kind(wide, wide), matrix(wide))
        for name, kind in both.items() if name not in ("AFM", "CCPM", "DCNMix", "ONN")
    ] + [
        Case("deepctr-torch", name, lambda kind=both[name]: kind(plain, plain), matrix(plain))
        for name in ("DCNMix", "ONN")
    ] + [
        Case("deepctr-torch", name, lambda kind=both[name]: kind(plain, plain[:3]), matrix(plain))
        for name in ("AFM", "CCPM")
    ]
    cases.append(Case("deepctr-torch", "DeepFM without lists",
                      lambda: models.DeepFM(plain, plain), matrix(plain)))
    cases.append(Case("deepctr-torch", "PNN", lambda: models.PNN(wide), matrix(wide)))
    cases.append(Case("deepctr-torch", "MLR", lambda: models.MLR(wide), matrix(wide)))
    cases.append(Case(
        "deepctr-torch", "DIN", lambda: models.DIN(history, ["item"]), matrix(history), {}, True))
    cases += [
        Case("deepctr-torch", f"DIEN {kind}", lambda kind=kind: models.DIEN(
            history, ["item"], gru_type=kind), matrix(history), {}, True)
        for kind in ("GRU", "AUGRU")
    ]
    for kind in (ESMM, MMOE, PLE, SharedBottom):
        names = ("ctr", "ctcvr") if kind is ESMM else ("ctr", "cvr")
        cases.append(Case("deepctr-torch", kind.__name__, lambda kind=kind, names=names: kind(
            wide, task_types=("binary", "binary"), task_names=names), matrix(wide)))
    return cases


def rechub():
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
    from torch_rechub.models import matching, multi_task, ranking

    sparse = lambda: [SparseFeature(name, ROWS[name], DIM) for name in SPARSE]
    dense = lambda: [DenseFeature("age"), DenseFeature("price")]
    history = lambda pooling="concat": [
        SequenceFeature("history", ROWS["item"], DIM, pooling=pooling, shared_with="item")]
    mlp = {"dims": [16], "dropout": 0.0, "activation": "relu"}
    names = (*SPARSE, "age", "price")
    batch = lambda rows: {name: rows[name] for name in names}
    with_history = lambda rows: {name: rows[name] for name in (*SPARSE, "history")}
    towers = [{"dims": [8]}, {"dims": [8]}]
    tasks = ["classification", "classification"]
    all_ = lambda: sparse() + dense()
    made = {
        "WideDeep": lambda: ranking.WideDeep(all_(), all_(), mlp),
        "DeepFM": lambda: ranking.DeepFM(all_(), sparse(), mlp),
        "DCN": lambda: ranking.DCN(all_(), 2, mlp),
        "DCNv2": lambda: ranking.DCNv2(all_(), 2, mlp),
        "DCNv2_stack": lambda: ranking.DCNv2(all_(), 2, mlp, "stacked"),
        "EDCN": lambda: ranking.EDCN(sparse(), 2, mlp),
        "FiBiNet": lambda: ranking.FiBiNet(sparse(), mlp),
        "AutoInt": lambda: ranking.AutoInt(sparse(), dense(), mlp_params=mlp),
        "DeepFFM": lambda: ranking.DeepFFM(
            sparse(), [SparseFeature(one, 3 * ROWS[one], DIM) for one in SPARSE], DIM,
            {"dims": [16], "dropout": 0.0}),
        "SharedBottom": lambda: multi_task.SharedBottom(all_(), tasks, {"dims": [16]}, towers),
        "MMOE": lambda: multi_task.MMOE(all_(), tasks, 3, {"dims": [16]}, towers),
        "PLE": lambda: multi_task.PLE(all_(), tasks, 1, 2, 1, {"dims": [16]}, towers),
        "ESMM": lambda: multi_task.ESMM(sparse()[:1], sparse()[1:], {"dims": [16]}, {"dims": [16]}),
        "AITM": lambda: multi_task.AITM(all_(), 2, {"dims": [16]}, towers),
    }
    cases = [Case("torch-rechub", name, build, batch) for name, build in made.items()]
    afm = lambda: ranking.AFM([SparseFeature(name, ROWS[name], DIM) for name in SPARSE], DIM)
    cases.append(Case("torch-rechub", "AFM", afm, batch))
    padded = lambda: [*sparse(), SequenceFeature(
        "genres", ROWS["genres"], DIM, pooling="mean", padding_idx=0)]
    cases.append(Case(
        "torch-rechub", "DeepFM padded", lambda: ranking.DeepFM(padded(), padded(), mlp),
        lambda rows: {name: rows[name] for name in (*SPARSE, "genres")}))
    target = lambda: [SparseFeature("item", ROWS["item"], DIM)]
    user = lambda: [SparseFeature("user", ROWS["user"], DIM), SparseFeature("city", 10, DIM)]
    cases.append(Case("torch-rechub", "DIN", lambda: ranking.DIN(
        user(), history(), target(), {"dims": [16]}, {"dims": [16]}), with_history, {}, True))
    cases.append(Case("torch-rechub", "BST", lambda: ranking.BST(
        user(), history(), target(), mlp, nhead=4, max_seq_len=9), with_history, {}, True))
    cases.append(Case("torch-rechub", "DSSM", lambda: matching.DSSM(
        sparse()[:1], sparse()[1:], {"dims": [16, 8]}, {"dims": [16, 8]}), batch))
    return cases + rechub_sequences(mlp)


def rechub_sequences(mlp):
    from torch_rechub.basic.features import SequenceFeature, SparseFeature
    from torch_rechub.models import matching, ranking

    of_items = lambda *names: [SequenceFeature(
        name, ROWS["item"], DIM, pooling="concat", shared_with="item", padding_idx=0)
        for name in names]
    item = lambda: [SparseFeature("item", ROWS["item"], DIM, padding_idx=0)]
    user = lambda: [SparseFeature("user", ROWS["user"], DIM), SparseFeature("city", 10, DIM)]
    layers = {"dims": [16], "dropout": 0.0}
    made = {
        "DIEN": lambda: ranking.DIEN(
            user(), of_items("history"), of_items("other"), item(), layers),
        "NARM": lambda: matching.NARM(of_items("history")[0], DIM, 0.0, 0.0, item()[0]),
        "GRU4Rec": lambda: matching.GRU4Rec(
            user(), of_items("history"), item(), of_items("other"), mlp | {"dims": [DIM]}),
        "SASRec": lambda: matching.SASRec([
            SequenceFeature(name, ROWS["item"], DIM, pooling="concat", shared_with=shared)
            for name, shared in (("seq", None), ("pos", "seq"), ("neg", "seq"))],
            LENGTH["history"]),
    }
    names = {"NARM": ("item", "history"), "SASRec": ("seq", "pos", "neg")}
    batch = lambda names: lambda rows: {
        name: rows[name] if name in rows else rows["history"] for name in names}
    options = {"SASRec": {"outputs": ["output0"]}}
    return [
        Case("torch-rechub", name, build, batch(names.get(name, (*SPARSE, "history", "other"))),
             options.get(name, {}), True) for name, build in made.items()
    ]


def recbole():
    stand_in("ray", "hyperopt", "thop", "kmeans_pytorch", "wandb")
    import numpy

    for name, now in (("float_", "float64"), ("complex_", "complex128"), ("unicode_", "str_")):
        vars(numpy).setdefault(name, getattr(numpy, now))  # names of NumPy 1
    import recbole.model.context_aware_recommender as context
    import recbole.model.general_recommender as general
    import recbole.model.sequential_recommender as sequential
    from recbole.config import Config
    from recbole.data.interaction import Interaction
    from recbole.utils import FeatureSource, FeatureType

    class Dataset:
        """What the models ask a dataset for."""

        field2type = dict.fromkeys(("user_id", "city", "item_id"), FeatureType.TOKEN) | {
            "genres": FeatureType.TOKEN_SEQ}
        field2source = {}
        field2seqlen = {"item_id_list": LENGTH["history"]}

        def __init__(self, config):
            self.config = config
            self.user_num, self.item_num = ROWS["user"], ROWS["item"]

        @property
        def inter_feat(self):
            return batch(data_rows(64, 3))

        def fields(self, source):
            user, item = ("user_id", "city"), ("item_id", "genres")
            return [*(user if FeatureSource.USER in source else ()),
                    *(item if FeatureSource.ITEM in source else ())]

        def num(self, name):
            return ROWS.get(name.removesuffix("_id"), ROWS["item"])

        def inter_matrix(self, form="coo", value_field=None):
            from scipy.sparse import coo_matrix

            draw = torch.Generator().manual_seed(9)
            user = torch.randint(1, ROWS["user"], (400,), generator=draw).numpy()
            item = torch.randint(1, ROWS["item"], (400,), generator=draw).numpy()
            made = coo_matrix(([1.0] * 400, (user, item)), shape=(ROWS["user"], ROWS["item"]))
            return made if form == "coo" else made.tocsr()

        def history_item_matrix(self, *rest, **named):
            draw = torch.Generator().manual_seed(8)
            return (torch.randint(1, 80, (50, 6), generator=draw), torch.ones(50, 6),
                    torch.full((50,), 6))

        def history_user_matrix(self, *rest, **named):
            draw = torch.Generator().manual_seed(7)
            return (torch.randint(1, 50, (80, 6), generator=draw), torch.ones(80, 6),
                    torch.full((80,), 6))

    def build(kind):
        def made():
            given = {
                "data_path": "/tmp", "use_gpu": False, "MAX_ITEM_LIST_LENGTH": LENGTH["history"],
                "hidden_size": DIM,
                "embedding_size": 64 if kind.__name__ == "ConvNCF" else DIM,
                "inner_size": 16, "n_heads": 2,
                "train_neg_sample_args": None, "device": "cpu", "log_wandb": False,
                "loss_type": "BPR" if kind.__name__ == "FPMC" else "CE",
                "INVERSE_ITEM_SEQ": "inverse_item_id_list",  # which RecBole's transform adds
            }
            sys.argv = sys.argv[:1]
            config = Config(model=kind.__name__, dataset="ml-100k", config_dict=given)
            config["device"] = torch.device("cpu")
            return kind(config, Dataset(config)).predict

        return made

    def batch(rows):
        return Interaction({
            "user_id": rows["user"], "item_id": rows["item"],
            "item_id_list": rows["history"], "item_length": rows["history_length"],
            "inverse_item_id_list": rows["history"],
        })

    def columns(rows):
        return Interaction({
            "user_id": rows["user"], "item_id": rows["item"], "city": rows["city"],
            "genres": rows["genres"],
        })

    names = ("SASRec", "GRU4Rec", "NARM", "Caser", "STAMP", "NextItNet", "SHAN", "LightSANs",
             "CORE", "BERT4Rec", "SINE", "FPMC", "HGN", "HRM", "NPE", "TransRec", "FOSSIL",
             "SRGNN", "GCSAN",
             "RepeatNet", "FEARec")
    cases = [
        Case("recbole", name, build(getattr(sequential, name)), batch, {}, True)
        for name in names if hasattr(sequential, name)
    ]
    cases += [
        Case("recbole", name, build(getattr(general, name)), batch)
        for name in ("BPR", "NeuMF", "DMF", "ConvNCF", "FISM", "NAIS", "ENMF", "SimpleX")
        if hasattr(general, name)
    ]
    return cases + [
        Case("recbole", name, build(getattr(context, name)), columns)
        for name in ("DeepFM", "WideDeep", "DCNV2", "AutoInt", "xDeepFM", "PNN", "AFM", "DSSM")
    ]


def widedeep():
    stand_in("spacy", "torchvision", "gensim", "cv2", "imutils", "sentencepiece", "transformers",
             "sentence_transformers", "fastparquet")
    from pytorch_widedeep import models

    columns = [*SPARSE, "age", "price"]
    place = {name: number for number, name in enumerate(columns)}
    sizes = [(name, ROWS[name] - 1, DIM) for name in SPARSE]
    same = [(name, ROWS[name] - 1) for name in SPARSE]
    batch = lambda rows: {"deeptabular": torch.stack(
        [rows[name].float() for name in columns], dim=1)}
    given = {"column_idx": place, "continuous_cols": ["age", "price"]}

    def whole(kind, **options):
        def build():
            mixed = {"cat_embed_input": sizes if "input_dim" not in inspect.signature(
                kind.__init__).parameters else same}
            return models.WideDeep(deeptabular=kind(**given, **mixed, **options))

        return build

    kinds = {
        "TabMlp": {"mlp_hidden_dims": [16, 8]}, "TabResnet": {"blocks_dims": [16, 8]}, "TabNet": {},
        "TabTransformer": {"input_dim": 8, "n_heads": 2, "n_blocks": 2, "embed_continuous": True,
                           "embed_continuous_method": "standard"},
        "FTTransformer": {"input_dim": 8, "n_heads": 2, "n_blocks": 2},
        "SAINT": {"input_dim": 8, "n_heads": 2, "n_blocks": 2},
        "TabFastFormer": {"input_dim": 8, "n_heads": 2, "n_blocks": 2},
        "TabPerceiver": {"input_dim": 8, "n_perceiver_blocks": 2, "n_latents": 4, "latent_dim": 8,
                         "n_latent_heads": 2, "n_latent_blocks": 2},
        "ContextAttentionMLP": {"input_dim": 8}, "SelfAttentionMLP": {"input_dim": 8, "n_heads": 2},
    }
    both = lambda: models.WideDeep(models.Wide(sum(ROWS[name] for name in SPARSE)), models.TabMlp(
        **given, cat_embed_input=sizes, mlp_hidden_dims=[16, 8]))
    begins = torch.tensor([0, ROWS["user"], ROWS["user"] + ROWS["item"]])
    wide = lambda rows: {"wide": torch.stack([rows[name] for name in SPARSE], dim=1) + begins}
    return [
        Case("pytorch-widedeep", name, whole(getattr(models, name), **options), batch)
        for name, options in kinds.items()
    ] + [Case("pytorch-widedeep", "Wide+TabMlp", both, lambda rows: wide(rows) | batch(rows))]


def torchrec():
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models import deepfm, dlrm

    names = (*SPARSE, "genres")
    tables = lambda: EmbeddingBagCollection(device=torch.device("cpu"), tables=[
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS[name],
                           feature_names=[name]) for name in names])
    layers = {"dense_in_features": 2, "dense_arch_layer_sizes": [16, DIM],
              "over_arch_layer_sizes": [16, 1]}

    def batch(rows):
        one = torch.ones(len(rows["user"]), dtype=torch.int64)
        lengths = torch.cat([one, one, one, rows["genres_length"]])
        keys = torch.cat([rows[name] for name in SPARSE] + [rows["genres"][rows["genres"] > 0]])
        dense = torch.stack([rows["age"], rows["price"]], dim=1)
        return dense, KeyedJaggedTensor.from_lengths_sync(list(names), keys, lengths)

    made = {
        "DLRM": lambda: dlrm.DLRM(tables(), **layers),
        "DLRM_DCN": lambda: dlrm.DLRM_DCN(
            tables(), **layers, dcn_num_layers=2, dcn_low_rank_dim=4),
        "DLRM_Projection": lambda: dlrm.DLRM_Projection(
            tables(), **layers, interaction_branch1_layer_sizes=[16, 2 * DIM],
            interaction_branch2_layer_sizes=[16, 2 * DIM]),
        "SimpleDeepFMNN": lambda: deepfm.SimpleDeepFMNN(2, tables(), 16, 5),
    }
    options = {"hotness_max": {"genres": LENGTH["genres"]}}
    return [Case("torchrec", name, build, batch, options) for name, build in made.items()]


def keras():
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    from hatchback_trainer.keras_models import export_keras

    layer = keras.layers
    names = ("user", "item", "city")

    def inputs():
        found = {name: keras.Input((), name=name, dtype="int64") for name in names}
        found["history"] = keras.Input((LENGTH["history"],), name="history", dtype="int64")
        return found | {name: keras.Input((1,), name=name) for name in ("age", "price")}

    def wide_and_deep():
        given = inputs()
        wide = [layer.Embedding(ROWS[name], 1)(given[name]) for name in names]
        deep = [layer.Embedding(ROWS[name], DIM)(given[name]) for name in names]
        deep = layer.Concatenate()([*deep, given["age"], given["price"]])
        deep = layer.Dense(1)(layer.BatchNormalization()(layer.Dense(16, "relu")(deep)))
        return keras.Model(given, layer.Activation("sigmoid")(layer.Add()([*wide, deep])))

    def two_towers():
        given = inputs()
        tower = lambda *names: layer.Dense(DIM, "tanh")(layer.Concatenate()(
            [layer.Embedding(ROWS[name], DIM)(given[name]) for name in names]))
        score = layer.Dot(1, normalize=True)([tower("user", "city"), tower("item", "city")])
        return keras.Model(given, layer.Dense(1)(score))

    def mean_of_history():
        given = inputs()
        items = layer.Embedding(ROWS["item"], DIM, mask_zero=True)
        mean = layer.GlobalAveragePooling1D()(items(given["history"]))
        joined = layer.Concatenate()([mean, items(given["item"]), given["age"]])
        return keras.Model(given, layer.Dense(1, "sigmoid")(layer.Dense(16, "gelu")(joined)))

    def batch(rows):
        found = {name: rows[name] for name in (*names, "history")}
        return found | {name: rows[name][:, None] for name in ("age", "price")}

    made = {"wide and deep": wide_and_deep, "two towers": two_towers, "history": mean_of_history}
    return [
        Case("keras", name, build, batch, export=export_keras) for name, build in made.items()
    ]


PACKAGES = {
    "torchfm": torchfm, "deepctr-torch": deepctr, "torch-rechub": rechub, "recbole": recbole,
    "pytorch-widedeep": widedeep, "torchrec": torchrec, "keras": keras,
}

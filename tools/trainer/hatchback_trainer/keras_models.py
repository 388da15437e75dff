"""Exports a model of Keras 3, whose PyTorch backend makes it an nn.Module.

A model that another backend trained is saved, and loaded again under KERAS_BACKEND=torch.
"""

import torch

from .exporter import export


def lookup(layer, inputs):
    """Returns the rows of a Keras `Embedding`. Keras itself counts a negative index from the end,
    and the cut would take that for row numbers that the model computes."""
    return torch.nn.functional.embedding(inputs.long(), layer.embeddings)


def as_tensors(batch):
    """Returns a batch of NumPy arrays, lists or tensors as tensors."""
    if isinstance(batch, dict):
        return {name: as_tensors(one) for name, one in batch.items()}
    if isinstance(batch, (list, tuple)) and not isinstance(batch[0], (int, float)):
        return type(batch)(as_tensors(one) for one in batch)
    return torch.as_tensor(batch).cpu()


def export_keras(model, sample_batch, out, **options):
    """Writes a Keras model into the folder `out`, cut at its `Embedding` layers. `sample_batch` is
    the model's only argument, such as a dict by input. The other arguments are those of `export`.

    # Errors
    ValueError if Keras runs on another backend, a layer is quantised, or `export` refuses.
    """
    import keras

    if keras.backend.backend() != "torch":
        raise ValueError(
            f"Keras runs on {keras.backend.backend()}: save the model, and load it with "
            "keras.saving.load_model where KERAS_BACKEND=torch"
        )
    embedding = keras.layers.Embedding
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, embedding)]
    wrong = [one.name for one in layers if one.quantization_mode or one.compute_dtype != "float32"]
    if wrong:
        raise ValueError(f"the layer `{wrong[0]}` is quantised or not float32")
    call = embedding.call
    embedding.call = lookup
    try:
        return export(model.cpu(), (as_tensors(sample_batch),), out, **options)
    finally:
        embedding.call = call

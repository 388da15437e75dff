"""The trainer side of Hatchback: writes a PyTorch recommendation model for `hatchback pack`.

It writes the model's changes as the windows that `hatchback select` reads. It never packs, signs
or publishes a bundle: the `hatchback` tool does. Nothing in this package runs in the car.
"""


def __getattr__(name):
    """Loads `export` when it is first used: windows need no torch."""
    if name == "export":
        from .exporter import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

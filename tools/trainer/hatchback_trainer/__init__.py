"""The trainer side of Hatchback: writes a PyTorch recommendation model as the files that `hatchback pack` reads.

It never packs, signs or publishes a bundle: the `hatchback` tool does. Nothing in this package runs in the car.
"""

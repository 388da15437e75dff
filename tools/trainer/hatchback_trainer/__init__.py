"""The trainer side of Hatchback: from a PyTorch recommendation model to the files `hatchback pack` reads.

It never packs, signs or publishes a bundle (that is the `hatchback` tool), and nothing of it runs in the car.
"""

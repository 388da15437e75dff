"""Experiments and data sets: the models of the demos and tests, and the loop on public data.

`python3 -m hatchback_trainer NAME` runs them. They use the library in the folder above. The library
never imports this package, so an export or a tap never loads an experiment.
"""

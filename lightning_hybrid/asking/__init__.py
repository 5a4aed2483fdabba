"""The commands `plan`, `simulate`, `doctor`, `fit-model` and `consolidate` of `lightning-hybrid`.

They are not part of a run: they predict runs on described clusters, measure machines, fit
performance models and convert checkpoints.
"""

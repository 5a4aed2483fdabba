"""The commands `plan`, `simulate`, `doctor`, `fit-model` and `consolidate`, and what they compute.

None of them is part of a run: they predict runs on described clusters, measure machines, fit
performance models and convert checkpoints.
"""

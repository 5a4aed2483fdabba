"""The private names of torch that this package uses, by theme, each with its reason.

A file is named after the part of torch that it opens, and no other file of this package names a
private part of torch.
"""

"""Functions that use private names of torch, by theme, each with its reason.

A file is named after the part of torch whose private names it uses. No code outside of this folder
uses private names of torch.
"""

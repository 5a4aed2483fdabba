"""Tensors that are not here, or not yet: proxies of what other ranks own, weights made later."""

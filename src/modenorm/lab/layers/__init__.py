"""What the networks are made of beside mode norms: torch's layers, faster on a GPU, and dropout.

Convolutions, poolings and batch norms compute as torch's do, and are torch's where their own
kernels don't serve. A file of `_kernels` has the Triton of the layer beside it.
"""

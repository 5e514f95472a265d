"""The GPU: kernels in Triton, their launches, and layers made of them."""

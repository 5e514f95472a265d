"""The streaming passes and the mixing; choice.py decides which code serves a call.

The same functions in three languages:

                                gpu/ (Triton)       c/ (C)              torch operators
    the four passes             passes              passes              torch_passes
    the mixing between them     mixing              mixing              torch_mixing
    mode norm, one node         mode_norm           mode_norm           plain
    mode group norm, one node   mode_group_norm     mode_group_norm     plain
    penalties on modes          switches, entropy   switches            switches, entropy

This folder, in an order to read it:

    choice                                  which code serves a call
    layout, plain                           a tensor as three axes; everything as plain operators
    streaming, mixing_node                  any gate: two autograd nodes, the mixing in between
    torch_passes, torch_mixing              passes and mixing in torch operators
    *_arrays                                the tensors of a mixing, and of a norm that is one node
    c/*                                     the CPU: C, compiled on first use
    gpu/passes, gpu/pass_kernels            the GPU: the four passes,
    gpu/flat_maps, gpu/lines                the same for short rows,
    gpu/tiles, gpu/common                   their tiles, and how all kernels begin
    gpu/mixing*, gpu/mode_group_mixing      the mixing
    gpu/*plan, gpu/slab                     the launches of a layer, and their memory
    gpu/mode_norm, gpu/mode_group_norm      a layer as one autograd node,
    gpu/inference                           its evaluation in one launch,
    gpu/*_operator                          its operators for `torch.compile`
    gpu/launch, gpu/stage, gpu/device       launches without Triton's dispatch, in one call of C
    cpp/*, build                            nodes and operators in C++; what a compiler makes, kept
    switches, entropy, several              penalties on modes, for all layers of a model at once,
    gpu/switches, gpu/entropy, gpu/several  the same in Triton
"""

from modenorm.kernels.choice import cpu_kernels
from modenorm.kernels.cpp.module import autograd_nodes

__all__ = ["autograd_nodes", "cpu_kernels"]

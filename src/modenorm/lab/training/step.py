"""One training step, and its capture as a CUDA graph."""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from modenorm.lab.data.loader import Loader

WARM_UP_STEPS = 3

Turns = Generator[bool, None, None]
"""A training's turns: True after it queued work, False while it waits for the device."""


class Lane:
    """Where one training queues its work: a CUDA stream of its own, or the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def enter(self) -> torch.cuda.StreamContext:
        """Queue what follows on this lane; does nothing on the CPU."""
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        """Wait for all work on this lane."""
        if self.stream is not None:
            self.stream.synchronize()

    def fetch(self, tensor: Tensor) -> Generator[bool, None, Tensor]:
        """Bring a tensor to the host, giving up turns until it has arrived."""
        if self.stream is None:
            return tensor
        with self.enter():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            arrived = self.stream.record_event()
        while not arrived.query():
            yield False
        return host


class Step:
    """Draw a batch, learn from it; all on tensors that stay where they are.

    Args:
        model: Stays in training mode.
        loader: Holds the next batches.
        momentum: Of SGD.
        weight_decay: Of SGD.
        dtype: Autocast to it unless it is float32.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Loader,
        *,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        device = loader.data.device
        self.model, self.loader, self.dtype = model, loader, dtype
        self.lr = torch.zeros((), device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        # fused SGD is one kernel, and reads the learning rate on the device
        self.optimizer = torch.optim.SGD(
            model.parameters(), self.lr, momentum, weight_decay=weight_decay, fused=True
        )
        self.momentum_buffers: dict[str, Tensor] = {}
        if momentum:
            for name, parameter in model.named_parameters():
                buffer = torch.zeros_like(parameter)
                self.momentum_buffers[name] = buffer
                self.optimizer.state[parameter]["momentum_buffer"] = buffer

    def __call__(self) -> None:
        """Take one step; nothing here waits for a CUDA device."""
        images, labels, _ = self.loader.next_batch()
        with torch.autocast(images.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(images)
        loss = functional.cross_entropy(logits.float(), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.loss_sum.add_(loss.detach())

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        model = [*self.model.parameters(), *self.model.buffers()]
        own = [*self.momentum_buffers.values(), self.loss_sum, *self.loader.state]
        return [tensor.detach() for tensor in model + own]


def capture(step: Step, generators: Sequence[torch.Generator], lane: Lane) -> Callable[[], None]:
    """Capture a step as one CUDA graph and return its replay; the training's state stays as it is.

    The warm-up steps that a capture needs (libraries initialise, kernels compile) do change the
    state, so it is put back afterwards.
    """
    assert lane.stream is not None
    tensors, saved_states = step.state(), [generator.get_state() for generator in generators]
    lane.stream.wait_stream(torch.cuda.current_stream(lane.device))
    with lane.enter():
        saved = [tensor.clone() for tensor in tensors]
        for _ in range(WARM_UP_STEPS):
            step()
        for tensor, before in zip(tensors, saved, strict=True):
            tensor.copy_(before)
    lane.synchronize()
    for generator, state in zip(generators, saved_states, strict=True):
        generator.set_state(state)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # thread_local: other trainings' queued work and pinned copies must not end the capture
    with torch.cuda.graph(graph, stream=lane.stream, capture_error_mode="thread_local"):
        step()
    return graph.replay

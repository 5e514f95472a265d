"""One training step, and its capture as a CUDA graph."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modenorm.lab.data.loader import Batches, Loader, derive_seed
from modenorm.lab.models import check_size
from modenorm.lab.training.checkpoint import build_model
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.sources import TrainingData, batches_for

WARM_UP_STEPS = 3
COMPILED_FORMS = 256
"""Most models that may be compiled in one process."""
CACHE_SETTING = "autograd_cache_allow_custom_autograd_functions"
"""Lets torch keep compiled mode norms on disk; in some versions of it."""

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

    def join(self) -> None:
        """Let this lane wait for what was queued outside of it, such as the initial weights."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

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
        device: Where the model and the batches are.
        momentum: Of SGD.
        weight_decay: Of SGD.
        dtype: Autocast to it unless it is float32.
        batch: Samples in the batches of all ranks together.
        ranks: Those who train the model together.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Batches,
        device: torch.device,
        *,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
        batch: int,
        ranks: Ranks,
    ) -> None:
        self.model, self.loader, self.dtype = model, loader, dtype
        self.lr = torch.zeros((), device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._momentum, self._weight_decay = momentum, weight_decay
        self.forward: Callable[..., Any] = model  # or what averages gradients, or is compiled
        self.draw = loader.next_batch
        self._batch, self._ranks = batch, ranks
        self._parameters: list[Tensor] = list(model.parameters())
        named = model.named_parameters() if momentum else ()
        self.momentum_buffers = {name: torch.zeros_like(parameter) for name, parameter in named}

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        data: TrainingData,
        total: int,
        capacity: int,
        device: torch.device,
        ranks: Ranks,
    ) -> "Step":
        """The step of a configuration, with its initial weights.

        Args:
            config: What to train.
            data: The data set, padded if the configuration augments.
            total: Steps of the training.
            capacity: Steps whose batches are prepared at once.
            device: Where the data are, and the model goes.
            ranks: Those who train the model together.

        Raises:
            ValueError: The images have another size than the model needs.
        """
        for images in (data.train, data.test):
            check_size(config.model, images.size, config.dataset)
        seed = torch.Generator().manual_seed(derive_seed(config.seed, "weights"))
        model = build_model(config, len(data.about.classes), seed)
        if config.sync:
            model = ranks.synchronise(model, device)
        model.to(device)
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return cls(
            model,
            batches_for(config, data, total, capacity, ranks.share(config.batch)),
            device,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            dtype=getattr(torch, config.dtype),
            batch=config.batch,
            ranks=ranks,
        )

    def compile(self) -> None:
        """Let Inductor make the kernels of the model, and those that draw a batch on the device."""
        self.forward = compiled(self.forward)
        if isinstance(self.loader, Loader):
            self.draw = compiled(self.loader.next_batch)

    def __call__(self) -> None:
        """Take one step; nothing here waits for a CUDA device."""
        with _fast_convolutions(self.dtype):
            self._take()

    def _take(self) -> None:
        images, labels = self.draw()
        with torch.autocast(images.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.forward(images)
        loss = functional.cross_entropy(logits.float(), labels)
        for parameter in self._parameters:
            parameter.grad = None
        objective = loss
        if self._ranks.size > 1:
            # ranks may have more or fewer samples; gradients are averaged over ranks
            loss = loss * (len(labels) / self._batch)
            objective = loss * self._ranks.size
        objective.backward()
        self._update()
        self.loss_sum.add_(loss.detach())

    @torch.no_grad()
    def _update(self) -> None:
        """SGD as torch.optim's fused one: one kernel, which reads the learning rate on the device.

        Called without the optimizer object, whose import alone takes seconds. Momentum that starts
        at zero makes the first step like all others.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        assert len(gradients) == len(self._parameters)
        torch._fused_sgd_(
            self._parameters,
            gradients,
            list(self.momentum_buffers.values()),
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        model = [*self.model.parameters(), *self.model.buffers()]
        own = [*self.momentum_buffers.values(), self.loss_sum, *self.loader.state()]
        return [tensor.detach() for tensor in model + own]


@contextlib.contextmanager
def _fast_convolutions(dtype: torch.dtype) -> Iterator[None]:
    """Let cuDNN try its algorithms for convolutions in half precision and take the fastest.

    Not in float32: the choice may differ from one process to the next, and with it the result.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = before or (dtype != torch.float32 and not cudnn.deterministic)
    try:
        yield
    finally:
        cudnn.benchmark = before


def compiles_on(device: torch.device) -> bool:
    """Whether models are compiled there; on a CPU that would pass by the layers' own C code."""
    return device.type == "cuda"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A model, or a function, as Inductor's kernels; equal models share them, also from disk."""
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = COMPILED_FORMS
    if hasattr(torch._functorch.config, CACHE_SETTING):
        setattr(torch._functorch.config, CACHE_SETTING, True)
    return torch.compile(function, dynamic=False)


def capture(step: Step, generators: Sequence[torch.Generator], lane: Lane) -> Callable[[], None]:
    """Capture a step as one CUDA graph and return its replay; the training's state stays as it is.

    The warm-up steps that a capture needs (libraries initialise, kernels compile) do change the
    state, so it is put back afterwards.
    """
    assert lane.stream is not None
    tensors, saved_states = step.state(), [generator.get_state() for generator in generators]
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

"""One training step, and its capture as a CUDA graph."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modenorm.lab.data.loader import Batches, Loader, derive_seed
from modenorm.lab.layers.batch_norm import stream_batch_norms
from modenorm.lab.models import check_size
from modenorm.lab.training.checkpoint import build_model
from modenorm.lab.training.config import TrainConfig
from modenorm.lab.training.lane import Lane
from modenorm.lab.training.ranks import Ranks
from modenorm.lab.training.sources import TrainingData, batches_for

Advance = Callable[[int], int]
"""Takes some steps, at most as many as it is told, and says how many."""

WARM_UP_STEPS = 2
COMPILED_FORMS = 256
"""Most models that may be compiled in one process."""
CACHE_SETTING = "autograd_cache_allow_custom_autograd_functions"
"""Lets torch keep compiled mode norms on disk; in some versions of it."""


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
        self.lr, self._one = torch.zeros((), device=device), torch.ones((), device=device)
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
        if is_compiled(config, device):
            stream_batch_norms(model)
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
        with fast_convolutions(self.dtype):
            self._take()

    def take_one(self, most: int) -> int:
        """As what `capture` returns: one step at a time."""
        self()
        return 1

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
        objective.backward(self._one)  # else torch would make a one in every step
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
def fast_convolutions(dtype: torch.dtype) -> Iterator[None]:
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


def is_compiled(config: TrainConfig, device: torch.device) -> bool:
    """Whether Inductor makes the kernels of a training."""
    return config.compile and compiles_on(device)


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


def capture(
    step: Step, generators: Sequence[torch.Generator], lane: Lane, together: int = 1
) -> Advance:
    """Capture a step as a CUDA graph, and several as another; the training's state stays as it is.

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
    pool = torch.cuda.graph_pool_handle()  # one for both: nothing in it outlives a replay
    graphs = {count: _graph(step, count, generators, lane, pool) for count in {together, 1}}

    def advance(most: int) -> int:
        count = together if most >= together else 1
        graphs[count].replay()
        return count

    return advance


def _graph(
    step: Step, count: int, generators: Sequence[torch.Generator], lane: Lane, pool: Any
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with capturing(graph, lane, pool):
        for _ in range(count):
            step()
    return graph


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, lane: Lane, pool: Any = None) -> Iterator[None]:
    """Capture what follows, on a lane, while the device works on for others.

    torch.cuda.graph would wait for the whole device. Garbage stays until the capture has ended,
    as it may hold memory of the device, which can't be given back meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with lane.enter():
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()

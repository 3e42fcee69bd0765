"""One training step: forward, backward, optimizers; on a CUDA GPU replayed from a graph."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from proxprop.lab import devices
from proxprop.lab.data import Split

WARMING = 3  # Steps taken one kernel at a time before capturing: libraries and optimizer state must be there.


def take(
    model: nn.Module, optimizers: list[Optimizer], inputs: Tensor, labels: Tensor, precision: str
) -> Tensor:
    """Forward, backward (which leaves the direction in .grad), optimizers; returns the mini-batch loss."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    with devices.autocast(inputs.device, precision):
        scores = model(inputs)
    loss = cross_entropy(scores.float(), labels)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


class Steps:
    """Steps of one run, one after the other.

    On a CUDA GPU every batch of the usual size is replayed from one CUDA graph: the same kernels in the same
    order without the time Python takes to launch them. The first steps, and a smaller last batch, run as usual.

    Args:
        model: in training mode, on its device.
        optimizers: stepped together; on CUDA they must be capturable.
        samples: the training samples, on the same device.
        batch_size: the usual number of samples in a step.
        precision: fp32, tf32 or bf16.
        capture: whether steps are all alike, as a graph needs them; not where some steps do more than others.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        samples: Split,
        batch_size: int,
        precision: str,
        capture: bool,
    ) -> None:
        self._model, self._optimizers, self._precision = model, optimizers, precision
        self._samples, self._size, self._taken = samples, batch_size, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = capture and samples.labels.is_cuda
        if self._captures:
            self._stream = torch.cuda.Stream()
            self._batch = torch.zeros(batch_size, dtype=torch.int64, device=samples.labels.device)

    def __call__(self, batch: Tensor) -> Tensor:
        """Take one step.

        Args:
            batch: the samples' indices.

        Returns:
            The mini-batch loss; valid until the next step.
        """
        if not self._captures:
            return self._take(batch)
        if len(batch) != self._size or self._taken < WARMING:
            return self._take_aside(batch)
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._batch.copy_(batch)
        self._graph.replay()
        return self._loss

    def _take(self, batch: Tensor) -> Tensor:
        inputs, labels = self._samples.inputs[batch], self._samples.labels[batch]
        return take(self._model, self._optimizers, inputs, labels, self._precision)

    def _take_aside(self, batch: Tensor) -> Tensor:
        """One step as usual, on the stream that will be captured."""
        self._taken += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._take(batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self) -> None:
        """Record a step without taking it."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._loss = self._take(self._batch)

"""The batches of all workers of a step, made at once.

Virtual workers ask for their batches one by one, and mostly for those of the same step. The first
that asks lets the batches of all be made: one gather, one normalisation, one draw for augmentation,
on the device where they are used. On an accelerator that happens a step ahead, while gradients are
computed. A worker's batch is a row. It is the batch that it would have got alone, bit for bit, so
results do not depend on who asks when.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.core.key import Key
from gradwire.core.rows import split_rows
from gradwire.data.dataset import Dataset
from gradwire.data.sampler import Sampler
from gradwire.training.gradient import Batch

_KEPT = 4  # steps: asynchronous workers are at different ones
_MOST_NBYTES = 1 << 28  # of the inputs of a step; larger ones are made worker by worker


class _Step:
    """The batches of one step, and the workers that have not taken theirs."""

    def __init__(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
        self.batches = list(zip(inputs, targets))
        self.left = set(range(len(inputs)))


class BatchesTogether:
    """A function of rank and step, like `alone`, whose results it returns."""

    def __init__(
        self,
        alone: Callable[[int, int], Batch],
        dataset: Dataset,
        sampler: Sampler,
        device: torch.device,
        augment_key: Key | None,
    ) -> None:
        self._alone = alone
        self._dataset = dataset
        self._sampler = sampler
        self._device = device
        self._augment_key = augment_key  # None: without augmentation
        self._steps: dict[int, _Step] = {}  # only a memory of what can be made again
        self._last = -1  # step that anybody has asked for
        self._forgotten = -1  # the last step that was dropped before all had taken theirs
        element_nbytes = 4 if dataset.kind == "image" else 8
        examples = sampler.num_workers * sampler.batch_size
        self._nbytes = examples * dataset.train_inputs[0].numel() * element_nbytes

    def __call__(self, rank: int, step: int) -> Batch:
        if self._nbytes > _MOST_NBYTES or not 0 <= rank < self._sampler.num_workers:
            return self._alone(rank, step)
        found = self._steps.get(step)
        if found is None:
            if step <= self._forgotten:  # most others are far ahead
                return self._alone(rank, step)
            found = self._keep(step)
        self._last = max(self._last, step)
        found.left.discard(rank)
        if not found.left:
            self._steps.pop(step, None)
        return found.batches[rank]

    def make_ahead(self, num_steps: int) -> None:
        """Makes the batches of the next step, if all workers have had theirs of this one."""
        step = self._last + 1
        if not self._steps and 0 < step < num_steps:
            self._keep(step)

    def _keep(self, step: int) -> _Step:
        made = self._steps[step] = self._make(step)
        if len(self._steps) > _KEPT:
            self._forgotten = min(self._steps)
            del self._steps[self._forgotten]
        return made

    def _make(self, step: int) -> _Step:
        dataset, device = self._dataset, self._device
        indices = self._sampler.indices_of_all(step)
        inputs = dataset.inputs(indices, device)  # [n, B, ...]
        if self._augment_key is not None:
            # Image i of worker r is number r B + i of one draw, which all share.
            flat = dataset.augment(inputs.flatten(0, 1), self._augment_key.at(step))
            inputs = flat.view(inputs.shape)
        return _Step(split_rows(inputs), split_rows(dataset.targets(indices, device)))

"""Layers that are pure functions of their inputs: what a task puts in the place of batch
normalisation (Ioffe and Szegedy 2015) and dropout (Srivastava et al. 2014).

Torch's own layers change running statistics in place and draw from a global generator. Neither
can be evaluated for n virtual workers at once, nor gives one worker the same numbers wherever it
runs. Here statistics are handed back as new buffers and masks are handed in as buffers.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class PureBatchNorm(nn.Module):
    """Batch normalisation that assigns its new statistics instead of writing into the old.

    `torch.func.functional_call` hands assigned buffers back to its caller.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        self.num_features = norm.num_features
        self.eps = norm.eps
        self.momentum = norm.momentum
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked)
        # Torch's kernel writes its statistics in place, on copies here; vmap cannot follow that
        # and needs the formula.
        self.use_torch_kernel = True

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"batch normalisation of {self.num_features} channels got inputs of shape "
                f"{tuple(x.shape)}, expected [batch, {self.num_features}, ...]"
            )
        mean, var = self.running_mean, self.running_var
        if not self.training and mean is not None:
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        if mean is None or var is None:  # built with track_running_stats=False
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked = self.num_batches_tracked + 1
        if self.use_torch_kernel:
            momentum = self.momentum
            if momentum is None:  # a cumulative average
                momentum = 1.0 / float(self.num_batches_tracked)
            self.running_mean, self.running_var = mean.clone(), var.clone()
            return F.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                True,
                momentum,
                self.eps,
            )
        return self._formula(x, mean, var, self.num_batches_tracked)

    def _formula(self, x: Tensor, mean: Tensor, var: Tensor, num_batches: Tensor) -> Tensor:
        """y = (x - mean) / sqrt(var + eps) * weight + bias   (Ioffe and Szegedy 2015, Alg. 1)."""
        dims = [0, *range(2, x.dim())]
        count = x.numel() // self.num_features
        if count < 2:
            raise ValueError(
                f"batch normalisation needs more than one value per channel, got a batch of shape "
                f"{tuple(x.shape)}"
            )
        batch_var, batch_mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        with torch.no_grad():
            momentum = 1.0 / num_batches if self.momentum is None else self.momentum
            unbiased = batch_var.detach().flatten() * (count / (count - 1))
            self.running_mean = mean + (batch_mean.detach().flatten() - mean) * momentum
            self.running_var = var + (unbiased - var) * momentum
        scale = torch.rsqrt(batch_var + self.eps)  # [1, C, 1, 1]
        if self.weight is not None:
            scale = scale * self.weight.view_as(scale)
        y = (x - batch_mean) * scale
        return y if self.bias is None else y + self.bias.view_as(scale)


class KeyedDropout(nn.Module):
    """Dropout whose masks are made by the caller and swapped in as buffers `mask_<call>`.

    A first forward with `recording` set notes the shape of each call's mask.
    """

    def __init__(self, probability: float, whole_channels: bool) -> None:
        super().__init__()
        self.p = probability
        self.whole_channels = whole_channels
        self.recording = False
        self.shapes: list[tuple[int, ...]] = []  # one per call of the recorded forward
        self.num_calls = 0  # so far, in the present forward

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.recording:
            self.shapes.append(self._mask_shape(x))
            return x
        mask = self.get_buffer(f"mask_{self.num_calls}")
        self.num_calls += 1
        return x * mask

    def _mask_shape(self, x: Tensor) -> tuple[int, ...]:
        if not self.whole_channels:
            return tuple(x.shape)
        if x.dim() < 3:
            raise ValueError(
                f"dropout of whole channels needs inputs [batch, channels, ...], "
                f"got shape {tuple(x.shape)}"
            )
        return (*x.shape[:2], *[1] * (x.dim() - 2))

    def mask(self, uniform: Tensor) -> Tensor:
        """Zero with probability p, else 1 / (1 - p), so that the mean is unchanged."""
        scale = 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)
        return (uniform >= self.p) * scale


def purify(module: nn.Module) -> nn.Module:
    """A copy of the module with pure layers; names of parameters and buffers stay the same."""
    module = copy.deepcopy(module)
    replaced: dict[int, nn.Module] = {}  # a layer used in two places stays one layer

    def replace(layer: nn.Module) -> nn.Module:
        if id(layer) not in replaced:
            replaced[id(layer)] = _pure(layer)
            for name, child in list(layer._modules.items()):
                if child is not None:
                    layer._modules[name] = replace(child)
        return replaced[id(layer)]

    return replace(module)


def _pure(layer: nn.Module) -> nn.Module:
    # By exact type: a subclass may have its own forward.
    kind = type(layer)
    if kind in _BATCH_NORMS:
        return PureBatchNorm(layer)  # type: ignore[arg-type]
    if kind is nn.Dropout or kind in _CHANNEL_DROPOUTS:
        return KeyedDropout(layer.p, whole_channels=kind is not nn.Dropout)  # type: ignore[arg-type]
    if isinstance(layer, nn.SyncBatchNorm):
        raise ValueError(
            "SyncBatchNorm communicates on its own; use BatchNorm, whose statistics stay with "
            "each worker"
        )
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0.0:
        raise ValueError(
            f"{kind.__name__}(dropout={layer.dropout}) draws its masks inside the layer; "
            "set dropout=0 and put nn.Dropout modules between layers"
        )
    return layer

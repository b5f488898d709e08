"""A forward pass whose parameters are still arriving: each operation waits for those it reads."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradwire.training.gradient import BeforeLayer


class ArrivingParams(TorchFunctionMode):
    """Calls back before the first operation on a tensor of each layer.

    Looks at operations, not at modules: a module may read the parameters of another. At the end all
    layers have been called, used or not. `layers` has the number of each tensor's layer, by the
    tensor's id.
    """

    def __init__(self, layers: Mapping[int, int], before_layer: BeforeLayer) -> None:
        super().__init__()
        self._layers = layers
        self._before_layer = before_layer
        self._num_there = 0  # layers whose parameters are there
        self._num_layers = max(layers.values()) + 1

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self._num_there < self._num_layers:
            self._before_layer(self._num_layers - 1)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            # Properties, such as the shape, do not read values; but what is made of a view (`.T`)
            # cannot be recognized later.
            value = func(*args, **(kwargs or {}))
            if isinstance(value, Tensor):
                self._wait_for(self._last_layer(args))
            return value
        last = self._last_layer(args)
        if kwargs:
            last = max(last, self._last_layer(tuple(kwargs.values())))
        self._wait_for(last)
        return func(*args, **(kwargs or {}))

    def _wait_for(self, layer: int) -> None:
        if layer >= self._num_there:
            self._before_layer(layer)
            self._num_there = layer + 1

    def _last_layer(self, values: tuple[Any, ...] | list[Any]) -> int:
        """Of the parameters among these values; -1 if there are none."""
        last = -1
        for value in values:
            if isinstance(value, tuple | list):
                last = max(last, self._last_layer(value))
            else:
                last = max(last, self._layers.get(id(value), -1))
        return last

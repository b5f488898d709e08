"""What tests of reducers share."""

from collections.abc import Callable

import pytest
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine


@pytest.fixture
def reduce() -> Callable[..., tuple[list[list[Reduced]], VirtualEngine]]:
    """Runs a reducer on virtual nodes: `inputs` and results are [rank][step]."""

    def run(
        reducer: Reducer,
        inputs: list[list[Tensor]],
        spec: Spec | None = None,
        architecture: Architecture | None = None,
        states: list | None = None,
        first_step: int = 0,
    ) -> tuple[list[list[Reduced]], VirtualEngine]:
        size = len(inputs)

        async def program(node: Node) -> list[Reduced]:
            own = inputs[node.rank]
            state = states[node.rank] if states else reducer.init(spec or Spec.of(own[0]), size)
            results = []
            for step, x in enumerate(own, first_step):
                group = (architecture or AllReduce()).group(node, "model")
                key = Key(1).at(step).private(node.rank)
                results.append(await reducer.mean(x, state, key, group))
                state = results[-1].state
            return results

        engine = VirtualEngine(Network.uniform(size))
        return engine.run([program] * size), engine

    return run

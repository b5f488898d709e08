"""Allocates a choice to each layer within a budget of bytes (Shoham and Gersho 1988).

Sizes and errors are given for each layer and choice; `allocated.py` says what is minimised.
"""

import heapq
from collections.abc import Sequence


def choose_allocation(
    sizes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int
) -> list[int]:
    """A choice for each layer, of [layer][choice]; the sum of the least sizes must fit."""
    plan = allocate_along_hulls(sizes, errors, budget)
    left = budget - sum(own[choice] for own, choice in zip(sizes, plan, strict=True))
    assert left >= 0, "the cheapest choices must fit"
    while True:  # each change lowers the error, so it ends
        changes = [
            (errors[layer][choice] - errors[layer][other], layer, other)
            for layer, choice in enumerate(plan)
            for other in range(len(sizes[layer]))
            if errors[layer][other] < errors[layer][choice]
            and sizes[layer][other] - sizes[layer][choice] <= left
        ]
        if not changes:
            return plan
        _, layer, other = max(changes)
        left -= sizes[layer][other] - sizes[layer][plan[layer]]
        plan[layer] = other


def allocate_along_hulls(
    sizes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], budget: int
) -> list[int]:
    """The steps on the convex hulls that save most per byte, until the first that does not fit.

    There is a price lambda at which every layer's choice minimises error + lambda * size.
    """
    hulls = [lower_hull(own, lost) for own, lost in zip(sizes, errors, strict=True)]
    places = [0] * len(hulls)
    left = budget - sum(own[points[0]] for own, points in zip(sizes, hulls, strict=True))
    steps: list[tuple[float, int, int]] = []  # what a byte saves (negative), layer, bytes

    def push(layer: int) -> None:
        points, place = hulls[layer], places[layer]
        if place + 1 < len(points):
            now, then = points[place], points[place + 1]
            cost = sizes[layer][then] - sizes[layer][now]
            saved = errors[layer][now] - errors[layer][then]
            heapq.heappush(steps, (-saved / cost, layer, cost))

    for layer in range(len(hulls)):
        push(layer)
    while steps:
        _, layer, cost = heapq.heappop(steps)
        if cost > left:
            break
        left -= cost
        places[layer] += 1
        push(layer)
    return [points[place] for points, place in zip(hulls, places, strict=True)]


def lower_hull(sizes: Sequence[int], errors: Sequence[float]) -> list[int]:
    """The choices on the lower convex hull of (size, error), from the cheapest to the best."""
    points: list[int] = []
    for new in sorted(range(len(sizes)), key=lambda choice: (sizes[choice], errors[choice])):
        if points and errors[new] >= errors[points[-1]]:
            continue  # costs more, or as much, and saves nothing
        while len(points) >= 2:
            a, b = points[-2], points[-1]
            # b lies on or above the line from a to the new one: less saved per byte before b.
            before = (errors[a] - errors[b]) * (sizes[new] - sizes[b])
            behind = (errors[b] - errors[new]) * (sizes[b] - sizes[a])
            if before > behind:
                break
            points.pop()
        points.append(new)
    return points

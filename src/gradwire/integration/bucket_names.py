"""Names of the parameters in DDP's buckets, which its hook does not tell.

Names that users give are taken. Without them parameters are numbered in the order in which they
come first. That order depends on the buckets of DDP's first backward pass, so on `bucket_cap_mb`
and `find_unused_parameters`. A saved state therefore has these buckets, and is refused where the
first ones are others: residuals would go to other parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.integration.exchange import Layout

NUMBERED = "numbered"  # in a saved state: the first buckets; None: names were given

_OTHER_BUCKETS = (
    "the saved state has numbers of parameters in place of names, and numbers follow DDP's buckets "
    "in the first backward pass. {} had {} when it was saved, and has {} now, so residuals "
    "would go to other parameters. Make DDP with the settings of the saved run (bucket_cap_mb, "
    "find_unused_parameters). To be free of them give ddp_comm_hook(..., "
    "named_parameters=model.named_parameters()) before training, and save then"
)


class BucketNames:
    """Names of parameters: those given, or numbers."""

    def __init__(self, named: Iterable[tuple[str, Tensor]] | None) -> None:
        self._are_given = named is not None
        named = list(named or ())
        self._names = {id(parameter): name for name, parameter in named}
        # Kept, so that no other parameter gets the id of one that is gone.
        self._parameters = {id(parameter): parameter for _, parameter in named}
        self._layouts: dict[tuple[int, ...], Layout] = {}  # by the parameters of a bucket
        self._first: list[Any] = []  # names and shapes in each bucket of the first backward pass
        self._is_first = True
        self._expected: Sequence[Any] | None = None  # of the first backward pass
        self._refusal = ""  # why what is expected is not what there is

    def layout(self, bucket: dist.GradBucket) -> Layout:
        """The tensors of a bucket. Raises if a state was loaded that has other ones."""
        if self._refusal:
            raise ValueError(self._refusal)
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            placed, start = [], 0
            for parameter in parameters:
                self._parameters[id(parameter)] = parameter
                name = self._names.setdefault(id(parameter), str(len(self._names)))
                stop = start + parameter.numel()
                placed.append((name, start, stop, tuple(parameter.shape)))
                start = stop
            if self._is_first and not self._are_given:
                now = [*self._first, [[name, list(shape)] for name, _, _, shape in placed]]
                self._compare(now, is_whole=False)
                self._first = now
            self._layouts[key] = tuple(placed)
        return self._layouts[key]

    def end_pass(self) -> None:
        """A backward pass has ended: later buckets may be others."""
        if self._is_first:
            self._is_first = False
            self._compare(self._first, is_whole=True)

    def _compare(self, first: Sequence[Any], *, is_whole: bool) -> None:
        """Raises, and from then on in every backward pass, if these are not the expected ones."""
        try:
            _compare(self._expected, first, is_whole=is_whole)
        except ValueError as error:
            self._refusal = str(error)
            raise

    def saved(self) -> list[Any] | None:
        """What a saved state has of the names."""
        return None if self._are_given else self._first

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises if the names of saved states are not those of this hook."""
        for row in rows:
            first = row.get(NUMBERED)
            if self._are_given and first is not None:
                raise ValueError(
                    "the saved state has numbers of parameters in place of names: it is of a hook "
                    "without named_parameters. Load it into such a hook, or start without it"
                )
            if not self._are_given and first is None:
                raise ValueError(
                    "the saved state has names of parameters: give ddp_comm_hook(..., "
                    "named_parameters=model.named_parameters())"
                )
            if self._are_given:
                self._check_known(row)
            elif first != rows[0][NUMBERED]:
                raise ValueError(
                    "the saved states number the parameters of different buckets: they are not of "
                    "one run"
                )
        if not self._are_given:
            _compare(rows[0][NUMBERED], self._first, is_whole=not self._is_first)

    def expect(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """From now on buckets must be those of saved states, which have been checked."""
        self._refusal = ""
        if not self._are_given:
            self._expected = rows[0][NUMBERED]

    def _check_known(self, row: Mapping[str, Any]) -> None:
        known = set(self._names.values())
        missing = [t[0] for own in row["buckets"] for t in own["tensors"] if t[0] not in known]
        if missing:
            raise ValueError(
                f"the saved state is of {', '.join(missing[:3])}, which named_parameters does not "
                f"have; it has {', '.join(sorted(known)[:3])}. Give the names that the saved run "
                "had, as with or without the module inside DDP"
            )


def _compare(
    expected: Sequence[Any] | None, first: Sequence[Sequence[Any]], *, is_whole: bool
) -> None:
    if expected is None:
        return
    for number, (then, now) in enumerate(zip(expected, first)):
        if then != now:
            raise ValueError(_OTHER_BUCKETS.format(f"Bucket {number}", _shown(then), _shown(now)))
    if len(first) > len(expected) or (is_whole and len(first) < len(expected)):
        counts = f"{len(expected)} buckets", f"{len(first)}"
        raise ValueError(_OTHER_BUCKETS.format("It", *counts))


def _shown(bucket: Any) -> str:
    shapes = [shape for _, shape in bucket]
    text = ", ".join(map(str, shapes[:4]))
    return f"{len(shapes)} parameters ({text}{', ...' if len(shapes) > 4 else ''})"

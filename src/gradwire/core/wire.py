"""The requests of workers to servers, in every exchange that has servers."""

from dataclasses import dataclass
from typing import Literal

from gradwire.core.errors import NonFiniteError, PeerLost, RefusedError, WireError
from gradwire.core.node import Node

REQUEST, ANSWER = "request", "answer"  # tags

# Magic and version, kind, tensor, part, worker, since when it is there (in milliseconds), step and
# length of the payload, in 4 bytes each.
HEADER_NBYTES = 32

_NOTHING = "nothing"  # a tag that nobody sends
_MAX_TEXT = 1000  # characters of an error that are told


@dataclass(frozen=True)
class Failed:
    """The header of an answer that will not come: what was asked for was wrong, or it failed."""

    kind: Literal["wire", "nonfinite", "refused", "value", "other"]
    text: str

    @staticmethod
    def of(error: Exception) -> "Failed":
        kind: Literal["wire", "nonfinite", "refused", "value", "other"] = "other"
        if isinstance(error, WireError):
            kind = "wire"
        elif isinstance(error, NonFiniteError):
            kind = "nonfinite"
        elif isinstance(error, RefusedError):
            kind = "refused"
        elif isinstance(error, ValueError):
            kind = "value"
        text = str(error).encode("utf-8", "replace").decode()
        if kind == "other":
            text = f"{type(error).__name__}: {text}"
        return Failed(kind, text[:_MAX_TEXT])

    def error(self) -> Exception:
        """What the workers raise."""
        kinds: dict[str, type[Exception]] = {
            "wire": WireError,
            "nonfinite": NonFiniteError,
            "refused": RefusedError,
            "value": ValueError,
        }
        return kinds.get(self.kind, RuntimeError)(self.text)


async def why_lost(node: Node, rank: int) -> PeerLost:
    """What to raise where nobody can go on without a worker of which it was said that it left."""
    if rank not in await node.members():
        try:
            await node.recv(rank, _NOTHING)
        except PeerLost as error:
            return error
    now = await node.now()  # it is back already: too late
    return PeerLost(rank, now, now)

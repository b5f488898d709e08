"""The requests of workers to servers, in every exchange that has servers."""

from dataclasses import dataclass
from typing import Literal

from gradwire.core.errors import NonFiniteError, PeerLost, RefusedError, WireError
from gradwire.core.node import Node

REQUEST, ANSWER = "request", "answer"  # tags

# What "bytes sent" counts for the header of a message to or from a server: eight fields of 4 bytes
# (magic and version, kind, tensor, part, worker, incarnation, step, length of the payload). It is
# an allowance, the same on all engines and transports, so that virtual times do not depend on how a
# transport writes its headers. Real ones take more: see "bytes with framing" in docs/processes.md.
HEADER_NBYTES = 32

_NEVER_SENT = "nothing"  # a tag
_MAX_TEXT = 1000  # characters of an error that travel


@dataclass(frozen=True)
class Failed:
    """The header of an answer to a request that was wrong, or that failed."""

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
        """The error that the workers raise."""
        kinds: dict[str, type[Exception]] = {
            "wire": WireError,
            "nonfinite": NonFiniteError,
            "refused": RefusedError,
            "value": ValueError,
        }
        return kinds.get(self.kind, RuntimeError)(self.text)


async def why_lost(node: Node, rank: int) -> PeerLost:
    """The error to raise if the run cannot continue without this worker, which has left."""
    if rank not in await node.members():
        try:
            await node.recv(rank, _NEVER_SENT)
        except PeerLost as error:
            return error
    now = await node.now()  # it has come back already, too late
    return PeerLost(rank, now, now)

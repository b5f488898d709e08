"""Codecs that are made of codecs: chains, and codecs that encode each tensor of a bucket apart."""

import functools
import operator
from abc import abstractmethod
from typing import ClassVar

from gradwire.core.codec import Codec


class Composite(Codec):
    """A codec made of others, its `members`. Those report what they do, it does not."""

    _reports: ClassVar[bool] = False

    @property
    @abstractmethod
    def members(self) -> tuple[Codec, ...]:
        """The codecs that it is made of."""

    def _needs_feedback(self) -> bool:
        return any(member.traits.needs_feedback for member in self.members)

    def _fingerprint(self) -> int:
        hashes = (member.traits.fingerprint for member in self.members)
        return functools.reduce(operator.xor, (own() for own in hashes if own is not None), 0)

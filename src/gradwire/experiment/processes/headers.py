"""The header objects that travel in real runs."""

import sys

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.gossip import _posts
from gradwire.architecture.parameter_server import _orders
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.group import Aggregation, Merging
from gradwire.core.key import Key
from gradwire.core.node import Membership
from gradwire.core.spec import Spec
from gradwire.runtime.process.headers import Headers
from gradwire.training import wire

_PACKAGE = "gradwire"


def _subclasses(kind: type) -> list[type]:
    """The classes that inherit from a kind, in an order that is the same everywhere."""
    found: dict[str, type] = {}
    classes: list[type] = kind.__subclasses__()
    for cls in classes:
        # Neither classes of tests, nor those that `slots` has replaced.
        is_ours = cls.__module__.partition(".")[0] == _PACKAGE
        if is_ours and getattr(sys.modules[cls.__module__], cls.__name__, None) is cls:
            found[f"{cls.__module__}.{cls.__name__}"] = cls
    return [found[name] for name in sorted(found)]


# The aggregations of servers are found in the modules that define them, as algorithms are.
for _registry in (ARCHITECTURE, COMPRESSION):
    _registry.names()  # imports them

HEADERS = Headers(
    Membership,
    wire.PushHeader,
    wire.PullHeader,
    wire.AnswerHeader,
    _posts.RoundHeader,
    _posts.NewIncarnation,
    _posts.JoinNotice,
    _posts.UnknownVersion,
    _posts.JoinAnswer,
    _posts.ModelRequest,
    _posts.ModelAnswer,
    _orders.Order,
    _orders.Lost,
    _orders.Failed,
    Spec,
    Key,
    *_subclasses(Aggregation),
    *_subclasses(Merging),
    parse={Codec: COMPRESSION.parse},
)

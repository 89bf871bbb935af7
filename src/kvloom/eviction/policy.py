"""What an eviction policy is: a frozen value that tells the core in which order leaves go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numba

from kvloom.core.policies import Order
from kvloom.errors import ConfigError

LeafKey: TypeAlias = Callable[[int, int, int, int], int]
"""``(uses, stamp, priority, depth) -> key``: the leaf with the lowest key goes first, in a tie the lowest node id.

``uses``: requests that went through the leaf, at least 1 once its first request was closed.  ``stamp``: logical time of
its last use, below 2**40.  ``priority``: the highest of its requests, 0 to 2**20 - 1.  ``depth``: segments from the
beginning of the prompt to its end.  It is called once when a node becomes a leaf, compiled, without the GIL: plain
integer arithmetic, no objects, no exceptions.
"""


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """An eviction policy.  Only leaves of the prefix index go, so no policy can strand what a longer prefix needs.

    Attributes:
        name: what users write.
        key: the order of leaves; None for the policies whose order is part of the core.
        order: the order that the core knows; ``Order.KEY`` for a policy with a ``key``.
    """

    name: str
    key: LeafKey | None = None
    order: Order = Order.KEY

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(f"the name of a policy is {self.name!r}; use a word")
        if (self.order is Order.KEY) != (self.key is not None):
            raise ConfigError(f"policy {self.name!r} needs a key function: (uses, stamp, priority, depth) -> int")

    def compiled(self) -> Any:
        """The key function as machine code with an ``address``; None without one.  Keep it as long as it is used.

        Raises ConfigError for a function that cannot be compiled.
        """
        if self.key is None:
            return None
        try:
            return cast("Any", numba.cfunc)("int64(int64, int64, int64, int64)")(self.key)
        except (numba.core.errors.NumbaError, TypeError) as error:
            raise ConfigError(
                f"the key function of policy {self.name!r} cannot be compiled: {str(error).splitlines()[0]}; "
                "use integer arithmetic on its four arguments"
            ) from error

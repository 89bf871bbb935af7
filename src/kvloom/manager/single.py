"""Objects of which a copy would be two owners of one thing."""

from __future__ import annotations

from typing import Any, NoReturn

from kvloom.errors import UnsupportedError


class Single:
    """Neither copied nor pickled: compiled code knows the arrays behind it by their addresses."""

    __slots__ = ()

    def _refuse(self) -> NoReturn:
        name = type(self).__name__
        raise UnsupportedError(
            f"a {name} cannot be copied or pickled, its state lies in the arrays of one manager; make another Manager, "
            "or fork the sequence"
        )

    def __copy__(self) -> NoReturn:
        self._refuse()

    def __deepcopy__(self, _memo: dict[int, Any]) -> NoReturn:
        self._refuse()

    def __reduce__(self) -> NoReturn:
        self._refuse()

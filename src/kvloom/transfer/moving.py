"""What the lane of a tier does after a store: what is cold there takes a smaller form, or moves on to the next tier."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.tiers.contract import HandsOn
from kvloom.transfer.cooling import Cooling, Rewrites
from kvloom.transfer.demotion import Demotion
from kvloom.transfer.forms import Forms
from kvloom.transfer.ground import Ground
from kvloom.transfer.options import ColdForm
from kvloom.transfer.pace import Rest

AfterStore = Callable[[Rest], None]


class Moving:
    """Attributes:
    after: for every tier what is done after a store; it belongs to the thread that stores there.
    cooling: of the tiers whose objects may take another form.
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.cooling: list[Cooling] = []
        self.after: list[AfterStore] = [self._after(number) for number in range(len(ground.links))]

    def _after(self, number: int) -> AfterStore:
        ground, link, cooling, demotion = self._ground, self._ground.links[number], None, None
        if isinstance(link.tier, Rewrites) and ground.options.cold_form is not ColdForm.NONE:
            forms = Forms(link.tier.name, ground.manager.spec.groups, ground.options.cold_form, link.parts)
            layout = link.parts.layout(ground.manager.layout)
            cooling = Cooling(link.tier, layout, forms, ground.options)
            self.cooling.append(cooling)
        if number + 1 < len(ground.links) and isinstance(link.tier, HandsOn):
            demotion = Demotion(link.tier, ground.links[number + 1], ground.options)

        def run(rest: Rest) -> None:
            if cooling is not None:
                cooling.run(rest)
            if demotion is not None:
                demotion.run()

        return run

    def all_to(self, number: int, patience_s: float) -> None:
        """Move what the tier before one has on to it, all that it lacks."""
        before = self._ground.links[number - 1].tier if number else None
        if isinstance(before, HandsOn):
            Demotion(before, self._ground.links[number], self._ground.options).run_all(patience_s)

"""What strategies have in common whose devices hold the whole model and train by themselves, round by round.

Which devices, which tensors, and what becomes of them is each strategy's own.
"""

from __future__ import annotations

from contract.errors import TrainingError
from contract.training import TrainingCut, TrainingPlan

from .split_model import Shipped
from .split_rounds import Rounds
from .strategies import Settings, Site


def whole_cut(plan: TrainingPlan) -> TrainingCut:
    """The part that is the whole model: its loss is in its graph."""
    return next(cut for cut in plan.cuts if cut.loss != "none")


def open_rounds(site: Site, shipped: Shipped, settings: Settings) -> Rounds:
    """A site's training, every device at the whole model. Raises: TrainingError for another number of classes."""
    cut = whole_cut(shipped.plan)
    if cut.output_shape != (site.classes,):
        raise TrainingError(
            f"site {site.name!r} has {site.classes} classes, the package's model {cut.output_shape[0]}",
            f"export the model with {site.classes} classes, or give the devices the package's class list",
        )
    return Rounds(site, shipped, settings, cut)


def round_numbers(rounds: Rounds, epochs: int) -> dict[str, float | int | str]:
    """What every device of the round is told: which epochs, in which order of images, at which rate."""
    s, rate = rounds.settings, rounds.schedule.at(rounds.epoch, 1)
    rounds.tally.lr = rate
    return {"epoch": rounds.epoch + 1, "epochs": epochs, "size": s.batch, "seed": s.seed, "rate": rate}

"""Draws what backtests came to: allocation and fragmentation over the requests, by policy.

The benchmark `churn` draws on the same `panels`.

matplotlib is an extra (`pip install 'moorage[plots]'`) and is imported only when there is something
to draw. The same samples give the same bytes: no dates, no random ids in the files.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from moorage.lab.errors import CommandError

KINDS: Final = (".png", ".svg")
SECONDS_PER_DAY: Final = 86_400.0
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Told apart by those who see few colours, too: Okabe and Ito, "Color Universal Design", 2008."""
DASHES: Final = ("-", "--", "-.", ":")
_METADATA: Final[Mapping[str, dict[str, Any]]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
}


class PlotSample(NamedTuple):
    """One moment. Percentages are of the fleet's GPU milli.

    Args:
        at_seconds: Time of the timeline.
        demanded_percent: What had been asked for by then.
        allocation_percent: What was held.
        fragmentation_percent: What was free and of no use to typical requests.

    """

    at_seconds: float
    demanded_percent: float
    allocation_percent: float
    fragmentation_percent: float


def check(paths: Sequence[Path]) -> None:
    """See that these files can be drawn.

    Raises:
        CommandError: One has another ending, lies in no folder, or matplotlib is not installed.

    """
    for path in paths:
        if path.suffix not in KINDS:
            raise CommandError(f"{path}: plots are {' or '.join(KINDS)} files")
        if not path.absolute().parent.is_dir():
            raise CommandError(f"{path}: there is no folder {path.absolute().parent}")
    if paths and find_spec("matplotlib") is None:
        raise CommandError("plots need matplotlib: pip install 'moorage[plots]'")


def draw(paths: Sequence[Path], runs: Mapping[str, Sequence[PlotSample]]) -> None:
    """Draw to each of the files.

    Args:
        paths: `check` has seen them.
        runs: Samples by policy.

    """
    if not paths:
        return
    figure, (above, below) = panels(share_x=True)
    timed = any(sample.at_seconds for samples in runs.values() for sample in samples)
    for number, (name, samples) in enumerate(runs.items()):
        across = [s.at_seconds / SECONDS_PER_DAY if timed else s.demanded_percent for s in samples]
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number % len(DASHES)],
            "linewidth": 1.4,
        }
        for axes, values in (
            (above, [s.allocation_percent for s in samples]),
            (below, [s.fragmentation_percent for s in samples]),
        ):
            axes.plot(across, values, label=name, **style)
            if values:
                axes.annotate(
                    f"{name} {values[-1]:.1f}", (across[-1], values[-1]), (4, 0),
                    textcoords="offset points", va="center", fontsize="small", color=style["color"],
                )  # fmt: skip
    figure.suptitle(f"{' and '.join(runs) if len(runs) < 3 else f'{len(runs)} policies'}, backtest")  # noqa: PLR2004  # Few fit.
    above.set_ylabel("GPU held, % of the fleet")
    below.set_ylabel("GPU free but of no use\nto typical requests, %")
    below.set_xlabel("days" if timed else "GPU demand that had arrived, % of the fleet")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.margins(x=0.16)  # Room for the names at the ends.
    above.legend(loc="lower right", fontsize="small")
    save(figure, paths)


def panels(*, share_x: bool = False) -> tuple[Any, tuple[Any, Any]]:
    """Return a figure of two panels, one above the other, as all pictures here are."""
    import matplotlib as mpl  # noqa: PLC0415  # An extra.
    from matplotlib.figure import Figure  # noqa: PLC0415  # As above.

    mpl.rcParams["svg.hashsalt"] = "moorage"
    mpl.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(9.0, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=share_x)
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
    return figure, (above, below)


def save(figure: Any, paths: Sequence[Path]) -> None:
    """Write a figure to each of the files."""
    for path in paths:
        figure.savefig(path, dpi=120, metadata=dict(_METADATA[path.suffix]))

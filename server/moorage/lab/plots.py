"""Draws the results of backtests: allocation and fragmentation over the requests, per policy.

The benchmark `churn` draws on the same `panels`.

matplotlib is an extra (`pip install 'moorage[plots]'`) and is imported only when there is something
to draw. The same samples give the same bytes: the files have no dates and no random ids.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moorage.extras import install_command
from moorage.lab.errors import CommandError
from moorage.records.json_values import JsonObject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: Final = (".png", ".svg")
SECONDS_PER_DAY: Final = 86_400.0
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Line colours that colour-blind readers, too, can tell apart (Okabe and Ito)."""
DASHES: Final = ("-", "--", ":", "-.")
"""Dash styles of the lines; the next one is used when the colours repeat."""
LABEL_GAP: Final = 0.05
"""Least distance between the labels of two lines, as a share of the height of the panel."""
_METADATA: Final[Mapping[str, JsonObject]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
}


class PlotSample(NamedTuple):
    """The figures of a backtest at one moment, in percent of the fleet's GPU capacity.

    Args:
        demanded_percent: The demand of all requests until this moment.
        allocation_percent: The capacity that leases held.
        fragmentation_percent: The free capacity that typical requests could not use.
    """

    at_seconds: float
    demanded_percent: float
    allocation_percent: float
    fragmentation_percent: float


def check(paths: Sequence[Path]) -> None:
    """Refuse file names to which no plot can be written.

    Raises:
        CommandError: A path ends in none of `KINDS`, or has no folder; or matplotlib is missing.
    """
    for path in paths:
        if path.suffix not in KINDS:
            raise CommandError(f"{path}: plots are {' or '.join(KINDS)} files")
        if not path.absolute().parent.is_dir():
            raise CommandError(f"{path}: there is no folder {path.absolute().parent}")
    if paths and find_spec("matplotlib") is None:
        raise CommandError(f"plots need matplotlib: {install_command('plots')}")


def draw(paths: Sequence[Path], runs: Mapping[str, Sequence[PlotSample]], title: str) -> None:
    """Draw the plots to each of the files."""
    if not paths:
        return
    figure, (above, below) = panels(share_x=True)
    timed = any(sample.at_seconds for samples in runs.values() for sample in samples)
    for number, (name, samples) in enumerate(runs.items()):
        across = [s.at_seconds / SECONDS_PER_DAY if timed else s.demanded_percent for s in samples]
        turn, colour = divmod(number, len(COLOURS))
        style = {
            "label": name,
            "color": COLOURS[colour],
            "linestyle": DASHES[turn % len(DASHES)],
            "linewidth": 1.6,
        }
        above.plot(across, [s.allocation_percent for s in samples], **style)
        below.plot(across, [s.fragmentation_percent for s in samples], **style)
    figure.suptitle(title)
    above.set_ylabel("GPU held, % of the fleet")
    below.set_ylabel("GPU free but of no use\nto typical requests, %")
    below.set_xlabel("days" if timed else "GPU demand that had arrived, % of the fleet")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.margins(x=0)  # The lines end at the frame, and their names stand beside it.
        _label_ends(axes)
    save(figure, paths)


def _label_ends(axes: Any) -> None:
    """Write each line's name and last value at its end, without overlaps."""
    bottom, top = axes.get_ylim()
    ends = sorted(
        (float(line.get_ydata()[-1]), float(line.get_xdata()[-1]), line)
        for line in axes.get_lines()
        if len(line.get_ydata())
    )
    rightmost = max((x for _, x, _ in ends), default=0.0)
    free_above = bottom
    for y, _, line in ends:
        at = max(y, free_above)
        free_above = at + LABEL_GAP * (top - bottom)
        axes.annotate(
            f"{line.get_label()}  {y:.1f} %",
            (rightmost, at),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            fontsize="small",
            annotation_clip=False,
        )


def panels(*, share_x: bool = False) -> tuple[Any, tuple[Any, Any]]:
    """Return a figure of two panels, one above the other, for all plots."""
    import matplotlib as mpl  # noqa: PLC0415  # An extra.
    from matplotlib.figure import Figure  # noqa: PLC0415  # As above.

    mpl.rcParams["svg.hashsalt"] = "moorage"
    mpl.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(9.0, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=share_x)
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
    return figure, (above, below)


def save(figure: "Figure", paths: Sequence[Path]) -> None:
    """Write a figure to each of the files."""
    for path in paths:
        figure.savefig(path, dpi=120, metadata=dict(_METADATA[path.suffix]))

"""A picture of a run: where and when each node ran, and how much of each resource was used.

matplotlib draws it; `pip install 'moorage[plots]'` installs matplotlib.
"""

import heapq
from pathlib import Path
from typing import Any, Final

from moorage.extras import install_command
from moorage_client.workflow.errors import WorkflowError
from moorage_client.workflow.results import ExecutionResult, NodeResult, NodeStatus
from moorage_client.workflow.timeline import ResourceSnapshot

NAMED_FRACTION_MIN: Final = 0.03
"""Least length of a bar that shows its node's name, as a fraction of the run's duration."""
LANES_MAX: Final = 60
"""Number of lanes up to which the picture grows; with more, each lane is thinner."""

_COLOURS: Final = {
    NodeStatus.COMPLETED: "#3b7dd8",
    NodeStatus.FAILED: "#c8372d",
    NodeStatus.TIMED_OUT: "#e08a1e",
    NodeStatus.CANCELLED: "#8a8a8a",
}
_ELSEWHERE: Final = ""
_NAME: Final = {"parse_math": False}
"""Draws names unchanged: matplotlib would read text between dollars as formulas."""


def draw_timeline(result: ExecutionResult, path: str | Path) -> None:
    """Draw a run into a file: nodes at the top, and below them a panel for each resource.

    A bar is the last attempt at a node; its colour shows the status. If the pool knows where nodes
    ran, the bars are grouped by node of the fleet.

    Args:
        result: The result of an executor.
        path: The file: `.svg`, `.png` or another format of matplotlib.

    Raises:
        WorkflowError: matplotlib is not installed or cannot write the file, or no node ran.
    """
    figure_type = _matplotlib()
    bars = sorted(
        (each for each in result.node_results.values() if each.started_at),
        key=lambda each: each.started_at,
    )
    if not bars:
        raise WorkflowError("no node ran, so there is nothing to draw")
    snapshots = result.resource_timeline.snapshots if result.resource_timeline else []
    start = bars[0].started_at
    end = max(each.started_at + each.duration_seconds for each in bars)
    # The pool may have served other runs before and after this one.
    shown = [each for each in snapshots if start - 1 <= each.timestamp <= end + 1]
    names = list(shown[0].allocated) if shown else []
    lanes = _lanes(bars)
    rows = max(lane for lane, _ in lanes.values()) + 1
    heights = [max(2.0, 0.25 * min(rows, LANES_MAX)), *[1.2] * len(names)]
    figure = figure_type(figsize=(11, sum(heights) + 1), layout="constrained")
    panels = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    _draw_nodes(panels[0], bars, lanes, start)
    for panel, name in zip(panels[1:], names, strict=True):
        _draw_resource(panel, name, shown, start, end)
    panels[-1].set_xlabel("seconds")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise WorkflowError(f"cannot draw into {path}: {error}") from error


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # Only pictures need it.
    except ImportError as error:
        raise WorkflowError(
            f"pictures need matplotlib, which is not installed: {install_command('plots')}"
        ) from error
    return Figure


def _place(node: NodeResult) -> str:
    """Return the label for the place where a node ran."""
    return ", ".join(f"{share.cluster_id}/{share.node_id}" for share in node.placement)


def _lanes(bars: list[NodeResult]) -> dict[str, tuple[int, str]]:
    """Assign each bar to the first free lane of its place; return lane and place by node."""
    lanes: dict[str, tuple[int, str]] = {}
    first = 0
    for place in dict.fromkeys(map(_place, bars)):
        free: list[int] = []
        busy: list[tuple[float, int]] = []
        opened = 0
        for bar in (each for each in bars if _place(each) == place):
            while busy and busy[0][0] <= bar.started_at:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                lane = heapq.heappop(free)
            else:
                lane, opened = opened, opened + 1
            heapq.heappush(busy, (bar.started_at + bar.duration_seconds, lane))
            lanes[bar.name] = (first + lane, place)
        first += opened
    return lanes


def _draw_nodes(
    panel: Any, bars: list[NodeResult], lanes: dict[str, tuple[int, str]], start: float
) -> None:
    for status, colour in _COLOURS.items():
        own = [bar for bar in bars if bar.status is status]
        if own:
            panel.barh(
                [lanes[bar.name][0] for bar in own],
                [bar.duration_seconds for bar in own],
                left=[bar.started_at - start for bar in own],
                color=colour,
                # Draw gaps between long bars only: short bars must not vanish.
                edgecolor="white" if status is NodeStatus.COMPLETED else colour,
                linewidth=0.3,
                label=status.value,
            )
    end = max(bar.started_at + bar.duration_seconds for bar in bars)
    for bar in bars:
        if bar.duration_seconds >= NAMED_FRACTION_MIN * (end - start):
            at = (bar.started_at - start, lanes[bar.name][0])
            panel.annotate(f" {bar.name}", at, va="center", fontsize=7, clip_on=True, **_NAME)
    places = {place: lane for lane, place in sorted(lanes.values(), reverse=True)}
    if set(places) != {_ELSEWHERE}:
        panel.set_yticks(list(places.values()), list(places), **_NAME)
    else:
        panel.set_yticks([])
    panel.invert_yaxis()
    panel.set_ylabel("nodes")
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)


def _draw_resource(
    panel: Any, name: str, shown: list[ResourceSnapshot], start: float, end: float
) -> None:
    """Draw the use of a resource as steps, below a line at its capacity."""
    times = [each.timestamp - start for each in shown]
    used = [each.allocated.get(name, 0) for each in shown]
    capacity = max(each.allocated.get(name, 0) + each.available.get(name, 0) for each in shown)
    panel.fill_between(
        [*times, end - start], [*used, used[-1]], step="post", color="#3b7dd8", alpha=0.5
    )
    panel.axhline(capacity, color="#c8372d", linewidth=0.8)
    panel.set_ylim(0, capacity * 1.1 or 1)
    panel.set_ylabel(name, **_NAME)

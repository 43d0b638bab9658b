"""Reports of `churn`: means with their standard errors, and a picture."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table

from moorage.lab import plots
from moorage.lab.churn import SIZES, by_size

ALL: Final = "all"
"""Row name of the mean over all traces."""


class SizeCount(msgspec.Struct):
    """The outcomes of requests of one size.

    Attributes:
        requested, requested_milli: Measured requests, and their GPUs in thousandths.
        refused, refused_milli: Refused requests, and their GPUs in thousandths.
        waited_stays: Sum of the waits of all measured requests, in mean stays.
    """

    requested: int = 0
    requested_milli: int = 0
    refused: int = 0
    refused_milli: int = 0
    waited_stays: float = 0.0


class ChurnRun(msgspec.Struct, frozen=True):
    """The figures of one run.

    Attributes:
        trace: Name of the trace.
        rule: Name of the policy.
        load, stays, seed: How requests came and went.
        allocated_percent: Mean GPUs held over time, in percent of the fleet's.
        sizes: The outcomes, by size of the requests.
        microseconds: The mean time of a decision of the policy.
    """

    trace: str
    rule: str
    load: float
    stays: str
    seed: int
    allocated_percent: float
    sizes: dict[str, SizeCount]
    microseconds: float

    def figures(self) -> dict[str, float]:
        """Return the values to average over the seeds."""
        counts = self.sizes.values()
        figures = {
            "allocated_percent": self.allocated_percent,
            "refused_percent": _percent(
                sum(count.refused_milli for count in counts),
                sum(count.requested_milli for count in counts),
            ),
            "wait": sum(each.waited_stays for each in counts)
            / max(1, sum(each.requested for each in counts)),
        }
        for size, count in self.sizes.items():
            figures[f"refused_percent {size}"] = _percent(count.refused, count.requested)
            figures[f"wait {size}"] = count.waited_stays / max(1, count.requested)
        return figures


def rows(runs: Sequence[ChurnRun]) -> list[dict[str, Any]]:
    """Return a row per trace, stays, load and policy, and for several traces a row over all.

    Every figure is `[mean, standard error]` over the seeds. `less_baseline` is the allocation minus
    that of the first policy in the same runs. With one seed, the error is None.
    """
    names = list(dict.fromkeys(run.trace for run in runs))
    found = [row for name in names for row in _rows(runs, name, [name])]
    return found + (list(_rows(runs, ALL, names)) if len(names) > 1 else [])


def _rows(runs: Sequence[ChurnRun], label: str, names: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Yield rows of means over several traces; only seeds with a run of every trace count."""
    known = {(r.trace, r.stays, r.load, r.rule, r.seed): r.figures() for r in runs}
    seeds = sorted({run.seed for run in runs})
    policies = list(dict.fromkeys(run.rule for run in runs))
    for stays, load in dict.fromkeys((run.stays, run.load) for run in runs):
        by_seed = {
            (policy, seed): _mean([known[name, stays, load, policy, seed] for name in names])
            for policy in policies
            for seed in seeds
            if all((name, stays, load, policy, seed) in known for name in names)
        }
        for policy in policies:
            mine = {seed: by_seed[policy, seed] for seed in seeds if (policy, seed) in by_seed}
            if not mine:
                continue
            names_of = sorted({key for figures in mine.values() for key in figures}, key=_order)
            base = [
                figures["allocated_percent"] - by_seed[policies[0], seed]["allocated_percent"]
                for seed, figures in mine.items()
                if (policies[0], seed) in by_seed
            ]
            yield {
                "trace": label,
                "stays": stays,
                "load": load,
                "rule": policy,
                "seeds": len(mine),
                **{
                    key: _with_error([f[key] for f in mine.values() if key in f])
                    for key in names_of
                },
                "less_baseline": _with_error(base),
            }


def _mean(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for each in several for key in each)
    return {key: statistics.fmean(each[key] for each in several if key in each) for key in keys}


def _with_error(values: Sequence[float]) -> list[float | None]:
    if not values:
        return [None, None]
    error = statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return [statistics.fmean(values), error]


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _order(key: str) -> tuple[str, int]:
    """Return the sort key of a figure: its name, then its size; the total of all sizes is first."""
    figure, _, size = key.partition(" ")
    return figure, by_size(size) if size else -len(SIZES) - 1


def table(figures: Mapping[str, Any]) -> Table:
    """Return the main figures as a table; the JSON document has them all."""
    queued, found = figures["queued"], figures["table"]
    shown = [("allocated_percent", "alloc. %"), ("less_baseline", f"less {found[0]['rule']}")]
    shown += [("wait", "wait, mean stays")] if queued else [("refused_percent", "refused %")]
    sizes = sorted(
        {
            key
            for row in found
            for key in row
            if key.startswith("wait " if queued else "refused_percent ")
        },
        key=_order,
    )
    shown += [(key, key.partition(" ")[2]) for key in sizes]
    made = Table(
        title=f"A fleet from which requests leave; {figures['seeds']} seeds, ± standard errors",
        caption="by size: mean wait" if queued else "by size: requests refused, %",
    )
    for heading in ("trace", "stays", "load", "policy"):
        made.add_column(heading, overflow="fold")
    for _, heading in shown:
        made.add_column(heading, justify="right")
    for row in found:
        cells = [_cell(row.get(key), 3 if key.startswith("wait") else 2) for key, _ in shown]
        made.add_row(row["trace"], row["stays"], f"{row['load']:g}", row["rule"], *cells)
    return made


def _cell(figure: Sequence[float | None] | None, digits: int) -> str:
    if figure is None or figure[0] is None:
        return ""
    error = "" if figure[1] is None else f" ± {figure[1]:.{digits}f}"
    return f"{figure[0]:.{digits}f}{error}"


def draw(paths: Sequence[Path], found: Sequence[Mapping[str, Any]], *, queued: bool) -> None:
    """Draw the results for the first kind of lease durations, and save the picture to the files.

    The upper panel shows the mean of the GPUs held for each load; if there is only one load, it
    shows the GPUs held or the waits for each trace. The lower panel shows the refused or waiting
    requests by size, at the highest load.
    """
    if not paths:
        return
    label = ALL if any(row["trace"] == ALL for row in found) else found[0]["trace"]
    some = [row for row in found if row["stays"] == found[0]["stays"]]
    mine = [row for row in some if row["trace"] == label]
    last = max(row["load"] for row in mine)
    figure, (above, below) = plots.panels()
    waits = "mean wait, in mean stays"
    if len({row["load"] for row in mine}) > 1:
        for policy in dict.fromkeys(row["rule"] for row in mine):
            line = sorted(
                (row for row in mine if row["rule"] == policy), key=lambda row: row["load"]
            )
            held = [row["allocated_percent"] for row in line]
            above.errorbar(
                [row["load"] for row in line],
                [mean for mean, _ in held],
                [error or 0.0 for _, error in held],
                label=policy, marker="o", markersize=3, linewidth=1.2,
            )  # fmt: skip
        above.set_xlabel("load: GPU demand / capacity")
        above.set_ylabel("GPU held, % of the fleet")
    else:
        key = "wait" if queued else "allocated_percent"
        names = list(dict.fromkeys(row["trace"] for row in some))
        bars = {
            policy: {row["trace"]: row[key] for row in some if row["rule"] == policy}
            for policy in dict.fromkeys(row["rule"] for row in some)
        }
        _bars(above, bars, {name: name for name in names})
        above.set_ylabel(waits if queued else "GPU held, % of the fleet")
    prefix = "wait " if queued else "refused_percent "
    at_last = {row["rule"]: row for row in mine if row["load"] == last}
    keys = sorted({k for row in at_last.values() for k in row if k.startswith(prefix)}, key=_order)
    _bars(below, at_last, {key: key.removeprefix(prefix) for key in keys})
    below.set_ylabel(f"{waits if queued else 'requests refused, %'},\nat load {last:g}")
    above.legend(fontsize="small")
    plots.save(figure, paths)


def _bars(axes: Any, found: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> None:
    """Draw a group of bars per label, one for each policy: `found[policy][key]`."""
    wide = 0.8 / len(found)
    for number, (policy, figures) in enumerate(found.items()):
        heights = [figures.get(key, (0.0, None)) for key in labels]
        places = [place + (number + 0.5) * wide - 0.4 for place in range(len(labels))]
        errors = [error or 0.0 for _, error in heights]
        axes.bar(places, [mean for mean, _ in heights], wide, yerr=errors, label=policy)
    axes.set_xticks(range(len(labels)), list(labels.values()))

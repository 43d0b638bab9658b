"""The map of the fleet in a real browser, for `consoles`: its frame rate and its first view."""

import asyncio
import json
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from playwright.sync_api import Browser, ViewportSize, sync_playwright
from websockets.asyncio.client import connect

from moorage.testing.daemon_process import Running

FRAMES_SECONDS: Final = 20.0
FRAME_MILLISECONDS_MAX: Final = 50.0
VIEWS: Final = 9
VIEW_SECONDS_MAX: Final = 1.0
CHANGES_PER_SECOND: Final = 500
TICK_SECONDS: Final = 0.1
SIZE: Final[ViewportSize] = {"width": 1600, "height": 900}
FLAGS: Final = ("--no-sandbox", "--disable-gpu", "--no-first-run")

FRAMES: Final = """seconds => new Promise(done => {
    const taken = [], began = performance.now();
    let before = began;
    const next = now => {
        taken.push(now - before);
        before = now;
        if (now - began < seconds * 1000) requestAnimationFrame(next); else done(taken.slice(2));
    };
    requestAnimationFrame(next);
})"""
"""JavaScript that returns the milliseconds between the frames of a browser."""
DRAWN: Final = "() => performance.getEntriesByName('fleet drawn')[0]?.startTime || 0"


def map_figures(
    running: Running, path: str, request: str, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the map: time between frames, with and without changes, and time to the first view.

    Args:
        running: A server with a fleet.
        path: Path of the browser's program.
        request: A message that is granted one GPU.
        progress: Called with a line for each step.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        first = sorted(_first_view(browser, running) for _ in range(VIEWS))
        quiet = _frames(browser, running)
        with _changing(running, request):
            busy = _frames(browser, running)
        browser.close()
    figures = {
        "first_view_seconds": statistics.median(first),
        "first_view_seconds_most": first[-1],
        "first_view_seconds_max": VIEW_SECONDS_MAX,
        "frame_p99_milliseconds": _p99(busy),
        "frame_p99_milliseconds_at_rest": _p99(quiet),
        "frame_p99_milliseconds_max": FRAME_MILLISECONDS_MAX,
        "frames_per_second": 1000 / statistics.mean(busy),
    }
    progress(f"first view {figures['first_view_seconds']:.2f} s, frames {_p99(busy):.0f} ms")
    return figures


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _first_view(browser: Browser, running: Running) -> float:
    """Return the seconds from the navigation to the drawn map, with an empty cache."""
    page = browser.new_page(viewport=SIZE)
    page.goto(f"{running.http}/console/fleet")
    page.wait_for_function(DRAWN)
    seconds = page.evaluate(DRAWN) / 1000
    page.close()
    return float(seconds)


def _frames(browser: Browser, running: Running) -> list[float]:
    page = browser.new_page(viewport=SIZE)
    page.goto(f"{running.http}/console/fleet")
    page.wait_for_function(DRAWN)
    taken: list[float] = page.evaluate(FRAMES, FRAMES_SECONDS)
    page.close()
    return taken


@contextmanager
def _changing(running: Running, request: str) -> Iterator[None]:
    """Lease and release slots at a fixed rate while the block runs."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    change = _change(running.ws, request, stop)
    thread = threading.Thread(target=loop.run_until_complete, args=(change,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


async def _change(url: str, request: str, stop: asyncio.Event) -> None:
    many = round(CHANGES_PER_SECOND * TICK_SECONDS)
    clock = asyncio.get_running_loop()
    async with connect(url, proxy=None) as socket:
        held: list[dict[str, str]] = []
        while not stop.is_set():
            began = clock.time()
            ends = [
                json.dumps({"op": "release", "lease": each["id"], "token": each["token"]})
                for each in held
            ]
            for message in ends or [request] * many:
                await socket.send(message)
            answers = [json.loads(await socket.recv()) for _ in range(many)]
            held = [] if ends else [each["lease"] for each in answers]
            await asyncio.sleep(max(0.0, began + TICK_SECONDS - clock.time()))  # An even rate.

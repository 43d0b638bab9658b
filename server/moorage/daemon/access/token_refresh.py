"""Reads the tokens again while the daemon runs: at SIGHUP, and when the settings file changes.

`daemon.main` runs it. If a setting is wrong, the tokens stay as they are, and the log names the
fault and its place. Changes of other settings are in force from the next start.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import structlog

from moorage.config.settings import Config, ConfigError

LOOK_SECONDS: Final = 1.0
"""Seconds between two checks of the file. The file is read once two checks find it equal: an editor
may be in the middle of writing it."""

log = structlog.get_logger("moored")

_Stamp = tuple[int, int, int] | None


class Rereading:
    """Reads the tokens of the settings again when they may have changed.

    Args:
        config: The settings in force.
        read: Reads the settings again; raises `ConfigError`.
        file: The settings file to watch; None: no file is watched.
    """

    def __init__(self, config: Config, read: Callable[[], Config], file: Path | None) -> None:
        self._config = config
        self._read = read
        self._file = file
        self._hung_up = asyncio.Event()
        self._terminal = _has_terminal()
        self._known = self._stamp()

    def hang_up(self, stop: Callable[[], None]) -> None:
        """Handle SIGHUP: read the tokens again, or stop the daemon if its terminal is gone."""
        if self._terminal and not _has_terminal():
            stop()
        else:
            self._hung_up.set()

    async def run(self, change: Callable[[Mapping[str, str]], None]) -> None:
        """Read the tokens again after each change of the file and each SIGHUP, until cancelled.

        Args:
            change: Called with the new tokens if they differ from the old ones.
        """
        last = self._known
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._hung_up.wait()
            before, last = last, self._stamp()
            if self._hung_up.is_set() or (last == before and last != self._known):
                self._hung_up.clear()
                self._known = last
                self._reread(change)

    def _reread(self, change: Callable[[Mapping[str, str]], None]) -> None:
        try:
            config = self._read()
        except ConfigError as error:
            config, setting, finding = self._config, error.setting, str(error)
        else:
            setting, finding = "tokens", self._switch_fault(config)
        if finding:
            log.error(
                "settings_refused",
                setting=setting,
                finding=f"{finding}; the old tokens stay in force",
            )
            return
        before, now = self._config.values(), config.values()
        late = [name for name in now if name != "tokens" and now[name] != before[name]]
        if late:
            log.warning(
                "settings_need_restart",
                changed=late,
                finding="the changed settings are in force from the next start",
            )
        old, new = self._config.tokens.items(), config.tokens.items()
        log.info("tokens_changed", known=len(new), added=len(new - old), removed=len(old - new))
        if new != old:
            self._config = dataclasses.replace(self._config, tokens=config.tokens)
            change(config.tokens)

    def _switch_fault(self, config: Config) -> str:
        """Return the fault if a new configuration would turn authentication on or off."""
        if bool(config.tokens) == bool(self._config.tokens):
            return ""
        return (
            "tokens: expected tokens before and after the change, or never; "
            "restart to turn tokens on or off"
        )

    def _stamp(self) -> _Stamp:
        """Return a value that differs after every change of the file; None if there is no file."""
        try:
            seen = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if seen is None else (seen.st_ino, seen.st_size, seen.st_mtime_ns)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

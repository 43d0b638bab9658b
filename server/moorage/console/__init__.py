"""The web console's files, under `static`: `web.console` serves them as they are."""

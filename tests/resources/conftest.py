"""An image whose command is a shell, as those of distributions are."""

from typing import Any

import pytest

SHELL_IMAGE = "localhost/moorage-shell:1"


@pytest.fixture
def shell_image(container_engine: Any, container_image: str) -> str:
    made = container_engine.create_container(container_image, command=["true"])
    repository, _, tag = SHELL_IMAGE.rpartition(":")
    container_engine.commit(made["Id"], repository, tag, changes=['CMD ["/bin/sh"]'])
    container_engine.remove_container(made["Id"])
    return SHELL_IMAGE

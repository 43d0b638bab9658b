"""`make docs` refuses a page that is not sound; each mistake is made here once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = "# Index\n\n```{toctree}\npage\n```\n"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"page.md": "# Page\n\n[there](index.md), [within](#part)\n\n## Part\n"}, ""),
        ({"page.md": "# Page\n\n[nowhere](nowhere.md)\n"}, "target not found"),
        ({"page.md": "# Page\n\n[no such part](index.md#part)\n"}, "local id not found"),
        ({"page.md": "# Page\n\n### Third\n"}, "Non-consecutive header level"),
        ({"page.md": "# Page\n", "lost.md": "# Lost\n"}, "isn't included in any toctree"),
        ({"page.md": "# Page\n\n![nothing](nothing.svg)\n"}, "not readable"),
    ],
)
def test_a_mistake_fails_the_build(files: dict[str, str], complaint: str, tmp_path: Path) -> None:
    for name, text in {"index.md": INDEX, **files}.items():
        (tmp_path / name).write_text(text)
    makefile = (ROOT / "Makefile").read_text()
    (line,) = [each for each in makefile.splitlines() if "sphinx-build" in each]
    flags = line.split("sphinx-build")[1].split()[:-2]
    command = [Path(sys.executable).with_name("sphinx-build"), *flags, "-c", ROOT / "docs"]
    built = subprocess.run(
        [*command, tmp_path, tmp_path / "built"],
        env={**os.environ, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode == 0) == (not complaint), built.stderr
    assert complaint in built.stderr

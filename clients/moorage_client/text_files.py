"""Reads a user's files up to a size limit, in the encodings of common editors and shells.

All commands read a user's files with these functions.
"""

import codecs
import errno
import io
import re
import tokenize
import unicodedata
from pathlib import Path
from typing import IO, Final

FILE_BYTES_MAX: Final = 256 << 20
"""Maximum bytes of one file; a larger file is refused instead of read into memory."""
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CODING: Final = re.compile(r"^(\s*#.*?coding[:=]\s*)[-\w.]+", re.ASCII)


def read_bounded(file: IO[bytes], bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Return the rest of an open file.

    Raises:
        OSError: The file has more than `bytes_max` bytes, or cannot be read.
    """
    content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes")
    return content


def read_file(path: Path, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: The file has more than `bytes_max` bytes, or cannot be read.
    """
    with path.open("rb") as file:
        return read_bounded(file, bytes_max)


def decode_text(content: bytes) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark; drop the mark.

    Raises:
        UnicodeDecodeError: The bytes are neither UTF-8 nor marked UTF-16.
    """
    return content.decode("utf-16" if content.startswith(_UTF_16) else "utf-8-sig")


def decode_source(content: bytes) -> str:
    """Decode Python source by its encoding declaration (PEP 263), else as `decode_text` does.

    The returned text declares UTF-8, since the client sends it in UTF-8.

    Raises:
        UnicodeDecodeError: The bytes are not in the declared encoding.
        SyntaxError: The declared encoding does not exist.
    """
    if content.startswith(_UTF_16):
        return decode_text(content)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    text = content.decode(encoding)
    if encoding.startswith("utf-8"):
        return text
    lines = text.split("\n", 2)
    named = [_CODING.sub(r"\1utf-8", line) for line in lines[:2]]
    return "\n".join([*named, *lines[2:]])


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        OSError: The file is too large, or cannot be read.
        UnicodeDecodeError: The content is neither UTF-8 nor marked UTF-16.
    """
    return decode_text(read_file(path))


def plain_name(path: Path) -> str:
    """Return a file's name, reduced to the characters allowed in ids; may be empty."""
    stem = path.resolve().name.removesuffix(path.suffix).removesuffix(".tar")
    parts = unicodedata.normalize("NFKD", stem.replace("ß", "ss"))
    letters = "".join(each for each in parts if not unicodedata.combining(each))
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", letters).strip("-.")

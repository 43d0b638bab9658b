"""Reads the files of policy archives in memory, with strict checks of each member.

`catalog.documents.policies` calls `read_archive` with the bytes of an upload, which may be hostile.
Nothing is written to disk, and no content is parsed, compiled or run. The reader accepts `.zip`,
`.tar.gz` and `.tar.xz`, recognized by their first bytes. The policy is the file `code/function.py`
or `function.py`, or the only Python file; a common top folder, as in GitHub's archives, is allowed.
"""

import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final, Protocol

from moorage.model import Code
from moorage.protocol.faults import ServiceError

ENTRY: Final = "function.py"
_BESIDE_ENTRY: Final = ("requirements.txt", "examples.json")
"""Names of files that are read beside the entry file; a policy with them elsewhere is refused."""
FILES_MAX: Final = 512
"""Maximum files of one policy; an archive with more members is refused."""
FILES_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum bytes of all files of one policy, unpacked."""
_UNPACKED_BYTES_MAX: Final = 2 * FILES_BYTES_MAX
"""Maximum bytes of a whole unpacked archive, including ignored files, headers and padding."""
PATH_CHARS_MAX: Final = 255
RATIO_MAX: Final = 200
"""Maximum unpacked bytes per packed byte; source code reaches about ten."""
RATIO_FREE_BYTES: Final = 1024 * 1024
"""Bytes that may be unpacked at any ratio, since small archives of blank files do no harm."""
LZMA_MEMORY_MAX: Final = 72 * 1024 * 1024
"""Maximum bytes of memory to unpack a .tar.xz; the strongest preset of `xz` needs 65 MiB."""
_SHOWN_CHARS_MAX: Final = 80
_CHUNK: Final = 64 * 1024
_GZIP_BITS: Final = zlib.MAX_WBITS | 16

_GZIP: Final = b"\x1f\x8b\x08"
_SUFFIXES: Final = {
    b"PK\x03\x04": ".zip",
    b"PK\x05\x06": ".zip",  # An empty archive.
    _GZIP: ".tar.gz",
    b"\xfd7zXZ\x00": ".tar.xz",
}
"""The file name suffix of each kind of archive, by its first bytes."""
_ZIP_METHODS: Final = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
_ENCRYPTED: Final = 0x1
# Leftovers of packing a folder on a laptop, and bytecode; they are never stored.
_LITTER: Final = frozenset({"__MACOSX", "__pycache__", ".git", ".DS_Store"})


def bad_code(reason: str, expected: str) -> ServiceError:
    """Return the refusal of a policy's code, with the fault and the expected form."""
    text = f"code: {reason}; expected {expected}"
    return ServiceError(Code.BAD_POLICY, text, field="code", expected=expected)


def is_archive(content: bytes) -> bool:
    """Return whether the bytes begin like an accepted kind of archive."""
    return content.startswith(tuple(_SUFFIXES))


def read_archive(content: bytes) -> dict[str, bytes]:
    """Return the files of a policy's archive by path; the entry file is `function.py`.

    Raises:
        ServiceError: `bad_policy`: a member is a link, a device, absolute, outside or doubled; the
        archive exceeds a limit; or there is no entry. The message names the member or limit.
    """
    try:
        members = (_zip_members if _kind_of(content) == ".zip" else _tar_members)(content)
        return policy_files(collect(members))
    except ServiceError:
        raise
    except Exception as error:  # On hostile bytes, the readers raise any error.
        cause = str(error) or type(error).__name__
        raise bad_code(
            f"the {_kind_of(content)} is damaged: {cause}", "a whole .zip, .tar.gz or .tar.xz"
        ) from error


def collect(members: Iterable[tuple[str, bytes]]) -> dict[str, bytes]:
    """Return the members by clean path; refuse bad names, too many members or too many bytes."""
    files: dict[str, bytes] = {}
    size = 0
    for name, content in members:
        path = _clean(name)
        if path is None:
            continue
        if path in files:
            raise bad_code(f"the archive has two members {path!r}", "each member once")
        size += len(content)
        if len(files) >= FILES_MAX:
            raise _too_many()
        if size > FILES_BYTES_MAX:
            raise _too_large()
        files[path] = content
    for path in files:
        parents = accumulate(path.split("/")[:-1], "{}/{}".format)
        if found := next((parent for parent in parents if parent in files), None):
            raise bad_code(f"{found!r} is a file and a folder", "one of the two")
    return files


def policy_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files beside the entry file, by their path relative to it."""
    files = _with_entry(_without_folder(files))
    for root in ("code/", ""):
        if root + ENTRY in files:
            for name in _BESIDE_ENTRY if root else ():
                if name in files and root + name not in files:
                    found = f"{name!r} lies outside of {root}, where it is not read"
                    raise bad_code(found, f"{root}{name}, beside {ENTRY}")
            return {
                path.removeprefix(root): content
                for path, content in files.items()
                if path.startswith(root)
            }
    shown = ", ".join(sorted(files)[:5]) or "nothing"
    raise bad_code(
        f"no code/{ENTRY} among the files ({shown})",
        f"code/{ENTRY} or {ENTRY}, with the class AIOSv1PolicyRule, or a single Python file",
    )


def _without_folder(files: dict[str, bytes]) -> dict[str, bytes]:
    """Strip a common top folder from all paths, unless it is `code/`."""
    tops = {path.partition("/")[0] for path in files}
    top = f"{tops.pop()}/" if len(tops) == 1 else ""
    if not top or (top == "code/" and top + ENTRY in files):
        return files
    return {path.removeprefix(top): content for path, content in files.items()}


def _with_entry(files: dict[str, bytes]) -> dict[str, bytes]:
    """If there is only one Python file, give it the name of the entry file."""
    sources = [path for path in files if path.endswith(".py")]
    if len(sources) != 1 or sources[0].rpartition("/")[0] not in {"", "code"}:
        return files
    entry = sources[0].rpartition("/")[0] and "code/"
    return {entry + ENTRY if path in sources else path: files[path] for path in files}


def _kind_of(content: bytes) -> str:
    return next(suffix for begin, suffix in _SUFFIXES.items() if content.startswith(begin))


def _too_many() -> ServiceError:
    return bad_code(
        f"the archive has more than {FILES_MAX} files",
        f"at most {FILES_MAX}: omit files that the policy does not import",
    )


def _too_large() -> ServiceError:
    return bad_code(
        f"the policy's files have more than {FILES_BYTES_MAX} bytes in total",
        f"at most {FILES_BYTES_MAX}: omit files that the policy does not import",
    )


def _too_dense() -> ServiceError:
    return bad_code(
        f"the archive unpacks to more than {RATIO_MAX} times its size, as bombs do",
        f"at most {RATIO_MAX} times its size, as for source code",
    )


def _clean(name: str) -> str | None:
    """Return the path of a member, None if the file is to be ignored; refuse a bad path."""
    parts = [part for part in name.split("/") if part != "."]
    if (
        not parts
        or len(name) > PATH_CHARS_MAX
        or not name.isprintable()
        or "\\" in name
        or name.startswith("/")
        or ".." in parts
        or "" in parts
        or ":" in parts[0]
    ):
        raise bad_code(
            f"the archive has a member {name[:_SHOWN_CHARS_MAX]!r}",
            f"relative paths of at most {PATH_CHARS_MAX} characters, without `..`",
        )
    if not _LITTER.isdisjoint(parts) or parts[-1].startswith("._") or parts[-1].endswith(".pyc"):
        return None
    return "/".join(parts)


# Zip -------------------------------------------------------------------------------------------


def _zip_members(content: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        if len(infos) > 2 * FILES_MAX:  # Folders also count as members.
            raise _too_many()
        unpacked = sum(info.file_size for info in infos)
        if unpacked > max(RATIO_FREE_BYTES, RATIO_MAX * len(content)):
            raise _too_dense()
        if unpacked > _UNPACKED_BYTES_MAX:  # Ignored files are unpacked, too.
            raise _too_large()
        for info in infos:
            # Some packers on Windows write `\`, against the specification of .zip.
            name = info.filename.replace("\\", "/")
            kind = stat.S_IFMT(info.external_attr >> 16)
            if name.endswith("/") and kind in {0, stat.S_IFDIR}:
                _clean(name.removesuffix("/"))
                continue
            if kind not in {0, stat.S_IFREG}:
                raise _no_file(info.filename)
            if info.flag_bits & _ENCRYPTED or info.compress_type not in _ZIP_METHODS:
                raise bad_code(
                    f"the member {info.filename!r} is encrypted or packed in a rare way",
                    "an archive whose members are stored or deflated, without a password",
                )
            with archive.open(info) as member:
                yield name, _at_most(member)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _at_most(member: _Readable) -> bytes:
    """Read a member up to a limit, since the size in its header may be wrong."""
    content = member.read(FILES_BYTES_MAX + 1)
    if len(content) > FILES_BYTES_MAX:
        raise _too_large()
    return content


def _no_file(name: str) -> ServiceError:
    return bad_code(
        f"the member {name!r} is a link, a device or another special file",
        "plain files and folders only",
    )


# Tar -------------------------------------------------------------------------------------------


def _tar_members(content: bytes) -> Iterator[tuple[str, bytes]]:
    plain = io.BytesIO(_unpack(content))
    with tarfile.open(fileobj=plain, mode="r:") as archive:
        for number, member in enumerate(archive):
            if number >= 2 * FILES_MAX:
                raise _too_many()
            if member.isdir():
                if member.name not in {"", "."}:
                    _clean(member.name)
                continue
            # A sparse member has the type of a plain file, but may claim any size.
            if not member.isreg() or member.issparse():
                raise _no_file(member.name)
            file = archive.extractfile(member)
            if file is None or member.size > FILES_BYTES_MAX:
                raise _too_large()
            yield member.name, _at_most(file)


def _unpack(content: bytes) -> bytes:
    """Return the uncompressed tar; stop as soon as it exceeds the limits."""
    dense = max(RATIO_FREE_BYTES, RATIO_MAX * len(content))
    plain = bytearray()
    for chunk in _gunzip(content) if content.startswith(_GZIP) else _unxz(content):
        plain += chunk
        if len(plain) > dense:
            raise _too_dense()
        if len(plain) > _UNPACKED_BYTES_MAX:
            raise _too_large()
    return bytes(plain)


def _gunzip(content: bytes) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=_GZIP_BITS)
    for start in range(0, len(content), _CHUNK):
        packed = content[start : start + _CHUNK]
        while packed:
            if unpacker.eof:  # A gzip file may have several streams, then padding.
                if not packed.startswith(_GZIP):
                    return
                unpacker = zlib.decompressobj(wbits=_GZIP_BITS)
            yield unpacker.decompress(packed, _CHUNK)
            packed = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
    if not unpacker.eof:
        raise EOFError("the archive ends before its end marker")


def _unxz(content: bytes) -> Iterator[bytes]:
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=LZMA_MEMORY_MAX)
    packed = content
    while not unpacker.eof:
        yield unpacker.decompress(packed, _CHUNK)
        if unpacker.needs_input and not unpacker.eof:
            raise EOFError("the archive ends before its end marker")
        packed = b""  # The unpacker has buffered the rest.

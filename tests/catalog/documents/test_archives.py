"""Good policy archives are read, and hostile archives are refused with the reason."""

import io
import lzma
import os
import stat
import tarfile
import zipfile
import zlib

import pytest

from moorage.catalog.documents.archives import FILES_BYTES_MAX, FILES_MAX, read_archive
from moorage.model import Code
from moorage.protocol.faults import ServiceError

POLICY = b"class AIOSv1PolicyRule: ...\n"


def tar(members, mode="w:gz"):
    """Pack `(name or TarInfo, content)` pairs into a tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for name, content in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def zip_of(members, method=zipfile.ZIP_DEFLATED):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return packed.getvalue()


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def refusal(packed):
    with pytest.raises(ServiceError) as caught:
        read_archive(packed)
    assert caught.value.code is Code.BAD_POLICY
    assert caught.value.field == "code"
    return caught.value.reason


PACKERS = {
    "zip": zip_of,
    "zip-stored": lambda members: zip_of(members, zipfile.ZIP_STORED),
    "tar.gz": tar,
    "tar.xz": lambda members: tar(members, "w:xz"),
}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_an_archive_may_have_files_beside_its_entry_file(pack):
    packed = pack(
        [
            ("code/function.py", POLICY),
            ("code/scores/__init__.py", b""),
            ("code/scores/best.py", b"x = 1\n" * 20000),
            ("README.md", b"not code"),
        ]
    )
    assert read_archive(packed) == {
        "function.py": POLICY,
        "scores/__init__.py": b"",
        "scores/best.py": b"x = 1\n" * 20000,
    }


@pytest.mark.parametrize("folder", ["", "code/", "mine/", "mine-main/code/"])
def test_the_only_python_file_of_an_archive_is_its_entry_file(folder):
    members = [(f"{folder}mine.py", POLICY), (f"{folder}requirements.txt", b"numpy")]
    packed = PACKERS["zip"](members)
    assert read_archive(packed) == {"function.py": POLICY, "requirements.txt": b"numpy"}
    two = PACKERS["zip"]([*members, (f"{folder}more.py", b"")])
    assert "expected code/function.py or function.py, with the class" in refusal(two)


@pytest.mark.parametrize("name", ["requirements.txt", "examples.json"])
def test_a_python_file_outside_of_known_folders_is_refused(name):
    members = [("code/function.py", POLICY), (name, b"[]")]
    with pytest.raises(ServiceError) as refused:
        read_archive(PACKERS["zip"](members))
    assert f"{name!r} lies outside of code/" in refused.value.reason
    assert f"code/{name}" in refused.value.expected
    assert read_archive(PACKERS["zip"]([*members, (f"code/{name}", b"[]")]))[name] == b"[]"


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_an_entry_file_at_the_top_is_found_and_system_files_are_ignored(pack):
    packed = pack(
        [
            ("./function.py", POLICY),
            ("helper.py", b"y"),
            ("__pycache__/function.cpython-311.pyc", b"\0"),
            ("__MACOSX/._function.py", b"\0"),
            ("._helper.py", b"\0"),
            (".DS_Store", b"\0"),
        ]
    )
    assert read_archive(packed) == {"function.py": POLICY, "helper.py": b"y"}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize(
    "name",
    ["../evil.py", "code/../../evil.py", "/etc/evil.py", "C:/evil.py", "a//b.py"],
)
def test_paths_that_lead_out_of_the_archive_are_refused(pack, name):
    reason = refusal(pack([("code/function.py", POLICY), (name, b"x")]))
    assert repr(name) in reason


def test_backslashes_separate_paths_only_in_zip_files():
    members = [("code\\", b""), ("code\\function.py", POLICY), ("code\\a\\b.py", b"x")]
    assert read_archive(zip_of(members)) == {"function.py": POLICY, "a/b.py": b"x"}
    for name in ("code\\..\\..\\evil.py", "\\etc\\evil.py", "C:\\evil.py", "\\\\host\\evil.py"):
        assert "relative paths" in refusal(zip_of([("code/function.py", POLICY), (name, b"x")]))
    assert "relative paths" in refusal(tar([("function.py", POLICY), ("code\\evil.py", b"x")]))
    twice = zip_of([("code/function.py", POLICY), ("code\\function.py", b"x")])
    assert "two members 'code/function.py'" in refusal(twice)


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_all_files_of_an_archive_may_be_in_one_top_folder(pack):
    for root in ("policy-main/", "policy-main/code/", "code/code/"):
        packed = pack([(f"{root}function.py", POLICY), (f"{root}a/b.py", b"x")])
        assert read_archive(packed) == {"function.py": POLICY, "a/b.py": b"x"}, root
    beside = [("main/README.md", b"text"), ("main/code/function.py", POLICY)]
    assert read_archive(pack(beside)) == {"function.py": POLICY}
    assert "no code/function.py" in refusal(pack([("a/b/function.py", POLICY)]))
    two = [("main/code/function.py", POLICY), ("README.md", b"text")]
    assert "no code/function.py" in refusal(pack(two))
    lost = [("main/code/function.py", POLICY), ("main/requirements.txt", b"numpy")]
    assert "lies outside of code/" in refusal(pack(lost))


def test_a_folder_whose_path_leads_out_of_the_archive_is_refused():
    folder = special("../outside", tarfile.DIRTYPE)
    assert "outside" in refusal(tar([("code/function.py", POLICY), (folder, b"")]))
    assert "outside" in refusal(zip_of([("code/function.py", POLICY), ("../outside/", b"")]))


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE],
)
@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_links_and_devices_in_a_tar_are_refused(kind, mode):
    member = special("code/data.txt", kind, "/etc/passwd")
    reason = refusal(tar([("code/function.py", POLICY), (member, b"")], mode))
    assert "'code/data.txt' is a link, a device" in reason


def test_a_link_as_the_entry_file_is_refused():
    assert "code/function.py" in refusal(
        tar([(special("code/function.py", tarfile.SYMTYPE, "/etc/passwd"), b"")])
    )


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_links_and_devices_in_a_zip_are_refused(kind):
    info = zipfile.ZipInfo("code/data.txt")
    info.external_attr = (kind | 0o777) << 16
    assert "code/data.txt" in refusal(
        zip_of([("code/function.py", POLICY), (info, b"/etc/passwd")])
    )


def test_a_sparse_member_is_refused():
    # A GNU sparse header: 4 bytes stored, claiming to be a file of 2**33 bytes.
    info = tarfile.TarInfo("code/function.py")
    info.size, info.type = 512, tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410] = b"00000000000\0", b"00000001000\0"
    header[483:495] = b"%011o\0" % (2**33 - 1)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    plain = bytes(header) + b"x" * 512 + b"\0" * 1024
    assert "special file" in refusal(lzma.compress(plain))


def test_two_members_of_one_name_are_refused():
    assert "two members" in refusal(tar([("code/function.py", POLICY), ("code/function.py", b"2")]))
    with pytest.warns(UserWarning, match="Duplicate name"):
        packed = zip_of([("code/function.py", POLICY), ("code/function.py", b"2")])
    assert "two members" in refusal(packed)


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_decompression_bombs_are_refused(pack):
    bomb = pack([("code/function.py", POLICY), ("code/zeros", bytes(FILES_BYTES_MAX + 1))])
    reason = refusal(bomb)
    assert "as bombs do" in reason or f"more than {FILES_BYTES_MAX} bytes in total" in reason


@pytest.mark.parametrize("pack", [tar, PACKERS["tar.xz"], zip_of], ids=["gz", "xz", "zip"])
def test_small_decompression_bombs_are_refused_by_their_ratio(pack):
    bomb = pack([("code/function.py", POLICY), ("code/zeros", bytes(4 * 1024 * 1024))])
    assert len(bomb) < 20_000
    assert "more than 200 times its size" in refusal(bomb)


def test_a_gzip_bomb_is_given_up_long_before_it_is_unpacked():
    packed = 8192 * zlib.compress(bytes(1024 * 1024), 9, wbits=zlib.MAX_WBITS | 16)
    assert f"more than {FILES_BYTES_MAX} bytes in total" in refusal(packed)


def test_skipped_members_of_a_zip_count_for_the_size_limit():
    large = os.urandom(200_000) + bytes(12 * 1024 * 1024)  # Its compression ratio is no bomb's.
    litter = [(f"__MACOSX/{number}", large) for number in range(3)]
    packed = zip_of([("code/function.py", POLICY), *litter])
    assert f"more than {FILES_BYTES_MAX} bytes in total" in refusal(packed)


def test_a_zip_that_lies_about_sizes_is_refused():
    packed = bytearray(zip_of([("code/function.py", b"x" * 5000)]))
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = packed.index(signature) + offset
        packed[at : at + 4] = (10).to_bytes(4, "little")
    assert " is damaged: " in refusal(bytes(packed))


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_too_many_files_are_refused(pack):
    members = [(f"code/m{number}.py", b"") for number in range(FILES_MAX + 1)]
    assert f"more than {FILES_MAX} files" in refusal(pack(members))
    assert f"more than {FILES_MAX} files" in refusal(pack(members * 2 if pack is tar else members))


def test_the_refusal_of_an_archive_without_entry_file_lists_its_files():
    reason = refusal(tar([("a/src/function.py", POLICY)]))
    assert "no code/function.py among the files (src/function.py)" in reason


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_damaged_archives_are_refused(pack):
    whole = pack([("code/function.py", POLICY * 200)])
    for cut in (12, len(whole) // 2, len(whole) - 8):
        assert " is damaged: " in refusal(whole[:cut])


def test_an_encrypted_or_rarely_packed_zip_is_refused():
    assert "rare way" in refusal(zip_of([("code/function.py", POLICY)], zipfile.ZIP_BZIP2))
    packed = bytearray(zip_of([("code/function.py", POLICY)]))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        packed[packed.index(signature) + offset] |= 1
    assert "encrypted" in refusal(bytes(packed))


def test_several_gzip_members_and_padding_are_one_archive():
    plain = lzma.decompress(tar([("code/function.py", POLICY)], "w:xz"))
    halves = [zlib.compress(part, wbits=zlib.MAX_WBITS | 16) for part in (plain[:700], plain[700:])]
    assert read_archive(b"".join(halves) + bytes(512)) == {"function.py": POLICY}

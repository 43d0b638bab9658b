"""The installed units run under a real systemd, in a container over this machine's files."""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from served import until

pytestmark = pytest.mark.heavy
ROOT: Final = Path(__file__).resolve().parents[2]
SYSTEMD: Final = "/lib/systemd/systemd"
PYTHON: Final = Path("/opt/python/bin", Path(sys.executable).resolve().name)
INSTALL: Final = f"""
set -e
echo /opt/python/lib >/etc/ld.so.conf.d/python.conf && ldconfig
useradd --system --home-dir /var/lib/moorage --shell /usr/sbin/nologin moorage
{PYTHON} -m venv --without-pip /opt/moorage
printf '%s\\n' /opt/packages /opt/source/clients /opt/source/policies /opt/source/server \\
    >"$(echo /opt/moorage/lib/python*/site-packages)/all.pth"
script() {{
    printf '#!/opt/moorage/bin/python\\nfrom %s import main\\nmain()\\n' $2 >/opt/moorage/bin/$1
    chmod 755 /opt/moorage/bin/$1
}}
script moored moorage.__main__
script moorage moorage_client.cli
cd /opt/source/deploy/systemd
mkdir -p /etc/moorage
cp moored.service moored-agent.service /etc/systemd/system/
install -m 755 moored /usr/local/bin/ && ln -sf moored /usr/local/bin/moorage
systemctl daemon-reload
"""
"""As install.md says, but without a download: the packages are those of the tests."""


Shell = Callable[[str], str]
BOOT_SECONDS_MAX: Final = 180.0
"""Seconds that a step may take: on a busy machine, each command takes some."""


until_done = functools.partial(until, seconds=BOOT_SECONDS_MAX)


@pytest.fixture
def shell() -> Iterator[Shell]:
    """Runs a command as root on a machine of its own that systemd has booted."""
    for tool in ("podman", "runc", SYSTEMD):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not here")
    if os.getuid() != 0:
        pytest.skip("only root can mount the container's files")
    folder = Path(tempfile.mkdtemp(prefix="unit-", dir="/tmp"))  # Podman needs a short path.
    own = ["--root", folder / "images", "--runroot", folder / "run", "--cgroup-manager", "cgroupfs"]
    podman = ["podman", *own, "--runtime", "runc", "--events-backend", "file"]
    layer = folder / "layer"  # Of another file system than the lower layer, as overlays need it.
    layer.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "units", layer], check=True)
    try:
        for name in ("upper", "work", "files"):
            (layer / name).mkdir()
        # Podman would copy what others write to /tmp, and systemd would start other services.
        for name in ("tmp", "run", "etc/systemd/system"):
            (layer / "upper" / name).mkdir(parents=True)
            os.setxattr(layer / "upper" / name, "trusted.overlay.opaque", b"y")
        layers = f"lowerdir=/,upperdir={layer}/upper,workdir={layer}/work"
        mounting = ["mount", "-t", "overlay", "-o", layers, "units", layer / "files"]
        if subprocess.run(mounting, check=False).returncode:
            pytest.skip("this machine's files cannot be the lower layer of an overlay")
        seen = {
            "/opt/python": sys.base_prefix,
            "/opt/packages": sysconfig.get_path("purelib"),
            "/opt/source": ROOT,
        }
        booting = [
            *("run", "--detach", "--name=machine", "--network=none", "--systemd=always"),
            *("--cap-add=all", "--security-opt=seccomp=unconfined", "--cgroupns=private"),
            *("--ulimit=nofile=1024:1024", "--ulimit=nproc=500:500"),
            *(f"--volume={whence}:{place}:ro" for place, whence in seen.items()),
            *("--rootfs", layer / "files", SYSTEMD, "--unit=basic.target"),
        ]
        booted = subprocess.run([*podman, *booting], capture_output=True, text=True, check=False)
        if booted.returncode:
            pytest.skip(f"Podman cannot boot systemd here: {booted.stderr}")

        def run(words: str) -> str:
            inside = [*podman, "exec", "machine", "bash", "-c", f"({words}) 2>&1"]
            done = subprocess.run(
                inside, capture_output=True, text=True, timeout=BOOT_SECONDS_MAX, check=False
            )
            return done.stdout

        until_done(
            lambda: "basic.target" in run("systemctl list-units --state=active basic.target")
        )
        yield run
    finally:
        subprocess.run([*podman, "rm", "--force", "--time=1", "machine"], check=False)
        unmounted = subprocess.run(["umount", "--recursive", layer], check=False)
        if not unmounted.returncode:  # Else this would remove files through the mount.
            shutil.rmtree(folder, ignore_errors=True)


def test_the_installed_units_start_retry_and_stop_under_systemd(shell: Shell) -> None:
    assert shell(INSTALL) == ""
    assert "Created symlink" in shell("systemctl enable --now moored")
    until_done(lambda: '"ok"' in shell("moored health"))
    shown = shell("moored token create first --role admin --tenant ops")
    assert "moor_" in shown
    assert "entries 1 to 2 are unchanged" in shell("moored audit verify")
    assert "MOORAGE_TOKEN" in shell("moorage leases"), "from now on, callers need a token"

    pid = shell("systemctl show --property=MainPID --value moored")
    assert shell("systemctl reload moored") == ""
    assert shell("systemctl show --property=MainPID --value moored") == pid
    shell(f"kill -9 {pid}")
    until_done(lambda: shell("systemctl show --property=NRestarts --value moored") == "1\n")
    until_done(lambda: '"ok"' in shell("moored health"))

    joining = 'MOORAGE_TOKEN="$(moored agent token --cluster boxes 2>/dev/null)"'
    address = "MOORAGE_URL=ws://127.0.0.1:8765"
    shell(
        f'{joining}; printf "%s\\n" {address} MOORAGE_TOKEN=$MOORAGE_TOKEN >/etc/moorage/agent.env'
    )
    shell("systemctl enable --now moored-agent")
    until_done(lambda: "connected since" in shell("moored agent list"))

    shell("echo MOORAGE_NO_SUCH=1 >/etc/moorage/moored.env; systemctl restart moored")
    until_done(lambda: shell("systemctl is-active moored") == "failed\n")
    assert "MOORAGE_NO_SUCH: there is no such setting" in shell("systemctl status moored")
    assert shell("rm /etc/moorage/moored.env; systemctl restart moored") == ""
    until_done(lambda: '"ok"' in shell("moored health"))
    assert shell("systemctl stop moored moored-agent") == ""
    for unit in ("moored", "moored-agent"):
        assert shell(f"systemctl show --property=Result --value {unit}") == "success\n"

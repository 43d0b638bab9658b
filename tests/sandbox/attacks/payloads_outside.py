"""Attacks on targets outside a cell: files, processes, the kernel, the network (1 to 48)."""

# ruff: noqa: E501  # Payloads are programs in a table; breaking their lines would change them.

from payloads import ANY, DEAD, Payload, deadly

# A table: an entry ends where the program in it ends.
# fmt: off
PAYLOADS = (
    # Filesystem
    Payload(1, "read", """
secret = data["inputs"]["sentinel"]
attempt(note, "open", lambda: open(secret).read())
attempt(note, "os.open", lambda: os.open(secret, os.O_RDONLY))
attempt(note, "open_code", lambda: io.open_code(secret).read())
attempt(note, "passwd", lambda: open("/etc/passwd").read())
attempt(note, "stat", lambda: os.stat(secret))
attempt(note, "readlink", lambda: os.readlink("/proc/self/exe"))
attempt(note, "getcwd", lambda: os.getcwd())
"""),
    Payload(1, "read_natively", """
path = data["inputs"]["sentinel"].encode() + b"\\0"
attempt(note, "openat", lambda: raw(257, -100, path, 0, 0))
attempt(note, "openat2", lambda: raw(437, -100, path, 0, 24))
attempt(note, "open", lambda: raw(2, path, 0, 0))
"""),
    Payload(2, "write", """
secret = data["inputs"]["sentinel"]
attempt(note, "open", lambda: open(secret, "w").write("breach"))
attempt(note, "create", lambda: open(secret + ".new", "x"))
attempt(note, "mkdir", lambda: os.mkdir(secret + ".dir"))
attempt(note, "mkfifo", lambda: os.mkfifo(secret + ".fifo"))
attempt(note, "mknod", lambda: os.mknod(secret + ".node"))
"""),
    Payload(3, "list", """
attempt(note, "listdir", lambda: os.listdir("/"))
attempt(note, "scandir", lambda: list(os.scandir("/proc")))
attempt(note, "walk", lambda: next(os.walk("/")))
"""),
    Payload(4, "links", """
secret = data["inputs"]["sentinel"]
attempt(note, "symlink", lambda: os.symlink(secret, secret + ".sym"))
attempt(note, "link", lambda: os.link(secret, secret + ".hard"))
"""),
    Payload(5, "change", """
secret = data["inputs"]["sentinel"]
attempt(note, "rename", lambda: os.rename(secret, secret + ".moved"))
attempt(note, "chmod", lambda: os.chmod(secret, 0o777))
attempt(note, "chown", lambda: os.chown(secret, 0, 0))
attempt(note, "unlink", lambda: os.unlink(secret))
attempt(note, "truncate", lambda: os.truncate(secret, 0))
attempt(note, "utime", lambda: os.utime(secret))
attempt(note, "chdir", lambda: os.chdir("/"))
"""),
    Payload(6, "dev_shm", 'attempt(note, "shm", lambda: open("/dev/shm/breach", "w"))'),
    Payload(7, "proc_environ", """
attempt(note, "self", lambda: open("/proc/self/environ", "rb").read())
attempt(note, "parent", lambda: open(f"/proc/{os.getppid()}/environ", "rb").read())
"""),
    Payload(8, "proc_mem", """
for pid in (os.getppid(), os.getpid(), data["inputs"]["host"]):
    attempt(note, "mem", lambda: open(f"/proc/{pid}/mem", "rb").read(1))
    attempt(note, "maps", lambda: open(f"/proc/{pid}/maps").read())
"""),
    deadly(9, "open_by_handle_at"),
    deadly(9, "name_to_handle_at"),
    Payload(10, "disk_fill", """
for fd in range(4, 64):
    attempt(note, f"write {fd}", lambda: os.write(fd, b"x" * 4096))
attempt(note, "fallocate", lambda: os.posix_fallocate(0, 0, 1 << 30))
attempt(note, "ftruncate", lambda: os.ftruncate(1, 1 << 30))
"""),
    # Process
    Payload(12, "kill_parent", """
for pid in (os.getppid(), data["inputs"]["host"], 1):
    for number in (0, 9, 15, 19):
        attempt(note, f"kill {pid} {number}", lambda: os.kill(pid, number))
"""),
    Payload(13, "kill_all", """
attempt(note, "kill -1", lambda: os.kill(-1, 9))
attempt(note, "killpg", lambda: os.killpg(0, 9))
"""),
    Payload(14, "thread_signals", """
attempt(note, "tgkill", lambda: raw(234, os.getppid(), os.getppid(), 9))
attempt(note, "tkill", lambda: raw(200, os.getppid(), 9))
"""),
    deadly(14, "rt_sigqueueinfo", 'os.getppid(), 9, b"\\0" * 128'),
    deadly(14, "pidfd_send_signal"),
    deadly(15, "ptrace", "16, os.getppid(), 0, 0"),
    deadly(16, "process_vm_readv", "os.getppid(), 0, 0, 0, 0, 0"),
    deadly(16, "process_vm_writev", "os.getppid(), 0, 0, 0, 0, 0"),
    deadly(17, "pidfd_getfd"),
    deadly(17, "pidfd_open", "os.getppid(), 0"),
    Payload(18, "fork", """
def fork(make):
    child = make()
    if child == 0:
        os._exit(0)
    return child
attempt(note, "fork", lambda: fork(os.fork))
attempt(note, "forkpty", lambda: fork(lambda: os.forkpty()[0]))
"""),
    Payload(19, "fork_bomb", """
for _ in range(2000):
    try:
        os.fork()
    except OSError:
        continue
    note("forked")
"""),
    Payload(20, "thread_bomb", """
for _ in range(200):
    attempt(note, "thread", lambda: threading.Thread(target=time.sleep, args=(9,)).start())
"""),
    Payload(21, "exec", 'os.execv("/bin/true", ["true"]); note("exec")', DEAD),
    Payload(21, "spawn", """
attempt(note, "posix_spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt(note, "popen", lambda: os.popen("id").read())
attempt(note, "system", lambda: os.system("id") and 1 / 0)
""", ANY),
    deadly(22, "execveat"),
    deadly(23, "memfd_create", 'b"x\\0", 0'),
    deadly(23, "memfd_secret"),
    Payload(24, "clone", """
attempt(note, "clone3", lambda: raw(435, b"\\0" * 64, 64))
attempt(note, "vfork", lambda: raw(58))
attempt(note, "clone", lambda: raw(56, 17, 0, 0, 0, 0))
"""),
    # Kernel
    deadly(26, "io_uring_setup", '8, b"\\0" * 120'),
    deadly(26, "io_uring_enter"),
    deadly(26, "io_uring_register"),
    deadly(26, "io_setup"),
    deadly(27, "bpf"),
    deadly(28, "userfaultfd"),
    deadly(29, "perf_event_open"),
    deadly(30, "keyctl"),
    deadly(30, "add_key"),
    deadly(30, "request_key"),
    deadly(31, "unshare", "0x10000000"),
    deadly(31, "setns"),
    deadly(32, "mount"),
    deadly(32, "umount2"),
    deadly(32, "chroot", 'b"/\\0"'),
    deadly(32, "pivot_root"),
    deadly(32, "open_tree"),
    Payload(33, "x32_abi", 'raw(0x40000000 + 39); note("x32")', DEAD),
    Payload(34, "executable_memory", """
import mmap
for flags in (0x22, 0x21):
    for protection in (7, 5, 4):
        attempt(note, f"mmap {protection}", lambda: raw(MACHINE.mapping, 0, 4096, protection, flags, -1, 0))
page = raw(MACHINE.mapping, 0, 4096, 3, 0x22, -1, 0)
for protection in (7, 5, 4, 0x01000005):
    attempt(note, "mprotect", lambda: raw(MACHINE.protecting, page, 4096, protection))
""", ANY),
    deadly(34, "pkey_mprotect"),
    deadly(34, "remap_file_pages"),
    deadly(35, "personality", "0xffffffff"),
    deadly(35, "arch_prctl"),
    deadly(35, "modify_ldt"),
    Payload(36, "terminal", """
attempt(note, "ioctl", lambda: raw(16, 0, 0x5412, b"x"))
attempt(note, "ttyname", lambda: os.ttyname(0))
"""),
    deadly(37, "splice"),
    deadly(37, "vmsplice"),
    deadly(37, "tee"),
    deadly(38, "shmget"),
    deadly(38, "semget"),
    deadly(38, "msgget"),
    deadly(38, "mq_open"),
    deadly(39, "seccomp", "1, 0, 0"),
    Payload(39, "filter_by_prctl", """
attempt(note, "prctl seccomp", lambda: raw(157, 22, 2, 0, 0, 0))
attempt(note, "prctl mode", lambda: raw(157, 21, 0, 0, 0, 0))
"""),
    Payload(40, "raise_limits", """
attempt(note, "prlimit", lambda: raw(302, 0, 9, b"\\xff" * 16, 0))
attempt(note, "prlimit parent", lambda: raw(302, os.getppid(), 9, b"\\xff" * 16, 0))
attempt(note, "setrlimit", lambda: raw(160, 9, b"\\xff" * 16))
"""),
    Payload(41, "scheduling", """
attempt(note, "affinity", lambda: os.sched_setaffinity(0, {0}))
attempt(note, "nice", lambda: os.nice(-5))
attempt(note, "scheduler", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt(note, "priority", lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19))
"""),
    Payload(42, "dumpable", """
attempt(note, "dumpable", lambda: raw(157, 4, 1, 0, 0, 0))
attempt(note, "ptracer", lambda: raw(157, 0x59616D61, -1, 0, 0, 0))
attempt(note, "setuid", lambda: os.setuid(0))
attempt(note, "setresuid", lambda: os.setresuid(0, 0, 0))
attempt(note, "capset", lambda: raw(126, b"\\0" * 8, b"\\xff" * 24))
"""),
    # Network
    Payload(43, "inet", """
for family in (2, 10, 17, 40):
    for kind in (1, 2, 3):
        attempt(note, f"socket {family} {kind}", lambda: raw(41, family, kind, 0))
"""),
    Payload(44, "unix", """
attempt(note, "socket", lambda: raw(41, 1, 1, 0))
attempt(note, "pair", lambda: raw(53, 1, 1, 0, b"\\0" * 8))
attempt(note, "connect", lambda: raw(42, 3, b"\\1\\0\\0abstract", 11))
attempt(note, "bind", lambda: raw(49, 3, b"\\1\\0\\0abstract", 11))
attempt(note, "accept", lambda: raw(43, 3, 0, 0))
"""),
    Payload(45, "netlink", 'attempt(note, "netlink", lambda: raw(41, 16, 3, 0))'),
    Payload(46, "dns", """
def lookup():
    import socket
    return socket.getaddrinfo("example.com", 80)
def lookup_anyway():
    import _socket
    return _socket.getaddrinfo("example.com", 80)
attempt(note, "getaddrinfo", lookup)
attempt(note, "_getaddrinfo", lookup_anyway)
"""),
    Payload(47, "descriptor_passing", """
attempt(note, "sendmsg", lambda: raw(46, 3, b"\\0" * 56, 0))
attempt(note, "recvmsg", lambda: raw(47, 3, b"\\0" * 56, 0))
attempt(note, "sendto", lambda: raw(44, 3, b"x", 1, 0, 0, 0))
"""),
    Payload(48, "forged_ids", """
client = rule.settings["cluster_client"]
metrics = rule.settings["cluster_metrics_client"]
for name in ("../../admin", "a/b", "a?b=c", "a#b", "http://x", "..", "", "a\\r\\nX: y", "x" * 999,
             "%2e%2e", None, 5, ["c0"], {"a": 1}):
    good, text = client.read_cluster(name)
    if good:
        note(f"read_cluster {name!r}")
    attempt(note, f"get_cluster {name!r}", lambda: metrics.get_cluster(name))
for query in ("x", 5, [1], None):
    if client.execute_query(query)[0]:
        note(f"execute_query {query!r}")
"""),
)
# fmt: on

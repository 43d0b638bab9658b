"""Attacks on resources, the protocol and the interpreter (49 to 89)."""

# ruff: noqa: E501  # Payloads are programs in a table; breaking their lines would change them.

from payloads import ANY, DEAD, FLOOD, OUTPUT, RAISED, STOPPED, VALUE, Payload, bad_answer

# A table: an entry ends where the program in it ends.
# fmt: off
PAYLOADS = (
    # Resources
    Payload(49, "infinite_loop", "while True: pass", STOPPED),
    Payload(50, "swallowing_loop", """
while True:
    try:
        while True: pass
    except BaseException:
        continue
""", STOPPED),
    Payload(51, "loop_in_c", "7 ** 10 ** 9; return {}", STOPPED),
    Payload(51, "sum_in_c", "sum(range(1 << 50)); return {}", STOPPED),
    Payload(52, "redos", 're.match("(a+)+$", "a" * 64 + "b"); return {}', STOPPED),
    Payload(53, "string_bomb", 'return "x" * (1 << 40)', frozenset({"policy_memory", "policy_timeout"})),
    Payload(53, "list_bomb", """
held = []
while True:
    held.append([0] * 100_000)
""", frozenset({"policy_memory", "policy_timeout"})),
    Payload(53, "swallowed_memory_bomb", """
held = []
while True:
    try:
        held.append(bytearray(1 << 22))
    except MemoryError:
        pass
""", STOPPED),
    Payload(54, "map_bomb", """
total = 0
call = dug_out()  # Once: digging takes longer than a mapping does.
try:
    while total < 1 << 20:
        call(MACHINE.mapping, 0, 1 << 20, 3, 0x22, -1, 0)
        total += 1
except OSError:
    pass
if total > 300:
    note(f"mapped {total} MiB")
"""),
    Payload(55, "int_to_text", "sys.set_int_max_str_digits(0); str(1 << (1 << 26)); return {}", FLOOD),
    Payload(56, "recursion", "def f(): return f()\nf()", frozenset({"policy_error"})),
    Payload(56, "deep_recursion", """
sys.setrecursionlimit(1 << 30)
def f(n): return [f(n + 1)]
f(0)
""", FLOOD),
    Payload(56, "stack_in_c", """
sys.setrecursionlimit(1 << 30)
x = []
for _ in range(10_000_000): x = [x]
repr(x)
""", FLOOD),
    Payload(57, "sleep", "time.sleep(60)", STOPPED),
    Payload(57, "deadlock", "l = threading.Lock(); l.acquire(); l.acquire()", STOPPED),
    Payload(58, "stdout_flood", """
for _ in range(3000):
    print("x" * 10_000)
import logging
for _ in range(1000):
    logging.error("y" * 1000)
""", VALUE | STOPPED),
    Payload(58, "descriptor_flood", """
for _ in range(3000):
    os.write(1, b"x" * 10_000)
""", RAISED),
    Payload(59, "compile_bomb", 'compile("(" * 100 + "1," * 3_000_000 + ")" * 100, "x", "exec"); return {}', ANY),
    Payload(59, "nested_compile_bomb", 'eval("-" * 1_000_000 + "1"); return {}', ANY),
    Payload(60, "deep_json", 'json.loads("[" * 1_000_000)', ANY - {"value"}),
    # Protocol
    bad_answer(63, "huge_reply", '"x" * (100 << 20)', OUTPUT),
    bad_answer(63, "huge_list", "[0] * 5_000_000", OUTPUT),
    Payload(63, "huge_frame", "os.write(3, frames.HEADER.pack(3 << 20) + b'x' * 100); time.sleep(9)", DEAD),
    Payload(64, "huge_length", 'os.write(3, b"\\xff\\xff\\xff\\xff"); time.sleep(9)', DEAD),
    Payload(64, "zero_length", 'os.write(3, b"\\0\\0\\0\\0"); time.sleep(9)', DEAD),
    Payload(65, "slow_loris", """
os.write(3, frames.HEADER.pack(1000))
while True:
    os.write(3, b"x"); time.sleep(0.05)
""", STOPPED),
    Payload(66, "garbage", "os.write(3, os.urandom(4096)); time.sleep(9)", DEAD | STOPPED),
    Payload(66, "framed_garbage", """
body = os.urandom(512)
os.write(3, frames.HEADER.pack(len(body)) + body); time.sleep(9)
""", DEAD),
    Payload(66, "bad_utf8", """
body = b"\\x94\\x14\\x01\\xc4\\x02\\xff\\xff\\xa1\\xff"
os.write(3, frames.HEADER.pack(len(body)) + body); time.sleep(9)
""", DEAD),
    Payload(67, "deep_msgpack", """
body = b"\\x91" * 1_900_000 + b"\\x01"
os.write(3, frames.HEADER.pack(len(body)) + body); time.sleep(9)
""", DEAD),
    bad_answer(68, "nan", 'float("nan")', OUTPUT),
    bad_answer(68, "infinity", '[{"gpus": [float("inf")]}]', OUTPUT),
    bad_answer(68, "big_int", "1 << 64", OUTPUT),
    bad_answer(68, "surrogates", '"\\ud800"', OUTPUT),
    bad_answer(69, "generator", "(x for x in range(3))", OUTPUT),
    bad_answer(69, "object", "object()", OUTPUT),
    bad_answer(69, "cyclic", "(lambda x: (x.append(x), x)[1])([])", OUTPUT),
    bad_answer(69, "bytes", 'b"x"', OUTPUT),
    bad_answer(69, "odd_keys", '{(1, 2): "x"}', OUTPUT),
    Payload(69, "lying_dict", """
class Lie(dict):
    def items(self):
        while True:
            yield "x", 1
return Lie(a=1)
""", FLOOD),
    Payload(70, "pickle", """
import pickle
class Bomb:
    def __reduce__(self):
        return os.system, ("touch " + data["inputs"]["sentinel"] + ".pickled",)
body = pickle.dumps(Bomb())
os.write(3, frames.HEADER.pack(len(body)) + body); time.sleep(9)
""", DEAD),
    Payload(71, "forged_extra_reply", """
frame = sys._getframe(2).f_locals["frame"]
os.write(3, frames.pack(frames.Result(frame.nonce, b'{"mine": 1}', None, "")))
for nonce in (0, 1, frame.nonce, frame.nonce + 1):
    os.write(3, frames.pack(frames.Result(nonce, b'{"breach": ["forged"]}', None, "")))
""", VALUE | DEAD),
    Payload(71, "forged_jailed", 'os.write(3, frames.pack(frames.CellJailed({}, "", ""))); time.sleep(9)', DEAD),
    Payload(71, "forged_loaded", 'os.write(3, frames.pack(frames.PolicyLoaded((), False, ""))); time.sleep(9)', DEAD),
    Payload(71, "host_frame_back", """
os.write(3, frames.pack(frames.RunManagement(1, "x", None))); time.sleep(9)
""", DEAD),
    Payload(72, "forged_call", """
nonce = sys._getframe(2).f_locals["frame"].nonce
os.write(3, frames.pack(frames.Call(nonce, "cluster_client", "delete_cluster", b"\\x91\\xa2c0")))
time.sleep(9)
""", DEAD),
    Payload(72, "dunder_call", """
nonce = sys._getframe(2).f_locals["frame"].nonce
os.write(3, frames.pack(frames.Call(nonce, "__class__", "__init__", b"\\x90")))
time.sleep(9)
""", DEAD),
    Payload(73, "call_flood", """
good = sum(rule.settings["cluster_client"].read_cluster("c0")[0] for _ in range(9000))
if good > 1000:
    note(f"{good} calls were answered")
""", VALUE | STOPPED),
    Payload(73, "call_flood_unread", """
nonce = sys._getframe(2).f_locals["frame"].nonce
call = frames.pack(frames.Call(nonce, "cluster_client", "read_cluster", b"\\x91\\xa2c0"))
while True:
    os.write(3, call)
""", DEAD | STOPPED),
    Payload(74, "closed_channel", 'attempt(lambda _: None, "close", lambda: os.close(3))', ANY),
    Payload(75, "unprintable_exception", """
class Bomb(Exception):
    def __str__(self): raise SystemExit
    __repr__ = __str__
raise Bomb
""", frozenset({"policy_error"})),
    Payload(75, "huge_exception", 'raise ValueError("x" * 50_000_000)', frozenset({"policy_error", "policy_timeout"})),
    Payload(75, "endless_exception", """
class Bomb(Exception):
    def __str__(self):
        while True: pass
raise Bomb
""", STOPPED),
    Payload(75, "system_exit", "raise SystemExit(0)", frozenset({"policy_error"})),
    Payload(75, "keyboard_interrupt", "raise KeyboardInterrupt", frozenset({"policy_error"})),
    Payload(75, "metaclass_name", """
class Meta(type):
    @property
    def __name__(cls): raise ValueError
raise Meta("Bomb", (BaseException,), {})
""", frozenset({"policy_error"})),
    # Introspection
    Payload(76, "frames", """
frame = sys._getframe()
while frame:
    if "BREACH-SECRET" in repr(frame.f_globals.get("secret", "")) + repr(list(frame.f_locals))[:9999]:
        note("secret in a frame")
    frame = frame.f_back
"""),
    Payload(77, "gc_search", """
needle = "BREACH" + "-SECRET-VALUE"
for thing in gc.get_objects():
    if isinstance(thing, dict):
        for value in list(thing.values()):
            if isinstance(value, str) and value.startswith(needle):
                note("secret on the heap")
"""),
    Payload(78, "environment", """
if any("SECRET" in key or "MOORAGE" in key for key in os.environ):
    note("secret in the environment")
if len(os.environ) > 3:
    note(f"{list(os.environ)}")
"""),
    Payload(79, "descriptors", """
for fd in range(4, 1024):
    attempt(note, f"read {fd}", lambda: os.read(fd, 1))
attempt(note, "dup", lambda: os.dup(3))
attempt(note, "fcntl", lambda: raw(72, 3, 0, 0))
attempt(note, "poll", lambda: raw(7, b"\\0" * 8, 1, 0))
"""),
    Payload(80, "modules_tampered", """
frames.pack = lambda frame: b"\\x05\\0\\0\\0hello"
sys.modules["msgspec"] = None
""", DEAD),
    Payload(81, "builtins_patched", """
import builtins
for name in ("isinstance", "len", "tuple", "getattr", "type"):
    setattr(builtins, name, lambda *a, **k: None)
""", ANY),
    Payload(82, "hooks", """
sys.settrace(lambda *a: (_ for _ in ()).throw(SystemExit))
sys.meta_path.insert(0, object())
sys.setprofile(lambda *a: None)
""", ANY),
    Payload(83, "crafted_code", """
code = (lambda: None).__code__
eval(code.replace(co_code=b"\\x64\\xff" * 2000 + bytes(range(256)) * 4, co_stacksize=1))
""", ANY),
    Payload(84, "marshal", """
marshal = sys.modules["marshal"]
for _ in range(200):
    try:
        marshal.loads(os.urandom(200))
    except BaseException:
        pass
""", ANY),
    Payload(85, "wild_pointer", 'raw(NUMBERS["getrandom"], 1, 1 << 20, 0); note("wrote to address 1")', ANY - {"value"}),
    Payload(86, "exit", "os._exit(0)", DEAD),
    Payload(86, "abort", "os.abort()", DEAD),
    Payload(86, "segfault", """
import faulthandler
faulthandler._read_null()
""", DEAD),
    Payload(89, "fine_clocks", "time.perf_counter_ns(); time.monotonic_ns()"),
    Payload(89, "clocks_of_others", """
for pid in (1, os.getppid(), data["inputs"].get("host", 1)):
    attempt(note, f"clock of {pid}", lambda: time.clock_gettime((~pid << 3) | 2))
    attempt(note, f"resolution for {pid}", lambda: time.clock_getres((~pid << 3) | 2))
    attempt(note, f"affinity of {pid}", lambda: os.sched_getaffinity(pid))
time.process_time(), time.thread_time(), time.time(), os.sched_getaffinity(0)
"""),
    Payload(71, "huge_forged_failure", """
worker = sys._getframe(2)
nonce = worker.f_locals["frame"].nonce
data = frames.pack(frames.Failed(nonce, "error", "E" * 600_000, "m" * 600_000, "f" * 600_000, 1, ""))
while data: data = data[os.write(3, data):]
""", frozenset({"policy_error"})),
    bad_answer(69, "huge_key", '{"k" * 1_000_000: float("nan")}', OUTPUT),
    bad_answer(69, "huge_class", 'type("A" * 3_000_000, (), {})()', OUTPUT),
)
# fmt: on

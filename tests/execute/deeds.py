"""Sources that do something to their process, on one case alone or on all."""

from __future__ import annotations

from harness.subjects.source import Source, resolve

BAD = 5
"""The length of the cases on which it is done."""

PLACES = {
    "forward": ("        nominal_dtype = q.dtype\n", "max_seqlen_q"),
    "backward": ("        # Kernels read d_out by the layout's name, not by its strides.\n", "ctx.max_seqlen_q"),
}
"""The line before which it is done, and the name that the length has there."""

CRASHES = {
    "segfault": ("__import__('ctypes').string_at(0)", "SIGSEGV"),
    "abort": ("os.abort()", "SIGABRT"),
    "exit 0": ("os._exit(0)", "exit status 0"),
    "exit 3": ("os._exit(3)", "exit status 3"),
    "killed": ("os.kill(os.getpid(), 9)", "SIGKILL"),
    "cut off": ("os.closerange(0, 256)", "exit status"),
    "endless": ("[0 for _ in iter(int, 1)]", "did not end within 1 s"),
    "deaf and endless": ("[0 for _ in iter(lambda: __import__('signal').signal(6, 1) and 0, 1)]", "did not end"),
}
"""What ends or holds up a process, and a word for it in the reason."""


def doing(deed: str, stage: str = "backward", *, always: bool = False) -> Source:
    """Return the legacy source with a statement planted in a stage."""
    legacy = resolve("legacy")
    line, length = PLACES[stage]
    assert legacy.text.count(line) == 1
    condition = "True" if always else f"{length} == {BAD}"
    planted = f"        if {condition}:\n            {deed}\n{line}"
    return Source("planted", "planted.py", legacy.text.replace(line, planted))

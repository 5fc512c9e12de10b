"""Resolve a spec to a source text: ``legacy``, ``te==2.19.0``, a path, ``package.module:Name``."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.case import nearest
from harness.subjects.wheels import WheelError, wheel_source

BACKENDS = "transformer_engine/pytorch/attention/dot_product_attention/backends.py"
DEFAULT_NAME = "FusedAttnFunc"
SPECS = "legacy, refactored, te, te==VERSION, a path to a file or a package folder, or package.module:Name"


class SpecError(ValueError):
    """A spec that leads to no source; the message says what was looked for and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one subject and where it came from.

    ``resolved`` is a file name, or ``WHEEL!member`` for a file in a wheel; ``name`` the autograd function's name.
    """

    spec: str
    resolved: str
    text: str
    name: str = DEFAULT_NAME

    @property
    def sha256(self) -> str:
        """Hash of the source text, 64 hex digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def describe(self) -> dict[str, str]:
        """Return what the journal and the reports say of the subject."""
        return {"spec": self.spec, "resolved": self.resolved, "sha256": self.sha256}


def resolve(spec: str) -> Source:
    """Return the source that a spec names; raises SpecError where there is none."""
    named = NAMED.get(spec)
    if named is not None:
        return named(spec)
    if match := re.fullmatch(r"te==(.+)", spec):
        try:
            resolved, text = wheel_source(match[1], BACKENDS)
        except WheelError as error:
            raise SpecError(str(error)) from error
        return Source(spec, resolved, text)
    if spec.endswith(".py") or "/" in spec or _exists(spec):
        return _file(spec, Path(spec))
    if match := re.fullmatch(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", spec):
        return _module(spec, match[1], match[2])
    raise SpecError(f"spec={spec!r} names no subject{nearest(spec, NAMED)}. Use {SPECS}")


def _exists(spec: str) -> bool:
    try:
        return Path(spec).exists()
    except OSError:  # longer than a file name can be
        return False


def _file(spec: str, path: Path, name: str = DEFAULT_NAME) -> Source:
    if _exists(str(path)) and path.is_dir():
        candidates = [path / BACKENDS, path / "pytorch/attention/dot_product_attention/backends.py",
                      path / "backends.py"]  # fmt: skip
        found = next((candidate for candidate in candidates if candidate.is_file()), None)
        if found is None:
            raise SpecError(f"spec={spec!r} is a folder with no backends.py; looked for {candidates[0]} and "
                            f"{candidates[-1]}. Name the file itself")  # fmt: skip
        path = found
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"spec={spec!r} is no Python source: not UTF-8 at byte {error.start}") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecError(f"spec={spec!r} cannot be read: {reason}. Use {SPECS}") from error
    return Source(spec, str(path.resolve()), text, name)


def _module(spec: str, module: str, name: str) -> Source:
    try:
        found = importlib.util.find_spec(module)
    except Exception as error:  # it imports the packages around the module, and they may raise anything
        raise SpecError(f"spec={spec!r}: module {module!r} cannot be found: {type(error).__name__}: {error}") from error
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise SpecError(f"spec={spec!r}: module {module!r} is not installed as Python source. Use {SPECS}")
    return _file(spec, Path(found.origin), name)


def _installed(spec: str) -> Source:
    try:
        found = importlib.util.find_spec("transformer_engine")
    except (ImportError, ValueError):
        found = None
    locations = list(found.submodule_search_locations or ()) if found is not None else []
    if not locations:
        raise SpecError("spec='te' needs TransformerEngine installed here, and it is not. Install it, or use "
                        "te==VERSION, which downloads a release's source")  # fmt: skip
    return _file(spec, Path(locations[0]).parent / BACKENDS)


def _own(package: str) -> Callable[[str], Source]:
    def own(spec: str) -> Source:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise SpecError(f"spec={spec!r}: the package {package} is not installed; install this project again")
        return _file(spec, Path(next(iter(found.submodule_search_locations))) / "backends.py")

    return own


NAMED: dict[str, Callable[[str], Source]] = {
    "legacy": _own("legacy_impl"),
    "refactored": _own("refactored_impl"),
    "te": _installed,
}

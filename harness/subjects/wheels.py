"""TransformerEngine's release wheels: downloaded once, checked by hash, read without unpacking.

The wheel ``transformer_engine`` is pure Python, about 1 MB; nothing of it is imported or executed here.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

KNOWN_SHA256 = {
    "2.16.0": "ac2bb54d5217c574410079d99204b5634eb3a1137b0324f4a6dd3358982aa4f5",
    "2.17.0": "c274fd74ea2e4caa7132921e1ecfa3847931abbed9f6b8cab61346cdb833bc76",
    "2.18.0": "9d7c4bd74247e57eeed2af46f7b91c133cc405404953f1f3f2e38be8c47cdb7e",
    "2.19.0": "965d78429d287f7db6978bf299cfcecf68c730247f05cc830ecc6983a123bbc7",
    "2.20.2": "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094",
}
"""Hashes of the releases that the tests load. Another release's hash is kept beside it on first download."""


class WheelError(RuntimeError):
    """A release that cannot be had; the message says why and what to do."""


def cache_folder() -> Path:
    """Return where wheels are kept: ``HARNESS_CACHE``, else ``XDG_CACHE_HOME/fused-attn-harness``."""
    explicit = os.environ.get("HARNESS_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fused-attn-harness"


def wheel_source(version: str, member: str) -> tuple[str, str]:
    """Return where ``member`` of a release was found and its text; downloads the wheel where it is not in the cache.

    Raises WheelError for a version that is no version or cannot be downloaded, a wheel whose hash is not the recorded
    one, and a wheel without the member.
    """
    if not re.fullmatch(r"\d+(\.\d+)*([a-z]+\d+)?(\.(post|dev)\d+)?", version):
        raise WheelError(f"version={version!r} is no release number; write it as te==2.19.0")
    wheel = cache_folder() / f"transformer_engine-{version}-py3-none-any.whl"
    if not wheel.is_file():
        _download(version, wheel)
    try:
        digest = _check(version, wheel)
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(member).decode()
        _record(version, wheel, digest)
    except KeyError as error:
        raise WheelError(f"version={version}: its wheel has no {member}; try a newer release") from error
    except (zipfile.BadZipFile, zlib.error, UnicodeDecodeError) as error:
        raise WheelError(f"{wheel} is damaged ({error}); delete it and run again") from error
    except OSError as error:
        raise WheelError(f"the cache {wheel.parent} cannot be used: {error}. Set HARNESS_CACHE") from error
    return f"{wheel.name}!{member}", text


def _download(version: str, wheel: Path) -> None:
    try:
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                 "--only-binary=:all:", "--dest", folder, f"transformer_engine=={version}"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            found = sorted(Path(folder).glob("transformer_engine-*.whl"))
            if done.returncode != 0 or len(found) != 1:
                lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-1:]
                raise WheelError(
                    f"te=={version} could not be downloaded: {' '.join(lines) or 'pip brought no wheel'}. Check the "
                    f"version and the network, or put its wheel into {wheel.parent} (HARNESS_CACHE)"
                )
            found[0].replace(wheel)  # atomic: a second process sees the whole file or none
    except OSError as error:
        raise WheelError(f"the cache {wheel.parent} cannot be written: {error.strerror}. Set HARNESS_CACHE") from error


def _check(version: str, wheel: Path) -> str:
    """Return the wheel's hash; raises WheelError where it is not the one that is known or recorded."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    expected = KNOWN_SHA256.get(version)
    what = f"delete {wheel.name} and run again"
    if expected is None and (record := _record_path(wheel)).is_file():
        expected = record.read_text().strip()
        what = f"delete {wheel.name} and, if the new one is refused too and you trust it, {record.name}"
    if expected is not None and digest != expected:
        raise WheelError(f"{wheel} has sha256 {digest}, and {expected} is recorded; {what}")
    return digest


def _record(version: str, wheel: Path, digest: str) -> None:
    """Keep the hash of a release that is not known, once its wheel has turned out to be whole."""
    record = _record_path(wheel)
    if version not in KNOWN_SHA256 and not record.is_file():
        record.write_text(digest + "\n")


def _record_path(wheel: Path) -> Path:
    return wheel.with_suffix(".sha256")

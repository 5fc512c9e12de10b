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
    _check(version, wheel)
    try:
        with zipfile.ZipFile(wheel) as archive:
            text = archive.read(member).decode()
    except KeyError as error:
        raise WheelError(f"version={version}: its wheel has no {member}; try a newer release") from error
    except (zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise WheelError(f"{wheel} is damaged ({error}); delete it and run again") from error
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


def _check(version: str, wheel: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    record = wheel.with_suffix(".sha256")
    expected = KNOWN_SHA256.get(version)
    if expected is None and record.is_file():
        expected = record.read_text().strip()
    if expected is None:
        record.write_text(digest + "\n")
    elif digest != expected:
        raise WheelError(f"{wheel} has sha256 {digest}, and {expected} is recorded; delete it and run again")

"""A release's wheel is downloaded once, is what it was, and every way of failing says what to do."""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.subjects import wheels
from harness.subjects.wheels import KNOWN_SHA256, WheelError, cache_folder, wheel_source

MEMBER = "transformer_engine/pytorch/attention/dot_product_attention/backends.py"
VERSION = "2.99.0"


def wheel_bytes(text: str | bytes = "x = 1\n", member: str = MEMBER) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, text)
    return buffer.getvalue()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HARNESS_CACHE", str(folder))
    monkeypatch.setattr(subprocess, "run", no_network)
    return folder


def no_network(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for transformer_engine\n")


def pip_that_brings(content: bytes, calls: list[list[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        version = command[-1].partition("==")[2]
        folder = Path(command[command.index("--dest") + 1])
        (folder / f"transformer_engine-{version}-py3-none-any.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def put(cache: Path, content: bytes, version: str = VERSION) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / f"transformer_engine-{version}-py3-none-any.whl"
    wheel.write_bytes(content)
    return wheel


def test_a_wheel_in_the_cache_is_read_without_a_download(cache: Path) -> None:
    wheel = put(cache, wheel_bytes("y = 2\n"))
    assert wheel_source(VERSION, MEMBER) == (f"{wheel.name}!{MEMBER}", "y = 2\n")


def test_a_wheel_is_downloaded_once_without_its_dependencies(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", pip_that_brings(wheel_bytes(), calls))
    assert wheel_source(VERSION, MEMBER) == wheel_source(VERSION, MEMBER)
    assert len(calls) == 1
    assert {"--no-deps", "--only-binary=:all:", f"transformer_engine=={VERSION}"} <= set(calls[0])
    assert sorted(path.suffix for path in cache.iterdir()) == [".sha256", ".whl"]


@pytest.mark.parametrize("version", ["garbage", "", "2.19.0; rm", "../2.19.0", "2.19.0/x", "2..1", "-r x", "2.19 "])
def test_what_is_no_release_number_is_refused_before_pip_sees_it(cache: Path, version: str) -> None:
    with pytest.raises(WheelError, match=r"is no release number; write it as te==2.19.0"):
        wheel_source(version, MEMBER)
    assert not cache.exists()


def test_a_release_that_cannot_be_downloaded_says_what_pip_said_and_what_to_do(cache: Path) -> None:
    with pytest.raises(WheelError) as caught:
        wheel_source("99.99.99", MEMBER)
    message = str(caught.value)
    assert "te==99.99.99 could not be downloaded: ERROR: No matching distribution" in message
    assert "HARNESS_CACHE" in message
    assert list(cache.iterdir()) == []


def test_pip_that_ends_well_and_brings_nothing_is_no_success(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 0, "", ""))
    with pytest.raises(WheelError, match=r"pip brought no wheel"):
        wheel_source(VERSION, MEMBER)


def test_a_known_release_with_another_hash_is_refused(cache: Path) -> None:
    content = wheel_bytes()
    wheel = put(cache, content, "2.19.0")
    with pytest.raises(WheelError) as caught:
        wheel_source("2.19.0", MEMBER)
    assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert KNOWN_SHA256["2.19.0"] in str(caught.value)
    assert str(wheel) in str(caught.value)


def test_a_downloaded_known_release_is_checked_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that_brings(wheel_bytes(), []))
    with pytest.raises(WheelError, match=r"is recorded"):
        wheel_source("2.20.2", MEMBER)


def test_the_hash_of_an_unknown_release_is_kept_on_first_use_and_checked_later(cache: Path) -> None:
    content = wheel_bytes("first = 1\n")
    wheel = put(cache, content)
    wheel_source(VERSION, MEMBER)
    record = wheel.with_suffix(".sha256")
    assert record.read_text().strip() == hashlib.sha256(content).hexdigest()
    wheel_source(VERSION, MEMBER)
    put(cache, wheel_bytes("second = 2\n"))
    with pytest.raises(WheelError, match=r"is recorded") as caught:
        wheel_source(VERSION, MEMBER)
    assert record.name in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a zip", wheel_bytes()[:-30]], ids=["empty", "text", "cut"])
def test_a_damaged_wheel_is_told_and_its_hash_is_not_kept(cache: Path, content: bytes) -> None:
    wheel = put(cache, content)
    with pytest.raises(WheelError, match=r"is damaged .*; delete it and run again"):
        wheel_source(VERSION, MEMBER)
    wheel.unlink()
    put(cache, wheel_bytes())  # what the message advises works
    assert wheel_source(VERSION, MEMBER)[1] == "x = 1\n"


def test_a_wheel_with_a_damaged_member_is_told(cache: Path) -> None:
    content = bytearray(wheel_bytes("x = 1\n" * 500))
    start = content.index(MEMBER.encode()) + len(MEMBER)
    content[start : start + 8] = b"\xff" * 8
    put(cache, bytes(content))
    with pytest.raises(WheelError, match=r"is damaged"):
        wheel_source(VERSION, MEMBER)


def test_a_wheel_whose_file_is_no_text_is_told(cache: Path) -> None:
    put(cache, wheel_bytes(b"\xff\xfe\x00"))
    with pytest.raises(WheelError, match=r"is damaged"):
        wheel_source(VERSION, MEMBER)


def test_a_wheel_without_the_file_is_told(cache: Path) -> None:
    put(cache, wheel_bytes(member="transformer_engine/other.py"))
    with pytest.raises(WheelError, match=rf"version={VERSION}: its wheel has no .*backends.py; try a newer release"):
        wheel_source(VERSION, MEMBER)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(WheelError, match=r"cannot be written: Not a directory. Set HARNESS_CACHE"):
        wheel_source(VERSION, MEMBER)


def test_a_hash_that_cannot_be_kept_is_told(cache: Path) -> None:
    wheel = put(cache, wheel_bytes())
    wheel.with_suffix(".sha256").mkdir()
    with pytest.raises(WheelError, match=r"cannot be used: .*Set HARNESS_CACHE"):
        wheel_source(VERSION, MEMBER)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HARNESS_CACHE", "/explicit")
    assert cache_folder() == Path("/explicit")
    monkeypatch.delenv("HARNESS_CACHE")
    assert cache_folder() == Path("/xdg/fused-attn-harness")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "fused-attn-harness"


def test_known_hashes_are_hashes_of_releases() -> None:
    assert all(len(digest) == 64 and int(digest, 16) for digest in KNOWN_SHA256.values())
    assert len(set(KNOWN_SHA256.values())) == len(KNOWN_SHA256)


@pytest.mark.network
def test_every_known_release_has_its_recorded_hash_and_the_file() -> None:
    for version in KNOWN_SHA256:
        resolved, text = wheels.wheel_source(version, MEMBER)
        assert resolved.endswith(f"!{MEMBER}")
        assert "class FusedAttnFunc" in text

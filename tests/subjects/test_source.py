"""Every kind of spec leads to one source or to one clear message."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from harness.subjects.source import BACKENDS, Source, SpecError, resolve

TEXT = "class FusedAttnFunc:\n    pass\n"


@pytest.mark.parametrize("spec", ["legacy", "refactored"])
def test_this_repositorys_implementations_are_found_by_name(spec: str) -> None:
    source = resolve(spec)
    assert source.resolved.endswith(f"{spec}_impl/backends.py")
    assert source.text == Path(source.resolved).read_text()
    assert source.name == "FusedAttnFunc"
    assert "class FusedAttnFunc" in source.text


@pytest.mark.network
def test_a_release_is_read_from_its_wheel() -> None:
    source = resolve("te==2.19.0")
    assert source.resolved == f"transformer_engine-2.19.0-py3-none-any.whl!{BACKENDS}"
    assert "class FusedAttnFunc" in source.text


def test_what_is_no_release_is_refused() -> None:
    with pytest.raises(SpecError, match=r"version='garbage' is no release number"):
        resolve("te==garbage")


def test_a_release_that_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")

    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(SpecError, match=r"te==99\.99\.99 could not be downloaded: ERROR: No matching"):
        resolve("te==99.99.99")


def test_te_without_transformer_engine_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"needs TransformerEngine installed here, and it is not.*te==VERSION"):
        resolve("te")


def test_te_is_the_installed_one_and_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / BACKENDS
    file.parent.mkdir(parents=True)
    file.write_text(TEXT)
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("te").resolved == str(file)
    assert "transformer_engine" not in sys.modules


def test_a_file_is_read_as_it_is_and_known_by_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TEXT)
    source = resolve(str(file))
    assert source == Source(str(file), str(file), TEXT)
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert source.describe() == {"spec": str(file), "resolved": str(file), "sha256": digest}


@pytest.mark.parametrize("name", ["mine.py", "mine"])
def test_a_file_in_the_working_folder_needs_no_slash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    assert resolve(name).resolved == str(tmp_path / name)


@pytest.mark.parametrize("inner", [BACKENDS, BACKENDS.removeprefix("transformer_engine/"), "backends.py"])
def test_a_package_folder_leads_to_its_backends(tmp_path: Path, inner: str) -> None:
    file = tmp_path / inner
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TEXT)
    assert resolve(str(tmp_path)).resolved == str(file)


def test_a_folder_without_backends_is_refused_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is a folder with no backends\.py; looked for .*Name the file itself"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("spec", ["missing.py", "no/such/file", "./missing", "a\0b/c.py", "x" * 5000 + ".py"])
def test_a_missing_file_is_refused(spec: str) -> None:
    with pytest.raises(SpecError, match=r"cannot be read: "):
        resolve(spec)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "backends.py"
    file.write_bytes(b"x = 1\n\xff\xfe")
    with pytest.raises(SpecError, match=r"is no Python source: not UTF-8 at byte 6"):
        resolve(str(file))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "made_up_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "fused.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_up_package", raising=False)
    return folder


def test_a_module_and_a_name_are_found_without_importing_the_module(package: Path) -> None:
    source = resolve("made_up_package.fused:MyFunc")
    assert (source.resolved, source.name) == (str(package / "fused.py"), "MyFunc")
    assert "made_up_package.fused" not in sys.modules


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("made_up_package.nothing:MyFunc", "is not installed as Python source"),
        ("no_such_package_here.fused:MyFunc", "cannot be found: ModuleNotFoundError"),
        ("math:MyFunc", "is not installed as Python source"),
        ("made_up_package.fused.deeper:MyFunc", "cannot be found: "),
    ],
)
def test_a_module_that_is_not_there_as_source_is_refused(package: Path, spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolve(spec)


def test_a_package_that_raises_when_imported_is_refused(package: Path) -> None:
    (package / "__init__.py").write_text("raise RuntimeError('broken package')\n")
    with pytest.raises(SpecError, match=r"cannot be found: RuntimeError: broken package"):
        resolve("made_up_package.fused:MyFunc")


@pytest.mark.parametrize("spec", ["legcy", "Legacy", "refactord"])
def test_an_unknown_word_is_refused_with_the_nearest_name(spec: str) -> None:
    near = "refactored" if spec.startswith("r") else "legacy"
    with pytest.raises(SpecError, match=rf"spec='{spec}' names no subject; did you mean .*'{near}'.*Use legacy, "):
        resolve(spec)


@pytest.mark.parametrize("spec", ["xyzzy", "te=2.19.0", "x" * 5000, "legacy:1", "a:b:c"])
def test_what_is_like_no_spec_is_refused_with_the_kinds_there_are(spec: str) -> None:
    with pytest.raises(SpecError, match=r"names no subject.*te==VERSION, a path to a file or a package folder"):
        resolve(spec)


def test_an_installed_package_of_this_project_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    with pytest.raises(SpecError, match=r"the package legacy_impl is not installed; install this project again"):
        resolve("legacy")
